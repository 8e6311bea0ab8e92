"""The adaptive controller: which drafter to ask, and how many of its drafts to verify, so that tokens per second
are highest.

What is maximised is the rate over a text, tokens over seconds, not each round's own ratio. By renewal reward
(Dinkelbach 1967), with lambda the request's own rate, a round's best length is ``argmax_n  sum_{i<=n} S(i) - lambda
(t_verify(n + 1) - t_verify(1))``, and asking a drafter pays iff the best such value, on average over recent blocks,
is above ``lambda t_draft``. Plain decoding is the arm whose value is zero. An arm that was given up is tried again
after 8 rounds, then 16, 32, ...: a losing arm costs when it is tried.

With several requests a token of request r is worth the inverse of r's tokens per round, all marginal survivals are
sorted, and the best slots are taken while the last one's worth pays for its row (`plan`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dflash_ort.controller.acceptance import GENERIC_PRIORS, HazardModel, HazardPrior
from dflash_ort.controller.cost import CostModel
from dflash_ort.controller.protocol import DraftOrder, RoundState
from dflash_ort.records import Draft, RequestRound, RoundRecord, VerifyPlan


@dataclass(frozen=True, slots=True)
class AdaptiveSettings:
    """Constants of the policy, all in rounds unless said otherwise."""

    rate_memory: float = 30.0
    """A request's rate is that of about this many rounds."""
    value_memory: float = 12.0
    """A drafter's worth is that of about this many blocks."""
    population_memory: float = 200.0
    """What a new request starts from follows about this many rounds of all requests."""
    first_retry: int = 8
    longest_retry: int = 512
    lengthen_every: int = 250
    """Now and then two drafts more are verified than seem to pay, so that what lies behind is learnt."""
    injection_horizon: int = 24
    """Rounds over which the cost of injecting a long backlog (a prompt's rows) is spread."""


@dataclass(slots=True)
class _Arm:
    """What is known of a drafter that costs time, for one request."""

    value: float
    """Recent mean of ``max_n (sum S - lambda dt)``, tokens a block."""
    retry_in: int
    backoff: int
    trying: bool = False
    reach: float = 3.0
    """Slowly falling maximum of the lengths chosen: where drawing drafts costs time, no more are drawn than might be
    used.
    """
    slowness: float = 0.0
    """Log of its seconds over the table's, as this request's settings make it."""


@dataclass(slots=True)
class _Progress:
    """One request's rate, and its drafters."""

    tokens: float
    rounds: float
    seconds: float
    arms: dict[str, _Arm] = field(default_factory=dict)
    verify_rounds: int = 0
    state: RoundState | None = None
    passes: np.ndarray = field(default_factory=lambda: np.zeros(1))
    """Seconds of passes of 1, 2, ... rows in this round's context."""

    @property
    def rate(self) -> float:
        """lambda: tokens a second."""
        return self.tokens / self.seconds


