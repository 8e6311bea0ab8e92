"""Ends of an answer: the first of end-of-sequence, a stop token, a stop string or the length limit, wherever it falls
in a run.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds the earliest end of any stop string in growing text, and tells how much of the text is safe to show.

    Text that could still turn out to be the beginning of a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(s) for s in self._stops), default=0)
        self._tail = ""
        """Text not yet released: a possible beginning of a stop string."""

    def feed(self, text: str) -> tuple[str, bool]:
        """Add text; returns what may be shown now, and True if a stop string was found (the rest is dropped)."""
        if not self._stops:
            return text, False
        self._tail += text
        found = _earliest(self._tail, self._stops)
        if found is not None:
            shown, self._tail = self._tail[:found], ""
            return shown, True
        keep = self._held()
        cut = len(self._tail) - keep
        shown, self._tail = self._tail[:cut], self._tail[cut:]
        return shown, False

    def flush(self) -> str:
        """The text held back, once nothing more will come."""
        tail, self._tail = self._tail, ""
        return tail

    def _held(self) -> int:
        """Length of the longest end of the tail that begins a stop string."""
        for length in range(min(self._longest - 1, len(self._tail)), 0, -1):
            if any(stop.startswith(self._tail[-length:]) for stop in self._stops):
                return length
        return 0


def _earliest(text: str, stops: Sequence[str]) -> int | None:
    """Where the stop string that is *complete* first begins: the one that a reader would see end first."""
    best: tuple[int, int] | None = None
    for stop in stops:
        start = text.find(stop)
        if start >= 0 and (best is None or (start + len(stop), start) < best):
            best = (start + len(stop), start)
    return None if best is None else best[1]
