"""Execution providers: who is installed, how each is asked for, and what to do about one that is not there."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from threading import Lock
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
_fpmath_found: str | None = None
"""What the environment said before this process set it."""
_OPENVINO_REGISTRATION = "dflash-ort.openvino"
_OPENVINO_PACKAGE = "onnxruntime-ep-openvino"
_OPENVINO_PRECISIONS = {"strict": "f32", "bf16": "bf16", "f16": "f16"}

logger = logging.getLogger("dflash_ort")
_lock = Lock()
# What changes oneDNN's kernels, and with them bits and speed, without changing anything that we pass.
_ONEDNN_VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")


def installed_providers() -> list[Provider]:
    """Those that can be asked for here, the default one first."""
    available = set(ort.get_available_providers())
    found = {name for name in PROVIDERS if name != "openvino" and EXECUTION_PROVIDERS[name] in available}
    return [name for name in PROVIDERS if name in found or (name == "openvino" and openvino_device() is not None)]


def openvino_device() -> Any:
    """The processor, as OpenVINO's plugin offers it to ONNX Runtime; None without plugin, or where it offers none.

    The plugin is registered with the process when this is first asked. On processors that are not Intel's it registers
    and offers nothing.
    """
    with _lock:  # two threads would both find nothing cached, and a library can be registered once
        return _register_openvino()


@cache
def _register_openvino() -> Any:
    if importlib.util.find_spec("onnxruntime_ep_openvino") is None:
        return None
    try:
        plugin = importlib.import_module("onnxruntime_ep_openvino")
        ort.register_execution_provider_library(_OPENVINO_REGISTRATION, plugin.get_library_path())
        devices = [device for device in ort.get_ep_devices() if device.ep_name == plugin.get_ep_name()]
    except Exception as error:  # ONNX Runtime's exceptions share no base class
        logger.warning("OpenVINO's plugin cannot be used: %s", reason_of(error))
        return None
    return next((device for device in devices if device.ep_metadata.get("ov_device") == "CPU"), None)


def provider_identity(provider: Provider) -> dict[str, str]:
    """What of a provider's own bits and speed depend on and ONNX Runtime's version does not tell.

    OpenVINO's plugin has a version of its own. oneDNN is a part of ONNX Runtime's build, which tells its commit and
    flags, and listens to the environment.
    """
    if provider == "openvino":
        try:
            return {"plugin": version(_OPENVINO_PACKAGE)}
        except PackageNotFoundError:
            return {}
    if provider == "dnnl":
        found = {name: os.environ[name] for name in _ONEDNN_VARIABLES if name in os.environ}
        return {**found, "build": str(ort.get_build_info())}
    return {}


def reason_of(error: BaseException) -> str:
    """The first line of what it says, or its kind where it says nothing."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def how_to_get(provider: Provider) -> str:
    """What to do to have it, in half a line."""
    return _HOW_TO_GET[provider]


def check_provider(provider: str) -> Provider:
    """Raise ProviderError, which says how to get it, for a provider that is unknown or not installed."""
    known = next((name for name in PROVIDERS if name == provider), None)
    if known is None:
        raise ProviderError(f"unknown provider '{provider}'; expected auto, {', '.join(PROVIDERS)}")
    # The default one is in every build: nobody who asks for it has a plugin loaded.
    if known != "cpu" and known not in installed_providers():
        raise ProviderError(
            f"provider '{known}' is not in this ONNX Runtime {ort.__version__} "
            f"(it has {', '.join(installed_providers())}): {_HOW_TO_GET[known]}"
        )
    return known


def effective_fpmath(provider: Provider, fpmath: str | None) -> str | None:
    """What a provider may do to fp32 arithmetic: as asked, as oneDNN's environment says, else "strict".

    None for the default provider, which does what the graph says. Raises ProviderError for an unknown mode, or one that
    the provider does not know.
    """
    if fpmath is not None and fpmath not in FPMATHS:
        raise ProviderError(f"unknown fpmath mode '{fpmath}'; expected {', '.join(FPMATHS)}")
    if provider == "dnnl":
        return fpmath or _fpmath_of_environment()
    if provider == "openvino":
        if fpmath is not None and fpmath not in _OPENVINO_PRECISIONS:
            raise ProviderError(f"OpenVINO has no fpmath mode '{fpmath}'; expected {', '.join(_OPENVINO_PRECISIONS)}")
        return fpmath or "strict"
    if fpmath is not None:
        raise ProviderError(f"provider '{provider}' has no fpmath modes; choose provider dnnl or openvino")
    return None


def _fpmath_of_environment() -> str:
    said = os.environ.get(_FPMATH_VARIABLE) if _fpmath_in_use is None else _fpmath_found
    mode = (said or "strict").lower()
    if mode not in FPMATHS:
        raise ProviderError(f"{_FPMATH_VARIABLE} is '{mode}'; expected {', '.join(FPMATHS)}")
    return mode


def prepare_options(options: Any, provider: Provider, fpmath: str | None, threads: int) -> list[str]:
    """Make SessionOptions ready for a provider, and give the names that a session is to be made with.

    oneDNN reads its fpmath mode once a process: a second one raises ProviderError.
    """
    if provider == "openvino":
        # Its own default computes in bf16 where the processor has it, and says nothing.
        hints = {"INFERENCE_PRECISION_HINT": _OPENVINO_PRECISIONS[fpmath or "strict"], "INFERENCE_NUM_THREADS": threads}
        options.add_provider_for_devices([openvino_device()], {"load_config": json.dumps({"CPU": hints})})
        return []  # names would take the place of devices
    if provider == "dnnl":
        _use_fpmath(fpmath or "strict")
    return list(dict.fromkeys([EXECUTION_PROVIDERS[provider], EXECUTION_PROVIDERS["cpu"]]))


def _use_fpmath(fpmath: str) -> None:
    global _fpmath_in_use, _fpmath_found
    if _fpmath_in_use not in (None, fpmath):
        raise ProviderError(
            f"this process already computes with fpmath '{_fpmath_in_use}', which oneDNN reads once; "
            f"use another process for '{fpmath}'"
        )
    if _fpmath_in_use is None:
        _fpmath_found = os.environ.get(_FPMATH_VARIABLE)
    os.environ[_FPMATH_VARIABLE] = fpmath.upper()
    _fpmath_in_use = fpmath
