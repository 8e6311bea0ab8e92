"""The noise is a pure function of (seed, position, token id); its law; the winner, found without making it all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from scipy import stats

from dflash_ort.runtime.noise import PositionNoise
from tests.fakes import LANDSCAPES

SIZES = (7, 300, 2048, 49152, 65536, 65537, 151936)
SEEDS = (0, 1, 2**63, 2**64 - 1)
# Data are fixed by their seeds, so these tests give the same verdict every time; 1e-4 keeps a wrong law from passing.
LEAST_P = 1e-4


def noise_of(seed: int, position: int, vocab: int) -> np.ndarray:
    return PositionNoise(seed, position, vocab).at(np.arange(vocab))


# Noise --------------------------------------------------


@pytest.mark.parametrize("vocab", SIZES)
def test_noise_of_some_ids_is_that_of_the_whole_vocabulary(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    for seed, position in itertools.product(SEEDS, (0, 1, 511, 2**31)):
        whole = noise_of(seed, position, vocab)
        assert whole.dtype == np.float64
        assert np.isfinite(whole).all()
        for size in (1, 2, 3, 5, 17, 64):
            ids = rng.integers(0, vocab, size)
            for given_ids in (ids, ids.astype(np.int32), np.repeat(ids, 2)[::2]):
                assert np.array_equal(PositionNoise(seed, position, vocab).at(given_ids), whole[ids])
        assert np.array_equal(PositionNoise(seed, position, vocab).at(np.arange(vocab)[::-1])[::-1], whole)


def test_noise_does_not_depend_on_the_vocabulary_nor_on_what_was_asked_before() -> None:
    noise = PositionNoise(3, 4, 151936)
    noise.winner(np.zeros(151936, np.float32), 1.0)
    assert np.array_equal(noise.at(np.arange(300)), noise_of(3, 4, 300))
    assert np.array_equal(noise.at(np.arange(49152)), noise_of(3, 4, 49152))


def test_noise_is_gumbel() -> None:
    noise = np.concatenate(
        [noise_of(seed, position, 49152) for seed, position in itertools.product(SEEDS, (0, 7, 4095))]
    )
    assert abs(noise.mean() - np.euler_gamma) < 4 * np.pi / np.sqrt(6 * noise.size)
    assert abs(noise.var() / (np.pi**2 / 6) - 1) < 0.01
    assert stats.kstest(noise, "gumbel_r").pvalue > LEAST_P
    # Each half of the two-level construction alone: the loudest of a group, and the others.
    groups = noise.reshape(-1, 24, 2048)
    full = np.concatenate([noise_of(seed, 3, 65536).reshape(32, 2048) for seed in SEEDS], axis=1)
    assert stats.kstest(full.max(axis=0) - np.log(32), "gumbel_r").pvalue > LEAST_P
    assert stats.kstest(np.sort(full, axis=0)[0], lambda x: 1 - (1 - stats.gumbel_r.cdf(x)) ** 32).pvalue > LEAST_P
    assert stats.kstest(groups[0, 5], "gumbel_r").pvalue > LEAST_P


def test_the_loudest_member_of_a_group_is_any_with_the_same_chance() -> None:
    full = np.concatenate([noise_of(seed, 5, 65536).reshape(32, 2048) for seed in range(8)], axis=1)
    place, height = full.argmax(axis=0), full.max(axis=0)
    assert stats.chisquare(np.bincount(place, minlength=32)).pvalue > LEAST_P
    table = np.histogram2d(place, stats.rankdata(height), bins=(32, 8))[0]
    assert stats.chi2_contingency(table).pvalue > LEAST_P


def _pairs() -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    vocab = 65536
    here = noise_of(11, 100, vocab)
    yield "next id", here[:-1], here[1:]
    yield "same group", here[:-2048], here[2048:]
    yield "next position", here, noise_of(11, 101, vocab)
    yield "next seed", here, noise_of(12, 100, vocab)
    yield "seed and position shifted", noise_of(12, 100, vocab), noise_of(11, 101, vocab)
    yield "far seed", here, noise_of(11 + 2**32, 100, vocab)
    yield "next position, next id", here[1:], noise_of(11, 101, vocab)[:-1]
    down = np.array([noise_of(5, position, 4)[0] for position in range(4000)])
    yield "one id over positions", down[:-1], down[1:]
    along = np.array([noise_of(seed, 5, 4)[0] for seed in range(4000)])
    yield "one id over seeds", along[:-1], along[1:]


@pytest.mark.parametrize(("name", "a", "b"), [pytest.param(*pair, id=pair[0]) for pair in _pairs()])
def test_noise_is_independent(name: str, a: np.ndarray, b: np.ndarray) -> None:
    assert abs(np.corrcoef(a, b)[0, 1]) < 4.5 / np.sqrt(a.size)
    table = np.histogram2d(stats.rankdata(a), stats.rankdata(b), bins=8)[0]
    assert stats.chi2_contingency(table).pvalue > LEAST_P


def test_the_largest_uniform_is_still_positive_noise() -> None:
    """What `_exponential` promises: positive, so that the noise is finite, for whatever bits come."""
    from dflash_ort.runtime.noise import _exponential

    bits = np.array([0, 1, 2**11, 2**63, 2**64 - 2**11, 2**64 - 1], np.uint64)
    assert (_exponential(bits) > 0).all()
    assert np.isfinite(_exponential(bits)).all()


# The winner --------------------------------------------------


@pytest.mark.parametrize("landscape", LANDSCAPES)
@pytest.mark.parametrize("vocab", SIZES)
def test_the_winner_is_the_argmax_over_all_ids(vocab: int, landscape: str) -> None:
    rng = np.random.default_rng(vocab)
    for position, temperature in enumerate((1e-5, 0.01, 0.7, 1.0, 1.0, 2.0, 50.0, 1e6)):
        logits = LANDSCAPES[landscape](rng, vocab).astype(np.float32)
        noise = PositionNoise(17, position, vocab)
        perturbed = logits.astype(np.float64) / temperature + noise_of(17, position, vocab)
        assert noise.winner(logits, temperature) == int(perturbed.argmax())


def test_a_tie_goes_to_the_lowest_id_even_across_groups() -> None:
    """At a temperature where the noise is lost in rounding, scores tie exactly."""
    logits = np.full(70000, -1e6, np.float32)
    for ids in ([69999, 40000, 2049], [5, 2053, 65541], [65536, 65535]):
        row = logits.copy()
        row[ids] = 3e38
        assert PositionNoise(0, 0, 70000).winner(row, 1e-5) == min(ids)
        assert PositionNoise(0, 0, 70000).winner_among(np.array(ids), np.full(len(ids), 3e43)) == min(ids)
