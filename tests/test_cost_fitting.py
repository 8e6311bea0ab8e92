"""Cost tables fitted to logged rounds: the truth comes back through noise and outliers, and never falls."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from dflash_ort.controller.cost import CostModel, CostTable
from dflash_ort.controller.cost_fitting import FEWEST_ROUNDS, RoundCost, fit_costs
from dflash_ort.errors import PolicyError

ROWS = tuple(range(1, 17))
CONTEXTS = (64, 256, 512, 1024, 2048)
INJECT, OTHER, AFTER = 2e-4, 3e-4, 2e-3


def staircase(rows: float, context: float) -> float:
    """A stair every four rows, and attention over the context."""
    return 0.020 * (1.0 + 0.35 * math.ceil(rows / 4)) + rows * context * 4e-7 + context * 4e-6


def block(context: float) -> float:
    return 0.006 + 2e-6 * context


TRUTH = CostTable(
    ROWS,
    CONTEXTS,
    tuple(tuple(staircase(r, c) for c in CONTEXTS) for r in ROWS),
    tuple(block(c) for c in CONTEXTS),
    INJECT,
    OTHER,
    AFTER,
)


def logged(
    count: int,
    seed: int,
    *,
    noise: float = 0.15,
    outliers: float = 0.03,
    slowness: float = 1.0,
    rows: Callable[[np.random.Generator], int] = lambda rng: int(min(rng.geometric(0.2), 16)),
    contexts: tuple[int, int] = (64, 1500),
    after: float = AFTER,
    step: float = 0.0,
) -> list[RoundCost]:
    """Rounds as production has them: short lengths far more often than long ones, a block drafted before most."""
    rng = np.random.default_rng(seed)

    def clock(seconds: float) -> float:
        factor = max(1.0 + noise * rng.standard_normal(), 0.3) * slowness
        return seconds * factor * (5.0 if rng.random() < outliers else 1.0)

    rounds = []
    for _ in range(count):
        n, context = rows(rng), int(rng.integers(*contexts, endpoint=True))
        drafted, pending = bool(rng.random() < 0.7), int(rng.choice([1, 2, 3, 5, 120], p=[0.3, 0.3, 0.2, 0.15, 0.05]))
        drafts = int(rng.integers(1, 16))
        draft_s = clock(block(context) + INJECT * (pending - 1) + step * (drafts - 1)) if drafted else 0.0
        verify_s = clock(staircase(n, context) + after * drafted)
        rounds.append(RoundCost(n, context, verify_s, draft_s, pending, clock(OTHER), drafted, drafts))
    return rounds


def errors(table: CostTable, contexts: tuple[int, ...], *, most: int = 16, slowness: float = 1.0) -> np.ndarray:
    """Relative error of passes of 1 to ``most`` rows, ``[contexts, most]``."""
    model = CostModel(table)
    truth = np.array([[staircase(r, c) * slowness for r in range(1, most + 1)] for c in contexts])
    return np.array([model.passes(most, c) for c in contexts]) / truth - 1.0


def assert_never_falls(table: CostTable) -> None:
    passes = np.array(table.verify)
    assert (np.diff(passes, axis=0) >= 0.0).all()
    assert (np.diff(passes, axis=1) >= 0.0).all()
    assert (np.diff(table.draft) >= 0.0).all()
    assert passes.shape == (len(table.rows), len(table.contexts))
    assert table.rows[0] == 1


@pytest.mark.parametrize("seed", range(3))
def test_a_staircase_comes_back_through_noise_and_outliers(seed: int) -> None:
    table = fit_costs(logged(12_000, seed))
    found = errors(table, (150, 400, 800, 1300))
    assert np.abs(found).mean() < 0.02
    assert np.abs(found).max() < 0.08
    assert_never_falls(table)
    stairs = np.diff(CostModel(table).passes(16, 400))
    assert stairs[[3, 7, 11]].min() > 5 * np.median(np.delete(stairs, [3, 7, 11])), "stairs, not a slope"
    assert table.draft[0] == pytest.approx(block(table.contexts[0]), rel=0.04)
    assert table.inject_row == pytest.approx(INJECT, rel=0.05)
    assert table.other == pytest.approx(OTHER, rel=0.03)
    assert table.after_draft == pytest.approx(AFTER, rel=0.35)


@pytest.mark.parametrize("seed", range(3))
def test_a_slower_machine_shows_on_rows_and_contexts_that_were_never_seen(seed: int) -> None:
    """The base's shape is kept where nothing was logged, at the pace that was."""
    rounds = logged(1500, seed, slowness=1.4, rows=lambda rng: int(rng.integers(1, 7)), contexts=(64, 400), after=0.0)
    table = fit_costs(rounds, replace(TRUTH, after_draft=0.0))
    assert table.rows == ROWS
    assert table.contexts == CONTEXTS
    found = errors(table, CONTEXTS, slowness=1.4)
    assert np.abs(found).max() < 0.07
    assert_never_falls(table)
    assert table.draft == pytest.approx([1.4 * x for x in TRUTH.draft], rel=0.06)


