"""Defaults that the command line shows and the engine uses."""

from __future__ import annotations

from typing import Literal, get_args

DEFAULT_CONTROLLER = "adaptive"

Provider = Literal["cpu", "dnnl", "openvino"]
PROVIDERS: tuple[Provider, ...] = get_args(Provider)
"""Who can compute: ONNX Runtime's own kernels, oneDNN's, OpenVINO's."""

Fpmath = Literal["strict", "bf16", "f16", "tf32", "any"]
FPMATHS: tuple[Fpmath, ...] = get_args(Fpmath)
"""What oneDNN (by its own names) or OpenVINO may do to fp32 arithmetic."""

Spinning = Literal["stop", "always", "never"]
SPINNINGS: tuple[Spinning, ...] = get_args(Spinning)
"""Whether idle threads of a pool wait busily: until their graph's run ends, all the time, or not at all."""
