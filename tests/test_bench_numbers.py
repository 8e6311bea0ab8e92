"""What `dflash-ort bench` makes of its measurements: intervals, sums, the verdict."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from dflash_ort.cli.bench_verdict import Bounds, judged_row, verdict
from dflash_ort.cli.svg import ticks
from dflash_ort.records import Statistics
from dflash_ort.runtime.bench import (
    OFF,
    OFF_UNPADDED,
    BenchSettings,
    Key,
    Measurements,
    Run,
    Step,
    Turn,
    parse_controllers,
)
from dflash_ort.runtime.bench_stats import Totals, paired_ratio, percentiles, rate, spread, survival
from dflash_ort.runtime.bench_summary import summarise


def statistics(**changes: Any) -> Statistics:
    counts = dict.fromkeys(("prompt_tokens", "committed", "rounds", "verify_rounds", "drafted", "verified"), 0)
    seconds = dict.fromkeys(("ttft_s", "draft_s", "verify_s", "sample_s", "other_s"), 0.0)
    values = {"acceptance_length": None, "tokens_per_round": None, "tpot_s": None, "tokens_per_second": None}
    return Statistics(**{**counts, "accepted": 0, **seconds, **values, **changes})  # type: ignore[arg-type]


class TestStatistics:
    def test_the_interval_holds_the_truth_as_often_as_it_says(self) -> None:
        rng, truth, held, trials = np.random.default_rng(3), 1.2, 0, 400
        for trial in range(trials):
            tokens = rng.integers(40, 129, 60).astype(float)
            plain = tokens * 0.03 * rng.lognormal(0.0, 0.3, 60)
            mine = plain / truth * rng.lognormal(0.0, 0.15, 60) / np.exp(0.15**2 / 2)
            found = paired_ratio(Totals(tokens, mine), Totals(tokens, plain), seed=trial, resamples=400)  # type: ignore[arg-type]
            assert found.interval is not None
            held += found.interval[0] <= truth <= found.interval[1]
        assert 0.90 <= held / trials <= 0.985

    def test_it_is_seeded_and_paired(self) -> None:
        rng = np.random.default_rng(0)
        tokens, seconds = [50.0] * 20, list(rng.uniform(1, 10, 20))
        plain, same = Totals(tokens, seconds), Totals(tokens, [s / 2 for s in seconds])
        found = paired_ratio(same, plain, seed=1)
        assert found.value == pytest.approx(2.0)
        assert found.interval == pytest.approx((2.0, 2.0)), "prompts differ, pairs do not"
        other = Totals(tokens, list(rng.uniform(1, 10, 20)))
        assert paired_ratio(other, plain, seed=1) == paired_ratio(other, plain, seed=1)
        assert paired_ratio(other, plain, seed=1) != paired_ratio(other, plain, seed=2)

    def test_too_little_to_say(self) -> None:
        one = Totals([5.0], [1.0])
        assert paired_ratio(one, one, seed=0).value == 1.0
        assert paired_ratio(one, one, seed=0).interval is None
        none = Totals([0.0, 0.0], [0.0, 0.0])
        assert paired_ratio(none, none, seed=0).value is None
        assert rate(none) is None
        assert (percentiles([]), spread([1.0]), spread([])) == (None, None, None)

    def test_small_things(self) -> None:
        assert rate(Totals([2, 4], [1, 1])) == 3.0
        assert spread([1.0, 2.0, 4.0]) == 1.5
        assert percentiles([1.0, 2.0, 3.0]) == pytest.approx({"p50": 2.0, "p95": 2.9, "p99": 2.98})
        assert ticks(0.0, 1.0) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
        assert ticks(3.0, 3.0) == [3.0]

    def test_survival_knows_what_was_not_seen(self) -> None:
        curve, reached = survival([(1, 1)] * 10 + [(2, 1)] * 5 + [(2, 2)] * 5 + [(2, 0)] * 20)
        assert curve == pytest.approx([0.5, 0.25])
        assert reached == [40, 10]
        assert survival([(3, 3)] * 4) == ([], []), "too few rounds"

    def test_survival_is_that_of_the_drafts(self) -> None:
        rng, truth = np.random.default_rng(1), np.array([0.8, 0.6, 0.3])
        rights = (rng.random((20_000, 1)) < truth).sum(axis=1)
        lengths = rng.integers(1, 4, 20_000)
        curve, _ = survival((int(n), int(min(n, k))) for n, k in zip(lengths, rights, strict=True))
        assert curve == pytest.approx(truth, abs=0.02)


def make_run(tokens: int = 21, seconds: float = 2.0, *, ttft: float = 0.5, ids: Sequence[int] | None = None) -> Run:
    told = statistics(prompt_tokens=9, committed=tokens, rounds=tokens - 1, verify_rounds=1, drafted=3, verified=2)
    steps = (Step("dflash", 3, 2, 1, 2), *(Step("none", 0, 0, 0, 1) for _ in range(tokens - 3)))
    given = tuple(range(tokens) if ids is None else ids)
    return Run(given, "text", ttft, seconds, tokens - 1, (seconds / 2,) * 2, told, steps)


def make_report(speed: float = 2.0, *, prompts: int = 4, ttft: float = 0.5, different: bool = False) -> dict[str, Any]:
    """A report of fixed:1 at ``speed`` times plain decoding, which is as fast as the unpadded."""
    entries = parse_controllers("off,fixed:1,off-unpadded")
    turns = []
    for number in range(prompts):
        slow = 2.0 + number
        runs: dict[Key, Sequence[Run]] = {
            ("int8", OFF): [make_run(seconds=slow), make_run(seconds=slow * 1.1)],
            ("int8", "fixed:1"): [
                make_run(seconds=slow / speed, ttft=ttft),
                make_run(seconds=slow * 1.1 / speed, ttft=ttft, ids=[0, 7] if different else None),
            ],
            ("int8", OFF_UNPADDED): [make_run(seconds=slow, ids=[5]), make_run(seconds=slow * 1.1, ids=[5])],
        }
        turns.append(Turn(number, "ab"[number % 2], f"p{number}", 1, 0.0, runs))
    quality = {"top1_agreement": 0.95, "mean_kl": 0.02}
    bundle = {"bundle": "int8", "exact": True, "quality": quality}
    return {"bundles": [bundle], **summarise(Measurements(("int8",), entries, BenchSettings(), turns))}


DEFAULT_BOUNDS = Bounds()


def states(report: dict[str, Any], bounds: Bounds = DEFAULT_BOUNDS) -> list[str]:
    gates = verdict(report, bounds)
    assert [gate.gate for gate in gates] == ["correctness", "quality", "latency", "capacity and cost"]
    assert not any("\n" in gate.reason for gate in gates)
    return [gate.state for gate in gates]


class TestSummary:
    def test_numbers(self) -> None:
        report = make_report()
        off, fixed, fastest = report["summary"]
        assert [row["controller"] for row in report["summary"]] == [OFF, "fixed:1", OFF_UNPADDED]
        seconds = sum((2.0 + n) * 1.05 for n in range(4))
        assert off["tokens_per_second"] == pytest.approx(4 * 20 / seconds)
        assert fixed["speedup"] == pytest.approx(2.0)
        assert fixed["speedup_interval"] == pytest.approx((2.0, 2.0))
        assert off["speedup"] == off["speedup_unpadded"] == 1.0
        assert fixed["cost_against_off"] == pytest.approx((2.0 + seconds / 2) / (2.0 + seconds))
        assert (fixed["committed"], fixed["rounds"], fixed["acceptance_length"]) == (8 * 21, 8 * 20, 2.0)
        assert (fixed["different"], fastest["different"], fixed["prompts"]) == (0, 4, 4)
        assert report["noise"] == [
            {"bundle": "int8", "median": pytest.approx(0.1 / 1.05), "worst": pytest.approx(0.1 / 1.05)}
        ]
        assert [(row["suite"], row["controller"]) for row in report["suites"]][:4] == [
            ("a", OFF), ("a", "fixed:1"), ("a", OFF_UNPADDED), ("b", OFF),
        ]  # fmt: skip

    def test_first_difference(self) -> None:
        fixed = make_report(different=True)["prompts"][0]["controllers"][1]
        assert (fixed["same_tokens"], fixed["first_difference"]) == (False, 1)

    def test_answers_of_one_token_do_not_count_for_speed(self) -> None:
        runs: dict[Key, Sequence[Run]] = {
            ("b", name): [Run((2,), "", 0.1, 0.0, 0, (), statistics(committed=1), ())] for name in (OFF, OFF_UNPADDED)
        }
        turns = [Turn(0, "s", "a", 1, 0.0, runs)]
        report = summarise(Measurements(("b",), parse_controllers("off"), BenchSettings(), turns))
        assert report["summary"][0]["tokens_per_second"] is None
        assert report["summary"][0]["speedup"] is None
        assert report["summary"][0]["itl_s"] is None
        json.dumps(report, allow_nan=False)


class TestVerdict:
    def test_all_open(self) -> None:
        assert states(make_report()) == ["pass"] * 4

    def test_other_tokens_fail_but_not_the_unpadded_ones(self) -> None:
        report = make_report(different=True)
        assert states(report)[0] == "fail"
        assert "fixed:1 on 4" in verdict(report, Bounds())[0].reason

    def test_dependent_rows_fail(self) -> None:
        report = make_report()
        report["bundles"][0]["exact"] = False
        assert states(report)[0] == "fail"

    def test_quality(self) -> None:
        report = make_report()
        assert states(report, Bounds(min_agreement=0.96))[1] == "fail"
        assert states(report, Bounds(max_kl=0.01))[1] == "fail"
        report["bundles"][0]["quality"] = None
        assert states(report)[1] == "unknown"

    def test_latency(self) -> None:
        assert states(make_report(ttft=0.52))[2] == "pass"
        assert states(make_report(ttft=0.53))[2] == "fail"
        assert states(make_report(ttft=0.53), Bounds(max_ttft=1.1))[2] == "pass"

    def test_cost(self) -> None:
        assert states(make_report(0.9))[3] == "fail"
        assert states(make_report(0.9), Bounds(min_speedup=0.8))[3] == "pass"

    def test_what_cannot_be_told_is_unknown(self) -> None:
        assert states(make_report(prompts=1)) == ["pass", "pass", "unknown", "unknown"]
        report = make_report()
        report["summary"][1]["speedup_unpadded_interval"] = (0.9, 1.1)
        assert states(report)[3] == "unknown"
        report["summary"] = [row for row in report["summary"] if row["controller"] != "fixed:1"]
        assert states(report)[2:] == ["unknown", "unknown"]

    def test_adaptive_is_judged_where_it_is(self) -> None:
        rows = [{"controller": name} for name in (OFF, "fixed:3", "adaptive")]
        assert judged_row(rows) == {"controller": "adaptive"}
        assert judged_row(rows[:2]) == {"controller": "fixed:3"}
        assert judged_row(rows[:1]) is None
