"""Binds small arrays to a graph without copying and without asking ONNX Runtime to allocate."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def bind_input(binding: Any, name: str, array: np.ndarray) -> None:
    """Bind a contiguous array, which must stay alive until the run is over."""
    binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)


def bind_output(binding: Any, name: str, array: np.ndarray) -> None:
    """Let the graph write ``name`` straight into a contiguous array."""
    binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)


class Scratch:
    """Memory that grows when asked for more and is otherwise the same every time."""

    def __init__(self, dtype: type[np.generic]) -> None:
        self._dtype = dtype
        self._flat = np.empty(0, dtype)

    def take(self, *shape: int) -> np.ndarray:
        """An uninitialised array of this shape; the next call gives out the same memory."""
        size = math.prod(shape)
        if size > self._flat.size:
            self._flat = np.empty(size, self._dtype)
        return self._flat[:size].reshape(shape)
