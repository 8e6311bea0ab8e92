"""What every controller, and every estimator inside one, has to do: the same suite for all of them."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from benchmarks.synthetic import FP32, INT8
from dflash_ort.controller.acceptance import GENERIC_PRIORS, HazardModel
from dflash_ort.controller.adaptive import Adaptive
from dflash_ort.controller.baselines import HillClimb, Oracle, StepRatio, Threshold
from dflash_ort.controller.cost import CostModel
from dflash_ort.controller.fixed import FixedLength
from dflash_ort.controller.names import make_controller
from dflash_ort.controller.policy import GENERIC_POLICY
from dflash_ort.controller.protocol import PLAIN, Controller, DraftOrder, RoundState
from dflash_ort.errors import PolicyError
from dflash_ort.records import Draft, RequestRound, RoundRecord

NAMES = ("adaptive", "off", "fixed:1", "fixed:3", "fixed:max", "threshold:0.5", "hill-climb", "step-ratio")
LIMITS = {"ngram": 10, "dflash": 5}

controllers = pytest.mark.parametrize("name", NAMES)


class Rounds:
    """Feeds a controller rounds of random drafts and outcomes, and keeps what it decided."""

    def __init__(self, controller: Controller, seed: int = 0) -> None:
        self.controller, self.rng = controller, np.random.default_rng(seed)
        self.decisions: list[tuple[Any, ...]] = []

    def run(self, request_id: int, count: int = 1, *, draws: bool = False, context: int = 50) -> None:
        """Some rounds of a request."""
        for _ in range(count):
            rng = self.rng
            room = int(rng.integers(0, 12))
            limits = {kind: min(most, room) for kind, most in LIMITS.items()}
            match = int(rng.integers(0, 6))
            tokens = tuple(rng.integers(0, 99, limits["ngram"]).tolist()) if match else ()
            lookup = Draft(request_id, 7, tokens, match_length=match, kind="ngram")
            state = RoundState(request_id, context, int(rng.integers(0, 300)), room + 1, limits, draws)
            order = self.controller.choose(state, lookup if limits["ngram"] else None)
            draft, agreed = _draft(order, lookup, rng), int(rng.integers(0, 6))
            self.finish([draft], [agreed], context)
            self.decisions[-1] = (order, *self.decisions[-1])
            context += 1 + agreed

    def finish(self, drafts: Sequence[Draft], agreed: Sequence[int], context: int) -> None:
        """Plan, check what must hold of every plan, and tell the outcome."""
        plan = self.controller.plan(drafts)
        parts = []
        for draft, right in zip(drafts, agreed, strict=True):
            length = plan.lengths[draft.request_id]
            assert isinstance(length, int)
            assert 0 <= length <= len(draft.token_ids)
            accepted = min(length, right)
            parts.append(
                RequestRound(
                    draft.request_id, len(draft.token_ids), length, accepted, accepted + 1, context, draft.log_probs,
                    draft.match_length, draft.kind,
                )
            )  # fmt: skip
        rows = sum(p.num_verified + 1 for p in parts)
        seconds = FP32.verify[min(rows, 16) - 1][0] * float(self.rng.uniform(0.9, 1.2))
        drafting = 1.7e-3 if any(d.kind == "dflash" for d in drafts) else 2e-5
        self.controller.observe(RoundRecord(0, tuple(parts), drafting, seconds, 1e-5, 1e-4, rows, 3))
        self.decisions.append((plan.lengths, plan.predicted_committed, plan.predicted_seconds))


def _draft(order: DraftOrder, lookup: Draft, rng: np.random.Generator) -> Draft:
    if order.limit < 1:
        return Draft(lookup.request_id, 7)
    if order.kind == "ngram":
        return lookup
    logs = np.log(rng.uniform(0.01, 1.0, order.limit)).tolist()
    return Draft(lookup.request_id, 7, tuple(range(order.limit)), tuple(logs), kind=order.kind)


def decisions(controller: Controller, seed: int = 0) -> list[tuple[Any, ...]]:
    """What it decides over three requests' rounds, interleaved, one of them sampled."""
    rounds = Rounds(controller, seed)
    for _ in range(40):
        for request in (1, 2, 3):
            rounds.run(request, draws=request == 3)
    controller.forget(2)
    rounds.run(2, 10)
    return rounds.decisions


