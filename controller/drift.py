"""Survival curves of logged drafts, censoring counted, and whether newer logs still look like those a policy was
tuned on.

Three curves, of rising honesty. `naive_survival` takes what was never verified for rejected. `survival` (product
limit; Kaplan and Meier 1958) does not, but is right only where how much is verified has nothing to do with how much
would be accepted; a policy that verifies more where evidence is good makes it too high. `survival_given_evidence` is
right there too, as far as hazards given the evidence are, and does not move when only the verified lengths do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from dflash_ort.controller.acceptance import HazardPrior, features_of, observed_trials
from dflash_ort.controller.fitting import Floats, Ints, Trials, equal_mass_bins, score, sigmoid, trials_of
from dflash_ort.records import RequestRound

FEWEST_REQUESTS = 8
"""With fewer, an interval over requests says nothing."""
_RESAMPLES = 400
_CONFIDENCE, _CONFIDENCE_OF_DRIFT = 0.95, 0.99
"""Of a curve's interval; and of each of the five numbers that drift is judged by, 0.95 for all together."""


@dataclass(frozen=True, slots=True)
class Survival:
    """``curve[i - 1]``: share of blocks whose first i drafts the target agrees with, as far as that was observed.

    ``low`` and ``high``: its interval, 95% unless said otherwise, by resampling requests; ``at_risk``: trials observed
    at each position.
    """

    curve: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    at_risk: tuple[int, ...]


def naive_survival(rounds: Iterable[RequestRound]) -> tuple[float, ...]:
    """Share of rounds that accepted at least i drafts, i = 1, 2, ...: too low, as what was not verified counts as
    rejected. Here to show by how much.
    """
    counts = np.bincount(np.array([round_.num_accepted for round_ in rounds], np.int64))
    at_least = counts[::-1].cumsum()[::-1]
    return tuple((at_least[1:] / max(counts.sum(), 1)).tolist())


def survival(
    trials: Trials, *, confidence: float = _CONFIDENCE, resamples: int = _RESAMPLES, seed: int = 0
) -> Survival:
    """Product-limit survival by position, up to the last position with a trial. See the module for its bias."""
    _, groups = np.unique(trials.groups, return_inverse=True)
    last = int(trials.positions.max(initial=0))
    at_risk = _by_request(groups, trials.positions - 1, np.ones(len(trials)), last)
    accepted = _by_request(groups, trials.positions - 1, trials.accepted, last)

    def curve(weights: Floats) -> Floats:
        return _product(_ratio(weights @ accepted, weights @ at_risk))

    return _with_interval(curve, at_risk, confidence, resamples, seed)


def survival_given_evidence(
    rounds_by_request: Sequence[Sequence[RequestRound]],
    weights: Sequence[float],
    *,
    positions: int = 3,
    confidence: float = _CONFIDENCE,
    resamples: int = _RESAMPLES,
    seed: int = 0,
) -> Survival:
    """Survival of all drafted blocks, verified or not, up to ``positions`` or the last position with a trial.

    Mean over blocks of the products of hazards given each draft's evidence (standardisation, Robins 1986), each
    position's hazard multiplied by what was observed there over what ``weights`` expected of the same trials: wrong
    weights are put right on average, and without evidence this is the product limit.
    """
    sums = _evidence_sums(rounds_by_request, weights, positions)
    seen = sums[3].sum(axis=0) > 0
    sums = sums[:, :, : int(np.argmin(seen)) if not seen.all() else positions]

    def curve(counts: Floats) -> Floats:
        alive, before, accepted, _, expected = (counts @ total for total in sums)
        return np.minimum(_product(_ratio(alive, before) * _ratio(accepted, expected)), 1.0)

    return _with_interval(curve, sums[3], confidence, resamples, seed)


