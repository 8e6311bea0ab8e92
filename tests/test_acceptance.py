"""The acceptance estimator: hazards from censored rounds, one request's oddity, and what a survival curve must be."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_ort.controller.acceptance import (
    GENERIC_PRIORS,
    NUM_FEATURES,
    HazardModel,
    HazardPrior,
    family,
    features_of,
    observed_trials,
)
from dflash_ort.records import Draft, RequestRound

# By position only: no evidence, so that a naive mean can be put beside it.
BY_POSITION = HazardPrior((0.0,) * 5, (1.5, 0.01, 1.0, 0.01, 0.01), offset_deviation=1e-3, useless=1e-3)


def seen(
    drafted: int,
    verified: int,
    accepted: int,
    committed: int | None = None,
    *,
    log_probs: tuple[float, ...] = (),
    request: int = 0,
    match: int = 0,
) -> RequestRound:
    """A round of ``drafted`` drafts; by default it ends with the target's own token."""
    committed = accepted + 1 if committed is None else committed
    kind = "ngram" if match else "dflash"
    return RequestRound(request, drafted, verified, accepted, committed, 9, log_probs, match, kind)


def block(*probabilities: float, request: int = 0) -> Draft:
    logs = tuple(math.log(p) for p in probabilities)
    return Draft(request, 7, tuple(range(len(logs))), logs, kind="dflash")


@pytest.mark.parametrize(
    ("round_", "trials"),
    [
        (seen(5, 5, 2), [1, 1, 0]),
        (seen(5, 5, 5), [1, 1, 1, 1, 1]),
        (seen(5, 3, 3), [1, 1, 1]),  # drafts 4 and 5 were not looked at
        (seen(5, 3, 0), [0]),
        (seen(5, 0, 0), []),
        (seen(0, 0, 0), []),
        (seen(5, 5, 2, 2), [1, 1]),  # the answer ended on the second accepted draft: the third was not judged
        (seen(5, 5, 5, 5), [1, 1, 1, 1, 1]),
        (seen(5, 4, 1, 1), [1]),
        (seen(1, 1, 0, 1), [0]),  # the target's own token ended the answer: the rejection was seen
    ],
)
def test_only_what_was_observed_is_a_trial(round_: RequestRound, trials: list[int]) -> None:
    assert observed_trials(round_) == trials


