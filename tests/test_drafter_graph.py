"""The drafter's graph computes what z-lab's convention says, read here a second time: in PyTorch, without a cache."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.nn.functional import linear, log_softmax, silu

from dflash_ort.exporter.drafter_reader import read_drafter
from dflash_ort.exporter.export import ExportOptions, export_bundle, read_target
from dflash_ort.exporter.linear import Precision
from dflash_ort.runtime.bundle import open_bundle
from dflash_ort.runtime.cache import KVCache
from dflash_ort.runtime.drafters import DFlashModel
from dflash_ort.runtime.session import Backend
from tests.tiny import TinyShape, byte_tokenizer, edit_config, edit_tensors, write_drafter, write_target

TOKENS = len(byte_tokenizer().get_vocab())
CONTEXT = 41
CAPACITY = CONTEXT + 64
ANCHOR = 77
TOLERANCE = 1e-4

Answer = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Draft ids, their log-probabilities, and the draft logits."""


@dataclass(frozen=True)
class Pair:
    """A target and a drafter on disk, and the drafter's graph."""

    target: Path
    drafter: Path
    model: DFlashModel


def make_pair(
    directory: Path,
    shape: TinyShape,
    *,
    precision: Precision = "fp32",
    taps: tuple[int, ...] = (0, 2),
    block_size: int = 6,
    layers: int = 2,
    draft_vocab: int | None = None,
) -> Pair:
    target = write_target(directory / "target", shape)
    drafter = write_drafter(
        directory / "drafter", shape, taps=taps, block_size=block_size, layers=layers, draft_vocab=draft_vocab
    )
    return export_pair(directory, target, drafter, precision)


def export_pair(directory: Path, target: Path, drafter: Path, precision: Precision = "fp32") -> Pair:
    export_bundle(
        read_target(target),
        read_drafter(drafter),
        directory / "bundle",
        ExportOptions(precision=precision, draft_precision=precision),
        force=True,
    )
    bundle = open_bundle(directory / "bundle", Backend(2), with_drafter=True)
    assert bundle.dflash is not None
    return Pair(target, drafter, bundle.dflash)


def random_hidden(pair: Pair, rows: int = CONTEXT) -> np.ndarray:
    """Tapped states of committed rows, as a target would give them: float32 ``[rows, taps * hidden_size]``."""
    width = load_file(pair.drafter / "model.safetensors")["fc.weight"].shape[1]
    scale = np.random.default_rng(2).uniform(0.5, 2.0, (rows, 1))
    return (np.random.default_rng(1).standard_normal((rows, width)) * scale).astype(np.float32)


def run(pair: Pair, cache: KVCache, hidden: np.ndarray, anchor: int | None = ANCHOR) -> Answer:
    drafts = 0 if anchor is None else pair.model.spec.max_draft
    block = pair.model.run(cache, [hidden], anchor)
    ids, log_probs = block.greedy(drafts)
    logits = [block.logits(i, 0).copy() for i in range(drafts)]
    size = len(pair.model.vocabulary)
    return np.array(ids, np.int64), np.array(log_probs, np.float32), np.array(logits, np.float32).reshape(drafts, size)


def draft(pair: Pair, hidden: np.ndarray, cuts: Iterable[int] = (), anchor: int = ANCHOR) -> Answer:
    """A block after ``hidden`` was injected in pieces; the last piece shares the block's pass."""
    cache = pair.model.new_cache(CAPACITY)
    *early, last = np.split(hidden, sorted(cuts))
    for piece in early:
        run(pair, cache, piece, None)
    return run(pair, cache, last, anchor)


def assert_same_bits(a: Answer, b: Answer) -> None:
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)


