"""Measures what passes cost on this machine, and keeps it in the user's cache under everything it depends on."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from time import perf_counter

import numpy as np

from dflash_ort.controller.cost import CostTable, monotone
from dflash_ort.models.manifest import Manifest
from dflash_ort.models.paths import cache_dir
from dflash_ort.progress import Progress, silent
from dflash_ort.runtime.bundle import OpenBundle
from dflash_ort.runtime.cache import KVCache
from dflash_ort.runtime.drafters import DFlashModel, NgramDrafter
from dflash_ort.runtime.machine import machine_key
from dflash_ort.runtime.stored import load_json, store_json

CALIBRATION_VERSION = 1
SECONDS = 6.0
"""Calibration stops about here, with fewer repeats on a slow machine; no point is measured less than three times."""
_REPEATS = 9
_LEAST_REPEATS = 3
_CONTEXTS = (16, 512, 2048)
_ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
_INJECTED = 66
_OTHER_SECONDS = 1e-4
"""A round's Python: it is the same for every length, so it need not be exact."""


def calibrate(bundle: OpenBundle, *, progress: Progress = silent, seconds: float = SECONDS) -> CostTable:
    """Medians of interleaved repeats: every point once, then every point again, so that drift falls on all alike.

    The bundle's whole context is measured, whatever an engine's ``max_context``: the table is kept for them all.
    """
    max_context = bundle.manifest.target.max_context
    rows, contexts = _grid(bundle.manifest, max_context)
    injected = min(_INJECTED, max_context - contexts[0])
    points: dict[tuple[str, int, int], Callable[[], None]] = {}
    for context in contexts:
        _add_target(points, bundle, context, rows)
        if bundle.dflash is not None:
            _add_drafter(points, bundle.dflash, context, injected)
    times = _measure(points, seconds, progress)
    verify = monotone([[times["verify", r, c] for c in contexts] for r in rows])
    if bundle.dflash is None:
        return CostTable(rows, contexts, verify, draft=(0.0,) * len(contexts), inject_row=0.0, other=_OTHER_SECONDS)
    draft = np.maximum.accumulate([times["draft", 1, c] for c in contexts])
    extra = np.median([times["draft", injected, c] - times["draft", 1, c] for c in contexts])
    return CostTable(
        rows,
        contexts,
        verify,
        tuple(float(d) for d in draft),
        inject_row=max(float(extra) / max(injected - 1, 1), 0.0),
        other=_OTHER_SECONDS,
    )


def known_costs(manifest: Manifest, threads: int) -> tuple[CostTable | None, str | None]:
    """The table measured for just this bundle, machine, threads and runtime, if there is one; and a warning, if it is
    damaged.
    """
    path = costs_path(manifest, threads)
    if not os.path.isfile(path):  # nor where the cache cannot be looked into: writing will say so, once
        return None, None
    raw, warning = load_json(path, "the calibration")
    if raw is None:
        return None, warning
    try:
        return _decode(raw), None
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        return None, f"the calibration '{path}' is damaged ({error}); it is measured again"


def remember_costs(manifest: Manifest, threads: int, costs: CostTable) -> str | None:
    """Keep a table; returns a warning where that was not possible."""
    return store_json(costs_path(manifest, threads), asdict(costs), "the calibration")


def costs_path(manifest: Manifest, threads: int) -> Path:
    """Where the table for this bundle, machine, threads and runtime lies."""
    key = machine_key(bundle=manifest.identity, threads=threads, calibration=CALIBRATION_VERSION)
    return cache_dir() / "calibration" / f"{key}.json"


def _grid(manifest: Manifest, max_context: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    most = max(manifest.drafter.block_size, NgramDrafter().max_draft + 1)
    rows = (*(r for r in _ROWS if r < most), most)
    contexts = tuple(c for c in _CONTEXTS if c + _INJECTED + most <= max_context)
    return tuple(r for r in rows if r < max_context), contexts or (1,)


def _fill(cache: KVCache, context: int) -> None:
    """Make the buffers' memory real and claim ``context`` rows: what they hold does not change what a pass costs."""
    cache.fill(0.01)
    cache.length.append(context)


def _add_target(
    points: dict[tuple[str, int, int], Callable[[], None]], bundle: OpenBundle, context: int, rows: tuple[int, ...]
) -> None:
    target = bundle.target
    cache = target.new_cache(context + max(rows) + 2)
    _fill(cache, context)
    tokens = np.random.default_rng(context).integers(0, target.spec.vocab_size, max(rows))

    def run(count: int) -> None:
        cache.length.trim(context)
        target.run(cache, tokens[:count], count)

    for count in rows:
        points["verify", count, context] = lambda count=count: run(count)  # type: ignore[misc]


def _add_drafter(
    points: dict[tuple[str, int, int], Callable[[], None]], model: DFlashModel, context: int, injected: int
) -> None:
    cache = model.new_cache(context + injected + model.spec.block_size)
    _fill(cache, context)
    hidden = np.random.default_rng(context).standard_normal((injected, model.hidden_width)).astype(np.float32)

    def run(count: int) -> None:
        cache.length.trim(context)
        model.run(cache, [hidden[:count]], 0)

    for count in sorted({1, injected}):
        points["draft", count, context] = lambda count=count: run(count)  # type: ignore[misc]


def _measure(
    points: dict[tuple[str, int, int], Callable[[], None]], seconds: float, progress: Progress
) -> dict[tuple[str, int, int], float]:
    for run in points.values():  # the first of each allocates
        run()
    times: dict[tuple[str, int, int], list[float]] = {point: [] for point in points}
    deadline = perf_counter() + seconds
    for repeat in range(_REPEATS):
        progress("measuring what passes cost here (once per bundle and machine)", repeat / _REPEATS)
        for point, run in points.items():
            began = perf_counter()
            run()
            times[point].append(perf_counter() - began)
        if repeat + 1 >= _LEAST_REPEATS and perf_counter() > deadline:
            break
    return {point: float(np.median(measured)) for point, measured in times.items()}


def _decode(raw: dict[str, object]) -> CostTable:
    """A table from JSON; raises KeyError, TypeError or ValueError when it is not one."""
    rows = tuple(int(r) for r in raw["rows"])  # type: ignore[attr-defined]
    contexts = tuple(int(c) for c in raw["contexts"])  # type: ignore[attr-defined]
    verify = tuple(tuple(float(x) for x in line) for line in raw["verify"])  # type: ignore[attr-defined]
    draft = tuple(float(x) for x in raw["draft"])  # type: ignore[attr-defined]
    numbers = np.array([*[x for line in verify for x in line], *draft, raw["inject_row"], raw["other"]], np.float64)
    shapes_fit = (
        len(verify) == len(rows) and all(len(line) == len(contexts) for line in verify) and len(draft) == len(contexts)
    )
    ascending = rows[:1] == (1,) and all(a < b for axis in (rows, contexts) for a, b in pairwise(axis))
    numbers_fit = (
        np.isfinite(numbers).all() and (numbers >= 0.0).all() and (numbers[: len(rows) * len(contexts)] > 0).all()
    )
    if not (shapes_fit and contexts and ascending and numbers_fit):
        raise ValueError("shapes or numbers that cannot be")
    return CostTable(rows, contexts, verify, draft, float(raw["inject_row"]), float(raw["other"]))  # type: ignore[arg-type]
