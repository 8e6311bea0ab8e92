"""A growing answer: tokens in, text out, and the first reason to end it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dflash_ort.records import FinishReason, Request
from dflash_ort.runtime.stops import StopStrings
from dflash_ort.runtime.text import Detokenizer


class Answer:
    """Takes a round's tokens one by one and cuts at the first end, so nothing after it is kept, shown or counted."""

    def __init__(
        self, request: Request, detokenizer: Detokenizer, *, stop_ids: Collection[int], max_tokens: int
    ) -> None:
        self._request, self._detokenizer = request, detokenizer
        self._stop_ids, self._max_tokens = frozenset(stop_ids), max_tokens
        self._stops = StopStrings(request.params.stop)

    @property
    def remaining(self) -> int:
        """Tokens that may still be added."""
        return self._max_tokens - len(self._request.output_ids)

    def extend(self, token_ids: Sequence[int]) -> tuple[list[int], str]:
        """Add tokens up to the first end; returns those added and the text that may be shown now.

        Sets the request's finish reason when an end is reached.
        """
        added: list[int] = []
        shown: list[str] = []
        for token in token_ids:
            self._request.output_ids.append(token)
            added.append(token)
            text, reason = self._take(token)
            shown.append(text)
            if reason is not None:
                self._request.finish_reason = reason
                break
        return added, "".join(shown)

    def _take(self, token: int) -> tuple[str, FinishReason | None]:
        text = self._detokenizer.feed(token)
        past_minimum = len(self._request.output_ids) >= self._request.params.min_tokens
        if past_minimum:
            text, hit = self._stops.feed(text)
            if hit:
                return text, "stop"
            if token in self._stop_ids:
                return text + self._flush(), "stop"
        if self.remaining <= 0:
            return text + self._flush(), "length"
        return text, None

    def _flush(self) -> str:
        """Text held back, at the end: half a character as U+FFFD, and what only looked like a stop string."""
        text, hit = self._stops.feed(self._detokenizer.flush())
        return text if hit else text + self._stops.flush()
