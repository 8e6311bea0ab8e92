"""Measures what passes cost on this machine, and keeps it in the user's cache under everything it depends on."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np

from dflash_ort.controller.cost import CostTable, monotone
from dflash_ort.models.manifest import Manifest
from dflash_ort.models.paths import cache_dir
from dflash_ort.progress import Progress, silent
from dflash_ort.runtime.bundle import OpenBundle
from dflash_ort.runtime.cache import KVCache
from dflash_ort.runtime.drafters import NgramDrafter
from dflash_ort.runtime.machine import machine_key
from dflash_ort.runtime.session import Backend
from dflash_ort.runtime.stored import load_json, store_json

CALIBRATION_VERSION = 3
SECONDS = 6.0
"""Calibration stops about here, with fewer repeats on a slow machine; no point is measured less than three times."""
_REPEATS = 9
_LEAST_REPEATS = 3
_CONTEXTS = (16, 512, 2048)
_ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
_INJECTED = 66
_SETTLING_SECONDS = 0.06
"""Plain passes for about this long come before a context's points: after another context's keys and values the first
passes of an int8 model of 138 MB took 7.2, 7.0, 6.3, 5.9 ms, and 5.2 from the eighth on.
"""
_OTHER_SECONDS = 1e-4
"""A round's Python: it is the same for every length, so it need not be exact."""


def calibrate(bundle: OpenBundle, *, progress: Progress = silent, seconds: float = SECONDS) -> CostTable:
    """Medians of interleaved repeats: every point once, then every point again, so that drift falls on all alike.

    Every point is timed just after a one-row pass in the same context, as in a round: what lies in the processor's
    caches then is what the last pass left there, and a small model's passes differ by a third with it. The bundle's
    whole context is measured, whatever an engine's ``max_context``: the table is kept for them all.
    """
    max_context = bundle.manifest.target.max_context
    rows, contexts = _grid(bundle.manifest, max_context)
    injected = min(_INJECTED, max_context - contexts[0])
    scenes = [_Scene(bundle, context, rows, injected) for context in contexts]
    _measure(scenes, seconds, progress)
    verify = monotone([[scene.median("verify", r) for scene in scenes] for r in rows])
    if bundle.dflash is None:
        return CostTable(rows, contexts, verify, (0.0,) * len(contexts), inject_row=0.0, other=_OTHER_SECONDS)
    draft = np.maximum.accumulate([scene.median("draft", 1) for scene in scenes])
    extra = np.median([scene.median("draft", injected) - scene.median("draft", 1) for scene in scenes])
    draft_step = 0.0
    if bundle.dflash.is_sequential and bundle.dflash.spec.max_draft > 1:
        further = np.median([scene.median("all drafts", 1) - scene.median("draft", 1) for scene in scenes])
        draft_step = max(float(further) / (bundle.dflash.spec.max_draft - 1), 0.0)
    dearer = np.median([scene.median("after draft", 1) - scene.median("verify", 1) for scene in scenes])
    return CostTable(
        rows,
        contexts,
        verify,
        tuple(float(d) for d in draft),
        inject_row=max(float(extra) / max(injected - 1, 1), 0.0),
        other=_OTHER_SECONDS,
        after_draft=max(float(dearer), 0.0),
        draft_step=draft_step,
    )


def known_costs(manifest: Manifest, backend: Backend) -> tuple[CostTable | None, str | None]:
    """The table measured for just this bundle, machine, backend and runtime, if there is one; and a warning, if it is
    damaged.
    """
    path = costs_path(manifest, backend)
    if not os.path.isfile(path):  # nor where the cache cannot be looked into: writing will say so, once
        return None, None
    raw, warning = load_json(path, "the calibration")
    if raw is None:
        return None, warning
    try:
        return CostTable.from_json(raw), None
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        return None, f"the calibration '{path}' is damaged ({error}); it is measured again"


