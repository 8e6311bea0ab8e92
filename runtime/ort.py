"""ONNX Runtime, imported in one place: before the import its telemetry is turned off."""

from __future__ import annotations

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # an on-prem product does not phone home

import onnxruntime as ort

__all__ = ["ort"]
