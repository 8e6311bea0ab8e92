"""Exact replay: what a controller would have done with a recorded text, round by round, and what that would cost.

The text is walked as the engine's round loop does it; only seconds are modelled, by a cost table, or fed back from a
log. Token counts are those of a real run for a controller that reads no clock, and for any run whose seconds are fed
back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from dflash_ort.controller.cost import CostModel, CostTable
from dflash_ort.controller.protocol import Controller, RoundState, still_pending
from dflash_ort.controller.trace import Proposals, TracedText
from dflash_ort.records import Draft, RequestRound, RoundRecord


@dataclass(frozen=True, slots=True)
class Work:
    """What a round does, as far as its seconds depend on it. ``drafts``: made by a drafter that costs time, 0 where
    none was asked.
    """

    anchor: int
    context: int
    pending: int
    drafts: int
    rows: int


Seconds = tuple[float, float, float, float]
"""Of draft, verify, sampling and the rest, as a clock shows them."""


class Clock(Protocol):
    """Says what a round takes."""

    def __call__(self, work: Work) -> Seconds: ...


class TableClock:
    """Seconds by a cost table, of a machine that does nothing else."""

    def __init__(self, table: CostTable) -> None:
        self._costs, self._passes = CostModel(table), dict[int, list[float]]()
        self._table = table

    def __call__(self, work: Work) -> Seconds:
        passes = self._passes.get(work.context)
        if passes is None or len(passes) < work.rows:
            passes = self._passes[work.context] = self._costs.passes(max(work.rows, self._table.rows[-1]), work.context)
        verify_s = passes[work.rows - 1]
        if not work.drafts:
            return 0.0, verify_s, 0.0, self._table.other
        draft_s = self._costs.block(work.context, work.pending, work.drafts)
        return draft_s, verify_s + self._table.after_draft, 0.0, self._table.other


@dataclass(slots=True)
class Outcome:
    """What came of a text, or of several: sums over rounds. ``committed`` leaves prefill's token out."""

    rounds: int = 0
    verify_rounds: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    committed: int = 0
    in_verify_rounds: int = 0
    """Committed in rounds that verified a draft."""
    seconds: float = 0.0

    def add(self, other: Outcome) -> None:
        self.rounds += other.rounds
        self.verify_rounds += other.verify_rounds
        self.drafted += other.drafted
        self.verified += other.verified
        self.accepted += other.accepted
        self.committed += other.committed
        self.in_verify_rounds += other.in_verify_rounds
        self.seconds += other.seconds

    def add_round(self, record: RoundRecord) -> None:
        """One more round, of one request."""
        part = record.requests[0]
        self.rounds += 1
        self.verify_rounds += part.num_verified > 0
        self.drafted += part.num_drafted
        self.verified += part.num_verified
        self.accepted += part.num_accepted
        self.committed += part.num_committed
        self.in_verify_rounds += part.num_committed if part.num_verified else 0
        self.seconds += record.seconds


def replay(controller: Controller, text: TracedText, kinds: Sequence[str], clock: Clock, request_id: int) -> Outcome:
    """Walk a text with a controller that may ask the drafters ``kinds``; it learns as it would in an engine."""
    outcome = Outcome()
    for record in rounds(controller, text, kinds, clock, request_id):
        outcome.add_round(record)
    return outcome


def rounds(
    controller: Controller, text: TracedText, kinds: Sequence[str], clock: Clock, request_id: int
) -> Iterator[RoundRecord]:
    """The rounds of a text, one after the other, as `dflash_ort.runtime.decoding` would have them."""
    proposals = {kind: text.proposals[kind] for kind in kinds}
    injects = any(not p.is_free for p in proposals.values())
    pending = still_pending(text.prompt_tokens) if injects else 0
    anchor, round_id = 0, 0
    while anchor < text.num_anchors:
        context, remaining = text.prompt_tokens + anchor, text.max_tokens - anchor - 1
        draft, agreed = _propose(controller, text, proposals, request_id, anchor, pending)
        plan = controller.plan([draft])
        verified = max(0, min(plan.lengths.get(request_id, 0), len(draft.token_ids)))
        committed = min(min(agreed, verified) + 1, text.num_tokens - anchor - 1, remaining)
        made = proposals.get(draft.kind)
        drafts = len(draft.token_ids) if made is not None and not made.is_free else 0
        draft_s, verify_s, sample_s, other_s = clock(Work(anchor, context, pending, drafts, verified + 1))
        part = RequestRound(
            request_id,
            len(draft.token_ids),
            verified,
            min(agreed, verified, committed),
            committed,
            context,
            draft.log_probs,
            draft.match_length,
            draft.kind,
            draft.agreement,
        )
        record = RoundRecord(
            round_id,
            (part,),
            draft_s,
            verify_s,
            sample_s,
            other_s,
            verified + 1,
            pending,
            plan.predicted_committed,
            plan.predicted_seconds,
        )
        controller.observe(record)
        yield record
        if injects:
            pending = still_pending((0 if drafts else pending) + committed)
        anchor += committed
        round_id += 1
    controller.forget(request_id)


def _propose(
    controller: Controller,
    text: TracedText,
    proposals: dict[str, Proposals],
    request_id: int,
    anchor: int,
    pending: int,
) -> tuple[Draft, int]:
    """The round's draft, of the drafter that the controller chooses, and how much of it the target agrees with."""
    remaining = text.max_tokens - anchor - 1
    limits = {kind: min(p.max_draft, remaining - 1) for kind, p in proposals.items()}
    free = next((kind for kind, p in proposals.items() if p.is_free and limits[kind] > 0), None)
    lookup = None if free is None else proposals[free].draft(request_id, free, anchor, limits[free])
    state = RoundState(request_id, text.prompt_tokens + anchor, pending, remaining, limits, text.draws)
    order = controller.choose(state, lookup)
    limit = min(order.limit, limits.get(order.kind, 0))
    if limit < 1:
        return Draft(request_id, 0), 0
    if lookup is not None and order.kind == lookup.kind:
        draft = replace(lookup, token_ids=lookup.token_ids[:limit])
    else:
        draft = proposals[order.kind].draft(request_id, order.kind, anchor, limit)
        if order.go_on is not None:
            draft = _cut(draft, order.go_on)
    return draft, int(proposals[order.kind].agreed[anchor])


def _cut(draft: Draft, go_on: Callable[[Sequence[float]], bool]) -> Draft:
    """As many drafts as would have been made, where they are made one after the other."""
    count = 1
    while count < len(draft.token_ids) and go_on(draft.log_probs[:count]):
        count += 1
    return replace(draft, token_ids=draft.token_ids[:count], log_probs=draft.log_probs[:count])
