"""Hugging Face targets and DFlash drafters are read as they are, and what cannot be read is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_ort.errors import CheckpointError
from dflash_ort.exporter.checkpoint import DrafterCheckpoint, Rope
from dflash_ort.exporter.drafter_reader import read_drafter
from dflash_ort.exporter.export import ExportOptions, export_bundle, read_drafter_option, read_target
from tests.tiny import CHAT_TEMPLATE, TinyShape, edit_config, edit_tensors, write_drafter, write_target

Damage = Callable[[Path], object]

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def cut(directory: Path, keep: float) -> None:
    """Keep this share of the weights file."""
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])


def shard(directory: Path, count: int = 3) -> Path:
    """Spread the weights over several files, as save_pretrained does for large models."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    for index in range(count):
        part = {name: tensors[name] for name in sorted(tensors)[index::count]}
        save_file(part, directory / f"model-{index + 1:05}-of-{count:05}.safetensors")
    return directory


def retype(directory: Path, dtype: object) -> Path:
    path = directory / "model.safetensors"
    save_file({name: array.astype(dtype) for name, array in load_file(path).items()}, path)
    return directory


def write(name: str, content: str | bytes) -> Damage:
    return lambda d: (d / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def remove(name: str) -> Damage:
    return lambda d: (d / name).unlink()


def config(**changes: object) -> Damage:
    return lambda d: edit_config(d, **changes)


def extensions(value: object) -> Damage:
    return config(dflash_config={"mask_token_id": 3, "target_layer_ids": [0, 2], "extensions": value})


def tensors(**changes: np.ndarray | None) -> Damage:
    """Changes to tensors; a double underscore stands for a dot."""
    return lambda d: edit_tensors(d, {name.replace("__", "."): array for name, array in changes.items()})


def refused(error: CheckpointError, *words: str) -> None:
    """The message is one line, names these things, and says more than what is wrong."""
    message = str(error)
    assert "\n" not in message
    for word in words:
        assert word in message
    assert "; " in message, "says what is wrong, and not what was expected or what to do"


class TestTarget:
    def test_shards_are_one_checkpoint(self, tmp_path: Path) -> None:
        whole, parts = read_target(write_target(tmp_path / "a")), read_target(shard(write_target(tmp_path / "b")))
        assert parts.config == whole.config
        for name in load_file(tmp_path / "a" / "model.safetensors"):
            np.testing.assert_array_equal(parts.tensor(name), whole.tensor(name))
        assert sum(key.startswith("sha256:") for key in parts.source) == 3

    @pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float64])
    def test_other_floats_are_widened(self, dtype: type, tmp_path: Path) -> None:
        checkpoint = read_target(retype(write_target(tmp_path), dtype))
        stored = load_file(tmp_path / "model.safetensors")[Q_PROJ]
        assert checkpoint.tensor(Q_PROJ).dtype == np.float32
        np.testing.assert_array_equal(checkpoint.tensor(Q_PROJ), stored.astype(np.float32))

    def test_generation_config_has_the_last_word_on_eos(self, tmp_path: Path) -> None:
        write_target(tmp_path)
        assert read_target(tmp_path).eos_token_ids == (2,)
        write("generation_config.json", '{"eos_token_id": [2, 0]}')(tmp_path)
        assert read_target(tmp_path).eos_token_ids == (2, 0)
        write("generation_config.json", "{}")(tmp_path)
        assert read_target(tmp_path).eos_token_ids == (2,)

    def test_chat_template_in_its_three_places(self, tmp_path: Path) -> None:
        write_target(tmp_path)
        write("tokenizer_config.json", '{"chat_template": "old"}')(tmp_path)
        assert read_target(tmp_path).chat_template == CHAT_TEMPLATE
        remove("chat_template.jinja")(tmp_path)
        assert read_target(tmp_path).chat_template == "old"
        named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
        write("tokenizer_config.json", json.dumps({"chat_template": named}))(tmp_path)
        assert read_target(tmp_path).chat_template == "yes"
        remove("tokenizer_config.json")(tmp_path)
        assert read_target(tmp_path).chat_template is None

    def test_head_counts_and_sizes_have_the_defaults_of_transformers(self, tmp_path: Path) -> None:
        shape = TinyShape(kv_heads=4)
        edit_config(write_target(tmp_path, shape), head_dim=None, num_key_value_heads=None, rope_theta=None)
        found = read_target(tmp_path).config
        assert (found.head_dim, found.num_kv_heads, found.rope.theta) == (16, 4, 10000.0)

    @pytest.mark.parametrize("kind", ["empty", "text", "missing", "missing.gguf"])
    def test_what_is_not_a_checkpoint(self, kind: str, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "text").write_text("hello")
        with pytest.raises(CheckpointError) as caught:
            read_target(tmp_path / kind)
        refused(caught.value, kind)

    DAMAGES: dict[str, tuple[Damage, tuple[str, ...]]] = {  # noqa: RUF012
        "config-not-json": (write("config.json", "{"), ("config.json",)),
        "config-not-object": (write("config.json", "[1]"), ("config.json", "object")),
        "config-not-text": (write("config.json", b"\xff\xfe\x00"), ("config.json",)),
        "architecture": (config(architectures=["GPT2LMHeadModel"]), ("GPT2LMHeadModel", "LlamaForCausalLM")),
        "no-architecture": (config(architectures=None), ("names no architecture", "LlamaForCausalLM")),
        "architecture-kind": (config(architectures="LlamaForCausalLM"), ("names no architecture",)),
        "no-key": (config(intermediate_size=None), ("config.json", "intermediate_size")),
        "text-for-number": (config(hidden_size="64"), ("hidden_size", "'64'", "whole number")),
        "fraction": (config(num_hidden_layers=2.5), ("num_hidden_layers", "2.5", "whole number")),
        "list-for-number": (config(rms_norm_eps=[1]), ("rms_norm_eps", "number")),
        "flag-kind": (config(tie_word_embeddings="yes"), ("tie_word_embeddings", "true or false")),
        "eos-kind": (config(eos_token_id="</s>"), ("eos_token_id", "</s>")),
        "bos-kind": (config(bos_token_id={}), ("bos_token_id",)),
        "zero-layers": (config(num_hidden_layers=0), ("num_layers", "positive")),
        "zero-heads": (config(num_attention_heads=0), ("num_heads", "positive")),
        "odd-groups": (config(num_key_value_heads=3), ("4 attention heads", "multiple")),
        "odd-head": (config(head_dim=20), ("head_dim", "multiple of 16")),
        "activation": (config(hidden_act="gelu"), ("hidden_act", "gelu", "silu")),
        "rope-kind": (config(rope_scaling={"rope_type": "yarn", "factor": 4.0}), ("yarn", "llama3")),
        "rope-old-kind": (config(rope_scaling={"type": "dynamic", "factor": 4.0}), ("dynamic", "llama3")),
        "rope-incomplete": (config(rope_scaling=LLAMA3), ("original_max_position_embeddings", "llama3")),
        "rope-factor": (config(rope_scaling={"type": "linear", "factor": "4"}), ("factor", "'4'")),
        "rope-not-object": (config(rope_scaling="linear"), ("rope_scaling", "object")),
        "no-weights": (remove("model.safetensors"), ("safetensors",)),
        "no-tensor": (tensors(lm_head__weight=None), ("lm_head.weight",)),
        "no-bias": (config(attention_bias=True), ("q_proj.bias",)),
        "shape": (tensors(**{Q_PROJ: np.ones((3, 64), np.float32)}), (Q_PROJ, "[3, 64]", "[64, 64]")),
        "wider-than-weights": (config(intermediate_size=128), ("gate_proj", "[96, 64]", "[128, 64]")),
        "quantised": (tensors(**{Q_PROJ: np.ones((64, 64), np.int8)}), (Q_PROJ, "I8", "F32")),
        "weights-empty": (lambda d: cut(d, 0), ("model.safetensors", "truncated")),
        "weights-cut-in-header": (lambda d: cut(d, 0.001), ("model.safetensors", "truncated")),
        "weights-cut": (lambda d: cut(d, 0.9), ("model.safetensors", "truncated")),
        "no-tokenizer": (remove("tokenizer.json"), ("tokenizer.json",)),
        "tokenizer-not-text": (write("tokenizer.json", b"\xff\xfe\x00"), ("tokenizer.json",)),
        "template-not-text": (write("chat_template.jinja", b"\xff\xfe\x00"), ("chat_template.jinja",)),
        "generation-config": (write("generation_config.json", "nope"), ("generation_config.json",)),
    }

    @pytest.mark.parametrize("name", DAMAGES)
    def test_damage_is_named_in_one_line(self, name: str, tmp_path: Path) -> None:
        damage, words = self.DAMAGES[name]
        write_target(tmp_path)
        read_target(tmp_path)
        damage(tmp_path)
        with pytest.raises(CheckpointError) as caught:
            read_target(tmp_path)
        refused(caught.value, *words)

    @pytest.mark.parametrize("text", ["", "{}", '{"model": {"type": "BPE"}}', '{\n "version": "1.0",\n'])
    def test_a_broken_tokenizer_is_refused_at_export(self, text: str, tmp_path: Path) -> None:
        write("tokenizer.json", text)(write_target(tmp_path / "target"))
        with pytest.raises(CheckpointError) as caught:
            export_bundle(read_target(tmp_path / "target"), "none", tmp_path / "out", ExportOptions())
        refused(caught.value, "tokenizer.json")
        assert not (tmp_path / "out").exists()


