"""Reads round logs (docs/log-format.md): requests with their rounds, as they end, without holding the whole log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_ort.records import LOG_VERSION, RequestRound, RoundRecord


@dataclass(slots=True)
class LoggedRequest:
    """One request of a log. ``request`` is its first line; ``finish_reason`` None where its end is missing."""

    id: str
    request: Mapping[str, Any]
    rounds: list[RoundRecord] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def committed(self) -> int:
        """Tokens of the answer, as far as the rounds tell: prefill's token included."""
        return 1 + sum(record.requests[0].num_committed for record in self.rounds)

    @property
    def draws(self) -> bool:
        """The request was sampled."""
        return float(self.request["settings"]["temperature"]) > 0.0


@dataclass(slots=True)
class LogReader:
    """Turns a log's objects into requests. ``foreign`` counts lines that are none of this version's."""

    foreign: int = 0

    def requests(self, lines: Iterable[Mapping[str, Any]]) -> Iterator[LoggedRequest]:
        """Requests in the order in which they end; those whose end is missing come last."""
        open_requests: dict[str, LoggedRequest] = {}
        for line in lines:
            try:
                ended = self._take(line, open_requests)
            except (KeyError, TypeError, ValueError):
                self.foreign += 1
                continue
            if ended is not None:
                yield ended
        yield from open_requests.values()

    def _take(self, line: Mapping[str, Any], open_requests: dict[str, LoggedRequest]) -> LoggedRequest | None:
        if line["v"] != LOG_VERSION:
            raise ValueError("another version")
        event, key = line["event"], str(line["request_id"])
        if event == "request":
            float(line["settings"]["temperature"]), int(line["prompt_tokens"]), int(line["seed"])
            open_requests[key] = LoggedRequest(key, line)
        elif event == "round":
            request = open_requests.get(key)
            if request is not None:  # else the log was cut at its front, and begins in the middle of a request
                request.rounds.append(_round(line))
        elif event == "end":
            request = open_requests.pop(key, None)
            if request is not None:
                request.finish_reason = str(line["finish_reason"])
                return request
        else:
            raise ValueError("another event")
        return None


def _round(line: Mapping[str, Any]) -> RoundRecord:
    part = RequestRound(
        request_id=0,
        num_drafted=int(line["num_drafted"]),
        num_verified=int(line["num_verified"]),
        num_accepted=int(line["num_accepted"]),
        num_committed=int(line["num_committed"]),
        context_length=int(line["context_length"]),
        log_probs=tuple(float(x) for x in line["log_probs"]),
        match_length=int(line["match_length"]),
        kind=str(line["kind"]),
        agreement=float(line["agreement"]),
    )
    if not 0 <= part.num_accepted <= part.num_verified <= part.num_drafted or part.num_committed < 0:
        raise ValueError("counts that cannot be")
    return RoundRecord(
        round_id=int(line["round_id"]),
        requests=(part,),
        draft_s=float(line["draft_s"]),
        verify_s=float(line["verify_s"]),
        sample_s=float(line["sample_s"]),
        other_s=float(line["other_s"]),
        total_rows=int(line["total_rows"]),
        pending_rows=int(line["pending_rows"]),
        predicted_committed=line["predicted_committed"],
        predicted_seconds=line["predicted_seconds"],
    )
