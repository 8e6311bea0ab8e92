"""Fits the acceptance estimator to logged rounds.

The fit is a discrete-time hazard regression: one row a trial (person-period data; Singer and Willett 1993), one
logistic regression over the rows. Which trials were observed is `acceptance.observed_trials`' to say, so censoring is
what it is online. Rounds of one request are alike: folds, standard errors and intervals go by request, never by trial.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dflash_ort.controller.acceptance import NUM_FEATURES, HazardModel, HazardPrior, features_of, observed_trials
from dflash_ort.errors import PolicyError
from dflash_ort.records import Draft, RequestRound

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

STRENGTHS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Multiples of the start's own precision, one over its deviations squared, that a fit may be held to it with. Not
below 1: where trials are few, a weaker hold wins by luck; where there are many, 1 is weak enough.
"""
_BINS = 10
_WORTH_LEAVING = 2.0
"""Standard errors of its gain over the start by which a fit must be better than it."""
_NO_SKLEARN = "tuning needs scikit-learn; install 'dflash-ort[tune]'"
_GRIDS: dict[str, tuple[float, ...]] = {
    "offset_deviation": (0.1, 0.2, 0.4, 0.6, 0.9, 1.3),
    "offset_memory": (15.0, 30.0, 60.0, 120.0, 300.0),
    "useless": (0.01, 0.03, 0.1, 0.2, 0.4),
    "scale": (0.1, 0.3, 1.0, 2.0),
}


@dataclass(frozen=True, slots=True, eq=False)
class Trials:
    """Observed trials of one hazard family (`acceptance.family`), one row each.

    ``features`` float64 ``[trials, NUM_FEATURES]``; ``accepted`` int8, 0 or 1; ``groups`` int64, the request's index;
    ``positions`` int64, the draft's number in its block from 1 on.
    """

    features: Floats
    accepted: NDArray[np.int8]
    groups: Ints
    positions: Ints

    def __len__(self) -> int:
        return len(self.accepted)


def trials_of(rounds: Iterable[tuple[int, RequestRound]]) -> Trials:
    """Person-period rows of rounds of one family, each given with its request's index."""
    features: list[float] = []
    accepted, groups, positions = bytearray(), list[int](), list[int]()
    for group, round_ in rounds:
        outcomes = observed_trials(round_)
        count = len(outcomes)
        for row in features_of(round_, count):
            features.extend(row)
        accepted.extend(outcomes)
        groups.extend([group] * count)
        positions.extend(range(1, count + 1))
    return Trials(
        np.array(features, np.float64).reshape(-1, NUM_FEATURES),
        np.array(accepted, np.int8),
        np.array(groups, np.int64),
        np.array(positions, np.int64),
    )


@dataclass(frozen=True, slots=True)
class Scores:
    """How good probabilities were, in nats and shares.

    ``ece``: expected calibration error over ten bins of equal mass, equal probabilities in one bin (Naeini et al.
    2015); ``auc``: None where only one outcome was seen; ``reliability``: mean predicted, observed share and count of
    each bin.
    """

    log_loss: float
    brier: float
    ece: float
    auc: float | None
    trials: int
    positives: float
    reliability: tuple[tuple[float, float, int], ...]


