"""Writes DFlash drafters in z-lab's format, as `drafter_reader` reads them: config.json, safetensors, a model card."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from dflash_ort.errors import CheckpointError
from dflash_ort.exporter.checkpoint import Array, DecoderConfig, DrafterExtensions
from dflash_ort.exporter.drafter_reader import ARCHITECTURE, drafter_tensor_shapes
from dflash_ort.whole import put_in_place

WEIGHTS = "model.safetensors"


def write_drafter(
    directory: Path,
    config: DecoderConfig,
    tensors: Mapping[str, Array],
    *,
    block_size: int,
    mask_token_id: int,
    target_layer_ids: tuple[int, ...],
    num_target_layers: int,
    extensions: DrafterExtensions,
    draft_vocabulary: Array | None,
    readme: str = "",
    force: bool = False,
) -> None:
    """Write a drafter's directory; it appears whole or not at all.

    ``tensors`` are float32 under z-lab's names and are stored as bfloat16; ``draft_vocabulary`` int64, ascending, None
    for all of the target's; ``readme`` the model card, none where it is empty. An extension that is off is not named,
    so that a plain drafter's config is plain.

    Raises CheckpointError for tensors of other names or shapes than the config's, for a directory that is there already
    (unless ``force``, and it holds a drafter), and where it cannot be written.
    """
    expected = drafter_tensor_shapes(config, len(target_layer_ids), block_size, extensions)
    found = {name: tensor.shape for name, tensor in tensors.items()}
    if found != expected:
        wrong = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        raise CheckpointError(f"the drafter's tensors {', '.join(wrong)} are not what its config says")
    check_drafter_output(directory, force)
    dflash: dict[str, Any] = {"mask_token_id": mask_token_id, "target_layer_ids": list(target_layer_ids)}
    on = {name: True for name, value in asdict(extensions).items() if value}
    if on:
        dflash["extensions"] = on
    values = _config(config) | {
        "num_target_layers": num_target_layers,
        "block_size": block_size,
        "dflash_config": dflash,
        "torch_dtype": "bfloat16",
    }
    stored = _stored(tensors)
    if draft_vocabulary is not None:
        values["draft_vocab_size"] = len(draft_vocabulary)
        stored["d2t"] = draft_vocabulary.astype(np.int64) - np.arange(len(draft_vocabulary))
        stored["t2d"] = np.isin(np.arange(config.vocab_size), draft_vocabulary)
    files = {"config.json": json.dumps(values, indent=2) + "\n"} | ({"README.md": readme} if readme else {})
    try:
        _write(directory, files, stored)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the drafter '{directory}': {error.strerror or error}; "
            "free some space or choose another --output"
        ) from error


def check_drafter_output(directory: Path, force: bool) -> None:
    """Raise CheckpointError unless a drafter may be written to ``directory``."""
    try:
        if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
            return
        is_drafter = (directory / "config.json").is_file() and ARCHITECTURE in (directory / "config.json").read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot look at '{directory}': {error}; choose another --output") from error
    if not is_drafter:
        raise CheckpointError(f"'{directory}' exists and is not a drafter; choose another --output")
    if not force:
        raise CheckpointError(f"'{directory}' exists; pass --force to replace it, or choose another --output")


def _config(config: DecoderConfig) -> dict[str, Any]:
    """The keys that z-lab's reference and `drafter_reader` read; rope scaling only where there is some."""
    scaling = {"rope_scaling": dict(config.rope.scaling)} if config.rope.scaling else {}
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope.theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_positions,
        "layer_types": ["full_attention"] * config.num_layers,
        "sliding_window": None,
    } | scaling


def _stored(tensors: Mapping[str, Array]) -> dict[str, Array]:
    import ml_dtypes

    return {name: np.ascontiguousarray(tensor).astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()}


def _write(directory: Path, texts: Mapping[str, str], tensors: Mapping[str, Array]) -> None:
    """Everything into a directory beside, then into place; an older drafter moves into one that is about to go."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    directory.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", suffix=".partial", dir=directory.parent))
    try:
        made = work / "drafter"
        made.mkdir()
        for name, text in texts.items():
            (made / name).write_text(text, "utf-8")
        try:
            save_file(dict(tensors), made / WEIGHTS, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(str(error)) from error
        put_in_place(made, directory, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)
