"""Sampling: truncation against sorting, choices against brute force, frequencies against theory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dflash_ort.params import SamplingParams
from dflash_ort.runtime.noise import PositionNoise
from dflash_ort.runtime.sampler import History, Sampler
from dflash_ort.runtime.truncation import truncate
from tests.fakes import LANDSCAPES

LEAST_P = 1e-4


def noise_of(seed: int, position: int, vocab: int) -> np.ndarray:
    return PositionNoise(seed, position, vocab).at(np.arange(vocab))


# Truncation --------------------------------------------------


def sorted_ids(scaled: np.ndarray) -> list[int]:
    return sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))


def naive_truncation(scaled: np.ndarray, min_p: float, top_k: int, top_p: float) -> list[int]:
    """By sorting everything, one rule after the other."""
    kept = [i for i in sorted_ids(scaled) if min_p == 0 or scaled[i] >= np.float32(np.log(min_p))]
    if top_k:
        kept = kept[:top_k]
    if top_p < 1:
        mass = np.exp(scaled[kept]).astype(np.float64)
        goal, reached, count = top_p * float(np.exp(scaled[np.sort(kept)]).sum()), 0.0, 0
        while count < len(kept) and (count == 0 or reached < goal):
            reached += mass[count]
            count += 1
        kept = kept[:count]
    return sorted(kept)


def kept_ids(scaled: np.ndarray, min_p: float, top_k: int, top_p: float) -> list[int]:
    ids = truncate(scaled, min_p=min_p, top_k=top_k, top_p=top_p)
    return list(range(len(scaled))) if ids is None else ids.tolist()


@st.composite
def rows(draw: st.DrawFn) -> np.ndarray:
    """A row of logits less their maximum."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    size = draw(st.one_of(st.integers(1, 40), st.integers(1000, 5000)))
    kind = draw(st.sampled_from([k for k in LANDSCAPES if k not in ("none left", "huge")]))
    row = LANDSCAPES[kind](rng, size).astype(np.float32)
    row *= np.float32(draw(st.sampled_from([0.01, 0.3, 1.0, 4.0])))
    best: np.float32 = row.max()
    if not np.isfinite(best):
        row[0] = best = np.float32(0)
    return row - best


PROBABILITIES = st.one_of(st.sampled_from([1e-9, 0.5, 0.9, 0.95, 1 - 1e-7, 1 - 1e-12, 1.0]), st.floats(1e-6, 1.0))


@given(
    scaled=rows(),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1)),
    top_k=st.one_of(st.just(0), st.integers(1, 6000)),
    top_p=PROBABILITIES,
)
@settings(max_examples=400, deadline=None)
def test_truncation_equals_sorting_everything(scaled: np.ndarray, min_p: float, top_k: int, top_p: float) -> None:
    assert kept_ids(scaled, min_p, top_k, top_p) == naive_truncation(scaled, min_p, top_k, top_p)


@pytest.mark.parametrize("vocab", [300, 49152])
@pytest.mark.parametrize("width", [0.1, 1.0, 3.0, 30.0])
def test_partial_top_p_is_full_top_p(vocab: int, width: float) -> None:
    """From a flat row, where everything must be sorted, to a peaked one, where the first look is enough."""
    rng = np.random.default_rng(vocab)
    for top_p in (1e-6, 0.1, 0.5, 0.9, 0.99, 0.999999, 1 - 1e-12):
        scaled = (rng.standard_normal(vocab) * width).astype(np.float32)
        scaled -= scaled.max()
        order = np.argsort(-scaled, kind="stable")
        mass = np.cumsum(np.exp(scaled[order]), dtype=np.float64)
        count = int((mass < top_p * float(np.exp(scaled).sum())).sum()) + 1
        assert kept_ids(scaled, 0.0, 0, top_p) == sorted(order[:count].tolist())


