"""The round log: JSON lines that tell what every round did and cost, for tuning the policy later (docs/log-format.md).

No text and no token ids unless asked for: logs of an on-prem application must not leak prompts. A line is written
whole and at once, so a crash loses at most the last; a disk that is full or a directory that is read-only turns the
log off with one warning.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any

from dflash_ort.params import SamplingParams
from dflash_ort.records import LOG_VERSION, Request, RoundRecord

logger = logging.getLogger("dflash_ort")


class RoundLog:
    """Appends to one file. ``common`` is what every request's line says: the bundle, the machine, the controller."""

    def __init__(self, path: str | Path, *, with_text: bool, common: dict[str, Any]) -> None:
        self._path, self._with_text, self._common = Path(path), with_text, common
        self._session = secrets.token_hex(8)
        self._file: FileIO | None = None
        try:
            self._file = FileIO(self._path, "a+")
            self._end_broken_line(self._file)
        except OSError as error:
            self._give_up(error)

    def request(self, request: Request, *, controller: str, drafters: list[str], template: dict[str, Any]) -> None:
        """A request begins: its settings and its template's identity."""
        self._write(
            {
                "event": "request",
                **self._key(request.id),
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "prompt_tokens": len(request.prompt_ids),
                "seed": request.seed,
                "settings": _settings(request.params),
                "controller": controller,
                "drafters": drafters,
                "template": template,
                **self._common,
                **({"prompt_ids": request.prompt_ids} if self._with_text else {}),
            }
        )

    def round(self, request: Request, record: RoundRecord) -> None:
        """A round is over: a line for each request in it."""
        whole = {name: value for name, value in asdict(record).items() if name not in ("requests", "round_id")}
        for part in record.requests:
            line = {
                "event": "round",
                **self._key(part.request_id),
                "round_id": record.round_id,
                **asdict(part),
                **whole,
            }
            line["request_id"] = self._key(part.request_id)["request_id"]
            if self._with_text and part.request_id == request.id:
                line["token_ids"] = request.output_ids[-part.num_committed :]
            self._write(line)

    def observer(
        self, request: Request, on_round: Callable[[RoundRecord], None] | None
    ) -> Callable[[RoundRecord], None]:
        """Logs a request's rounds, and tells the caller of them."""

        def observe(record: RoundRecord) -> None:
            self.round(request, record)
            if on_round is not None:
                on_round(record)

        return observe

    def end(self, request: Request, text: str) -> None:
        """A request is over."""
        line = {"event": "end", **self._key(request.id), "finish_reason": request.finish_reason}
        self._write({**line, "committed": len(request.output_ids), **({"text": text} if self._with_text else {})})

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # some file systems notice only here that they are full
                file.close()

    def _key(self, request_id: int) -> dict[str, str]:
        return {"request_id": f"{self._session}-{request_id}"}

    def _write(self, line: dict[str, Any]) -> None:
        """One system call, so that streams on other threads, and other processes, do not get in between."""
        if self._file is None:
            return
        content = json.dumps({"v": LOG_VERSION, **line}, separators=(",", ":")).encode() + b"\n"
        try:
            if self._file.write(content) != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except (OSError, ValueError) as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        logger.warning("the round log '%s' cannot be written (%s); logging is off", self._path, reason)
        self.close()

    @staticmethod
    def _end_broken_line(file: FileIO) -> None:
        """Where a crash left half a line, the next must not be glued to it."""
        if file.seekable() and (size := file.seek(0, os.SEEK_END)):
            file.seek(size - 1)
            if file.read(1) != b"\n":
                file.write(b"\n")


def _settings(params: SamplingParams) -> dict[str, Any]:
    """The request's sampling parameters, without strings that could hold text."""
    settings = asdict(params)
    settings["stop"] = len(params.stop)
    settings["logit_bias"] = len(params.logit_bias)
    settings.pop("seed")
    return settings
