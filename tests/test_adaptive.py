"""The adaptive controller: single decisions that must be so, and whole texts replayed against what could be known."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import simulate
from benchmarks.simulate import EASY, HARD, SCENARIOS, Scenario, clairvoyant, run
from benchmarks.synthetic import FP32, INT8, Clock, Machine, Result, replay, write_text
from dflash_ort.controller.adaptive import Adaptive, _best_lengths
from dflash_ort.controller.arms import Pace, Progress
from dflash_ort.controller.cost import CostModel, CostTable
from dflash_ort.controller.names import make_controller
from dflash_ort.controller.policy import AdaptiveSettings, Policy
from dflash_ort.controller.protocol import PLAIN, Controller, DraftOrder, RoundState
from dflash_ort.records import Draft, RequestRound, RoundRecord

LIMITS = {"ngram": 10, "dflash": 5}
LOOKUP = Draft(1, 0, tuple(range(10)), match_length=4, kind="ngram")
NO_LOOKUP = Draft(1, 0, kind="ngram")


def state(*, request: int = 1, context: int = 100, pending: int = 2, remaining: int = 99) -> RoundState:
    return RoundState(request, context, pending, remaining, LIMITS)


def block(probability: float, length: int = 5, *, request: int = 1) -> Draft:
    return Draft(request, 0, (0,) * length, (math.log(probability),) * length, kind="dflash")


def one_round(
    controller: Controller,
    draft_of: Draft,
    lookup: Draft,
    agreed: dict[str, int],
    *,
    pending: int = 2,
    table: CostTable = FP32,
) -> tuple[DraftOrder, int]:
    """A round with these proposals, of which so many are right; returns the order and the length."""
    order = controller.choose(state(pending=pending), lookup)
    draft = {"dflash": draft_of, "ngram": lookup, PLAIN: Draft(1, 0)}[order.kind]
    length = controller.plan([draft]).lengths[1]
    accepted = min(length, agreed.get(order.kind, 0))
    part = RequestRound(
        1, len(draft.token_ids), length, accepted, accepted + 1, 100, draft.log_probs, draft.match_length, draft.kind
    )
    costs = CostModel(table)
    draft_s = costs.draft(100, pending) if order.kind == "dflash" else 1e-5
    verify_s = costs.verify(length + 1, 100)[-1]
    controller.observe(RoundRecord(0, (part,), draft_s, verify_s, 0.0, 1e-4, length + 1, pending))
    return order, length


def scaled(table: CostTable, factor: float) -> CostTable:
    """The same shape, everything so many times as long."""
    return replace(
        table,
        verify=tuple(tuple(x * factor for x in row) for row in table.verify),
        draft=tuple(x * factor for x in table.draft),
        inject_row=table.inject_row * factor,
    )


def adaptive(table: CostTable = FP32, **settings: float) -> Adaptive:
    return Adaptive(CostModel(table), Policy(settings=AdaptiveSettings(**settings)))  # type: ignore[arg-type]


class TestDecisions:
    def test_where_nothing_pays_it_decodes_plainly(self) -> None:
        controller = adaptive()
        rounds = [one_round(controller, block(0.9), LOOKUP, {}) for _ in range(200)]
        late = rounds[40:]
        assert sum(order.kind == PLAIN for order, _ in late) > 0.93 * len(late)
        assert max(length for _, length in late) <= 3

    def test_where_only_lookups_pay_it_uses_those(self) -> None:
        controller = adaptive()
        rounds = [one_round(controller, block(0.05), LOOKUP, {"ngram": 10}) for _ in range(100)]
        late = rounds[10:]
        assert sum(order.kind == "ngram" for order, _ in late) > 0.9 * len(late)
        assert np.median([length for order, length in late if order.kind == "ngram"]) == 10

    def test_where_only_the_model_pays_it_asks_it(self) -> None:
        controller = adaptive()
        bad = replace(LOOKUP, match_length=2)
        rounds = [one_round(controller, block(0.9), bad, {"dflash": 5}) for _ in range(100)]
        assert sum(order.kind == "dflash" for order, _ in rounds[10:]) > 85

    def test_an_empty_lookup_is_nothing(self) -> None:
        controller = adaptive()
        kinds = {one_round(controller, block(0.9), NO_LOOKUP, {})[0].kind for _ in range(60)}
        assert kinds == {"dflash", PLAIN}

    def test_surer_drafts_are_verified_further(self) -> None:
        controller = adaptive()
        for _ in range(20):
            one_round(controller, block(0.8), NO_LOOKUP, {"dflash": 3})
        controller.choose(state(), NO_LOOKUP)
        lengths = [controller.plan([block(p)]).lengths[1] for p in (0.01, 0.2, 0.5, 0.9, 0.99)]
        assert lengths == sorted(lengths)
        assert lengths[0] <= 1
        assert lengths[-1] == 5

    def test_nothing_of_a_block_may_be_worth_verifying(self) -> None:
        """Length 0 is a legal answer once a block is there."""
        controller = adaptive()
        for _ in range(12):
            one_round(controller, block(0.7), NO_LOOKUP, {"dflash": 3})
        controller.choose(state(), NO_LOOKUP)
        assert controller.plan([block(0.003)]).lengths[1] == 0

    def test_a_steeper_staircase_is_climbed_less(self) -> None:
        steep = replace(FP32, verify=tuple(tuple(x * (1 + 0.25 * r) for x in row) for r, row in enumerate(FP32.verify)))
        lengths = []
        for table in (FP32, steep):
            controller = adaptive(table)
            for _ in range(20):
                one_round(controller, block(0.8), NO_LOOKUP, {"dflash": 2}, table=table)
            controller.choose(state(), NO_LOOKUP)
            lengths.append(controller.plan([block(0.75)]).lengths[1])
        assert lengths[0] > lengths[1]

    def test_a_long_prompt_does_not_forbid_the_first_draft(self) -> None:
        """A thousand rows to inject cost a whole round, once; an answer of a hundred tokens earns that back."""
        assert adaptive().choose(state(pending=1000, remaining=400), NO_LOOKUP).kind == "dflash"
        assert adaptive().choose(state(pending=1000, remaining=20), NO_LOOKUP).kind == PLAIN, "a short one does not"
        assert adaptive().choose(state(pending=2, remaining=20), NO_LOOKUP).kind == "dflash"

    def test_a_token_between_repetitions_is_worth_its_own_pace(self) -> None:
        """While lookups give five tokens a round, a round without one still takes its time for one."""
        progress = Progress(Pace(1.0, 1.0, 0.02))
        for has_lookup, tokens in [(False, 1), (True, 5)] * 30:
            progress.begin(state(), has_lookup)
            progress.end(tokens, 0.02, memory=15.0)
        rates = []
        for has_lookup in (False, True):
            progress.begin(state(), has_lookup)
            rates.append(progress.rate * 0.02)
        assert 1.0 < rates[0] < 1.4
        assert 4.6 < rates[1] < 5.0
        assert progress.elapsed == pytest.approx(60 * 0.02)

    def test_load_on_the_machine_changes_no_decision(self) -> None:
        """What slows everything alike leaves every comparison as it was."""
        calm, loaded = adaptive(), adaptive()
        for i in range(120):
            agreed = {"dflash": (0, 2, 1, 5, 0, 0)[i % 6]}
            factor = 2.0 if i > 60 else 1.0
            busy = scaled(FP32, factor)
            draft = block((0.3, 0.6, 0.8)[i % 3])
            a = one_round(calm, draft, NO_LOOKUP, agreed)
            b = one_round(loaded, draft, NO_LOOKUP, agreed, table=busy)
            assert a == b, i

    def test_a_drafter_that_turns_out_slower_than_its_table_is_given_up(self) -> None:
        """Drawing drafts at a temperature, for one, is not in the table."""
        slow = replace(FP32, draft=tuple(10 * x for x in FP32.draft))
        for table, most, least in ((FP32, 101, 80), (slow, 55, 0)):
            controller = adaptive()
            rounds = [
                one_round(controller, block(0.5), NO_LOOKUP, {"dflash": i % 3 == 0}, table=table) for i in range(100)
            ]
            assert least <= sum(order.kind == "dflash" for order, _ in rounds) < most

    def test_where_each_draft_costs_time_no_more_are_made_than_may_pay(self) -> None:
        """A sure block is made to its end, a doubtful one no further than its rows are worth."""
        controller = adaptive(table=replace(FP32, draft_step=5e-4))
        for _ in range(60):
            one_round(controller, block(0.8), NO_LOOKUP, {"dflash": 3})
        go_on = controller.choose(state(), NO_LOOKUP).go_on
        assert go_on is not None
        assert all(go_on([-0.01] * count) for count in range(1, 5))
        assert not go_on([-4.0])
        assert not go_on([-0.01, -4.0])
        assert adaptive().choose(state(), NO_LOOKUP).go_on is None

    def test_drafts_of_a_drafter_that_is_not_trusted_yet_are_few_where_each_costs_time(self) -> None:
        order = adaptive(table=replace(FP32, draft_step=5e-4)).choose(state(), NO_LOOKUP)
        assert (order.limit, order.go_on) == (AdaptiveSettings().cautious_length, None)

    def test_lambda_is_each_requests_own(self) -> None:
        """An easy text's token is worth less time, so the same block is verified less far there."""
        controller = adaptive(lengthen_every=10**9)
        for request, accepted in ((1, 4), (2, 0)):
            for _ in range(40):
                controller.choose(state(request=request), NO_LOOKUP)
                part = RequestRound(request, 0, 0, 0, accepted + 1, 100)
                controller.observe(RoundRecord(0, (part,), 0.0, 0.021, 0.0, 1e-4, 1, 2))
        rates = [controller._requests[r].rate for r in (1, 2)]
        assert rates[0] > 4 * rates[1]
        controller.hazards["dflash"]._useless = 0.01
        lengths = []
        for request in (1, 2):
            controller.choose(state(request=request), NO_LOOKUP)
            lengths.append(controller.plan([block(0.62, request=request)]).lengths[request])
        assert lengths[0] < lengths[1]


