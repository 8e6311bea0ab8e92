"""Searches the constants of the adaptive controller by replay, and judges what was found on requests it never saw."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_ort.controller.adaptive import Adaptive
from dflash_ort.controller.cost import CostModel, CostTable
from dflash_ort.controller.judge import best_fixed, by_suite, figures, judge, kinds_for, speed_ratio, total
from dflash_ort.controller.names import make_controller
from dflash_ort.controller.policy import AdaptiveSettings, Policy
from dflash_ort.controller.replay import Outcome, TableClock, replay
from dflash_ort.controller.replay_fast import clairvoyant_seconds
from dflash_ort.controller.trace import TracedText

Floats = NDArray[np.float64]

GRIDS: dict[str, tuple[float, ...]] = {
    "first_value": (0.05, 0.1, 0.2, 0.4, 0.8),
    "cautious_length": (1, 2, 3, 4, 6, 8),
    "optimism": (0.0, 0.5, 1.0, 1.5, 2.0),
    "prior_blocks": (1.0, 2.0, 4.0, 8.0),
    "value_memory": (3.0, 6.0, 12.0, 24.0),
    "rate_memory": (7.0, 15.0, 30.0, 60.0),
    "first_retry": (6, 12, 24, 48),
    "most_for_tries": (0.003, 0.006, 0.011, 0.022, 0.05),
    "injection_horizon": (6, 12, 24, 48, 96),
    "tokens_per_use": (2.0, 4.0, 8.0, 16.0),
}
"""What is searched, those that matter most first; the current value is a point of its grid, too."""
LEAST_RATIO, LEAST_LOW_END = 1.0, 0.995
"""A tuned policy is better if its speed is above the first times the current one's, its interval's lower end above the
second.
"""
_LEAST_GAIN = 0.001
"""Share of the seconds by which a change must be faster; and, as many are tried on the same texts,"""
_STANDARD_ERRORS = 1.64
"""of its gain over texts, too."""
_PASSES = 3
_MOST_ANCHORS, _ONE_ORDER_FROM = 60_000, 8_000
"""Texts beyond so many anchors are not searched on; with fewer than the second, each trial is made in two orders."""


@dataclass(frozen=True, slots=True)
class Found:
    """The best policy of a search. ``seconds``: of the start and of the best, over the texts and orders searched.

    ``ended``: "done" where no step was better, else "budget" or "trials".
    """

    policy: Policy
    trials: int
    seconds: tuple[float, float]
    ended: str

    def changes(self, start: AdaptiveSettings) -> dict[str, list[float]]:
        """Names of the settings that differ from ``start``'s, with both values."""
        pairs = {name: [getattr(start, name), getattr(self.policy.settings, name)] for name in GRIDS}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


class _SearchEndError(Exception):
    """The budget or the trials are used up."""


class _Search:
    """The best policy so far, and its seconds, ``[texts]``."""

    def __init__(
        self,
        start: Policy,
        texts: Sequence[TracedText],
        table: CostTable,
        most: int | None,
        expired: Callable[[], bool],
        seed: int,
    ) -> None:
        self._texts, self._table, self._most, self._expired = texts, table, most, expired
        few = sum(text.num_anchors for text in texts) < _ONE_ORDER_FROM
        shuffled = np.random.default_rng(seed).permutation(len(texts))
        self._orders = [np.arange(len(texts)), *([shuffled] if few else [])]
        self.best, self.seconds = start, np.zeros(len(texts))
        self.trials = 0

    def try_(self, policy: Policy) -> Floats:
        """Its seconds, over all orders. Raises `_SearchEndError`."""
        if self._most is not None and self.trials >= self._most:
            raise _SearchEndError("trials")
        seconds, clock = np.zeros(len(self._texts)), TableClock(self._table)
        for order in self._orders:
            controller = Adaptive(CostModel(self._table), policy)
            for number in order.tolist():
                if self._expired():
                    raise _SearchEndError("budget")
                text = self._texts[number]
                seconds[number] += replay(controller, text, list(text.proposals), clock, number).seconds
        self.trials += 1
        return seconds

    def prefer(self, policy: Policy) -> bool:
        """Whether it is faster than the best so far, and is that now."""
        seconds = self.try_(policy)
        gains = self.seconds - seconds
        error = _STANDARD_ERRORS * math.sqrt(len(gains)) * float(gains.std(ddof=1)) if len(gains) > 1 else 0.0
        if gains.sum() <= max(_LEAST_GAIN * float(self.seconds.sum()), error):
            return False
        self.best, self.seconds = policy, seconds
        return True

    def along(self, name: str) -> bool:
        """Step along one setting's grid, up or else down, as far as that is faster."""
        moved = False
        for step in (1, -1):
            while (policy := _stepped(self.best, name, step)) is not None and self.prefer(policy):
                moved = True
            if moved:
                break
        return moved


