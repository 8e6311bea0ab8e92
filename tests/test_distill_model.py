"""The trained drafter and the exported one are the same function, whatever the extensions; and what it begins from."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_ort.distill.initial import borrow, resume_from, set_tap_scale
from dflash_ort.distill.model import Drafter, DrafterShape, drafter_config, fold, pack_of
from dflash_ort.distill.result import write_weights
from dflash_ort.errors import CheckpointError, DFlashError
from dflash_ort.exporter.checkpoint import PLAIN, DrafterExtensions, TargetCheckpoint
from dflash_ort.exporter.drafter_reader import read_drafter
from dflash_ort.exporter.export import ExportOptions, export_bundle, read_target
from dflash_ort.exporter.linear import Precision
from dflash_ort.models.manifest import read_manifest
from dflash_ort.runtime.bundle import open_bundle
from dflash_ort.runtime.drafters import DFlashModel
from dflash_ort.runtime.session import Backend
from tests.tiny import EXTENSIONS, TinyShape, edit_tensors, write_target

TAPS = (0, 2)
BLOCK = 5
WIDTH = 2 * TinyShape().hidden
TOKENS = 260
COMBINATIONS = [flags for n in range(len(EXTENSIONS) + 1) for flags in itertools.combinations(EXTENSIONS, n)]
CONTEXTS = ((1, 9), (7, 10), (12, 5), (30, 77))
"""Committed rows, and the anchor behind them."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetCheckpoint:
    return read_target(write_target(tmp_path_factory.mktemp("target") / "tiny"))


def states(rows: int, seed: int = 1) -> np.ndarray:
    """Tapped states whose channels differ a hundredfold, as a residual stream's do."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((rows, WIDTH)) * np.geomspace(0.1, 10, WIDTH)).astype(np.float32)


def make_shape(target: TargetCheckpoint, extensions: DrafterExtensions = PLAIN, **changes: Any) -> DrafterShape:
    shape = DrafterShape(drafter_config(target.config, 2), BLOCK, TAPS, extensions, 3, target.config.num_layers)
    return replace(shape, **changes)


def embeddings(target: TargetCheckpoint) -> np.ndarray:
    return target.tensor("model.embed_tokens.weight")


def text(target: TargetCheckpoint, rows: int = 50) -> tuple[np.ndarray, np.ndarray]:
    """Tapped states of a text and its embeddings."""
    return states(rows, seed=2), embeddings(target)[np.random.default_rng(3).integers(0, len(embeddings(target)), rows)]


def make_drafter(target: TargetCheckpoint, shape: DrafterShape, noise: float = 0.1) -> Drafter:
    """A borrowed drafter with every parameter shaken."""
    generator = torch.Generator().manual_seed(0)
    drafter = Drafter(shape, torch.from_numpy(embeddings(target)[shape.mask_token_id].copy()), 64)
    borrow(drafter, target, states(50), [text(target)], generator)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) * noise
    return drafter


def written(drafter: Drafter, directory: Path, vocabulary: np.ndarray | None = None) -> Drafter:
    """Write a drafter, and take back what bfloat16 has left of it."""
    write_weights(directory, drafter.shape, drafter.tensors(), vocabulary, force=True)
    drafter.load(read_drafter(directory).tensor)
    return drafter


def export(target: TargetCheckpoint, directory: Path, precision: Precision = "fp32") -> DFlashModel:
    options = ExportOptions(draft_precision=precision)
    export_bundle(target, read_drafter(directory), directory.parent / "bundle", options, force=True)
    bundle = open_bundle(directory.parent / "bundle", Backend(1), with_drafter=True)
    assert bundle.dflash is not None
    return bundle.dflash


def draft_logits(model: DFlashModel, hidden: np.ndarray, anchor: int, cuts: tuple[int, ...] = ()) -> np.ndarray:
    cache = model.new_cache(64)
    *early, last = np.split(hidden, cuts)
    for piece in early:
        assert model.run(cache, [piece], None).greedy(9) == ([], [])
    block = model.run(cache, [last], anchor)
    return np.array([block.logits(i, token).copy() for i, token in enumerate(before(anchor, model.spec.max_draft))])


def before(anchor: int, drafts: int) -> list[int]:
    """Tokens before a block's drafts, as if some had been drafted."""
    return [anchor, *range(20, 19 + drafts)]