def _evidence_sums(
    rounds_by_request: Sequence[Sequence[RequestRound]], weights: Sequence[float], positions: int
) -> Floats:
    """``[5, requests, positions]``: over the blocks drafted that far, the chance that all drafts up to there are right
    and that those before are; and over the observed trials, how many were accepted, how many there were, and how many
    were expected to be accepted.
    """
    features, blocks = [], []
    for index, rounds in enumerate(rounds_by_request):
        for round_ in rounds:
            count, outcomes = min(round_.num_drafted, positions), observed_trials(round_)[:positions]
            features.extend(features_of(round_, count))
            blocks.append((index, count, len(outcomes), sum(outcomes)))
    group, drafted, observed, accepted = np.array(blocks, np.int64).reshape(-1, 4).T
    number = np.arange(positions)
    was_drafted, was_observed = number < drafted[:, None], number < observed[:, None]
    hazards = np.ones(was_drafted.shape)
    if features:
        hazards[was_drafted] = sigmoid(np.array(features) @ np.array(weights))
    alive = np.cumprod(hazards, axis=1)
    columns = (
        alive * was_drafted,
        alive / hazards * was_drafted,
        number < accepted[:, None],
        was_observed,
        hazards * was_observed,
    )
    sums = np.zeros((len(columns), len(rounds_by_request), positions))
    for total, column in zip(sums, columns, strict=True):
        np.add.at(total, group, column)
    return sums


@dataclass(frozen=True, slots=True)
class DriftReference:
    """What the logs that a policy was tuned on looked like; plain numbers, for a policy file.

    ``survival``: `survival_given_evidence` at positions 1, 2, ...; ``gap``: share accepted less share expected;
    ``log_loss`` and ``ece`` of the policy's own weights, without request offsets.
    """

    survival: tuple[float, ...]
    gap: float
    log_loss: float
    ece: float


@dataclass(frozen=True, slots=True)
class Drift:
    """Newer logs beside a `DriftReference`.

    ``enough``: whether there were requests enough to tell; ``gap`` and ``ece``: value, low, high (99% over requests,
    and so is ``survival``); ``log_loss`` is reported, not judged: texts may have become harder with every probability
    right. ``reasons``: one line each.
    """

    drifted: bool
    enough: bool
    requests: int
    survival: Survival
    gap: tuple[float, float, float]
    ece: tuple[float, float, float]
    log_loss: float | None
    reasons: tuple[str, ...]


def drift_reference(prior: HazardPrior, rounds_by_request: Sequence[Sequence[RequestRound]]) -> DriftReference:
    """The reference to store with ``prior``. Raises `PolicyError` where no trial was observed."""
    trials = _trials(rounds_by_request)
    probabilities = sigmoid(trials.features @ np.array(prior.means))
    scores = score(probabilities, trials.accepted)
    curve = survival_given_evidence(rounds_by_request, prior.means, resamples=1).curve
    return DriftReference(curve, scores.positives - float(probabilities.mean()), scores.log_loss, scores.ece)


def check_drift(
    prior: HazardPrior,
    expected: DriftReference,
    rounds_by_request: Sequence[Sequence[RequestRound]],
    *,
    survival_threshold: float = 0.05,
    calibration_threshold: float = 0.03,
    resamples: int = _RESAMPLES,
    seed: int = 0,
) -> Drift:
    """Whether newer rounds of one family, each request's in a sequence of its own, left what was expected.

    Drift is where a number's whole interval lies further than a threshold (absolute) from the reference: survival at
    a position, the share accepted less the share expected, or calibration error. A position counts where at least
    `FEWEST_REQUESTS` requests have trials; with fewer requests with any, nothing is said.
    """
    observed = [rounds for rounds in rounds_by_request if any(observed_trials(round_) for round_ in rounds)]
    if len(observed) < FEWEST_REQUESTS:
        reason = f"too little to tell: {len(observed)} requests with observed drafts, {FEWEST_REQUESTS} are needed"
        nothing, unknown = Survival((), (), (), ()), (0.0, 0.0, 0.0)
        return Drift(False, False, len(observed), nothing, unknown, unknown, None, (reason,))
    trials = _trials(observed)
    probabilities = sigmoid(trials.features @ np.array(prior.means))
    gap, ece = _calibration(trials, probabilities, resamples, seed)
    reach = _well_observed(trials, len(expected.survival))
    curve = survival_given_evidence(
        observed, prior.means, positions=reach, confidence=_CONFIDENCE_OF_DRIFT, resamples=resamples, seed=seed
    )
    values = zip(curve.curve, curve.low, curve.high, strict=True)
    judged = [
        (f"survival at {i + 1}", value, expected.survival[i], survival_threshold) for i, value in enumerate(values)
    ]
    judged.append(("share accepted less share expected", gap, expected.gap, calibration_threshold))
    reasons = [_reason(*one) for one in judged if _beyond(*one[1:])]
    if ece[1] > expected.ece + calibration_threshold:  # better calibrated than it was is no reason
        reasons.append(_reason("calibration error", ece, expected.ece, calibration_threshold))
    log_loss = score(probabilities, trials.accepted).log_loss
    return Drift(bool(reasons), True, len(observed), curve, gap, ece, log_loss, tuple(reasons))