class Adaptive:
    """See the module. Deterministic for a given sequence of calls; memory grows with the requests in progress only."""

    def __init__(
        self,
        costs: CostModel,
        priors: Mapping[str, HazardPrior] = GENERIC_PRIORS,
        settings: AdaptiveSettings = AdaptiveSettings(),
    ) -> None:
        self.costs, self.settings = costs, settings
        self.hazards = {kind: HazardModel(prior) for kind, prior in priors.items()}
        self._requests: dict[int, _Progress] = {}
        self._population = _Progress(tokens=1.0, rounds=1.0, seconds=float(costs.verify(1, 0)[0]) + costs.other())
        self._population_value: dict[str, float] = {}

    def choose(self, state: RoundState, lookup: Draft | None) -> DraftOrder:
        """Ask a drafter that costs time where its expected worth beats the free proposal's and plain decoding's."""
        progress = self._progress(state)
        free = 0.0
        if lookup is not None and lookup.token_ids:
            free = max(self._gains(progress, lookup).max(), 0.0)
        for kind, limit in state.limits.items():
            if limit > 0 and (lookup is None or kind != lookup.kind) and self._worth_asking(progress, kind, free):
                return DraftOrder(kind, self._draw_limit(progress, kind, limit))
        if lookup is not None and free > 0.0:
            return DraftOrder(lookup.kind, len(lookup.token_ids))
        return DraftOrder()

    def plan(self, drafts: Sequence[Draft]) -> VerifyPlan:
        """Verify lengths by marginal worth: the best slots of all requests together."""
        live = [(draft, self._requests[draft.request_id]) for draft in drafts if draft.request_id in self._requests]
        survival = [self._survival(draft) for draft, _ in live]
        for (draft, progress), curve in zip(live, survival, strict=True):
            self._learn_value(progress, draft, curve)
        lengths = _best_lengths(live, survival, self._passes(live, sum(map(len, survival))))
        for index, (draft, progress) in enumerate(live):
            lengths[index] = self._explore(progress, draft, lengths[index])
        committed = sum(1.0 + float(curve[:n].sum()) for curve, n in zip(survival, lengths, strict=True))
        rows = sum(lengths) + len(live)
        seconds = float(self._passes(live, rows)[rows - 1]) + self.costs.other() if live else None
        return VerifyPlan({d.request_id: n for (d, _), n in zip(live, lengths, strict=True)}, committed, seconds)

    def observe(self, record: RoundRecord) -> None:
        """Learn acceptance, costs and rates."""
        context = max((part.context_length for part in record.requests), default=0)
        self.costs.observe(record.total_rows, context, record.verify_s)
        for part in record.requests:
            if part.kind in self.hazards:
                self.hazards[part.kind].observe(part)
            progress = self._requests.get(part.request_id)
            if progress is not None:
                self._observe_request(progress, part, record)

    def forget(self, request_id: int) -> None:
        """The request is over."""
        self._requests.pop(request_id, None)
        for model in self.hazards.values():
            model.forget(request_id)

    def _progress(self, state: RoundState) -> _Progress:
        progress = self._requests.get(state.request_id)
        if progress is None:
            p, share = self._population, self.settings.rate_memory / 4
            scale = share / p.rounds
            progress = _Progress(tokens=p.tokens * scale, rounds=share, seconds=p.seconds * scale)
            self._requests[state.request_id] = progress
        progress.state = state
        most = max(state.limits.values(), default=0)
        progress.passes = self.costs.verify(most + 1, state.context_length)
        return progress

    def _survival(self, draft: Draft) -> np.ndarray:
        if not draft.token_ids:
            return np.zeros(0)
        return self.hazards[draft.kind].survival(draft.request_id, draft)

    def _gains(self, progress: _Progress, draft: Draft, survival: np.ndarray | None = None) -> np.ndarray:
        """``sum_{i<=n} S(i) - lambda (t_verify(n + 1) - t_verify(1))`` for n = 1, 2, ..., in tokens."""
        curve = self._survival(draft) if survival is None else survival
        extra = progress.passes[1 : len(curve) + 1] - progress.passes[0]
        result: np.ndarray = np.cumsum(curve) - progress.rate * extra
        return result

    def _worth_asking(self, progress: _Progress, kind: str, free: float) -> bool:
        """Whether a drafter's expected value, less its time, beats what is free; or it is time to try it again."""
        state = progress.state
        assert state is not None
        arm = progress.arms.get(kind)
        if arm is None:
            value = self._population_value.get(kind, 1.0)
            arm = progress.arms[kind] = _Arm(value, self.settings.first_retry, self.settings.first_retry)
        horizon = min(self.settings.injection_horizon, max(state.remaining, 1))
        pending = -(-state.pending_rows // horizon) if state.pending_rows > horizon else state.pending_rows
        price = progress.rate * self.costs.draft(state.context_length, pending) * math.exp(arm.slowness)
        arm.trying = False
        if arm.value - price > free:
            arm.retry_in = arm.backoff = self.settings.first_retry
            return True
        arm.retry_in -= 1
        if arm.retry_in > 0:
            return False
        arm.backoff = min(2 * arm.backoff, self.settings.longest_retry)
        arm.retry_in, arm.trying = arm.backoff, True
        return True

    def _draw_limit(self, progress: _Progress, kind: str, limit: int) -> int:
        state = progress.state
        if state is None or not state.draws:
            return limit
        return min(limit, int(progress.arms[kind].reach) + 2)

    def _learn_value(self, progress: _Progress, draft: Draft, survival: np.ndarray) -> None:
        arm = progress.arms.get(draft.kind)
        if arm is None or not len(survival):
            return
        value = max(float(self._gains(progress, draft, survival).max()), 0.0)
        arm.value += (value - arm.value) / self.settings.value_memory
        known = self._population_value.get(draft.kind, 1.0)
        self._population_value[draft.kind] = known + (value - known) / self.settings.population_memory * 4

    def _explore(self, progress: _Progress, draft: Draft, length: int) -> int:
        """Verify a little more on a retry, and rarely otherwise, so that what is never verified is still learnt."""
        if not draft.token_ids:
            return 0
        arm = progress.arms.get(draft.kind)
        if arm is not None and arm.trying:
            return max(length, min(2, len(draft.token_ids)))
        if length:
            progress.verify_rounds += 1
            if progress.verify_rounds % self.settings.lengthen_every == 0:
                return min(length + 2, len(draft.token_ids))
        return length

    def _passes(self, live: Sequence[tuple[Draft, _Progress]], rows: int) -> np.ndarray:
        """Seconds of passes of 1, 2, ... rows for these requests together."""
        if len(live) == 1 and len(live[0][1].passes) >= rows + 1:
            return live[0][1].passes
        contexts = [p.state.context_length for _, p in live if p.state is not None]
        return self.costs.verify(rows + len(live) + 1, int(np.mean(contexts)) if contexts else 0)

    def _observe_request(self, progress: _Progress, part: RequestRound, record: RoundRecord) -> None:
        arm = progress.arms.get(part.kind)
        if arm is not None and record.draft_s > 0.0:
            expected = self.costs.draft(part.context_length, record.pending_rows)
            surprise = math.log(record.draft_s / expected) - arm.slowness
            arm.slowness += max(-1.0, min(1.0, surprise)) / self.settings.value_memory
            arm.reach = max(float(part.num_verified), arm.reach - 0.05)
        for who, memory in ((progress, self.settings.rate_memory), (self._population, self.settings.population_memory)):
            keep = 1.0 - 1.0 / memory
            who.tokens = keep * who.tokens + part.num_committed
            who.seconds = keep * who.seconds + record.seconds
            who.rounds = keep * who.rounds + 1.0


def _best_lengths(
    live: Sequence[tuple[Draft, _Progress]], survival: Sequence[np.ndarray], passes: np.ndarray
) -> list[int]:
    """Prefix lengths that maximise weighted survival less the price of the rows' time.

    A token of request r weighs 1 / (r's tokens a round); a second costs the sum of the requests' rounds a second:
    for one request that is its rule divided by its tokens a round.
    """
    if not live:
        return []
    weighted = [curve * (p.rounds / p.tokens) for curve, (_, p) in zip(survival, live, strict=True)]
    price = sum(p.rounds / p.seconds for _, p in live)
    owners = np.repeat(np.arange(len(live)), [len(curve) for curve in weighted])
    worth = np.concatenate(weighted)
    order = np.argsort(-worth, kind="stable")
    base = passes[len(live) - 1]
    extra = passes[len(live) : len(live) + len(worth)] - base
    gains = np.cumsum(worth[order]) - price * extra
    slots = int(np.argmax(gains)) + 1 if len(gains) and gains.max() > 0.0 else 0
    counts = np.bincount(owners[order[:slots]], minlength=len(live))
    return [int(n) for n in counts]
