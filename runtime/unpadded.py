"""Passes without the padding that makes bits alike, for benchmarks only: plain decoding at its fastest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dflash_ort.runtime.engine import Engine


@contextmanager
def unpadded(engine: Engine) -> Iterator[None]:
    """While it lasts, no pass of the engine is padded, so the last bits of one-row passes may differ from the rest.

    It holds for every stream of the engine: use it around each chunk of one stream, from its first to its last.
    """
    target = engine._opened().target
    before = target.attention_floor, target.row_floor
    target.attention_floor = target.row_floor = 1
    try:
        yield
    finally:
        target.attention_floor, target.row_floor = before
