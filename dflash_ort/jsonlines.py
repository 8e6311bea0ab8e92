"""Files of JSON lines, plain or compressed: read as a stream whatever is wrong with a line, appended to line by line.

A name that ends in ``.gz`` or ``.zst``, with ``.part`` behind it or without, is compressed. A ``.zst`` file is a row of
frames, one for each line that was appended, so that a crash costs the last line as it does in a plain file.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from dflash_ort.errors import LogError

_BLOCK = 1 << 20
_LEVEL = 6
"""Of zstandard: traces of numbers gain little from more."""


class JsonLines:
    """The objects of one file, in order. ``skipped`` counts lines so far that were none: cut off, or foreign."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.skipped = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Raises LogError for a file that cannot be read, naming it."""
        self.skipped = 0
        try:
            for line in _whole_lines(self.path):
                value = _object(line)
                if value is not None:
                    yield value
                elif line.strip():
                    self.skipped += 1
        except OSError as error:
            raise LogError(f"'{self.path}' cannot be read: {error.strerror or error}") from error


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _suffix(path: Path) -> str:
    return (path.with_suffix("") if path.suffix == ".part" else path).suffix


def _blocks(path: Path) -> Iterator[bytes]:
    """A file's content, decompressed. Raises EOFError where compressed data is damaged or ends too early."""
    suffix = _suffix(path)
    if suffix == ".zst":
        with path.open("rb") as file:
            for block, _ in _frames(file):
                yield block
        return
    with gzip.open(path) if suffix == ".gz" else path.open("rb") as file:
        try:
            while block := file.read(_BLOCK):
                yield block
        except (gzip.BadGzipFile, zlib.error) as error:
            raise EOFError from error


def _frames(file: IO[bytes]) -> Iterator[tuple[bytes, int]]:
    """Pieces of a row of frames, decompressed, each with where the last whole frame so far ends in the file.

    Raises EOFError where a frame is damaged or is not there to its end.
    """
    zstandard, whole = _zstandard(), 0
    rest, frame = b"", None
    while block := rest or file.read(_BLOCK):
        frame = frame or zstandard.ZstdDecompressor().decompressobj()
        try:
            content = frame.decompress(block)
        except zstandard.ZstdError as error:
            raise EOFError from error
        rest = b""
        if frame.eof:
            rest, frame = frame.unused_data, None
            whole = file.tell() - len(rest)
        yield content, whole
    if frame is not None:
        raise EOFError


def _whole_lines(path: Path) -> Iterator[bytes]:
    """Lines up to the end, or to where compressed data is damaged, which counts as one more that is none."""
    rest = b""
    try:
        for block in _blocks(path):
            lines = (rest + block).split(b"\n")
            rest = lines.pop()
            yield from lines
    except EOFError:
        rest = rest or b"damaged"
    if rest:
        yield rest


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        raise LogError("files that end in .zst need zstandard; install 'dflash-ort[tune]'") from None
    return zstandard


class JsonLinesWriter:
    """Appends objects to a file, each whole and at once; what a crash left of a line is cut off first.

    A name that ends in ``.gz`` is refused: such a file cannot be told to end after a line. Raises LogError, OSError.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if _suffix(self.path) == ".gz":
            raise LogError(f"'{path}' cannot be appended to line by line; name it .jsonl or .jsonl.zst")
        is_zst = _suffix(self.path) == ".zst"
        self._compressor = _zstandard().ZstdCompressor(level=_LEVEL) if is_zst else None
        self._file = io.FileIO(self.path, "r+" if self.path.exists() else "x+")
        self._file.truncate(_whole_frames(self._file) if is_zst else _whole_bytes(self._file))
        self._file.seek(0, os.SEEK_END)

    @property
    def size(self) -> int:
        """Bytes so far."""
        return self._file.tell()

    def write(self, value: Mapping[str, Any]) -> None:
        """Append one line."""
        line = json.dumps(value, separators=(",", ":")).encode() + b"\n"
        content = memoryview(self._compressor.compress(line) if self._compressor else line)
        while content:
            content = content[self._file.write(content) :]

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _whole_bytes(file: io.FileIO) -> int:
    """Where the last whole line of a plain file ends."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - _BLOCK)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _whole_frames(file: io.FileIO) -> int:
    """Where the last whole frame of a compressed file ends."""
    whole = 0
    file.seek(0)
    with suppress(EOFError):
        for _, end in _frames(file):
            whole = end
    return whole
