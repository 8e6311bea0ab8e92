"""The parts of training: batches of anchors, the objective, rounds walked on held-out answers, settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dflash_ort.distill.batches import anchor_weights, common_prefix, make_batch
from dflash_ort.distill.dialogues import Dialogue
from dflash_ort.distill.evaluate import evaluate
from dflash_ort.distill.loss import Objective
from dflash_ort.distill.model import Drafter, DrafterShape, drafter_config
from dflash_ort.distill.settings import EXTENDED, TrainSettings, default_taps
from dflash_ort.distill.target import DataTarget, open_target
from dflash_ort.distill.train import draft_vocabulary, rate_scale
from dflash_ort.errors import RequestError
from dflash_ort.exporter.checkpoint import PLAIN
from tests.tiny import TinyShape, write_target

TAPS = (0, 1, 2)
SETTINGS = TrainSettings(taps=TAPS, steps=40)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> DataTarget:
    root = tmp_path_factory.mktemp("target")
    path = write_target(root / "tiny", TinyShape(hidden=32, intermediate=48, heads=2, kv_heads=1))
    return open_target(path, root / "work", precision="fp32", taps=TAPS, slots=1, threads=1)


def make_shape(target: DataTarget, extended: bool = True) -> DrafterShape:
    config = drafter_config(target.checkpoint.config, 1)
    return DrafterShape(config, 4, TAPS, EXTENDED if extended else PLAIN, 3, 3)


def dialogue(ids: list[int], *spans: tuple[int, int]) -> Dialogue:
    return Dialogue(0, 0, "qa", 0.0, tuple(ids), spans)


class TestBatches:
    @pytest.mark.parametrize("extended", [True, False])
    def test_drafts_are_the_tokens_behind_the_anchor(self, extended: bool, target: DataTarget) -> None:
        shape = make_shape(target, extended)
        ids = list(range(10, 20))
        first, second = dialogue(ids, (2, 10)), dialogue(ids[:6], (2, 6))
        places = [np.array([2, 7]), np.array([3])]
        table = np.zeros((272, 32), np.float32)
        drafts = shape.num_drafts
        batch = make_batch([first, second], places, lambda d: np.zeros((len(d.ids), 96), np.float16), table, drafts)
        assert drafts == (4 if extended else 3)
        assert batch.tokens[0].tolist() == ids[3 : 3 + drafts]
        assert batch.known[0].all()
        assert batch.known[1].tolist() == [True, True, False, False][:drafts]
        assert batch.known[2].tolist() == [True, True, False, False][:drafts]
        assert batch.before[0].tolist() == [2, 3, 4, 5][:drafts]
        assert batch.before[2, :2].tolist() == [10 + 3, 10 + 4]

    def test_anchors_are_where_the_target_chose_what_follows(self) -> None:
        weights = anchor_weights(dialogue(list(range(12)), (4, 7), (9, 12)), 2, 0.1)
        assert weights.tolist() == [0, 0, 0.1, 1, 1, 1, 0.1, 0.1, 1, 1, 1, 0]

    def test_what_all_begin_with_is_no_anchor(self) -> None:
        assert common_prefix([dialogue([1, 2, 3]), dialogue([1, 2, 4, 5]), dialogue([1, 2])]) == 2
        assert common_prefix([dialogue([1, 2, 3])]) == 0


class TestObjective:
    def test_the_teacher_is_the_target_s_own_distribution(self, target: DataTarget) -> None:
        """The loss of a drafter whose rows are the target's own is the distribution's entropy, the least there is."""
        shape = make_shape(target)
        vocabulary = np.arange(260)
        objective = Objective(target.checkpoint, shape, vocabulary, decay=3.0)
        start = 20
        some = dialogue(np.random.default_rng(0).integers(4, 260, 30).tolist(), (start, 30))
        hidden = target.model.hidden(some.ids).astype(np.float16)
        table = target.checkpoint.tensor("model.embed_tokens.weight")
        batch = make_batch([some], [np.array([start])], lambda d: hidden, table, shape.num_drafts)
        residual = torch.from_numpy(hidden[start : start + 4, 64:].astype(np.float32))
        norm = torch.from_numpy(target.checkpoint.tensor("model.norm.weight"))
        rows = torch.nn.functional.rms_norm(residual, (32,), norm, target.checkpoint.config.norm_epsilon)[None]
        logits, _ = target.model.prefill(0, some.ids[: start + 1])
        log_p = torch.from_numpy(logits).log_softmax(-1)
        expected = (rows @ objective.head.T).log_softmax(-1)
        np.testing.assert_allclose(expected[0, 0], log_p, atol=0.05)
        entropy = -(expected.exp() * expected).sum(-1)[0]
        weights = torch.exp(-torch.arange(4) / 3.0)
        assert float(objective(rows, batch)) == pytest.approx(
            float((entropy * weights).sum() / weights.sum()), rel=1e-4
        )
        worse = objective(rows + 0.3 * torch.randn(rows.shape, generator=torch.Generator().manual_seed(0)), batch)
        assert float(worse) > float(objective(rows, batch))

    def test_tokens_teach_where_the_last_layer_is_not_tapped(self, target: DataTarget) -> None:
        shape = replace(make_shape(target), taps=(0, 1))
        objective = Objective(target.checkpoint, shape, np.array([5, 6, 7]), decay=1e9)
        table = np.zeros((272, 32), np.float32)
        some = dialogue([1, 5, 6, 99, 7, 5], (1, 6))
        hidden = np.zeros((len(some.ids), 64), np.float16)
        batch = make_batch([some], [np.array([1])], lambda d: hidden, table, shape.num_drafts)
        rows = torch.zeros(1, 4, 32)
        assert float(objective(rows, batch)) == pytest.approx(np.log(3))


class TestEvaluation:
    def test_rounds_are_walked_as_the_engine_would(self, target: DataTarget, monkeypatch: pytest.MonkeyPatch) -> None:
        """Answer tokens 4 to 11; three drafts a block, of which those before a token of 9 agree."""
        shape = replace(make_shape(target), block_size=3)
        some = dialogue([0, 0, 0, 0, 5, 5, 5, 9, 5, 5, 5, 5], (4, 12))
        objective = Objective(target.checkpoint, shape, np.arange(260), decay=3.0)
        monkeypatch.setattr(objective, "draft", lambda rows: np.full(rows.shape[:2], 5))
        drafter = Drafter(shape, torch.zeros(32), 64)
        table = np.zeros((272, 32), np.float32)
        found = evaluate(drafter, objective, [some], lambda d: np.ones((len(d.ids), 96), np.float16), table)
        # From 4: 5, 6 agree, 7 does not: 3 committed. From 7: 8, 9, 10 agree: 4 committed, and that is the end.
        assert (found.rounds, found.acceptance_length) == (2, 3.5)
        assert found.survival == (1.0, 1.0, 0.5)
        assert found.suites == {"qa": 3.5}

    def test_nothing_is_counted_behind_the_end(self, target: DataTarget, monkeypatch: pytest.MonkeyPatch) -> None:
        shape = replace(make_shape(target), block_size=3)
        some = dialogue([0, 0, 5, 5, 5], (2, 5))
        objective = Objective(target.checkpoint, shape, np.arange(260), decay=3.0)
        monkeypatch.setattr(objective, "draft", lambda rows: np.full(rows.shape[:2], 5))
        table = np.zeros((272, 32), np.float32)
        found = evaluate(
            Drafter(shape, torch.zeros(32), 64),
            objective,
            [some],
            lambda d: np.ones((len(d.ids), 96), np.float16),
            table,
        )
        assert (found.rounds, found.acceptance_length, found.survival) == (1, 2.0, (1.0, 1.0, 0.0))


class TestSettings:
    def test_default_taps(self) -> None:
        assert default_taps(30, 3) == (1, 9, 17, 24, 26, 29)
        assert default_taps(3, 1) == (1, 2)
        assert default_taps(1, 1) == (0,)

    def test_the_rate_rises_and_falls(self) -> None:
        settings = replace(SETTINGS, warm_up=10)
        assert rate_scale(settings, 0, 0.0) == pytest.approx(0.1)
        assert rate_scale(settings, 9, 0.0) == pytest.approx(1.0)
        assert rate_scale(settings, 99, 0.5) == pytest.approx(0.525)
        assert rate_scale(settings, 99, 1.0) == pytest.approx(0.05)

    def test_the_draft_vocabulary_is_the_commonest(self) -> None:
        assert draft_vocabulary(np.array([1, 9, 0, 5, 9]), 3).tolist() == [1, 3, 4]

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"steps": None}, "either steps or seconds"),
            ({"seconds": 3.0}, "either steps or seconds"),
            ({"taps": ()}, "taps are"),
            ({"taps": (1, 1)}, "taps are"),
            ({"block_size": 1, "extensions": PLAIN}, "block_size is 1"),
            ({"depth": 0}, "depth is 0"),
            ({"learning_rate": 0.0}, "learning_rate is 0"),
        ],
    )
    def test_what_cannot_be(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(RequestError, match=message):
            replace(SETTINGS, **changes)
