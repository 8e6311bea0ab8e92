"""`dflash-ort bench`: who is measured, on what, and in what order."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_ort.controller.names import GENERIC_COSTS, make_controller
from dflash_ort.errors import BundleError, PolicyError, RequestError
from dflash_ort.models.texts import BenchPrompt, bench_prompts
from dflash_ort.params import SamplingParams
from dflash_ort.records import Chunk
from dflash_ort.runtime.bench import (
    OFF,
    OFF_UNPADDED,
    BenchSettings,
    Entry,
    Measurements,
    measure,
    parse_controllers,
)
from dflash_ort.runtime.unpadded import unpadded
from tests.shell import call
from tests.test_bench_numbers import statistics


class TestControllers:
    def test_baselines_are_always_among_them(self) -> None:
        assert [e.label for e in parse_controllers("fixed:3")] == ["fixed:3", OFF, OFF_UNPADDED]
        assert [e.label for e in parse_controllers("off-unpadded, adaptive")] == [OFF_UNPADDED, "adaptive", OFF]

    def test_entries(self) -> None:
        entries = {e.label: e for e in parse_controllers("ngram@fixed:3,adaptive,dflash@threshold:0.4")}
        assert entries["ngram@fixed:3"] == Entry("ngram@fixed:3", "fixed:3", "ngram")
        assert entries["adaptive"].drafter == "auto"
        assert entries["dflash@threshold:0.4"].controller == "threshold:0.4"
        assert entries[OFF] == Entry(OFF, "off", "none")
        assert entries[OFF_UNPADDED] == Entry(OFF_UNPADDED, "off", "none", unpadded=True)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("off,nonsense", "unknown controller 'nonsense'"),
            ("off,", "unknown controller ''"),
            ("fixed:3,fixed:3", "'fixed:3' is named twice"),
            ("gpu@fixed:3", "unknown drafter 'gpu' in 'gpu@fixed:3'"),
            ("@fixed:3", "unknown drafter ''"),
            ("ngram@off-unpadded", "takes no drafter"),
        ],
    )
    def test_what_is_wrong_is_said(self, text: str, message: str) -> None:
        with pytest.raises(PolicyError, match=re.escape(message)):
            parse_controllers(text)


PROMPTS = (
    {"suite": "count", "id": "a", "turns": ["one two three one two three", "and on?"]},
    {"suite": "count", "id": 2, "turns": ["un deux trois"], "temperature": 0.8},
    {"turns": ["abc abc abc"], "comment": "no suite, no id"},
)


def write_prompts(path: Path, *prompts: Mapping[str, Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, prompts)) + "\n", "utf-8")
    return path


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", *PROMPTS)


class TestPrompts:
    def test_built_in(self) -> None:
        prompts = bench_prompts()
        assert len({p.id for p in prompts}) == len(prompts) >= 60
        assert {"code", "chat", "creative", "long"} <= {p.suite for p in prompts}
        assert any(len(p.turns) > 1 for p in prompts)
        assert any(p.temperature for p in prompts if p.suite == "creative")

    def test_of_a_file(self, prompts_file: Path) -> None:
        assert bench_prompts(prompts_file) == (
            BenchPrompt("count", "a", ("one two three one two three", "and on?")),
            BenchPrompt("count", "2", ("un deux trois",), 0.8),
            BenchPrompt("prompts", "line-3", ("abc abc abc",)),
        )

    @pytest.mark.parametrize(
        "line",
        [
            *("nonsense", "[1]", "{}", '{"turns": "text"}', '{"turns": []}', '{"turns": ["a", " "]}', '{"turns": [1]}'),
            *('{"turns": ["a"], "suite": ""}', '{"turns": ["a"], "suite": null}', '{"turns": ["a"], "id": true}'),
            *('{"turns": ["a"], "temperature": -1}', '{"turns": ["a"], "temperature": NaN}', "[" * 100_000),
            *('{"turns": ["a"], "temperature": "hot"}', '{"turns": ["a"], "temperature": 1' + "0" * 400 + "}"),
        ],
        ids=range(15),
    )
    def test_a_bad_line_is_named(self, line: str, tmp_path: Path) -> None:
        path = tmp_path / "p.jsonl"
        path.write_text('{"turns": ["fine"]}\n\n' + line + "\n", "utf-8")
        assert "p.jsonl' line 3 " in call("bench", "--prompts", path).error

    @pytest.mark.parametrize("content", [b"", b"\n \n", b"\xff\xfe"])
    def test_a_file_without_prompts(self, content: bytes, tmp_path: Path) -> None:
        path = tmp_path / "p.jsonl"
        path.write_bytes(content)
        assert re.search("holds no prompts|is not UTF-8", call("bench", "--prompts", path).error)
        assert "No such file" in call("bench", "--prompts", tmp_path / "none.jsonl").error

    def test_a_byte_order_mark_is_no_matter(self, tmp_path: Path) -> None:
        (tmp_path / "p.jsonl").write_bytes(b'\xef\xbb\xbf{"turns": ["a"]}\r\n')
        assert bench_prompts(tmp_path / "p.jsonl")[0].turns == ("a",)


class StubEngine:
    """Answers with the turn's letters; remembers who asked for what."""

    def __init__(self, *, most_messages: int = 9) -> None:
        self.target = SimpleNamespace(attention_floor=2, row_floor=1)
        self.most_messages = most_messages
        self.asked: list[tuple[str, Any, int]] = []
        self.grown: list[tuple[str, int]] = []
        self.name_of: dict[int, str] = {}

    def max_draft(self, drafter: str) -> int:
        if drafter == "dflash":
            raise BundleError("the bundle has no DFlash drafter")
        return 3

    def new_controller(self, name: str) -> Any:
        return make_controller(name, GENERIC_COSTS)

    def costs(self) -> Any:
        return GENERIC_COSTS

    def _opened(self) -> Any:
        return self

    def stream(self, prompt: Any, params: SamplingParams, **options: Any) -> Any:
        if len(prompt) > self.most_messages and not isinstance(prompt, str):
            raise RequestError("too long")
        return self._answer(prompt, options) if options.get("controller") else SimpleNamespace(close=lambda: None)

    @contextmanager
    def _answer(self, prompt: Any, options: dict[str, Any]) -> Iterator[Any]:
        controller = options["controller"]
        name = f"{type(controller).__name__}:{getattr(controller, 'length', '')}"
        self.asked.append((name, prompt, self.target.attention_floor))
        yield StubStream(name, self)