def test_top_k_keeps_the_lowest_ids_of_a_tie() -> None:
    scaled = np.zeros(5000, np.float32)
    assert kept_ids(scaled, 0.0, 7, 1.0) == list(range(7))
    scaled[::2] = -1
    assert kept_ids(scaled, 0.0, 2502, 1.0) == sorted([*range(1, 5000, 2), 0, 2])
    assert kept_ids(scaled, 0.0, 5000, 1.0) == kept_ids(scaled, 0.0, 6000, 1.0) == list(range(5000))


def test_min_p_is_relative_to_the_likeliest() -> None:
    scaled = np.log(np.array([0.5, 0.2, 0.1, 0.04, 0.16]) / 0.5).astype(np.float32)
    assert kept_ids(scaled, 0.3, 0, 1.0) == [0, 1, 4]
    assert kept_ids(scaled, 1.0, 0, 1.0) == [0]


def test_one_rule_after_the_other() -> None:
    """min-p, then top-k of what is left, then top-p of the mass that is left."""
    p = np.array([0.4, 0.3, 0.2, 0.06, 0.04])
    scaled = np.log(p / p.max()).astype(np.float32)
    assert kept_ids(scaled, 0.0, 0, 0.75) == [0, 1, 2]
    assert kept_ids(scaled, 0.0, 3, 0.75) == [0, 1], "top-p counts the mass of the three that top-k kept"
    assert kept_ids(scaled, 0.0, 2, 0.5) == [0]
    assert kept_ids(scaled, 0.45, 0, 0.75) == [0, 1], "top-p counts the mass of the three that min-p kept"


# Whole choices --------------------------------------------------


def naive_logits(
    logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int], stops: set[int]
) -> np.ndarray:
    """Penalties as vLLM defines them, bias, min-tokens; token by token."""
    row = logits.astype(np.float64)
    for token in range(len(row)):
        count = output.count(token)
        if count or token in prompt:
            row[token] = (
                row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
            )
        row[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        row[token] += params.logit_bias.get(token, 0.0)
        if token in stops and len(output) < params.min_tokens:
            row[token] = -np.inf
    return row


def naive_choice(row: np.ndarray, params: SamplingParams, noise: np.ndarray) -> int:
    if params.temperature == 0:
        return int(row.argmax())
    scaled = (row - row.max()) / params.temperature
    kept = naive_truncation(scaled.astype(np.float32), params.min_p, params.top_k, params.top_p)
    return int(kept[int((scaled[kept] + noise[kept]).argmax())])


ANY_PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 10, 100]),
    top_p=st.sampled_from([1.0, 0.9, 0.4]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.4]),
    presence_penalty=st.sampled_from([0.0, 0.8, -1.1]),
    frequency_penalty=st.sampled_from([0.0, 0.45, -0.35]),
    logit_bias=st.sampled_from([{}, {1: 3.0, 4: -100.0}]),
    min_tokens=st.sampled_from([0, 4]),
)


