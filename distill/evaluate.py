"""How a drafter would do in the engine: rounds walked over dialogues that the target has answered greedily already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from dflash_ort.distill.batches import Hidden, make_batch
from dflash_ort.distill.dialogues import Dialogue
from dflash_ort.distill.loss import Objective
from dflash_ort.distill.model import Drafter
from dflash_ort.runtime.graph_io import Array

_ANCHORS = 128
"""Blocks drafted at once."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Whole blocks, greedy: tokens committed per round, and the share of rounds in which at least 1, 2, ... drafts were
    accepted.

    ``suites``: acceptance length of each suite of prompts.
    """

    acceptance_length: float
    survival: tuple[float, ...]
    rounds: int
    dialogues: int
    suites: dict[str, float]


@dataclass(slots=True)
class _Counts:
    rounds: int = 0
    committed: int = 0
    accepted: list[int] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        return self.committed / max(self.rounds, 1)


@torch.no_grad()
def evaluate(
    drafter: Drafter,
    objective: Objective,
    dialogues: Sequence[Dialogue],
    hidden: Hidden,
    embeddings: Array,
    device: str = "cpu",
) -> Acceptance:
    """Walk the answers of dialogues as the engine would have gone through them.

    A dialogue's answers are what the target says, so a draft is accepted when it is the token that stands there.
    Prefill gives an answer's first token; each round then commits the drafts that agree and one more.
    """
    total, suites = _Counts(), dict[str, _Counts]()
    for dialogue in dialogues:
        suite = suites.setdefault(dialogue.suite, _Counts())
        for start, end in dialogue.spans:
            if end - start < 2:
                continue
            places = np.arange(max(start, 1), end - 1)
            agreed = np.concatenate(
                [
                    _agreed(drafter, objective, dialogue, piece, end, hidden, embeddings, device)
                    for piece in np.array_split(places, -(-len(places) // _ANCHORS))
                ]
            )
            for counts in (total, suite):
                _walk(counts, agreed, int(places[0]), end)
    accepted = np.array(total.accepted or [0])
    return Acceptance(
        acceptance_length=total.acceptance_length,
        survival=tuple(float(np.mean(accepted >= i)) for i in range(1, drafter.shape.num_drafts + 1)),
        rounds=total.rounds,
        dialogues=len(dialogues),
        suites={name: counts.acceptance_length for name, counts in sorted(suites.items()) if counts.rounds},
    )


def _agreed(
    drafter: Drafter,
    objective: Objective,
    dialogue: Dialogue,
    anchors: Array,
    end: int,
    hidden: Hidden,
    embeddings: Array,
    device: str,
) -> Array:
    """How many drafts behind each anchor are the answer's own tokens, int64 ``[anchors]``."""
    batch = make_batch([dialogue], [anchors], hidden, embeddings, drafter.shape.num_drafts, device)
    # A draft counts only where those before it are the answer's tokens, so these are what it would have followed.
    drafted = objective.draft(drafter(batch.pack, batch.previous))
    inside = anchors[:, None] + np.arange(1, drafter.shape.num_drafts + 1) < end
    same = (drafted == batch.tokens.cpu().numpy()) & inside
    counts: Array = np.cumprod(same, axis=1).sum(axis=1)
    return counts


def _walk(counts: _Counts, agreed: Array, start: int, end: int) -> None:
    place = start
    while place < end - 1:
        accepted = int(agreed[place - start])
        committed = min(accepted + 1, end - 1 - place)
        counts.accepted.append(accepted)
        counts.rounds += 1
        counts.committed += committed
        place += committed