class StubStream:
    """Three tokens, the last of another kind where speculation is said to be wrong."""

    def __init__(self, name: str, engine: StubEngine) -> None:
        self.name, self.engine = name, engine
        self.token_ids, self.text = (1, 2, 3), f"said {name}"
        self.statistics = statistics()

        self._chunks = iter((Chunk(0, "a", (1,)), Chunk(0, "b", (2, 3))))

    def __next__(self) -> Chunk:
        self.engine.grown.append((self.name, self.engine.target.attention_floor))
        return next(self._chunks)


def run_stub(engine: StubEngine, controllers: str, prompts: Sequence[BenchPrompt], repeats: int = 2) -> Measurements:
    engines: Any = {"stub": engine}
    return measure(engines, parse_controllers(controllers), prompts, BenchSettings(repeats=repeats))


class TestMeasuring:
    def test_the_order_turns_and_warm_up_is_not_counted(self) -> None:
        engine = StubEngine()
        prompts = [BenchPrompt("s", "a", ("x",)), BenchPrompt("s", "b", ("y",))]
        result = run_stub(engine, "off,fixed:1,off-unpadded", prompts)
        order = [(name, floor) for name, _, floor in engine.asked]
        a, b, c = ("FixedLength:0", 2), ("FixedLength:1", 2), ("FixedLength:0", 1)
        assert order == [a, b, c, *(a, b, c), *(b, c, a), *(b, c, a), *(c, a, b)]
        assert [prompt for _, prompt, _ in engine.asked[3:]] == ["x"] * 6 + ["y"] * 6
        assert all(len(runs) == 2 for turn in result.turns for runs in turn.runs.values())

    def test_interleaved_answers_grow_together(self) -> None:
        engine: Any = StubEngine()
        prompts = [BenchPrompt("s", "a", ("x",))]
        entries = parse_controllers("off,fixed:1,off-unpadded")
        result = measure({"stub": engine}, entries, prompts, BenchSettings(repeats=2, interleave=True))
        a, b, c = ("FixedLength:0", 2), ("FixedLength:1", 2), ("FixedLength:0", 1)
        warm_up = [x for x in (a, b, c) for _ in range(3)]
        assert engine.grown == warm_up + [a, b, c] * 3 + [b, c, a] * 3, "one more than there are: the end"
        for runs in result.turns[0].runs.values():
            assert [(run.token_ids, run.decoded, len(run.gaps)) for run in runs] == [((1, 2, 3), 2, 1)] * 2

    def test_only_the_unpadded_baseline_is_unpadded(self) -> None:
        engine: Any = StubEngine()

        def fail() -> None:
            with unpadded(engine):
                assert (engine.target.attention_floor, engine.target.row_floor) == (1, 1)
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert (engine.target.attention_floor, engine.target.row_floor) == (2, 1)

    def test_turns_build_on_plain_answers(self) -> None:
        engine = StubEngine()
        result = run_stub(engine, "fixed:2", [BenchPrompt("s", "a", ("x", "y", "z"))], repeats=1)
        second, third = (prompt for _, prompt, _ in engine.asked[6::3])
        assert second == [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "said FixedLength:0"},
            {"role": "user", "content": "y"},
        ]
        assert third[:3] == second
        assert [(t.turn, t.conversation) for t in result.turns] == [(1, 0), (2, 0), (3, 0)]

    def test_what_cannot_be_asked_is_said(self) -> None:
        prompts = [BenchPrompt("s", "a", ("x", "y", "z")), BenchPrompt("s", "b", ("x",))]
        result = run_stub(StubEngine(most_messages=1), "off", prompts)
        assert [(t.id, t.turn) for t in result.turns] == [("a", 1), ("b", 1)]
        assert [(s.id, s.turn, s.reason) for s in result.skipped] == [("a", 2, "too long")]

    def test_a_missing_drafter_is_known_before(self) -> None:
        engine = StubEngine()
        with pytest.raises(BundleError, match="no DFlash drafter"):
            run_stub(engine, "dflash@fixed:1", [BenchPrompt("s", "a", ("x",))])
        assert engine.asked == []

    def test_ctrl_c_keeps_what_is_done(self) -> None:
        def progress(message: str, fraction: float | None = None) -> None:
            if message.startswith(f"prompt {stop}"):
                raise KeyboardInterrupt

        engines: Any = {"stub": StubEngine()}
        prompts = [BenchPrompt("s", name, ("x",)) for name in "abc"]
        stop = 3
        result = measure(engines, parse_controllers("off"), prompts, BenchSettings(), progress)
        assert ([t.id for t in result.turns], result.interrupted) == (["a", "b"], True)
        stop = 1
        with pytest.raises(KeyboardInterrupt):
            measure(engines, parse_controllers("off"), prompts, BenchSettings(), progress)

    def test_temperatures(self) -> None:
        hot = BenchPrompt("s", "a", ("x",), 0.9)
        assert BenchSettings().params(hot).temperature == 0.9
        assert BenchSettings(temperature=0.0).params(hot).temperature == 0.0
        assert BenchSettings().params(BenchPrompt("s", "a", ("x",))).is_greedy
