"""The target's graph says what transformers' LlamaForCausalLM says of the same directory, logits and residuals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from safetensors.numpy import load_file
from transformers import LlamaForCausalLM

from dflash_ort.exporter.builder import GraphBuilder
from dflash_ort.exporter.drafter_reader import read_drafter
from dflash_ort.exporter.export import ExportOptions, export_bundle, read_target
from dflash_ort.exporter.linear import LinearWeights, Precision, quantise_channels, recipe
from dflash_ort.models import graph_names as names
from dflash_ort.models.manifest import TARGET_GRAPH
from dflash_ort.runtime.bundle import open_bundle
from dflash_ort.runtime.session import Backend, open_session
from dflash_ort.runtime.target import TargetModel
from tests.tiny import TinyShape, byte_tokenizer, edit_config, edit_tensors, write_drafter, write_target

TOKENS = len(byte_tokenizer().get_vocab())
ROWS = 70
TOLERANCE = 1e-4

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, tuple[TinyShape, dict[str, Any]]] = {
    "grouped-untied": (TinyShape(), {}),
    "multi-head-tied": (TinyShape(kv_heads=4, tied=True), {}),
    "odd-sizes": (TinyShape(layers=2, hidden=48, intermediate=88, heads=3, kv_heads=1, vocab=263), {}),
    "wide-heads": (TinyShape(layers=1, hidden=40, intermediate=56, heads=4, kv_heads=2, head_dim=32), {}),
    "attention-bias": (TinyShape(), {"attention_bias": True}),
    "mlp-bias": (TinyShape(), {"mlp_bias": True}),
    "rope-base": (TinyShape(), {"rope_theta": 500.0}),
    "rope-linear": (TinyShape(), {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "rope-llama3": (TinyShape(head_dim=32), {"rope_scaling": LLAMA3}),
    "rope-parameters": (TinyShape(), {"rope_theta": None, "rope_parameters": LLAMA3 | {"rope_theta": 5000.0}}),
}


def write_case(directory: Path, shape: TinyShape, config: dict[str, Any]) -> Path:
    """A target with these changes to its config, and the biases that they ask for."""
    write_target(directory, shape)
    rng = np.random.default_rng(7)
    h, f, q, kv = shape.hidden, shape.intermediate, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes: dict[str, int] = {}
    if config.get("attention_bias"):
        sizes |= {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv, "self_attn.o_proj": h}
    if config.get("mlp_bias"):
        sizes |= {"mlp.gate_proj": f, "mlp.up_proj": f, "mlp.down_proj": h}
    biases = {
        f"model.layers.{layer}.{name}.bias": rng.standard_normal(size).astype(np.float32)
        for layer in range(shape.layers)
        for name, size in sizes.items()
    }
    return edit_config(edit_tensors(directory, biases), **config)


def open_target(
    checkpoint: Path,
    work: Path,
    shape: TinyShape | None = None,
    *,
    taps: tuple[int, ...] = (),
    precision: Precision = "fp32",
) -> TargetModel:
    """The target of a bundle made of a checkpoint; taps are asked for by a drafter."""
    drafter = read_drafter(write_drafter(work / "drafter", shape or TinyShape(), taps=taps)) if taps else "none"
    export_bundle(read_target(checkpoint), drafter, work / "bundle", ExportOptions(precision=precision))
    return open_bundle(work / "bundle", Backend(2), with_drafter=False).target


def feed(target: TargetModel, ids: Sequence[int], pieces: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits, argmax and tapped states of every row, fed in passes of these sizes."""
    assert sum(pieces) == len(ids)
    cache = target.new_cache(len(ids) + 1)
    logits, greedy, hidden = [], [], []
    for end, size in zip(np.cumsum(pieces), pieces, strict=True):
        result = target.run(cache, ids[end - size : end], size)
        logits.append(result.logits.copy())
        greedy.append(result.greedy.copy())
        hidden.append(result.hidden.copy())
    return np.concatenate(logits), np.concatenate(greedy), np.concatenate(hidden)


def reference(checkpoint: Path, ids: Sequence[int]) -> tuple[np.ndarray, list[np.ndarray]]:
    """transformers' logits, and the residual stream after each layer (by hook, as its last hidden state is normed)."""
    model = LlamaForCausalLM.from_pretrained(checkpoint, attn_implementation="eager", dtype=torch.float32).eval()
    streams: list[np.ndarray] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _module, _inputs, output: streams.append(output[0].numpy()))
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].numpy()
    return logits, streams


def random_ids(rows: int) -> list[int]:
    return np.random.default_rng(3).integers(0, TOKENS, rows).tolist()


