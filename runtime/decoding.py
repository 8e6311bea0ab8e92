"""The round loop of one request: prefill, then draft, plan, verify, accept, commit, roll back, until an end is
reached.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

from dflash_ort.controller.protocol import Controller
from dflash_ort.records import Chunk, Draft, Request, RequestRound, RoundRecord
from dflash_ort.runtime.acceptor import accept
from dflash_ort.runtime.answer import Answer
from dflash_ort.runtime.cache import KVCache
from dflash_ort.runtime.drafters import Drafter
from dflash_ort.runtime.sampler import Sampler
from dflash_ort.runtime.statistics import StatisticsBuilder
from dflash_ort.runtime.target import TargetModel


@dataclass(slots=True)
class Decoding:
    """One request in progress. `prefill` once, then `round` until the request has a finish reason."""

    request: Request
    target: TargetModel
    cache: KVCache
    drafter: Drafter
    controller: Controller
    sampler: Sampler
    answer: Answer
    statistics: StatisticsBuilder
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
            self.drafter.observe(ids, result.hidden)
            start = end
        chosen = accept((), result.logits, result.greedy, self.sampler)
        chunk = self._commit(chosen)
        self.statistics.prefilled(len(chunk.token_ids))
        return chunk

    def round(self) -> Chunk:
        """One round: at least one token, at most the drafts verified and one."""
        began = perf_counter()
        context, pending = self.cache.length.value, self.drafter.pending_rows
        draft = self._draft()
        drafted = perf_counter()
        # From the drafts to the plan is the controller's time: it counts as other.
        length = self._planned(draft)
        verifying = perf_counter()
        rows = [draft.anchor, *draft.token_ids[:length]]
        result = self.target.run(self.cache, rows, len(rows))
        verified = perf_counter()
        chosen = accept(rows[1:], result.logits, result.greedy, self.sampler)
        sampled = perf_counter()

        chunk = self._commit(chosen)
        kept = len(chunk.token_ids)
        self.cache.length.trim(context + kept)
        self.drafter.observe(rows[:kept], result.hidden[:kept])
        self.sampler.forget_noise()
        self._record(draft, length, len(chosen) - 1, kept, context, pending, (
            drafted - began, verified - verifying, sampled - verified, perf_counter() - sampled + verifying - drafted
        ))  # fmt: skip
        return chunk

    def chunks(self, pieces: Sequence[int]) -> Iterator[Chunk]:
        """Everything, chunk by chunk; each is yielded once the state is consistent."""
        yield self.prefill(pieces)
        while self.request.finish_reason is None:
            yield self.round()

    def _planned(self, draft: Draft) -> int:
        """The controller's length, held to what was drafted."""
        if not draft.token_ids:
            return 0
        return max(0, min(self.controller.plan([draft]).lengths[self.request.id], len(draft.token_ids)))

    def _draft(self) -> Draft:
        """Ask for no more drafts than could be committed before the end: an answer's last token is never a draft."""
        limit = min(self.controller.draft_limit(self.request.id, self.drafter.max_draft), self.answer.remaining - 1)
        if limit < 1:
            return Draft(self.request.id, self.request.last_token)
        return self.drafter.draft(self.request, limit)

    def _commit(self, chosen: Sequence[int]) -> Chunk:
        """Add what comes before the first end; nothing behind it is kept anywhere."""
        added, text = self.answer.extend(chosen)
        self.sampler.take_back(len(self.request.output_ids))
        return Chunk(self.request.id, text, tuple(added), self.request.finish_reason)

    def _record(
        self,
        draft: Draft,
        verified: int,
        accepted: int,
        committed: int,
        context: int,
        pending: int,
        seconds: tuple[float, float, float, float],
    ) -> None:
        part = RequestRound(
            request_id=self.request.id,
            num_drafted=len(draft.token_ids),
            num_verified=verified,
            num_accepted=min(accepted, committed),
            num_committed=committed,
            context_length=context,
            log_probs=draft.log_probs,
            match_length=draft.match_length,
        )
        record = RoundRecord(self._round_id, (part,), *seconds, total_rows=verified + 1, pending_rows=pending)
        self._round_id += 1
        self.controller.observe(record)
        self.statistics.add(record)
