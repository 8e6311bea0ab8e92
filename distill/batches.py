"""Training batches: random dialogues, random anchors in them, and what each block should have drafted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from dflash_ort.distill.dialogues import Dialogue
from dflash_ort.distill.model import Pack, pack_of
from dflash_ort.runtime.graph_io import Array

Hidden = Callable[[Dialogue], Array]
"""Tapped states of a dialogue, ``[tokens, taps * hidden_size]``."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A pack, and for every draft of its blocks, ``[anchors, num_drafts]``: the ``tokens`` that stand there (int64, ids
    of the target), whether any does (``known``), and the row of the pack whose next token it is (``before``).

    ``previous``: embeddings of the tokens before the drafts, float32 ``[anchors, num_drafts, hidden_size]``.
    """

    pack: Pack
    previous: Tensor
    tokens: Tensor
    known: Tensor
    before: Tensor


def make_batch(
    dialogues: Sequence[Dialogue],
    anchors: Sequence[Array],
    hidden: Hidden,
    embeddings: Array,
    num_drafts: int,
    device: str = "cpu",
) -> Batch:
    """A batch of these anchors (int64, 1 or more) of these dialogues; ``embeddings`` are the target's, all of them."""
    ids = [np.asarray(dialogue.ids, np.int64) for dialogue in dialogues]
    pack = pack_of(
        [hidden(dialogue) for dialogue in dialogues],
        anchors,
        [embeddings[tokens[places]] for tokens, places in zip(ids, anchors, strict=True)],
        device,
    )
    ahead = np.arange(1, num_drafts + 1)
    drafted = [places[:, None] + ahead for places in anchors]
    ends = [len(tokens) - 1 for tokens in ids]
    within = [np.minimum(places, end) for places, end in zip(drafted, ends, strict=True)]
    tokens = np.concatenate([own[places] for own, places in zip(ids, within, strict=True)])
    known = np.concatenate([places <= end for places, end in zip(drafted, ends, strict=True)])
    before = np.concatenate([start + places - 1 for start, places in zip(pack.starts, within, strict=True)])
    previous = np.concatenate([embeddings[own[places - 1]] for own, places in zip(ids, within, strict=True)])
    arrays = (previous.astype(np.float32, copy=False), tokens, known, before)
    return Batch(pack, *(torch.from_numpy(array).to(device) for array in arrays))


class Batches:
    """Draws batches. Dialogues are alike, anchors in answers (places whose next token the target chose) count 1, others
    ``prompt_weight``, and those in the text that all dialogues begin with, a system prompt, not at all.
    """

    def __init__(
        self,
        dialogues: Sequence[Dialogue],
        hidden: Hidden,
        embeddings: Array,
        *,
        per_step: int,
        anchors: int,
        prompt_weight: float,
        rng: np.random.Generator,
        device: str = "cpu",
    ) -> None:
        prefix = common_prefix(dialogues)
        weights = [anchor_weights(dialogue, prefix, prompt_weight) for dialogue in dialogues]
        self._dialogues = [(d, w / w.sum()) for d, w in zip(dialogues, weights, strict=True) if w.sum() > 0]
        self._hidden, self._embeddings, self._device = hidden, embeddings, device
        self._per_step, self._anchors, self.rng = per_step, anchors, rng

    def __len__(self) -> int:
        """Dialogues that have anchors."""
        return len(self._dialogues)

    def draw(self, num_drafts: int) -> Batch:
        chosen = [self._dialogues[i] for i in self.rng.integers(0, len(self._dialogues), self._per_step)]
        anchors = [self._anchors_of(shares) for _, shares in chosen]
        dialogues = [dialogue for dialogue, _ in chosen]
        return make_batch(dialogues, anchors, self._hidden, self._embeddings, num_drafts, self._device)

    def _anchors_of(self, shares: Array) -> Array:
        count = min(self._anchors, int(np.count_nonzero(shares)))
        return np.sort(self.rng.choice(len(shares), count, replace=False, p=shares))


def anchor_weights(dialogue: Dialogue, prefix: int, prompt_weight: float) -> Array:
    """How often each place is an anchor, relative to others, float64 ``[tokens]``."""
    weights = np.full(len(dialogue.ids), prompt_weight)
    weights[:prefix] = 0.0
    for start, end in dialogue.spans:
        weights[start - 1 : end - 1] = 1.0
    weights[0] = weights[-1] = 0.0
    return weights


def common_prefix(dialogues: Sequence[Dialogue]) -> int:
    """How many tokens all dialogues begin with; none are common to a single one."""
    if len(dialogues) < 2:
        return 0
    columns = zip(*(dialogue.ids for dialogue in dialogues), strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
