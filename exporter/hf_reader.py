"""Reads Llama-family Hugging Face directories: config, safetensors (one file or shards), tokenizer, template."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dflash_ort.errors import CheckpointError
from dflash_ort.exporter.checkpoint import Array, DecoderConfig, Rope, TargetCheckpoint

SUPPORTED = ("LlamaForCausalLM",)
_FLOATS = ("F32", "F16", "BF16", "F64")


def read_hf_directory(path: Path) -> TargetCheckpoint:
    """Read a target. Raises CheckpointError naming what is missing or of a kind that is not supported."""
    raw = read_json(
        path / "config.json", f"'{path}' has no config.json; expected a Hugging Face directory or a .gguf file"
    )
    architecture = architecture_of(raw)
    if architecture not in SUPPORTED:
        raise CheckpointError(
            f"'{path}' is a {architecture}; this version exports {', '.join(SUPPORTED)}, "
            "so choose a Llama-family target"
        )
    values = ConfigValues(raw, f"'{path / 'config.json'}'")
    config = llama_shaped_config(values, architecture)
    tensors = SafetensorsReader(path)
    tensors.require(llama_tensor_shapes(config))
    tokenizer = path / "tokenizer.json"
    if not tokenizer.is_file():
        raise CheckpointError(
            f"'{path}' has no tokenizer.json; save it with the fast tokenizer of transformers and try again"
        )
    eos = values.whole_numbers("eos_token_id")
    generation = path / "generation_config.json"
    if generation.is_file():
        generating = ConfigValues(read_json(generation, f"'{generation}' is gone"), f"'{generation}'")
        eos = generating.whole_numbers("eos_token_id") or eos
    return TargetCheckpoint(
        config=config,
        tensor=tensors.float32,
        tokenizer_json=_read_text(tokenizer),
        chat_template=_chat_template(path),
        eos_token_ids=eos,
        bos_token_id=next(iter(values.whole_numbers("bos_token_id")), None),
        source={"kind": "huggingface", "name": path.resolve().name, **tensors.hashes()},
    )


class ConfigValues:
    """Reads a config's keys: each is there and of its kind, or a CheckpointError says which one is not."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw, self.where = raw, where

    def whole(self, key: str, default: int | None = None) -> int:
        return int(self._get(key, int, "a whole number", default))

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._get(key, (int, float), "a number", default))

    def flag(self, key: str) -> bool:
        """False where the key is not there."""
        value = self.raw.get(key)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise self._wrong_kind(key, value, "true or false")

    def section(self, key: str) -> dict[str, Any]:
        """Empty where the key is not there."""
        return dict(self._get(key, dict, "an object", {}))

    def whole_numbers(self, key: str) -> tuple[int, ...]:
        """One number or a list of them; none where the key is not there."""
        value = self.raw.get(key)
        numbers = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(number, bool) or not isinstance(number, int) for number in numbers):
            raise self._wrong_kind(key, value, "a whole number or a list of them")
        return tuple(numbers)

    def missing(self, key: str) -> CheckpointError:
        return CheckpointError(f"{self.where} has no '{key}'; the checkpoint is incomplete or of another kind")

    def _get(self, key: str, kind: type | tuple[type, ...], what: str, default: Any) -> Any:
        value = self.raw.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.missing(key)
        if isinstance(value, bool) or not isinstance(value, kind):
            raise self._wrong_kind(key, value, what)
        return value

    def _wrong_kind(self, key: str, value: object, what: str) -> CheckpointError:
        return CheckpointError(f"{self.where} has a {key} of the wrong kind, {value!r}; expected {what}")


def architecture_of(raw: Mapping[str, Any]) -> str:
    """The architecture that a config.json names first, in words fit for a message."""
    names = raw.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else "checkpoint that names no architecture"


