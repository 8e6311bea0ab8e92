"""Which provider runs a bundle here when nobody says: the fastest of those installed that is exact, by measurement."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import Any

import numpy as np

from dflash_ort.defaults import Provider
from dflash_ort.errors import BundleError, DFlashError, InexactError
from dflash_ort.models.manifest import Manifest, read_manifest
from dflash_ort.models.paths import cache_dir
from dflash_ort.progress import Progress, silent
from dflash_ort.runtime.bundle import check_runtime, open_bundle
from dflash_ort.runtime.exactness import make_exact
from dflash_ort.runtime.machine import machine_key
from dflash_ort.runtime.providers import installed_providers
from dflash_ort.runtime.session import Backend
from dflash_ort.runtime.stored import load_json, store_json
from dflash_ort.runtime.target import TargetModel

CHOICE_VERSION = 2
_ROWS = (1, 2, 4, 8)
_CONTEXT = 128
_REPEATS = 9
_CLEARLY = 0.97
"""Another provider must take less than this share of the first one's time: above that, noise would choose."""
_measuring = Lock()
"""Two at a time would measure each other."""


@dataclass(frozen=True, slots=True)
class Choice:
    """``seconds``: of target passes of 1, 2, 4 and 8 rows, by provider, the default one first; ``refused``: why others
    were not timed; ``note``: why nothing was.
    """

    provider: Provider
    seconds: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    note: str = ""

    def reason(self) -> str:
        """In one line."""
        if self.note:
            return self.note
        times = self.times()
        shown = [f"{name} {times[name]:.2f}" for name in self.seconds]
        shown += [f"{name}: {why}" for name, why in self.refused.items()]
        return f"measured, passes in units of {next(iter(self.seconds))}'s: {', '.join(shown)}"

    def times(self) -> dict[str, float]:
        """How long passes take in units of the first provider's, geometric mean over the row counts."""
        first = np.array(next(iter(self.seconds.values())))
        return {name: math.exp(float(np.mean(np.log(np.array(mine) / first)))) for name, mine in self.seconds.items()}


def choose_provider(
    directory: Path, backend: Backend, *, measure: bool = True, again: bool = False, progress: Progress = silent
) -> Choice:
    """The provider for a bundle on this machine, with the other settings of ``backend``.

    Measured when it is first asked for (or ``again``) and kept in the user's cache; without ``measure``, and when
    nothing is known, the default provider. While it measures, every provider's target is in memory; and a process that
    has tried oneDNN cannot give it another fpmath mode any more. Raises BundleError.
    """
    candidates = installed_providers()
    if len(candidates) == 1:
        return Choice(candidates[0], note="the only one installed")
    manifest = read_manifest(directory)
    backends = {name: backend.under(name) for name in candidates}
    of = {name: one.key() for name, one in backends.items()}
    key = machine_key(backends["cpu"], bundle=manifest.identity, choice=CHOICE_VERSION, of=of)
    path = cache_dir() / "providers" / f"{key}.json"
    with _measuring:
        known = None if again else _read(path)
        if known is not None:
            return known
        if not measure:
            return Choice("cpu", note="the default; not compared yet")
        choice, settled = _measured(directory, manifest, backends, progress)
        if settled:
            store_json(path, asdict(choice), "the choice of provider")
        return choice


def resolve_backend(
    directory: Path, *, provider: str, measure: bool = True, progress: Progress = silent, **settings: Any
) -> Backend:
    """A checked backend whose provider, where it is "auto", is chosen for this bundle.

    ``settings``: as of `Backend.of`. Raises ProviderError and BundleError.
    """
    backend = Backend.of(provider="cpu" if provider == "auto" else provider, **settings)
    if provider != "auto":
        return backend
    return backend.under(choose_provider(directory, backend, measure=measure, progress=progress).provider)


def _read(path: Path) -> Choice | None:
    raw, _ = load_json(path, "the choice of provider")
    try:
        seconds = {str(name): tuple(map(float, times)) for name, times in (raw or {})["seconds"].items()}
        choice = Choice(**(raw or {}) | {"seconds": seconds})
        return choice if choice.provider in seconds and choice.reason() else None
    except (TypeError, ValueError, KeyError, AttributeError, StopIteration):
        return None


def _measured(
    directory: Path, manifest: Manifest, backends: Mapping[Provider, Backend], progress: Progress
) -> tuple[Choice, bool]:
    """Every candidate's target in turn, repeat by repeat, so that what else the machine does falls on all alike.

    Also whether that is settled: a candidate that failed may do another time, when memory is free, say.
    """
    targets: dict[Provider, TargetModel] = {}
    refused: dict[str, str] = {}
    settled = True
    for name, backend in backends.items():
        progress(f"trying provider {name} (once per bundle and machine)")
        try:
            check_runtime(directory, manifest, backend)
        except BundleError as error:
            refused[name] = str(error)
            continue
        try:
            targets[name] = _exact_target(directory, manifest, backend, progress)
        except InexactError:
            refused[name] = "its rows are not independent"
        except DFlashError as error:
            refused[name], settled = str(error), False
    if not targets:  # loading will say what is wrong, or that it is not exact
        why = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        return Choice("cpu", refused=refused, note=why), False
    runs = {name: _Passes(target) for name, target in targets.items()}
    for repeat in range(_REPEATS):
        progress("comparing providers (once per bundle and machine)", repeat / _REPEATS)
        for run in runs.values():
            run.repeat()
    first = next(iter(runs))
    found = Choice(first, {name: run.medians() for name, run in runs.items()}, refused)
    times = found.times()
    best = min(runs, key=lambda name: times[name])
    return replace(found, provider=best) if times[best] < _CLEARLY else found, settled


def _exact_target(directory: Path, manifest: Manifest, backend: Backend, progress: Progress) -> TargetModel:
    target = open_bundle(directory, backend, with_drafter=False).target
    make_exact(target, identity=manifest.identity, backend=backend, progress=progress)
    return target


class _Passes:
    """A target's passes of some row counts behind one context."""

    def __init__(self, target: TargetModel) -> None:
        self._target = target
        limit = target.spec.max_context
        self._rows = [rows for rows in _ROWS if rows < limit]
        context = min(_CONTEXT, limit - max(self._rows))
        self._tokens = np.random.default_rng(0).integers(0, target.spec.vocab_size, max(context, max(self._rows)))
        self._cache = target.new_cache(context + max(self._rows) + 2)
        if context:
            target.run(self._cache, self._tokens[:context], 0)
        self._context = context
        self._seconds: list[list[float]] = [[] for _ in self._rows]
        for rows in self._rows:  # the first of each allocates
            self._time(rows)

    def repeat(self) -> None:
        for rows, seconds in zip(self._rows, self._seconds, strict=True):
            seconds.append(self._time(rows))

    def medians(self) -> tuple[float, ...]:
        return tuple(float(np.median(seconds)) for seconds in self._seconds)

    def _time(self, rows: int) -> float:
        self._cache.length.trim(self._context)
        began = perf_counter()
        self._target.run(self._cache, self._tokens[:rows], rows)
        return perf_counter() - began
