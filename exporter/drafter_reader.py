"""Reads DFlash drafters in z-lab's format: config.json and safetensors; embeddings and LM head are the target's.

Conventions: `target_layer_ids` index layers from 0 and mean the residual stream after that layer; `block_size` stands at the
top level in older checkpoints and inside `dflash_config` in newer ones; `d2t` holds offsets, target id = draft id + offset.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dflash_ort.errors import CheckpointError
from dflash_ort.exporter.checkpoint import Array, DecoderConfig, DrafterCheckpoint
from dflash_ort.exporter.hf_reader import SafetensorsReader, layer_tensor_shapes, llama_shaped_config, read_json

ARCHITECTURE = "DFlashDraftModel"


def read_drafter(path: Path) -> DrafterCheckpoint:
    """Read a drafter. Raises CheckpointError naming what was looked for and where."""
    raw = read_json(path / "config.json", f"'{path}' is not a drafter checkpoint: it has no config.json")
    architecture = (raw.get("architectures") or ["(none)"])[0]
    if architecture != ARCHITECTURE:
        raise CheckpointError(f"'{path}' is a {architecture}; expected a DFlash drafter in z-lab's format ({ARCHITECTURE})")
    if "sliding_attention" in (raw.get("layer_types") or []):
        raise CheckpointError(f"the drafter '{path}' has sliding-window layers, which this version cannot export")
    dflash = raw.get("dflash_config") or {}
    config = llama_shaped_config(raw, architecture, path)
    tensors = SafetensorsReader(path)
    layer_ids = tuple(int(i) for i in _find(raw, dflash, "target_layer_ids", path))
    shapes = _tensor_shapes(config, len(layer_ids))
    tensors.require(shapes)
    targets = raw.get("num_target_layers")
    block_size = int(_find(raw, dflash, "block_size", path))
    if block_size < 2:
        raise CheckpointError(f"the drafter's block_size is {block_size}; expected 2 or more (the last token and one mask)")
    return DrafterCheckpoint(
        config=config,
        tensor=tensors.float32,
        block_size=block_size,
        mask_token_id=int(_find(raw, dflash, "mask_token_id", path)),
        target_layer_ids=layer_ids,
        num_target_layers=int(targets) if targets is not None else None,
        draft_vocabulary=_draft_vocabulary(tensors, config, path),
        source={"kind": "dflash", "name": path.name, **tensors.hashes()},
    )


def _find(raw: dict[str, Any], dflash: dict[str, Any], key: str, path: Path) -> Any:
    for place in (dflash, raw):
        if place.get(key) is not None:
            return place[key]
    raise CheckpointError(f"'{path}/config.json' has no '{key}' (checked both dflash_config and the top level)")


def _tensor_shapes(config: DecoderConfig, taps: int) -> dict[str, tuple[int, ...]]:
    h = config.hidden_size
    shapes = layer_tensor_shapes(config, "")
    for layer in range(config.num_layers):
        shapes |= {f"layers.{layer}.self_attn.{n}_norm.weight": (config.head_dim,) for n in "qk"}
    return shapes | {"fc.weight": (h, taps * h), "hidden_norm.weight": (h,), "norm.weight": (h,)}


def _draft_vocabulary(tensors: SafetensorsReader, config: DecoderConfig, path: Path) -> Array | None:
    """Target id of each draft id from `d2t`, checked against `t2d` where it is there; None without a reduced vocabulary."""
    if "d2t" not in tensors:
        return None
    offsets = tensors.raw("d2t").astype(np.int64)
    ids: Array = np.arange(len(offsets)) + offsets
    if ids.min() < 0 or ids.max() >= config.vocab_size or len(np.unique(ids)) != len(ids):
        raise CheckpointError(f"'{path}': d2t maps draft ids outside the vocabulary or twice to one token; the checkpoint is damaged")
    if "t2d" in tensors:
        marked = np.flatnonzero(tensors.raw("t2d"))
        if not np.array_equal(np.sort(ids), marked):
            raise CheckpointError(f"'{path}': d2t and t2d disagree about the draft vocabulary; the checkpoint is damaged")
    return ids
