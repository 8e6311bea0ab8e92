"""Opens graphs under ONNX Runtime: who computes, on which threads, with which options, and errors in our own words."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dflash_ort.defaults import SPINNINGS, Provider, Spinning
from dflash_ort.errors import BundleError, ProviderError
from dflash_ort.runtime.ort import ort
from dflash_ort.runtime.providers import (
    EXECUTION_PROVIDERS,
    check_provider,
    effective_fpmath,
    prepare_options,
    provider_identity,
    reason_of,
)

MAX_THREADS = 512

_SPINNING: Mapping[Spinning, Mapping[str, str]] = {
    "stop": {"session.force_spinning_stop": "1"},
    "always": {},
    "never": {"session.intra_op.allow_spinning": "0"},
}

# ONNX Runtime accepts any name silently, so a misspelt one would do nothing and say nothing.
SESSION_OPTIONS = frozenset(
    {
        "session.dynamic_block_base",
        "session.force_spinning_stop",
        "session.intra_op.allow_spinning",
        "session.intra_op_thread_affinities",
        "session.set_denormal_as_zero",
        "session.use_env_allocators",
    }
)

_REFUSED = {
    "session.disable_prepacking": "it makes a row's bits depend on its neighbours: speculation would not be lossless",
}

_shared_pool_threads: int | None = None


@dataclass(frozen=True, slots=True)
class Backend:
    """What an engine's graphs run on. Make it with `Backend.of`, which checks it.

    ``fpmath``: what oneDNN or OpenVINO may do to fp32 arithmetic, None for the default provider. ``cpus``: logical
    processors for the pools' threads, one each, of which the first is the caller's and is not moved. ``spinning``:
    whether a pool's threads wait for work busily: until their graph's run ends ("stop"), all the time, or not at all.
    Each graph has a pool, and one that spins takes the cores of the other that works: stopping at the end of a run
    halved a round's time on two cores (docs/log.md). ``shared_pool``: one pool for all graphs of the process instead of
    one each, whose threads wait as ONNX Runtime has them.
    """

    threads: int
    provider: Provider = "cpu"
    fpmath: str | None = None
    cpus: tuple[int, ...] = ()
    spinning: Spinning = "stop"
    shared_pool: bool = False
    options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        *,
        threads: int | None = None,
        provider: str = "cpu",
        fpmath: str | None = None,
        cpus: Sequence[int] = (),
        spinning: str = "stop",
        shared_pool: bool = False,
        session_options: Mapping[str, str] | None = None,
    ) -> Backend:
        """A checked one; ``threads`` None: one for each of ``cpus``, or the physical cores. Raises ProviderError."""
        if threads is None:
            threads = len(cpus) or default_threads()
        if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= MAX_THREADS:
            raise ProviderError(f"threads is {threads!r}; expected a whole number, 1 to {MAX_THREADS}")
        how = next((name for name in SPINNINGS if name == spinning), None)
        if how is None:
            raise ProviderError(f"unknown spinning '{spinning}'; expected {', '.join(SPINNINGS)}")
        known = check_provider(provider)
        _check_cpus(cpus, threads, shared_pool)
        if cpus and known == "openvino":
            raise ProviderError("OpenVINO's threads are its own and cannot be pinned; choose cpus or another provider")
        if shared_pool and how != "stop":
            raise ProviderError("the shared pool's threads wait as ONNX Runtime has them; choose spinning or the pool")
        _check_session_options(session_options or {})
        mode = effective_fpmath(known, fpmath)
        return cls(threads, known, mode, tuple(cpus), how, shared_pool, dict(session_options or {}))

    def under(self, provider: Provider) -> Backend:
        """The same with another provider, at its own fpmath mode. Raises ProviderError when it is not installed."""
        return replace(self, provider=check_provider(provider), fpmath=effective_fpmath(provider, None))

    def for_drafter(self) -> Backend:
        """What a drafter runs on: OpenVINO's copies of key and value buffers would not be updated in place."""
        return self.under("cpu") if self.provider == "openvino" else self

    def key(self) -> dict[str, Any]:
        """What bits and speed depend on."""
        described: dict[str, Any] = {"provider": EXECUTION_PROVIDERS[self.provider], "threads": self.threads}
        more = {
            "fpmath": self.fpmath,
            "cpus": self.cpus,
            "spinning": self.spinning if self.spinning != "stop" else None,
            "shared_pool": self.shared_pool,
            "options": dict(self.options),
            "identity": provider_identity(self.provider),
        }
        return described | {name: value for name, value in more.items() if value}

    def session_options(self) -> dict[str, str]:
        """ONNX Runtime's, by name."""
        # The pool's first thread is the caller's own, which stays where it is; ONNX Runtime counts processors from 1.
        pinned = ";".join(str(cpu + 1) for cpu in self.cpus[1:])
        affinities = {"session.intra_op_thread_affinities": pinned} if pinned else {}
        # OpenVINO has threads of its own, beside which ONNX Runtime's must not wait busily even within a run.
        spinning = "never" if self.provider == "openvino" and self.spinning == "stop" else self.spinning
        return {**_SPINNING[spinning], **affinities, **self.options}


