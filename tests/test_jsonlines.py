"""Files of JSON lines: whatever was cut off or is foreign, what is whole is read, and appending goes on behind it."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
import zstandard

from dflash_ort.errors import LogError
from dflash_ort.jsonlines import JsonLines, JsonLinesWriter

LINES: list[dict[str, Any]] = [{"n": i, "x": "y" * (i % 7)} for i in range(50)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst", "a.jsonl.part", "a.jsonl.zst.part"])
def test_what_is_written_is_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    for part in (LINES[:20], LINES[20:]):
        with JsonLinesWriter(path) as writer:
            for line in part:
                writer.write(line)
            assert writer.size == path.stat().st_size
    lines = JsonLines(path)
    assert list(lines) == LINES
    assert lines.skipped == 0
    assert list(lines) == LINES


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst"])
def test_a_crash_costs_the_last_line_wherever_it_cuts(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    with JsonLinesWriter(path) as writer:
        for line in LINES[:3]:
            writer.write(line)
    whole = path.read_bytes()
    with JsonLinesWriter(path) as writer:
        ends = writer.size
        writer.write(LINES[3])
    longer = path.read_bytes()
    assert longer[:ends] == whole
    for cut in range(ends, len(longer)):
        path.write_bytes(longer[:cut])
        assert list(JsonLines(path))[:3] == LINES[:3]
        with JsonLinesWriter(path) as writer:
            writer.write(LINES[4])
        assert list(JsonLines(path)) == [*LINES[:3], LINES[4]], cut


def test_foreign_lines_are_counted_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 1}\nno json\n[1, 2]\n\n"text"\n\xff\xfe\n{"n": 2}\n' + b"[" * 100_000 + b'\n{"n": 3}')
    lines = JsonLines(path)
    assert [line["n"] for line in lines] == [1, 2, 3]
    assert lines.skipped == 5


def test_compressed_files_are_read_up_to_their_damage(tmp_path: Path) -> None:
    content = b"".join(b'{"n": %d}\n' % i for i in range(1000))
    for name, packed in (("a.gz", gzip.compress(content)), ("a.zst", zstandard.compress(content))):
        path = tmp_path / name
        path.write_bytes(packed)
        assert [line["n"] for line in JsonLines(path)] == list(range(1000))
        path.write_bytes(packed[: len(packed) // 2])
        lines = JsonLines(path)
        found = [line["n"] for line in lines]
        assert found == list(range(len(found)))
        assert len(found) < 1000
        assert lines.skipped == 1
        path.write_bytes(b"not compressed")
        lines = JsonLines(path)
        assert list(lines) == []
        assert lines.skipped == 1


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(LogError, match=r"missing\.jsonl' cannot be read: No such file"):
        list(JsonLines(tmp_path / "missing.jsonl"))
    with pytest.raises(LogError, match=r"cannot be appended to"):
        JsonLinesWriter(tmp_path / "a.jsonl.gz")
