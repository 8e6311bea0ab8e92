"""Fitting the acceptance estimator: what was simulated comes back, by request and not by trial, and not for nothing."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from dflash_ort.controller.acceptance import GENERIC_PRIORS, HazardPrior, features_of, observed_trials
from dflash_ort.controller.fitting import Trials, fit_request_prior, fit_weights, score, trials_of
from dflash_ort.errors import PolicyError
from dflash_ort.records import RequestRound

START = GENERIC_PRIORS["dflash"]
TRUTH = (-0.4, 0.95, -0.3, 0.0, 0.0)
BLOCK = 6


def simulate(
    seed: int,
    requests: int,
    rounds: int = 40,
    *,
    weights: Sequence[float] = TRUTH,
    offset: float = 0.0,
    threshold: float = 0.35,
    useless: float = 0.0,
) -> list[list[RequestRound]]:
    """Requests' rounds with known hazards, verified as a policy would: while the drafts before are likely right.

    So how much is verified follows the evidence, and what is verified deep is what is easy. ``offset``: deviation of
    requests' own offsets; ``threshold``: least product of the drafter's probabilities that is verified; one round in
    ten verifies one draft more, one in a hundred ends on an accepted draft.
    """
    rng = np.random.default_rng(seed)
    answers = []
    for request in range(requests):
        own = rng.normal(0.0, offset) if offset else 0.0
        nothing = rng.random() < useless
        answer = []
        for _ in range(rounds):
            logits = rng.normal(0.8, 1.3) + rng.normal(0.0, 0.9, BLOCK)  # a block is sure or unsure as a whole
            logs = -np.log1p(np.exp(-logits))
            features = np.array(features_of(RequestRound(0, BLOCK, 0, 0, 0, 9, tuple(logs.tolist())), BLOCK))
            hazards = 1.0 / (1.0 + np.exp(-(features @ np.array(weights) + own)))
            right = 0 if nothing else int(np.cumprod(rng.random(BLOCK) < hazards).sum())
            verified = int((np.cumsum(logs) > math.log(threshold)).sum()) + int(rng.random() < 0.1)
            verified = min(max(verified, 1), BLOCK)
            accepted = min(right, verified)
            ends = accepted > 0 and rng.random() < 0.01
            committed = accepted if ends else accepted + 1
            answer.append(
                RequestRound(request, BLOCK, verified, accepted, committed, 9, tuple(logs.tolist()), kind="dflash")
            )
        answers.append(answer)
    return answers


def numbered(answers: Sequence[Sequence[RequestRound]]) -> Iterator[tuple[int, RequestRound]]:
    return ((index, round_) for index, answer in enumerate(answers) for round_ in answer)


class TestTrials:
    def test_rows_are_what_the_online_model_sees(self) -> None:
        rounds = [
            RequestRound(0, 3, 3, 1, 2, 9, (-0.1, -1e9, -2.0), kind="dflash"),
            RequestRound(0, 3, 0, 0, 1, 9, (-0.1, -0.2, -2.0), kind="dflash"),
            RequestRound(0, 5, 4, 4, 4, 9, (), 3, "ngram", -0.5),
            RequestRound(0, 2, 2, 1, 1, 9, (-0.1,), kind="dflash"),  # cut: the second was not judged
        ]
        trials = trials_of(enumerate(rounds, 7))
        assert len(trials) == 2 + 0 + 4 + 1
        assert trials.accepted.tolist() == [1, 0, 1, 1, 1, 1, 1]
        assert trials.groups.tolist() == [7, 7, 9, 9, 9, 9, 10]
        assert trials.positions.tolist() == [1, 2, 1, 2, 3, 4, 1]
        expected = [row for round_ in rounds for row in features_of(round_, len(observed_trials(round_)))]
        assert trials.features.tolist() == [list(row) for row in expected]

    def test_no_rounds_no_rows(self) -> None:
        assert trials_of([]).features.shape == (0, 5)


class TestScores:
    def test_by_hand(self) -> None:
        probabilities = np.array([0.2] * 5 + [0.8] * 5)
        accepted = np.array([0, 0, 0, 1, 1, 1, 1, 1, 1, 0], np.int8)
        scores = score(probabilities, accepted)
        assert scores.reliability == ((pytest.approx(0.2), 0.4, 5), (pytest.approx(0.8), 0.8, 5))
        assert scores.ece == pytest.approx(0.5 * 0.2)
        assert scores.brier == pytest.approx((3 * 0.04 + 2 * 0.64 + 4 * 0.04 + 0.64) / 10)
        assert scores.log_loss == pytest.approx(-(7 * math.log(0.8) + 3 * math.log(0.2)) / 10)
        assert scores.auc == pytest.approx((4 * 3 + 0.5 * (2 * 3 + 4 * 1)) / (6 * 4))
        assert (scores.trials, scores.positives) == (10, 0.6)

    def test_bins_have_equal_mass_and_equal_probabilities_share_one(self) -> None:
        spread = score(np.linspace(0.01, 0.99, 100), np.tile(np.array([0, 1], np.int8), 50))
        assert [count for *_, count in spread.reliability] == [10] * 10
        # All zeros first, then all ones: bins cut through the run would find a calibration error of a half.
        same = score(np.full(40, 0.5), np.repeat(np.array([0, 1], np.int8), 20))
        assert same.reliability == ((0.5, 0.5, 40),)
        assert same.ece == 0.0

    def test_one_outcome_only_has_no_order(self) -> None:
        scores = score(np.array([0.9, 1.0]), np.array([1, 1], np.int8))
        assert scores.auc is None
        assert scores.log_loss == pytest.approx(-math.log(0.9) / 2)

    def test_nothing_to_score_is_refused(self) -> None:
        with pytest.raises(PolicyError, match="no observed trials"):
            score(np.empty(0), np.empty(0, np.int8))


class TestWeights:
    @pytest.mark.parametrize("seed", range(4))
    def test_known_weights_are_recovered_from_adaptive_censored_lengths(self, seed: int) -> None:
        fit = fit_weights(trials_of(numbered(simulate(seed, 150))), start=START)
        deviations = (np.array(fit.weights) - TRUTH)[:3] / np.array(fit.errors)[:3]
        assert np.abs(deviations).max() < 3.0
        assert np.sqrt((deviations**2).mean()) < 1.9
        assert np.array(fit.errors)[:3].max() < 0.1
        assert fit.weights[3:] == (0.0, 0.0), "there is no evidence on these"
        assert fit.strength is not None
        assert fit.scores.log_loss < fit.start_scores.log_loss - 0.005
        assert fit.scores.ece < 0.03
        assert fit.scores.trials == fit.start_scores.trials

    def test_stated_errors_are_those_that_are_made_though_rounds_of_a_request_are_alike(self) -> None:
        """Over many logs with strong request offsets; errors that took trials for independent were half as large."""
        fits = [fit_weights(trials_of(numbered(simulate(s, 60, 25, offset=1.0))), start=START) for s in range(24)]
        fits = [fit for fit in fits if fit.strength is not None]
        assert len(fits) >= 20
        intercepts = np.array([fit.weights[0] for fit in fits])
        stated = np.array([fit.errors[0] for fit in fits]).mean()
        assert 0.6 < stated / intercepts.std(ddof=1) < 1.6

    def test_with_very_few_trials_the_fit_stays_at_the_start(self) -> None:
        """Whether the start is right or not: ten rounds do not show it."""
        for weights, most in ((START.means, 2), (TRUTH, 6)):
            moved = []
            for seed in range(20):
                fit = fit_weights(trials_of(numbered(simulate(seed, 5, 2, weights=weights))), start=START)
                moved.append(fit.weights != START.means)
                assert (np.abs(np.array(fit.weights) - START.means) < 2.5 * np.array(START.deviations)).all()
                if not moved[-1]:
                    assert (fit.strength, fit.errors) == (None, START.deviations)
                    assert fit.scores == fit.start_scores
            assert sum(moved) <= most

    def test_a_start_that_is_right_is_kept(self) -> None:
        fit = fit_weights(trials_of(numbered(simulate(0, 100, weights=START.means))), start=START)
        assert np.abs(np.array(fit.weights) - START.means).max() < 0.1

    def test_all_accepted_is_no_reason_to_run_off(self) -> None:
        """The likelihood has no maximum there; the start holds the weights."""
        sure = (8.0, 0.0, 0.0, 0.0, 0.0)
        fit = fit_weights(trials_of(numbered(simulate(0, 40, 5, weights=sure))), start=START)
        assert np.isfinite(fit.weights).all()
        assert fit.scores.log_loss < fit.start_scores.log_loss

    def test_a_request_is_never_on_both_sides_of_a_fold(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from sklearn.model_selection import GroupKFold

        split, seen = GroupKFold.split, []

        def spy(self: GroupKFold, X: object, y: object, groups: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
            for fitted, left_out in split(self, X, y, groups):
                seen.append((set(groups[fitted].tolist()), set(groups[left_out].tolist())))
                yield fitted, left_out

        monkeypatch.setattr(GroupKFold, "split", spy)
        fit_weights(trials_of(numbered(simulate(0, 12, 10))), start=START, folds=4)
        assert len(seen) == 4
        assert all(not fitted & left_out for fitted, left_out in seen)
        assert sorted(group for _, left_out in seen for group in left_out) == list(range(12))

    def test_folds_by_trial_would_take_a_request_for_the_population(self) -> None:
        """Few requests, each of its own kind, many rounds: only folds by request see that little is known of others."""
        rng = np.random.default_rng(3)
        request = np.repeat(np.arange(6), 400)
        accepted = (rng.random(2400) < np.array([0.05, 0.1, 0.15, 0.6, 0.1, 0.1])[request]).astype(np.int8)
        features = np.zeros((2400, 5))
        features[:, 0] = 1.0
        by_request = Trials(features, accepted, request, np.ones(2400, np.int64))
        by_trial = replace(by_request, groups=np.arange(2400))
        honest, leaking = (fit_weights(trials, start=START) for trials in (by_request, by_trial))
        assert leaking.strength is not None
        assert honest.strength is None or honest.strength > leaking.strength
        assert honest.scores.log_loss > leaking.scores.log_loss
        assert leaking.errors[0] < 0.1

    def test_one_request_cannot_be_fitted(self) -> None:
        with pytest.raises(PolicyError, match="trials of 1 requests cannot be fitted"):
            fit_weights(trials_of(numbered(simulate(0, 1))), start=START)

    def test_same_seed_same_fit(self) -> None:
        trials = trials_of(numbered(simulate(0, 20, 10)))
        assert fit_weights(trials, start=START, seed=3) == fit_weights(trials, start=START, seed=3)

    @pytest.mark.parametrize("module", ["sklearn.model_selection", "sklearn.metrics"])
    def test_without_scikit_learn_there_is_one_clear_line(self, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(PolicyError, match=r"^tuning needs scikit-learn; install 'dflash-ort\[tune\]'$"):
            fit_weights(trials_of(numbered(simulate(0, 4, 4))), start=START)


class TestRequestPrior:
    """The prior's means are the truth here, so that only how requests differ is left to be found."""

    PRIOR = HazardPrior(TRUTH, (0.2, 0.1, 0.1, 0.01, 0.01))

    def test_requests_that_are_alike_get_a_small_offset_deviation_and_odd_ones_a_large_one(self) -> None:
        alike = fit_request_prior(simulate(1, 50), self.PRIOR, kind="dflash", max_rounds=1500)
        differing = fit_request_prior(simulate(1, 50, offset=1.5), self.PRIOR, kind="dflash", max_rounds=1500)
        assert alike.offset_deviation <= 0.2
        assert differing.offset_deviation >= 0.9
        assert alike.useless <= 0.03
        assert alike.means == differing.means == TRUTH

    def test_texts_on_which_nothing_is_accepted_are_found(self) -> None:
        prior = replace(self.PRIOR, useless=0.03, offset_deviation=0.2)
        found = fit_request_prior(simulate(2, 100, 12, useless=0.4), prior, max_rounds=1200)
        assert found.useless >= 0.2

    def test_too_little_changes_nothing(self) -> None:
        assert fit_request_prior([], self.PRIOR) is self.PRIOR
        assert fit_request_prior(simulate(0, 1), self.PRIOR) is self.PRIOR

    def test_rounds_of_other_drafters_pass_time_and_are_not_scored(self) -> None:
        answers = simulate(4, 12, 8)
        lookup = RequestRound(0, 4, 4, 4, 5, 9, (), 5, "ngram", 1.0)
        mixed = [[other for round_ in answer for other in (round_, lookup)] for answer in answers]
        alone = [[round_ for round_ in answer if round_.kind == "dflash"] for answer in mixed]
        assert alone == answers
        slow = replace(self.PRIOR, offset_memory=1e9)  # time is nothing: then they make no difference
        first, second = (fit_request_prior(one, slow, kind="dflash") for one in (mixed, alone))
        assert first.offset_deviation == second.offset_deviation

    def test_whole_requests_are_left_out_and_the_same_ones_every_time(self) -> None:
        answers = simulate(5, 40, 10)
        once, twice = (fit_request_prior(answers, self.PRIOR, max_rounds=100, seed=7) for _ in range(2))
        assert once == twice
