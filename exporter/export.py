"""Checkpoints to a bundle: graphs, weights, tokenizer, template and manifest, written aside and then put in place.

Exporter and runtime never meet: what must be *run* to finish a bundle (its self-check) is handed in by the caller.
"""

from __future__ import annotations

import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import onnx

from dflash_ort.errors import BundleError, CheckpointError
from dflash_ort.exporter.builder import GraphBuilder
from dflash_ort.exporter.checkpoint import DrafterCheckpoint, TargetCheckpoint
from dflash_ort.exporter.drafter_graph import (
    build_draft_head_graph,
    build_drafter_graph,
    draft_vocabulary,
    write_draft_vocabulary,
)
from dflash_ort.exporter.drafter_reader import read_drafter
from dflash_ort.exporter.gguf_reader import read_gguf
from dflash_ort.exporter.hf_reader import read_hf_directory
from dflash_ort.exporter.linear import Precision, recipe
from dflash_ort.exporter.target_graph import build_target_graph, write_embedding
from dflash_ort.models.manifest import (
    CHAT_TEMPLATE,
    DRAFT_HEAD_GRAPH,
    DRAFTER_GRAPH,
    MANIFEST,
    ONNXRUNTIME,
    POLICY,
    PORTABLE_ONNXRUNTIME,
    TARGET_GRAPH,
    TOKENIZER,
    Manifest,
    Quality,
    SelfCheck,
    file_entry,
)
from dflash_ort.models.spec import DrafterSpec, ModelSpec
from dflash_ort.progress import Progress, silent
from dflash_ort.whole import put_in_place

Check = Callable[[Path, "Path | None"], "tuple[Quality, SelfCheck]"]
"""Runs a written bundle, given its directory and that of its fp32 twin (None when it is fp32 itself)."""


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """How a bundle is to be made; ``max_context`` None is the checkpoint's own."""

    precision: Precision = "fp32"
    draft_precision: Precision = "int8"
    """Drafts cannot change the text, so the drafter is as fast as it can be."""
    max_context: int | None = None
    pad_attention: bool = True
    """False leaves out the two-row floor: faster for plain decoding and *not exact*. For benchmarks and tests."""
    batched: bool = False
    """Write the target's batched form (see `target_graph`): for making training data, no engine runs it."""
    portable: bool = False
    """Graphs for ONNX Runtime 1.21 and its oneDNN provider (see `GraphBuilder`)."""
    taps: tuple[int, ...] = ()
    """Layers to tap, where there is no model drafter to name them."""
    policy: Path | None = None
    """A policy file to lay into the bundle."""
    name: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The caller's own arguments, for the provenance."""


def read_target(path: Path) -> TargetCheckpoint:
    """Read a .gguf file or a Hugging Face directory. Raises CheckpointError."""
    if path.is_file() and path.suffix == ".gguf":
        return read_gguf(path)
    if path.is_dir():
        return read_hf_directory(path)
    if path.is_file():
        raise CheckpointError(f"'{path}' is not a checkpoint; expected a Hugging Face directory or a .gguf file")
    raise CheckpointError(f"there is no checkpoint at '{path}'; expected a Hugging Face directory or a .gguf file")


def read_drafter_option(option: str) -> DrafterCheckpoint | Literal["ngram", "none"]:
    """A drafter by what the command line calls it: a path to a DFlash checkpoint, "ngram" or "none"."""
    return option if option in ("ngram", "none") else read_drafter(Path(option))  # type: ignore[return-value]


