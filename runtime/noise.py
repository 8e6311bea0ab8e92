"""Gumbel noise as a pure function of (seed, position, token id), cheap for one token and for the whole vocabulary.

The target's choice at a position is ``argmax(score + g)`` with ``g`` Gumbel noise, which samples from
``softmax(score)`` (the Gumbel-max trick). As the noise depends on nothing else, drafter and target share it, and a
choice is the same whatever was drafted (Gumbel coupling, Daliri et al. 2024).

With ``E = exp(-g)``, exponential of rate 1, ids are put into groups of 32 and each group's noise is made top down:
the least of n exponentials is exponential of rate n, its place is uniform, and the others exceed it by exponentials
of rate 1 (memorylessness). So ``E = least(group) + (0 at the chosen place, else an exponential of its own)``:
exactly independent exponentials, where the loudest noise of a group is known without making the group. That gives
`winner` an exact bound with which it looks at a few groups only.

Bits come from SplitMix64 (Steele et al. 2014) used as a counter-based generator, noise is float64 throughout.
"""

from __future__ import annotations

import numpy as np

GROUPS = 2048
"""Groups in a span of ids; neighbours in a group are this far apart, so that a group's maximum is a column maximum."""
MEMBERS = 32
SPAN = GROUPS * MEMBERS
_MEMBER_OFFSETS = np.arange(0, SPAN, GROUPS)

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_GROUP_STREAM, _MEMBER_STREAM = 1, 2
_FIRST = 24
"""Groups looked at first: a call of numpy costs more than a few hundred ids, its caches being cold after a pass."""
_SLACK = 1e-9
"""Covers the rounding of log in the bound, which is far smaller."""


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)


def _bits(key: int, counters: np.ndarray) -> np.ndarray:
    """64 random bits for each counter, uint64."""
    x = counters * np.uint64(_GOLDEN)
    x += np.uint64(key)
    x ^= x >> np.uint64(30)
    x *= np.uint64(_MIX_1)
    x ^= x >> np.uint64(27)
    x *= np.uint64(_MIX_2)
    x ^= x >> np.uint64(31)
    return x


def _exponential(bits: np.ndarray) -> np.ndarray:
    """Positive float64 exponentials of rate 1 from the upper 52 bits: one bit more would round up to a uniform of 1."""
    uniform = (bits >> np.uint64(12)).astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-52
    exponential: np.ndarray = -np.log(uniform)
    return exponential


class PositionNoise:
    """The noise of one position: `at` for some ids, `winner` for the best of a whole vocabulary's scores."""

    def __init__(self, seed: int, position: int, vocab_size: int) -> None:
        base = _mix((_mix(seed) + position * _GOLDEN) & _MASK)
        self._group_key, self._member_key = _mix(base ^ _GROUP_STREAM), _mix(base ^ _MEMBER_STREAM)
        self._vocab_size = vocab_size
        self._loudest: np.ndarray | None = None

    def at(self, ids: np.ndarray) -> np.ndarray:
        """Noise of these token ids, float64, in the same order."""
        ids = np.ascontiguousarray(ids, np.int64)
        group_bits = _bits(self._group_key, (ids // SPAN * GROUPS + ids % GROUPS).astype(np.uint64))
        own = _exponential(_bits(self._member_key, ids.astype(np.uint64)))
        own[_place(group_bits) == ids // GROUPS % MEMBERS] = 0.0
        own += _exponential(group_bits) / MEMBERS
        noise: np.ndarray = -np.log(own)
        return noise

    def winner(self, logits: np.ndarray, temperature: float) -> int:
        """``argmax(logits / temperature + noise)`` over the whole vocabulary, ties to the lowest id.

        ``logits`` float32 ``[vocab]``. Makes noise only for the groups whose largest logit and loudest noise together
        could win: a few promising ones first, then whatever their best leaves possible, which is hardly ever anything.
        """
        loudest = self._loudest_of_groups()
        bound = _group_max(logits, len(loudest)) / temperature + loudest
        first = min(_FIRST, len(bound))
        groups = np.argpartition(bound, -first)[-first:]
        winner, best = self._best_of(groups, logits, temperature)
        possible = bound >= best - _SLACK
        if np.count_nonzero(possible) > np.count_nonzero(possible[groups]):
            winner, _ = self._best_of(np.flatnonzero(possible), logits, temperature)
        return winner

    def winner_among(self, ids: np.ndarray, scores: np.ndarray) -> int:
        """The id with the largest ``score + noise``, ties to the lowest id; ``scores`` float64, one per id."""
        return self._pick(ids, scores)[0]

    def _loudest_of_groups(self) -> np.ndarray:
        """The largest noise in each group, float64; made once, when a whole vocabulary is first asked for."""
        if self._loudest is None:
            spans, rest = divmod(self._vocab_size, SPAN)
            groups = np.arange(spans * GROUPS + min(rest, GROUPS), dtype=np.uint64)  # those that have a member
            self._loudest = -np.log(_exponential(_bits(self._group_key, groups)) / MEMBERS)
        return self._loudest

    def _best_of(self, groups: np.ndarray, logits: np.ndarray, temperature: float) -> tuple[int, float]:
        """The best id of these groups, and its score, noise added."""
        ids = ((groups // GROUPS * SPAN + groups % GROUPS)[:, None] + _MEMBER_OFFSETS).ravel()
        ids = ids[ids < self._vocab_size]
        return self._pick(ids, logits[ids].astype(np.float64) / temperature)

    def _pick(self, ids: np.ndarray, scores: np.ndarray) -> tuple[int, float]:
        perturbed = scores + self.at(ids)
        best = perturbed.max()
        return int(ids[perturbed == best].min()), float(best)


def _place(group_bits: np.ndarray) -> np.ndarray:
    """Which member of its group has the loudest noise: bits that the exponential does not use."""
    return (group_bits & np.uint64(MEMBERS - 1)).astype(np.int64)


def _group_max(logits: np.ndarray, num_groups: int) -> np.ndarray:
    """Largest logit of each group, float64 ``[num_groups]``; groups beyond the vocabulary get -inf."""
    out = np.full(num_groups, -np.inf)
    for span, start in enumerate(range(0, len(logits), SPAN)):
        part = logits[start : start + SPAN]
        columns = out[span * GROUPS : (span + 1) * GROUPS]
        whole = len(part) // GROUPS
        if whole:
            columns[:] = part[: whole * GROUPS].reshape(whole, GROUPS).max(axis=0)
        rest = part[whole * GROUPS :]
        np.maximum(columns[: len(rest)], rest, out=columns[: len(rest)])
    return out
