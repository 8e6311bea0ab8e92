"""Files and directories that appear whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file beside ``path`` to write to, renamed to it at the end, removed if that is not reached. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}-{secrets.token_hex(4)}.partial")
    try:
        with beside.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise


def put_in_place(made: Path, output: Path, work: Path) -> None:
    """Rename a finished directory of files to ``output``; what was there moves into ``work``, which is about to go.

    All three are on one file system. Raises OSError, and leaves the old directory where it was.
    """
    for path in made.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    replaced = work / "replaced"
    try:
        if output.exists():
            os.rename(output, replaced)
        os.rename(made, output)
    except BaseException:
        if replaced.exists():
            os.rename(replaced, output)
        raise