# Several requests --------------------------------------------------

CURVES = st.lists(st.lists(st.floats(0.02, 0.98), max_size=3), min_size=1, max_size=3)


@settings(max_examples=200)
@given(
    hazards=CURVES,
    rounds=st.lists(st.tuples(st.floats(1.0, 4.0), st.floats(5.0, 60.0)), min_size=3, max_size=3),
    steps=st.lists(st.floats(1e-4, 5e-3), min_size=12, max_size=12),
)
def test_the_best_slots_are_those_a_search_of_all_finds(
    hazards: list[list[float]], rounds: list[tuple[float, float]], steps: list[float]
) -> None:
    """Weighted survival less the price of the rows, over every combination of lengths."""
    live = [Pace(tokens=10 * per_round, rounds=10.0, seconds=10 / rate) for per_round, rate in rounds]
    live = live[: len(hazards)]
    curves = [list(itertools.accumulate(h, lambda a, b: a * b)) for h in hazards]
    passes: list[float] = np.cumsum([0.02, *steps]).tolist()
    price = sum(p.rounds / p.seconds for p in live)

    def worth(lengths: Sequence[int]) -> float:
        gained = sum(sum(c[:n]) * p.rounds / p.tokens for c, n, p in zip(curves, lengths, live, strict=True))
        return float(gained - price * (passes[len(live) - 1 + sum(lengths)] - passes[len(live) - 1]))

    best = max(worth(lengths) for lengths in itertools.product(*(range(len(c) + 1) for c in curves)))
    chosen = _best_lengths(live, curves, passes)
    assert worth(chosen) == pytest.approx(best, abs=1e-9)


