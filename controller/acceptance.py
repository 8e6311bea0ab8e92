"""How likely each draft is to be accepted: hazards from evidence, learnt online, per request, with censoring done
right.

``h(i) = P(draft i accepted | drafts before it accepted) = sigmoid(w . phi_i + b_r)``. The weights ``w`` are shared
by all requests and start from a policy; ``b_r`` is the request's own offset, zero at first. Both carry a Gaussian
belief with a diagonal covariance, updated one trial at a time (assumed-density filtering of a logistic regression;
Opper 1998), which needs no learning rate: what is uncertain moves fast, what is known moves slowly. Beliefs widen
again with every round, so that old evidence fades.

A drafter may also be useless on a text, however sure it sounds. That has a small probability ``u`` at first, and
``S(i) = (1 - u) h(1) ... h(i)``: a few confident drafts rejected in a row raise ``u`` fast, one accepted ends it.

A round shows trials 1 to the first rejection, no further: drafts behind it, behind the verified length, or behind
the cut at an answer's end were not observed and count neither for nor against.

Vectors here have a handful of entries: plain floats are several times faster than arrays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dflash_ort.records import Draft, RequestRound

_LEAST_LOG_PROBABILITY, _LARGEST_LOG_PROBABILITY = -6.0, -2.5e-3
"""Evidence is cut off here: a logit of 6 either way."""
_ACCEPTED_THOUGH_USELESS = 0.02
_PRIOR_TEXTS = 10.0
"""How many texts the prior of uselessness counts for."""


@dataclass(frozen=True, slots=True)
class HazardPrior:
    """Where a hazard model starts, one entry per feature (see `features_of`), and how fast it may move.

    ``means`` and ``deviations`` of the shared weights; ``offset_deviation`` of a request's own offset; ``useless``:
    how likely a text is on which nothing is accepted; ``shared_memory`` and ``offset_memory``: how many rounds
    evidence is remembered.
    """

    means: tuple[float, ...]
    deviations: tuple[float, ...]
    offset_deviation: float = 0.6
    useless: float = 0.2
    shared_memory: float = 4000.0
    offset_memory: float = 60.0


NUM_FEATURES = 5
GENERIC_PRIORS: dict[str, HazardPrior] = {
    # intercept, logit of the draft's probability, log of the position, log2 of the match so far, agreement.
    # Fitted to rounds of the shipped drafter on 72 prompts and to lookups in the answers to the built-in prompts, at
    # temperatures 0 and, "drawn", 0.8; the deviations leave room for other drafters and other texts.
    "dflash": HazardPrior((-1.0, 0.7, 0.0, 0.0, 0.0), (0.6, 0.25, 0.2, 0.01, 0.01)),
    "dflash drawn": HazardPrior((-1.0, 0.2, -0.2, 0.0, 0.0), (0.6, 0.2, 0.2, 0.01, 0.01)),
    "ngram": HazardPrior((-1.05, 0.0, 0.0, 0.86, 0.5), (0.6, 0.01, 0.2, 0.3, 0.3)),
    "ngram drawn": HazardPrior((-1.0, 0.0, 0.0, 0.68, 0.5), (0.6, 0.01, 0.2, 0.3, 0.3)),
}

Features = tuple[float, float, float, float, float]


def family(kind: str, draws: bool) -> str:
    """The hazard model of a drafter: what a draft's probability says is another thing where drafts are drawn."""
    return f"{kind} drawn" if draws else kind


def features_of(draft: Draft | RequestRound, count: int) -> list[Features]:
    """Evidence known before verifying, for each of the first ``count`` drafts.

    Entries: 1; logit of the draft's probability; log of the position; log2 of how many tokens match a lookup's source
    if the drafts before are right; whether a lookup's other sources agree. A kind of draft that has no such evidence
    has zeros there.
    """
    match = draft.match_length
    rows: list[Features] = []
    known = len(draft.log_probs)
    for i in range(count):
        logit = 0.0
        if i < known:
            log_p = min(max(draft.log_probs[i], _LEAST_LOG_PROBABILITY), _LARGEST_LOG_PROBABILITY)
            logit = log_p - math.log(-math.expm1(log_p))
        rows.append((1.0, logit, math.log(i + 1), math.log2(match + i) if match else 0.0, draft.agreement))
    return rows


