"""Survival curves with censoring counted, and drift that is found where it is and nowhere else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
import pytest

from dflash_ort.controller.acceptance import GENERIC_PRIORS, HazardPrior, features_of
from dflash_ort.controller.drift import (
    FEWEST_REQUESTS,
    DriftReference,
    check_drift,
    drift_reference,
    naive_survival,
    survival,
    survival_given_evidence,
)
from dflash_ort.controller.fitting import fit_weights, trials_of
from dflash_ort.errors import PolicyError
from dflash_ort.records import RequestRound
from tests.test_fitting import BLOCK, START, TRUTH, numbered, simulate

PRIOR = HazardPrior(TRUTH, START.deviations)
HARDER = (TRUTH[0] - 0.7, *TRUTH[1:])


def true_survival(answers: Sequence[Sequence[RequestRound]], weights: Sequence[float] = TRUTH) -> np.ndarray:
    """Of all blocks, verified or not."""
    features = np.array([features_of(round_, BLOCK) for answer in answers for round_ in answer])
    hazards = 1.0 / (1.0 + np.exp(-(features @ np.array(weights))))
    curve: np.ndarray = np.cumprod(hazards, axis=1).mean(axis=0)
    return curve


def seen(verified: int, accepted: int, request: int = 0) -> RequestRound:
    return RequestRound(request, 3, verified, accepted, accepted + 1, 9, kind="dflash")


class TestSurvival:
    def test_by_hand(self) -> None:
        """Four of six accept the first; of three looked at further, two the second; nobody looked at the third."""
        rounds = [seen(1, 1), seen(1, 0), seen(2, 2), seen(2, 2), seen(2, 1), seen(2, 0)]
        curve = survival(trials_of(enumerate(rounds)))
        assert curve.curve == pytest.approx((4 / 6, 4 / 6 * 2 / 3))
        assert curve.at_risk == (6, 3)
        assert naive_survival(rounds) == pytest.approx((4 / 6, 2 / 6))
        without_evidence = survival_given_evidence([[round_] for round_ in rounds], GENERIC_PRIORS["ngram"].means)
        assert without_evidence.curve == pytest.approx(curve.curve)
        assert without_evidence.at_risk == (6, 3)

    def test_nothing_seen_is_no_curve(self) -> None:
        assert naive_survival([]) == ()
        assert survival(trials_of([])).curve == ()
        assert survival_given_evidence([], TRUTH).curve == ()
        assert survival_given_evidence([[seen(0, 0)]], TRUTH).curve == ()

    @pytest.mark.parametrize("seed", range(3))
    def test_product_limit_is_right_where_lengths_know_nothing_of_outcomes(self, seed: int) -> None:
        """Hazards by position alone, so that whatever evidence lengths are chosen by, it says nothing of outcomes."""
        weights = (1.0, 0.0, -0.4, 0.0, 0.0)
        answers = simulate(seed, 100, weights=weights)
        truth = true_survival(answers, weights)
        found = survival(trials_of(numbered(answers)))
        error = np.abs(np.array(found.curve)[:4] - truth[:4])
        naive = np.abs(np.array(naive_survival(round_ for _, round_ in numbered(answers)))[:4] - truth[:4])
        assert error.max() < 0.04
        assert naive[1:].min() > 0.1
        assert naive[1:].mean() > 5 * error[1:].mean()

    @pytest.mark.parametrize("seed", range(3))
    def test_given_evidence_it_is_right_where_lengths_follow_the_evidence(self, seed: int) -> None:
        """The naive curve is too low; the plain product limit, of what was worth verifying, is too high."""
        answers = simulate(seed, 150, threshold=0.5)
        trials, truth = trials_of(numbered(answers)), true_survival(answers)
        weights = fit_weights(trials, start=START).weights
        found = np.array(survival_given_evidence(answers, weights, positions=BLOCK).curve)
        error = np.abs(found - truth)
        naive = np.abs(np.array(naive_survival(round_ for _, round_ in numbered(answers))) - truth[:BLOCK])
        assert error.max() < 0.03
        print("E", naive.round(3), error.round(3), (np.array(survival(trials).curve)[:BLOCK] - truth).round(3))
        assert naive[1:].mean() > 5 * error[1:].mean()
        product_limit = np.array(survival(trials).curve)[:BLOCK] - truth
        assert product_limit[1:].min() > 0.04

    def test_the_interval_goes_by_request(self) -> None:
        """Eight requests that accept all or nothing are eight observations, however many rounds they have."""
        trials = trials_of((i, seen(1, i % 2, i)) for i in range(8) for _ in range(500))
        (low,), (high,) = survival(trials).low, survival(trials).high
        assert low < 0.3
        assert high > 0.7

    def test_intervals_cover_the_truth(self) -> None:
        weights, covered = (1.0, 0.0, -0.4, 0.0, 0.0), 0
        truth = 1.0 / (1.0 + np.exp(-1.0)) / (1.0 + np.exp(-1.0 + 0.4 * np.log(2.0)))
        for seed in range(20):
            found = survival(trials_of(numbered(simulate(seed, 20, 10, weights=weights))), resamples=200)
            covered += found.low[1] <= truth <= found.high[1]
        assert covered >= 16


class TestDrift:
    REFERENCE = drift_reference(PRIOR, simulate(100, 120))

    def test_the_reference_is_plain_numbers(self) -> None:
        back = json.loads(json.dumps(asdict(self.REFERENCE)))
        assert DriftReference(**{**back, "survival": tuple(back["survival"])}) == self.REFERENCE
        assert self.REFERENCE.survival == pytest.approx(true_survival(simulate(100, 120))[:3], abs=0.02)
        assert abs(self.REFERENCE.gap) < 0.02
        with pytest.raises(PolicyError, match="no observed trials"):
            drift_reference(PRIOR, [])

    @pytest.mark.parametrize(("requests", "offset"), [(9, 0.0), (9, 0.8), (40, 0.0), (40, 0.8)])
    def test_no_false_alarm(self, requests: int, offset: float) -> None:
        reference = drift_reference(PRIOR, simulate(101, 150, offset=offset))
        alarms = [
            check_drift(PRIOR, reference, simulate(seed, requests, 20, offset=offset), resamples=200)
            for seed in range(10)
        ]
        assert [drift.reasons for drift in alarms if drift.drifted] == []
        assert all(drift.enough for drift in alarms)

    @pytest.mark.parametrize("seed", range(4))
    def test_harder_texts_are_found(self, seed: int) -> None:
        drift = check_drift(PRIOR, self.REFERENCE, simulate(seed, 40, weights=HARDER))
        assert drift.drifted
        assert any(reason.startswith("survival at 1: ") for reason in drift.reasons)
        assert any(reason.startswith("share accepted less share expected: -") for reason in drift.reasons)
        assert all("\n" not in reason and "is allowed" in reason for reason in drift.reasons)
        assert drift.survival.high[1] < self.REFERENCE.survival[1]
        assert drift.gap[2] < -0.03
        assert drift.log_loss is not None

    @pytest.mark.parametrize("seed", range(4))
    def test_a_policy_that_verifies_otherwise_is_no_drift(self, seed: int) -> None:
        """Tuning changes lengths; the plain product limit would move by more than is allowed."""
        bold, shy = simulate(seed, 80, threshold=0.05), simulate(seed + 50, 80, threshold=0.6)
        reference = drift_reference(PRIOR, bold)
        assert check_drift(PRIOR, reference, shy).reasons == ()
        moved = np.array(survival(trials_of(numbered(shy))).curve)[1:3] - reference.survival[1:3]
        assert moved.max() > 0.1

    def test_overconfidence_that_leaves_the_share_alone_is_found(self) -> None:
        """The drafter's probabilities no longer mean anything, and half its drafts are right as before."""
        drift = check_drift(PRIOR, self.REFERENCE, simulate(3, 60, weights=(0.9, 0.0, 0.0, 0.0, 0.0)))
        assert any(reason.startswith("calibration error: ") for reason in drift.reasons)
        assert drift.ece[1] > self.REFERENCE.ece + 0.03

    def test_few_requests_are_too_little_to_tell(self) -> None:
        hard = simulate(0, FEWEST_REQUESTS - 1, 200, weights=HARDER)
        unseen = [[replace(round_, num_verified=0, num_accepted=0) for round_ in answer] for answer in simulate(1, 5)]
        drift = check_drift(PRIOR, self.REFERENCE, [*hard, *unseen])
        assert (drift.drifted, drift.enough, drift.requests) == (False, False, FEWEST_REQUESTS - 1)
        assert drift.reasons == ("too little to tell: 7 requests with observed drafts, 8 are needed",)

    def test_positions_that_few_requests_reached_are_not_judged(self) -> None:
        shallow = [[seen(1, i % 2, i) for i in range(20)] for _ in range(20)]
        shallow[0].append(seen(3, 3))
        drift = check_drift(PRIOR, self.REFERENCE, shallow)
        assert len(drift.survival.curve) == 1

    def test_same_seed_same_answer(self) -> None:
        answers = simulate(0, 10, 10)
        assert check_drift(PRIOR, self.REFERENCE, answers) == check_drift(PRIOR, self.REFERENCE, answers)