def reference_logits(pair: Pair, hidden: np.ndarray, anchor: int = ANCHOR) -> torch.Tensor:
    """Logits of the block's masks over the draft vocabulary, from the files alone.

    The context's rows stand at positions 0, 1, ...; the anchor, whose own state the target has not computed yet, stands
    behind them, at the number of committed tokens less one, and the masks follow.
    """
    config = json.loads((pair.drafter / "config.json").read_text())
    dflash = config["dflash_config"]
    weights = {name: w.float() for name, w in load_file(pair.drafter / "model.safetensors").items() if name != "t2d"}
    target = load_file(pair.target / "model.safetensors")
    embeddings = target["model.embed_tokens.weight"]
    head = target.get("lm_head.weight", embeddings)
    eps, head_dim = config["rms_norm_eps"], config["head_dim"]
    block_size = dflash.get("block_size", config.get("block_size"))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weights[f"{name}.weight"]

    def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """``[rows, heads, head_dim]``; the two halves of a head are the pairs that turn together."""
        frequencies = config["rope_theta"] ** -(torch.arange(0, head_dim, 2).double() / head_dim)
        angles = (positions[:, None].double() * frequencies)[:, None, :]
        cos, sin = angles.cos().float(), angles.sin().float()
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    context = norm(linear(torch.from_numpy(hidden), weights["fc.weight"]), "hidden_norm")
    rows = len(context)
    positions = torch.arange(rows + block_size)
    x = embeddings[torch.tensor([anchor] + [dflash["mask_token_id"]] * (block_size - 1))]
    for layer in range(config["num_hidden_layers"]):
        at = f"layers.{layer}"

        def project(y: torch.Tensor, name: str, at: str = at) -> torch.Tensor:
            return linear(y, weights[f"{at}.self_attn.{name}_proj.weight"]).unflatten(-1, (-1, head_dim))

        block = norm(x, f"{at}.input_layernorm")
        both = torch.cat([context, block])
        query = rotate(norm(project(block, "q"), f"{at}.self_attn.q_norm"), positions[rows:])
        key = rotate(norm(project(both, "k"), f"{at}.self_attn.k_norm"), positions)
        value = project(both, "v")
        groups = config["num_attention_heads"] // config["num_key_value_heads"]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * head_dim**-0.5
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)
        x = x + linear(attended, weights[f"{at}.self_attn.o_proj.weight"])
        y = norm(x, f"{at}.post_attention_layernorm")
        inner = silu(linear(y, weights[f"{at}.mlp.gate_proj.weight"])) * linear(y, weights[f"{at}.mlp.up_proj.weight"])
        x = x + linear(inner, weights[f"{at}.mlp.down_proj.weight"])
    offsets = weights.get("d2t", torch.zeros(TOKENS)).long()
    ids = offsets + torch.arange(len(offsets))
    return linear(norm(x, "norm")[1:], head[ids])


SHAPES = {
    "grouped": (TinyShape(), 2, (0, 2), 6),
    "multi-head-tied": (TinyShape(kv_heads=4, tied=True), 1, (1,), 2),
    "odd-sizes": (TinyShape(hidden=48, intermediate=88, heads=3, kv_heads=1, head_dim=32, vocab=263), 3, (2, 0, 1), 9),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), TinyShape())


@pytest.fixture(scope="module")
def int8_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("int8"), TinyShape(), precision="int8")