def llama_shaped_config(values: ConfigValues, architecture: str) -> DecoderConfig:
    """A DecoderConfig from a Llama- or Qwen3-style config.json. Raises CheckpointError naming an unusable key."""
    activation = values.raw.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"{values.where} says hidden_act '{activation}'; only silu (SwiGLU) is supported")
    heads, hidden = values.whole("num_attention_heads"), values.whole("hidden_size")
    # transformers 5 writes rope_parameters, older versions rope_theta and rope_scaling.
    scaling = values.section("rope_scaling") | values.section("rope_parameters")
    theta = values.number("rope_theta", scaling.pop("rope_theta", None) or 10000.0)
    bias = values.flag("attention_bias")
    return DecoderConfig(
        architecture=architecture,
        num_layers=values.whole("num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=values.whole("intermediate_size"),
        num_heads=heads,
        num_kv_heads=values.whole("num_key_value_heads", heads),
        head_dim=values.whole("head_dim", hidden // max(heads, 1)),
        vocab_size=values.whole("vocab_size"),
        norm_epsilon=values.number("rms_norm_eps"),
        rope=Rope(theta, scaling),
        max_positions=values.whole("max_position_embeddings", 2048),
        tie_embeddings=values.flag("tie_word_embeddings"),
        attention_bias=bias,
        attention_out_bias=bias,
        mlp_bias=values.flag("mlp_bias"),
    )


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
        array: Array = self._read(name, lambda handle: handle.get_tensor(name))
        return array

    def float32(self, name: str) -> Array:
        return self.raw(name).astype(np.float32, copy=False)

    def require(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise CheckpointError unless every one of these tensors is there, in its shape and not quantised."""
        for name, shape in shapes.items():
            found, dtype = self._read(name, partial(_shape_and_dtype, name))
            if found != shape:
                raise CheckpointError(
                    f"tensor '{name}' in '{self.directory}' has shape {list(found)}, config.json says {list(shape)}; "
                    "config and weights are not of one checkpoint, fetch it again"
                )
            if dtype not in _FLOATS:
                raise CheckpointError(
                    f"tensor '{name}' in '{self.directory}' is stored as {dtype}, "
                    f"expected one of {', '.join(_FLOATS)}; choose the checkpoint that is not quantised"
                )

    def hashes(self) -> dict[str, str]:
        return {f"sha256:{file.name}": sha256_file(file) for file in self._files}

    def _read(self, name: str, read: Callable[[Any], Any]) -> Any:
        if name not in self._where:
            raise CheckpointError(
                f"'{self.directory}' has no tensor '{name}'; the checkpoint is incomplete or of another kind"
            )
        return self._open(self._where[name], read)

    @staticmethod
    def _open(file: Path, read: Callable[[Any], Any]) -> Any:
        import ml_dtypes  # noqa: F401  registers bfloat16 with numpy
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(file, framework="np") as handle:
                return read(handle)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"'{file}' cannot be read ({error}); it is truncated or damaged, fetch it again"
            ) from error


def _shape_and_dtype(name: str, handle: Any) -> tuple[tuple[int, ...], str]:
    tensor = handle.get_slice(name)
    return tuple(tensor.get_shape()), str(tensor.get_dtype())


def sha256_file(path: Path) -> str:
    """The file's SHA-256, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path, missing: str) -> dict[str, Any]:
    """A JSON object from a file; ``missing`` is the message when there is no such file."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(missing) from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"'{path}' cannot be read ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"'{path}' holds a {type(value).__name__}, expected a JSON object; fetch it again")
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
    """Names and shapes of all tensors of a Llama-shaped target."""
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
        return _read_text(file)
    config = path / "tokenizer_config.json"
    if not config.is_file():
        return None
    template = read_json(config, f"'{config}' is gone").get("chat_template")
    if isinstance(template, list):
        named = [t for t in template if isinstance(t, dict) and t.get("name") == "default"]
        template = named[0].get("template") if named else None
    return template if isinstance(template, str) else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"'{path}' cannot be read ({error}); fetch it again") from error
