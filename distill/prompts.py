"""What dialogues begin with: the user's prompts file, or openings that the target completes to a user's turn itself."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dflash_ort.errors import RequestError
from dflash_ort.models.texts import BenchPrompt, bench_prompt, json_line, prompt_lines

_OPENINGS = Path(__file__).resolve().parent / "data" / "openings.jsonl"


@dataclass(frozen=True, slots=True)
class UserPrompt:
    """A line of a prompts file. ``raw``: its one turn is a text to be continued as it stands, without the template."""

    prompt: BenchPrompt
    where: str
    raw: bool = False


@dataclass(frozen=True, slots=True)
class Opening:
    """How a user's turn begins; ``end`` is what stands behind it once the target has completed it."""

    suite: str
    text: str
    end: str = ""


def read_prompts(path: Path) -> tuple[tuple[UserPrompt, ...], str]:
    """The prompts of a file, and its SHA-256.

    A line is a JSON object with ``turns`` (texts), ``prompt`` (one turn) or ``text`` (to be continued as it stands),
    and perhaps ``suite``, ``id`` and ``temperature``; or, where it does not begin with a brace, one user's turn itself.
    Raises RequestError that names the line, OSError for a file that cannot be opened.
    """
    prompts = tuple(_user_prompt(line, where, number) for number, where, line in prompt_lines(path))
    return prompts, hashlib.sha256(path.read_bytes()).hexdigest()


def _user_prompt(line: str, where: str, number: int) -> UserPrompt:
    raw: dict[str, Any] = {"prompt": line.strip()}
    if line.lstrip().startswith("{"):
        raw = json_line(line, where)
    given = [key for key in ("turns", "prompt", "text") if key in raw]
    if len(given) != 1:
        found = " and ".join(f"'{key}'" for key in given) or "none of them"
        raise RequestError(f"{where} has {found}; expected one of 'turns', 'prompt' and 'text'")
    if given == ["turns"]:
        return UserPrompt(bench_prompt(raw, where, number), where)
    text = raw[given[0]]
    if not isinstance(text, str) or not text.strip():
        raise RequestError(f"{where} has the {given[0]} {text!r}; expected a text that is not empty")
    return UserPrompt(bench_prompt(raw | {"turns": [text]}, where, number), where, raw=given == ["text"])


@cache
def openings() -> tuple[tuple[Opening, ...], str]:
    """The openings that ship, and their file's SHA-256."""
    content = _OPENINGS.read_bytes()
    lines = content.decode("utf-8").splitlines()
    return tuple(Opening(**json.loads(line)) for line in lines), hashlib.sha256(content).hexdigest()
