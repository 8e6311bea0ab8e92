"""A checkpoint as the graph writers see it: a config in the model's words and a way to read one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflash_ort.errors import CheckpointError

Array = np.ndarray
TensorLoader = Callable[[str], Array]

_SCALING_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""The ways of scaling a rotary embedding that can be exported, and the numbers that each needs."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: base frequency and, where the checkpoint scales it, how (transformers' `rope_scaling`)."""

    theta: float
    scaling: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in _SCALING_NUMBERS:
            raise CheckpointError(
                f"rope scaling '{self.kind}' is not supported; expected {', '.join(_SCALING_NUMBERS)}"
            )
        for name in _SCALING_NUMBERS[self.kind]:
            value = self.scaling.get(name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
                raise CheckpointError(f"rope scaling '{self.kind}' has {name} {value!r}; expected a positive number")

    @property
    def kind(self) -> str:
        return str(self.scaling.get("rope_type", self.scaling.get("type", "default")))

    def tables(self, length: int, head_dim: int) -> tuple[Array, Array]:
        """cos and sin, float32 ``[length, head_dim / 2]``, half-split (not interleaved) layout."""
        inverse = 1.0 / self.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        angles = np.arange(length, dtype=np.float64)[:, None] * self._scaled(inverse)[None, :]
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def _scaled(self, inverse: Array) -> Array:
        if self.kind == "linear":
            return inverse / float(self.scaling["factor"])
        return self._llama3(inverse) if self.kind == "llama3" else inverse

    def _llama3(self, inverse: Array) -> Array:
        """Llama 3.1's scaling: long wavelengths divided by the factor, short ones kept, a linear blend between."""
        factor = float(self.scaling["factor"])
        low, high = float(self.scaling["low_freq_factor"]), float(self.scaling["high_freq_factor"])
        original = float(self.scaling["original_max_position_embeddings"])
        turns = original * inverse / (2 * np.pi)
        blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
        scaled: Array = (1 - blend) * inverse / factor + blend * inverse
        return scaled


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """What a Llama- or Qwen3-shaped stack of decoder layers is made of."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_epsilon: float
    rope: Rope
    max_positions: int
    tie_embeddings: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "hidden_size",
            "intermediate_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "vocab_size",
        ):
            if getattr(self, name) < 1:
                raise CheckpointError(f"the checkpoint's {name} is {getattr(self, name)}; expected a positive number")
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"the checkpoint has {self.num_heads} attention heads over {self.num_kv_heads} key/value heads; "
                "expected a multiple"
            )
        if self.head_dim % 16:
            raise CheckpointError(
                f"the checkpoint's head_dim is {self.head_dim}; rotary attention on the CPU needs a multiple of 16"
            )

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class TargetCheckpoint:
    """A causal model. ``tensor(name)`` returns float32 under transformers' Llama names, ``model.layers.0...``."""

    config: DecoderConfig
    tensor: TensorLoader
    tokenizer_json: str
    chat_template: str | None
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    source: Mapping[str, str]
    """Provenance: what was read, with its SHA-256."""


@dataclass(frozen=True, slots=True)
class DrafterExtensions:
    """What a drafter does beyond z-lab's format, named in its config (`dflash_config`, `extensions`); all off is plain.

    A program that does not know an extension must refuse the drafter: it would draft nonsense.
    """

    next_token: bool = False
    """Row ``i`` of the block predicts the token *after* slot ``i``, so that the anchor's own row gives the first draft
    and a block of B slots gives B drafts.
    """
    context_start: bool = False
    """Every block row starts from its slot's embedding plus ``start @`` the tapped states of the last injected row
    (as they come, not the normed context feature) plus ``start_embed @`` the anchor's embedding.
    """
    slot_embeddings: bool = False
    """Mask slot ``i`` is row ``i`` of a table of its own (row 0 is unused) instead of the mask token's embedding."""
    markov_head: bool = False
    """Each drafted row ``x`` is corrected, before the LM head, by the token ``t`` that stands before its draft: ``x +
    down(silu(gate(z)) * up(z))`` with ``z`` the RMS-normed row and embedding of ``t``, side by side. A block's rows are
    computed at once and know nothing of each other's choices; this is what tells them (a Markov head, gated by the row;
    the bias that it puts on the logits has the embeddings and the head, both frozen, for its factors).
    """

    def tensor_shapes(self, *, hidden_size: int, taps: int, block_size: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors that the extensions add to a checkpoint."""
        h = hidden_size
        shapes: dict[str, tuple[int, ...]] = {}
        if self.context_start:
            shapes |= {"start.weight": (h, taps * h), "start_embed.weight": (h, h)}
        if self.slot_embeddings:
            shapes["slot_embeddings.weight"] = (block_size, h)
        if self.markov_head:
            shapes |= {"markov.gate_proj.weight": (h, 2 * h), "markov.up_proj.weight": (h, 2 * h)}
            shapes["markov.down_proj.weight"] = (h, h)
        return shapes

    def num_drafts(self, block_size: int) -> int:
        """Drafts of a block of ``block_size`` slots, the anchor's among them."""
        return block_size if self.next_token else block_size - 1


PLAIN = DrafterExtensions()


@dataclass(frozen=True, slots=True)
class DrafterCheckpoint:
    """A DFlash drafter in z-lab's format. ``tensor(name)`` returns float32; embeddings and LM head are the target's.

    ``draft_vocabulary`` holds the target id of each draft logit (int64 ``[draft_vocab]``), or None for the whole
    vocabulary.
    """

    config: DecoderConfig
    tensor: TensorLoader
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    draft_vocabulary: Array | None
    source: Mapping[str, str]
    extensions: DrafterExtensions = PLAIN

    def check_fits(self, target: DecoderConfig) -> None:
        """Raise CheckpointError unless this drafter was made for a target of this shape."""
        if self.config.hidden_size != target.hidden_size:
            raise CheckpointError(
                f"the drafter's hidden_size is {self.config.hidden_size}, the target's {target.hidden_size}; "
                "use a drafter trained for this target"
            )
        if self.config.vocab_size != target.vocab_size:
            raise CheckpointError(
                f"the drafter's vocabulary has {self.config.vocab_size} tokens, the target's {target.vocab_size}; "
                "use a drafter trained for this target"
            )
        if self.num_target_layers is not None and self.num_target_layers != target.num_layers:
            raise CheckpointError(
                f"the drafter was trained for a target of {self.num_target_layers} layers, "
                f"this one has {target.num_layers}; use a drafter trained for this target"
            )
        if any(not 0 <= layer < target.num_layers for layer in self.target_layer_ids):
            raise CheckpointError(
                f"the drafter taps layers {list(self.target_layer_ids)}, "
                f"the target has layers 0 to {target.num_layers - 1}; use a drafter trained for this target"
            )
        if not 0 <= self.mask_token_id < target.vocab_size:
            raise CheckpointError(
                f"the drafter's mask_token_id is {self.mask_token_id}, outside the target's "
                f"{target.vocab_size} tokens; use a drafter trained for this target"
            )