@controllers
def test_the_same_rounds_give_the_same_decisions(name: str) -> None:
    assert decisions(make_controller(name, FP32)) == decisions(make_controller(name, FP32))


@controllers
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))], ids=["deepcopy", "pickle"])
def test_a_copy_decides_alike_and_apart(name: str, clone: Callable[[Controller], Controller]) -> None:
    """In the middle of requests too; and what one learns afterwards the other does not."""
    controller = make_controller(name, INT8)
    decisions(controller)
    copied, witness = clone(controller), clone(controller)
    decisions(copied, seed=1)
    assert decisions(controller, seed=2) == decisions(witness, seed=2)


@controllers
def test_requests_leave_nothing_behind(name: str) -> None:
    controller = make_controller(name, FP32)
    sizes = []
    for first in (0, 2000):
        rounds = Rounds(controller)
        for request in range(first, first + 2000 if first else 20):
            rounds.run(request, 4 if request < 2020 else 1, draws=request % 2 == 1)
            controller.forget(request)
            controller.forget(request)  # the end of a stream and of its last round both say so
        sizes.append(_containers(controller))
    assert sizes[0] == sizes[1]


def _containers(thing: Any, seen: set[int] | None = None) -> int:
    """How many entries all containers below an object hold."""
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(thing, (str, bytes, int, float, type(None), type)):
        return 0
    seen.add(id(thing))
    if isinstance(thing, dict):
        return len(thing) + sum(_containers(x, seen) for x in thing.values())
    if isinstance(thing, (list, tuple, set)):
        return len(thing) + sum(_containers(x, seen) for x in thing)
    slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
    held = {name: getattr(thing, name) for name in slots if hasattr(thing, name)} | getattr(thing, "__dict__", {})
    return sum(_containers(value, seen) for value in held.values())


ODD_DRAFTS = {
    "nothing": Draft(1, 7),
    "nothing of a kind": Draft(1, 7, kind="dflash"),
    "an empty lookup": Draft(1, 7, match_length=0, kind="ngram"),
    "one token": Draft(1, 7, (3,), (-0.1,), kind="dflash"),
    "no probabilities": Draft(1, 7, (3, 4, 5), kind="dflash"),
    "fewer probabilities than tokens": Draft(1, 7, (3, 4, 5), (-0.5,), kind="dflash"),
    "certain": Draft(1, 7, (3, 4, 5), (0.0, 0.0, 0.0), kind="dflash"),
    "impossible": Draft(1, 7, (3, 4, 5), (-50.0, -1e9, -math.inf), kind="dflash"),
    "a long match": Draft(1, 7, tuple(range(10)), match_length=100_000, kind="ngram"),
    "a long block": Draft(1, 7, tuple(range(31)), (-0.01,) * 31, kind="dflash"),
}


@controllers
@pytest.mark.parametrize("odd", ODD_DRAFTS)
@pytest.mark.parametrize("agreed", [0, 2, 99])
def test_any_draft_gets_a_legal_length(name: str, odd: str, agreed: int) -> None:
    rounds = Rounds(make_controller(name, FP32))
    for _ in range(60):
        state = RoundState(1, 40, 2, 99, LIMITS)
        order = rounds.controller.choose(state, None)
        assert order.kind == PLAIN or 0 < order.limit <= LIMITS[order.kind]
        rounds.finish([ODD_DRAFTS[odd]], [agreed], 40)
        for _, committed, seconds in rounds.decisions:
            assert committed is None or (committed >= 1.0 and math.isfinite(committed))
            assert seconds is None or 0.0 < seconds < 10.0
    rounds.controller.forget(1)


