"""Key/value caches: fixed-capacity buffers that a graph updates in place, and the arithmetic of their length."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

from dflash_ort.models import graph_names as names
from dflash_ort.runtime.graph_io import Binding


class CacheLength:
    """How many leading rows of a cache are valid. Rolling back is a smaller length; nothing is copied."""

    __slots__ = ("capacity", "value")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.value = 0

    def check_room(self, rows: int) -> None:
        """Raise ValueError unless ``rows`` more rows, padding included, fit."""
        if rows < 0 or self.value + rows > self.capacity:
            raise ValueError(f"{rows} rows do not fit a cache of {self.capacity} that holds {self.value}")

    def append(self, rows: int) -> None:
        """Count ``rows`` rows that a pass has written as valid."""
        self.check_room(rows)
        self.value += rows

    def trim(self, length: int) -> None:
        """Keep the first ``length`` rows. Raises ValueError if there are fewer."""
        if not 0 <= length <= self.value:
            raise ValueError(f"cannot trim a cache of {self.value} rows to {length}")
        self.value = length


class CacheShape(Protocol):
    """What a cache needs to know of a model: `ModelSpec` and `DrafterSpec` both say it."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


class KVCache:
    """The buffers of one request for one graph, bound once as past and present alike.

    Buffers are float32 ``[1, kv_heads, capacity, head_dim]``, two a layer. Their memory is reserved, and used only
    as far as rows are written.
    """

    def __init__(self, session: Any, shape: CacheShape, capacity: int) -> None:
        self.length = CacheLength(capacity)
        self.binding = Binding(session)
        self._buffers: list[np.ndarray] = []
        size = (1, shape.num_kv_heads, capacity, shape.head_dim)
        for layer in range(shape.num_layers):
            for kind in ("key", "value"):
                buffer = reserve(size)
                self._buffers.append(buffer)
                self.binding.input(names.past(kind, layer), buffer)
                self.binding.output(names.present(kind, layer), buffer)

    def fill(self, value: float) -> None:
        """Write every row, which makes all the memory real: for measuring only."""
        for buffer in self._buffers:
            buffer[...] = value


def reserve(shape: tuple[int, ...]) -> np.ndarray:
    """Zeroed float32 memory that becomes real a page at a time.

    Huge pages are declined: the rows of each head lie far apart, and with 2 MB pages a short text would occupy most of
    a long context's buffers (350 MB instead of some MB for the default pair).
    """
    memory = mmap.mmap(-1, 4 * math.prod(shape))
    with suppress(AttributeError, OSError):  # not every system has the advice
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.float32).reshape(shape)


class Slot:
    """The two caches of one request. Slots are reused; a request begins with both lengths at zero."""

    __slots__ = ("drafter", "target")

    def __init__(self, target: KVCache, drafter: KVCache | None) -> None:
        self.target, self.drafter = target, drafter

    def clear(self) -> None:
        self.target.length.trim(0)
        if self.drafter is not None:
            self.drafter.length.trim(0)
