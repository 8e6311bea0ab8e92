"""The project's own texts that a bundle is checked on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CheckTexts:
    """Plain passages, chat dialogues that end with an answer, and prompts to be answered; ``sha256`` is of the file."""

    passages: tuple[str, ...]
    dialogues: tuple[tuple[dict[str, str], ...], ...]
    prompts: tuple[str, ...]
    sha256: str


def selfcheck_texts() -> CheckTexts:
    """What every export ends with. No other text (a calibration's, say) may be taken from here."""
    content = (Path(__file__).resolve().parent / "texts" / "selfcheck.json").read_bytes()
    raw = json.loads(content)
    return CheckTexts(
        passages=tuple(raw["passages"]),
        dialogues=tuple(tuple(dialogue) for dialogue in raw["dialogues"]),
        prompts=tuple(raw["prompts"]),
        sha256=hashlib.sha256(content).hexdigest(),
    )
