"""A GGUF is read as the Hugging Face directory that it was made from, and a damaged one is refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dflash_ort.errors import CheckpointError
from dflash_ort.exporter.export import ExportOptions, export_bundle, read_target
from dflash_ort.exporter.gguf_reader import unpermute
from dflash_ort.exporter.hf_reader import llama_tensor_shapes
from dflash_ort.runtime.bundle import open_bundle
from dflash_ort.runtime.session import Backend
from tests.tiny import CHAT_TEMPLATE, SPECIALS, TinyShape, write_target

Fields = dict[str, Any]
Tensors = dict[str, np.ndarray]
Edit = Callable[[Fields, Tensors], object]

Q8_0 = gguf.GGMLQuantizationType.Q8_0
SHAPE = TinyShape()
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*SPECIALS, *LETTERS, "he"]
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's row order for q and k: the two halves of each head become the even and the odd rows."""
    out = np.empty_like(weight)
    size = len(weight) // heads
    for head in range(heads):
        rows = weight[head * size : (head + 1) * size]
        out[head * size : (head + 1) * size : 2] = rows[: size // 2]
        out[head * size + 1 : (head + 1) * size : 2] = rows[size // 2 :]
    return out


def write_source(directory: Path, shape: TinyShape = SHAPE) -> Path:
    """A Hugging Face target whose tokenizer has a merge, as a GGUF's must."""
    write_target(directory, shape)
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(TOKENS)}, merges=[("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def contents(source: Path, shape: TinyShape = SHAPE) -> tuple[Fields, Tensors]:
    """What llama.cpp's converter writes of a Llama directory: metadata and tensors."""
    pads = shape.vocab - len(TOKENS)
    kinds = [gguf.TokenType.CONTROL] * len(SPECIALS) + [gguf.TokenType.NORMAL] * (len(TOKENS) - len(SPECIALS))
    fields: Fields = {
        "llama.block_count": shape.layers,
        "llama.context_length": shape.context,
        "llama.embedding_length": shape.hidden,
        "llama.feed_forward_length": shape.intermediate,
        "llama.attention.head_count": shape.heads,
        "llama.attention.head_count_kv": shape.kv_heads,
        "llama.attention.key_length": shape.head_dim,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": shape.head_dim,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*TOKENS, *(f"[PAD{i}]" for i in range(pads))],
        "tokenizer.ggml.token_type": [int(kind) for kind in [*kinds, *[gguf.TokenType.UNUSED] * pads]],
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    tensors: Tensors = {}
    for name, array in load_file(source / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            _, _, layer, part = stem.split(".", 3)
            heads = {"self_attn.q_proj": shape.heads, "self_attn.k_proj": shape.kv_heads}.get(part)
            tensors[f"blk.{layer}.{NAMES[part]}.weight"] = permute(array, heads) if heads else array
        else:
            tensors[f"{NAMES[stem]}.weight"] = array
    return fields, tensors


def write_gguf(path: Path, fields: Fields, tensors: Tensors, architecture: str = "llama") -> Path:
    """Write a file; bytes among the tensors are Q8_0 blocks."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in fields.items():
        match value:
            case str():
                writer.add_string(name, value)
            case float():
                writer.add_float32(name, value)
            case int():
                writer.add_uint32(name, value)
            case list():
                writer.add_array(name, value)
    for name, array in tensors.items():
        writer.add_tensor(name, array, raw_dtype=Q8_0 if array.dtype == np.uint8 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source") / "target")


@pytest.fixture(scope="module")
def whole(source: Path) -> Path:
    return write_gguf(source.parent / "whole.gguf", *contents(source))


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 2), (4, 16), (3, 64)])
def test_unpermute_is_the_inverse_of_permute(heads: int, head_dim: int) -> None:
    weight = np.arange(heads * head_dim * 5, dtype=np.float32).reshape(-1, 5)
    assert np.array_equal(unpermute(permute(weight, heads), heads), weight)
    assert head_dim == 2 or not np.array_equal(permute(weight, heads), weight)


class TestRoundTrip:
    @pytest.mark.parametrize("shape", [SHAPE, TinyShape(kv_heads=4, tied=True, layers=1, head_dim=32)])
    def test_weights_and_config(self, shape: TinyShape, tmp_path: Path) -> None:
        directory = write_source(tmp_path / "target", shape)
        expected, found = (
            read_target(directory),
            read_target(write_gguf(tmp_path / "a.gguf", *contents(directory, shape))),
        )
        for name in (
            "num_layers",
            "hidden_size",
            "intermediate_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "vocab_size",
        ):
            assert getattr(found.config, name) == getattr(expected.config, name)
        assert found.config.norm_epsilon == pytest.approx(expected.config.norm_epsilon)
        assert found.config.rope == expected.config.rope
        assert found.config.max_positions == expected.config.max_positions
        assert found.config.tie_embeddings == expected.config.tie_embeddings == shape.tied
        for name in llama_tensor_shapes(expected.config):
            np.testing.assert_array_equal(found.tensor(name), expected.tensor(name))

    def test_tokens_and_template(self, source: Path, whole: Path) -> None:
        expected, found = read_target(source), read_target(whole)
        assert found.eos_token_ids == expected.eos_token_ids == (2,)
        assert found.bos_token_id == expected.bos_token_id == 0
        assert found.chat_template == CHAT_TEMPLATE
        text = "he said: <|im_start|>hé\n  12"
        encoded = [Tokenizer.from_str(c.tokenizer_json).encode(text).ids for c in (expected, found)]
        assert encoded[0] == encoded[1]
        assert TOKENS.index("he") in encoded[0]

    def test_every_end_token_ends(self, source: Path, tmp_path: Path) -> None:
        fields, tensors = contents(source)
        fields |= {"tokenizer.ggml.eot_token_id": 1, "tokenizer.ggml.eom_token_id": 2}
        assert read_target(write_gguf(tmp_path / "a.gguf", fields, tensors)).eos_token_ids == (1, 2)

    def test_the_same_logits(self, source: Path, whole: Path, tmp_path: Path) -> None:
        answers = []
        for name, checkpoint in (("directory", source), ("file", whole)):
            export_bundle(read_target(checkpoint), "none", tmp_path / name, ExportOptions())
            bundle = open_bundle(tmp_path / name, Backend(2), with_drafter=False)
            assert bundle.manifest.target.vocab_size == len(TOKENS)
            answers.append(bundle.target.run(bundle.target.new_cache(16), list(range(4, 14)), 10).logits.copy())
        # The norm's epsilon is a float32 in a GGUF, so the last bits may differ.
        np.testing.assert_allclose(answers[0], answers[1], atol=1e-5)

    def test_half_precision_and_blocks_are_widened(self, source: Path, tmp_path: Path) -> None:
        fields, tensors = contents(source)
        name, stored = "model.layers.0.mlp.up_proj.weight", "blk.0.ffn_up.weight"
        expected = tensors[stored]
        tensors[stored] = expected.astype(np.float16)
        half = read_target(write_gguf(tmp_path / "half.gguf", fields, tensors)).tensor(name)
        np.testing.assert_array_equal(half, expected.astype(np.float16).astype(np.float32))
        tensors[stored] = gguf.quants.quantize(expected, Q8_0)
        blocks = read_target(write_gguf(tmp_path / "blocks.gguf", fields, tensors)).tensor(name)
        assert 0 < np.abs(blocks - expected).max() < np.abs(expected).max() / 127


DAMAGES: dict[str, tuple[Edit, tuple[str, ...]]] = {
    "no-key": (lambda f, t: f.pop("llama.block_count"), ("llama.block_count",)),
    "no-tokens": (lambda f, t: f.pop("tokenizer.ggml.tokens"), ("tokenizer.ggml.tokens",)),
    "key-kind": (lambda f, t: f.update({"llama.embedding_length": "64"}), ("llama.embedding_length", "'64'")),
    "heads-per-layer": (
        lambda f, t: f.update({"llama.attention.head_count": [4, 4, 4]}),
        ("head_count", "whole number"),
    ),
    "zero-heads": (lambda f, t: f.update({"llama.attention.head_count": 0}), ("num_heads", "positive")),
    "partial-rotary": (lambda f, t: f.update({"llama.rope.dimension_count": 8}), ("rotates only part",)),
    "rope-scaling": (lambda f, t: f.update({"llama.rope.scaling.type": "yarn"}), ("scales its rotary",)),
    "rope-factors": (lambda f, t: t.update({"rope_freqs.weight": np.ones(8, np.float32)}), ("scales its rotary",)),
    "experts": (lambda f, t: f.update({"llama.expert_count": 8}), ("mixture of experts",)),
    "tokenizer": (lambda f, t: f.update({"tokenizer.ggml.model": "llama"}), ("tokenizer.ggml.model", "gpt2")),
    "no-tensor": (lambda f, t: t.pop("blk.2.attn_v.weight"), ("blk.2.attn_v.weight",)),
    "shape": (
        lambda f, t: t.update({"blk.1.ffn_up.weight": np.ones((64, 96), np.float32)}),
        ("mlp.up_proj", "[64, 96]", "[96, 64]"),
    ),
    "unknown-bias": (lambda f, t: t.update({"blk.0.attn_q.bias": np.ones(64, np.float32)}), ("blk.0.attn_q.bias",)),
    "more-layers": (lambda f, t: f.update({"llama.block_count": 2}), ("blk.2.",)),
}


class TestDamage:
    def refuse(self, path: Path, *words: str) -> None:
        with pytest.raises(CheckpointError) as caught:
            read_target(path)
        message = str(caught.value)
        assert "\n" not in message
        assert "; " in message or ": " in message
        for word in words:
            assert word in message

    @pytest.mark.parametrize("name", DAMAGES)
    def test_is_named_in_one_line(self, name: str, source: Path, tmp_path: Path) -> None:
        edit, words = DAMAGES[name]
        fields, tensors = contents(source)
        edit(fields, tensors)
        self.refuse(write_gguf(tmp_path / "a.gguf", fields, tensors), *words)

    def test_another_architecture(self, source: Path, tmp_path: Path) -> None:
        self.refuse(write_gguf(tmp_path / "a.gguf", *contents(source), architecture="gemma"), "gemma", "llama")

    def test_integers_are_not_weights(self, source: Path, tmp_path: Path) -> None:
        fields, tensors = contents(source)
        tensors["blk.0.ffn_up.weight"] = np.ones((96, 64), np.int8)
        checkpoint = read_target(write_gguf(tmp_path / "a.gguf", fields, tensors))
        with pytest.raises(CheckpointError, match="I8"):
            checkpoint.tensor("model.layers.0.mlp.up_proj.weight")

    @pytest.mark.parametrize(
        "content", [b"", b"GG", b"hello, this is text", b"GGUF" + bytes(60), b"GGUF" + b"\xff" * 60]
    )
    def test_what_is_no_gguf(self, content: bytes, tmp_path: Path) -> None:
        path = tmp_path / "a.gguf"
        path.write_bytes(content)
        self.refuse(path, "a.gguf", "GGUF")

    def test_truncated_anywhere(self, whole: Path, tmp_path: Path) -> None:
        content, path = whole.read_bytes(), tmp_path / "a.gguf"
        data = gguf.GGUFReader(whole).data_offset
        ends = [3, 4, 8, 20, 24, 60, data // 4, data // 2, data - 300, data - 1, data, data + 5, len(content) // 2]
        for end in [*ends, len(content) - 4096, len(content) - 4, len(content) - 1]:
            path.write_bytes(content[:end])
            self.refuse(path, "a.gguf", "truncated")
