"""What oneDNN says of itself: its version and the instruction set that it computes with here.

It says so once a process, on standard output and only when an environment variable asks, so another process is asked to
run one small matrix product.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass

import numpy as np

from dflash_ort.runtime.ort import ort
from dflash_ort.runtime.providers import check_provider, effective_fpmath, prepare_options

_SECONDS = 60
_SIZE = 16
_MATRIX_PRODUCT = (
    b'\x08\n\x12\x00:@\n\x11\n\x01x\n\x01x\x12\x01y"\x06MatMul\x12\x01gZ\x13\n\x01x\x12\x0e\n\x0c\x08\x01\x12\x08\n\x02\x08\x10\n'
    b"\x02\x08\x10b\x13\n\x01y\x12\x0e\n\x0c\x08\x01\x12\x08\n\x02\x08\x10\n\x02\x08\x10B\x04\n\x00\x10\x15"
)
"""An ONNX model, ``y = x @ x`` of float32 ``[16, 16]``: running it needs no package that writes models."""


@dataclass(frozen=True, slots=True)
class OneDnn:
    """``kernel``: what a matrix product of fp32 ran as, in oneDNN's words."""

    version: str
    isa: str
    kernel: str


def ask_onednn(*, fpmath: str | None = None) -> OneDnn | None:
    """What it said; None when it said nothing that is understood."""
    environment = os.environ | {"ONEDNN_VERBOSE": "1"}
    if fpmath is not None:
        environment["ONEDNN_DEFAULT_FPMATH_MODE"] = fpmath.upper()
    program = (sys.executable, "-c", "from dflash_ort.runtime import onednn; onednn.multiply()")
    try:
        done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return read_verbose(done.stdout)


def multiply() -> None:
    """Let oneDNN multiply two matrices. Raises ProviderError when it is not installed."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    names = prepare_options(options, check_provider("dnnl"), effective_fpmath("dnnl", None), 1)
    session = ort.InferenceSession(_MATRIX_PRODUCT, options, providers=names)
    session.run(None, {"x": np.ones((_SIZE, _SIZE), np.float32)})


def read_verbose(text: str) -> OneDnn | None:
    """The header and the first matrix product of ``ONEDNN_VERBOSE=1``'s lines."""
    version = re.search(r"oneDNN v([\d.]+)", text)
    isa = re.search(r"^onednn_verbose.*,cpu,isa:(.+?)\s*$", text, re.MULTILINE)
    kernel = re.search(r"^onednn_verbose.*,exec,cpu,matmul,([^,]+),", text, re.MULTILINE)
    if version is None or isa is None:
        return None
    return OneDnn(version[1], isa[1], kernel[1] if kernel else "")
