"""Writes files whole or not at all, and says early when that will not be possible."""

from __future__ import annotations

import os
from pathlib import Path

import click

from dflash_ort.whole import whole_file


def check_writable(path: Path) -> None:
    """Raise click.ClickException when a file cannot be written here: better before long work than after it."""
    if path.is_dir():
        raise click.ClickException(f"'{path}' is a directory; name a file in it")
    place = path.parent
    if not place.is_dir():
        raise click.ClickException(f"'{path}' cannot be written: there is no directory '{place}'")
    if not os.access(path if _is_special(path) else place, os.W_OK):
        raise click.ClickException(f"'{path}' cannot be written: permission denied")


def write_whole(path: Path, content: str) -> None:
    """Write UTF-8; a reader sees the old file or the new one, never a part. Devices and pipes are written as they are.

    Raises OSError.
    """
    if _is_special(path):
        path.write_text(content, "utf-8")
        return
    with whole_file(path.resolve()) as file:  # a link stays a link
        file.write(content.encode())


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file()
