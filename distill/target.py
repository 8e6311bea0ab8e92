"""The target that makes the data: found as `dflash-ort export` finds it, exported once in its batched form, opened."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from dflash_ort.exporter.checkpoint import TargetCheckpoint
from dflash_ort.exporter.export import ExportOptions, export_bundle, read_target
from dflash_ort.exporter.linear import Precision
from dflash_ort.models.manifest import MANIFEST, TARGET_GRAPH, check_files, read_manifest
from dflash_ort.models.presets import PRESETS, fetch_target
from dflash_ort.models.spec import ModelSpec
from dflash_ort.progress import Progress, silent
from dflash_ort.runtime.batched import BatchedTarget
from dflash_ort.runtime.session import Backend, open_session
from dflash_ort.runtime.text import Text

SLOTS = 24
MAX_CONTEXT = 1024


@dataclass(frozen=True, slots=True)
class DataTarget:
    """A target ready to make data. ``identity`` is a hash over its weights and text, whatever the precision."""

    checkpoint: TargetCheckpoint
    identity: str
    precision: Precision
    spec: ModelSpec
    text: Text
    model: BatchedTarget


def open_target(
    target: str | Path,
    work: Path,
    *,
    precision: Precision,
    taps: tuple[int, ...] | Callable[[int], tuple[int, ...]] = (),
    max_context: int | None = None,
    slots: int = SLOTS,
    threads: int | None = None,
    progress: Progress = silent,
) -> DataTarget:
    """Open a preset's name, a Hugging Face directory or a .gguf file.

    The batched graph is written into the directory ``work`` the first time. ``taps``: layers whose residual streams
    `BatchedTarget.hidden` gives, or a function of how many layers there are. ``max_context``: most tokens of a
    dialogue; None is 1024, or what the checkpoint allows. ``threads``: None takes the physical cores.

    Raises CheckpointError for a target that cannot be read, BundleError where the graph cannot be written or loaded.
    """
    preset = PRESETS.get(str(target))
    path = Path(target) if preset is None else fetch_target(preset, progress=progress)
    progress("reading the checkpoint")
    checkpoint = read_target(path)
    if callable(taps):
        taps = taps(checkpoint.config.num_layers)
    options = ExportOptions(
        precision=precision,
        max_context=max_context or min(MAX_CONTEXT, checkpoint.config.max_positions),
        batched=True,
        taps=taps,
    )
    identity = _identity(checkpoint)
    key = _digest(
        {"target": identity, "options": [precision, options.max_context, taps], "version": version("dflash-ort")}
    )
    directory = work / f"target-{precision}-{key[:12]}"
    if not (directory / MANIFEST).is_file():
        export_bundle(checkpoint, "none", directory, options, progress=progress)
    manifest = read_manifest(directory)
    check_files(directory, manifest)
    progress("loading the target")
    session = open_session(directory / TARGET_GRAPH, Backend.of(threads=threads))
    spec = manifest.target
    return DataTarget(
        checkpoint,
        identity,
        precision,
        spec,
        Text(directory, manifest),
        BatchedTarget(session, spec, slots=slots, capacity=spec.max_context),
    )


def _identity(checkpoint: TargetCheckpoint) -> str:
    """Not over file names: a checkpoint may be moved."""
    hashes = sorted(value for key, value in checkpoint.source.items() if key.startswith("sha256"))
    return _digest([hashes, checkpoint.tokenizer_json, checkpoint.chat_template])


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
