"""`record` and `replay` at the shell: what is recorded, resumed, refused, and what a replay says of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_ort.controller.policy import AdaptiveSettings, Policy
from dflash_ort.jsonlines import JsonLines
from dflash_ort.models.manifest import POLICY
from tests.shell import Home, at_home, call, json_of

PROMPTS = [
    {"suite": "a", "id": "one", "turns": ["abcabcabcabc", "and now xyzxyz"]},
    {"suite": "a", "id": "two", "turns": ["the the the the"], "temperature": 0.9},
    {"suite": "b", "id": "three", "turns": ["1 2 3 1 2 3 1 2"]},
]
RECORD = ("--max-new-tokens", 24, "--no-calibrate", "--ignore-eos", "--threads", 1)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    with at_home(tmp_path_factory.mktemp("home")) as home:
        lines = "".join(json.dumps(prompt) + "\n" for prompt in PROMPTS)
        (home.root / "prompts.jsonl").write_text(lines)
        yield home


def record(home: Home, output: Path, *more: object) -> Any:
    return call("record", "--prompts", home.root / "prompts.jsonl", "--output", output, *RECORD, *more)


@pytest.fixture(scope="module")
def trace(home: Home) -> Path:
    path = home.root / "trace.jsonl"
    done = record(home, path)
    assert done.code == 0, done
    assert f"4 texts with 92 anchors are in {path}" in done.err
    return path


def lines_of(path: Path) -> list[dict[str, Any]]:
    return list(JsonLines(path))


def test_a_trace_says_what_it_was_made_of_and_has_no_text(home: Home, trace: Path) -> None:
    header, *texts = lines_of(trace)
    assert header["event"] == "trace"
    assert header["bundle"]["name"]
    assert header["costs"]["rows"][0] == 1
    assert [(text["suite"], text["id"]) for text in texts] == [
        ("a", "one/1"),
        ("a", "one/2"),
        ("a", "two"),
        ("b", "three"),
    ]
    for text in texts:
        assert "prompt_ids" not in text
        assert "token_ids" not in text
        assert set(text["proposals"]) == {"ngram", "dflash"}
        assert len(text["proposals"]["dflash"]["log_probs"]) == text["num_tokens"] - 1 == 23


def test_text_is_there_when_asked_for(home: Home, tmp_path: Path, trace: Path) -> None:
    assert record(home, tmp_path / "t.jsonl", "--text").code == 0
    for plain, text in zip(lines_of(trace)[1:], lines_of(tmp_path / "t.jsonl")[1:], strict=True):
        assert len(text["token_ids"]) == text["num_tokens"]
        assert len(text["prompt_ids"]) == text["prompt_tokens"]
        assert plain == {k: v for k, v in text.items() if k not in ("token_ids", "prompt_ids")}


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.zst"])
def test_an_interrupted_recording_goes_on(name: str, home: Home, tmp_path: Path, trace: Path) -> None:
    """Cut in the middle of a line; what is whole before it is not made again, and the result is the same."""
    path = tmp_path / name
    assert record(home, path).code == 0
    whole = path.read_bytes()
    path.unlink()
    part = path.with_name(name + ".part")
    part.write_bytes(whole[: len(whole) * 3 // 4])
    again = record(home, path)
    assert again.code == 0, again
    assert "going on behind" in again.err
    assert not part.exists()
    assert lines_of(path)[1:] == lines_of(trace)[1:]


def test_what_was_begun_otherwise_is_not_mixed_in(home: Home, tmp_path: Path, trace: Path) -> None:
    path = tmp_path / "t.jsonl"
    (tmp_path / "t.jsonl.part").write_bytes(trace.read_bytes())
    error = record(home, path, "--seed", 9).error
    assert "another bundle, prompts or settings; --force begins anew" in error
    assert record(home, path, "--seed", 9, "--force").code == 0
    assert "is there already" in record(home, path).error


def test_a_place_that_cannot_be_written_is_said_before_anything_runs(home: Home, tmp_path: Path) -> None:
    assert "there is no directory" in record(home, tmp_path / "no" / "t.jsonl").error


class TestReplay:
    def test_a_replay_counts_what_a_run_counts(self, home: Home, trace: Path) -> None:
        policies = ("off", "fixed:3", "ngram@fixed:2", "threshold:0.1")
        asked = [word for name in policies for word in ("--policy", name)]
        report = json_of(call("replay", trace, "--json", "-", *asked))
        assert report["exact"] is True
        assert [p["policy"] for p in report["policies"]] == list(policies)
        for policy in report["policies"]:
            drafter, _, name = policy["policy"].rpartition("@")
            run = json_of(
                call(
                    "run", PROMPTS[2]["turns"][0], "--json", "--max-new-tokens", 24, "--ignore-eos", "--seed", 7,
                    "--controller", name, "--drafter", drafter or "auto", "--threads", 1, "--no-calibrate",
                )
            )["statistics"]  # fmt: skip
            (found,) = [r for r in policy["requests"] if r["id"] == "three"]
            assert (found["rounds"], found["committed"]) == (run["rounds"], run["committed"])
            suite = policy["suites"]["b"]
            for name in (
                "rounds",
                "committed",
                "verify_rounds",
                "drafted",
                "verified",
                "accepted",
                "acceptance_length",
            ):
                assert suite[name] == run[name], name

    def test_whatever_the_policy_the_tokens_are_the_same(self, trace: Path) -> None:
        report = json_of(call("replay", trace, "--json", "-", "--policy", "off", "--policy", "adaptive"))
        assert {p["committed"] for p in report["policies"]} == {96}
        assert report["clairvoyant"]["tokens_per_second"] >= report["best_fixed"]["tokens_per_second"] * 0.999
        assert report["best_fixed_by_suite"]["seconds"] <= report["best_fixed"]["seconds"] * 1.001

    def test_other_costs_change_the_seconds_alone(self, trace: Path, tmp_path: Path) -> None:
        costs = lines_of(trace)[0]["costs"]
        costs["verify"] = [[2 * x for x in line] for line in costs["verify"]]
        (tmp_path / "costs.json").write_text(json.dumps(costs))
        asked = ("--policy", "fixed:2", "--json", "-")
        here = json_of(call("replay", trace, *asked))["policies"][0]
        there = json_of(call("replay", trace, *asked, "--costs", tmp_path / "costs.json"))["policies"][0]
        assert here["rounds"] == there["rounds"]
        assert 1.5 < there["seconds"] / here["seconds"] < 2.0

    def test_a_log_gives_an_estimate_and_says_so(self, home: Home, tmp_path: Path) -> None:
        log = tmp_path / "log.jsonl"
        run = (
            "run",
            "the the the",
            "--max-new-tokens",
            24,
            "--ignore-eos",
            "--log",
            log,
            "--threads",
            1,
            "--no-calibrate",
        )
        for controller in ("fixed:2", "adaptive"):
            assert call(*run, "--controller", controller).code == 0
        done = call("replay", log, "--policy", "off", "--policy", "fixed:2", "--json", "-")
        report = json_of(done)
        assert report["exact"] is False
        assert "an estimate" in done.err
        assert report["texts"] == 2
        assert report["policies"][0]["committed"] == 48

    def test_a_log_of_the_same_texts_is_repeated_exactly(self, home: Home, trace: Path, tmp_path: Path) -> None:
        log = tmp_path / "log.jsonl"
        run = ("run", PROMPTS[2]["turns"][0], "--max-new-tokens", 24, "--ignore-eos", "--seed", 7, "--threads", 1)
        for controller in ("fixed:2", "adaptive", "off"):
            assert call(*run, "--no-calibrate", "--log", log, "--controller", controller).code == 0
        done = call("replay", trace, "--policy", "off", "--log", log, "--json", "-")
        runs = json_of(done)["logged"]
        assert [run["controller"] for run in runs] == ["fixed:2", "adaptive", "off"]
        for run in runs:
            assert run["same"], run
            assert run["rounds"] == run["logged_rounds"]
            assert run["committed"] == run["logged_committed"] == 23
            assert run["logged_seconds"] > 0.0
            assert run["modelled_seconds"] > 0.0
        assert "repeated exactly" in call("replay", trace, "--log", log).err
        (tmp_path / "other.jsonl").write_text(log.read_text().replace('"seed":7', '"seed":8'))
        assert "no request of the log" in call("replay", trace, "--log", tmp_path / "other.jsonl").error

    def test_adaptive_starts_from_the_bundles_own_policy_as_it_does_in_a_run(self, home: Home, tmp_path: Path) -> None:
        policy = Policy(settings=AdaptiveSettings(first_value=500.0, prior_blocks=50.0, cautious_length=9))
        own, trace, log = home.bundle / POLICY, tmp_path / "trace.jsonl", tmp_path / "log.jsonl"
        own.write_text(json.dumps(policy.as_json()))
        try:
            assert record(home, trace).code == 0
            for prompt in (PROMPTS[2], PROMPTS[0]):
                run = ("run", prompt["turns"][0], "--max-new-tokens", 24, "--ignore-eos", "--seed", 7, "--threads", 1)
                assert call(*run, "--no-calibrate", "--log", log).code == 0
        finally:
            own.unlink()
        asked = ("--policy", "adaptive", "--policy", "adaptive:generic", "--log", log, "--json", "-")
        report = json_of(call("replay", trace, *asked))
        assert [run["same"] for run in report["logged"]] == [True, True]
        own_drafts, generic_drafts = (policy["drafted"] for policy in report["policies"])
        assert own_drafts > generic_drafts

    def test_tables_are_for_people(self, trace: Path) -> None:
        shown = call("replay", trace)
        assert shown.code == 0
        for word in ("policy", "adaptive", "best fixed", "bound", "times off", "seconds are modelled"):
            assert word in shown.out + shown.err

    def test_bad_lines_are_counted_and_skipped(self, trace: Path, tmp_path: Path) -> None:
        path = tmp_path / "t.jsonl"
        path.write_bytes(trace.read_bytes()[:-50] + b'\n{"v": 1, "event": "text"}\nnonsense\n')
        done = call("replay", path, "--policy", "off", "--json", "-")
        assert json_of(done)["texts"] == 3
        assert json_of(done)["skipped"] == {str(path): 3}
        assert "3 lines were cut off or foreign" in done.err

    def test_mistakes_are_one_line(self, trace: Path, tmp_path: Path) -> None:
        (tmp_path / "empty.jsonl").write_text('{"some": "thing"}\n')
        (tmp_path / "bad.json").write_text('{"format": "dflash-ort policy", "version": 9}')
        (tmp_path / "costs.json").write_text("{}")
        for arguments, words in (
            ((tmp_path / "no.jsonl",), "cannot be read: No such file"),
            ((tmp_path / "empty.jsonl",), "holds neither a trace nor a round log"),
            ((trace, "--policy", "best"), "unknown controller 'best'"),
            ((trace, "--policy", "eagle@fixed:2"), "the trace has no drafter 'eagle'; it has ngram, dflash"),
            ((trace, "--policy", tmp_path / "no.json"), "cannot be read"),
            ((trace, "--policy", tmp_path / "bad.json"), "has version 9"),
            (
                (trace, "--policy", "off", "--costs", tmp_path / "costs.json"),
                "is not what 'dflash-ort calibrate --json'",
            ),
            ((trace, "--suites", "z"), "the suites are a, b"),
        ):
            assert words in call("replay", *arguments).error, arguments
