"""min-p, top-k and top-p: which tokens may be chosen, exactly, without sorting the vocabulary.

All three work on ``scaled``, float32 ``[vocab]``: (logit - largest logit) / temperature, so that the largest is 0.
Where tokens tie at a border the lowest ids stay.
"""

from __future__ import annotations

import math

import numpy as np

_NUCLEUS_DEPTHS = (6.0, 12.0)
"""How far below the best token (nats) top-p looks before it takes the whole vocabulary: almost always the first is
enough.
"""


def truncate(
    scaled: np.ndarray, *, min_p: float, top_k: int, top_p: float, workspace: np.ndarray | None = None
) -> np.ndarray | None:
    """Ids that stay, ascending, int64; None when all do. Applied in the order min-p, top-k, top-p.

    ``workspace``, of the same shape, saves an allocation; it is overwritten.
    """
    ids: np.ndarray | None = None
    if min_p > 0.0:
        ids = np.flatnonzero(scaled >= np.float32(math.log(min_p)))
    if 0 < top_k < len(scaled):
        ids = _top_k(scaled, ids, top_k)
    if top_p < 1.0:
        ids = (
            _top_p_all(scaled, top_p, workspace)
            if ids is None
            else np.sort(_nucleus(scaled, ids, top_p, _total(scaled[ids])))
        )
    return ids


def _descending(scaled: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Ascending ids ordered by falling value, ties by rising id."""
    return ids[np.argsort(-scaled[ids], kind="stable")]


def _top_k(scaled: np.ndarray, ids: np.ndarray | None, k: int) -> np.ndarray:
    if ids is None:
        # The k-th largest of any k or more values is a lower bound of the k-th largest of all: columns' maxima are
        # cheap.
        width = max(k, 1024)
        rows = len(scaled) // width
        if rows > 1:
            maxima = scaled[: rows * width].reshape(rows, width).max(axis=0)
            ids = np.flatnonzero(scaled >= np.partition(maxima, width - k)[width - k])
        else:
            ids = np.arange(len(scaled))
    if len(ids) <= k:
        return ids
    return np.sort(_descending(scaled, ids)[:k])


def _total(values: np.ndarray, workspace: np.ndarray | None = None) -> float:
    return float(np.exp(values, out=workspace).sum())


def _top_p_all(scaled: np.ndarray, top_p: float, workspace: np.ndarray | None) -> np.ndarray:
    """Top-p over the whole vocabulary: sort only the candidates near the top, if they hold enough of the mass."""
    total = _total(scaled, workspace)
    for depth in _NUCLEUS_DEPTHS:
        kept = _nucleus(scaled, np.flatnonzero(scaled >= -depth), top_p, total, partial=True)
        if kept.size:
            return np.sort(kept)
    return np.sort(_nucleus(scaled, np.arange(len(scaled)), top_p, total))


def _nucleus(scaled: np.ndarray, ids: np.ndarray, top_p: float, total: float, *, partial: bool = False) -> np.ndarray:
    """The shortest prefix of ``ids`` by falling value whose mass reaches ``top_p * total``, always one token at least.

    ``partial`` says that ``ids`` may hold too little mass: then nothing is returned unless the border lies inside them.
    Sums run in the same order either way, so the result is that of a full sort to the last bit.
    """
    ordered = _descending(scaled, ids)
    mass = np.cumsum(np.exp(scaled[ordered]), dtype=np.float64)
    count = int(np.searchsorted(mass, top_p * total, side="left")) + 1
    if partial and count > len(ordered):
        return ordered[:0]
    return ordered[:count]