def remember_costs(manifest: Manifest, backend: Backend, costs: CostTable) -> str | None:
    """Keep a table; returns a warning where that was not possible."""
    return store_json(costs_path(manifest, backend), asdict(costs), "the calibration")


def costs_path(manifest: Manifest, backend: Backend) -> Path:
    """Where the table for this bundle, machine, backend and runtime lies."""
    key = machine_key(backend, bundle=manifest.identity, calibration=CALIBRATION_VERSION)
    return cache_dir() / "calibration" / f"{key}.json"


def _grid(manifest: Manifest, max_context: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    most = max(manifest.drafter.max_draft, NgramDrafter().max_draft) + 1
    rows = (*(r for r in _ROWS if r < most), most)
    contexts = tuple(c for c in _CONTEXTS if c + _INJECTED + most <= max_context)
    return tuple(r for r in rows if r < max_context), contexts or (1,)


class _Scene:
    """A request of some context, and the seconds of what was run in it, by what it was and how many rows it had."""

    def __init__(self, bundle: OpenBundle, context: int, rows: tuple[int, ...], injected: int) -> None:
        self.context, self.rows = context, rows
        self._times: dict[tuple[str, int], list[float]] = defaultdict(list)
        self._target, self._drafter = bundle.target, bundle.dflash
        random = np.random.default_rng(context)
        self._cache = _filled(self._target.new_cache(context + max(rows) + 2), context)
        self._tokens = random.integers(0, self._target.spec.vocab_size, max(rows))
        if self._drafter is not None:
            room = context + injected + self._drafter.spec.block_size
            self._draft_cache = _filled(self._drafter.new_cache(room), context)
            self._hidden = random.standard_normal((injected, self._drafter.hidden_width)).astype(np.float32)

    def run(self) -> None:
        """Everything once, after some passes by which the processor's caches hold what they hold in a long answer."""
        deadline = perf_counter() + _SETTLING_SECONDS
        while perf_counter() < deadline:
            self._pass(1)
        for count in self.rows:
            self._pass(1)
            self._time("verify", count, self._pass)
        if self._drafter is None:
            return
        for count in sorted({1, len(self._hidden)}):
            self._pass(1)
            self._time("draft", count, self._block)
            self._time("after draft", 1, self._pass)
        if not self._drafter.is_sequential:
            return
        self._pass(1)
        self._time("all drafts", 1, partial(self._block, drafts=self._drafter.spec.max_draft))

    def median(self, what: str, count: int) -> float:
        return float(np.median(self._times[what, count]))

    def clear(self) -> None:
        """Forget the times."""
        self._times.clear()

    def _time(self, what: str, count: int, run: Callable[[int], None]) -> None:
        began = perf_counter()
        run(count)
        self._times[what, count].append(perf_counter() - began)

    def _pass(self, count: int) -> None:
        self._cache.length.trim(self.context)
        self._target.run(self._cache, self._tokens[:count], count)

    def _block(self, count: int, drafts: int = 1) -> None:
        assert self._drafter is not None
        self._draft_cache.length.trim(self.context)
        self._drafter.run(self._draft_cache, [self._hidden[:count]], 0).greedy(drafts)


def _filled(cache: KVCache, context: int) -> KVCache:
    """Make the buffers' memory real and claim ``context`` rows: what they hold does not change what a pass costs."""
    cache.fill(0.01)
    cache.length.append(context)
    return cache


def _measure(scenes: Sequence[_Scene], seconds: float, progress: Progress) -> None:
    for scene in scenes:  # the first of each allocates
        scene.run()
        scene.clear()
    deadline = perf_counter() + seconds
    for repeat in range(_REPEATS):
        progress("measuring what passes cost here (once per bundle and machine)", repeat / _REPEATS)
        for scene in scenes:
            scene.run()
        if repeat + 1 >= _LEAST_REPEATS and perf_counter() > deadline:
            break
