"""The acceptance rule: the longest prefix of the drafts that equals the target's own choices, and one choice more."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflash_ort.runtime.sampler import Sampler


def accept(drafts: Sequence[int], logits: np.ndarray, greedy: np.ndarray, sampler: Sampler) -> list[int]:
    """The tokens a round commits, before any cut: accepted drafts, then the target's choice after them.

    Row ``i`` of ``logits`` (float32 ``[len(drafts) + 1, vocab]``) and ``greedy`` (int64 ``[len(drafts) + 1]``)
    follows draft ``i - 1``; row 0 follows the last committed token. Rows are sampled in order and no further than
    the first mismatch. The sampler's history ends behind the returned tokens.
    """
    chosen: list[int] = []
    for row in range(len(drafts) + 1):
        token = int(greedy[row]) if sampler.takes_argmax else sampler.choose(logits[row])
        sampler.commit(token)
        chosen.append(token)
        if row < len(drafts) and drafts[row] != token:
            break
    return chosen