class TestAgainstTheGraph:
    @pytest.mark.parametrize("names", COMBINATIONS, ids=lambda names: "+".join(names) or "plain")
    def test_all_contexts_in_one_pack_and_in_pieces(
        self, names: tuple[str, ...], target: TargetCheckpoint, tmp_path: Path
    ) -> None:
        extensions = DrafterExtensions(**dict.fromkeys(names, True))
        drafter = written(make_drafter(target, make_shape(target, extensions)), tmp_path / "drafter")
        assert read_drafter(tmp_path / "drafter").extensions == extensions
        model, hidden = export(target, tmp_path / "drafter"), states(30)
        anchors = [[count for count, _ in CONTEXTS if count <= 12], [count for count, _ in CONTEXTS if count > 12]]
        table = embeddings(target)
        pack = pack_of(
            [hidden[:15], hidden],
            [np.array(places) for places in anchors],
            [table[[token for _, token in CONTEXTS[:3]]], table[[CONTEXTS[3][1]]]],
        )
        with torch.no_grad():
            previous = torch.from_numpy(table[[before(anchor, drafter.shape.num_drafts) for _, anchor in CONTEXTS]])
            rows = drafter(pack, previous).numpy()
        head = target.tensor("lm_head.weight")[:TOKENS]
        drafts = BLOCK if "next_token" in names else BLOCK - 1
        assert model.spec.max_draft == drafts
        for (count, anchor), row in zip(CONTEXTS, rows, strict=True):
            expected = row @ head.T
            for cuts in ((), (-(-count // 2),) if count > 1 else (), tuple(range(1, count))):
                found = draft_logits(model, hidden[:count], anchor, cuts)
                assert found.shape == (drafts, TOKENS)
                assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()

    @pytest.mark.parametrize("names", [(), EXTENSIONS], ids=["plain", "extended"])
    def test_int8_is_close(self, names: tuple[str, ...], target: TargetCheckpoint, tmp_path: Path) -> None:
        extensions = DrafterExtensions(**dict.fromkeys(names, True))
        written(make_drafter(target, make_shape(target, extensions)), tmp_path / "drafter")
        exact = draft_logits(export(target, tmp_path / "drafter"), states(30), 7, (11,))
        rounded = draft_logits(export(target, tmp_path / "drafter", "int8"), states(30), 7, (11,))
        assert 0 < np.sqrt(np.mean((rounded - exact) ** 2)) < 0.15 * exact.std()

    def test_a_block_without_a_new_row_is_refused_where_it_starts_from_one(
        self, target: TargetCheckpoint, tmp_path: Path
    ) -> None:
        written(make_drafter(target, make_shape(target, DrafterExtensions(context_start=True))), tmp_path / "drafter")
        model = export(target, tmp_path / "drafter")
        cache = model.new_cache(64)
        model.run(cache, [states(3)], None)
        with pytest.raises(DFlashError):
            model.run(cache, [states(0)], 7)

    def test_a_reduced_vocabulary_and_the_manifest(self, target: TargetCheckpoint, tmp_path: Path) -> None:
        vocabulary = np.arange(5, 250, 3)
        extensions = DrafterExtensions(next_token=True)
        written(make_drafter(target, make_shape(target, extensions)), tmp_path / "drafter", vocabulary)
        model = export(target, tmp_path / "drafter")
        assert model.vocabulary.tolist() == vocabulary.tolist()
        spec = read_manifest(tmp_path / "bundle").drafter
        assert (spec.next_token, spec.block_size, spec.max_draft) == (True, BLOCK, BLOCK)


class TestBorrowing:
    def test_weights_are_the_target_s_last(self, target: TargetCheckpoint) -> None:
        drafter = make_drafter(target, make_shape(target), noise=0.0)
        for index, name in itertools.product(range(2), ("self_attn.q_proj", "mlp.down_proj", "input_layernorm")):
            found = drafter.tensors()[f"layers.{index}.{name}.weight"]
            np.testing.assert_array_equal(found, target.tensor(f"model.layers.{index + 1}.{name}.weight"))
        np.testing.assert_array_equal(drafter.tensors()["norm.weight"], target.tensor("model.norm.weight"))

    def test_the_context_is_what_the_first_borrowed_layer_sees(self, target: TargetCheckpoint) -> None:
        """Tap 0 stands below layer 1, the first one that is borrowed: `fc` gives it back as it came."""
        tensors = make_drafter(target, make_shape(target), noise=0.0).tensors()
        hidden = states(9)
        np.testing.assert_allclose(hidden @ tensors["fc.weight"].T, hidden[:, :64], rtol=1e-5)
        first = target.tensor("model.layers.1.input_layernorm.weight")
        np.testing.assert_array_equal(tensors["hidden_norm.weight"], first)

    def test_head_norms_are_the_size_of_what_they_norm(self, target: TargetCheckpoint) -> None:
        drafter = make_drafter(target, make_shape(target), noise=0.0)
        with torch.no_grad():
            context = drafter.hidden_norm(drafter.fc(torch.from_numpy(states(50)) / drafter.tap_scale))
            attention = drafter.layers[1].self_attn
            size = attention.q_proj(context).square().mean().sqrt()
        np.testing.assert_allclose(attention.q_norm.weight.detach().numpy(), float(size), rtol=1e-5)

    def test_the_start_is_what_the_target_would_hand_on(self, target: TargetCheckpoint) -> None:
        """Where that follows from the embedding and the row before, the fit finds it."""
        shape = make_shape(target, DrafterExtensions(context_start=True))
        drafter = Drafter(shape, torch.zeros(64), 64)
        rng = np.random.default_rng(4)
        of_taps, of_token = rng.standard_normal((WIDTH, 64)) / 100, rng.standard_normal((64, 64)) / 10
        texts = []
        for _ in range(40):
            taps, own = text(target)
            own = rng.permutation(own)
            for row in range(2, len(taps)):
                taps[row, :64] = own[row] + taps[row - 1] @ of_taps + own[row] @ of_token
            texts.append((taps, own))
        borrow(drafter, target, states(50), texts, torch.Generator())
        tensors = drafter.tensors()
        taps, own = texts[-1]
        start = own[2:] + taps[1:-1] @ tensors["start.weight"].T + own[2:] @ tensors["start_embed.weight"].T
        wanted = taps[2:, :64]
        assert np.square(start - wanted).mean() < 0.01 * np.square(wanted - own[2:]).mean()

    def test_a_start_that_no_text_tells_of(self, target: TargetCheckpoint) -> None:
        drafter = Drafter(make_shape(target, DrafterExtensions(context_start=True)), torch.zeros(64), 64)
        borrow(drafter, target, states(50), [], torch.Generator())
        assert not drafter.tensors()["start.weight"].any()

    def test_more_layers_than_there_are(self, target: TargetCheckpoint) -> None:
        shape = make_shape(target, config=drafter_config(target.config, 4))
        drafter = Drafter(shape, torch.zeros(64), 64)
        with pytest.raises(CheckpointError, match="depth is 4, the target has 3 layers"):
            borrow(drafter, target, states(50), [], torch.Generator())

    def test_another_scale_changes_nothing_that_is_computed(self, target: TargetCheckpoint, tmp_path: Path) -> None:
        shape = make_shape(target, DrafterExtensions(**dict.fromkeys(EXTENSIONS, True)))
        drafter = written(make_drafter(target, shape), tmp_path / "drafter")
        other = Drafter(shape, torch.zeros(64), 64)
        resume_from(other, read_drafter(tmp_path / "drafter"), 3 * states(40, seed=9))
        assert not np.allclose(other.tap_scale, drafter.tap_scale)
        pack = pack_of([states(20)], [np.array([1, 8, 20])], [embeddings(target)[[5, 6, 7]]])
        previous = torch.from_numpy(embeddings(target)[[before(anchor, BLOCK) for anchor in (5, 6, 7)]])
        with torch.no_grad():
            np.testing.assert_allclose(other(pack, previous), drafter(pack, previous), atol=1e-4)

    def test_a_silent_channel_is_no_division_by_zero(self, target: TargetCheckpoint) -> None:
        drafter = Drafter(make_shape(target), torch.zeros(64), 64)
        set_tap_scale(drafter, np.zeros((10, WIDTH), np.float32))
        assert np.isfinite(fold({**drafter.state_dict()})["fc.weight"]).all()


class TestWriting:
    @pytest.fixture
    def drafter(self, target: TargetCheckpoint) -> Drafter:
        return make_drafter(target, make_shape(target))

    def test_a_plain_drafter_names_no_extensions(self, drafter: Drafter, tmp_path: Path) -> None:
        written(drafter, tmp_path / "drafter", np.arange(10, 50))
        config = json.loads((tmp_path / "drafter" / "config.json").read_text())
        assert config["dflash_config"] == {"mask_token_id": 3, "target_layer_ids": [0, 2]}
        assert (config["draft_vocab_size"], config["block_size"], config["num_target_layers"]) == (40, BLOCK, 3)
        assert sorted(path.name for path in (tmp_path / "drafter").iterdir()) == ["config.json", "model.safetensors"]

    def test_what_is_there_is_replaced_only_with_force_and_only_if_it_is_a_drafter(
        self, drafter: Drafter, tmp_path: Path
    ) -> None:
        written(drafter, tmp_path / "drafter")
        with pytest.raises(CheckpointError, match="pass --force to replace it"):
            write_weights(tmp_path / "drafter", drafter.shape, drafter.tensors(), None)
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "photograph").touch()
        with pytest.raises(CheckpointError, match="is not a drafter"):
            write_weights(tmp_path / "other", drafter.shape, drafter.tensors(), None, force=True)

    def test_tensors_that_are_not_the_shape_s(self, drafter: Drafter, tmp_path: Path) -> None:
        tensors = drafter.tensors() | {"fc.weight": np.zeros((3, 3), np.float32)}
        with pytest.raises(CheckpointError, match=r"tensors fc\.weight are not what"):
            write_weights(tmp_path / "drafter", drafter.shape, tensors, None)

    def test_nothing_is_left_of_a_write_that_failed(
        self, drafter: Drafter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        written(drafter, tmp_path / "drafter")
        before = (tmp_path / "drafter" / "model.safetensors").read_bytes()

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("dflash_ort.whole.os.fsync", full)
        for name in ("drafter", "another"):
            with pytest.raises(CheckpointError, match="No space left on device; free some space"):
                write_weights(tmp_path / name, drafter.shape, drafter.tensors(), None, force=True)
        assert [path.name for path in tmp_path.iterdir()] == ["drafter"]
        assert (tmp_path / "drafter" / "model.safetensors").read_bytes() == before

    def test_an_extension_s_tensor_of_another_shape_is_refused(self, target: TargetCheckpoint, tmp_path: Path) -> None:
        shape = make_shape(target, DrafterExtensions(slot_embeddings=True))
        written(make_drafter(target, shape), tmp_path / "drafter")
        edit_tensors(tmp_path / "drafter", {"slot_embeddings.weight": np.zeros((3, 64), np.float32)})
        with pytest.raises(CheckpointError, match=r"slot_embeddings.weight.*\[3, 64\]"):
            read_drafter(tmp_path / "drafter")