def search(
    start: Policy,
    others: Sequence[Policy],
    texts: Sequence[TracedText],
    table: CostTable,
    *,
    most: int | None = None,
    expired: Callable[[], bool] = lambda: False,
    seed: int = 0,
) -> Found:
    """The fastest policy on these texts that steps along `GRIDS` lead to, one setting after the other.

    ``others``: policies that may be better than ``start`` to set out from. The texts are answered in a fixed order,
    as the controller learns from each for the next. At most ``most`` policies are tried, and none once ``expired``;
    the same calls give the same policy where it never is.
    """
    anchors = sum(text.num_anchors for text in texts)
    run = _Search(start, texts[:: max(1, math.ceil(anchors / _MOST_ANCHORS))], table, most, expired, seed)
    first, ended = run.seconds, "done"
    try:
        first = run.seconds = run.try_(start)
        for policy in others:
            run.prefer(policy)
        for _ in range(_PASSES):
            moved = [run.along(name) for name in GRIDS]
            if not any(moved):
                break
    except _SearchEndError as end:
        ended = str(end)
    return Found(run.best, run.trials, (float(first.sum()), float(run.seconds.sum())), ended)


def _stepped(policy: Policy, name: str, step: int) -> Policy | None:
    """The policy with one setting at its grid's next point, None beyond the end."""
    value = getattr(policy.settings, name)
    grid = sorted({*GRIDS[name], value})
    at = grid.index(value) + step
    if not 0 <= at < len(grid):
        return None
    return replace(policy, settings=replace(policy.settings, **{name: type(value)(grid[at])}))


def is_better(ratio: float, interval: Sequence[float]) -> bool:
    """Whether a speed over the current policy's, and its 95% interval, are enough to replace it."""
    return ratio > LEAST_RATIO and interval[0] > LEAST_LOW_END


def compare(
    policies: Mapping[str, Policy], training: Sequence[TracedText], held_out: Sequence[TracedText], table: CostTable
) -> dict[str, Any]:
    """Policies on held-out texts as plain values, beside what needs no tuning: plain decoding, the fixed length that
    was best in training, overall and by suite, the one that is best of each held-out suite, and the bound.

    The first of ``policies`` is the one judged: ``ratios`` are its speed over each other's, with a 95% interval.
    """
    outcomes, known = dict[str, list[Outcome]](), dict[int, list[Outcome]]()
    for name, policy in policies.items():
        if id(policy) not in known:
            controller = Adaptive(CostModel(table), policy)
            known[id(policy)] = judge(controller, kinds_for(controller, "auto", held_out), held_out, table)
        outcomes[name] = known[id(policy)]
    plain = outcomes["off"] = _fixed("off", held_out, table)
    choice = best_fixed(training, table).name
    outcomes["best fixed"] = _fixed(choice, held_out, table)
    suites, trained = by_suite(held_out), by_suite(training)
    by_training = {
        suite: best_fixed([training[n] for n in trained[suite]], table).name if suite in trained else choice
        for suite in suites
    }
    oracle = {suite: best_fixed([held_out[n] for n in numbers], table).name for suite, numbers in suites.items()}
    outcomes["best fixed by suite"] = _by_suite(by_training, suites, held_out, table)
    outcomes["oracle by suite"] = _by_suite(oracle, suites, held_out, table)
    bound = clairvoyant_seconds(held_out, table)
    judged = next(iter(policies))
    ratios = {}
    for name in outcomes:
        if name != judged:
            ratio, interval = speed_ratio(outcomes[judged], outcomes[name])
            ratios[name] = {"ratio": ratio, "interval": list(interval)}
    return {
        "policies": [
            {
                "policy": name,
                **figures(found, plain),
                "suites": {s: figures([found[n] for n in ns], [plain[n] for n in ns]) for s, ns in suites.items()},
            }
            for name, found in outcomes.items()
        ],
        "ratios": ratios,
        "chosen": {"best fixed": choice, "best fixed by suite": by_training, "oracle by suite": oracle},
        "bound": {
            "seconds": float(bound.sum()),
            "speedup": total(plain).seconds / float(bound.sum()),
            "suites": {suite: float(bound[numbers].sum()) for suite, numbers in suites.items()},
        },
    }


def _fixed(label: str, texts: Sequence[TracedText], table: CostTable) -> list[Outcome]:
    """Outcomes of a fixed length as `best_fixed` names it."""
    kind, _, name = label.rpartition("@")
    # Where some texts lack the drafter, they are decoded plainly.
    kinds = [kind] if kind and all(kind in text.proposals for text in texts) else []
    if kind and not kinds:
        return [_fixed(label if kind in text.proposals else "off", [text], table)[0] for text in texts]
    return judge(make_controller(name, table), kinds, texts, table)


def _by_suite(
    labels: Mapping[str, str], suites: Mapping[str, Sequence[int]], texts: Sequence[TracedText], table: CostTable
) -> list[Outcome]:
    found = [Outcome()] * len(texts)
    for suite, numbers in suites.items():
        for number, outcome in zip(numbers, _fixed(labels[suite], [texts[n] for n in numbers], table), strict=True):
            found[number] = outcome
    return found