@pytest.mark.parametrize("seed", range(3))
def test_few_rounds_leave_the_base_nearly_as_it_was(seed: int) -> None:
    """Noise in a handful of rounds is not taken for what the machine costs."""
    assert np.abs(errors(fit_costs(logged(150, seed), TRUTH), CONTEXTS)).mean() < 0.05


def test_without_a_base_unseen_rows_lie_between_their_neighbours() -> None:
    rounds = logged(3000, 0, rows=lambda rng: int(rng.choice([2, 3, 9])), contexts=(100, 100))
    table = fit_costs(rounds)
    assert table.rows == (1, 2, 3, 9)
    assert table.contexts == (100,)
    passes = CostModel(table).passes(9, 100)
    assert passes[0] == pytest.approx(passes[1], rel=0.05), "no cheaper than what is known"
    assert passes[2] < passes[5] < passes[8]


def test_long_rounds_in_short_contexts_only_do_not_make_long_contexts_cheap() -> None:
    """Cells that no round fell in are filled by what rows and contexts add, not by the nearest cell."""
    short = logged(4000, 1, contexts=(64, 200))
    long = logged(4000, 2, contexts=(1000, 1100), rows=lambda rng: int(rng.integers(1, 5)))
    found = errors(fit_costs(short + long), (1050,))
    assert np.abs(found).max() < 0.12


def test_what_a_draft_does_to_the_pass_after_it() -> None:
    always = [replace(one, drafted=True, draft_s=0.006) for one in logged(400, 3)]
    assert fit_costs(always).after_draft == 0.0, "no round to compare with"
    assert fit_costs(always, TRUTH).after_draft == pytest.approx(AFTER, rel=0.1), "the base's, at this pace"
    none = fit_costs(logged(8000, 4, after=0.0))
    assert none.after_draft < 8e-4
    many = fit_costs(logged(8000, 5, after=8e-3), TRUTH)
    assert many.after_draft == pytest.approx(8e-3, rel=0.1)
    assert np.abs(errors(many, (200, 900))).max() < 0.08, "the pass itself is not charged with it"


def test_drafts_made_one_after_the_other_are_paid_for_each() -> None:
    table = fit_costs(logged(6000, 6, step=1e-3))
    assert table.draft_step == pytest.approx(1e-3, rel=0.05)
    assert table.draft[0] == pytest.approx(block(table.contexts[0]), rel=0.06)
    assert fit_costs(logged(1000, 7), TRUTH).draft_step == 0.0


def test_rounds_without_drafts_take_the_drafts_seconds_from_the_base() -> None:
    plain = [replace(one, drafted=False, draft_s=0.0) for one in logged(500, 8, after=0.0, slowness=2.0)]
    table = fit_costs(plain, TRUTH)
    assert table.draft == pytest.approx([2.0 * x for x in TRUTH.draft], rel=0.05)
    assert table.inject_row == pytest.approx(2.0 * INJECT, rel=0.05)
    assert fit_costs(plain).draft == (0.0,) * len(fit_costs(plain).contexts)


def test_too_little_is_refused_in_one_line() -> None:
    rounds = logged(FEWEST_ROUNDS, 9)
    with pytest.raises(PolicyError, match=r"^99 rounds are too few to fit costs to; at least 100 are needed$"):
        fit_costs(rounds[1:])
    broken = [replace(one, verify_s=seconds) for one in rounds for seconds in (math.nan, 0.0, math.inf)]
    with pytest.raises(PolicyError, match=r"^0 rounds are too few"):
        fit_costs(broken)
    strewn = [replace(one, rows=1 + i % 20, context=50 * (i // 20)) for i, one in enumerate(rounds)]
    with pytest.raises(PolicyError, match=r"^no length has rounds enough"):
        fit_costs(strewn)
    fit_costs(strewn, TRUTH)
    alike = [replace(one, rows=1) for one in rounds]
    with pytest.raises(PolicyError, match="do not show what rows cost"):
        fit_costs(alike)
    assert fit_costs(alike, TRUTH).rows == ROWS
    assert fit_costs(rounds + broken) == fit_costs(rounds)
