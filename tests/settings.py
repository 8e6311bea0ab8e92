"""What the tests run on, where it is not this machine's ordinary choice (see tests/dnnl)."""

from __future__ import annotations

import os

from dflash_ort.models.manifest import ONNXRUNTIME
from dflash_ort.runtime.bundle import version_numbers
from dflash_ort.runtime.session import runtime_version

PROVIDER = os.environ.get("DFLASH_ORT_TEST_PROVIDER", "auto")
PORTABLE = version_numbers(runtime_version()) < version_numbers(ONNXRUNTIME)
"""This ONNX Runtime is too old for ordinary graphs."""
