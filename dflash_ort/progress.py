"""How long work tells its caller where it is."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called with what is being done, and how much of that step is done (0 to 1), where it is known."""

    def __call__(self, message: str, fraction: float | None = None) -> None: ...


def silent(message: str, fraction: float | None = None) -> None:
    """Tells nobody."""