class TestAgainstPyTorch:
    @pytest.mark.parametrize("name", SHAPES)
    @pytest.mark.parametrize("rows", [1, CONTEXT])
    def test_logits_ids_and_log_probabilities(self, name: str, rows: int, tmp_path: Path) -> None:
        shape, layers, taps, block_size = SHAPES[name]
        made = make_pair(tmp_path, shape, layers=layers, taps=taps, block_size=block_size)
        hidden = random_hidden(made, rows)
        ids, log_probs, logits = draft(made, hidden)
        expected = reference_logits(made, hidden)
        assert logits.shape == (block_size - 1, TOKENS)
        assert np.abs(logits - expected.numpy()).max() < TOLERANCE
        assert np.array_equal(ids, expected.argmax(-1).numpy())
        assert np.abs(log_probs - log_softmax(expected, -1).max(-1).values.numpy()).max() < TOLERANCE

    def test_the_anchor_and_the_context_matter(self, pair: Pair) -> None:
        hidden = random_hidden(pair)
        logits = draft(pair, hidden)[2]
        assert np.abs(draft(pair, hidden, anchor=ANCHOR + 1)[2] - logits).max() > 0.1
        assert np.abs(draft(pair, hidden[1:])[2] - logits).max() > 0.1

    def test_int8_is_close(self, pair: Pair, int8_pair: Pair) -> None:
        hidden = random_hidden(pair)
        exact, rounded = draft(pair, hidden)[2], draft(int8_pair, hidden)[2]
        assert 0 < np.sqrt(np.mean((rounded - exact) ** 2)) < 0.1 * exact.std()

    def test_a_reduced_vocabulary_is_mapped_to_the_target_s_ids(self, tmp_path: Path) -> None:
        made = make_pair(tmp_path, TinyShape(), draft_vocab=50, block_size=9)
        hidden = random_hidden(made)
        ids, log_probs, logits = draft(made, hidden)
        expected = reference_logits(made, hidden)
        vocabulary = made.model.vocabulary
        offsets = load_file(made.drafter / "model.safetensors")["d2t"].numpy()
        assert np.array_equal(vocabulary, offsets + np.arange(50))
        assert np.abs(logits - expected.numpy()).max() < TOLERANCE
        assert np.array_equal(ids, vocabulary[expected.argmax(-1).numpy()])
        assert np.abs(log_probs - log_softmax(expected, -1).max(-1).values.numpy()).max() < TOLERANCE

    def test_tokens_that_the_target_cannot_sample_are_not_drafted(self, tmp_path: Path) -> None:
        target = write_target(tmp_path / "target")
        drafter = write_drafter(tmp_path / "drafter")
        ids = np.arange(TOKENS - 5, TOKENS + 5)
        edit_tensors(drafter, {"d2t": ids - np.arange(10), "t2d": np.isin(np.arange(272), ids)})
        assert export_pair(tmp_path, target, drafter).model.vocabulary.tolist() == list(range(TOKENS - 5, TOKENS))

    @pytest.mark.parametrize("place", ["top", "inside", "both"])
    def test_block_size_in_either_place(self, place: str, tmp_path: Path) -> None:
        drafter = write_drafter(tmp_path / "drafter")
        inner = json.loads((drafter / "config.json").read_text())["dflash_config"]
        if place == "top":
            edit_config(drafter, block_size=4)
        else:
            edit_config(drafter, block_size=16 if place == "both" else None, dflash_config=inner | {"block_size": 4})
        assert read_drafter(drafter).block_size == 4


class TestInjection:
    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(cuts=st.sets(st.integers(1, CONTEXT), max_size=12))
    @pytest.mark.parametrize("precision", ["fp32", "int8"])
    def test_in_any_pieces_gives_the_same_bits(
        self, precision: str, cuts: set[int], pair: Pair, int8_pair: Pair
    ) -> None:
        made = pair if precision == "fp32" else int8_pair
        hidden = random_hidden(made)
        assert_same_bits(draft(made, hidden, cuts), draft(made, hidden))

    def test_row_by_row_gives_the_same_bits(self, pair: Pair) -> None:
        hidden = random_hidden(pair)
        assert_same_bits(draft(pair, hidden, range(1, CONTEXT + 1)), draft(pair, hidden))

    def test_a_block_taken_back_leaves_no_trace(self, pair: Pair) -> None:
        hidden = random_hidden(pair)
        cache = pair.model.new_cache(CAPACITY)
        run(pair, cache, hidden[:30], anchor=5)
        assert cache.length.value == 30
        run(pair, cache, hidden[30:33], anchor=6)
        run(pair, cache, hidden[33:33], anchor=7)
        assert_same_bits(run(pair, cache, hidden[33:]), draft(pair, hidden))
        assert cache.length.value == CONTEXT

    def test_capacity_does_not_matter(self, pair: Pair) -> None:
        hidden = random_hidden(pair)
        snug = pair.model.new_cache(CONTEXT + pair.model.spec.block_size)
        assert_same_bits(run(pair, snug, hidden), draft(pair, hidden))

    def test_more_rows_than_fit_are_refused(self, pair: Pair) -> None:
        cache = pair.model.new_cache(CONTEXT + pair.model.spec.block_size - 1)
        with pytest.raises(ValueError, match="do not fit"):
            run(pair, cache, random_hidden(pair))
