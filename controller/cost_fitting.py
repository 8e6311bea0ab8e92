"""Fits a cost table to the seconds of logged rounds, which nobody arranged: lengths as they were chosen, contexts as
they came, other processes in between.

With a table to start from (``base``), what is fitted is how many times its seconds rounds took, which varies slowly
over rows and contexts even where the seconds are a staircase; without one, the seconds themselves. Medians within a
cell of rows and contexts make outliers harmless; cells that no round fell in are filled by ``log t = a(rows) +
b(context)``, fitted to the others (two-way fit; Tukey 1977).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dflash_ort.controller.cost import CostModel, CostTable, monotone
from dflash_ort.controller.fitting import Floats, Ints
from dflash_ort.errors import PolicyError

FEWEST_ROUNDS = 100
_FEWEST_OF_CELL = 5
"""Rounds of a cell whose median is used; of a number of rows that gets a row of its own in the table."""
_FEWEST_PAIRS = 20
"""Rounds with, and as many without, a block just before, from which its after-effect is told."""
_TRUST_IN_FILL, _TRUST_IN_BASE = 10.0, 30.0
"""Rounds that the two-way fit counts for beside a cell's own median, and the base's shape beside the two-way fit."""
_MOST_CONTEXTS = 6
_LEAST_SPREAD = 8
"""Between the fewest and the most rows to inject, or drafts, from which a row's or a draft's price is told."""


@dataclass(frozen=True, slots=True)
class RoundCost:
    """One round's rows (all requests'), tokens in the cache, rows to inject, and seconds; whether a block was drafted
    just before the target's pass, by a drafter that costs time, and how many drafts were made of it.
    """

    rows: int
    context: int
    verify_s: float
    draft_s: float
    pending: int
    other_s: float
    drafted: bool
    drafts: int = 1


def fit_costs(rounds: Iterable[RoundCost], base: CostTable | None = None) -> CostTable:
    """A table in seconds, monotone along rows and contexts, on ``base``'s contexts or, without it, the rounds' own.

    What rounds do not show is ``base``'s, in proportion to how much slower they were than it; without one, nothing.
    Rounds with no seconds of a target pass are passed over. Raises `PolicyError` where fewer than `FEWEST_ROUNDS`
    are left, or where, without ``base``, all have the same number of rows or no two are alike enough for a median.
    """
    kept = [one for one in rounds if one.rows >= 1 and math.isfinite(one.verify_s) and one.verify_s > 0.0]
    if len(kept) < FEWEST_ROUNDS:
        raise PolicyError(f"{len(kept)} rounds are too few to fit costs to; at least {FEWEST_ROUNDS} are needed")
    rows, context = (np.array([getattr(one, name) for one in kept], np.int64) for name in ("rows", "context"))
    verify, other = (np.array([getattr(one, name) for one in kept], np.float64) for name in ("verify_s", "other_s"))
    drafted = np.array([one.drafted for one in kept], bool)
    axis, counts = np.unique(rows, return_counts=True)
    axis = axis[counts >= _FEWEST_OF_CELL]
    if base is None:
        if len(axis) < 2:
            raise PolicyError("rounds with the same number of rows do not show what rows cost; vary the length")
        contexts, reference, unknown = _contexts(context), np.ones(len(kept)), 0.0
    else:
        expected = _table_seconds(base, rows, context) + base.after_draft * drafted
        base = _scaled(base, float(np.median(verify / expected)))
        contexts, reference = np.array(base.contexts, np.int64), _table_seconds(base, rows, context)
        unknown = base.after_draft
    axis = np.union1d(axis, [1] if base is None else base.rows).astype(np.int64)
    bucket = _nearest(contexts, context)
    after_draft = _after_draft(verify, reference, drafted, rows * len(contexts) + bucket, unknown)
    ratios = (verify - after_draft * drafted) / reference
    cells = _cells(axis, len(contexts), rows, bucket, ratios, _TRUST_IN_BASE if base is not None else 0.0)
    if base is not None:
        cells = cells * np.stack([_table_seconds(base, axis, np.full(len(axis), c)) for c in contexts], axis=1)
    draft, inject_row, draft_step = _draft([one for one in kept if one.drafted], contexts, base)
    axes = tuple(axis.tolist()), tuple(contexts.tolist())
    rest = float(np.median(other)), after_draft, draft_step
    return CostTable(*axes, monotone(cells.tolist()), draft, inject_row, *rest)


def _scaled(table: CostTable, factor: float) -> CostTable:
    return replace(
        table,
        verify=tuple(tuple(factor * seconds for seconds in row) for row in table.verify),
        draft=tuple(factor * seconds for seconds in table.draft),
        inject_row=factor * table.inject_row,
        after_draft=factor * table.after_draft,
        draft_step=factor * table.draft_step,
    )


def _table_seconds(table: CostTable, rows: Ints, contexts: Ints) -> Floats:
    """Seconds of passes according to a table, ``[rounds]``."""
    model, most = CostModel(table), int(rows.max())
    known = {c: model.passes(most, c) for c in set(contexts.tolist())}
    return np.array([known[c][r - 1] for r, c in zip(rows.tolist(), contexts.tolist(), strict=True)])


def _contexts(context: Ints) -> Ints:
    """Middles of equally filled ranges of contexts."""
    count = min(_MOST_CONTEXTS, len(context) // FEWEST_ROUNDS + 1)
    return np.unique(np.quantile(context, (np.arange(count) + 0.5) / count).astype(np.int64))


def _nearest(contexts: Ints, context: Ints) -> Ints:
    """Index of the table's context nearest to each round's."""
    return np.searchsorted((contexts[1:] + contexts[:-1]) / 2.0, context).astype(np.int64)


def _after_draft(verify: Floats, reference: Floats, drafted: NDArray[np.bool_], cell: Ints, unknown: float) -> float:
    """Seconds that a block just before adds to a pass: the mean, over cells with rounds of both sorts, of the
    difference of their medians; ``unknown`` where there are too few.
    """
    total, weight = 0.0, 0
    for one in np.unique(cell[drafted]):
        with_, without = (np.flatnonzero((cell == one) & (drafted == sort)) for sort in (True, False))
        pairs = min(len(with_), len(without))
        if pairs >= _FEWEST_OF_CELL:
            # Over the reference, so that differing contexts within the cell are not taken for the draft's doing.
            ratio = np.median(verify[with_] / reference[with_]) - np.median(verify[without] / reference[without])
            total += pairs * float(ratio * np.median(reference[cell == one]))
            weight += pairs
    return max(total / weight, 0.0) if weight >= _FEWEST_PAIRS else unknown


def _cells(axis: Ints, width: int, rows: Ints, bucket: Ints, ratios: Floats, held: float) -> Floats:
    """Medians of ``ratios``, ``[axis, width]``, held to the two-way fit, which ``held`` more rounds of each number of
    rows and each context hold to 1.
    """
    logs, counts = np.zeros((len(axis), width)), np.zeros((len(axis), width))
    for r, rows_here in enumerate(axis):
        for c in range(width):
            here = ratios[(rows == rows_here) & (bucket == c)]
            if len(here) >= _FEWEST_OF_CELL:
                logs[r, c], counts[r, c] = math.log(max(float(np.median(here)), 1e-9)), len(here)
    by_rows, by_context = np.zeros(len(axis)), np.zeros(width)
    if not counts.any() and not held:
        raise PolicyError("no length has rounds enough at similar contexts to fit costs to; log more rounds")
    of_rows, of_context = counts.sum(axis=1), counts.sum(axis=0)
    for _ in range(50):
        by_rows = _filled(axis, (counts * (logs - by_context)).sum(axis=1), of_rows, held)
        by_context = _filled(np.arange(width), (counts * (logs - by_rows[:, None])).sum(axis=0), of_context, held)
    fill = by_rows[:, None] + by_context
    return np.exp((counts * logs + _TRUST_IN_FILL * fill) / (counts + _TRUST_IN_FILL))


def _filled(places: Ints, sums: Floats, counts: Floats, held: float = 0.0) -> Floats:
    """Means, and where there is nothing to average, what lies between the neighbours; beyond the last, the last."""
    known = counts > 0
    if not known.any():
        return np.zeros(len(places))
    return np.interp(places, places[known], sums[known] / (counts[known] + held))


def _draft(rounds: list[RoundCost], contexts: Ints, base: CostTable | None) -> tuple[tuple[float, ...], float, float]:
    """Seconds of a block at each context, of each further row injected and of each further draft: least absolute
    deviations, relative to the seconds expected, by reweighting. A price whose count hardly varied is ``base``'s.
    """
    prices = (base.inject_row, base.draft_step) if base is not None else (0.0, 0.0)
    rounds = [one for one in rounds if math.isfinite(one.draft_s) and one.draft_s > 0.0]
    if len(rounds) < _FEWEST_PAIRS:
        return (base.draft if base is not None else (0.0,) * len(contexts), *prices)
    bucket = _nearest(contexts, context := np.array([one.context for one in rounds], np.int64))
    extra = np.maximum(np.array([(one.pending - 1, one.drafts - 1) for one in rounds], np.float64), 0.0)
    told = np.ptp(extra, axis=0) >= _LEAST_SPREAD
    if base is not None and base.draft_step == 0.0:
        told[1] = False  # a drafter known to make all of a block in one pass
    known = np.where(told, 0.0, prices)
    seconds = np.array([one.draft_s for one in rounds]) - extra @ known
    shape = np.ones(len(contexts)) if base is None or min(base.draft) <= 0.0 else np.array(base.draft)
    design = np.zeros((len(rounds), len(contexts)))
    design[np.arange(len(rounds)), bucket] = np.interp(context, contexts, shape)
    solution = _least_absolute(np.hstack([design, extra * told]), seconds)
    counts = np.bincount(bucket, minlength=len(contexts)).astype(np.float64)
    factors = _filled(np.arange(len(contexts)), counts * solution[:-2], counts)
    draft = tuple(max(block, 0.0) for (block,) in monotone((factors * shape)[:, None].tolist()))
    inject_row, draft_step = np.maximum(known + solution[-2:], 0.0).tolist()
    return draft, inject_row, draft_step


def _least_absolute(design: Floats, target: Floats) -> Floats:
    """Coefficients with the least sum of relative deviations (iteratively reweighted least squares)."""
    weights = np.ones(len(target))
    for _ in range(30):
        solution = np.linalg.lstsq(design * weights[:, None], target * weights, rcond=None)[0].astype(np.float64)
        fitted = np.maximum(design @ solution, 1e-3 * np.median(target))
        relative = np.abs(target - design @ solution) / fitted
        weights = (1.0 / (fitted * np.sqrt(np.maximum(relative, 1e-3)))).astype(np.float64)
    return solution
