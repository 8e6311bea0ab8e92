"""`dflash-ort tune` as a user meets it: what is written, what is refused and why, what it says of newer logs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.synthetic import INT8
from dflash_ort.controller.acceptance import GENERIC_PRIORS
from dflash_ort.controller.adaptive import Adaptive
from dflash_ort.controller.cost import CostModel
from dflash_ort.controller.names import GENERIC_COSTS
from dflash_ort.controller.replay import TableClock, rounds
from dflash_ort.controller.tuning import Answer
from dflash_ort.runtime.policies import load_policy, named_controller
from tests.shell import Outcome, call, json_of
from tests.test_tuning import LIKE_GENERIC, MODEST, answers

QUICK = ("--trials", 4)
TIMES = ("2026-01-01T00:00:00+00:00", "2026-01-02T00:00:00+00:00")


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_trace(path: Path, given: Sequence[Answer], costs: bool = True) -> Path:
    header = {"v": 1, "event": "trace", **({"costs": asdict(INT8)} if costs else {})}
    return write_lines(path, [header, *({"v": 1, **a.text.as_json()} for a in given)])


def log_lines(given: Sequence[Answer]) -> Iterable[dict[str, Any]]:
    """The log of a run over these answers in the format of docs/log-format.md."""
    controller, clock = Adaptive(CostModel(INT8)), TableClock(INT8)
    for number, answer in enumerate(given):
        text, head = answer.text, {"v": 1, "request_id": answer.text.id}
        settings = {"temperature": 0.0, "max_new_tokens": text.max_tokens}
        yield {
            **head, "event": "request", "time": TIMES[number > 0], "prompt_tokens": text.prompt_tokens,
            "seed": text.seed, "settings": settings,
        }  # fmt: skip
        for record in rounds(controller, text, list(text.proposals), clock, number):
            part, whole = asdict(record.requests[0]), asdict(record)
            del part["request_id"], whole["requests"]
            yield {**head, "event": "round", **part, **whole}
        yield {**head, "event": "end", "finish_reason": "length", "committed": text.num_tokens}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces "modest", "generic" and "later" (as modest), and logs of the same names."""
    root = tmp_path_factory.mktemp("tune")
    for name, regimes, seed in (("modest", MODEST, 1), ("generic", LIKE_GENERIC, 0), ("later", MODEST, 2)):
        given = answers(regimes, 28, seed=seed)
        write_trace(root / f"{name}.trace", given)
        write_lines(root / f"{name}.log", log_lines(given))
    return root


@pytest.fixture(scope="module")
def tuned(place: Path) -> tuple[Outcome, dict[str, Any], Path]:
    """One whole tuning: what it showed, its JSON, and its policy."""
    out, policy = place / "out.json", place / "policy.json"
    outcome = call(
        "tune", place / "modest.trace", "--output", policy, *QUICK, "--json", out,
        "--report", place / "report.html",
    )  # fmt: skip
    assert outcome.code == 0, outcome
    return outcome, json.loads(out.read_text("utf-8")), policy


