"""Who really computes a bundle's graphs: kernels and their time by provider, from ONNX Runtime's profile."""

from __future__ import annotations

import json
import tempfile
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from dflash_ort.models.manifest import TARGET_GRAPH, Manifest
from dflash_ort.runtime.bundle import check_runtime, open_drafter
from dflash_ort.runtime.session import Backend, open_session
from dflash_ort.runtime.target import TargetModel

_ROWS = 4
_CONTEXT = 64
_PASSES = 7


@dataclass(frozen=True, slots=True)
class Share:
    """One provider's part of one graph's pass. ``operators``: kernels by type; a subgraph that a provider compiled is
    one kernel of its own name. ``seconds``: sum of the kernels' medians.
    """

    provider: str
    kernels: int
    seconds: float
    operators: dict[str, int]


def placement(directory: Path, manifest: Manifest, backend: Backend) -> dict[str, list[Share]]:
    """By graph, who computed a pass of the target (four rows) and a block of the drafter. Raises as opening does."""
    check_runtime(directory, manifest, backend)
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        found = {TARGET_GRAPH: _of_target(directory, manifest, backend, work)}
        if manifest.drafter.kind == "dflash":
            found |= _of_drafter(directory, manifest, backend, work)
    return found


def _of_target(directory: Path, manifest: Manifest, backend: Backend, work: Path) -> list[Share]:
    session = open_session(directory / TARGET_GRAPH, backend, profile=work / "target")
    target = TargetModel(session, manifest.target)
    rows = min(_ROWS, manifest.target.max_context - 1)
    context = min(_CONTEXT, manifest.target.max_context - rows)
    tokens = np.random.default_rng(0).integers(0, manifest.target.vocab_size, context + rows)
    cache = target.new_cache(context + rows + 2)
    target.run(cache, tokens[:context], 0)
    for _ in range(_PASSES):
        cache.length.trim(context)
        target.run(cache, tokens[:rows], rows)
    return _shares(session)


def _of_drafter(directory: Path, manifest: Manifest, backend: Backend, work: Path) -> dict[str, list[Share]]:
    sessions, model = open_drafter(directory, manifest, backend, profile=work / "drafter")
    cache = model.new_cache(_PASSES + manifest.drafter.block_size)
    rows = np.random.default_rng(0).standard_normal((1, model.hidden_width)).astype(np.float32)
    for _ in range(_PASSES):
        model.run(cache, [rows], 0).greedy(manifest.drafter.max_draft)
    return {graph: _shares(session) for graph, session in sessions.items()}


def _shares(session: Any) -> list[Share]:
    """From the profile of a session, which ends with it; the slowest provider first."""
    events = json.loads(Path(session.end_profiling()).read_text("utf-8"))
    times: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            arguments = event["args"]
            times[arguments["provider"], event["name"], arguments["op_name"]].append(event["dur"])
    seconds: Counter[str] = Counter()
    operators: dict[str, Counter[str]] = defaultdict(Counter)
    for (provider, _, operator), durations in times.items():
        seconds[provider] += median(durations) / 1e6  # type: ignore[assignment]
        operators[provider][_plain(operator)] += 1
    return [
        Share(provider, operators[provider].total(), float(spent), dict(operators[provider].most_common()))
        for provider, spent in seconds.most_common()
    ]


def _plain(operator: str) -> str:
    """Compiled subgraphs have numbers of their own behind their providers' names."""
    return operator.partition("_")[0] + " subgraph" if operator.rpartition("_")[2].isdigit() else operator