@given(params=ANY_PARAMS, seed=st.integers(0, 2**64 - 1), data=st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_choices_are_those_of_brute_force(params: SamplingParams, seed: int, data: int) -> None:
    """A history grown from the sampler's own choices, tokens taken back on the way, against one at length."""
    rng = np.random.default_rng(data)
    vocab, prompt, stops = 40, rng.integers(0, 40, 5).tolist(), {2, 9}
    sampler = Sampler(params, seed, prompt, vocab_size=vocab, stop_ids=stops)
    output: list[int] = []
    for _ in range(8):
        logits = (rng.standard_normal(vocab) * 2).astype(np.float32)
        untouched = logits.copy()
        row = naive_logits(logits, params, prompt, output, stops)
        expected = naive_choice(row, params, noise_of(seed, len(prompt) + len(output), vocab))
        assert sampler.choose(logits) == expected
        assert np.array_equal(logits, untouched)
        if sampler.takes_argmax:
            assert expected == logits.argmax()
        # A guess that is taken back leaves no trace.
        for guess in rng.integers(0, vocab, 3).tolist():
            sampler.commit(guess)
            sampler.choose(logits)
        sampler.take_back(len(output))
        sampler.commit(expected)
        output.append(expected)
        sampler.forget_noise()


def test_the_graphs_argmax_is_used_only_where_it_is_the_choice() -> None:
    def takes(stops: set[int] = frozenset({2}), **options: float) -> bool:  # type: ignore[assignment]
        return Sampler(SamplingParams(**options), 0, [1], vocab_size=9, stop_ids=stops).takes_argmax  # type: ignore[arg-type]

    assert takes()
    assert takes(temperature=1e-6)
    assert takes(min_tokens=3, stops=set())
    assert takes(top_k=3, top_p=0.5, min_p=0.2)
    for options in ({"temperature": 0.5}, {"min_tokens": 3}, {"presence_penalty": 0.1}, {"logit_bias": {3: 1.0}}):
        assert not takes(**options)  # type: ignore[arg-type]
    sampler = Sampler(SamplingParams(min_tokens=2), 0, [1], vocab_size=9, stop_ids={2})
    for expected in (False, False, True):
        assert sampler.takes_argmax is expected
        sampler.commit(3)


def test_a_stop_cannot_be_chosen_before_min_tokens() -> None:
    logits = np.zeros(9, np.float32)
    logits[[2, 5]] = 50.0
    for temperature in (0.0, 1.0):
        sampler = Sampler(SamplingParams(min_tokens=3, temperature=temperature), 0, [1], vocab_size=9, stop_ids={2, 5})
        for _ in range(3):
            token = sampler.choose(logits)
            assert token not in (2, 5)
            sampler.commit(token)
        assert sampler.choose(logits) in (2, 5)


def test_history_counts_what_is_in_it() -> None:
    history = History([3, 3, 4], 10)
    for token in (5, 3, 5, 5):
        history.push(token)
    history.truncate(3)
    assert len(history) == 3
    assert history.seen().tolist() == [3, 4, 5]
    ids, counts = history.counts()
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {3: 1, 5: 2}
    history.truncate(0)
    assert history.seen().tolist() == [3, 4]


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 1e5, 1e6])
@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}])
def test_extreme_temperatures_choose_an_allowed_token(temperature: float, truncation: dict[str, float]) -> None:
    params = SamplingParams(temperature=temperature, min_tokens=9, logit_bias={1: 1e6, 3: -1e6}, **truncation)  # type: ignore[arg-type]
    sampler = Sampler(params, 0, [1], vocab_size=9, stop_ids={2, 4})
    for _ in range(9):
        token = sampler.choose(np.arange(9, dtype=np.float32))
        assert token not in (2, 4)
        assert token == 1 or temperature >= 1e5
        sampler.commit(token)


# Laws --------------------------------------------------

LOGITS = np.log(np.array([0.30, 0.22, 0.15, 0.11, 0.08, 0.06, 0.04, 0.02, 0.012, 0.008])).astype(np.float32)
LAWS = {
    "plain": SamplingParams(temperature=1.0),
    "hot": SamplingParams(temperature=2.0),
    "cold": SamplingParams(temperature=0.5),
    "top-k": SamplingParams(temperature=1.0, top_k=4),
    "top-p": SamplingParams(temperature=1.3, top_p=0.8),
    "min-p": SamplingParams(temperature=0.8, min_p=0.1),
    "combined": SamplingParams(temperature=1.5, min_p=0.05, top_k=7, top_p=0.9, logit_bias={6: 1.5}),
}


