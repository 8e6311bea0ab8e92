"""Lets a step finish before Ctrl-C or `kill` ends the work, so that what is saved is a state between two steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self


class Deferred:
    """While entered, a signal that would end the process only sets `pending`; leaving delivers it.

    Outside the main thread, where Python has no say over signals, nothing is deferred.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.pending: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in self._SIGNALS:
                before = signal.getsignal(number)
                if callable(before):  # what is ignored stays ignored
                    self._before[number] = before
                    signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        if self.pending is not None:
            signal.raise_signal(self.pending)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.pending = self.pending or number
