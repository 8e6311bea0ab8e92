"""The adaptive controller: which drafter to ask, and how many of its drafts to verify, so that tokens per second
are highest.

What is maximised is the rate over a text, tokens over seconds, not each round's own ratio. By renewal reward
(Dinkelbach 1967), with lambda the request's own rate, a round's best length is ``argmax_n  sum_{i<=n} S(i) - lambda
(t_verify(n + 1) - t_verify(1))``, and asking a drafter pays iff the best such value, on average over recent blocks,
is above ``lambda t_draft``. Plain decoding is the arm whose value is zero. An arm that was given up is tried again
after some rounds, then after twice as many, and so on: a losing arm costs when it is tried. How far that goes is
learnt: where tries have led to recoveries (texts that turn hard and easy again), arms are tried more often.

Decisions are made in the cost table's seconds, so that what slows the whole machine changes none of them. Sampling
is left out of lambda: it is paid by the token, whatever is verified.

With several requests a token of request r is worth the inverse of r's tokens per round, all marginal survivals are
sorted, and the best slots are taken while the last one's worth pays for its row (`plan`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from dflash_ort.controller.acceptance import GENERIC_PRIORS, HazardModel, HazardPrior, family
from dflash_ort.controller.cost import CostModel
from dflash_ort.controller.protocol import DraftOrder, RoundState
from dflash_ort.records import Draft, RequestRound, RoundRecord, VerifyPlan

_TRUSTED = 0.9
_RIGHT_BLOCKS = 16.0


@dataclass(frozen=True, slots=True)
class AdaptiveSettings:
    """Constants of the policy, in rounds unless said otherwise."""

    rate_memory: float = 15.0
    """A request's rate is that of about this many rounds."""
    value_memory: float = 6.0
    """A drafter's worth is that of about this many blocks."""
    surplus_memory: float = 20.0
    """What it gave beyond what was expected is that of about this many blocks."""
    prior_blocks: float = 2.0
    """A new request believes as many blocks of the worth that earlier requests saw."""
    population_memory: float = 200.0
    """A new request's rate starts from that of about this many rounds of all requests."""
    population_requests: float = 10.0
    """A drafter's worth starts from that in about this many requests."""
    optimism: float = 1.0
    """Standard errors of a drafter's worth that it is given the benefit of, in a long answer."""
    long_answer: int = 32
    """Tokens still to come from which on that is so; what may be learnt is worth less where less can be made of it."""
    first_value: float = 0.2
    """What a block is worth, in tokens, before any was seen."""
    first_retry: int = 12
    longest_retry: int = 512
    most_for_tries: float = 0.012
    """Share of a request's time that tries may take, what they inject included."""
    cautious_length: int = 2
    """No more is verified of a drafter that may well be useless on this text."""
    lengthen_every: int = 250
    """Now and then two drafts more are verified than seem to pay, so that what lies behind is learnt."""
    injection_horizon: int = 24
    """Rounds over which the cost of injecting a long backlog (a prompt's rows) is spread."""


@dataclass(slots=True)
class _Population:
    """What all requests taught of a drafter that costs time: what new ones start from."""

    value: float
    requests: float = 0.0
    recoveries: float = 0.0
    waited: float = 0.0
    """Rounds without it after it was given up."""
    slowness: float = 0.0
    """Log of its seconds over the table's, load apart: settings such as temperature change it."""


@dataclass(slots=True)
class _Arm:
    """What is known of a drafter that costs time, for one request."""

    value: float
    """Recent mean of ``max_n (sum S - lambda dt)``, tokens a block if the drafter is of use, over ``blocks``."""
    blocks: float
    seen: float
    """Blocks in all since it was last tried again, by which its worth is certain."""
    backoff: int
    variance: float = 0.1
    """Between blocks."""
    surplus: float = 0.0
    checked: float = _RIGHT_BLOCKS
    """Tokens accepted beyond expectation, and over how many blocks, those that stand for its being right included."""
    expected: float = 0.0
    """Tokens expected to be accepted of this round's block."""
    retry_in: int = 0
    """Rounds until it is tried again; 0 while it is in use."""
    trying: bool = False
    spent: float = 0.0
    """Table seconds of the tries so far."""
    revived: int = -1
    """Rounds in use since a try brought it back; -1 once that is settled."""
    reach: float = 3.0
    """Slowly falling maximum of the lengths chosen: where drawing drafts costs time, no more are drawn than might be
    used.
    """

    def hope(self, optimism: float) -> float:
        """Its worth, and what is not known of it in its favour."""
        return self.corrected + optimism * math.sqrt(self.variance / self.seen)

    @property
    def corrected(self) -> float:
        """Its worth, by what its verified blocks gave and not only by what they promised."""
        return self.value + self.surplus / self.checked