@controllers
def test_nobody_is_asked_where_there_is_no_room(name: str) -> None:
    controller = make_controller(name, FP32)
    for limits in ({}, {"dflash": 0}, {"ngram": 0, "dflash": 0}):
        order = controller.choose(RoundState(5, 40, 2, 1, limits), None)
        assert order.kind == PLAIN or order.limit == 0
        assert controller.plan([Draft(5, 7)]).lengths == {5: 0}


@controllers
def test_a_plan_for_several_requests_names_each(name: str) -> None:
    rounds = Rounds(make_controller(name, FP32))
    drafts = []
    for request in range(5):
        order = rounds.controller.choose(RoundState(request, 40 + request, 2, 99, LIMITS), None)
        drafts.append(_draft(order, Draft(request, 7), rounds.rng))
    for _ in range(30):
        rounds.finish(drafts, [3, 0, 1, 0, 2], 40)
    assert list(rounds.decisions[-1][0]) == [0, 1, 2, 3, 4]


@controllers
def test_clocks_that_stand_still_or_leap_do_no_harm(name: str) -> None:
    controller = make_controller(name, FP32)
    for verify_s, draft_s in [(0.0, 0.0), (1e4, 1e4), (1e-9, 1e-9), (0.02, 0.0)] * 20:
        order = controller.choose(RoundState(1, 40, 2, 99, LIMITS), None)
        draft = _draft(order, Draft(1, 7), np.random.default_rng(0))
        length = controller.plan([draft]).lengths[1]
        part = RequestRound(1, len(draft.token_ids), length, 0, 1, 40, draft.log_probs, 0, draft.kind)
        controller.observe(RoundRecord(0, (part,), draft_s, verify_s, 0.0, 0.0, length + 1, 2))
    assert 0 <= controller.plan([draft]).lengths[1] <= len(draft.token_ids)


ESTIMATORS: list[tuple[type, tuple[Any, ...]]] = [
    (FixedLength, (3,)),
    (Threshold, (0.3,)),
    (HillClimb, ()),
    (StepRatio, (CostModel(FP32),)),
    (Oracle, ()),
    (Adaptive, (CostModel(FP32), GENERIC_POLICY)),
    (CostModel, (FP32,)),
    (HazardModel, (GENERIC_PRIORS["dflash"],)),
]


@pytest.mark.parametrize(("kind", "arguments"), ESTIMATORS, ids=[kind.__name__ for kind, _ in ESTIMATORS])
def test_constructor_arguments_are_kept_and_documented(kind: type, arguments: tuple[Any, ...]) -> None:
    made = kind(*arguments)
    assert inspect.getdoc(kind)
    parameters = list(inspect.signature(kind).parameters.values())
    for i, parameter in enumerate(parameters):
        given = arguments[i] if i < len(arguments) else parameter.default
        kept = getattr(made, parameter.name)
        assert kept is given or kept == given or kept == {}, parameter.name
    for _, method in inspect.getmembers(kind, inspect.isfunction):
        assert method.__name__.startswith("_") or method.__doc__ or hasattr(Controller, method.__name__), method


@pytest.mark.parametrize("name", ["", "best", "fixed:-1", "fixed:x", "fixed:", "threshold:2", "threshold:x", "off:1"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(PolicyError, match=r"threshold|unknown controller"):
        make_controller(name, FP32)


@controllers
def test_evidence_from_models_of_other_kinds_is_ignored(name: str) -> None:
    """A record may hold requests this controller never met, and drafters it has no model of."""
    controller = make_controller(name, FP32)
    part = RequestRound(77, 3, 3, 1, 2, 40, (-0.1,) * 3, 0, "another")
    controller.observe(RoundRecord(0, (part,), 1e-3, 0.02, 0.0, 0.0, 4, 0))
    controller.forget(77)
    controller.forget(78)
