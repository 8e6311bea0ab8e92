"""The round log: just what docs/log-format.md says, no text unless asked, and never a reason to stop."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import re
import threading
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from dflash_ort.params import SamplingParams
from dflash_ort.records import LOG_VERSION
from dflash_ort.runtime.engine import Engine

ROOT = Path(__file__).resolve().parent.parent
ALWAYS = {"v", "event", "request_id"}
SECRET = "Xylophone quagmire 1234567"
PARAMS = SamplingParams(max_new_tokens=24, temperature=0.8, seed=11, stop=("zebra crossing",), ignore_eos=True)


def documented(event: str) -> tuple[set[str], set[str]]:
    """The fields that the document's table of an event names: always there, and only with text."""
    text = (ROOT / "docs" / "log-format.md").read_text("utf-8")
    section = text.split(f'`"event": "{event}"`', 1)[1].split("\n## ", 1)[0]
    always: set[str] = set()
    with_text: set[str] = set()
    for line in section.splitlines():
        if line.startswith("| `"):
            cell, meaning = line.strip("| ").split(" | ", 1)
            (with_text if meaning.startswith("only with text") else always).update(re.findall(r"`(\w+)`", cell))
    if event == "end":
        always, with_text = {"finish_reason", "committed"}, {"text"}
        assert all(f"`{name}`" in section for name in always | with_text)
    assert always
    return always, with_text


