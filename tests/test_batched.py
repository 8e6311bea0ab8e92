"""The target's batched form says what the ordinary one says, whatever the slot and whoever the neighbours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dflash_ort.distill.target import open_target
from dflash_ort.exporter.linear import Precision
from dflash_ort.params import SamplingParams
from dflash_ort.runtime.batched import BatchedTarget
from dflash_ort.runtime.bundle import open_bundle
from dflash_ort.runtime.engine import Engine
from dflash_ort.runtime.session import Backend

TAPS = (0, 2)
"""What the tiny drafter taps, and so the bundle to compare with."""


@pytest.fixture(scope="module")
def model(checkpoint: Path, work: Path) -> BatchedTarget:
    return open_target(checkpoint, work, precision="fp32", taps=TAPS, slots=3, threads=1).model


def texts(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(4, 260, length).tolist() for length in lengths]


def decode_greedily(model: BatchedTarget, prompts: dict[int, list[int]], steps: int) -> dict[int, list[int]]:
    """Greedy continuations by slot."""
    for slot in range(model.slots):
        model.clear(slot)
    answers = {slot: [model.prefill(slot, ids)[1]] for slot, ids in prompts.items()}
    for _ in range(steps - 1):
        _, greedy = model.decode([answers[slot][-1] if slot in answers else 0 for slot in range(model.slots)])
        for slot, tokens in answers.items():
            tokens.append(int(greedy[slot]))
    return answers


class TestBatchedTarget:
    @pytest.mark.parametrize("precision", ["fp32", "int8"])
    def test_logits_and_residuals_are_the_ordinary_graphs(
        self, precision: Precision, checkpoint: Path, work: Path, tiny_bundle: Callable[..., Path]
    ) -> None:
        ordinary = open_bundle(tiny_bundle(precision), Backend(1), with_drafter=False).target
        model = open_target(checkpoint, work, precision=precision, taps=TAPS, slots=3, threads=1).model
        (ids,) = texts(300)
        cache = ordinary.new_cache(310)
        passed = ordinary.run(cache, ids, 1)
        expected, hidden = passed.logits[0].copy(), passed.hidden.copy()
        after = ordinary.run(cache, [7], 1).logits[0].copy()
        tolerance = 1e-4 if precision == "fp32" else 0.5
        np.testing.assert_allclose(model.hidden(ids), hidden, atol=tolerance)
        logits, greedy = model.prefill(1, ids)
        np.testing.assert_allclose(logits, expected, atol=tolerance)
        assert greedy == int(np.argmax(logits))
        model.prefill(2, ids[:5])
        model.clear(0)
        rows, choices = model.decode([0, 7, 9])
        np.testing.assert_allclose(rows[1], after, atol=tolerance)
        assert choices.tolist()[1] == int(np.argmax(rows[1]))

    def test_greedy_texts_are_the_engines(self, model: BatchedTarget, tiny_bundle: Callable[..., Path]) -> None:
        prompts = dict(enumerate(texts(3, 40, 150)))
        params = SamplingParams(max_new_tokens=24, ignore_eos=True)
        with Engine.load(tiny_bundle("fp32"), threads=1, drafter="none", controller="off", calibrate=False) as engine:
            expected = {slot: list(engine.generate(ids, params).token_ids) for slot, ids in prompts.items()}
        assert decode_greedily(model, prompts, 24) == expected

    def test_a_text_depends_neither_on_its_slot_nor_on_its_neighbours(self, model: BatchedTarget) -> None:
        mine, other, third = texts(20, 60, 5, seed=1)
        seen = []
        for prompts, slot in (({0: mine}, 0), ({2: mine, 0: other}, 2), ({0: third, 1: mine, 2: other}, 1)):
            decode_greedily(model, prompts, 6)
            seen.append(model.decode([11, 11, 11])[0][slot].copy())
        assert np.array_equal(seen[0], seen[1])
        assert np.array_equal(seen[0], seen[2])

    def test_what_a_slot_begins_with_already_is_kept(self, model: BatchedTarget) -> None:
        first, second = texts(30, 12, seed=2)
        model.clear(0)
        clean = model.prefill(0, first + second)[0].copy()
        model.prefill(0, first + second[:3] + [5, 6, 7])
        np.testing.assert_allclose(model.prefill(0, first + second)[0], clean, atol=1e-5)
        np.testing.assert_allclose(model.prefill(0, first + second)[0], clean, atol=1e-5)
        assert model.length(0) == len(first + second)

    def test_the_last_layer_can_be_tapped(self, checkpoint: Path, work: Path) -> None:
        model = open_target(checkpoint, work, precision="fp32", taps=(2,), slots=1, threads=1).model
        assert model.hidden(texts(9)[0]).shape == (9, 64)

    def test_what_does_not_fit_is_refused(self, checkpoint: Path, work: Path) -> None:
        model = open_target(checkpoint, work, precision="fp32", max_context=10, slots=1, threads=1).model
        with pytest.raises(ValueError, match="11 tokens do not fit a slot of 10"):
            model.prefill(0, [5] * 11)
        with pytest.raises(ValueError, match="0 tokens"):
            model.prefill(0, [])
        model.prefill(0, [5] * 10)
        with pytest.raises(ValueError, match="slot 0 is full"):
            model.decode([5])
        with pytest.raises(ValueError, match="taps no layers"):
            model.hidden([5])
