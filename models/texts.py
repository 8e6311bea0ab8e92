"""The project's own texts: what a bundle is checked on, and what it is measured on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_ort.errors import RequestError
from dflash_ort.params import MAX_TEMPERATURE

_TEXTS = Path(__file__).resolve().parent / "data"


@dataclass(frozen=True, slots=True)
class CheckTexts:
    """Plain passages, chat dialogues that end with an answer, and prompts to be answered; ``sha256`` is of the file."""

    passages: tuple[str, ...]
    dialogues: tuple[tuple[dict[str, str], ...], ...]
    prompts: tuple[str, ...]
    sha256: str


def selfcheck_texts() -> CheckTexts:
    """What every export ends with. No other text (a calibration's, say) may be taken from here."""
    content = (_TEXTS / "selfcheck.json").read_bytes()
    raw = json.loads(content)
    return CheckTexts(
        passages=tuple(raw["passages"]),
        dialogues=tuple(tuple(dialogue) for dialogue in raw["dialogues"]),
        prompts=tuple(raw["prompts"]),
        sha256=hashlib.sha256(content).hexdigest(),
    )


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """A prompt to be measured on: what a user says, turn by turn; ``temperature`` None leaves it to the caller."""

    suite: str
    id: str
    turns: tuple[str, ...]
    temperature: float | None = None


def bench_prompts(path: Path | None = None) -> tuple[BenchPrompt, ...]:
    """The built-in prompts, or those of a file of JSON lines with ``turns`` (and ``suite``, ``id``, ``temperature``).

    Other keys are ignored. Raises RequestError that names the line, OSError for a file that cannot be opened.
    """
    path = path or _TEXTS / "bench.jsonl"
    return tuple(bench_prompt(json_line(line, where), where, number) for number, where, line in prompt_lines(path))


def prompt_lines(path: Path) -> list[tuple[int, str, str]]:
    """The lines of a prompts file that are not blank: number (from 1), what to call it in a message, and text.

    Raises RequestError for a file that is not UTF-8 or holds none, OSError for one that cannot be opened.
    """
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise RequestError(f"'{path}' is not UTF-8 (byte {error.start}); convert it, with iconv for instance") from None
    found = [(n, f"'{path}' line {n}", line) for n, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise RequestError(f"'{path}' holds no prompts; expected JSON lines with 'turns'")
    return found


def json_line(line: str, where: str) -> dict[str, Any]:
    """The object on a line. Raises RequestError."""
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where} is not JSON ({error}); expected an object with 'turns'") from None
    if not isinstance(raw, dict):
        raise RequestError(f"{where} is not an object; expected one with 'turns', a list of texts")
    return raw


def bench_prompt(raw: dict[str, Any], where: str, number: int) -> BenchPrompt:
    """A prompt from a line's object. Raises RequestError."""
    turns = raw.get("turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise RequestError(f"{where} has no 'turns', a list of texts that are not empty")
    return BenchPrompt(
        suite=_name(raw, "suite", "prompts", where),
        id=_name(raw, "id", f"line-{number}", where),
        turns=tuple(turns),
        temperature=_temperature(raw.get("temperature"), where),
    )


def _name(raw: dict[str, Any], key: str, default: str, where: str) -> str:
    value = raw.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (str, int)) or not str(value).strip():
        raise RequestError(f"{where} has the {key} {value!r}; expected a name")
    return str(value)


def _temperature(value: Any, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value <= MAX_TEMPERATURE:
        raise RequestError(f"{where} has the temperature {value!r}; expected a number, 0 to {MAX_TEMPERATURE:g}")
    return float(value)
