"""Adds rounds up into a request's statistics."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from dflash_ort.records import RoundRecord, Statistics


class StatisticsBuilder:
    """Counts one request's rounds; the clock starts when it is made."""

    def __init__(self, request_id: int, prompt_tokens: int, plain_pass: Callable[[int], float] | None = None) -> None:
        self._id, self._prompt_tokens = request_id, prompt_tokens
        self._plain_pass = plain_pass
        self._plain_s = self._predicted_committed = self._predicted_s = self._predicted_rounds_s = 0.0
        self._predicted_rounds_committed = self._predicted_rounds = 0
        self._accepted_at: list[int] = []
        self._verified_at: list[int] = []
        self._started = perf_counter()
        self._first: float | None = None
        self._last = self._started
        self._committed = self._rounds = self._verify_rounds = 0
        self._drafted = self._verified = self._accepted = self._in_rounds = self._in_verify_rounds = 0
        self._draft_s = self._verify_s = self._sample_s = self._other_s = 0.0

    def prefilled(self, committed: int) -> None:
        """Prefill is over and has committed this many tokens (one, unless cancelled)."""
        self._first = self._last = perf_counter()
        self._committed += committed

    def add(self, record: RoundRecord) -> None:
        part = next(r for r in record.requests if r.request_id == self._id)
        self._rounds += 1
        self._committed += part.num_committed
        self._in_rounds += part.num_committed
        self._drafted += part.num_drafted
        self._verified += part.num_verified
        self._accepted += part.num_accepted
        if part.num_verified:
            self._verify_rounds += 1
            self._in_verify_rounds += part.num_committed
            self._count_positions(part.num_verified, part.num_accepted)
        self._predict(record, part.num_committed)
        if self._plain_pass is not None:
            for extra in range(part.num_committed):
                self._plain_s += self._plain_pass(part.context_length + extra) + record.sample_s / part.num_committed
        self._draft_s += record.draft_s
        self._verify_s += record.verify_s
        self._sample_s += record.sample_s
        self._other_s += record.other_s
        self._last = perf_counter()

    def _count_positions(self, verified: int, accepted: int) -> None:
        while len(self._verified_at) < verified:
            self._verified_at.append(0)
            self._accepted_at.append(0)
        for i in range(verified):
            self._verified_at[i] += 1
            self._accepted_at[i] += i < accepted

    def _predict(self, record: RoundRecord, committed: int) -> None:
        if record.predicted_committed is None or record.predicted_seconds is None:
            return
        self._predicted_rounds += 1
        self._predicted_committed += record.predicted_committed
        self._predicted_rounds_committed += committed
        self._predicted_s += record.predicted_seconds
        self._predicted_rounds_s += record.seconds - record.draft_s

    def build(self) -> Statistics:
        first = self._first if self._first is not None else self._last
        after_first = self._committed - 1
        in_rounds_s = self._draft_s + self._verify_s + self._sample_s + self._other_s
        return Statistics(
            prompt_tokens=self._prompt_tokens,
            committed=self._committed,
            rounds=self._rounds,
            verify_rounds=self._verify_rounds,
            drafted=self._drafted,
            verified=self._verified,
            accepted=self._accepted,
            acceptance_length=self._in_verify_rounds / self._verify_rounds if self._verify_rounds else None,
            tokens_per_round=self._in_rounds / self._rounds if self._rounds else None,
            ttft_s=first - self._started,
            tpot_s=(self._last - first) / after_first if after_first > 0 else None,
            draft_s=self._draft_s,
            verify_s=self._verify_s,
            sample_s=self._sample_s,
            other_s=self._other_s,
            tokens_per_second=self._in_rounds / in_rounds_s if in_rounds_s > 0 else None,
            survival=tuple(a / v for a, v in zip(self._accepted_at, self._verified_at, strict=True)),
            predicted_committed=self._predicted_committed if self._predicted_rounds else None,
            predicted_rounds_committed=self._predicted_rounds_committed,
            predicted_seconds=self._predicted_s if self._predicted_rounds else None,
            predicted_rounds_seconds=self._predicted_rounds_s,
            plain_seconds=self._plain_s if self._plain_pass is not None and self._rounds else None,
        )