def export_bundle(
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint | Literal["ngram", "none"],
    output: Path,
    options: ExportOptions,
    *,
    force: bool = False,
    check: Check | None = None,
    progress: Progress = silent,
) -> Manifest:
    """Write a bundle directory; it appears whole or not at all.

    ``check`` runs the bundle before it is put in place. Raises CheckpointError when target and drafter do not fit,
    BundleError when ``output`` exists (without ``force``) or cannot be written.
    """
    check_output(output, force)
    if isinstance(drafter, DrafterCheckpoint):
        drafter.check_fits(target.config)
    spec, drafter_spec = _specs(target, drafter, options)
    with _building(output) as work:
        bundle = work / "bundle"
        manifest = _write(bundle, target, drafter, spec, drafter_spec, options, progress)
        if check is not None:
            quality, self_check = check(bundle, _twin(work, target, spec, options, progress))
            manifest = replace(manifest, quality=quality, self_check=self_check)
            (bundle / MANIFEST).write_text(manifest.to_json(), "utf-8")
        put_in_place(bundle, output, work)
    return manifest


def _specs(
    target: TargetCheckpoint, drafter: DrafterCheckpoint | Literal["ngram", "none"], options: ExportOptions
) -> tuple[ModelSpec, DrafterSpec]:
    config = target.config
    max_context = options.max_context if options.max_context is not None else config.max_positions
    if not 2 <= max_context <= config.max_positions:
        raise CheckpointError(
            f"max_context is {max_context}; this checkpoint's positions allow 2 to {config.max_positions}"
        )
    vocab_size = min(config.vocab_size, _tokenizer_size(target.tokenizer_json))
    taps = options.taps
    if any(not 0 <= layer < config.num_layers for layer in taps):
        raise CheckpointError(f"the taps are {list(taps)}; this target has layers 0 to {config.num_layers - 1}")
    drafter_spec = DrafterSpec(kind="none")
    if isinstance(drafter, DrafterCheckpoint):
        taps = drafter.target_layer_ids
        drafter_spec = DrafterSpec(
            kind="dflash",
            block_size=drafter.block_size,
            mask_token_id=drafter.mask_token_id,
            num_layers=drafter.config.num_layers,
            num_kv_heads=drafter.config.num_kv_heads,
            head_dim=drafter.config.head_dim,
            draft_vocab_size=len(draft_vocabulary(drafter, vocab_size)),
            next_token=drafter.extensions.next_token,
            markov_head=drafter.extensions.markov_head,
        )
    elif drafter == "ngram":
        drafter_spec = DrafterSpec(kind="ngram")
    eos = tuple(token for token in target.eos_token_ids if 0 <= token < vocab_size)
    spec = ModelSpec(
        architecture=config.architecture,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=vocab_size,
        max_context=max_context,
        eos_token_ids=eos,
        bos_token_id=target.bos_token_id,
        tapped_layers=taps,
    )
    return spec, drafter_spec


def _tokenizer_size(tokenizer_json: str) -> int:
    """One more than the last id the tokenizer knows; rows of the LM head beyond it are padding, never to be sampled.

    Not the number of tokens: a vocabulary may have gaps (a GGUF's unused rows).
    """
    from tokenizers import Tokenizer

    try:
        return max(Tokenizer.from_str(tokenizer_json).get_vocab(with_added_tokens=True).values()) + 1
    except Exception as error:  # tokenizers raises plain Exception
        raise CheckpointError(f"the checkpoint's tokenizer.json cannot be read ({error}); fetch it again") from error


