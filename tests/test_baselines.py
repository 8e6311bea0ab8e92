"""The rules of other engines do what their names say, so that what adaptive is measured against is the real thing."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from benchmarks.synthetic import INT8
from dflash_ort.controller.baselines import HillClimb, Oracle, StepRatio, Threshold
from dflash_ort.controller.cost import CostModel
from dflash_ort.controller.fixed import FixedLength
from dflash_ort.controller.protocol import DraftOrder, RoundState
from dflash_ort.records import Draft, RequestRound, RoundRecord


def block(probability: float, length: int = 5, *, request: int = 1) -> Draft:
    return Draft(request, 0, (0,) * length, (math.log(probability),) * length, kind="dflash")


def test_threshold_stops_at_the_first_doubt() -> None:
    rule = Threshold(0.4)
    logs = tuple(math.log(p) for p in (0.9, 0.5, 0.39, 0.9))
    assert rule.plan([Draft(1, 0, (1, 2, 3, 4), logs, kind="dflash")]).lengths == {1: 2}
    assert rule.plan([Draft(1, 0, (1, 2), (math.log(0.39),) * 2, kind="dflash")]).lengths == {1: 0}
    assert rule.plan([Draft(1, 0, tuple(range(10)), match_length=4, kind="ngram")]).lengths == {1: 10}, (
        "lookups have no probabilities"
    )
    assert Threshold(0.0).plan([block(1e-9)]).lengths == {1: 5}


@pytest.mark.parametrize(("length", "expected"), [(0, 0), (2, 2), (9, 5), (None, 5)])
def test_fixed_lengths_are_fixed(length: int | None, expected: int) -> None:
    rule = FixedLength(length)
    assert rule.choose(RoundState(1, 9, 1, 9, {"dflash": 5}), None).limit == (expected if expected else 0)
    assert rule.plan([block(0.01)]).lengths == {1: expected}


def test_hill_climb_goes_on_while_throughput_rises_and_turns_round() -> None:
    rule, visited = HillClimb(window=4, most=5), []
    for _ in range(30):
        for _ in range(4):
            length = rule.choose(RoundState(1, 9, 1, 99, {"dflash": 5}), None).limit
            tokens = 1 + min(length, 3)  # up to three drafts are right, each costs a tenth of a pass
            part = RequestRound(1, length, length, tokens - 1, tokens, 9, kind="dflash")
            rule.observe(RoundRecord(0, (part,), 0.0, 1.0 + 0.1 * length, 0.0, 0.0, length + 1, 1))
        visited.append(length)
    assert visited[:3] == [1, 2, 3]
    assert all(abs(a - b) <= 1 for a, b in itertools.pairwise(visited))
    assert set(visited[6:]) <= {2, 3, 4}


def test_step_ratio_maximises_its_own_ratio_and_always_drafts() -> None:
    rule = StepRatio(CostModel(INT8))
    for probability in (0.01, 0.3, 0.9, 0.99):
        order = rule.choose(RoundState(1, 100, 2, 99, {"dflash": 5}), None)
        assert order == DraftOrder("dflash", 5)
        draft = block(probability)
        length = rule.plan([draft]).lengths[1]
        survival = [1.0, *rule.hazards["dflash"].survival(1, draft)]
        costs = CostModel(INT8)
        fixed = costs.draft(100, 2) + costs.other()
        ratios = [sum(survival[: n + 1]) / (fixed + costs.verify(n + 1, 100)[-1]) for n in range(6)]
        assert length == int(np.argmax(ratios))


def test_the_oracle_verifies_what_will_be_accepted() -> None:
    rule = Oracle({1: 3, 2: 9})
    assert rule.choose(RoundState(1, 9, 1, 9, {"dflash": 5}), None) == DraftOrder("dflash", 5)
    assert rule.plan([block(0.5), block(0.5, request=2)]).lengths == {1: 3, 2: 5}
