"""The adaptive controller: which drafter to ask, and how many of its drafts to verify, so that tokens per second
are highest.

What is maximised is the rate over a text, tokens over seconds, not each round's own ratio. By renewal reward
(Dinkelbach 1967), with lambda the request's own recent rate, a round's best length is ``argmax_n  sum_{i<=n} S(i) -
lambda (t_verify(n + 1) - t_verify(1))``, and asking a drafter pays iff the best such value, on average over recent
blocks, is above ``lambda t_draft``. There lambda is that of rounds like this one, with or without a proposal by
lookup: between repetitions a token takes longer, and a block may pay that would not within them. Plain decoding is
the arm whose value is zero. An arm that was given up is tried again after some rounds, then after twice as many, and
so on: a losing arm costs when it is tried. How far that goes is learnt: where tries have led to recoveries (texts that
turn hard and easy again), arms are tried more often.

Decisions are made in the cost table's seconds, so that what slows the whole machine changes none of them. Sampling
is left out of lambda: it is paid by the token, whatever is verified.

With several requests a token of request r is worth the inverse of r's tokens per round, all marginal survivals are
sorted, and the best slots are taken while the last one's worth pays for its row (`plan`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from dflash_ort.controller.acceptance import HazardModel, family
from dflash_ort.controller.arms import RIGHT_BLOCKS, Arm, Pace, Population, Progress
from dflash_ort.controller.cost import CostModel
from dflash_ort.controller.policy import GENERIC_POLICY, Policy
from dflash_ort.controller.protocol import DraftOrder, RoundState
from dflash_ort.records import Draft, RequestRound, RoundRecord, VerifyPlan

_TRUSTED = 0.9
_NOBODY = DraftOrder()


class Adaptive:
    """See the module. Deterministic for a given sequence of calls; memory grows with the requests in progress only.

    ``frozen``: costs are the table's and seconds are not looked at, so that its rounds can be repeated.
    """

    def __init__(
        self,
        costs: CostModel,
        policy: Policy = GENERIC_POLICY,
        *,
        frozen: bool = False,
    ) -> None:
        self.costs, self.policy, self.frozen = costs, policy, frozen
        self.settings, priors = policy.settings, policy.priors
        self.hazards = {kind: HazardModel(prior) for kind, prior in priors.items()}
        self.kinds = [kind for kind in priors if family(kind, draws=True) in priors]
        self._requests: dict[int, Progress] = {}
        self._pace = Pace(1.0, 1.0, costs.one_pass(1, 0) + costs.table.other)
        self._populations: dict[str, Population] = {}

    def choose(self, state: RoundState, lookup: Draft | None) -> DraftOrder:
        """Ask a drafter that costs time where its expected worth beats the free proposal's and plain decoding's."""
        progress = self._progress(state.request_id, state.draws)
        found = lookup if lookup is not None and lookup.token_ids else None
        progress.begin(state, found is not None)
        free = 0.0
        if found is not None:
            free = max(0.0, *self._gains(progress, self._survival(progress, found)))
        for kind, limit in state.limits.items():
            if limit > 0 and (lookup is None or kind != lookup.kind) and self._worth_asking(progress, kind, free):
                return self._order(progress, kind, limit)
        if found is not None and free > 0.0:
            return DraftOrder(found.kind, len(found.token_ids))
        return _NOBODY

    def plan(self, drafts: Sequence[Draft]) -> VerifyPlan:
        """Verify lengths by marginal worth: the best slots of all requests together."""
        if len(drafts) == 1 and not drafts[0].token_ids and (plain := self._plain(drafts[0])) is not None:
            return plain
        live = [(draft, self._requests[draft.request_id]) for draft in drafts if draft.request_id in self._requests]
        curves = [self._survival(progress, draft) for draft, progress in live]
        for (draft, progress), curve in zip(live, curves, strict=True):
            self._learn_value(progress, draft, curve)
        passes = self._passes(live, sum(map(len, curves)) + len(live))
        lengths = _best_lengths([progress.recent for _, progress in live], curves, passes)
        for index, (draft, progress) in enumerate(live):
            length = lengths[index] = self._explore(progress, draft, lengths[index])
            if (arm := progress.arms.get(draft.kind)) is not None:
                arm.expected = sum(curves[index][:length])
        committed = sum(1.0 + sum(curve[:n]) for curve, n in zip(curves, lengths, strict=True))
        rows = sum(lengths) + len(live)
        costs = self.costs
        seconds = passes[rows - 1] * costs.drift + costs.other() + costs.sampling() if live else None
        return VerifyPlan({d.request_id: n for (d, _), n in zip(live, lengths, strict=True)}, committed, seconds)

    def _plain(self, draft: Draft) -> VerifyPlan | None:
        """The plan for one request of which nothing was drafted; None where there is more to it."""
        progress = self._requests.get(draft.request_id)
        if progress is None or progress.state is None or draft.kind in progress.arms:
            return None
        costs = self.costs
        seconds = costs.one_pass(1, progress.state.context_length) * costs.drift + costs.other() + costs.sampling()
        return VerifyPlan({draft.request_id: 0}, 1.0, seconds)

    def observe(self, record: RoundRecord) -> None:
        """Learn acceptance, costs and rates."""
        drafted = any(p.num_drafted and p.kind in self._populations for p in record.requests)
        load = 1.0 if self.frozen else self.costs.observe(record, after_draft=drafted)
        for part in record.requests:
            progress = self._requests.get(part.request_id)
            if progress is None:
                continue
            for kind, model in progress.models.items():
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
                population.elapsed += progress.elapsed
                if not arm.learnt:
                    continue  # what nobody asked has shown nothing
                population.requests = min(population.requests + 1.0, self.settings.population_requests)
                worth = arm.corrected * progress.models[kind].trust(request_id)
                population.value += (worth - population.value) / population.requests
        for model in self.hazards.values():
            model.forget(request_id)

    def _progress(self, request_id: int, draws: bool) -> Progress:
        progress = self._requests.get(request_id)
        if progress is None:
            models = {kind: self.hazards[family(kind, draws)] for kind in self.kinds}
            progress = Progress(self._pace.of(self.settings.rate_memory / 4), models)
            self._requests[request_id] = progress
        return progress

    def _row_costs(self, progress: Progress) -> list[float]:
        """The round's passes; a plain round asks for none, and its Python runs on cold caches."""
        if not progress.passes:
            assert progress.state is not None
            most = max(progress.state.limits.values(), default=0)
            progress.passes = self.costs.passes(most + 1, progress.state.context_length)
        return progress.passes

    def _survival(self, progress: Progress, draft: Draft) -> list[float]:
        """``S(1..)`` of as many drafts as may be verified."""
        if not draft.token_ids:
            return []
        model = progress.models[draft.kind]
        curve = model.survival(draft.request_id, draft)
        return curve if model.trust(draft.request_id) > _TRUSTED else curve[: self.settings.cautious_length]

    def _gains(self, progress: Progress, survival: list[float]) -> list[float]:
        """``sum_{i<=n} S(i) - lambda (t_verify(n + 1) - t_verify(1))`` for n = 1, 2, ..., in tokens."""
        rate, passes = progress.rate, self._row_costs(progress)
        one = passes[0]
        return [s - rate * (t - one) for s, t in zip(accumulate(survival), passes[1:], strict=False)]

    def _worth_asking(self, progress: Progress, kind: str, free: float) -> bool:
        """Whether a drafter's expected value, less its time, beats what is free; or it is time to try it again."""
        settings, state = self.settings, progress.state
        assert state is not None
        population = self._populations.get(kind)
        if population is None:
            population = self._populations[kind] = Population(settings.first_value)
        arm = progress.arms.get(kind)
        if arm is None:
            arm = progress.arms[kind] = Arm(
                population.value, settings.prior_blocks, settings.prior_blocks, settings.first_retry
            )
        horizon = max(1, min(settings.injection_horizon, round(state.remaining / settings.tokens_per_use)))
        price = progress.rate * self._draft_seconds(kind, state, horizon)
        arm.trying = False
        optimism = settings.optimism * min(1.0, state.remaining / settings.long_answer)
        worth = arm.hope(optimism) * progress.models[kind].trust(state.request_id)
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
        # What earlier requests left of their share may be spent too: short answers would never try anything.
        share = settings.most_for_tries * population.willing()
        earlier = max(0.0, share * population.elapsed - population.spent)
        if arm.spent + whole > share * progress.elapsed + earlier:
            arm.retry_in = 1
            return False
        arm.spent += whole
        population.spent += whole
        population.tries += 1.0
        arm.backoff = min(2 * arm.backoff, self._longest_retry(population, price))
        arm.retry_in, arm.trying = arm.backoff, True
        arm.blocks = min(arm.blocks, 1.0)  # what is old counts no more than what the try will show
        arm.seen = arm.blocks
        return True

    def _keep(self, arm: Arm, population: Population) -> None:
        """An arm in use earns back its short back-off; one that a try revived has recovered once it has lasted."""
        if arm.retry_in:
            arm.retry_in, arm.revived = 0, 0
            population.returns += 1.0
        arm.backoff = max(self.settings.first_retry, arm.backoff - 1)
        if arm.revived >= 0:
            arm.revived += 1
            if arm.revived > self.settings.first_retry:
                arm.revived = -1
                population.recoveries += 1.0

    def _longest_retry(self, population: Population, price: float) -> int:
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
        drafts = round(self._populations[kind].drafts)
        block = self.costs.block(state.context_length, 1, drafts) * math.exp(self._populations[kind].slowness)
        return block + self.costs.table.inject_row * max(rows - 1, 0) + self.costs.table.after_draft

    def _order(self, progress: Progress, kind: str, limit: int) -> DraftOrder:
        """A block; where each of its drafts costs time, only as many as may pay for themselves and their rows."""
        state, step = progress.state, self.costs.table.draft_step
        assert state is not None
        if not state.draws and not step:
            return DraftOrder(kind, limit)
        model, passes = progress.models[kind], self._row_costs(progress)
        trust, population = model.trust(state.request_id), self._populations[kind]
        if trust <= _TRUSTED:
            return DraftOrder(kind, min(limit, self.settings.cautious_length))
        if self._lengthens(progress.verify_rounds + 1):
            return DraftOrder(kind, limit)
        # What drawing them costs is not in the table: it shows in how much slower than that blocks are.
        step += self.costs.block(state.context_length) * max(math.expm1(population.slowness), 0.0) / population.drafts

        def go_on(log_probs: Sequence[float]) -> bool:
            """The next draft is taken to be as sure as the last."""
            count = len(log_probs)
            draft = Draft(state.request_id, 0, (0,) * count, tuple(log_probs), kind=kind)
            hazards = model.hazards(state.request_id, draft, count)
            row = (passes[min(count + 1, len(passes) - 1)] - passes[0]) / (count + 1)
            return trust * math.prod(hazards) * hazards[-1] > progress.rate * (step + row)

        return DraftOrder(kind, limit, go_on)

    def _lengthens(self, verify_rounds: int) -> bool:
        return verify_rounds % self.settings.lengthen_every == 0

    def _learn_value(self, progress: Progress, draft: Draft, survival: list[float]) -> None:
        arm = progress.arms.get(draft.kind)
        if arm is None or not survival:
            return
        arm.blocks = min(arm.blocks + 1.0, self.settings.value_memory)
        arm.seen += 1.0
        arm.learnt = True
        trust = progress.models[draft.kind].trust(draft.request_id)
        surprise = max(0.0, *self._gains(progress, [s / trust for s in survival])) - arm.value
        arm.value += surprise / arm.blocks
        arm.variance += (surprise * surprise * (1.0 - 1.0 / arm.blocks) - arm.variance) / arm.blocks

    def _explore(self, progress: Progress, draft: Draft, length: int) -> int:
        """Verify a little more on a retry, and rarely otherwise, so that what is never verified is still learnt."""
        if not draft.token_ids:
            return 0
        arm = progress.arms.get(draft.kind)
        if arm is not None and arm.trying:
            return max(length, 1)
        progress.verify_rounds += 1
        if self._lengthens(progress.verify_rounds):
            return min(length + 2, len(draft.token_ids))
        return length

    def _passes(self, live: Sequence[tuple[Draft, Progress]], rows: int) -> list[float]:
        """Table seconds of passes of 1 to at least ``rows`` rows for these requests together."""
        if len(live) == 1 and len(passes := self._row_costs(live[0][1])) >= rows:
            return passes
        contexts = [progress.state.context_length for _, progress in live if progress.state is not None]
        return self.costs.passes(max(rows, 1), sum(contexts) // max(len(contexts), 1))

    def _observe_request(self, progress: Progress, part: RequestRound, record: RoundRecord, load: float) -> None:
        costs, settings = self.costs, self.settings
        seconds = costs.one_pass(record.total_rows, part.context_length) + costs.table.other
        arm = progress.arms.get(part.kind)
        if arm is not None and record.draft_s > 0.0:
            population = self._populations[part.kind]
            expected = costs.block(part.context_length, record.pending_rows, part.num_drafted)
            population.drafts += (part.num_drafted - population.drafts) / settings.surplus_memory
            if expected > 0.0 and not self.frozen:
                surprise = math.log(record.draft_s / (expected * load)) - population.slowness
                population.slowness += max(-0.5, min(0.5, surprise)) / settings.value_memory
            seconds += expected * math.exp(population.slowness) + costs.table.after_draft
            keep = 1.0 - 1.0 / settings.surplus_memory
            arm.surplus = keep * arm.surplus + part.num_accepted - arm.expected
            arm.checked = keep * (arm.checked - RIGHT_BLOCKS) + 1.0 + RIGHT_BLOCKS
        progress.end(part.num_committed, seconds, settings.rate_memory)
        self._pace.add(part.num_committed, seconds, settings.population_memory)


def _best_lengths(paces: Sequence[Pace], curves: Sequence[list[float]], passes: list[float]) -> list[int]:
    """Prefix lengths that maximise weighted survival less the price of the rows' time.

    A token of request r weighs 1 / (r's tokens a round); a second costs the sum of the requests' rounds a second:
    for one request that is its rule divided by its tokens a round. Survival falls with the position, so the best
    slots of all requests together are a prefix of each.
    """
    slots = sorted(
        (-survival * p.rounds / p.tokens, index)
        for index, (p, curve) in enumerate(zip(paces, curves, strict=True))
        for survival in curve
    )
    price = sum(p.rounds / p.seconds for p in paces)
    row = len(paces)
    best = worth = 0.0
    taken = 0
    for count, (negative, _) in enumerate(slots, 1):
        worth -= negative
        gain = worth - price * (passes[row + count - 1] - passes[row - 1])
        if gain > best:
            best, taken = gain, count
    lengths = [0] * len(paces)
    for _, index in slots[:taken]:
        lengths[index] += 1
    return lengths
