"""dflash-ort: fast lossless language-model decoding on CPUs. DFlash speculative decoding under ONNX Runtime.

>>> from dflash_ort import Engine, SamplingParams
>>> with Engine.load("bundle-dir") as engine:
...     for chunk in engine.stream("Tell me a joke.", SamplingParams(max_new_tokens=64)):
...         print(chunk.text, end="", flush=True)

Names are loaded when first used (PEP 562), so importing this package costs nothing and pulls in nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash_ort.errors import (
        BundleError,
        CheckpointError,
        DFlashError,
        InexactError,
        LogError,
        PolicyError,
        ProviderError,
        RequestError,
    )
    from dflash_ort.params import SamplingParams
    from dflash_ort.records import Chunk, RoundRecord, Statistics
    from dflash_ort.runtime.engine import Engine
    from dflash_ort.runtime.stream import Generation, Stream

__version__ = "0.1.0"

_HOMES = {
    "Engine": "dflash_ort.runtime.engine",
    "Generation": "dflash_ort.runtime.stream",
    "Stream": "dflash_ort.runtime.stream",
    "SamplingParams": "dflash_ort.params",
    "Chunk": "dflash_ort.records",
    "RoundRecord": "dflash_ort.records",
    "Statistics": "dflash_ort.records",
    "DFlashError": "dflash_ort.errors",
    "CheckpointError": "dflash_ort.errors",
    "BundleError": "dflash_ort.errors",
    "ProviderError": "dflash_ort.errors",
    "InexactError": "dflash_ort.errors",
    "RequestError": "dflash_ort.errors",
    "PolicyError": "dflash_ort.errors",
    "LogError": "dflash_ort.errors",
}

__all__ = [
    "BundleError",
    "CheckpointError",
    "Chunk",
    "DFlashError",
    "Engine",
    "Generation",
    "InexactError",
    "LogError",
    "PolicyError",
    "ProviderError",
    "RequestError",
    "RoundRecord",
    "SamplingParams",
    "Statistics",
    "Stream",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dflash_ort' has no attribute '{name}'")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
