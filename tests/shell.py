"""Runs the command as a user does: in this process for speed, in one of its own where the process itself matters."""

from __future__ import annotations

import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from unittest import mock

import pytest

from dflash_ort.cli.main import main
from tests.tiny import TinyShape, write_drafter, write_target

PATIENCE_S = 60.0
"""How long a process may take to say something before a test gives up on it."""

SHAPE = TinyShape(layers=2, hidden=32, intermediate=48, heads=2, kv_heads=1, context=8192)
BLOCK = 6

_SHIM = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)  # a test run in the background has it ignored
exec(sys.argv[1])
os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True)
class Outcome:
    """What a finished command left."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The only error line, which must be the last one, with nothing on standard output before it."""
        assert self.code in (1, 2), self
        assert self.out == ""
        lines = self.err.splitlines()
        assert [line for line in lines if line.startswith("error: ")] == lines[-1:], self.err
        assert "Traceback" not in self.err
        assert "this is a bug" not in self.err
        return lines[-1].removeprefix("error: ")


@dataclass(frozen=True)
class Home:
    """A user's files: checkpoints that fit each other, and a cache of their own."""

    root: Path
    target: Path
    drafter: Path
    bundle: Path


@contextmanager
def at_home(root: Path) -> Iterator[Home]:
    """A home with a default bundle that the command itself has made."""
    cache = root / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_ORT_CACHE", str(cache))
        taps = (0, 1)
        target, drafter = write_target(root / "target", SHAPE), root / "drafter"
        write_drafter(drafter, SHAPE, block_size=BLOCK, taps=taps, layers=1)
        made = call("export", "--target", target, "--drafter", drafter)
        assert made.code == 0, made
        yield Home(root, target, drafter, cache / "bundles" / "default")


def call(*arguments: object, stdin: bytes = b"") -> Outcome:
    """Run the command in this process."""
    streams = [io.TextIOWrapper(io.BytesIO(data), "utf-8", write_through=True) for data in (stdin, b"", b"")]
    patches = {"argv": ["dflash-ort", *map(str, arguments)]}
    patches |= dict(zip(("stdin", "stdout", "stderr"), streams, strict=True))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with mock.patch.multiple(sys, **patches), pytest.raises(SystemExit) as ended:
            main()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    out, err = (stream.buffer.getvalue().decode() for stream in streams[1:])  # type: ignore[attr-defined]
    return Outcome(ended.value.code or 0, out, err)  # type: ignore[arg-type]


def json_of(outcome: Outcome) -> dict[str, Any]:
    """The one object that a command has printed."""
    assert outcome.code == 0, outcome
    answer: dict[str, Any] = json.loads(outcome.out)
    return answer


def start(*arguments: object, first: str = "", env: Mapping[str, str] | None = None, **options: Any) -> Any:
    """Start the installed command in a process of its own, with pipes to it. ``first`` is Python that runs there before
    the command does. Warnings are shown, so that one that leaks is seen.
    """
    installed = Path(sys.executable).with_name("dflash-ort")
    assert installed.is_file(), f"the package is not installed beside {sys.executable}"
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(
        [sys.executable, "-c", _SHIM, first, str(installed), *map(str, arguments)],
        env={**os.environ, "PYTHONWARNINGS": "default", **(env or {})},
        **{**pipes, **options},
    )


def finish(process: Any, stdin: bytes = b"") -> Outcome:
    """Wait for a process; its output is decoded as it should be, strictly."""
    with process:
        try:
            out, err = process.communicate(stdin, timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return Outcome(process.returncode, (out or b"").decode(), (err or b"").decode())


class Terminal:
    """The command in a terminal: what a person types and sees."""

    def __init__(self, *arguments: object, term: str = "dumb") -> None:
        self._ours, theirs = os.openpty()
        first = (
            "import fcntl, struct, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
            "fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack('HHHH', 40, 120, 0, 0))"
        )
        ends = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
        environment = {"TERM": term, "NO_COLOR": "1"}
        self._process = start(*arguments, first=first, env=environment, **ends)
        os.close(theirs)
        self.seen = ""
        """All that was shown so far."""
        self._read = 0

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def wait_for(self, pattern: str) -> str:
        """Wait until what is shown matches; returns what was shown since the last wait."""
        deadline = time.monotonic() + PATIENCE_S
        while not (match := re.compile(pattern, re.DOTALL).search(self.seen, self._read)):
            if time.monotonic() > deadline or not self._more(1.0):
                raise AssertionError(f"no {pattern!r} in {self.seen[self._read :]!r}")
        shown = self.seen[self._read : match.end()]
        self._read = match.end()
        return shown

    def end(self, key: str = "") -> int:
        """Press ``key``, if there is one, and wait for the end; returns the exit status."""
        deadline = time.monotonic() + PATIENCE_S
        if key:
            self.type(key)
        before = len(self.seen)
        while self._more(1.0):
            assert time.monotonic() < deadline, f"it does not end: {self.seen[-500:]!r}"
            if key and len(self.seen) == before:
                self.type(key)  # nothing for a second: Python's readline may overlook a signal until the next key
            before = len(self.seen)
        code: int = self._process.wait(PATIENCE_S)
        return code

    def _more(self, seconds: float) -> bool:
        """Read what there is; False when the other side is gone."""
        if not select.select([self._ours], [], [], seconds)[0]:
            return self._process.poll() is None
        try:
            data = os.read(self._ours, 65536)
        except OSError:  # how Linux says that the other end is closed
            return False
        self.seen += data.decode(errors="replace")
        return bool(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        os.close(self._ours)
