"""The statistics of a benchmark: ratios of totals with paired bootstrap intervals, percentiles, survival curves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio and its interval, None where fewer than two prompts were measured."""

    value: float | None
    interval: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Totals:
    """Something over something else, prompt by prompt: tokens over seconds, say."""

    over: Sequence[float]
    under: Sequence[float]


def rate(totals: Totals) -> float | None:
    """Sum over sum; None where there is nothing to divide by."""
    under = sum(totals.under)
    return sum(totals.over) / under if under > 0 else None


def paired_ratio(mine: Totals, other: Totals, *, seed: int, resamples: int = RESAMPLES) -> Ratio:
    """``rate(mine) / rate(other)``, with a percentile interval from resampling prompts, both sides together.

    Prompts differ far more from each other than the two sides do on one prompt, so pairs are what is drawn (Efron and
    Tibshirani 1993, chapter 13). The seed makes the interval reproducible.
    """
    columns = np.array([mine.over, mine.under, other.over, other.under], np.float64)
    value = _ratio(columns.sum(axis=1))
    count = columns.shape[1]
    if value is None or count < 2:
        return Ratio(value, None)
    drawn = np.random.default_rng(seed).integers(0, count, (resamples, count))
    sums = columns[:, drawn].sum(axis=2)
    usable = sums[:, (sums > 0).all(axis=0)]
    if usable.shape[1] < resamples / 2:
        return Ratio(value, None)
    tail = (1.0 - CONFIDENCE) / 2.0
    low, high = np.quantile(usable[0] / usable[1] / (usable[2] / usable[3]), [tail, 1.0 - tail])
    return Ratio(value, (float(low), float(high)))


def _ratio(sums: np.ndarray) -> float | None:
    return float(sums[0] / sums[1] / (sums[2] / sums[3])) if (sums > 0).all() else None


def median(values: Iterable[float]) -> float | None:
    """None for no values."""
    known = list(values)
    return float(np.median(known)) if known else None


def percentiles(values: Sequence[float], points: Sequence[int] = (50, 95, 99)) -> dict[str, float] | None:
    """By name, ``p50`` and so on; None for no values."""
    if not values:
        return None
    found = np.percentile(np.array(values, np.float64), points)
    return {f"p{point}": float(value) for point, value in zip(points, found, strict=True)}


def spread(values: Sequence[float]) -> float | None:
    """Highest minus lowest, over the median; None for fewer than two values, or a median of zero."""
    middle = median(values)
    return (max(values) - min(values)) / middle if middle and len(values) > 1 else None


def survival(rounds: Iterable[tuple[int, int]], *, least: int = 5) -> tuple[list[float], list[int]]:
    """S(i), the chance that at least i drafts are accepted, i = 1, 2, ..., from (verified, accepted) of each round.

    A product of hazards (Kaplan and Meier 1958): a round whose drafts were all accepted says nothing of what would
    have come behind. Positions reached by fewer than ``least`` rounds are left out. Also the number of rounds that
    each position was reached by.
    """
    reached: list[int] = []
    accepted: list[int] = []
    for verified, right in rounds:
        while len(reached) < verified:
            reached.append(0)
            accepted.append(0)
        for i in range(min(right + 1, verified)):
            reached[i] += 1
            accepted[i] += i < right
    curve: list[float] = []
    for seen, right in zip(reached, accepted, strict=True):
        if seen < least:
            break
        curve.append((curve[-1] if curve else 1.0) * right / seen)
    return curve, reached[: len(curve)]