@pytest.mark.parametrize("across", ["seeds", "positions"])
@pytest.mark.parametrize("name", LAWS)
def test_tokens_come_as_often_as_they_should(name: str, across: str) -> None:
    params, vocab, samples = LAWS[name], len(LOGITS), 4000
    row = naive_logits(LOGITS, params, [], [], set()) / params.temperature
    kept = naive_truncation((row - row.max()).astype(np.float32), params.min_p, params.top_k, params.top_p)
    expected = np.exp(row[kept]) / np.exp(row[kept]).sum()
    tokens = []
    sampler = Sampler(params, 99, [0], vocab_size=vocab, stop_ids=())
    for i in range(samples):
        if across == "seeds":
            sampler = Sampler(params, i, [0], vocab_size=vocab, stop_ids=())
        tokens.append(sampler.choose(LOGITS))
        sampler.commit(tokens[-1])
        sampler.forget_noise()
    counts = np.bincount(tokens, minlength=vocab)
    assert counts.sum() == counts[kept].sum(), "a token that was cut away was chosen"
    assert stats.chisquare(counts[kept], samples * expected).pvalue > LEAST_P


@pytest.mark.parametrize("sharpness", [0.3, 1.0, 3.0])
def test_drafts_with_shared_noise_agree_as_theory_says(sharpness: float) -> None:
    """Gumbel coupling (Daliri et al. 2024): P[same] = sum_i 1 / sum_j max(p_j / p_i, q_j / q_i), within bounds."""
    rng = np.random.default_rng(3)
    logits = (rng.standard_normal((2, 9)) * sharpness).astype(np.float32)
    p, q = np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True)
    theory = sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in range(9))
    distance = np.abs(p - q).sum() / 2
    assert (1 - distance) / (1 + distance) <= theory <= 1 - distance
    samples = 6000
    params = SamplingParams(temperature=1.0)
    sampler = Sampler(params, 5, [0], vocab_size=9, stop_ids=())
    same = 0
    for _ in range(samples):
        (drafted,), _ = sampler.choose_drafts(lambda _, __: logits[1], 1, np.arange(9), 0)
        chosen = sampler.choose(logits[0])
        same += drafted == chosen
        sampler.commit(chosen)
        sampler.forget_noise()
    assert abs(same / samples - theory) < 4 * np.sqrt(theory * (1 - theory) / samples)


def recording(logits: np.ndarray) -> tuple[list[tuple[int, int]], Callable[[int, int], np.ndarray]]:
    """A drafter's logits by draft and token before it, and the list of what was asked of it."""
    asked: list[tuple[int, int]] = []

    def logits_of(draft: int, previous: int) -> np.ndarray:
        asked.append((draft, previous))
        return logits[draft]

    return asked, logits_of


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_draft_is_what_the_target_would_choose_from_the_same_logits(temperature: float) -> None:
    """Same noise, same penalties, drafts counted one after the other; the history is afterwards as it was."""
    params = SamplingParams(temperature=temperature, frequency_penalty=1.5, repetition_penalty=1.2, top_p=0.95)
    rng = np.random.default_rng(0)
    vocabulary = np.array([1, 4, 5, 8, 11])
    sampler = Sampler(params, 7, [4, 4], vocab_size=12, stop_ids=())
    for _ in range(40):
        logits = (rng.standard_normal((6, 5)) * 2).astype(np.float32)
        before = len(sampler.history)
        asked, logits_of = recording(logits)
        tokens, log_probs = sampler.choose_drafts(logits_of, len(logits), vocabulary, 4)
        assert asked == list(enumerate([4, *tokens[:-1]]))
        assert len(sampler.history) == before
        for row, token, log_prob in zip(logits, tokens, log_probs, strict=True):
            full = np.full(12, -np.inf, np.float32)
            full[vocabulary] = row
            assert sampler.choose(full) == token
            scaled = row.astype(np.float64) / (temperature or 1.0)
            assert log_prob == pytest.approx(
                scaled[vocabulary.tolist().index(token)] - np.log(np.exp(scaled).sum()), abs=1e-5
            )
            sampler.commit(token)
        sampler.take_back(before + 1)
        sampler.forget_noise()
