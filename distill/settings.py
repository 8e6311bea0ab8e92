"""What a training run is told, and the defaults for a target."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from dflash_ort.errors import RequestError
from dflash_ort.exporter.checkpoint import DrafterExtensions

EXTENDED = DrafterExtensions(next_token=True, context_start=True, slot_embeddings=True, markov_head=True)
"""All extensions of z-lab's format, which learn first positions from less data."""
_TAPS = (0.3, 0.57, 0.8)
"""Places of the middle taps, as shares of the target's depth."""


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """One run. Either ``steps`` or ``seconds`` ends it, and the learning rate falls over it as a half cosine.

    What makes the drafter: ``depth`` layers, blocks of ``block_size`` slots, at most ``vocabulary`` draft tokens,
    ``taps``, ``extensions``. Raises RequestError for what cannot be.
    """

    taps: tuple[int, ...]
    steps: int | None = None
    seconds: float | None = None
    depth: int = 3
    block_size: int = 5
    vocabulary: int = 8192
    extensions: DrafterExtensions = EXTENDED
    learning_rate: float = 2e-3
    muon: float | None = None
    """Learning rate of Muon for the matrices; None trains everything with AdamW."""
    weight_decay: float = 0.0
    warm_up: int = 20
    """Steps over which the learning rate rises."""
    final_rate: float = 0.05
    """What of the learning rate is left at the end."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    short_blocks: float = 0.5
    """Share of the run in which blocks have two drafts only: all later ones build on those, and more blocks fit."""
    dialogues: int = 4
    """A step."""
    anchors: int = 128
    """A dialogue and step, at most."""
    prompt_weight: float = 0.075
    """How often a place outside answers is an anchor, against one in them."""
    decay: float = 3.0
    """A draft ``i`` places ahead of the first weighs ``exp(-i / decay)``."""
    token_weight: float = 0.0
    """Of cross-entropy with the tokens, beside that with the target's distribution."""
    noise: float = 0.2
    """On what is seen of the target in training, in the taps' own scales: a hundred thousand tokens are soon learnt by
    heart (EAGLE, arXiv 2401.15077, does the same)."""
    evaluations: int = 16
    """Over the run, on ``held_out`` dialogues."""
    held_out: int = 24
    patience: int = 6
    """Evaluations without a better one after which it ends early, those of short blocks left out."""
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise RequestError("a training run is given either steps or seconds")
        if not self.taps or len(set(self.taps)) < len(self.taps):
            raise RequestError(f"the taps are {list(self.taps)}; expected one layer or more, each once")
        whole = ("depth", "vocabulary", "dialogues", "anchors", "evaluations", "held_out", "patience", "warm_up")
        for name in (*whole, "decay", "learning_rate", "clip"):
            if getattr(self, name) <= 0:
                raise RequestError(f"{name} is {getattr(self, name)}; expected a positive number")
        if self.extensions.num_drafts(self.block_size) < 1:
            raise RequestError(f"block_size is {self.block_size}; such a block drafts nothing")

    def as_json(self) -> dict[str, Any]:
        """As plain JSON values, to be stored and compared."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return values


def default_taps(num_layers: int, depth: int) -> tuple[int, ...]:
    """The layers to tap of a target of ``num_layers``: an early one, some between, the one below those that are
    borrowed, and the last, whose residual stream knows most of what comes next.
    """
    middle = (round(share * num_layers) for share in _TAPS)
    taps = (1, *middle, num_layers - depth - 1, num_layers - 1)
    return tuple(sorted({min(max(tap, 0), num_layers - 1) for tap in taps}))