class TestTuning:
    def test_a_policy_that_is_better_is_written_and_can_be_used(
        self, tuned: tuple[Outcome, dict[str, Any], Path]
    ) -> None:
        outcome, whole, path = tuned
        assert whole["better"]
        assert whole["written"]
        assert whole["held_out"]["ratios"]["current"]["ratio"] > 1.0
        assert "is written" in outcome.err
        policy = load_policy(path)
        assert policy.as_json() == json.loads(path.read_text("utf-8"))
        assert policy.priors["dflash"].means[0] > 4.0
        assert policy.priors["ngram"] == GENERIC_PRIORS["ngram"]
        controller = named_controller(str(path), GENERIC_COSTS)
        assert isinstance(controller, Adaptive)
        assert controller.policy.settings == policy.settings

    def test_it_says_where_it_comes_from(self, tuned: tuple[Outcome, dict[str, Any], Path]) -> None:
        notes = load_policy(tuned[2]).notes
        assert notes["from"] == "traces"
        (source,) = notes["sources"]
        assert (source["name"], source["requests"], source["first"]) == ("modest.trace", 28, None)
        assert re.fullmatch("[0-9a-f]{64}", source["sha256"])
        scores = notes["scores"]["dflash"]
        for where in ("out_of_fold", "held_out"):
            assert scores[where]["after"]["log_loss"] < scores[where]["before"]["log_loss"]
            assert set(scores[where]["after"]) >= {"brier", "ece", "auc"}
        assert notes["held_out"]["current"]["interval"][0] > 0.995
        assert notes["costs"]["from"] == "trace"
        assert notes["drift"]["dflash"]["survival"]
        assert notes["created"].endswith("+00:00")

    def test_the_tables(self, tuned: tuple[Outcome, dict[str, Any], Path]) -> None:
        out = tuned[0].out
        for word in ("log-loss", "dflash", "tuned", "current", "generic", "off", "best fixed by suite", "bound"):
            assert word in out
        assert max(map(len, out.splitlines())) <= 80

    def test_each_call_gives_the_same(self, place: Path, tuned: tuple[Outcome, dict[str, Any], Path]) -> None:
        again = place / "again.json"
        outcome = call("tune", place / "modest.trace", "--output", again, *QUICK, "--json")
        whole = json_of(outcome)
        assert {**whole, "created": ""} == {**tuned[1], "created": ""}
        files = [json.loads(path.read_text("utf-8")) for path in (again, tuned[2])]
        assert {**files[0], "created": ""} == {**files[1], "created": ""}

    def test_where_there_is_nothing_to_gain_nothing_is_written(self, place: Path) -> None:
        path = place / "refused.json"
        outcome = call("tune", place / "generic.trace", "--output", path, *QUICK)
        assert outcome.code == 1
        assert outcome.error.startswith("the tuned policy is not better: ")
        assert not path.exists()
        forced = call("tune", place / "generic.trace", "--output", path, *QUICK, "--force", "--json")
        assert json_of(forced)["better"] is False
        assert json_of(forced)["written"] is True
        load_policy(path)

    def test_what_was_tuned_is_not_better_than_itself(
        self, place: Path, tuned: tuple[Outcome, dict[str, Any], Path]
    ) -> None:
        path = place / "twice.json"
        outcome = call("tune", place / "modest.trace", "--output", path, "--current", tuned[2], *QUICK)
        assert "not better" in outcome.error
        assert not path.exists()


class TestLogs:
    def test_logs_alone_are_said_to_be_estimates(self, place: Path) -> None:
        path = place / "from-logs.json"
        outcome = call("tune", place / "modest.log", "--from-logs", "--output", path, *QUICK, "--force", "--json")
        whole = json_of(outcome)
        assert whole["from"] == "logs"
        assert "censoring" in whole["estimated"]
        assert whole["costs"]["from"] == "logs"
        assert whole["sources"][0]["first"] == TIMES[0]
        assert whole["sources"][0]["last"] == TIMES[1]
        assert "what comes of them is estimated" in outcome.err
        assert load_policy(path).notes["from"] == "logs"
        assert load_policy(path).priors["dflash"].means[0] > 1.5
        passes = whole["costs"]["verify"][0][0]
        assert passes == pytest.approx(INT8.verify[0][0], rel=0.1)

    def test_with_traces_both_are_used_unless_logs_are_asked_for(self, place: Path) -> None:
        files = (place / "modest.trace", place / "later.log")
        both = json_of(call("tune", *files, "--output", place / "both.json", *QUICK, "--force", "--json"))
        assert both["from"] == "traces and logs"
        assert both["requests"]["training"] + both["requests"]["held_out"] == 56
        alone = call("tune", *files, "--from-logs", "--output", place / "both.json", *QUICK, "--force", "--json")
        assert json_of(alone)["from"] == "logs"
        assert "28 texts of traces are passed over" in alone.err
        nothing = call("tune", files[0], "--from-logs", "--output", place / "none.json")
        assert "no round log" in nothing.error

    def test_a_log_given_twice_counts_once(self, place: Path) -> None:
        files = [place / "later.log"] * 2
        whole = json_of(call("tune", *files, "--output", place / "x.json", *QUICK, "--force", "--json"))
        assert whole["requests"] == {"training": 14, "held_out": 14}

    def test_bad_lines_are_counted(self, place: Path) -> None:
        path = place / "damaged.log"
        path.write_text('{"v": 1, "event": "mystery"}\n' + (place / "later.log").read_text() + '{"v": 1, "eve')
        outcome = call("tune", path, "--output", place / "x.json", *QUICK, "--force", "--json")
        assert json_of(outcome)["skipped"] == {str(path): 2}
        assert "2 lines were cut off or foreign" in outcome.err


