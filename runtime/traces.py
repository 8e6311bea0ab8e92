"""Traces and logs from files, as texts to be replayed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, Generic, TypeVar

from dflash_ort.controller.acceptance import HazardPrior
from dflash_ort.controller.cost import CostTable
from dflash_ort.controller.from_log import estimated_text
from dflash_ort.controller.policy import GENERIC_POLICY, Policy
from dflash_ort.controller.trace import TRACE_VERSION, TracedText
from dflash_ort.errors import LogError, PolicyError
from dflash_ort.jsonlines import JsonLines
from dflash_ort.logs import LoggedRequest, LogReader

T = TypeVar("T")
MOST_ROUNDS = 1_000_000
"""Kept of logs, and as many anchors of traces: some 0.9 GB of either."""


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
    left_out: int = 0
    """Requests that were read and not kept, since memory has an end."""

    @property
    def costs(self) -> CostTable | None:
        """What passes cost where the first trace was recorded."""
        for header in self.headers:
            try:
                return CostTable.from_json(header["costs"])
            except (KeyError, TypeError, ValueError, OverflowError):
                continue
        return None

    @property
    def policy(self) -> Policy:
        """What `adaptive` started from in the bundle that the first trace is of; generic where nothing says."""
        for header in self.headers:
            with suppress(PolicyError):
                return Policy.from_json(header.get("policy"), "the trace's policy")
        return GENERIC_POLICY


def read_sources(paths: Sequence[Path], priors: Mapping[str, HazardPrior], *, most: int = MOST_ROUNDS) -> Sources:
    """Texts of traces and logs, which may be compressed. A log's texts are estimates, made with ``priors``.

    Files are read as streams, and no more than ``most`` rounds of logs and anchors of traces are kept, as whole
    requests: an even sample of all, the same each time. Raises LogError for a file that cannot be read or holds
    neither, naming it.
    """
    sources = Sources()
    texts, logged = _Sample[TracedText](most), _Sample[LoggedRequest](most)
    for path in paths:
        lines, reader = JsonLines(path), LogReader()
        before = texts.seen, logged.seen, len(sources.headers)
        for request in reader.requests(_rest(lines, sources, texts)):
            logged.add(request.id, len(request.rounds), request)
        if before == (texts.seen, logged.seen, len(sources.headers)):
            raise LogError(f"'{path}' holds neither a trace nor a round log of a version that this program reads")
        if lines.skipped + reader.foreign:
            sources.skipped[str(path)] = lines.skipped + reader.foreign
    sources.logged = logged.values()
    estimates = [_estimate(request, priors) for request in sources.logged if request.rounds]
    sources.exact = not estimates
    sources.texts = texts.values() + estimates
    sources.left_out = texts.left_out + logged.left_out
    return sources


class _Sample(Generic[T]):
    """As many values as fit a total size, those whose keys have the smallest hashes; in the order they came in."""

    def __init__(self, most: int) -> None:
        self._most, self._total = most, 0
        self._heap: list[tuple[int, int, int, T]] = []
        self.seen = self.left_out = 0

    def add(self, key: str, size: int, value: T) -> None:
        digest = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest())
        heappush(self._heap, (-digest, self.seen, size, value))
        self.seen += 1
        self._total += size
        while self._total > self._most and len(self._heap) > 1:
            self._total -= heappop(self._heap)[2]
            self.left_out += 1

    def values(self) -> list[T]:
        return [value for _, _, _, value in sorted(self._heap, key=lambda entry: entry[1])]


def _rest(lines: JsonLines, sources: Sources, texts: _Sample[TracedText]) -> Iterator[dict[str, Any]]:
    """Takes a trace's lines out; the others are a log's, if they are anything."""
    for line in lines:
        if line.get("v") == TRACE_VERSION and line.get("event") == "trace":
            sources.headers.append(line)
            continue
        if line.get("v") == TRACE_VERSION and line.get("event") == "text":
            try:
                text = TracedText.from_json(line)
            except (KeyError, TypeError, ValueError, AttributeError):
                pass  # the log's reader does not know it either, and counts it
            else:
                texts.add(text.id, text.num_anchors, text)
                continue
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
