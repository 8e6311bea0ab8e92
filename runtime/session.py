"""Opens graphs under ONNX Runtime: the options we allow, the threads we use, and errors in our own words."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Before the import: an on-prem product does not phone home.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime as ort

from dflash_ort.errors import BundleError, ProviderError

PROVIDER = "CPUExecutionProvider"
MAX_THREADS = 512

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


def default_threads() -> int:
    """Physical cores this process may use: a second hardware thread shares the arithmetic units it would need."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    return max(len({_core_of(cpu) for cpu in allowed}), 1)


def _core_of(cpu: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list").read_text("ascii").strip()
    except OSError:
        return str(cpu)


def check_session_options(options: Mapping[str, str]) -> None:
    """Raise ProviderError for a session option that is unknown or would break exactness."""
    for name in options:
        if name in _REFUSED:
            raise ProviderError(f"session option '{name}' is refused: {_REFUSED[name]}")
        if name not in SESSION_OPTIONS:
            raise ProviderError(f"unknown session option '{name}'; known: {', '.join(sorted(SESSION_OPTIONS))}")
        if not isinstance(options[name], str):
            raise ProviderError(f"session option '{name}' is {options[name]!r}; expected text, such as '1'")


def open_session(path: Path, *, threads: int, options: Mapping[str, str]) -> Any:
    """An InferenceSession on the CPU provider. Raises ProviderError or BundleError with ONNX Runtime's reason in one
    line.
    """
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= MAX_THREADS:
        raise ProviderError(f"threads is {threads!r}; expected a whole number, 1 to {MAX_THREADS}")
    check_session_options(options)
    so = ort.SessionOptions()
    so.intra_op_num_threads = threads
    so.log_severity_level = 3
    for name, value in options.items():
        so.add_session_config_entry(name, value)
    try:
        return ort.InferenceSession(os.fspath(path), so, providers=[PROVIDER], enable_fallback=0)
    except Exception as error:  # ONNX Runtime's exceptions share no base class
        reason = str(error).splitlines()[0]
        raise BundleError(f"ONNX Runtime {ort.__version__} cannot load '{path}': {reason}") from error


def runtime_version() -> str:
    """ONNX Runtime's version."""
    return str(ort.__version__)


def available_providers() -> list[str]:
    """The providers that this build of ONNX Runtime has."""
    return list(ort.get_available_providers())