class HazardModel:
    """Hazards of one kind of draft, learnt from rounds.

    The same sequence of calls gives the same numbers. Memory grows with the requests in progress only.
    """

    def __init__(self, prior: HazardPrior) -> None:
        self.prior = prior
        self._prior_variance = [d * d for d in prior.deviations]
        self._weights = list(prior.means)
        self._variance = list(self._prior_variance)
        self._offsets: dict[int, _Offset] = {}
        self._useless, self._texts = prior.useless, _PRIOR_TEXTS

    def hazards(self, request_id: int, draft: Draft | RequestRound, count: int) -> list[float]:
        """``h(1..count)``."""
        offset = self._offsets.get(request_id)
        base = offset.mean if offset else 0.0
        return [_sigmoid(base + _dot(self._weights, row)) for row in features_of(draft, count)]

    def survival(self, request_id: int, draft: Draft) -> list[float]:
        """``S(1..m)`` of a draft of m tokens: products of hazards, times `trust`."""
        result, product = [], self.trust(request_id)
        for hazard in self.hazards(request_id, draft, len(draft.token_ids)):
            product *= hazard
            result.append(product)
        return result

    def trust(self, request_id: int) -> float:
        """1 - u: how likely it is that drafts of this kind are of any use on this text."""
        offset = self._offsets.get(request_id)
        return 1.0 - self._useless if offset is None else offset.trust

    def observe(self, round_: RequestRound) -> None:
        """Learn from what a round showed; where it showed nothing of this kind, time passes and no more."""
        offset = self._offsets.get(round_.request_id)
        outcomes = observed_trials(round_)
        if offset is None:
            if not outcomes:
                return
            offset = self._offsets[round_.request_id] = _Offset(self.prior, self._useless)
        self._fade(offset)
        weights, variances = self._weights, self._variance
        for i, (row, accepted) in enumerate(zip(features_of(round_, len(outcomes)), outcomes, strict=True)):
            probability = _sigmoid(offset.mean + _dot(weights, row))
            if i == 0:
                offset.doubt(accepted, probability)
            # On a text where the drafter is useless there is nothing to learn for others.
            share = offset.trust
            curvature = max(probability * (1.0 - probability), 1e-3) * share
            error = (accepted - probability) * share
            offset.variance /= 1.0 + offset.variance * curvature
            offset.mean += offset.variance * error
            for j, x in enumerate(row):
                if x:
                    variance = variances[j] / (1.0 + variances[j] * x * x * curvature)
                    variances[j] = variance
                    weights[j] += variance * x * error
        if outcomes:
            rate = 1.0 / self.prior.shared_memory
            for j, prior in enumerate(self._prior_variance):
                variances[j] += rate * (prior - variances[j])

    def idle(self, request_id: int) -> None:
        """A round of this request went by that had none of these drafts: what is known of its text grows old."""
        offset = self._offsets.get(request_id)
        if offset is not None:
            self._fade(offset)

    def forget(self, request_id: int) -> None:
        """The request is over: whether the drafter was of use on it counts for the next."""
        offset = self._offsets.pop(request_id, None)
        if offset is not None:
            self._texts = min(self._texts + 1.0, 2.0 * _PRIOR_TEXTS)
            self._useless += (min(max(1.0 - offset.trust, 0.02), 0.98) - self._useless) / self._texts

    def _fade(self, offset: _Offset) -> None:
        """Widen the belief towards its prior, and pull it a little towards where it began: texts change."""
        rate = 1.0 / self.prior.offset_memory
        offset.variance += rate * (self.prior.offset_deviation**2 - offset.variance)
        offset.mean -= 0.25 * rate * offset.mean
        offset.useless += 0.25 * rate * (_log_odds(self._useless) - offset.useless)


class _Offset:
    """What is known of one request's text: its offset, and the log-odds that the drafter is useless on it."""

    __slots__ = ("mean", "useless", "variance")

    def __init__(self, prior: HazardPrior, useless: float) -> None:
        self.mean, self.variance = 0.0, prior.offset_deviation**2
        self.useless = _log_odds(useless)

    @property
    def trust(self) -> float:
        return 1.0 / (1.0 + math.exp(self.useless))

    def doubt(self, accepted: int, probability: float) -> None:
        """A block's first draft was accepted or not, with ``probability`` if the drafter is of use."""
        if accepted:
            self.useless += math.log(_ACCEPTED_THOUGH_USELESS / max(probability, _ACCEPTED_THOUGH_USELESS))
        else:
            self.useless -= math.log(max(1.0 - probability, _ACCEPTED_THOUGH_USELESS))
        self.useless = min(max(self.useless, -8.0), 8.0)


def _log_odds(probability: float) -> float:
    return math.log(probability / (1.0 - probability))


def _dot(weights: list[float], row: Features) -> float:
    a, b, c, d, e = row
    return weights[0] * a + weights[1] * b + weights[2] * c + weights[3] * d + weights[4] * e


def _sigmoid(logit: float) -> float:
    return 1.0 / (1.0 + math.exp(-max(logit, -500.0)))


def observed_trials(round_: RequestRound) -> list[int]:
    """Outcomes of a round's drafts in order, 1 accepted, 0 rejected; what was not observed is left out.

    A rejection was seen only if the target's own token was committed in its place: an answer that ended on an
    accepted draft shows acceptances and no more.
    """
    rejected = round_.num_accepted < round_.num_verified and round_.num_committed > round_.num_accepted
    return [1] * round_.num_accepted + [0] * rejected