def test_requests_share_a_pass() -> None:
    """A stair that is paid for one request is free for the others: together they climb further than one by one."""
    stairs = tuple((0.02 if rows <= 3 else 0.03,) for rows in range(1, 17))
    controller = adaptive(replace(FP32, contexts=(16,), verify=stairs, draft=(1e-3,)))
    drafts = [block(p, request=r) for r, p in ((1, 0.9), (2, 0.5), (3, 0.02))]
    for request in (1, 2, 3):
        controller.choose(state(request=request), NO_LOOKUP)
    plan = controller.plan(drafts)
    assert set(plan.lengths) == {1, 2, 3}
    assert plan.predicted_committed is not None
    assert plan.predicted_committed >= 3.0
    assert plan.lengths[1] >= plan.lengths[2] >= plan.lengths[3]
    part = [
        RequestRound(r, 5, plan.lengths[r], 0, 1, 100, d.log_probs, 0, "dflash")
        for r, d in zip((1, 2, 3), drafts, strict=True)
    ]
    rows = sum(plan.lengths.values()) + 3
    controller.observe(RoundRecord(0, tuple(part), 3e-3, 0.03, 0.0, 1e-4, rows, 2))
    assert controller.plan([]).lengths == {}
    for request in (1, 2, 3):
        controller.forget(request)
    assert controller.plan(drafts).lengths == {}, "nobody asked for a length of a request that is over"


# Whole texts --------------------------------------------------


