"""Tuning on texts of known truth: what is fitted is near it, what is found is faster on texts never seen, and nothing
is found where there is nothing.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.synthetic import BLOCK, INT8, LOOKUP, Regime, write_text
from dflash_ort.controller.acceptance import GENERIC_PRIORS
from dflash_ort.controller.adaptive import Adaptive
from dflash_ort.controller.cost import CostModel
from dflash_ort.controller.drift import FEWEST_REQUESTS, check_drift
from dflash_ort.controller.policy import GENERIC_POLICY, AdaptiveSettings, Policy
from dflash_ort.controller.replay import TableClock, rounds
from dflash_ort.controller.trace import Proposals, TracedText
from dflash_ort.controller.tuning import (
    FEWEST_ANSWERS,
    Answer,
    drift_references,
    families_of,
    fit_families,
    of_family,
    round_cost,
    split,
    survival_by_suite,
    visited,
)
from dflash_ort.controller.tuning_search import compare, is_better, search
from dflash_ort.errors import PolicyError

LIKE_GENERIC = (
    Regime(level=0.5, decay=0.3, slope=0.7, shift=-1.0),
    Regime(level=1.5, decay=0.3, slope=0.7, shift=-1.0),
)
"""What the generic prior takes for granted."""
UNDERSTATED = (
    Regime(level=-2.5, spread=1.5, decay=0.3, slope=1.5, shift=4.0),
    Regime(level=-2.0, spread=1.5, decay=0.3, slope=1.5, shift=4.0),
)
"""A drafter that is better than it says; its weights are 4 and 1.5."""
MODEST = (
    Regime(level=-4.0, spread=1.0, decay=0.3, slope=1.5, shift=7.0),
    Regime(level=-3.5, spread=1.0, decay=0.3, slope=1.5, shift=7.0),
)
"""One that is better still, so that it pays to know it from the first request on."""


def traced(name: str, suite: str, regime: Regime, seed: int, length: int = 64) -> TracedText:
    """An answer of one regime as `record` would trace it; ``length`` tokens."""
    text = write_text([regime], length, length - 1, prompt=40, seed=seed)
    left = length - 1 - np.arange(length - 1)
    block = Proposals(
        BLOCK,
        False,
        np.full(length - 1, BLOCK),
        np.minimum(text.agreed, left),
        text.log_probs,
        np.zeros(length - 1, np.int64),
        np.zeros(length - 1),
    )
    proposals = {"dflash": block}
    if regime.lookups:
        drafted = np.where(text.matches > 0, LOOKUP, 0)
        agreed = np.minimum(np.where(text.matches > 0, text.lookup_agreed, 0), left)
        none = np.zeros((length - 1, 0))
        proposals["ngram"] = Proposals(LOOKUP, True, drafted, agreed, none, text.matches, np.zeros(length - 1))
    return TracedText(name, suite, 40, length, length, False, proposals, seed)


def answers(regimes: tuple[Regime, ...], count: int, seed: int = 0, length: int = 64) -> list[Answer]:
    """Answers of suites "s0", "s1", ... in turn."""
    return [
        Answer(traced(f"{seed}-{i}", f"s{i % len(regimes)}", regimes[i % len(regimes)], 1000 * seed + i, length))
        for i in range(count)
    ]


def logged(answer: Answer, policy: Policy = GENERIC_POLICY) -> Answer:
    """The same, as a log of a run with this policy shows it."""
    text = answer.text
    clock, controller = TableClock(INT8), Adaptive(CostModel(INT8), policy)
    parts = tuple(r.requests[0] for r in rounds(controller, text, list(text.proposals), clock, 0))
    return Answer(replace(text, suite="log"), parts).estimated(policy.priors)


class TestSplit:
    def test_halves_every_suite_and_keeps_the_order(self) -> None:
        everything = answers(LIKE_GENERIC, 24, length=8)
        training, held_out = split(everything, 0.5)
        assert len(training) == len(held_out) == 12
        for side in (training, held_out):
            assert [a.text.suite for a in side].count("s0") == 6
            assert side == [a for a in everything if a in side]
        assert split(list(reversed(everything)), 0.5) == (training[::-1], held_out[::-1])
        assert split(everything, 0.5, seed=1) != (training, held_out)

    def test_an_id_is_on_one_side_only(self) -> None:
        twice = [a for a in answers(LIKE_GENERIC, 12, length=8) for _ in range(2)]
        training, held_out = split(twice, 0.4)
        assert not {a.text.id for a in training} & {a.text.id for a in held_out}

    def test_suites_of_one_request_are_shared_out(self) -> None:
        alone = [Answer(traced(str(i), f"suite {i}", LIKE_GENERIC[0], i, 8)) for i in range(10)]
        assert [len(side) for side in split(alone, 0.5)] == [5, 5]
        assert [len(side) for side in split(alone, 0.2)] == [8, 2]

    def test_too_few(self) -> None:
        with pytest.raises(PolicyError, match=f"at least {FEWEST_ANSWERS} are needed"):
            split(answers(LIKE_GENERIC, FEWEST_ANSWERS - 1, length=8), 0.5)
        with pytest.raises(PolicyError, match="none on one side"):
            split(answers(LIKE_GENERIC[:1], 8, length=8), 0.01)


class TestFit:
    def test_weights_come_near_the_truth_and_hold_on_requests_never_seen(self) -> None:
        training, held_out = split(answers(UNDERSTATED, 40), 0.5)
        (found,) = fit_families(training, held_out, GENERIC_POLICY)
        assert found.name == "dflash"
        assert found.fit is not None
        assert found.before is not None
        assert found.after is not None
        assert found.prior.means[0] == pytest.approx(4.0, abs=0.35)
        assert found.prior.means[1] == pytest.approx(1.5, abs=0.15)
        assert found.after.log_loss < 0.6 * found.before.log_loss
        assert found.after.ece < 0.03 < found.before.ece

    def test_a_censored_log_gives_the_same(self) -> None:
        """Under the very policy that is wrong, which verifies where it should not and stops where it should go on."""
        training, held_out = split([logged(a) for a in answers(UNDERSTATED, 80)], 0.5)
        (found,) = fit_families(training, held_out, GENERIC_POLICY)
        assert found.fit is not None
        # Trials are few, and the start, which is five of its deviations away, still pulls.
        assert found.prior.means[0] == pytest.approx(4.0, abs=0.8)
        assert found.prior.means[1] == pytest.approx(1.5, abs=0.3)

    def test_what_was_hardly_seen_keeps_its_prior(self) -> None:
        short = answers(UNDERSTATED, 10, length=4)
        (found,) = fit_families(*split(short, 0.5), GENERIC_POLICY)
        assert found.fit is None
        assert found.prior is GENERIC_PRIORS["dflash"]

    def test_deviations_do_not_shrink_for_ever(self) -> None:
        training, held_out = split(answers(UNDERSTATED, 16), 0.5)
        policy = GENERIC_POLICY
        for _ in range(2):
            (found,) = fit_families(training, held_out, policy)
            policy = Policy({**policy.priors, found.name: found.prior})
        least = 0.1 * np.array(GENERIC_PRIORS["dflash"].deviations)
        assert (np.array(found.prior.deviations) >= least * 0.999).all()

    def test_no_drafts_at_all(self) -> None:
        plain = [Answer(replace(a.text, proposals={})) for a in answers(LIKE_GENERIC, 10, length=8)]
        with pytest.raises(PolicyError, match="no observed draft"):
            fit_families(*split(plain, 0.5), GENERIC_POLICY)

    def test_families_come_in_the_priors_order(self) -> None:
        both = answers((Regime(lookups=0.3),), 2, length=12)
        drawn = [Answer(replace(a.text, draws=True)) for a in both]
        assert list(families_of([*both, *drawn])) == ["dflash", "dflash drawn", "ngram", "ngram drawn"]

    def test_survival_by_suite_is_the_share_of_blocks(self) -> None:
        everything = answers(LIKE_GENERIC, 12)
        curves = survival_by_suite(everything, GENERIC_PRIORS)["dflash"]
        agreed = np.concatenate([a.text.proposals["dflash"].agreed[:-BLOCK] for a in everything[::2]])
        assert curves["s0"] == pytest.approx([float((agreed >= i).mean()) for i in range(1, BLOCK + 1)], abs=0.03)


class TestSearch:
    def test_a_tuned_policy_is_faster_on_texts_never_seen(self) -> None:
        training, held_out = split(answers(MODEST, 28, seed=1), 0.5)
        found = {one.name: one.prior for one in fit_families(training, held_out, GENERIC_POLICY)}
        policy = Policy({**GENERIC_PRIORS, **found})
        texts, unseen = ([a.text for a in side] for side in (training, held_out))
        judged = compare({"tuned": policy, "current": GENERIC_POLICY}, texts, unseen, INT8)
        ratio = judged["ratios"]["current"]
        assert ratio["ratio"] > 1.05
        assert is_better(ratio["ratio"], ratio["interval"])
        speeds = {row["policy"]: row["speedup"] for row in judged["policies"]}
        assert speeds["off"] == 1.0
        assert max(speeds.values()) < judged["bound"]["speedup"]
        assert speeds["oracle by suite"] >= speeds["best fixed by suite"]
        assert speeds["tuned"] > 0.95 * speeds["oracle by suite"]

    def test_a_bad_start_is_mended_and_each_call_gives_the_same(self) -> None:
        texts = [a.text for a in answers(LIKE_GENERIC, 10)]
        bad = Policy(settings=replace(AdaptiveSettings(), first_value=0.01, optimism=0.0, first_retry=48))
        found = search(bad, [], texts, INT8, most=25)
        assert found.trials <= 25
        assert found.seconds[1] < found.seconds[0]
        assert found.changes(bad.settings)
        again = search(bad, [], texts, INT8, most=25)
        assert again.policy.settings == found.policy.settings
        assert again.seconds == found.seconds

    def test_another_start_is_taken_only_where_it_is_faster(self) -> None:
        texts = [a.text for a in answers(UNDERSTATED, 8)]
        stubborn = replace(GENERIC_PRIORS["dflash"], deviations=(0.01,) * 5, offset_deviation=0.1)
        right = replace(stubborn, means=(4.0, 1.5, 0.0, 0.0, 0.0))
        bad, good = (Policy({**GENERIC_PRIORS, "dflash": prior}) for prior in (stubborn, right))
        assert search(bad, [good], texts, INT8, most=2).policy is good
        assert search(good, [bad], texts, INT8, most=2).policy is good

    def test_limits(self) -> None:
        texts = [a.text for a in answers(LIKE_GENERIC, 4, length=16)]
        none = search(GENERIC_POLICY, [], texts, INT8, most=0)
        assert (none.policy, none.trials, none.ended) == (GENERIC_POLICY, 0, "trials")
        late = search(GENERIC_POLICY, [], texts, INT8, expired=lambda: True)
        assert (late.policy, late.trials, late.ended) == (GENERIC_POLICY, 0, "budget")

    @pytest.mark.parametrize(
        ("ratio", "low", "better"), [(1.01, 0.996, True), (1.01, 0.99, False), (1.0, 1.0, False), (0.99, 0.999, False)]
    )
    def test_the_rule(self, ratio: float, low: float, better: bool) -> None:
        assert is_better(ratio, (low, 1.1)) is better

    def test_texts_without_a_drafter_are_judged_too(self) -> None:
        some = [a.text for a in answers((Regime(level=2.0), Regime(level=2.0, lookups=0.4)), 8, length=24)]
        judged = compare({"tuned": GENERIC_POLICY, "current": GENERIC_POLICY}, some, some, INT8)
        assert judged["ratios"]["current"] == {"ratio": 1.0, "interval": [1.0, 1.0]}


class TestDrift:
    def test_a_log_of_the_tuned_policy_is_not_drift_from_the_trace_it_was_tuned_on(self) -> None:
        """Visited anchors are harder than all anchors together: the reference has to be of what is visited."""
        known = answers(LIKE_GENERIC, 40)
        reference = drift_references(known, GENERIC_POLICY, INT8)["dflash"]
        later = [logged(a) for a in answers(LIKE_GENERIC, 40, seed=1)]
        mine = of_family(later, visited(later, GENERIC_POLICY, INT8), "dflash", False)
        assert len(mine) > FEWEST_REQUESTS
        assert not check_drift(GENERIC_PRIORS["dflash"], reference, mine).drifted
        other = [logged(a) for a in answers(UNDERSTATED, 40, seed=1)]
        mine = of_family(other, visited(other, GENERIC_POLICY, INT8), "dflash", False)
        assert check_drift(GENERIC_PRIORS["dflash"], reference, mine).drifted


def test_a_free_drafter_costs_nothing_before_the_pass() -> None:
    text = answers((Regime(lookups=1.0, lookup=0.95),), 1).pop().text
    records = list(rounds(Adaptive(CostModel(INT8)), text, list(text.proposals), TableClock(INT8), 0))
    costs = [round_cost(record) for record in records]
    assert {record.requests[0].kind for record in records} >= {"ngram"}
    for cost, record in zip(costs, records, strict=True):
        assert cost.drafted is (record.requests[0].kind == "dflash")
        assert cost.drafted is (cost.draft_s > 0.0)
        assert cost.rows == record.total_rows
