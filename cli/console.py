"""Standard error for people: messages and progress. Answers go to standard output and nowhere else."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Self

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


def complain(message: str) -> None:
    """One line on standard error."""
    click.echo(message, err=True)


def warn(message: str) -> None:
    """One line on standard error about something that may not be meant, and is done nevertheless."""
    complain(f"warning: {message}")


class _Warnings(logging.Handler):
    """The library's warnings as lines of ours."""

    def emit(self, record: logging.LogRecord) -> None:
        warn(record.getMessage())


def show_log_warnings() -> None:
    """Show what the library logs as a warning; once, however often it is called."""
    log = logging.getLogger("dflash_ort")
    log.propagate = False
    log.handlers = [_Warnings()]


class ProgressBar:
    """Shows what long work is at: a bar on a terminal, a line for each step elsewhere. Call it as a
    `dflash_ort.progress.Progress`.
    """

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._task: TaskID | None = None
        self._message = ""

    def __call__(self, message: str, fraction: float | None = None) -> None:
        if not self._console.is_terminal:
            if message != self._message:
                complain(message)
        else:
            if self._task is None:
                self._bar.start()
                self._task = self._bar.add_task(message)
            total = None if fraction is None else 1.0
            self._bar.update(self._task, description=message, total=total, completed=fraction or 0.0)
        self._message = message

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._bar.stop()