def lines_of(path: Path) -> list[dict[str, Any]]:
    """As a reader should: lines that do not parse were cut off by a crash."""
    lines = []
    for line in path.read_text("utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Callable[..., Path]) -> Path:
    return tiny_bundle("fp32")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "rounds.jsonl"


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    return lambda: [r.getMessage() for r in caplog.records if "round log" in r.getMessage()]


def load(bundle: Path, log: Path | str, **options: Any) -> Engine:
    return Engine.load(bundle, threads=1, calibrate=False, log=log, **options)


@pytest.mark.parametrize("with_text", [False, True])
@pytest.mark.parametrize("drafter", ["auto", "none"])
def test_lines_hold_what_is_documented_and_nothing_else(bundle: Path, log: Path, with_text: bool, drafter: Any) -> None:
    with load(bundle, log, log_text=with_text, drafter=drafter) as engine:
        engine.generate(SECRET, PARAMS)
    lines = lines_of(log)
    assert [line["event"] for line in lines[:2]] == ["request", "round"]
    assert [line["event"] for line in lines if line["event"] != "round"] == ["request", "end"]
    for line in lines:
        always, only_with_text = documented(line["event"])
        assert set(line) == ALWAYS | always | (only_with_text if with_text else set())
        assert line["v"] == LOG_VERSION
    request = lines[0]
    assert set(request["bundle"]) == {"name", "identity", "precision"}
    assert set(request["machine"]) == {"cpu", "threads", "onnxruntime", "provider"}
    assert set(request["template"]) == {"sha256", "arguments", "raw"}
    assert request["settings"]["stop"] == 1
    assert request["seed"] == 11


def test_no_text_unless_asked(bundle: Path, log: Path) -> None:
    """Not of the prompt, nor of the answer, nor of what may hold either: stops, template arguments, token ids."""
    with load(bundle, log) as engine:
        answer = engine.generate(SECRET, PARAMS, template_arguments={"mood": "melancholy"})
    content = log.read_text("utf-8")
    for word in (*SECRET.split(), "zebra", "melancholy", answer.text.strip()[:6]):
        assert word not in content
    assert "mood" in content, "the names of a template's arguments change acceptance, so they are kept"
    for line in lines_of(log):
        assert not {"token_ids", "prompt_ids", "text"} & set(line)


def test_with_text_a_run_can_be_read_back(bundle: Path, log: Path) -> None:
    with load(bundle, log, log_text=True) as engine:
        answer = engine.generate(SECRET, PARAMS)
        prompt = engine._opened().text.encode(SECRET, raw=False, template_arguments={})
    lines = lines_of(log)
    assert lines[0]["prompt_ids"] == prompt
    rounds = [token for line in lines if line["event"] == "round" for token in line["token_ids"]]
    assert rounds == list(answer.token_ids[1:]), "prefill's token belongs to no round"
    assert lines[-1]["text"] == answer.text


@pytest.mark.parametrize("controller", ["adaptive", "fixed:3", "off"])
def test_sums_are_the_statistics(bundle: Path, log: Path, controller: str) -> None:
    with load(bundle, log, controller=controller) as engine:
        s = engine.generate("abc abc abc abc", PARAMS, raw=True).statistics
    lines = lines_of(log)
    rounds = [line for line in lines if line["event"] == "round"]
    assert [line["round_id"] for line in rounds] == list(range(s.rounds))

    def total(name: str) -> Any:
        return sum(line[name] for line in rounds)

    counts = (total("num_drafted"), total("num_verified"), total("num_accepted"), total("num_committed") + 1)
    assert counts == (s.drafted, s.verified, s.accepted, s.committed)
    assert lines[-1]["committed"] == s.committed
    for part in ("draft_s", "verify_s", "sample_s", "other_s"):
        assert total(part) == pytest.approx(getattr(s, part))
    assert all(line["total_rows"] == line["num_verified"] + 1 for line in rounds)
    if controller == "adaptive":
        assert total("predicted_committed") == pytest.approx(s.predicted_committed)


def test_requests_and_processes_share_a_file(bundle: Path, log: Path) -> None:
    for _ in range(2):
        with load(bundle, log) as engine:
            for _ in range(2):
                engine.generate("abc", PARAMS, raw=True)
    lines = lines_of(log)
    requests = [line["request_id"] for line in lines if line["event"] == "request"]
    assert len(set(requests)) == 4, "ids are unique over processes"
    assert {line["request_id"] for line in lines} == set(requests)


def test_streams_on_several_threads_do_not_mix_lines(bundle: Path, log: Path) -> None:
    with load(bundle, log, log_text=True) as engine:

        def answer() -> None:
            for _ in range(3):
                engine.generate(SECRET * 15, PARAMS, raw=True)  # long lines

        threads = [threading.Thread(target=answer) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lines = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    assert sum(line["event"] == "end" for line in lines) == 12


def test_a_cancelled_stream_ends_with_a_line(bundle: Path, log: Path) -> None:
    with load(bundle, log) as engine:
        with engine.stream("abc", PARAMS, raw=True) as stream:
            next(stream)
            next(stream)
        assert lines_of(log)[-1]["finish_reason"] == "cancelled"
        assert lines_of(log)[-1]["committed"] == len(stream.token_ids)
        engine.stream("abc", PARAMS, raw=True)  # never read, and dropped
        gc.collect()
        events = [line["event"] for line in lines_of(log)]
        assert events[-2:] == ["request", "end"]
        assert lines_of(log)[-1]["committed"] == 0


def test_a_crash_loses_no_more_than_the_last_line(bundle: Path, log: Path) -> None:
    """Every line is in the file as soon as its round is over; half a line does not spoil the next run's first."""
    with load(bundle, log) as engine:
        stream = engine.stream("abc", PARAMS, raw=True)
        for rounds in range(4):
            next(stream)
            assert len(lines_of(log)) == 1 + rounds
        stream.close()
    whole = len(lines_of(log))
    with log.open("ab") as file:
        file.write(b'{"v":1,"event":"rou')
    assert len(lines_of(log)) == whole
    with load(bundle, log) as engine:
        engine.generate("abc", PARAMS, raw=True)
    added = lines_of(log)[whole:]
    assert added[0]["event"] == "request"
    assert added[-1]["event"] == "end"


def test_the_text_does_not_depend_on_logging(bundle: Path, log: Path) -> None:
    with Engine.load(bundle, threads=1, calibrate=False) as engine:
        expected = engine.generate("abc", PARAMS, raw=True).token_ids
    with load(bundle, log) as engine:
        assert engine.generate("abc", PARAMS, raw=True).token_ids == expected


# Where it cannot be written --------------------------------------------------


@pytest.mark.parametrize("where", ["a directory", "no directory", "below a file", "read-only"])
def test_a_file_that_cannot_be_opened_costs_one_warning(
    bundle: Path, tmp_path: Path, where: str, warnings: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    path = {"a directory": tmp_path, "below a file": tmp_path / "file" / "log"}.get(where, tmp_path / "none" / "log")
    if where == "read-only":  # permissions would not stop root

        def refuse(*_: Any) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        monkeypatch.setattr("dflash_ort.runtime.roundlog.FileIO", refuse)
    with load(bundle, path) as engine:
        for _ in range(2):
            assert engine.generate("abc", PARAMS, raw=True).statistics.committed == 24
    assert len(warnings()) == 1
    assert str(path) in warnings()[0]
    assert "logging is off" in warnings()[0]


class FullAfter(FileIO):
    """A file on a disk that has room for some more bytes: what fits of a write is written, as real ones do."""

    room = 0

    def write(self, content: Any) -> int:
        fits = bytes(content)[: FullAfter.room]
        FullAfter.room -= len(fits)
        if not fits:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(fits)


@pytest.mark.parametrize("room", [0, 10, 2500])
def test_a_disk_that_fills_up_costs_one_warning(
    bundle: Path, log: Path, room: int, warnings: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_ort.runtime.roundlog.FileIO", FullAfter)
    monkeypatch.setattr(FullAfter, "room", room)
    with load(bundle, log) as engine:
        for _ in range(2):
            assert engine.generate("abc", PARAMS, raw=True).statistics.committed == 24
        assert engine._log is not None
        assert engine._log._file is None, "it was closed"
    assert len(warnings()) == 1
    assert os.strerror(errno.ENOSPC) in warnings()[0]
    assert log.stat().st_size == room
    assert all(line["event"] in ("request", "round") for line in lines_of(log))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_real_full_device_costs_one_warning(bundle: Path, warnings: Callable[[], list[str]]) -> None:
    with load(bundle, "/dev/full") as engine:
        assert engine.generate("abc", PARAMS, raw=True).statistics.committed == 24
    gc.collect()
    assert len(warnings()) == 1


def test_an_engine_that_is_closed_stops_logging_quietly(
    bundle: Path, log: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = load(bundle, log)
    stream = engine.stream("abc", PARAMS, raw=True)
    next(stream)
    engine.close()
    stream.close()
    engine.close()
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert [line["event"] for line in lines_of(log)] == ["request"]