def _beyond(value: tuple[float, float, float], reference: float, threshold: float) -> bool:
    return value[1] > reference + threshold or value[2] < reference - threshold


def _reason(name: str, value: tuple[float, float, float], reference: float, threshold: float) -> str:
    return f"{name}: {value[0]:.3f} ({value[1]:.3f} to {value[2]:.3f}), was {reference:.3f}; {threshold} is allowed"


def _calibration(
    trials: Trials, probabilities: Floats, resamples: int, seed: int
) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """Share accepted less share expected, and calibration error; each value, low, high."""
    bins = equal_mass_bins(probabilities)
    counts = _by_request(trials.groups, bins, np.ones(len(trials)), int(bins.max()) + 1)
    excess = _by_request(trials.groups, bins, trials.accepted - probabilities, counts.shape[1])

    def statistic(weights: Floats) -> Floats:
        total = float(weights @ counts.sum(axis=1))
        sums = weights @ excess
        return np.array([sums.sum(), np.abs(sums).sum()]) / total

    value = statistic(np.ones(len(counts)))
    low, high = _interval(statistic, len(counts), _CONFIDENCE_OF_DRIFT, resamples, seed)
    gap, ece = zip(value.tolist(), low.tolist(), high.tolist(), strict=True)
    return gap, (ece[0], max(ece[1], 0.0), max(ece[2], 0.0))


def _well_observed(trials: Trials, most: int) -> int:
    """Positions up to ``most`` at which enough requests have trials for an interval."""
    for position in range(1, most + 1):
        if len(np.unique(trials.groups[trials.positions == position])) < FEWEST_REQUESTS:
            return position - 1
    return most


def _trials(rounds_by_request: Sequence[Sequence[RequestRound]]) -> Trials:
    return trials_of((group, round_) for group, rounds in enumerate(rounds_by_request) for round_ in rounds)


def _by_request(groups: Ints, columns: Ints, values: Floats | NDArray[np.int8], width: int) -> Floats:
    """Sums of ``values``, ``[requests, width]``."""
    height = int(groups.max(initial=-1)) + 1
    sums = np.bincount(groups * width + columns, values, minlength=height * width)
    return sums.astype(np.float64).reshape(height, width)


def _ratio(above: Floats, below: Floats) -> Floats:
    """0 where there is nothing below: a resample may hold no trial at a position."""
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)


def _product(hazards: Floats) -> Floats:
    return np.cumprod(hazards).astype(np.float64)


def _with_interval(
    curve: Callable[[Floats], Floats], at_risk: Floats, confidence: float, resamples: int, seed: int
) -> Survival:
    """A curve and its interval; ``at_risk`` is ``[requests, positions]``."""
    value = curve(np.ones(len(at_risk)))
    low, high = (bound.clip(0.0, 1.0) for bound in _interval(curve, len(at_risk), confidence, resamples, seed))
    counts = at_risk.sum(axis=0).astype(np.int64)
    return Survival(tuple(value.tolist()), tuple(low.tolist()), tuple(high.tolist()), tuple(counts.tolist()))


def _interval(
    statistic: Callable[[Floats], Floats], requests: int, confidence: float, resamples: int, seed: int
) -> tuple[Floats, Floats]:
    """Interval of a statistic of how often each request counts: Student's, with bias and standard error by resampling
    requests (bootstrap; Efron 1979). Percentiles are too narrow for a dozen requests, and a calibration error, which
    noise makes larger, needs its bias taken off. One request says nothing of others: its interval has no end.
    """
    value = statistic(np.ones(requests))
    if requests < 2:
        return np.full(value.shape, -np.inf), np.full(value.shape, np.inf)
    random = np.random.default_rng(seed)
    rows = (random.integers(requests, size=requests) for _ in range(resamples))
    values = np.array([statistic(np.bincount(row, minlength=requests).astype(np.float64)) for row in rows])
    middle = 2.0 * value - values.mean(axis=0)
    reach = _student(confidence, requests - 1) * values.std(axis=0)
    return middle - reach, middle + reach


def _student(confidence: float, freedom: int) -> float:
    """Two-sided quantile of Student's t, by its expansion in the normal one (Abramowitz and Stegun 26.7.5)."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2.0)
    first, second = (z**3 + z) / 4.0, (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / 96.0
    return z + first / freedom + second / freedom**2