class TestErrors:
    def test_each_is_one_line_that_names_its_cause(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        output = ("--output", place / "never.json")
        given = place / "modest.trace"
        few = write_trace(place / "few.trace", answers(LIKE_GENERIC, 3, length=8))
        plain = list(log_lines(answers(LIKE_GENERIC, 10, length=12)))
        for line in plain:
            line |= {"num_drafted": 0, "num_verified": 0, "num_accepted": 0, "kind": "none", "log_probs": []}
        foreign = write_lines(place / "foreign.jsonl", [{"hello": 1}])
        cases = [
            ((few, *output), "3 requests are too few"),
            ((write_lines(place / "plain.log", plain), *output), "no observed draft"),
            ((foreign, *output), "foreign.jsonl' holds neither"),
            ((place / "absent.log", *output), "absent.log' cannot be read"),
            ((given, *output, "--current", foreign), "foreign.jsonl' is not a policy file"),
            ((given, *output, "--costs", place / "absent.json"), "absent.json' cannot be read"),
            ((given, "--output", place), "is a directory"),
            ((given,), "Missing option '--output'"),
            ((given, *output, "--check", foreign), "--check writes no policy"),
        ]
        for arguments, said in cases:
            assert said in call("tune", *arguments).error
        monkeypatch.setitem(__import__("sys").modules, "sklearn.model_selection", None)
        assert "dflash-ort[tune]" in call("tune", given, *output).error
        assert not (place / "never.json").exists()


class TestCheck:
    def test_texts_of_the_same_kind_are_as_expected(
        self, place: Path, tuned: tuple[Outcome, dict[str, Any], Path]
    ) -> None:
        outcome = call("tune", place / "later.trace", "--check", tuned[2])
        assert outcome.code == 0, outcome
        assert "dflash: as expected, 28 requests" in outcome.out

    def test_other_texts_are_drift(self, place: Path, tuned: tuple[Outcome, dict[str, Any], Path]) -> None:
        outcome = call("tune", place / "generic.log", "--check", tuned[2])
        assert outcome.code == 3
        assert "dflash: drifted" in outcome.out
        assert "is allowed" in outcome.out
        told = call("tune", place / "generic.trace", "--check", tuned[2], "--json")
        assert told.code == 3
        whole = json.loads(told.out)
        assert whole["drifted"]
        assert whole["families"][0]["reasons"]

    def test_too_little_to_tell_is_no_drift(self, place: Path, tuned: tuple[Outcome, dict[str, Any], Path]) -> None:
        few = write_lines(place / "few.log", log_lines(answers(LIKE_GENERIC, 3, seed=5)))
        outcome = call("tune", few, "--check", tuned[2], "--json")
        assert json_of(outcome)["enough"] is False

    def test_a_policy_that_was_not_tuned_is_refused(self, place: Path) -> None:
        path = place / "hand-made.json"
        path.write_text(json.dumps({"format": "dflash-ort policy", "version": 1}))
        assert "does not say what it was tuned on" in call("tune", place / "later.log", "--check", path).error


class TestReport:
    def test_it_is_one_page_with_nothing_from_elsewhere(
        self, place: Path, tuned: tuple[Outcome, dict[str, Any], Path]
    ) -> None:
        html = (place / "report.html").read_text("utf-8")
        root = ElementTree.fromstring(html)
        assert not re.search(r"https?:|//|url\(|@import|<script|<link|<img|\bsrc=|\bhref=", html)
        assert [head.text for head in root.iter("h2")] == [
            "Verdict", "Speed on held-out requests", "Acceptance", "Where time would be won", "How it was tuned",
        ]  # fmt: skip
        captions = " ".join(caption.text or "" for caption in root.iter("figcaption"))
        for words in ("Reliability", "Survival", "Speed-up by suite", "Time of each suite"):
            assert words in captions
        assert all(svg.get("aria-label") for svg in root.iter("svg"))
        assert "nan" not in " ".join(v for e in root.iter() for v in e.attrib.values()).lower()

    def test_names_are_escaped(self, place: Path, tuned: tuple[Outcome, dict[str, Any], Path]) -> None:
        from dflash_ort.cli.tune_report import page

        shown = page(json.loads(json.dumps(tuned[1]).replace('"s1"', '"<b>&\'\\"s1"')))
        ElementTree.fromstring(shown)
        assert "<b>&'" not in shown