def score(probabilities: Floats, accepted: NDArray[np.int8]) -> Scores:
    """Score probabilities ``[trials]`` against outcomes ``[trials]``. Raises `PolicyError` where there are none."""
    try:
        from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score
    except ImportError as error:
        raise PolicyError(_NO_SKLEARN) from error
    if not len(accepted):
        raise PolicyError("there are no observed trials to score")
    bins = equal_mass_bins(probabilities)
    counts = np.bincount(bins)
    kept = counts > 0
    predicted = np.bincount(bins, probabilities)[kept] / counts[kept]
    observed = np.bincount(bins, accepted)[kept] / counts[kept]
    return Scores(
        log_loss=float(log_loss(accepted, probabilities, labels=[0, 1])),
        brier=float(brier_score_loss(accepted, probabilities, labels=[0, 1], pos_label=1)),
        ece=float(np.abs(predicted - observed) @ counts[kept]) / len(accepted),
        auc=float(roc_auc_score(accepted, probabilities)) if 0 < accepted.sum() < len(accepted) else None,
        trials=len(accepted),
        positives=float(accepted.mean()),
        reliability=tuple(zip(predicted.tolist(), observed.tolist(), counts[kept].tolist(), strict=True)),
    )


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted weights of one family, ``NUM_FEATURES`` of them.

    ``errors``: standard errors, clustered by request (sandwich; Liang and Zeger 1986), that do not count what
    shrinking adds; the start's deviations where it was kept. ``strength``: how many times the start's precision held
    the weights to it; None where the start was kept as it is. ``scores``: of each trial by a fit that did not see its
    request; ``start_scores``: of the start on the same trials.
    """

    weights: tuple[float, ...]
    errors: tuple[float, ...]
    strength: float | None
    scores: Scores
    start_scores: Scores


def fit_weights(trials: Trials, *, start: HazardPrior, folds: int = 5, seed: int = 0) -> Fit:
    """Logistic regression held to the start: ``log loss + strength / 2 sum_j ((w_j - mean_j) / deviation_j)^2``.

    The strength is the one that does best on requests left out, and the start is kept unless that beats it by two
    standard errors over requests. The weights are the population's, request offsets averaged over: what a new request
    starts from. A feature that never varies from zero keeps the start's weight. Raises `PolicyError` where fewer than
    two requests have trials, or scikit-learn is missing.
    """
    _, groups = np.unique(trials.groups, return_inverse=True)
    count = int(groups.max(initial=-1)) + 1
    if count < 2:
        raise PolicyError(f"observed trials of {count} requests cannot be fitted; at least 2 are needed")
    means = np.array(start.means)
    precision = 1.0 / np.maximum(np.array(start.deviations), 1e-6) ** 2
    initial = sigmoid(trials.features @ means)
    held_out = _cross_validate(trials, groups, min(folds, count), seed, means, precision)
    best = min(STRENGTHS, key=lambda strength: float(_losses(held_out[strength], trials.accepted).sum()))
    gains = np.bincount(groups, _losses(initial, trials.accepted) - _losses(held_out[best], trials.accepted))
    start_scores = score(initial, trials.accepted)
    if gains.sum() <= _WORTH_LEAVING * _error_of_sum(gains.astype(np.float64)):
        return Fit(start.means, start.deviations, None, start_scores, start_scores)
    weights = _newton(trials.features, trials.accepted, means, best * precision, means)
    errors = _clustered_errors(trials, groups, weights, best * precision)
    scores = score(held_out[best], trials.accepted)
    return Fit(tuple(weights.tolist()), tuple(errors.tolist()), best, scores, start_scores)


def _cross_validate(
    trials: Trials, groups: Ints, folds: int, seed: int, means: Floats, precision: Floats
) -> dict[float, Floats]:
    """By strength, each trial's probability according to a fit without its request."""
    try:
        from sklearn.model_selection import GroupKFold
    except ImportError as error:
        raise PolicyError(_NO_SKLEARN) from error
    held_out = {strength: np.empty(len(trials)) for strength in STRENGTHS}
    splitter = GroupKFold(n_splits=folds, shuffle=True, random_state=seed)
    for fitted, left_out in splitter.split(trials.features, trials.accepted, groups):
        features, accepted, weights = trials.features[fitted], trials.accepted[fitted], means
        for strength in reversed(STRENGTHS):  # the strongest is nearest to the start, and each starts from the last
            weights = _newton(features, accepted, means, strength * precision, weights)
            held_out[strength][left_out] = sigmoid(trials.features[left_out] @ weights)
    return held_out


def _newton(features: Floats, accepted: NDArray[np.int8], means: Floats, precision: Floats, weights: Floats) -> Floats:
    """Minimise the penalised log-loss, which is strictly convex, by Newton steps, halved where one goes too far."""

    def objective(candidate: Floats) -> float:
        logits = features @ candidate
        loss = float(np.logaddexp(0.0, logits).sum() - logits @ accepted)
        return loss + 0.5 * float(precision @ (candidate - means) ** 2)

    value = objective(weights)
    for _ in range(60):
        probabilities = sigmoid(features @ weights)
        gradient = features.T @ (accepted - probabilities) - precision * (weights - means)
        step = np.linalg.solve(_information(features, probabilities) + np.diag(precision), gradient)
        after = objective(weights + step)
        while after > value and np.abs(step).max() > 1e-9:
            step = step / 2.0
            after = objective(weights + step)
        weights, value = weights + step, after
        if np.abs(step).max() < 1e-7:
            break
    return weights


def _clustered_errors(trials: Trials, groups: Ints, weights: Floats, precision: Floats) -> Floats:
    probabilities = sigmoid(trials.features @ weights)
    bread = np.linalg.inv(_information(trials.features, probabilities) + np.diag(precision))
    scores = trials.features * (trials.accepted - probabilities)[:, None]
    by_group = np.stack([np.bincount(groups, column) for column in scores.T], axis=1)
    count = len(by_group)
    meat = by_group.T @ by_group * (count / (count - 1))
    errors: Floats = np.sqrt(np.diag(bread @ meat @ bread))
    return errors


