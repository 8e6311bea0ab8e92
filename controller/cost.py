"""What a round costs: tables measured on this machine, read between their points, corrected while running."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

DRIFT_MEMORY = 40.0
"""Rounds over which drift is followed."""
_MAX_SURPRISE = 0.25
"""Most that one round may move the log of the correction's target: a single outlier is not drift."""


@dataclass(frozen=True, slots=True)
class CostTable:
    """Seconds of a target pass over rows and context, and of a draft over context.

    ``verify[r][c]``: a pass of ``rows[r]`` rows behind ``contexts[c]`` cached ones; never falls along either axis.
    ``draft[c]``: one block with a few rows to inject; ``inject_row``: each further row injected; ``other``: a
    round's rest.
    """

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    verify: tuple[tuple[float, ...], ...]
    draft: tuple[float, ...]
    inject_row: float
    other: float


class CostModel:
    """Reads a table at any rows and context, times a slowly moving correction for what else the machine is doing."""

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self._contexts = np.array(table.contexts, np.float64)
        grid = np.arange(1, max(table.rows) + 1)
        columns = np.array(table.verify)
        self._verify = np.stack(
            [np.interp(grid, table.rows, columns[:, c]) for c in range(len(self._contexts))], axis=1
        )
        self._drift = 0.0

    @property
    def drift(self) -> float:
        """How much slower (above 1) than the table the machine is now."""
        return math.exp(self._drift)

    def verify(self, max_rows: int, context: int) -> np.ndarray:
        """Seconds of passes of 1 to ``max_rows`` rows, float64; beyond the table by its last slope."""
        known = self._at(self._verify, context)
        if max_rows > len(known):
            step = known[-1] - known[-2] if len(known) > 1 else known[-1]
            known = np.concatenate([known, known[-1] + step * np.arange(1, max_rows - len(known) + 1)])
        result: np.ndarray = known[:max_rows] * self.drift
        return result

    def draft(self, context: int, pending: int) -> float:
        """Seconds of one block, ``pending`` rows injected on the way."""
        base = float(self._at(np.array(self.table.draft)[None, :], context)[0])
        return (base + self.table.inject_row * max(pending - 1, 0)) * self.drift

    def other(self) -> float:
        return self.table.other * self.drift

    def observe(self, rows: int, context: int, verify_s: float) -> None:
        """Learn what a pass cost."""
        expected = float(self.verify(rows, context)[-1]) / self.drift
        if verify_s <= 0.0 or expected <= 0.0:
            return
        surprise = math.log(verify_s / expected) - self._drift
        self._drift += max(-_MAX_SURPRISE, min(_MAX_SURPRISE, surprise)) / DRIFT_MEMORY * 2.0

    def _at(self, columns: np.ndarray, context: int) -> np.ndarray:
        """The table's column at a context, between its points, and beyond the last by the last slope."""
        points = self._contexts
        if len(points) == 1:
            only: np.ndarray = columns[:, 0]
            return only
        right = int(np.clip(np.searchsorted(points, context), 1, len(points) - 1))
        share = max((context - points[right - 1]) / (points[right] - points[right - 1]), 0.0)
        left = columns[:, right - 1]
        between: np.ndarray = left + share * (columns[:, right] - left)
        return between


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