class TestDrafter:
    def read(self, directory: Path) -> DrafterCheckpoint:
        drafter = read_drafter_option(str(directory))
        assert isinstance(drafter, DrafterCheckpoint)
        return drafter

    def test_bfloat16(self, tmp_path: Path) -> None:
        drafter = self.read(retype(write_drafter(tmp_path), ml_dtypes.bfloat16))
        stored = load_file(tmp_path / "model.safetensors")["fc.weight"]
        assert stored.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(drafter.tensor("fc.weight"), stored.astype(np.float32))

    @pytest.mark.parametrize("option", ["ngram", "none"])
    def test_kinds_without_a_checkpoint(self, option: str) -> None:
        assert read_drafter_option(option) == option

    DAMAGES: dict[str, tuple[Damage, tuple[str, ...]]] = {  # noqa: RUF012
        "no-config": (remove("config.json"), ("config.json", "drafter")),
        "architecture": (config(architectures=["Qwen3ForCausalLM"]), ("Qwen3ForCausalLM", "DFlashDraftModel")),
        "no-block-size": (config(block_size=None), ("block_size", "dflash_config", "top level")),
        "block-size-kind": (config(block_size="6"), ("block_size", "'6'")),
        "block-of-one": (config(block_size=1), ("block_size is 1", "2 or more")),
        "no-taps": (config(dflash_config={"mask_token_id": 3}), ("target_layer_ids",)),
        "empty-taps": (config(dflash_config={"mask_token_id": 3, "target_layer_ids": []}), ("target_layer_ids",)),
        "taps-kind": (config(dflash_config={"target_layer_ids": ["0"]}), ("target_layer_ids", "whole number")),
        "no-mask": (config(dflash_config={"target_layer_ids": [0, 2]}), ("mask_token_id",)),
        "dflash-kind": (config(dflash_config=[1]), ("dflash_config", "object")),
        "extension": (extensions({"markov": False}), ("'markov'", "newer version of dflash-ort")),
        "extension-kind": (extensions({"next_token": 1}), ("next_token", "true or false")),
        "extensions-kind": (extensions(["next_token"]), ("extensions", "object")),
        "extension-tensor": (extensions({"context_start": True}), ("start.weight",)),
        "sliding": (config(layer_types=["full_attention", "sliding_attention"]), ("sliding-window",)),
        "sliding-flag": (config(layer_types=None, use_sliding_window=True), ("sliding-window",)),
        "fewer-taps": (config(dflash_config={"mask_token_id": 3, "target_layer_ids": [0]}), ("fc.weight", "[64, 64]")),
        "no-tensor": (tensors(layers__1__self_attn__k_norm__weight=None), ("layers.1.self_attn.k_norm.weight",)),
        "shape": (tensors(hidden_norm__weight=np.ones(3, np.float32)), ("hidden_norm.weight", "[3]", "[64]")),
        "cut": (lambda d: cut(d, 0.5), ("model.safetensors", "truncated")),
        "activation": (config(hidden_act="relu"), ("hidden_act", "relu")),
        "d2t-outside": (tensors(d2t=np.array([0, 300])), ("d2t", "outside the vocabulary")),
        "d2t-negative": (tensors(d2t=np.array([-1, 0])), ("d2t", "outside the vocabulary")),
        "d2t-twice": (tensors(d2t=np.array([1, 0])), ("d2t", "to one token")),
        "d2t-kind": (tensors(d2t=np.ones(3, np.float32)), ("d2t", "whole numbers")),
        "d2t-shape": (tensors(d2t=np.ones((2, 2), np.int64)), ("d2t", "whole numbers")),
        "d2t-empty": (tensors(d2t=np.ones(0, np.int64)), ("d2t",)),
        "t2d": (tensors(d2t=np.array([0, 5]), t2d=np.arange(272) < 2), ("d2t", "t2d", "disagree")),
    }

    @pytest.mark.parametrize("name", DAMAGES)
    def test_damage_is_named_in_one_line(self, name: str, tmp_path: Path) -> None:
        damage, words = self.DAMAGES[name]
        write_drafter(tmp_path)
        self.read(tmp_path)
        damage(tmp_path)
        with pytest.raises(CheckpointError) as caught:
            self.read(tmp_path)
        refused(caught.value, *words)

    @pytest.mark.parametrize("kind", ["empty", "text", "missing"])
    def test_what_is_not_a_drafter(self, kind: str, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "text").write_text("hello")
        with pytest.raises(CheckpointError) as caught:
            self.read(tmp_path / kind)
        refused(caught.value, kind)

    MISFITS: dict[str, tuple[TinyShape, Damage, tuple[str, ...]]] = {  # noqa: RUF012
        "hidden": (TinyShape(hidden=48), config(), ("hidden_size is 48", "64")),
        "vocabulary": (TinyShape(vocab=300), config(), ("300 tokens", "272")),
        "layers": (TinyShape(), config(num_target_layers=4), ("4 layers", "3")),
        "tap-too-high": (
            TinyShape(),
            config(dflash_config={"mask_token_id": 3, "target_layer_ids": [0, 3]}),
            ("[0, 3]",),
        ),
        "tap-negative": (
            TinyShape(),
            config(dflash_config={"mask_token_id": 3, "target_layer_ids": [-1, 0]}),
            ("[-1, 0]", "0 to 2"),
        ),
        "mask": (
            TinyShape(),
            config(dflash_config={"mask_token_id": 272, "target_layer_ids": [0, 2]}),
            ("mask_token_id is 272", "272 tokens"),
        ),
    }

    @pytest.mark.parametrize("name", MISFITS)
    def test_a_drafter_of_another_target_is_refused(self, name: str, tmp_path: Path) -> None:
        shape, change, words = self.MISFITS[name]
        target = read_target(write_target(tmp_path / "target"))
        change(write_drafter(tmp_path / "drafter", shape))
        with pytest.raises(CheckpointError) as caught:
            export_bundle(target, read_drafter(tmp_path / "drafter"), tmp_path / "out", ExportOptions())
        refused(caught.value, *words)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["drafter", "target"]

    def test_a_drafter_that_names_no_target_layers_fits(self, tmp_path: Path) -> None:
        target = read_target(write_target(tmp_path / "target"))
        drafter = self.read(edit_config(write_drafter(tmp_path / "drafter"), num_target_layers=None))
        drafter.check_fits(target.config)


def test_rope_tables_reach_as_far_as_asked() -> None:
    cos, sin = Rope(10000.0).tables(9, 32)
    assert cos.shape == sin.shape == (9, 16)
    np.testing.assert_array_equal(cos[0], 1)
    np.testing.assert_allclose(cos**2 + sin**2, 1, rtol=1e-6)
