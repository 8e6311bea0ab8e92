"""Small JSON files in the user's cache: read with suspicion, written whole or not at all, never a reason to stop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash_ort.whole import whole_file


def load_json(path: Path, what: str) -> tuple[dict[str, Any] | None, str | None]:
    """The object in a file, None without one; and a warning when there is a file that is not one."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError) as error:
        return None, f"{what} '{path}' cannot be read ({error}); it is made again"
    if not isinstance(value, dict):
        return None, f"{what} '{path}' is damaged; it is made again"
    return value, None


def store_json(path: Path, value: dict[str, Any], what: str) -> str | None:
    """Write an object; returns a warning where the directory cannot be written."""
    try:
        with whole_file(path) as file:
            file.write(json.dumps(value).encode())
    except OSError as error:
        return f"{what} cannot be kept in '{path.parent}' ({error.strerror or error}); it is made again next time"
    return None
