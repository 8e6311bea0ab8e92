"""Reads DFlash drafters in z-lab's format: config.json and safetensors; embeddings and LM head are the target's.

Conventions: `target_layer_ids` index layers from 0 and mean the residual stream after that layer; `block_size` stands
at the top level in older checkpoints and inside `dflash_config` in newer ones; `d2t` holds offsets, target id = draft
id + offset. Extensions of ours stand in `dflash_config`, `extensions`, each true or false.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from dflash_ort.errors import CheckpointError
from dflash_ort.exporter.checkpoint import Array, DecoderConfig, DrafterCheckpoint, DrafterExtensions
from dflash_ort.exporter.hf_reader import (
    ConfigValues,
    SafetensorsReader,
    architecture_of,
    layer_tensor_shapes,
    llama_shaped_config,
    read_json,
)

ARCHITECTURE = "DFlashDraftModel"


def read_drafter(path: Path) -> DrafterCheckpoint:
    """Read a drafter. Raises CheckpointError naming what was looked for and where."""
    raw = read_json(path / "config.json", f"'{path}' has no config.json; expected a directory with a DFlash drafter")
    architecture = architecture_of(raw)
    if architecture != ARCHITECTURE:
        raise CheckpointError(
            f"'{path}' is a {architecture}; expected a DFlash drafter in z-lab's format ({ARCHITECTURE})"
        )
    if _has_sliding_windows(raw):
        raise CheckpointError(
            f"the drafter '{path}' has sliding-window layers; this version exports full attention only"
        )
    values = ConfigValues(raw, f"'{path / 'config.json'}'")
    config = llama_shaped_config(values, architecture)
    dflash = _dflash_values(values)
    layer_ids = dflash.whole_numbers("target_layer_ids")
    if not layer_ids:
        raise dflash.missing("target_layer_ids")
    block_size = dflash.whole("block_size")
    extensions = _extensions(dflash)
    if extensions.num_drafts(block_size) < 1:
        least = "1 or more" if extensions.next_token else "2 or more (the last token and one mask)"
        raise CheckpointError(f"the drafter's block_size is {block_size}; expected {least}")
    tensors = SafetensorsReader(path)
    tensors.require(drafter_tensor_shapes(config, len(layer_ids), block_size, extensions))
    return DrafterCheckpoint(
        config=config,
        tensor=tensors.float32,
        block_size=block_size,
        mask_token_id=dflash.whole("mask_token_id"),
        target_layer_ids=layer_ids,
        num_target_layers=values.whole("num_target_layers", 0) or None,
        draft_vocabulary=_draft_vocabulary(tensors, config, path),
        source={"kind": "dflash", "name": path.resolve().name, **tensors.hashes()},
        extensions=extensions,
    )


def _has_sliding_windows(raw: Mapping[str, Any]) -> bool:
    """`layer_types` decides; configs from before it have `use_sliding_window` alone."""
    kinds = raw.get("layer_types")
    return "sliding_attention" in kinds if isinstance(kinds, list) else bool(raw.get("use_sliding_window"))


def _dflash_values(values: ConfigValues) -> ConfigValues:
    """The keys of dflash_config, and those of the top level where it has none."""
    inner = {key: value for key, value in values.section("dflash_config").items() if value is not None}
    return ConfigValues({**values.raw, **inner}, f"{values.where} (dflash_config and the top level)")


def _extensions(dflash: ConfigValues) -> DrafterExtensions:
    """Those that are on. Raises CheckpointError for one that this version does not know, whatever its value."""
    raw = dflash.section("extensions")
    known = {field.name for field in fields(DrafterExtensions)}
    unknown = sorted(set(raw) - known)
    if unknown:
        raise CheckpointError(
            f"{dflash.where} has the extensions {', '.join(map(repr, unknown))}, which this version does not know; "
            "the drafter needs a newer version of dflash-ort"
        )
    values = ConfigValues(raw, f"{dflash.where}, extensions,")
    return DrafterExtensions(**{name: values.flag(name) for name in known})


def drafter_tensor_shapes(
    config: DecoderConfig, taps: int, block_size: int, extensions: DrafterExtensions
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a drafter's tensors, but for ``d2t`` and ``t2d``."""
    h = config.hidden_size
    shapes = layer_tensor_shapes(config, "")
    for layer in range(config.num_layers):
        shapes |= {f"layers.{layer}.self_attn.{n}_norm.weight": (config.head_dim,) for n in "qk"}
    shapes |= {"fc.weight": (h, taps * h), "hidden_norm.weight": (h,), "norm.weight": (h,)}
    return shapes | extensions.tensor_shapes(hidden_size=h, taps=taps, block_size=block_size)


def _draft_vocabulary(tensors: SafetensorsReader, config: DecoderConfig, path: Path) -> Array | None:
    """Target id of each draft id from `d2t`, checked against `t2d` if it is there; None where there is no `d2t`."""
    if "d2t" not in tensors:
        return None
    offsets = tensors.raw("d2t")
    if offsets.ndim != 1 or offsets.dtype.kind != "i" or not offsets.size:
        raise CheckpointError(
            f"'{path}': d2t is not a list of whole numbers; the checkpoint is damaged, fetch it again"
        )
    ids: Array = np.arange(len(offsets)) + offsets.astype(np.int64)
    if ids.min() < 0 or ids.max() >= config.vocab_size or len(np.unique(ids)) != len(ids):
        raise CheckpointError(
            f"'{path}': d2t maps draft ids outside the vocabulary or two to one token; "
            "the checkpoint is damaged, fetch it again"
        )
    if "t2d" in tensors:
        marked = np.flatnonzero(tensors.raw("t2d"))
        if not np.array_equal(np.sort(ids), marked):
            raise CheckpointError(
                f"'{path}': d2t and t2d disagree about the draft vocabulary; the checkpoint is damaged, fetch it again"
            )
    return ids