def scenario(name: str, **changes: object) -> Scenario:
    found = next(s for s in SCENARIOS if s.name == name)
    return replace(found, **changes)  # type: ignore[arg-type]


WARM = [
    "shipped fp32",
    "shipped int8",
    "easy int8",
    "hard int8",
    "medium fp32",
    "vague evidence fp32",
    "mixed texts int8",
    "copying int8",
    "some lookups int8",
    "sudden load",
    "long prompt",
]


@pytest.mark.parametrize("name", WARM)
def test_after_a_warm_start_it_is_within_three_percent_of_who_knows_the_curves(name: str) -> None:
    case = scenario(name)
    mine, best = run(case, "adaptive"), run(case, "oracle")
    assert mine.rate >= 0.97 * best.rate
    assert mine.rate <= clairvoyant(case).rate
    assert mine.predicted == pytest.approx(mine.realised, rel=0.05), "what it expects of a round is what comes"


@pytest.mark.parametrize(("name", "least"), [("switching fp32", 0.96), ("switching int8", 0.94)])
def test_texts_that_turn_cost_what_noticing_costs(name: str, least: float) -> None:
    """The oracle knows the moment; that must be found out by trying, at a price that is 22% of a round at int8."""
    case = scenario(name)
    assert run(case, "adaptive").rate >= least * run(case, "oracle").rate


@pytest.mark.parametrize(
    "name",
    [
        "noise fp32",
        "noise int8",
        "hard int8",
        "cold quiet noise fp32",
        "cold quiet noise int8",
        "cold loud noise fp32",
        "cold loud noise int8",
        "cold bad lookups int8",
    ],
)
def test_it_is_never_much_slower_than_plain_decoding(name: str) -> None:
    """From a cold start on answers of 128 tokens, and after earlier texts that promised much."""
    case = scenario(name)
    assert run(case, "adaptive").rate >= 0.98 * run(case, "off").rate


@pytest.mark.parametrize("name", ["noise fp32", "noise int8"])
def test_tries_that_others_rewarded_stay_cheap(name: str) -> None:
    """Earlier texts turned easy again and again, so tries are frequent; these never do, for 2,000 tokens."""
    case = scenario(name, length=2000, requests=4, earlier=[(EASY, HARD)], stretch=120)
    assert run(case, "adaptive").rate >= 0.978 * run(case, "off").rate


@pytest.mark.parametrize("name", ["shipped int8", "medium fp32", "mixed texts fp32", "copying int8", "hard fp32"])
def test_no_fixed_length_is_better(name: str) -> None:
    case = scenario(name)
    fixed = [run(case, rule).rate for rule in ("off", "fixed:1", "fixed:2", "fixed:3", "fixed:max", "ngram fixed:max")]
    assert run(case, "adaptive").rate >= 0.98 * max(fixed)


def test_no_other_rule_is_better_over_a_mix() -> None:
    case = scenario("mixed texts int8")
    rules = [run(case, rule).rate for rule in ("threshold:0.3", "threshold:0.5", "hill-climb", "step-ratio")]
    assert run(case, "adaptive").rate > max(rules)


def test_easy_texts_are_drafted_longer_than_hard_ones() -> None:
    lengths = {}
    for name, regime in (("easy", EASY), ("hard", HARD)):
        controller, clock, result = make_controller("adaptive", FP32), Clock(Machine(FP32), 0), Result()
        for i in range(4):
            replay(controller, write_text([regime], 999, 150, 50, i), clock, i, ("dflash",), result)
        lengths[name] = result.tokens / result.rounds
    assert lengths["easy"] > 2.0 * lengths["hard"]


def test_a_wrong_cost_scale_does_not_matter() -> None:
    """Without calibration the shape is generic; that everything takes three times as long is found and is harmless."""
    case = scenario("medium fp32", calibrated=scaled(FP32, 1 / 3))
    assert run(case, "adaptive").rate == pytest.approx(run(replace(case, calibrated=None), "adaptive").rate, rel=0.01)


def test_a_replay_walks_the_whole_text_whoever_decides() -> None:
    text, clock = write_text([EASY, HARD], 20, 90, 30, 3), Clock(Machine(INT8), 0)
    for name in ("off", "fixed:max", "adaptive", "hill-climb"):
        result = Result()
        replay(make_controller(name, INT8), text, clock, 0, ("ngram", "dflash"), result)
        assert result.tokens == 90
        assert result.rounds <= 90
    assert simulate.microseconds(20) > 0.0
