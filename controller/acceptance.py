"""How likely each draft is to be accepted: hazards from evidence, learnt online, per request, with censoring done
right.

``h(i) = P(draft i accepted | drafts before it accepted) = sigmoid(w . phi_i + b_r)``. The weights ``w`` are shared
by all requests and start from a policy; ``b_r`` is the request's own offset, zero at first. Both carry a Gaussian
belief with a diagonal covariance, updated one trial at a time (assumed-density filtering of a logistic regression;
Opper 1998), which needs no learning rate: what is uncertain moves fast, what is known moves slowly. Beliefs widen
again with every round, so that old evidence fades.

A round shows trials 1 to the first rejection, no further: drafts behind it, behind the verified length, or behind
the cut at an answer's end were not observed and count neither for nor against.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dflash_ort.records import Draft, RequestRound

MAX_LOGIT = 6.0
_LEAST_LOG_PROBABILITY = -12.0


@dataclass(frozen=True, slots=True)
class HazardPrior:
    """Where a hazard model starts, one entry per feature (see `features_of`), and how fast it may move.

    ``means`` and ``deviations`` of the shared weights; ``offset_deviation`` of a request's own offset;
    ``shared_memory`` and ``offset_memory``: how many rounds evidence is remembered.
    """

    means: tuple[float, ...]
    deviations: tuple[float, ...]
    offset_deviation: float = 0.7
    shared_memory: float = 4000.0
    offset_memory: float = 60.0


NUM_FEATURES = 6
GENERIC_PRIORS: dict[str, HazardPrior] = {
    # intercept, logit of the draft's probability, mean log-probability of the drafts before it, first position, depth
    "dflash": HazardPrior((-0.4, 0.8, 0.1, 0.0, -0.1, 0.0), (0.5, 0.3, 0.2, 0.5, 0.1, 0.01)),
    # intercept, -, -, first position, depth, log2 of the match length
    "ngram": HazardPrior((-0.2, 0.0, 0.0, -0.8, 0.05, 0.5), (0.5, 0.01, 0.01, 0.5, 0.1, 0.3)),
}


def features_of(draft: Draft | RequestRound, count: int) -> np.ndarray:
    """Evidence known before verifying, float64 ``[count, NUM_FEATURES]``.

    Columns: 1; logit of the draft's probability; mean log-probability of the drafts before it; 1 at the first
    position; log of the position; log2 of the match length of a lookup. A kind of draft that has no such evidence
    has zeros there.
    """
    out = np.zeros((count, NUM_FEATURES))
    out[:, 0] = 1.0
    if draft.log_probs:
        logs = np.clip(np.array(draft.log_probs[:count]), _LEAST_LOG_PROBABILITY, -1e-3)
        out[: len(logs), 1] = np.clip(logs - np.log(-np.expm1(logs)), -MAX_LOGIT, MAX_LOGIT)
        before = np.cumsum(logs) - logs
        out[1 : len(logs), 2] = before[1:] / np.arange(1, len(logs))
    out[0, 3] = 1.0
    out[:, 4] = np.log(np.arange(1, count + 1))
    out[:, 5] = math.log2(draft.match_length) if draft.match_length else 0.0
    return out


class HazardModel:
    """Hazards of one kind of draft, learnt from rounds.

    The same sequence of calls gives the same numbers. Memory grows with the requests in progress only.
    """

    def __init__(self, prior: HazardPrior) -> None:
        self.prior = prior
        self._prior_variance = np.square(np.array(prior.deviations))
        self._weights = np.array(prior.means)
        self._variance = self._prior_variance.copy()
        self._offsets: dict[int, _Offset] = {}

    def hazards(self, request_id: int, draft: Draft, count: int) -> np.ndarray:
        """``h(1..count)``, float64."""
        offset = self._offsets.get(request_id)
        logits = features_of(draft, count) @ self._weights + (offset.mean if offset else 0.0)
        result: np.ndarray = 1.0 / (1.0 + np.exp(-logits))
        return result

    def survival(self, request_id: int, draft: Draft) -> np.ndarray:
        """``S(1..m)`` of a draft of m tokens, float64: products of hazards."""
        result: np.ndarray = np.cumprod(self.hazards(request_id, draft, len(draft.token_ids)))
        return result

    def observe(self, round_: RequestRound) -> None:
        """Learn from what a round showed; a round that showed nothing changes nothing."""
        outcomes = observed_trials(round_)
        if not outcomes:
            return
        features = features_of(round_, len(outcomes))
        offset = self._offsets.setdefault(round_.request_id, _Offset(self.prior.offset_deviation**2))
        self._fade(offset)
        for row, accepted in zip(features, outcomes, strict=True):
            probability = 1.0 / (1.0 + math.exp(-(float(row @ self._weights) + offset.mean)))
            curvature = max(probability * (1.0 - probability), 1e-3)
            error = accepted - probability
            offset.variance /= 1.0 + offset.variance * curvature
            offset.mean += offset.variance * error
            self._variance /= 1.0 + self._variance * row * row * curvature
            self._weights += self._variance * row * error

    def forget(self, request_id: int) -> None:
        """The request is over."""
        self._offsets.pop(request_id, None)

    def _fade(self, offset: _Offset) -> None:
        """Widen beliefs towards their priors, and pull the offset a little towards zero: texts change."""
        rate = 1.0 / self.prior.offset_memory
        offset.variance += rate * (self.prior.offset_deviation**2 - offset.variance)
        offset.mean -= 0.25 * rate * offset.mean
        self._variance += (self._prior_variance - self._variance) / self.prior.shared_memory


class _Offset:
    __slots__ = ("mean", "variance")

    def __init__(self, variance: float) -> None:
        self.mean, self.variance = 0.0, variance


def observed_trials(round_: RequestRound) -> list[int]:
    """Outcomes of a round's drafts in order, 1 accepted, 0 rejected; what was not observed is left out.

    A rejection was seen only if the target's own token was committed in its place: an answer that ended on an
    accepted draft shows acceptances and no more.
    """
    rejected = round_.num_accepted < round_.num_verified and round_.num_committed > round_.num_accepted
    return [1] * round_.num_accepted + [0] * rejected