def _write(
    bundle: Path,
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint | Literal["ngram", "none"],
    spec: ModelSpec,
    drafter_spec: DrafterSpec,
    options: ExportOptions,
    progress: Progress,
) -> Manifest:
    """Everything but the self-check's results."""
    bundle.mkdir()
    _write_target(bundle, target, spec, options, drafter_spec.block_size, progress)
    draft_precision: Precision | None = None
    if isinstance(drafter, DrafterCheckpoint):
        draft_precision = options.draft_precision
        progress("writing the drafter's graph")
        positions = spec.max_context + drafter_spec.block_size + 1
        graph = build_drafter_graph(
            drafter,
            target,
            recipe(draft_precision),
            positions=positions,
            vocab_size=spec.vocab_size,
            portable=options.portable,
        )
        _save(graph, bundle / DRAFTER_GRAPH)
        if drafter.extensions.markov_head:
            head = build_draft_head_graph(
                drafter,
                target,
                recipe(draft_precision),
                vocab_size=spec.vocab_size,
                portable=options.portable,
            )
            _save(head, bundle / DRAFT_HEAD_GRAPH)
        write_draft_vocabulary(drafter, bundle, spec.vocab_size)
    progress("hashing")
    manifest = Manifest(
        name=options.name or str(target.source.get("name", "model")),
        target=spec,
        drafter=drafter_spec,
        precision=options.precision,
        draft_precision=draft_precision,
        files={path.name: file_entry(path) for path in sorted(bundle.iterdir())},
        # Of ordinary graphs only a drafter's need more: its attention is not causal.
        oldest_onnxruntime=PORTABLE_ONNXRUNTIME if options.portable or drafter_spec.kind != "dflash" else ONNXRUNTIME,
        portable=options.portable,
        provenance={
            "arguments": dict(options.arguments),
            "target": dict(target.source),
            "drafter": dict(drafter.source) if isinstance(drafter, DrafterCheckpoint) else drafter,
            "pad_attention": options.pad_attention,
            "batched": options.batched,
            "versions": {name: version(name) for name in ("dflash-ort", "onnx", "onnx-ir", "numpy")}
            | {"python": platform.python_version()},
        },
    )
    (bundle / MANIFEST).write_text(manifest.to_json(), "utf-8")
    if options.policy is not None:
        shutil.copyfile(options.policy, bundle / POLICY)
    return manifest


def _save(graph: GraphBuilder, path: Path) -> None:
    graph.save(path, f"{path.name}.data")
    onnx.checker.check_model(path)


def _write_target(
    directory: Path,
    target: TargetCheckpoint,
    spec: ModelSpec,
    options: ExportOptions,
    block: int,
    progress: Progress,
) -> None:
    progress(f"writing the target's graph ({options.precision})")
    write_embedding(target, directory)
    graph = build_target_graph(
        target,
        recipe(options.precision),
        positions=spec.max_context + block + 1,
        vocab_size=spec.vocab_size,
        taps=spec.tapped_layers,
        pad_attention=options.pad_attention,
        batched=options.batched,
        portable=options.portable,
    )
    _save(graph, directory / TARGET_GRAPH)
    (directory / TOKENIZER).write_text(target.tokenizer_json, "utf-8")
    if target.chat_template is not None:
        (directory / CHAT_TEMPLATE).write_text(target.chat_template, "utf-8")


def _twin(
    work: Path, target: TargetCheckpoint, spec: ModelSpec, options: ExportOptions, progress: Progress
) -> Path | None:
    """An fp32 bundle without a drafter to compare with, beside the one that is being made."""
    if options.precision == "fp32":
        return None
    options = replace(options, precision="fp32", pad_attention=True)
    twin = work / "fp32"
    _write(twin, target, "none", replace(spec, tapped_layers=()), DrafterSpec(kind="none"), options, progress)
    return twin


def check_output(output: Path, force: bool) -> None:
    """Raise BundleError unless a bundle may be written to ``output``."""
    try:
        if not output.exists():
            return
        empty = output.is_dir() and not any(output.iterdir())
        is_bundle = (output / MANIFEST).is_file()
    except OSError as error:
        raise BundleError(f"cannot look at '{output}': {error.strerror}; choose another --output") from error
    if not empty and not is_bundle:
        raise BundleError(f"'{output}' exists and is not a bundle; choose another --output")
    if not empty and not force:
        raise BundleError(f"'{output}' exists; pass --force to replace it, or choose another --output")


@contextmanager
def _building(output: Path) -> Iterator[Path]:
    """A directory beside the output that is gone afterwards, whatever happens."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".partial", dir=output.parent))
    except OSError as error:
        raise BundleError(
            f"cannot write beside '{output}': {error.strerror or error}; choose another --output"
        ) from error
    try:
        yield work
    except OSError as error:
        raise BundleError(
            f"cannot write the bundle '{output}': {error.strerror or error}; free some space or choose another --output"
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
