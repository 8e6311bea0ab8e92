"""Traces and logs from files, as texts to be replayed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_ort.controller.acceptance import HazardPrior
from dflash_ort.controller.cost import CostTable
from dflash_ort.controller.from_log import estimated_text
from dflash_ort.controller.trace import TRACE_VERSION, TracedText
from dflash_ort.errors import LogError
from dflash_ort.jsonlines import JsonLines
from dflash_ort.logs import LoggedRequest, LogReader


@dataclass(slots=True)
class Sources:
    """What some files hold. ``exact`` is False where a text was estimated from a log; ``skipped`` counts lines that
    were cut off or foreign, by file.
    """

    texts: list[TracedText] = field(default_factory=list)
    logged: list[LoggedRequest] = field(default_factory=list)
    headers: list[Mapping[str, Any]] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    exact: bool = True

    @property
    def costs(self) -> CostTable | None:
        """What passes cost where the first trace was recorded."""
        for header in self.headers:
            try:
                return CostTable.from_json(header["costs"])
            except (KeyError, TypeError, ValueError, OverflowError):
                continue
        return None


def read_sources(paths: Sequence[Path], priors: Mapping[str, HazardPrior]) -> Sources:
    """Texts of traces and logs, which may be compressed. A log's texts are estimates, made with ``priors``.

    Raises LogError for a file that cannot be read or holds neither, naming it.
    """
    sources = Sources()
    for path in paths:
        lines = JsonLines(path)
        reader = LogReader()
        before = len(sources.texts), len(sources.logged), len(sources.headers)
        foreign = 0
        for request in reader.requests(_rest(lines, sources)):
            sources.logged.append(request)
            if request.rounds:
                sources.texts.append(_estimate(request, priors))
                sources.exact = False
        foreign = reader.foreign
        if before == (len(sources.texts), len(sources.logged), len(sources.headers)):
            raise LogError(f"'{path}' holds neither a trace nor a round log of a version that this program reads")
        if lines.skipped + foreign:
            sources.skipped[str(path)] = lines.skipped + foreign
    return sources


def _rest(lines: JsonLines, sources: Sources) -> Iterator[dict[str, Any]]:
    """Takes a trace's lines out; the others are a log's, if they are anything."""
    for line in lines:
        if line.get("v") == TRACE_VERSION and line.get("event") == "trace":
            sources.headers.append(line)
            continue
        if line.get("v") == TRACE_VERSION and line.get("event") == "text":
            try:
                sources.texts.append(TracedText.from_json(line))
                continue
            except (KeyError, TypeError, ValueError, AttributeError):
                pass  # the log's reader does not know it either, and counts it
        yield line


def _estimate(request: LoggedRequest, priors: Mapping[str, HazardPrior]) -> TracedText:
    return estimated_text(
        request.id,
        [record.requests[0] for record in request.rounds],
        prompt_tokens=int(request.request["prompt_tokens"]),
        max_tokens=request.request["settings"].get("max_new_tokens"),
        draws=request.draws,
        seed=int(request.request["seed"]),
        priors=priors,
    )