@dataclass(slots=True)
class _Progress:
    """One request's rate, and its drafters."""

    tokens: float
    rounds: float
    seconds: float
    arms: dict[str, _Arm] = field(default_factory=dict)
    elapsed: float = 0.0
    """Table seconds of all rounds, where ``seconds`` are those of recent ones."""
    verify_rounds: int = 0
    state: RoundState | None = None
    passes: list[float] = field(default_factory=list)
    """Table seconds of passes of 1, 2, ... rows in this round's context."""

    @property
    def rate(self) -> float:
        """lambda: tokens a table second."""
        return self.tokens / self.seconds

    def add(self, tokens: int, seconds: float, memory: float) -> None:
        """One more round."""
        keep = 1.0 - 1.0 / memory
        self.tokens = keep * self.tokens + tokens
        self.seconds = keep * self.seconds + seconds
        self.elapsed += seconds
        self.rounds = keep * self.rounds + 1.0


class Adaptive:
    """See the module. Deterministic for a given sequence of calls; memory grows with the requests in progress only."""

    def __init__(
        self,
        costs: CostModel,
        priors: Mapping[str, HazardPrior] = GENERIC_PRIORS,
        settings: AdaptiveSettings = AdaptiveSettings(),
    ) -> None:
        self.costs, self.priors, self.settings = costs, priors, settings
        self.hazards = {kind: HazardModel(prior) for kind, prior in priors.items()}
        self.kinds = [kind for kind in priors if family(kind, draws=True) in priors]
        self._requests: dict[int, _Progress] = {}
        self._rates = _Progress(tokens=1.0, rounds=1.0, seconds=costs.passes(1, 0)[0] + costs.table.other)
        self._populations: dict[str, _Population] = {}

    def choose(self, state: RoundState, lookup: Draft | None) -> DraftOrder:
        """Ask a drafter that costs time where its expected worth beats the free proposal's and plain decoding's."""
        progress = self._progress(state)
        free = 0.0
        if lookup is not None and lookup.token_ids:
            free = max(0.0, *self._gains(progress, self._survival(progress, lookup)))
        for kind, limit in state.limits.items():
            if limit > 0 and (lookup is None or kind != lookup.kind) and self._worth_asking(progress, kind, free):
                return DraftOrder(kind, self._draw_limit(progress, kind, limit))
        if lookup is not None and free > 0.0:
            return DraftOrder(lookup.kind, len(lookup.token_ids))
        return DraftOrder()

    def plan(self, drafts: Sequence[Draft]) -> VerifyPlan:
        """Verify lengths by marginal worth: the best slots of all requests together."""
        live = [(draft, self._requests[draft.request_id]) for draft in drafts if draft.request_id in self._requests]
        curves = [self._survival(progress, draft) for draft, progress in live]
        for (draft, progress), curve in zip(live, curves, strict=True):
            self._learn_value(progress, draft, curve)
        passes = self._passes(live, sum(map(len, curves)) + len(live))
        lengths = _best_lengths([progress for _, progress in live], curves, passes)
        for index, (draft, progress) in enumerate(live):
            length = lengths[index] = self._explore(progress, draft, lengths[index])
            if (arm := progress.arms.get(draft.kind)) is not None:
                arm.expected = sum(curves[index][:length])
        committed = sum(1.0 + sum(curve[:n]) for curve, n in zip(curves, lengths, strict=True))
        rows = sum(lengths) + len(live)
        costs = self.costs
        seconds = passes[rows - 1] * costs.drift + costs.other() + costs.sampling() if live else None
        return VerifyPlan({d.request_id: n for (d, _), n in zip(live, lengths, strict=True)}, committed, seconds)

    def observe(self, record: RoundRecord) -> None:
        """Learn acceptance, costs and rates."""
        drafted = any(p.num_drafted and p.kind in self._populations for p in record.requests)
        load = self.costs.observe(record, after_draft=drafted)
        for part in record.requests:
            progress = self._requests.get(part.request_id)
            if progress is None:
                continue
            for kind in self.kinds:
                model = self._model(kind, progress)
                if kind == part.kind:
                    model.observe(part)
                else:
                    model.idle(part.request_id)
            self._observe_request(progress, part, record, load)

    def forget(self, request_id: int) -> None:
        """The request is over: what it found its drafters worth is what the next starts from."""
        progress = self._requests.pop(request_id, None)
        if progress is not None:
            for kind, arm in progress.arms.items():
                population = self._populations[kind]
                population.requests = min(population.requests + 1.0, self.settings.population_requests)
                worth = arm.corrected * self._model(kind, progress).trust(request_id)
                population.value += (worth - population.value) / population.requests
        for model in self.hazards.values():
            model.forget(request_id)

    def _progress(self, state: RoundState) -> _Progress:
        progress = self._requests.get(state.request_id)
        if progress is None:
            rounds = self.settings.rate_memory / 4
            scale = rounds / self._rates.rounds
            progress = _Progress(self._rates.tokens * scale, rounds, self._rates.seconds * scale)
            self._requests[state.request_id] = progress
        progress.state = state
        progress.passes = self.costs.passes(max(state.limits.values(), default=0) + 1, state.context_length)
        return progress

    def _model(self, kind: str, progress: _Progress) -> HazardModel:
        return self.hazards[family(kind, progress.state is not None and progress.state.draws)]

    def _survival(self, progress: _Progress, draft: Draft) -> list[float]:
        """``S(1..)`` of as many drafts as may be verified."""
        if not draft.token_ids:
            return []
        model = self._model(draft.kind, progress)
        curve = model.survival(draft.request_id, draft)
        return curve if model.trust(draft.request_id) > _TRUSTED else curve[: self.settings.cautious_length]

    def _gains(self, progress: _Progress, survival: list[float]) -> list[float]:
        """``sum_{i<=n} S(i) - lambda (t_verify(n + 1) - t_verify(1))`` for n = 1, 2, ..., in tokens."""
        rate, passes = progress.rate, progress.passes
        one = passes[0]
        return [s - rate * (t - one) for s, t in zip(accumulate(survival), passes[1:], strict=False)]

    def _worth_asking(self, progress: _Progress, kind: str, free: float) -> bool:
        """Whether a drafter's expected value, less its time, beats what is free; or it is time to try it again."""
        settings, state = self.settings, progress.state
        assert state is not None
        population = self._populations.setdefault(kind, _Population(settings.first_value))
        arm = progress.arms.get(kind)
        if arm is None:
            arm = progress.arms[kind] = _Arm(
                population.value, settings.prior_blocks, settings.prior_blocks, settings.first_retry
            )
        horizon = max(1, min(settings.injection_horizon, state.remaining))
        price = progress.rate * self._draft_seconds(kind, state, horizon)
        arm.trying = False
        optimism = settings.optimism * min(1.0, state.remaining / settings.long_answer)
        worth = arm.hope(optimism) * self._model(kind, progress).trust(state.request_id)
        if worth - price > free:
            self._keep(arm, population)
            return True
        if worth > price:  # what is free is better, this once
            return False
        if arm.retry_in == 0:
            arm.retry_in, arm.revived = arm.backoff, -1
        population.waited += 1.0
        arm.retry_in -= 1
        if arm.retry_in > 0:
            return False
        whole = self._draft_seconds(kind, state, horizon=1)
        if arm.spent + whole > settings.most_for_tries * progress.elapsed:
            arm.retry_in = 1
            return False
        arm.spent += whole
        arm.backoff = min(2 * arm.backoff, self._longest_retry(population, price))
        arm.retry_in, arm.trying = arm.backoff, True
        arm.blocks = min(arm.blocks, 1.0)  # what is old counts no more than what the try will show
        arm.seen = arm.blocks
        return True

    def _keep(self, arm: _Arm, population: _Population) -> None:
        """An arm in use earns back its short back-off; one that a try revived has recovered once it has lasted."""
        if arm.retry_in:
            arm.retry_in, arm.revived = 0, 0
        arm.backoff = max(self.settings.first_retry, arm.backoff - 1)
        if arm.revived >= 0:
            arm.revived += 1
            if arm.revived > self.settings.first_retry:
                arm.revived = -1
                population.recoveries += 1.0

    def _longest_retry(self, population: _Population, price: float) -> int:
        """Rounds between tries at most: trying every i rounds costs price / i a round, and a recovery, which comes
        with probability eta a round, is missed for i / 2 rounds at about half a token each. Whatever was learnt, tries
        take no more than `most_for_tries` of a request's time.
        """
        if population.recoveries < 1.0:
            return self.settings.longest_retry
        eta = population.recoveries / population.waited
        balance = math.sqrt(2.0 * price / (0.5 * eta))
        shortest = max(price / self.settings.most_for_tries, 0.5 * self.settings.first_retry)
        return min(self.settings.longest_retry, round(max(balance, shortest)))

    def _draft_seconds(self, kind: str, state: RoundState, horizon: int) -> float:
        """Table seconds of a block, a backlog's injection spread over the rounds that will profit from it."""
        rows = state.pending_rows / horizon if state.pending_rows > horizon else state.pending_rows
        block = self.costs.block(state.context_length) * math.exp(self._populations[kind].slowness)
        return block + self.costs.table.inject_row * max(rows - 1, 0) + self.costs.table.after_draft

    def _draw_limit(self, progress: _Progress, kind: str, limit: int) -> int:
        state = progress.state
        if state is None or not state.draws:
            return limit
        return min(limit, int(progress.arms[kind].reach) + 2)

    def _learn_value(self, progress: _Progress, draft: Draft, survival: list[float]) -> None:
        arm = progress.arms.get(draft.kind)
        if arm is None or not survival:
            return
        arm.blocks = min(arm.blocks + 1.0, self.settings.value_memory)
        arm.seen += 1.0
        trust = self._model(draft.kind, progress).trust(draft.request_id)
        surprise = max(0.0, *self._gains(progress, [s / trust for s in survival])) - arm.value
        arm.value += surprise / arm.blocks
        arm.variance += (surprise * surprise * (1.0 - 1.0 / arm.blocks) - arm.variance) / arm.blocks

    def _explore(self, progress: _Progress, draft: Draft, length: int) -> int:
        """Verify a little more on a retry, and rarely otherwise, so that what is never verified is still learnt."""
        if not draft.token_ids:
            return 0
        arm = progress.arms.get(draft.kind)
        if arm is not None and arm.trying:
            return max(length, 1)
        progress.verify_rounds += 1
        if progress.verify_rounds % self.settings.lengthen_every == 0:
            return min(length + 2, len(draft.token_ids))
        return length

    def _passes(self, live: Sequence[tuple[Draft, _Progress]], rows: int) -> list[float]:
        """Table seconds of passes of 1 to at least ``rows`` rows for these requests together."""
        if len(live) == 1 and len(live[0][1].passes) >= rows:
            return live[0][1].passes
        contexts = [progress.state.context_length for _, progress in live if progress.state is not None]
        return self.costs.passes(max(rows, 1), sum(contexts) // max(len(contexts), 1))

    def _observe_request(self, progress: _Progress, part: RequestRound, record: RoundRecord, load: float) -> None:
        costs, settings = self.costs, self.settings
        seconds = costs.passes(record.total_rows, part.context_length)[-1] + costs.table.other
        arm = progress.arms.get(part.kind)
        if arm is not None and record.draft_s > 0.0:
            population = self._populations[part.kind]
            injected = costs.table.inject_row * max(record.pending_rows - 1, 0)
            expected = costs.block(part.context_length) + injected
            if expected > 0.0:
                surprise = math.log(record.draft_s / (expected * load)) - population.slowness
                population.slowness += max(-0.5, min(0.5, surprise)) / settings.value_memory
            seconds += expected * math.exp(population.slowness) + costs.table.after_draft
            arm.reach = max(float(part.num_verified), arm.reach - 0.05)
            keep = 1.0 - 1.0 / settings.surplus_memory
            arm.surplus = keep * arm.surplus + part.num_accepted - arm.expected
            arm.checked = keep * (arm.checked - _RIGHT_BLOCKS) + 1.0 + _RIGHT_BLOCKS
        progress.add(part.num_committed, seconds, settings.rate_memory)
        self._rates.add(part.num_committed, seconds, settings.population_memory)


def _best_lengths(live: Sequence[_Progress], curves: Sequence[list[float]], passes: list[float]) -> list[int]:
    """Prefix lengths that maximise weighted survival less the price of the rows' time.

    A token of request r weighs 1 / (r's tokens a round); a second costs the sum of the requests' rounds a second:
    for one request that is its rule divided by its tokens a round. Survival falls with the position, so the best
    slots of all requests together are a prefix of each.
    """
    slots = sorted(
        (-survival * p.rounds / p.tokens, index)
        for index, (p, curve) in enumerate(zip(live, curves, strict=True))
        for survival in curve
    )
    price = sum(p.rounds / p.seconds for p in live)
    row = len(live)
    best = worth = 0.0
    taken = 0
    for count, (negative, _) in enumerate(slots, 1):
        worth -= negative
        gain = worth - price * (passes[row + count - 1] - passes[row - 1])
        if gain > best:
            best, taken = gain, count
    lengths = [0] * len(live)
    for _, index in slots[:taken]:
        lengths[index] += 1
    return lengths
