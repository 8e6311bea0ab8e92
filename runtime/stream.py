"""An answer in progress, and a whole one: what the engine hands to its caller."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from dflash_ort.records import Chunk, FinishReason, Statistics
from dflash_ort.runtime.cache import Slot
from dflash_ort.runtime.decoding import Decoding
from dflash_ort.runtime.roundlog import RoundLog


@dataclass(frozen=True, slots=True)
class Generation:
    """A whole answer. ``exact`` is False only when the engine was allowed to run where rows are not independent."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    seed: int
    exact: bool
    statistics: Statistics


class Stream(Iterator[Chunk]):
    """Iterates over an answer's chunks. ``seed`` and, as far as it has got, ``statistics`` can be read at any time.

    Leaving it early (`break`, an exception, `close`) frees what it holds; several streams may be in progress at once.
    """

    def __init__(
        self, chunks: Iterator[Chunk], decoding: Decoding, release: Callable[[], None], log: RoundLog | None
    ) -> None:
        self._chunks, self._decoding, self._release, self._log = chunks, decoding, release, log
        self._text: list[str] = []

    def __next__(self) -> Chunk:
        try:
            chunk = next(self._chunks)
        except BaseException:
            self.close()
            raise
        self._text.append(chunk.text)
        return chunk

    def close(self) -> None:
        """Stop here. The finish reason of an answer that had not ended becomes "cancelled"."""
        if self._decoding.request.finish_reason is None:
            self._decoding.request.finish_reason = "cancelled"
        self._chunks = iter(())
        self._release()
        log, self._log = self._log, None
        if log is not None:
            log.end(self._decoding.request, self.text)

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def seed(self) -> int:
        return self._decoding.request.seed

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._text)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens so far."""
        return tuple(self._decoding.request.output_ids)

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._decoding.request.finish_reason

    @property
    def statistics(self) -> Statistics:
        return self._decoding.statistics.build()


class Lease:
    """A stream's hold on its slot, which goes back once, however often the stream is closed.

    A stream may be closed by another thread in the middle of a round: then the slot goes back when the round is over,
    lest the next request finds rows in it. (Each side sets its flag before it reads the other's, so no lock is needed,
    which `__del__` could not take.)
    """

    def __init__(self, slot: Slot, free: list[Slot]) -> None:
        self._slot, self._free = [slot], free
        self._ended = self._in_use = False

    def end(self) -> None:
        self._ended = True
        if not self._in_use:
            self._give_back()

    @contextmanager
    def in_use(self) -> Iterator[bool]:
        """For the time of a round; False when the lease has ended."""
        self._in_use = True
        try:
            yield not self._ended
        finally:
            self._in_use = False
            if self._ended:
                self._give_back()

    def _give_back(self) -> None:
        with suppress(IndexError):
            self._free.append(self._slot.pop())