def distance(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    return float(np.abs(a - b).max())


class TestAgainstTransformers:
    @pytest.mark.parametrize("name", CASES)
    def test_logits_and_every_residual_stream(self, name: str, tmp_path: Path) -> None:
        shape, config = CASES[name]
        checkpoint, ids = write_case(tmp_path / "target", shape, config), random_ids(ROWS)
        target = open_target(checkpoint, tmp_path, shape, taps=tuple(range(shape.layers)))
        expected, streams = reference(checkpoint, ids)
        for pieces in ([ROWS], [1] * 5 + [2, 3, 30, 1, 29]):
            logits, _, hidden = feed(target, ids, pieces)
            assert distance(logits, expected[:, :TOKENS]) < TOLERANCE
            assert distance(hidden, np.concatenate(streams, axis=1)) < TOLERANCE

    @pytest.mark.parametrize("rows", [1, 2, 3, 17, 300])
    def test_any_length(self, rows: int, tmp_path: Path) -> None:
        checkpoint, ids = write_target(tmp_path / "target"), random_ids(rows)
        logits, _, _ = feed(open_target(checkpoint, tmp_path), ids, [rows])
        assert distance(logits, reference(checkpoint, ids)[0][:, :TOKENS]) < TOLERANCE

    def test_taps_come_in_the_drafter_s_order(self, tmp_path: Path) -> None:
        checkpoint, ids = write_target(tmp_path / "target"), random_ids(9)
        _, _, hidden = feed(open_target(checkpoint, tmp_path, taps=(2, 0)), ids, [9])
        _, streams = reference(checkpoint, ids)
        assert distance(hidden, np.concatenate([streams[2], streams[0]], axis=1)) < TOLERANCE

    def test_rows_taken_back_leave_no_trace(self, tmp_path: Path) -> None:
        checkpoint, ids = write_target(tmp_path / "target"), random_ids(20)
        target = open_target(checkpoint, tmp_path)
        cache = target.new_cache(40)
        target.run(cache, ids[:12], 0)
        target.run(cache, [5, 6, 7, 8, 9], 0)
        cache.length.trim(12)
        logits = target.run(cache, ids[12:], 8).logits
        assert distance(logits, reference(checkpoint, ids)[0][12:, :TOKENS]) < TOLERANCE


class TestHead:
    def test_only_the_asked_rows_are_answered(self, tmp_path: Path) -> None:
        target, ids = open_target(write_target(tmp_path / "target"), tmp_path), random_ids(11)
        every, greedy, _ = feed(target, ids, [11])
        for asked in (0, 1, 4, 11):
            result = target.run(target.new_cache(12), ids, asked)
            assert np.array_equal(result.logits, every[11 - asked :])
            assert np.array_equal(result.greedy, greedy[11 - asked :])

    def test_the_graph_answers_any_rows_in_any_order(self, tmp_path: Path) -> None:
        target, ids = open_target(write_target(tmp_path / "target"), tmp_path), random_ids(6)
        every, _, _ = feed(target, ids, [6])
        session = open_session(tmp_path / "bundle" / TARGET_GRAPH, Backend(2))
        inputs = {
            names.INPUT_IDS: np.array([ids]),
            names.QUERY_ROWS: np.arange(6),
            names.PACKED_ROWS: np.arange(6),
            names.LOGITS_ROWS: np.array([4, 0, 4]),
            names.LAST_KEY: np.array([5], np.int32),
            names.TOTAL_LENGTH: np.array([6], np.int32),
        }
        for value in session.get_inputs():
            inputs.setdefault(value.name, np.zeros((1, 2, 8, 16), np.float32))
        logits, greedy = session.run([names.LOGITS, names.GREEDY], inputs)
        assert np.array_equal(logits[0], every[[4, 0, 4]])
        assert np.array_equal(greedy[0], every[[4, 0, 4]].argmax(axis=-1))

    def test_greedy_is_the_argmax(self, tmp_path: Path) -> None:
        target = open_target(write_target(tmp_path / "target"), tmp_path)
        logits, greedy, _ = feed(target, random_ids(ROWS), [ROWS])
        assert np.array_equal(greedy, logits.argmax(axis=-1))
        assert len(set(greedy)) > 5

    @pytest.mark.parametrize("precision", ["fp32", "int8"])
    def test_ties_go_to_the_lowest_id(self, precision: Precision, tmp_path: Path) -> None:
        checkpoint = write_target(tmp_path / "target")
        head = load_file(checkpoint / "model.safetensors")["lm_head.weight"]
        # Each token has twins 13, 26, ... ids further on, so every maximum is shared by about twenty tokens.
        edit_tensors(checkpoint, {"lm_head.weight": np.resize(head[:13], head.shape)})
        logits, greedy, _ = feed(open_target(checkpoint, tmp_path, precision=precision), random_ids(ROWS), [ROWS])
        assert np.array_equal(logits[:, :13], logits[:, 13:26])
        assert greedy.max() < 13
        assert np.array_equal(greedy, logits.argmax(axis=-1))

    def test_rows_beyond_the_tokenizer_are_cut(self, tmp_path: Path) -> None:
        checkpoint = write_target(tmp_path / "target")
        expected = reference(checkpoint, ids := random_ids(8))[0]
        head = load_file(checkpoint / "model.safetensors")["lm_head.weight"]
        head[TOKENS:] = 100 * head[:1]
        target = open_target(edit_tensors(checkpoint, {"lm_head.weight": head}), tmp_path)
        logits, _, _ = feed(target, ids, [8])
        assert target.spec.vocab_size == TOKENS < 272
        assert distance(logits, expected[:, :TOKENS]) < TOLERANCE

    def test_a_vocabulary_with_gaps_keeps_its_last_token(self, tmp_path: Path) -> None:
        checkpoint = write_target(tmp_path / "target")
        tokenizer = json.loads(byte_tokenizer().to_str())
        vocabulary = tokenizer["model"]["vocab"]
        vocabulary[max(vocabulary, key=vocabulary.get)] = 270
        (checkpoint / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
        assert open_target(checkpoint, tmp_path).spec.vocab_size == 271


class TestInt8:
    def test_close_to_fp32(self, tmp_path: Path) -> None:
        checkpoint, ids = write_target(tmp_path / "target"), random_ids(ROWS)
        exact, best, _ = feed(open_target(checkpoint, tmp_path / "fp32"), ids, [ROWS])
        rounded, chosen, _ = feed(open_target(checkpoint, tmp_path / "int8", precision="int8"), ids, [ROWS])
        error = np.sqrt(np.mean((rounded - exact) ** 2))
        assert 0 < error < 0.1 * exact.std()
        assert np.mean(chosen == best) > 0.8

    def test_a_linear_layer_is_the_documented_recipe(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(11)
        x = (rng.standard_normal((7, 48)) * np.logspace(-3, 3, 7)[:, None]).astype(np.float32)
        x[3] = 0
        weight, bias = rng.standard_normal((40, 48)).astype(np.float32), rng.standard_normal(40).astype(np.float32)
        weight[5] = 0

        row_scale = np.maximum(np.abs(x).max(axis=1) * np.float32(1 / 127), np.float32(1e-30))
        activations = np.rint(x / row_scale[:, None]).astype(np.int32)
        pairs = np.abs(weight[:, ::2]) + np.abs(weight[:, 1::2])
        channel_scale = np.maximum(pairs.max(axis=1) / np.float32(127), np.float32(1e-30))
        channels = np.rint(weight / channel_scale[:, None]).astype(np.int32)
        integers = activations @ channels.T
        expected = integers.astype(np.float32) * channel_scale * row_scale[:, None]

        found = run_linear(tmp_path, x, weight, None)
        steps = channel_scale.astype(np.float64) * row_scale[:, None]
        assert np.array_equal(np.rint(found / steps), integers)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        np.testing.assert_allclose(run_linear(tmp_path, x, weight, bias), expected + bias, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("signs", [1, -1])
    def test_large_neighbours_do_not_saturate(self, signs: int, tmp_path: Path) -> None:
        """Processors without VNNI add two products in 16 bits: 255 * 127 twice would be cut to half."""
        x, weight = np.ones((3, 64), np.float32), np.full((32, 64), signs, np.float32)
        np.testing.assert_allclose(run_linear(tmp_path, x, weight, None), np.full((3, 32), 64.0 * signs), rtol=0.01)

    @pytest.mark.parametrize("width", [1, 2, 7, 64])
    def test_neighbouring_weights_add_up_to_128_at_most(self, width: int) -> None:
        weight = np.random.default_rng(width).standard_t(2, (50, width)).astype(np.float32)
        whole, scale = quantise_channels(weight)
        sizes = np.pad(np.abs(whole.astype(int)), ((0, 0), (0, width % 2)))
        assert (sizes[:, ::2] + sizes[:, 1::2]).max() <= 128
        assert (np.abs(weight - whole * scale[:, None]).max(axis=1) <= 0.501 * scale).all()


def run_linear(directory: Path, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """One int8 layer under ONNX Runtime, on rows ``[rows, in_features]``."""
    out_features, in_features = weight.shape
    g = GraphBuilder("linear")
    value = g.input("x", ir.DataType.FLOAT, [1, "rows", in_features])
    weights = LinearWeights("w", in_features, out_features, lambda: weight, None if bias is None else lambda: bias)
    y = recipe("int8")["qkv"].apply(g, value, weights, g.num_rows(value))
    g.output(y, "y", ir.DataType.FLOAT, [1, "rows", out_features])
    g.save(directory / "linear.onnx", "linear.onnx.data")
    session = open_session(directory / "linear.onnx", Backend(2))
    return np.asarray(session.run(None, {"x": x[None]})[0][0])
