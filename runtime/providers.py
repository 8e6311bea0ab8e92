"""Execution providers: who is installed, how each is asked for, and what to do about one that is not there."""

from __future__ import annotations

import os
from typing import Any

from dflash_ort.defaults import FPMATHS, PROVIDERS, Provider
from dflash_ort.errors import ProviderError
from dflash_ort.runtime.ort import ort

EXECUTION_PROVIDERS: dict[Provider, str] = {
    "cpu": "CPUExecutionProvider",
    "dnnl": "DnnlExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
}
"""ONNX Runtime's names."""

_HOW_TO_GET: dict[Provider, str] = {
    "cpu": "install onnxruntime",
    "dnnl": "no wheel has it; Debian 13's python3-onnxruntime does, or build ONNX Runtime with it (docs/xeon-amx.md)",
    "openvino": "pip install onnxruntime-ep-openvino, on an Intel processor (docs/openvino.md)",
}

_FPMATH_VARIABLE = "ONEDNN_DEFAULT_FPMATH_MODE"
_fpmath_in_use: str | None = None


def installed_providers() -> list[Provider]:
    """Those that can be asked for here, the default one first."""
    available = set(ort.get_available_providers())
    return [name for name in PROVIDERS if EXECUTION_PROVIDERS[name] in available]


def how_to_get(provider: Provider) -> str:
    """What to do to have it, in half a line."""
    return _HOW_TO_GET[provider]


def check_provider(provider: str) -> Provider:
    """Raise ProviderError, which says how to get it, for a provider that is unknown or not installed."""
    known = next((name for name in PROVIDERS if name == provider), None)
    if known is None:
        raise ProviderError(f"unknown provider '{provider}'; expected auto, {', '.join(PROVIDERS)}")
    if known not in installed_providers():
        raise ProviderError(
            f"provider '{known}' is not in this ONNX Runtime {ort.__version__} "
            f"(it has {', '.join(installed_providers())}): {_HOW_TO_GET[known]}"
        )
    return known


def effective_fpmath(provider: Provider, fpmath: str | None) -> str | None:
    """What oneDNN may do to fp32 arithmetic: as asked, as the environment says, else "strict"; None without oneDNN.

    Raises ProviderError for an unknown mode, or one that a provider other than oneDNN's would not heed.
    """
    if fpmath is not None and fpmath not in FPMATHS:
        raise ProviderError(f"unknown fpmath mode '{fpmath}'; expected {', '.join(FPMATHS)}")
    if provider != "dnnl":
        if fpmath is not None:
            raise ProviderError(f"fpmath is oneDNN's, and the provider is '{provider}'; choose provider dnnl")
        return None
    return fpmath or os.environ.get(_FPMATH_VARIABLE, "strict").lower()


def use_fpmath(fpmath: str | None) -> None:
    """Set oneDNN's mode for this process. It reads it once, so a second mode raises ProviderError."""
    global _fpmath_in_use
    if fpmath is None:
        return
    if _fpmath_in_use not in (None, fpmath):
        raise ProviderError(
            f"this process already computes with fpmath '{_fpmath_in_use}', which oneDNN reads once; "
            f"use another process for '{fpmath}'"
        )
    os.environ[_FPMATH_VARIABLE] = fpmath.upper()
    _fpmath_in_use = fpmath


def provider_chain(provider: Provider) -> list[Any]:
    """What ONNX Runtime is told: the provider, and the default one for what it does not take."""
    return list(dict.fromkeys([EXECUTION_PROVIDERS[provider], EXECUTION_PROVIDERS["cpu"]]))
