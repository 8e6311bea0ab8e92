"""Where a Debian root may be made, and what of this project is copied into it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
MARKER = ".dflash-ort-root"
"""Stands in every directory that was begun as a root, from its first moment on: what is in there may be deleted."""
MADE = ".made"
"""Stands in a root that is whole."""


def refusal(root: Path, project: Path = PROJECT) -> str | None:
    """Why this directory, an absolute path without links, must not become a root; None where it may.

    What lies in a half-made root is deleted, with the rights of root, so it has to be ours.
    """
    if root == project or root in project.parents:
        return f"'{root}' holds this project; name a directory of the root's own"
    if not root.exists():
        return None
    if not root.is_dir():
        return f"'{root}' is not a directory"
    if any(root.iterdir()) and not (root / MARKER).is_file():
        return (
            f"'{root}' is not empty, and was not begun here (it has no {MARKER}); name another directory, or delete it"
        )
    return None


def is_made(root: Path) -> bool:
    """Whether it is one of ours, and whole."""
    return (root / MARKER).is_file() and (root / MADE).exists()


def begin(root: Path) -> None:
    """Leave nothing in a root but the marker, which is never away, and what hides it from git.

    Raises FileExistsError where `refusal` has a reason, and other OSErrors.
    """
    why_not = refusal(root)
    if why_not is not None:
        raise FileExistsError(why_not)
    root.mkdir(parents=True, exist_ok=True)
    (root / MARKER).touch()
    for path in root.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MARKER:
            path.unlink()
    (root / ".gitignore").write_text("*\n", "ascii")


def copy_project(source: Path, project: Path = PROJECT) -> None:
    """Copy the files that git knows, or would know if they were added; links stay links.

    Raises CalledProcessError where the project is no git repository, and OSError.
    """
    listing = ("ls-files", "-z", "--cached", "--others", "--exclude-standard")
    # git refuses a repository of another user's unless told, and this runs as root.
    command = ("git", "-c", f"safe.directory={project}", "-C", os.fspath(project), *listing)
    names = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True).stdout
    for name in filter(None, os.fsdecode(names).split("\0")):
        path = project / name
        if path.is_symlink() or path.is_file():  # neither what was deleted nor a repository within this one
            copy = source / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy, follow_symlinks=False)
