"""What a round costs: tables measured on this machine, read between their points, corrected while running."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from dflash_ort.records import RoundRecord

DRIFT_MEMORY = 12.0
"""Rounds over which drift is followed."""
_MAX_SURPRISE = 0.3
"""Most that one round may add to drift's log, before it is spread: a single outlier is not drift."""


@dataclass(frozen=True, slots=True)
class CostTable:
    """Seconds of a target pass over rows and context, and of a draft over context.

    ``verify[r][c]``: a pass of ``rows[r]`` rows behind ``contexts[c]`` cached ones; never falls along either axis.
    ``draft[c]``: one block with a row to inject and one draft made of it; ``inject_row``: each further row injected;
    ``draft_step``: each further draft, where they are made one after the other (a Markov head); ``other``: a round's
    rest; ``after_draft``: how much longer the target's pass takes when a block was drafted just before, since the
    drafter's weights have taken the place of its own in the processor's caches.
    """

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    verify: tuple[tuple[float, ...], ...]
    draft: tuple[float, ...]
    inject_row: float
    other: float
    after_draft: float = 0.0
    draft_step: float = 0.0

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> CostTable:
        """A table from plain JSON values; raises KeyError, TypeError, OverflowError or ValueError when it is none."""
        rows, contexts = (tuple(int(x) for x in raw[name]) for name in ("rows", "contexts"))
        verify = tuple(tuple(float(x) for x in line) for line in raw["verify"])
        draft = tuple(float(x) for x in raw["draft"])
        rest = [float(raw[name]) for name in ("inject_row", "other", "after_draft", "draft_step")]
        passes = [seconds for line in verify for seconds in line]
        numbers = np.array([*passes, *draft, *rest], np.float64)
        if not (
            len(verify) == len(rows)
            and all(len(line) == len(contexts) for line in verify)
            and len(draft) == len(contexts) > 0
            and rows[:1] == (1,)
            and all(a < b for axis in (rows, contexts) for a, b in pairwise(axis))
            and np.isfinite(numbers).all()
            and (numbers >= 0.0).all()
            and min(passes) > 0.0
        ):
            raise ValueError("shapes or numbers that cannot be")
        return CostTable(rows, contexts, verify, draft, *rest)


class CostModel:
    """Reads a table at any rows and context, and follows how much slower than it the machine is now.

    What slows everything alike changes no decision, so those are made in the table's seconds (`passes`, `block`);
    `verify`, `draft` and `other` are what the clock would show now.
    """

    def __init__(self, table: CostTable) -> None:
        self.table = table
        grid = np.arange(1, max(table.rows) + 1)
        columns = np.array(table.verify, np.float64)
        self._passes = [np.interp(grid, table.rows, columns[:, c]).tolist() for c in range(len(table.contexts))]
        self._drift = 0.0
        self._other, self._sampling = table.other, 0.0

    @property
    def drift(self) -> float:
        """How much slower (above 1) than the table the machine is now."""
        return math.exp(self._drift)

    def passes(self, max_rows: int, context: int) -> list[float]:
        """Table seconds of passes of 1 to ``max_rows`` rows; beyond the table by the slope of its last half."""
        left, share = self._place(context)
        first = self._passes[left]
        if share:
            second = self._passes[left + 1]
            known = [a + share * (b - a) for a, b in zip(first[:max_rows], second, strict=False)]
        else:
            known = first[:max_rows]
        if max_rows > len(known):
            last, middle = known[-1], (len(known) - 1) // 2
            step = (last - known[middle]) / (len(known) - 1 - middle) if len(known) > 1 else last
            known.extend(last + step * extra for extra in range(1, max_rows - len(known) + 1))
        return known

    def one_pass(self, rows: int, context: int) -> float:
        """The last of `passes`, to the bit, at a part of its price."""
        left, share = self._place(context)
        first = self._passes[left]
        if rows > len(first):
            return self.passes(rows, context)[-1]
        seconds = first[rows - 1]
        return seconds + share * (self._passes[left + 1][rows - 1] - seconds) if share else seconds

    def block(self, context: int, pending: int = 1, drafts: int = 1) -> float:
        """Table seconds of drafting a block: ``pending`` rows injected on the way, ``drafts`` made of it."""
        table = self.table
        left, share = self._place(context)
        seconds = table.draft[left]
        if share:
            seconds += share * (table.draft[left + 1] - seconds)
        if pending > 1:
            seconds += table.inject_row * (pending - 1)
        return seconds + table.draft_step * (drafts - 1) if drafts > 1 else seconds

    def verify(self, max_rows: int, context: int) -> list[float]:
        """Seconds of passes of 1 to ``max_rows`` rows."""
        drift = self.drift
        return [seconds * drift for seconds in self.passes(max_rows, context)]

    def draft(self, context: int, pending: int, drafts: int = 1) -> float:
        """Seconds of a block, as in `block`."""
        return self.block(context, pending, drafts) * self.drift

    def other(self) -> float:
        """Seconds of a round's rest, without sampling."""
        return self._other

    def sampling(self) -> float:
        """Seconds of a round's sampling."""
        return self._sampling

    def observe(self, record: RoundRecord, *, after_draft: bool = False) -> float:
        """Learn what a round cost; ``after_draft``: a block was drafted just before the pass.

        Returns how many times the table's seconds its pass took: the drift of this round alone.
        """
        context = max((part.context_length for part in record.requests), default=0)
        expected = self.one_pass(record.total_rows, context) + after_draft * self.table.after_draft
        if record.verify_s <= 0.0 or expected <= 0.0:
            return self.drift
        slowness = record.verify_s / expected
        surprise = math.log(slowness) - self._drift
        self._drift += max(-_MAX_SURPRISE, min(_MAX_SURPRISE, surprise)) / DRIFT_MEMORY
        self._other = _towards(self._other, record.other_s)
        self._sampling = _towards(self._sampling, record.sample_s)
        return slowness

    def _place(self, context: int) -> tuple[int, float]:
        """The table's column left of a context, and how far towards the next it lies; beyond the last by its slope."""
        points = self.table.contexts
        if context <= points[0] or len(points) == 1:
            return 0, 0.0
        left = min(bisect_right(points, context), len(points) - 1) - 1
        return left, (context - points[left]) / (points[left + 1] - points[left])


def _towards(mean: float, value: float) -> float:
    """A mean of recent values that one outlier moves little."""
    return mean + (min(value, 3.0 * mean + 1e-3) - mean) / DRIFT_MEMORY


def monotone(seconds: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    """Make measured seconds non-decreasing along both axes (more rows, more context: never cheaper but for noise).

    Pools neighbours that are out of order into their mean along rows, then takes running maxima along contexts.
    """
    table = np.array(seconds, np.float64)
    for column in range(table.shape[1]):
        table[:, column] = _pool(table[:, column])
    np.maximum.accumulate(table, axis=1, out=table)
    np.maximum.accumulate(table, axis=0, out=table)
    return tuple(tuple(float(x) for x in row) for row in table)


def _pool(values: np.ndarray) -> np.ndarray:
    """Isotonic regression by pooling adjacent violators."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        mean, count = float(value), 1
        while blocks and blocks[-1][0] > mean:
            last, size = blocks.pop()
            mean, count = (last * size + mean * count) / (size + count), size + count
        blocks.append((mean, count))
    return np.concatenate([np.full(count, mean) for mean, count in blocks])
