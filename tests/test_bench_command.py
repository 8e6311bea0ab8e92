"""`dflash-ort bench` as a user meets it: what is shown, what is written where, and the page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from dflash_ort.cli.bench_report import page
from dflash_ort.cli.output_file import check_writable, write_whole
from dflash_ort.runtime.bench import (
    OFF,
    OFF_UNPADDED,
)
from dflash_ort.runtime.engine import Engine
from tests.shell import Home, Outcome, at_home, call, json_of
from tests.test_bench import PROMPTS, write_prompts
from tests.test_bench_numbers import make_report

CONTROLLERS = "fixed:2,off,ngram@fixed:3,adaptive"
LABELS = [*CONTROLLERS.split(","), OFF_UNPADDED]
SHORT = ("--max-new-tokens", 10, "--repeats", 2, "--ignore-eos")


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    with at_home(tmp_path_factory.mktemp("home")) as made:
        yield made


@pytest.fixture(scope="module")
def prompts_file(home: Home) -> Path:
    return write_prompts(home.root / "prompts.jsonl", *PROMPTS)


@pytest.fixture(scope="module")
def measured(home: Home, prompts_file: Path) -> tuple[Outcome, dict[str, Any], str]:
    """One whole run of the command: what it showed, its JSON, its page."""
    out, html = home.root / "out.json", home.root / "out.html"
    outcome = call(
        "bench", "--controllers", CONTROLLERS, "--prompts", prompts_file, *SHORT, "--json", out, "--report", html
    )
    assert outcome.code == 0, outcome
    return outcome, json.loads(out.read_text("utf-8")), html.read_text("utf-8")


class TestCommand:
    def test_shape_and_order(self, measured: tuple[Outcome, dict[str, Any], str]) -> None:
        _, report, _ = measured
        assert [row["controller"] for row in report["summary"]] == LABELS
        for row in report["summary"]:
            assert row["committed"] == 4 * 2 * 10
            assert row["rounds"] > 0
            assert row["tokens_per_second"] > 0
            assert row["speedup"] > 0
            assert len(row["speedup_interval"]) == 2
        by_name = {row["controller"]: row for row in report["summary"]}
        assert by_name[OFF]["acceptance_length"] is None
        assert by_name[OFF]["verified"] == by_name[OFF_UNPADDED]["drafted"] == 0
        assert by_name["fixed:2"]["acceptance_length"] >= 1.0
        assert [by_name[name]["different"] for name in LABELS[:-1]] == [0] * 4
        assert [(r["suite"], r["controller"]) for r in report["suites"]] == [
            (suite, label) for suite in ("count", "prompts") for label in LABELS
        ]
        assert report["version"] == 1
        assert report["settings"]["controllers"] == LABELS
        assert report["settings"]["interleave"] is False

    def test_per_prompt(self, measured: tuple[Outcome, dict[str, Any], str]) -> None:
        _, report, _ = measured
        named = [(p["id"], p["turn"], p["temperature"]) for p in report["prompts"]]
        assert named == [("a", 1, 0.0), ("a", 2, 0.0), ("2", 1, 0.8), ("line-3", 1, 0.0)]
        assert report["prompts"][1]["prompt_tokens"] > report["prompts"][0]["prompt_tokens"]
        for prompt in report["prompts"]:
            assert [c["controller"] for c in prompt["controllers"]] == LABELS
            for controller in prompt["controllers"]:
                assert len(controller["runs"]) == 2
                for run in controller["runs"]:
                    assert run["committed"] == 10
                    assert run["ttft_s"] > 0 < run["tpot_s"]
                    assert sum(run["trace"]["committed"] if "trace" in run else [9]) == 9

    def test_identities(self, measured: tuple[Outcome, dict[str, Any], str], home: Home) -> None:
        _, report, _ = measured
        (bundle,) = report["bundles"]
        assert bundle["template"]["arguments"] == {}
        assert len(bundle["template"]["sha256"]) == len(bundle["identity"]) == 64
        assert bundle["costs"]["rows"][0] == 1
        assert report["machine"]["cpu"]
        assert report["machine"]["threads"] == bundle["threads"]
        assert str(home.root) not in json.dumps(report)

    def test_the_table_and_the_verdict_are_shown(self, measured: tuple[Outcome, dict[str, Any], str]) -> None:
        shown = measured[0].out
        assert re.findall(r"(?m)^(\S+) +\d+\.\d ", shown) == LABELS
        assert re.findall(r"(?m)^(?:pass|fail|unknown) +(.+?):", shown) == [
            "correctness", "quality", "latency", "capacity and cost",
        ]  # fmt: skip
        assert "noise of the machine" in shown

    def test_json_to_standard_output_and_nothing_else(self, prompts_file: Path) -> None:
        options = ("--prompts", prompts_file, "--controllers", "fixed:1", "--suites", "prompts", "--repeats", 1)
        shown = call("bench", *options, "--max-new-tokens", 4, "--json", "-")
        report = json_of(shown)
        assert len(shown.out.splitlines()) == 1
        assert [row["controller"] for row in report["summary"]] == ["fixed:1", OFF, OFF_UNPADDED]
        assert report["summary"][0]["speedup_interval"] is None, "one prompt has no interval"
        assert "correctness" in shown.err

    def test_bundles_side_by_side(self, home: Home, prompts_file: Path) -> None:
        options = ("--prompts", prompts_file, "--controllers", "fixed:1", "--per-suite", 1, "--repeats", 1)
        report = json_of(call("bench", home.bundle, home.bundle, *options, "--max-new-tokens", 4, "--json", "-"))
        labels = [bundle["bundle"] for bundle in report["bundles"]]
        assert labels == ["1-default", "2-default"]
        assert [(row["bundle"], row["controller"]) for row in report["summary"]] == [
            (label, name) for label in labels for name in ("fixed:1", OFF, OFF_UNPADDED)
        ]
        assert len(report["gates"]) == 8
        assert len(report["prompts"]) == 2 * 3
        ElementTree.fromstring(page(report))

    def test_strict(self, prompts_file: Path) -> None:
        options = ("--prompts", prompts_file, "--controllers", "fixed:1", "--repeats", 1, "--max-new-tokens", 4)
        failing = ("--min-speedup", 1000)
        assert call("bench", *options, *failing).code == 0
        strict = call("bench", *options, *failing, "--max-ttft", 1000, "--strict")
        assert strict.code == 1
        assert strict.err.splitlines()[-1] == "error: 1 of 4 gates failed: capacity and cost (fp32)"
        assert "correctness" in strict.out, "everything is shown nevertheless"
        opened = ("--min-speedup", 0, "--max-ttft", 1000, "--strict")
        assert call("bench", *options, *opened).code == 0

    def test_a_prompt_that_does_not_fit_is_left_out(self, tmp_path: Path) -> None:
        long = {"id": "long", "turns": ["x" * 9000]}
        path = write_prompts(tmp_path / "p.jsonl", long, {"turns": ["a"]})
        options = ("--controllers", "off", "--repeats", 1, "--max-new-tokens", 3, "--json", "-")
        report = json_of(call("bench", "--prompts", path, *options))
        assert [s["id"] for s in report["skipped"]] == ["long"]
        assert "the context holds" in report["skipped"][0]["reason"]
        write_prompts(path, long)
        refused = call("bench", "--prompts", path, *options)
        assert "none of the 1 prompts could be asked" in refused.err.splitlines()[-1]
        assert (refused.code, refused.out) == (1, "")

    @pytest.mark.parametrize(
        ("options", "code", "message"),
        [
            (("--controllers", "fast"), 1, "unknown controller 'fast'"),
            (("--suites", "code,poems"), 2, "there is no suite 'poems'; expected code, "),
            (("--repeats", 0), 2, "--repeats"),
            (("--temperature", -1), 1, "temperature is -1.0"),
            (("--seed", -1), 1, "seed is -1"),
            (("--json", "nowhere/x.json"), 1, "there is no directory 'nowhere'"),
            (("--report", "."), 1, "'.' is a directory"),
            (("nowhere",), 1, "'nowhere' is not a bundle"),
        ],
    )
    def test_wrong_usage_is_said_before_anything_runs(
        self, options: tuple[object, ...], code: int, message: str
    ) -> None:
        outcome = call("bench", *options)
        assert outcome.code == code
        assert message in outcome.error

    def test_ctrl_c_shows_what_there_is(
        self, prompts_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stream, asked = Engine.stream, []

        def interrupted(self: Engine, prompt: Any, *args: Any, **options: Any) -> Any:
            asked.append(prompt)
            if prompt == "un deux trois":
                raise KeyboardInterrupt
            return stream(self, prompt, *args, **options)

        monkeypatch.setattr(Engine, "stream", interrupted)
        out = tmp_path / "out.json"
        options = ("--controllers", "off", "--repeats", 1, "--max-new-tokens", 3, "--json", out)
        stopped = call("bench", "--prompts", prompts_file, *options)
        assert (stopped.code, stopped.err.splitlines()[-1]) == (130, "stopped")
        report = json.loads(out.read_text())
        assert report["interrupted"]
        assert {p["id"] for p in report["prompts"]} == {"a"}


class TestPage:
    def test_it_is_well_formed_and_self_contained(self, measured: tuple[Outcome, dict[str, Any], str]) -> None:
        html = measured[2]
        assert html.startswith("<!DOCTYPE html>\n")
        root = ElementTree.fromstring(html)
        assert not re.search(r"https?:|//|url\(|@import|<script|<link|<img|\bsrc=|\bhref=", html)
        tags = [element.tag for element in root.iter()]
        assert tags.count("svg") >= 4
        assert tags.count("main") == 1
        assert not any(
            "nan" in value.lower() for e in root.iter() for n, value in e.attrib.items() if n != "aria-label"
        )

    def test_it_shows_everything(self, measured: tuple[Outcome, dict[str, Any], str]) -> None:
        root = ElementTree.fromstring(measured[2])
        heads = [head.text for head in root.iter("h2")]
        assert heads == [
            "Verdict", "Summary", "Speed-up by suite", "Drafts and costs", "Length chosen over time",
            "How it was measured",
        ]  # fmt: skip
        captions = " ".join(caption.text or "" for caption in root.iter("figcaption"))
        assert "Survival of" in captions
        assert "Cost staircase" in captions
        assert [row[0].text for row in root.iter("tr")][1:] == LABELS
        for svg in root.iter("svg"):
            assert svg.get("aria-label")

    def test_names_are_escaped(self, measured: tuple[Outcome, dict[str, Any], str]) -> None:
        report = json.loads(json.dumps(measured[1]).replace('"count"', '"<b>&\'\\"count"'))
        shown = page(report)
        ElementTree.fromstring(shown)
        assert "<b>&'" not in shown

    def test_little_to_show_is_still_a_page(self) -> None:
        report = make_report(prompts=1)
        report["bundles"][0] |= {"name": "m", "precision": "int8", "drafter": "none", "identity": "0" * 64}
        report["bundles"][0] |= {"template": {"sha256": None, "arguments": {}}, "costs": None, "threads": 1}
        report |= {"gates": [], "settings": {"repeats": 2}, "machine": {"threads": 1, "cpu": "c", "time": "t"}}
        ElementTree.fromstring(page(report))
        for name in ("summary", "suites"):
            report[name] = [row for row in report[name] if row["controller"] != "fixed:1"]
        ElementTree.fromstring(page(report))


class TestFiles:
    def test_whole_or_not_at_all(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "f"
        write_whole(path, "old")
        link = tmp_path / "link"
        link.symlink_to(path)
        write_whole(link, "new")
        assert (path.read_text(), link.is_symlink()) == ("new", True)
        with pytest.raises(UnicodeEncodeError):
            write_whole(path, "\ud800")
        assert path.read_text() == "new"
        assert sorted(p.name for p in tmp_path.iterdir()) == ["f", "link"]

    def test_a_device_stays_a_device(self) -> None:
        check_writable(Path("/dev/null"))
        write_whole(Path("/dev/null"), "gone")
        assert Path("/dev/null").is_char_device()
