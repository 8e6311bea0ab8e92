"""Reads Llama GGUF files through the `gguf` package, dequantised, under transformers' tensor names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dflash_ort.errors import CheckpointError
from dflash_ort.exporter.checkpoint import Array, DecoderConfig, Rope, TargetCheckpoint
from dflash_ort.exporter.gguf_tokenizer import tokenizer_from_gguf
from dflash_ort.exporter.hf_reader import ConfigValues, llama_tensor_shapes, sha256_file

_LAYER_NAMES = {
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
_TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


_EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
_PASS_DIRECTORY = "pass the Hugging Face directory of this model instead"


def read_gguf(path: Path) -> TargetCheckpoint:
    """Read a target from a .gguf file. Raises CheckpointError for another architecture or a damaged file."""
    fields, stored = _read(path)
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"'{path}' is a GGUF of architecture '{architecture}'; this version reads 'llama'")
    tensors = _Tensors(path, stored, fields)
    values = ConfigValues(fields, f"'{path}'")
    eos = {token for key in _EOS_KEYS for token in values.whole_numbers(key)}
    return TargetCheckpoint(
        config=tensors.config,
        tensor=tensors.float32,
        tokenizer_json=tokenizer_from_gguf(fields),
        chat_template=fields.get("tokenizer.chat_template"),
        eos_token_ids=tuple(sorted(eos)),
        bos_token_id=next(iter(values.whole_numbers("tokenizer.ggml.bos_token_id")), None),
        source={"kind": "gguf", "name": path.name, "sha256": sha256_file(path)},
    )


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The file's metadata as plain values, and its tensors by name (mapped, not read)."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # the reader raises whatever numpy meets in a damaged file
        raise CheckpointError(
            f"'{path}' cannot be read as GGUF ({error}); it is truncated, damaged or of another kind, fetch it again"
        ) from error
    return fields, {tensor.name: tensor for tensor in reader.tensors}


def _config(path: Path, fields: Mapping[str, Any], tied: bool) -> DecoderConfig:
    values = ConfigValues(fields, f"'{path}'")
    tokens = fields.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        raise values.missing("tokenizer.ggml.tokens")
    heads, hidden = values.whole("llama.attention.head_count"), values.whole("llama.embedding_length")
    head_dim = values.whole("llama.attention.key_length", hidden // max(heads, 1))
    if values.whole("llama.rope.dimension_count", head_dim) != head_dim:
        raise CheckpointError(f"'{path}' rotates only part of each head; this version rotates whole heads")
    if fields.get("llama.rope.scaling.type") not in (None, "none") or fields.get("llama.rope.scale_linear") not in (
        None,
        1.0,
    ):
        raise CheckpointError(f"'{path}' scales its rotary embedding; {_PASS_DIRECTORY}")
    if fields.get("llama.expert_count"):
        raise CheckpointError(f"'{path}' is a mixture of experts; this version exports dense models")
    return DecoderConfig(
        architecture="LlamaForCausalLM",
        num_layers=values.whole("llama.block_count"),
        hidden_size=hidden,
        intermediate_size=values.whole("llama.feed_forward_length"),
        num_heads=heads,
        num_kv_heads=values.whole("llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab_size=len(tokens),
        norm_epsilon=values.number("llama.attention.layer_norm_rms_epsilon"),
        rope=Rope(values.number("llama.rope.freq_base", 10000.0)),
        max_positions=values.whole("llama.context_length"),
        tie_embeddings=tied,
    )


class _Tensors:
    """Maps transformers' names to the file's, dequantises, and undoes the q/k permutation."""

    def __init__(self, path: Path, tensors: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
        self.path, self._tensors = path, tensors
        if "rope_freqs.weight" in tensors:
            raise CheckpointError(f"'{path}' scales its rotary embedding; {_PASS_DIRECTORY}")
        self.config = _config(path, fields, tied="output.weight" not in tensors)
        self._check_tensors()

    def float32(self, name: str) -> Array:
        from gguf.quants import dequantize

        tensor = self._find(name)
        try:
            array: Array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise CheckpointError(
                f"'{self.path}' stores '{tensor.name}' as {kind}, which cannot be read; {_PASS_DIRECTORY}"
            ) from error
        if ".self_attn.q_proj." in name:
            return unpermute(array, self.config.num_heads)
        if ".self_attn.k_proj." in name:
            return unpermute(array, self.config.num_kv_heads)
        return array

    def _find(self, name: str) -> Any:
        stem, kind = name.rsplit(".", 1)
        if stem.startswith("model.layers."):
            _, _, layer, part = stem.split(".", 3)
            stored = f"blk.{layer}.{_LAYER_NAMES[part]}.{kind}"
        else:
            stored = f"{_TOP_NAMES[stem]}.{kind}"
        if stored not in self._tensors:
            raise CheckpointError(f"'{self.path}' has no tensor '{stored}'; the file is incomplete or of another kind")
        return self._tensors[stored]

    def _check_tensors(self) -> None:
        """Each tensor is there in its shape, and there is no other: a bias left out would change every answer."""
        expected = llama_tensor_shapes(self.config)
        for name, shape in expected.items():
            found = tuple(int(n) for n in reversed(self._find(name).shape))
            if found != shape:
                raise CheckpointError(
                    f"'{self.path}': '{name}' has shape {list(found)}, "
                    f"its metadata says {list(shape)}; fetch the file again"
                )
        unknown = sorted(set(self._tensors) - {self._find(name).name for name in expected})
        if unknown:
            raise CheckpointError(
                f"'{self.path}' has a tensor '{unknown[0]}' that this version does not know; {_PASS_DIRECTORY}"
            )


def unpermute(weight: Array, heads: int) -> Array:
    """Undo llama.cpp's row order of q and k, ``[heads * head_dim, in]``.

    llama.cpp interleaves the two halves of each head's rotary pairs; transformers keeps the halves apart.
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
