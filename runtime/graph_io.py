"""Binds small arrays to a graph without copying, without asking ONNX Runtime to allocate, and only when they change."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dflash_ort.errors import DFlashError
from dflash_ort.runtime.providers import EXECUTION_PROVIDERS, reason_of

Array = np.ndarray


class Binding:
    """An IOBinding that remembers what is bound: binding anew costs as much as a small layer.

    Arrays are bound by identity; refilled in place they need no new binding. They must be contiguous. OpenVINO takes a
    copy when an input is bound: there inputs are bound for every run, but for those that only other providers read.
    """

    def __init__(self, session: Any) -> None:
        self._session = session
        self._copies = EXECUTION_PROVIDERS["openvino"] in session.get_providers()
        self.io = session.io_binding()
        self._inputs: dict[str, Array] = {}
        self._outputs: dict[str, Array] = {}

    def input(self, name: str, array: Array) -> None:
        if self._copies or self._inputs.get(name) is not array:
            self.io.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
            self._inputs[name] = array

    def output(self, name: str, array: Array) -> None:
        """Let the graph write ``name`` straight into the array."""
        if self._outputs.get(name) is not array:
            self.io.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
            self._outputs[name] = array

    def run(self) -> None:
        """Raises DFlashError with ONNX Runtime's reason."""
        try:
            self._session.run_with_iobinding(self.io)
        except Exception as error:  # ONNX Runtime's exceptions share no base class
            raise DFlashError(f"ONNX Runtime failed while running a graph: {reason_of(error)}") from error


class Scratch:
    """Uninitialised memory handed out by shape: the same array for the same shape, until more is asked for than there
    is.
    """

    def __init__(self, dtype: type[np.generic]) -> None:
        self._dtype = dtype
        self._flat: Array = np.empty(0, dtype)
        self._views: dict[tuple[int, ...], Array] = {}

    def take(self, *shape: int) -> Array:
        """An array of this shape, which the next call of any shape overwrites."""
        view = self._views.get(shape)
        if view is None:
            size = math.prod(shape)
            if size > self._flat.size:
                self._flat = np.empty(size, self._dtype)
                self._views.clear()
            view = self._views[shape] = self._flat[:size].reshape(shape)
        return view