def open_session(path: Path, backend: Backend, *, profile: Path | None = None) -> Any:
    """An InferenceSession. ``profile``: write a profile of its runs to files whose names begin so.

    Raises ProviderError or BundleError with ONNX Runtime's reason in one line.
    """
    so = ort.SessionOptions()
    so.log_severity_level = 3
    if _shared_pool_threads is not None and not backend.shared_pool:
        raise ProviderError("this process has a shared pool, beside which no graph can have its own; pass shared_pool")
    if backend.shared_pool:
        _share_pool(backend.threads)
        so.use_per_session_threads = False
    else:
        so.intra_op_num_threads = backend.threads
    if profile is not None:
        so.enable_profiling, so.profile_file_prefix = True, os.fspath(profile)
    try:
        for name, value in backend.session_options().items():
            so.add_session_config_entry(name, value)
        names = prepare_options(so, backend.provider, backend.fpmath, backend.threads)
        session = ort.InferenceSession(os.fspath(path), so, providers=names, enable_fallback=0)
    except ProviderError:
        raise
    except Exception as error:  # ONNX Runtime's exceptions share no base class
        raise BundleError(f"ONNX Runtime {ort.__version__} cannot load '{path}': {reason_of(error)}") from error
    if EXECUTION_PROVIDERS[backend.provider] not in session.get_providers():
        raise ProviderError(f"provider '{backend.provider}' did not start for '{path}'; choose provider cpu")
    return session


def default_threads() -> int:
    """Physical cores this process may use: a second hardware thread shares the arithmetic units it would need."""
    return max(len({_core_of(cpu) for cpu in _allowed_cpus()}), 1)


def runtime_version() -> str:
    """ONNX Runtime's version."""
    return str(ort.__version__)


def _allowed_cpus() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _core_of(cpu: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list").read_text("ascii").strip()
    except OSError:
        return str(cpu)


def _check_cpus(cpus: Sequence[int], threads: int, shared_pool: bool) -> None:
    if not cpus:
        return
    allowed = _allowed_cpus()
    missing = [cpu for cpu in cpus if cpu not in allowed]
    if missing:
        raise ProviderError(
            f"this process may not use processor {missing[0]}; it may use {', '.join(map(str, sorted(allowed)))}"
        )
    if len(set(cpus)) != len(cpus) or len(cpus) != threads:
        raise ProviderError(f"cpus is {list(cpus)} for {threads} threads; expected as many different processors")
    if shared_pool:
        raise ProviderError("the shared pool's threads cannot be pinned; choose cpus or the shared pool")


def _check_session_options(options: Mapping[str, str]) -> None:
    """Raise ProviderError for a session option that is unknown or would break exactness."""
    for name in options:
        if name in _REFUSED:
            raise ProviderError(f"session option '{name}' is refused: {_REFUSED[name]}")
        if name not in SESSION_OPTIONS:
            raise ProviderError(f"unknown session option '{name}'; known: {', '.join(sorted(SESSION_OPTIONS))}")
        if not isinstance(options[name], str):
            raise ProviderError(f"session option '{name}' is {options[name]!r}; expected text, such as '1'")


def _share_pool(threads: int) -> None:
    """Make the process's one pool, or find it made with as many threads. Raises ProviderError."""
    global _shared_pool_threads
    if _shared_pool_threads == threads:
        return
    if not hasattr(ort, "set_global_thread_pool_sizes"):
        raise ProviderError(f"ONNX Runtime {ort.__version__} has no shared pool; it came later, 1.32 has it")
    try:
        ort.set_global_thread_pool_sizes(threads, 1)
    except Exception as error:  # as above
        had = f"it has {_shared_pool_threads} threads" if _shared_pool_threads else "graphs were loaded without it"
        raise ProviderError(f"this process's shared pool cannot have {threads} threads any more: {had}") from error
    _shared_pool_threads = threads