def test_hazards_are_recovered_where_a_naive_mean_is_biased() -> None:
    """A third of the rounds verify one draft, a third two, a third five; half of the last end behind draft two."""
    truth = np.array([0.45, 0.6, 0.7, 0.75, 0.8])
    rng, model = np.random.default_rng(0), HazardModel(BY_POSITION)
    accepted_at, drafted = np.zeros(5), 0
    for i in range(12_000):
        verified = (1, 2, 5)[i % 3]
        accepted = min(int(np.cumprod(rng.random(5) < truth).sum()), verified)
        ends = verified == 5 and i % 2 == 0 and accepted >= 2  # on an accepted draft: what follows is not judged
        accepted = 2 if ends else accepted
        model.observe(seen(5, verified, accepted, accepted if ends else None, request=i // 20))
        if i % 20 == 19:
            model.forget(i // 20)
        accepted_at[:accepted] += 1
        drafted += 1
    learnt = np.array(model.hazards(-1, block(*[0.5] * 5), 5))
    assert np.abs(learnt - truth).max() < 0.07
    survival = np.cumprod(truth)
    assert np.abs(np.array(model.survival(-1, block(*[0.5] * 5))) - survival).max() < 0.04
    naive = accepted_at / drafted  # counts what was never verified as rejected
    assert np.abs(naive - survival).max() > 0.12


def test_evidence_is_learnt() -> None:
    """The drafter is overconfident in another way than the prior believes; its numbers still say where it is right."""
    rng, model = np.random.default_rng(1), HazardModel(GENERIC_PRIORS["dflash"])

    def truth(logit: float) -> float:
        return 1.0 / (1.0 + math.exp(1.8 - 1.1 * logit))

    for i in range(4000):
        logits = rng.normal(0.0, 2.0, 4)
        agreed = 0
        while agreed < 4 and rng.random() < truth(logits[agreed]):
            agreed += 1
        logs = tuple(-math.log1p(math.exp(-x)) for x in logits)
        model.observe(seen(4, 4, agreed, log_probs=logs, request=i))
        model.forget(i)
    for logit in (-2.0, 0.0, 2.0):
        (hazard,) = model.hazards(-1, block(1 / (1 + math.exp(-logit))), 1)
        assert hazard == pytest.approx(truth(logit), abs=0.06)


def test_an_odd_request_is_learnt_in_a_few_rounds_and_leaves_no_trace() -> None:
    model, draft = HazardModel(GENERIC_PRIORS["dflash"]), block(0.6, 0.6, 0.6)
    usual = model.hazards(1, draft, 3)
    for _ in range(4):
        model.observe(seen(3, 3, 3, log_probs=draft.log_probs, request=1))
    shared = model.hazards(2, draft, 3)
    odd = model.hazards(1, draft, 3)
    assert odd[0] > usual[0] + 0.2
    assert shared[0] < (odd[0] + usual[0]) / 2 + 0.1, "most of it belongs to the request"
    model.forget(1)
    assert model.hazards(1, draft, 3) == model.hazards(2, draft, 3)


def test_what_a_request_showed_grows_old_when_nobody_asks() -> None:
    """What is never verified is never learnt: without this a text that was hard once would stay so."""
    model, draft = HazardModel(GENERIC_PRIORS["ngram"]), Draft(1, 7, (1, 2), match_length=3, kind="ngram")
    for _ in range(10):
        model.observe(seen(2, 2, 0, request=1, match=3))
    low = model.survival(1, draft)[0]
    for _ in range(400):
        model.idle(1)
    assert model.survival(1, draft)[0] > 4 * low
    model.idle(2)  # unknown: nothing to do
    assert 2 not in model._offsets


def test_a_confident_drafter_that_is_always_wrong_is_found_out_at_once() -> None:
    model, draft = HazardModel(GENERIC_PRIORS["dflash"]), block(0.95, 0.95)
    before = model.survival(1, draft)[0]
    assert before > 0.5
    for _ in range(3):
        model.observe(seen(2, 2, 0, log_probs=draft.log_probs, request=1))
    assert model.survival(1, draft)[0] < 0.15
    assert model.hazards(2, draft, 1)[0] > 0.6, "others hear little of it"
    model.observe(seen(2, 2, 1, log_probs=draft.log_probs, request=1))
    assert model.trust(1) > 0.6, "one acceptance shows that it is of use after all"


def test_useless_texts_make_new_ones_suspect_and_useful_ones_trusted() -> None:
    bad, good = (HazardModel(GENERIC_PRIORS["dflash"]) for _ in range(2))
    draft = block(0.9)
    for request in range(30):
        for _ in range(6):
            bad.observe(seen(1, 1, 0, log_probs=draft.log_probs, request=request))
            good.observe(seen(1, 1, 1, log_probs=draft.log_probs, request=request))
        bad.forget(request)
        good.forget(request)
    assert bad.trust(-1) < 0.5
    assert good.trust(-1) > 0.9


def test_a_round_that_showed_nothing_teaches_nothing() -> None:
    model, draft = HazardModel(GENERIC_PRIORS["dflash"]), block(0.5)
    before = model.survival(3, draft)
    model.observe(seen(5, 0, 0, log_probs=draft.log_probs, request=3))
    assert model.survival(3, draft) == before
    assert not model._offsets


LOG_PROBS = st.one_of(st.floats(-60.0, 0.0), st.sampled_from([0.0, -1e-30, -1e9, -math.inf]))


@given(
    log_probs=st.lists(LOG_PROBS, max_size=8),
    extra=st.integers(0, 3),
    match=st.integers(0, 10**6),
    rounds=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8), st.booleans()), max_size=60),
    kind=st.sampled_from(sorted(GENERIC_PRIORS)),
)
def test_survival_never_rises_and_is_a_probability(
    log_probs: list[float], extra: int, match: int, rounds: list[tuple[int, int, bool]], kind: str
) -> None:
    """Whatever the evidence and whatever was seen before."""
    tokens = tuple(range(len(log_probs) + extra))
    model, draft = HazardModel(GENERIC_PRIORS[kind]), Draft(1, 7, tokens, tuple(log_probs), match, kind)
    for verified, agreed, cut in rounds:
        verified = min(verified, len(tokens))
        accepted = min(agreed, verified)
        committed = accepted if cut and accepted else accepted + 1
        model.observe(seen(len(tokens), verified, accepted, committed, log_probs=draft.log_probs, request=1))
    curve = model.survival(1, draft)
    assert len(curve) == len(tokens)
    assert all(0.0 <= s <= 1.0 for s in curve)
    assert all(a >= b for a, b in pairwise(curve))
    assert 0.0 < model.trust(1) < 1.0


def test_features_say_what_they_should() -> None:
    first, second = features_of(block(0.5, 0.9), 2)
    assert len(first) == NUM_FEATURES == len(GENERIC_PRIORS["dflash"].means)
    assert first == pytest.approx((1.0, 0.0, 0.0, 0.0, 0.0), abs=1e-12)
    assert second == pytest.approx((1.0, math.log(9.0), math.log(2.0), 0.0, 0.0))
    lookup = features_of(Draft(1, 7, (1, 2, 3, 4, 5), match_length=4, agreement=-0.5, kind="ngram"), 5)
    assert lookup[0] == (1.0, 0.0, 0.0, 2.0, -0.5)
    assert lookup[4] == (1.0, 0.0, math.log(5.0), 3.0, -0.5), "four drafts right make a match of eight"
    assert family("dflash", draws=True) in GENERIC_PRIORS
    assert family("dflash", draws=False) == "dflash"


def test_beliefs_move_less_the_more_was_seen() -> None:
    steady, fresh = (HazardModel(replace(GENERIC_PRIORS["dflash"], useless=1e-3)) for _ in range(2))
    draft = block(0.5)
    for i in range(2000):
        steady.observe(seen(1, 1, i % 2, log_probs=draft.log_probs, request=i))
        steady.forget(i)
    moved = []
    for model in (steady, fresh):
        before = model.hazards(-1, draft, 1)[0]
        model.observe(seen(1, 1, 1, log_probs=draft.log_probs, request=1))
        model.forget(1)
        moved.append(model.hazards(-1, draft, 1)[0] - before)
    assert 0.0 < moved[0] < moved[1] / 5
