"""The round loop of one request: prefill, then draft, plan, verify, accept, commit, roll back, until an end is
reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from dflash_ort.controller.protocol import Controller, RoundState
from dflash_ort.records import Chunk, Draft, Request, RequestRound, RoundRecord
from dflash_ort.runtime.acceptor import accept
from dflash_ort.runtime.answer import Answer
from dflash_ort.runtime.cache import KVCache
from dflash_ort.runtime.drafters import Drafter
from dflash_ort.runtime.sampler import Sampler
from dflash_ort.runtime.statistics import StatisticsBuilder
from dflash_ort.runtime.target import TargetModel

PREFILL_CHUNK = 256
"""Most rows of a prefill pass."""


def pieces_of(length: int) -> list[int]:
    """Row counts of the prefill passes of a prompt of so many tokens."""
    whole, rest = divmod(length, PREFILL_CHUNK)
    return [PREFILL_CHUNK] * whole + ([rest] if rest else [])


@dataclass(slots=True)
class Decoding:
    """One request in progress. `prefill` once, then `round` until the request has a finish reason."""

    request: Request
    target: TargetModel
    cache: KVCache
    drafters: Mapping[str, Drafter]
    """By kind; the controller says each round which one to ask."""
    controller: Controller
    sampler: Sampler
    answer: Answer
    statistics: StatisticsBuilder
    on_round: Callable[[RoundRecord], None] | None = None
    """Told of every round: a log, or an explanation."""
    _round_id: int = 0

    def prefill(self, pieces: Sequence[int]) -> Chunk:
        """Pass the prompt through the target in ``pieces`` (row counts that add up to it) and commit the first token.

        Only the last row goes through the LM head.
        """
        start, prompt = 0, self.request.prompt_ids
        for rows in pieces:
            end = start + rows
            ids = prompt[start:end]
            result = self.target.run(self.cache, ids, 1 if end == len(prompt) else 0)
            self._observe(ids, result.hidden)
            start = end
        chosen = accept((), result.logits, result.greedy, self.sampler)
        chunk = self._commit(chosen)
        self.statistics.prefilled(len(chunk.token_ids))
        return chunk

    def round(self) -> Chunk:
        """One round: at least one token, at most the drafts verified and one."""
        began = perf_counter()
        context = self.cache.length.value
        pending = max((drafter.pending_rows for drafter in self.drafters.values()), default=0)
        draft, draft_s = self._draft(context, pending)
        plan = self.controller.plan([draft])
        length = max(0, min(plan.lengths.get(self.request.id, 0), len(draft.token_ids)))
        verifying = perf_counter()
        rows = [draft.anchor, *draft.token_ids[:length]]
        result = self.target.run(self.cache, rows, len(rows))
        verified = perf_counter()
        chosen = accept(rows[1:], result.logits, result.greedy, self.sampler)
        sampled = perf_counter()

        chunk = self._commit(chosen)
        kept = len(chunk.token_ids)
        self.cache.length.trim(context + kept)
        self._observe(rows[:kept], result.hidden[:kept])
        self.sampler.forget_noise()
        part = _part(draft, length, len(chosen) - 1, kept, context)
        verify_s, sample_s = verified - verifying, sampled - verified
        # What is left of the round, the controller's own time among it.
        other_s = perf_counter() - began - draft_s - verify_s - sample_s
        self._record(
            RoundRecord(
                round_id=self._round_id,
                requests=(part,),
                draft_s=draft_s,
                verify_s=verify_s,
                sample_s=sample_s,
                other_s=other_s,
                total_rows=len(rows),
                pending_rows=pending,
                predicted_committed=plan.predicted_committed,
                predicted_seconds=plan.predicted_seconds,
            )
        )
        return chunk

    def chunks(self, pieces: Sequence[int]) -> Iterator[Chunk]:
        """Everything, chunk by chunk; each is yielded once the state is consistent."""
        yield self.prefill(pieces)
        while self.request.finish_reason is None:
            yield self.round()

    def _draft(self, context: int, pending: int) -> tuple[Draft, float]:
        """The round's proposal, of the drafter that the controller chose, and its seconds.

        No more drafts are asked for than could be committed before the end: an answer's last token is never a draft.
        """
        room = self.answer.remaining - 1
        limits = {kind: min(drafter.max_draft, room) for kind, drafter in self.drafters.items()}
        began = perf_counter()
        lookup = next(
            (
                d.draft(self.request, limits[kind])
                for kind, d in self.drafters.items()
                if d.is_free and limits[kind] > 0
            ),
            None,
        )
        looked = perf_counter()
        state = RoundState(
            self.request.id, context, pending, self.answer.remaining, limits, draws=not self.request.params.is_greedy
        )
        order = self.controller.choose(state, lookup)
        chosen = perf_counter()
        limit = min(order.limit, limits.get(order.kind, 0))
        if limit < 1:
            draft = Draft(self.request.id, self.request.last_token)
        elif lookup is not None and order.kind == lookup.kind:
            draft = replace(lookup, token_ids=lookup.token_ids[:limit])
        else:
            draft = self.drafters[order.kind].draft(self.request, limit, order.go_on)
        return draft, perf_counter() - chosen + looked - began

    def _observe(self, token_ids: Sequence[int], hidden: np.ndarray) -> None:
        for drafter in self.drafters.values():
            drafter.observe(token_ids, hidden)

    def _commit(self, chosen: Sequence[int]) -> Chunk:
        """Add what comes before the first end; nothing behind it is kept anywhere."""
        added, text = self.answer.extend(chosen)
        self.sampler.take_back(len(self.request.output_ids))
        return Chunk(self.request.id, text, tuple(added), self.request.finish_reason)

    def _record(self, record: RoundRecord) -> None:
        self._round_id += 1
        self.controller.observe(record)
        self.statistics.add(record)
        if self.on_round is not None:
            self.on_round(record)
        if self.request.finish_reason is not None:
            self.controller.forget(self.request.id)


def _part(draft: Draft, verified: int, accepted: int, committed: int, context: int) -> RequestRound:
    """The request's part of the round; an accepted draft behind the answer's end is not counted."""
    return RequestRound(
        request_id=draft.request_id,
        num_drafted=len(draft.token_ids),
        num_verified=verified,
        num_accepted=min(accepted, committed),
        num_committed=committed,
        context_length=context,
        log_probs=draft.log_probs,
        match_length=draft.match_length,
        agreement=draft.agreement,
        kind=draft.kind,
    )