def fit_request_prior(
    rounds_by_request: Sequence[Sequence[RequestRound]],
    prior: HazardPrior,
    *,
    kind: str | None = None,
    max_rounds: int = 4000,
    seed: int = 0,
) -> HazardPrior:
    """Choose how requests differ, by what `HazardModel` predicts one step ahead (prequential log-loss; Dawid 1984).

    ``rounds_by_request``: each request's rounds in order. Where ``kind`` is given, rounds of other kinds may be among
    them and let time pass, as they do online. Searched one after the other, twice: ``offset_deviation``,
    ``offset_memory``, ``useless``, and one factor on all ``deviations``; a value is left only for a gain above its
    standard error over requests. Beyond ``max_rounds``, requests are left out at random (``seed``), whole.
    """
    replays = [[_step(round_, kind) for round_ in rounds] for rounds in _subsample(rounds_by_request, max_rounds, seed)]
    if len(replays) < 2:
        return prior
    losses: dict[HazardPrior, Floats] = {}

    def loss(candidate: HazardPrior) -> Floats:
        if candidate not in losses:
            losses[candidate] = _prequential_loss(replays, candidate)
        return losses[candidate]

    best, deviations = prior, prior.deviations
    for _ in range(2):
        for name, grid in _GRIDS.items():
            candidates = [_with(best, name, value, deviations) for value in grid]
            candidate = min(candidates, key=lambda one: float(loss(one).sum()))
            gains = loss(best) - loss(candidate)
            if gains.sum() > _error_of_sum(gains):
                best = candidate
    return best


def _with(prior: HazardPrior, name: str, value: float, deviations: tuple[float, ...]) -> HazardPrior:
    """``prior`` with one entry of `_GRIDS` set; ``deviations`` are what a scale of 1 stands for."""
    match name:
        case "offset_deviation":
            return replace(prior, offset_deviation=value)
        case "offset_memory":
            return replace(prior, offset_memory=value)
        case "useless":
            return replace(prior, useless=value)
        case _:
            return replace(prior, deviations=tuple(value * deviation for deviation in deviations))


_Step = tuple[Draft | None, RequestRound, list[int]]


def _step(round_: RequestRound, kind: str | None) -> _Step:
    """What a round's drafter knew, None where it was another one; and what the round showed."""
    if kind is not None and round_.kind != kind:
        return None, round_, []
    draft = Draft(0, 0, (), round_.log_probs, round_.match_length, round_.kind, round_.agreement)
    return draft, round_, observed_trials(round_)


def _subsample(requests: Sequence[Sequence[RequestRound]], most: int, seed: int) -> list[list[RequestRound]]:
    """Whole requests at random up to about ``most`` rounds, in their order; a request's rounds get its index as id."""
    chosen, total = list[int](), 0
    for index in np.random.default_rng(seed).permutation(len(requests)).tolist():
        if requests[index] and (total + len(requests[index]) <= most or len(chosen) < 2):
            chosen.append(index)
            total += len(requests[index])
    return [[replace(round_, request_id=index) for round_ in requests[index]] for index in sorted(chosen)]


def _prequential_loss(requests: Sequence[Sequence[_Step]], prior: HazardPrior) -> Floats:
    """Nats, ``[requests]``. A block's first draft is accepted with ``trust h(1)``; behind an accepted one, ``h(i)``."""
    model, losses = HazardModel(prior), np.zeros(len(requests))
    for index, steps in enumerate(requests):
        loss = 0.0
        for draft, round_, outcomes in steps:
            if draft is None:
                model.idle(round_.request_id)
                continue
            if outcomes:
                hazards = model.hazards(round_.request_id, draft, len(outcomes))
                hazards[0] *= model.trust(round_.request_id)
                for hazard, accepted in zip(hazards, outcomes, strict=True):
                    loss -= math.log(max(hazard if accepted else 1.0 - hazard, 1e-9))
            model.observe(round_)
        if steps:
            model.forget(steps[0][1].request_id)
        losses[index] = loss
    return losses


def equal_mass_bins(probabilities: Floats) -> Ints:
    """Bin of each probability, by its rank; equal ones share a bin, however long their run is."""
    _, inverse, counts = np.unique(probabilities, return_inverse=True, return_counts=True)
    middle = (np.cumsum(counts) - counts / 2.0) / len(probabilities)
    bins: Ints = np.minimum((middle * _BINS).astype(np.int64), _BINS - 1)[inverse]
    return bins


def _losses(probabilities: Floats, accepted: NDArray[np.int8]) -> Floats:
    """Log-loss of each trial, in nats."""
    losses: Floats = -np.log(np.clip(np.where(accepted, probabilities, 1.0 - probabilities), 1e-15, 1.0))
    return losses


def _information(features: Floats, probabilities: Floats) -> Floats:
    weighted: Floats = (features * (probabilities * (1.0 - probabilities))[:, None]).T @ features
    return weighted


def sigmoid(logits: Floats) -> Floats:
    """Elementwise, without overflow."""
    result: Floats = 1.0 / (1.0 + np.exp(-np.clip(logits, -500.0, 500.0)))
    return result


def _error_of_sum(values: Floats) -> float:
    """Standard error of a sum over requests."""
    return math.sqrt(len(values)) * float(values.std(ddof=1))
