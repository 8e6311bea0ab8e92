"""Opens a bundle: manifest, tokenizer, and the graphs as models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflash_ort.errors import BundleError
from dflash_ort.models import graph_names as names
from dflash_ort.models.manifest import (
    DRAFT_HEAD_GRAPH,
    DRAFTER_GRAPH,
    TARGET_GRAPH,
    Manifest,
    check_files,
    read_manifest,
)
from dflash_ort.runtime.drafters import DFlashModel
from dflash_ort.runtime.session import open_session
from dflash_ort.runtime.target import TargetModel
from dflash_ort.runtime.text import Text

DEFAULT_OPTIONS: Mapping[str, str] = {"session.force_spinning_stop": "1"}
"""Each graph has a thread pool that spins while it waits, and while one graph runs the other's pool would take its
cores:
stopping the spin at the end of a run halved a round's time on two cores (docs/log.md)."""


@dataclass(frozen=True, slots=True)
class OpenBundle:
    """A bundle ready to run. ``dflash`` is None when it has no model drafter, or none was asked for."""

    manifest: Manifest
    text: Text
    target: TargetModel
    dflash: DFlashModel | None


def open_bundle(
    directory: Path,
    *,
    threads: int,
    session_options: Mapping[str, str],
    with_drafter: bool,
    verify_hashes: bool = False,
) -> OpenBundle:
    """Read and check a bundle and load its graphs. Raises BundleError or ProviderError."""
    manifest = read_manifest(directory)
    check_files(directory, manifest, hashes=verify_hashes)
    options = {**DEFAULT_OPTIONS, **session_options}
    text = Text(directory, manifest)
    target = TargetModel(open_session(directory / TARGET_GRAPH, threads=threads, options=options), manifest.target)
    dflash = None
    if with_drafter and manifest.drafter.kind == "dflash":
        dflash = DFlashModel(
            *(open_session(directory / graph, threads=threads, options=options) for graph in _drafter(manifest)),
            spec=manifest.drafter,
            vocabulary=_draft_vocabulary(directory, manifest),
            hidden_width=len(manifest.target.tapped_layers) * manifest.target.hidden_size,
        )
    return OpenBundle(manifest, text, target, dflash)


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
    signatures = {}
    for graph in graphs:
        session = open_session(directory / graph, threads=1, options={})
        sides = {"inputs": session.get_inputs(), "outputs": session.get_outputs()}
        signatures[graph] = {
            side: {
                value.name: {"type": value.type.removeprefix("tensor(").removesuffix(")"), "shape": value.shape}
                for value in values
            }
            for side, values in sides.items()
        }
    return signatures
