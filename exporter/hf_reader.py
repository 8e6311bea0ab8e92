"""Reads Llama-family Hugging Face directories: config.json, safetensors (one file or sharded), tokenizer.json, chat template."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dflash_ort.errors import CheckpointError
from dflash_ort.exporter.checkpoint import Array, DecoderConfig, Rope, TargetCheckpoint

SUPPORTED = ("LlamaForCausalLM",)


def read_hf_directory(path: Path) -> TargetCheckpoint:
    """Read a target. Raises CheckpointError naming what is missing or of a kind that is not supported."""
    raw = read_json(path / "config.json", f"'{path}' is not a checkpoint: it has no config.json")
    architecture = (raw.get("architectures") or ["(none)"])[0]
    if architecture not in SUPPORTED:
        raise CheckpointError(
            f"'{path}' is a {architecture}; this version exports {', '.join(SUPPORTED)}, so choose a Llama-family target"
        )
    config = llama_shaped_config(raw, architecture, path)
    tensors = SafetensorsReader(path)
    tensors.require(llama_tensor_shapes(config))
    tokenizer = path / "tokenizer.json"
    if not tokenizer.is_file():
        raise CheckpointError(f"'{path}' has no tokenizer.json; save it with the fast tokenizer of transformers and try again")
    eos = raw.get("eos_token_id")
    generation = path / "generation_config.json"
    if generation.is_file():
        eos = read_json(generation, f"'{generation}' cannot be read").get("eos_token_id", eos)
    return TargetCheckpoint(
        config=config,
        tensor=tensors.float32,
        tokenizer_json=tokenizer.read_text("utf-8"),
        chat_template=_chat_template(path),
        eos_token_ids=_as_ids(eos),
        bos_token_id=raw.get("bos_token_id"),
        source={"kind": "huggingface", "name": path.name, **tensors.hashes()},
    )


def llama_shaped_config(raw: Mapping[str, Any], architecture: str, path: Path) -> DecoderConfig:
    """A DecoderConfig from a Llama- or Qwen3-style config.json; raises CheckpointError naming a missing or unusable key."""

    def need(key: str) -> Any:
        if raw.get(key) is None:
            raise CheckpointError(f"'{path}/config.json' has no '{key}'; the checkpoint is incomplete or of another kind")
        return raw[key]

    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"'{path}' uses hidden_act '{activation}'; only silu (SwiGLU) is supported")
    try:
        heads, hidden = int(need("num_attention_heads")), int(need("hidden_size"))
        scaling = dict(raw.get("rope_scaling") or {})
        # transformers 5 writes rope_parameters, older versions rope_theta and rope_scaling.
        scaling |= raw.get("rope_parameters") or {}
        theta = float(raw.get("rope_theta") or scaling.pop("rope_theta", None) or 10000.0)
        bias = bool(raw.get("attention_bias", False))
        return DecoderConfig(
            architecture=architecture,
            num_layers=int(need("num_hidden_layers")),
            hidden_size=hidden,
            intermediate_size=int(need("intermediate_size")),
            num_heads=heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or hidden // heads),
            vocab_size=int(need("vocab_size")),
            norm_epsilon=float(need("rms_norm_eps")),
            rope=Rope(theta, scaling),
            max_positions=int(raw.get("max_position_embeddings") or 2048),
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=bias,
            attention_out_bias=bias,
            mlp_bias=bool(raw.get("mlp_bias", False)),
        )
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"'{path}/config.json' has a value of the wrong kind: {error}") from error


class SafetensorsReader:
    """Tensors of a directory's safetensors files by name, read one at a time and widened to float32."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files = sorted(directory.glob("*.safetensors"))
        if not self._files:
            raise CheckpointError(f"'{directory}' has no *.safetensors file; only safetensors checkpoints can be read")
        self._where: dict[str, Path] = {}
        for file in self._files:
            for name in self._open(file, lambda handle: list(handle.keys())):
                self._where[name] = file

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def raw(self, name: str) -> Array:
        """The tensor as stored (bfloat16 as ``ml_dtypes.bfloat16``)."""
        if name not in self._where:
            raise CheckpointError(f"'{self.directory}' has no tensor '{name}'; the checkpoint is incomplete or of another kind")
        return self._open(self._where[name], lambda handle: handle.get_tensor(name))

    def float32(self, name: str) -> Array:
        return self.raw(name).astype(np.float32, copy=False)

    def require(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise CheckpointError unless every one of these tensors is there in its shape."""
        for name, shape in shapes.items():
            if name not in self._where:
                raise CheckpointError(
                    f"'{self.directory}' has no tensor '{name}'; the checkpoint is incomplete or of another kind"
                )
            found = tuple(self._open(self._where[name], lambda handle, name=name: handle.get_slice(name).get_shape()))
            if found != shape:
                raise CheckpointError(
                    f"tensor '{name}' in '{self.directory}' has shape {list(found)}, config.json says {list(shape)}"
                )

    def hashes(self) -> dict[str, str]:
        return {f"sha256:{file.name}": sha256_file(file) for file in self._files}

    @staticmethod
    def _open(file: Path, read: Callable[[Any], Any]) -> Any:
        import ml_dtypes  # noqa: F401  registers bfloat16 with numpy
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(file, framework="np") as handle:
                return read(handle)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"'{file}' cannot be read ({error}); it is truncated or damaged, fetch it again") from error


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path, missing: str) -> dict[str, Any]:
    """A JSON object from a file; ``missing`` is the message when there is no such file."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(missing) from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"'{path}' cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"'{path}' holds a {type(value).__name__}, expected a JSON object")
    return value


def layer_tensor_shapes(config: DecoderConfig, prefix: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the decoder layers' tensors, biases included where the config has them."""
    h, f, q, kv = config.hidden_size, config.intermediate_size, config.query_width, config.kv_width
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(config.num_layers):
        at = f"{prefix}layers.{layer}"
        shapes |= {f"{at}.input_layernorm.weight": (h,), f"{at}.post_attention_layernorm.weight": (h,)}
        projections = {
            "self_attn.q_proj": (q, h, config.attention_bias),
            "self_attn.k_proj": (kv, h, config.attention_bias),
            "self_attn.v_proj": (kv, h, config.attention_bias),
            "self_attn.o_proj": (h, q, config.attention_out_bias),
            "mlp.gate_proj": (f, h, config.mlp_bias),
            "mlp.up_proj": (f, h, config.mlp_bias),
            "mlp.down_proj": (h, f, config.mlp_bias),
        }
        for name, (rows, columns, bias) in projections.items():
            shapes[f"{at}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{at}.{name}.bias"] = (rows,)
    return shapes


def llama_tensor_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    shapes = layer_tensor_shapes(config, "model.")
    shapes["model.embed_tokens.weight"] = (config.vocab_size, config.hidden_size)
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def _chat_template(path: Path) -> str | None:
    """chat_template.jinja, else the template in tokenizer_config.json (the default one of a list)."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    config = path / "tokenizer_config.json"
    if not config.is_file():
        return None
    template = read_json(config, "").get("chat_template")
    if isinstance(template, list):
        template = next((t.get("template") for t in template if t.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _as_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list) else (int(value),)

