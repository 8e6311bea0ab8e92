"""Opens a bundle: manifest, tokenizer, and the graphs as models."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash_ort.errors import BundleError
from dflash_ort.models import graph_names as names
from dflash_ort.models.manifest import (
    DRAFT_HEAD_GRAPH,
    DRAFTER_GRAPH,
    ONNXRUNTIME,
    TARGET_GRAPH,
    Manifest,
    check_files,
    read_manifest,
)
from dflash_ort.runtime.drafters import DFlashModel
from dflash_ort.runtime.session import Backend, open_session, runtime_version
from dflash_ort.runtime.target import TargetModel
from dflash_ort.runtime.text import Text


@dataclass(frozen=True, slots=True)
class OpenBundle:
    """A bundle ready to run. ``dflash`` is None when it has no model drafter, or none was asked for."""

    manifest: Manifest
    text: Text
    target: TargetModel
    dflash: DFlashModel | None


def open_bundle(directory: Path, backend: Backend, *, with_drafter: bool, verify_hashes: bool = False) -> OpenBundle:
    """Read and check a bundle and load its graphs. Raises BundleError or ProviderError."""
    manifest = read_manifest(directory)
    check_files(directory, manifest, hashes=verify_hashes)
    check_runtime(directory, manifest, backend)
    text = Text(directory, manifest)
    target = TargetModel(open_session(directory / TARGET_GRAPH, backend), manifest.target)
    dflash = None
    if with_drafter and manifest.drafter.kind == "dflash":
        _, dflash = open_drafter(directory, manifest, backend)
    return OpenBundle(manifest, text, target, dflash)


def open_drafter(
    directory: Path, manifest: Manifest, backend: Backend, *, profile: Path | None = None
) -> tuple[dict[str, Any], DFlashModel]:
    """A model drafter's sessions by graph, and the drafter. ``profile``: as of `open_session`, for each of them."""
    sessions = {
        graph: open_session(
            directory / graph,
            backend.for_drafter(),
            profile=profile and profile.with_name(f"{profile.name}-{graph}"),  # the time in their names is in seconds
        )
        for graph in _drafter(manifest)
    }
    model = DFlashModel(
        *sessions.values(),
        spec=manifest.drafter,
        vocabulary=_draft_vocabulary(directory, manifest),
        hidden_width=len(manifest.target.tapped_layers) * manifest.target.hidden_size,
    )
    return sessions, model


def check_runtime(directory: Path, manifest: Manifest, backend: Backend) -> None:
    """Raise BundleError where this ONNX Runtime is older than a bundle's graphs need, or a provider cannot run them."""
    if version_numbers(runtime_version()) < version_numbers(manifest.oldest_onnxruntime):
        raise BundleError(
            f"'{directory}' needs ONNX Runtime {manifest.oldest_onnxruntime}, this is {runtime_version()}; "
            + ("upgrade it, or export with --portable" if manifest.oldest_onnxruntime == ONNXRUNTIME else "upgrade it")
        )
    if manifest.portable:
        return
    if backend.provider == "openvino" and manifest.precision == "int8":
        raise BundleError(
            f"OpenVINO cannot run the int8 target of '{directory}'; export with --portable, or choose provider cpu"
        )
    if backend.provider == "dnnl":
        raise BundleError(
            f"oneDNN computes the graphs of '{directory}' wrongly; export with --portable, or choose provider cpu"
        )


def check_exportable(drafter: str, portable: bool) -> None:
    """Raise BundleError where this ONNX Runtime could not load what would be exported; ``drafter``: its kind."""
    if drafter == "dflash" and not portable and version_numbers(runtime_version()) < version_numbers(ONNXRUNTIME):
        raise BundleError(
            f"an ordinary drafter needs ONNX Runtime {ONNXRUNTIME}, this is {runtime_version()}; "
            "upgrade it, or export with --portable"
        )


def version_numbers(version: str) -> tuple[int, ...]:
    """Major and minor."""
    return tuple(int(digits) for digits in re.findall(r"\d+", version)[:2])


def _drafter(manifest: Manifest) -> tuple[str, ...]:
    """A model drafter's graphs."""
    return (DRAFTER_GRAPH, DRAFT_HEAD_GRAPH) if manifest.drafter.markov_head else (DRAFTER_GRAPH,)


def _draft_vocabulary(directory: Path, manifest: Manifest) -> np.ndarray:
    path = directory / names.DRAFT_VOCABULARY_FILE
    try:
        vocabulary: np.ndarray = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise BundleError(f"'{path}' cannot be read ({error}); export the bundle again") from error
    size, limit = manifest.drafter.draft_vocab_size, manifest.target.vocab_size
    ok = vocabulary.dtype == np.int64 and vocabulary.shape == (size,)
    if not ok or vocabulary.min() < 0 or vocabulary.max() >= limit:
        raise BundleError(f"'{path}' does not hold {size} token ids below {limit}; export the bundle again")
    return vocabulary


def graph_signatures(directory: Path, manifest: Manifest) -> dict[str, dict[str, dict[str, dict[str, object]]]]:
    """Inputs and outputs of a bundle's graphs: graph, then "inputs" or "outputs", then name, then type and shape."""
    graphs = [TARGET_GRAPH, *(_drafter(manifest) if manifest.drafter.kind == "dflash" else ())]
    signatures, backend = {}, Backend(threads=1)
    check_runtime(directory, manifest, backend)
    for graph in graphs:
        session = open_session(directory / graph, backend)
        sides = {"inputs": session.get_inputs(), "outputs": session.get_outputs()}
        signatures[graph] = {
            side: {
                value.name: {"type": value.type.removeprefix("tensor(").removesuffix(")"), "shape": value.shape}
                for value in values
            }
            for side, values in sides.items()
        }
    return signatures
