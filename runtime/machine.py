"""What machine this is, as far as bits and speed depend on it."""

from __future__ import annotations

import hashlib
import json
import platform
from functools import cache
from pathlib import Path

from dflash_ort.runtime.session import Backend, runtime_version

# What decides which kernels ONNX Runtime and its libraries take.
_TELLING_FLAGS = (
    "avx2",
    "fma",
    "avx_vnni",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
    "asimd",
    "asimddp",
    "i8mm",
    "sve",
    "bf16",
)


@cache
def _cpuinfo() -> dict[str, str]:
    """The first processor's entries in /proc/cpuinfo; empty where there is no such file."""
    entries: dict[str, str] = {}
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", errors="replace")
    except OSError:
        return entries
    for line in text.split("\n\n", 1)[0].splitlines():
        key, _, value = line.partition(":")
        entries[key.strip()] = value.strip()
    return entries


def cpu_model() -> str:
    """The processor's name, with family, model and stepping where the system tells them."""
    info = _cpuinfo()
    name = info.get("model name") or info.get("CPU implementer") or platform.processor() or platform.machine()
    numbers = "/".join(info[key] for key in ("cpu family", "model", "stepping") if key in info)
    return f"{name} ({numbers})" if numbers else name


def cpu_features() -> tuple[str, ...]:
    """Instruction sets, of those that matter here, that the processor has."""
    info = _cpuinfo()
    flags = set((info.get("flags") or info.get("Features") or "").split())
    return tuple(flag for flag in _TELLING_FLAGS if flag in flags)


def machine_key(backend: Backend, **parts: object) -> str:
    """A short hash of everything that bits and speed depend on here, and of ``parts``."""
    everything = {
        "cpu": cpu_model(),
        "features": cpu_features(),
        "onnxruntime": runtime_version(),
        **backend.key(),
        **parts,
    }
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()[:32]
