"""Attention over fixed-capacity key and value buffers that the runtime binds in place, as one operator or written out.

Past and present are the same memory, so a pass appends rows and a shorter length later takes them back without a copy.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import onnx_ir as ir

from dflash_ort.exporter.builder import CONTRIB, GraphBuilder
from dflash_ort.exporter.checkpoint import DecoderConfig
from dflash_ort.models import graph_names as names


class CachedAttention:
    """``GroupQueryAttention``. ``batched``: the buffers have a batch axis, and each request its own length."""

    def __init__(
        self, g: GraphBuilder, config: DecoderConfig, positions: int, *, causal: bool, batched: bool = False
    ) -> None:
        self.g, self.config, self.causal = g, config, causal
        self._batch: int | str = "batch" if batched else 1
        cos, sin = config.rope.tables(positions, config.head_dim)
        self._cos, self._sin = g.constant("rotary_cos", cos), g.constant("rotary_sin", sin)
        self._last_key = g.input(names.LAST_KEY, ir.DataType.INT32, [self._batch])
        self._total = g.input(names.TOTAL_LENGTH, ir.DataType.INT32, [1])

    def attend(
        self, layer: int, query: ir.Value, key: ir.Value | None = None, value: ir.Value | None = None
    ) -> ir.Value:
        """Attention of one layer; ``query`` alone means fused query, key and value rows."""
        c, g = self.config, self.g
        shape: list[int | str] = [self._batch, c.num_kv_heads, "capacity", c.head_dim]
        past = [g.input(names.past(kind, layer), ir.DataType.FLOAT, shape) for kind in ("key", "value")]
        attributes = {} if self.causal else {"causal": 0}
        out, present_key, present_value = g.op_multi(
            "GroupQueryAttention",
            [query, key, value, *past, self._last_key, self._total, self._cos, self._sin],
            3,
            domain=CONTRIB,
            num_heads=c.num_heads,
            kv_num_heads=c.num_kv_heads,
            do_rotary=1,
            rotary_interleaved=0,
            scale=float(c.head_dim**-0.5),
            **attributes,
        )
        g.output(present_key, names.present("key", layer), ir.DataType.FLOAT, shape)
        g.output(present_value, names.present("value", layer), ir.DataType.FLOAT, shape)
        return out


class BlockAttention(Protocol):
    """How a drafter's block attends to the context and to itself, both ways."""

    def attend_block(
        self, layer: int, query: ir.Value, key: ir.Value, value: ir.Value, context_rows: ir.Value
    ) -> ir.Value:
        """Query, key and value of context rows (``context_rows``, int64 ``[1]``, newly committed) and block rows behind
        them, ``[1, rows, heads * head_dim]``; gives the block's rows, ``[1, block, num_heads * head_dim]``.
        """
        ...


class OneOperator(BlockAttention):
    """``GroupQueryAttention`` that is not causal, which ONNX Runtime has since 1.32.

    It appends the block's rows to the buffers too; the runtime takes them back by length. The context rows' queries are
    computed and thrown away: they are few.
    """

    def __init__(self, g: GraphBuilder, config: DecoderConfig, positions: int) -> None:
        self._attention = CachedAttention(g, config, positions, causal=False)

    def attend_block(
        self, layer: int, query: ir.Value, key: ir.Value, value: ir.Value, context_rows: ir.Value
    ) -> ir.Value:
        return rows_after(self._attention.g, self._attention.attend(layer, query, key, value), context_rows)


class WrittenOut(BlockAttention):
    """The same in operators that ONNX Runtime 1.21 has.

    ``ScatterND`` writes the new rows; it copies nothing where past and present are bound to the same memory.
    """

    def __init__(self, g: GraphBuilder, config: DecoderConfig, positions: int) -> None:
        self.g, self.config = g, config
        cos, sin = config.rope.tables(positions, config.head_dim)
        self._cos, self._sin = g.constant("rotary_cos", cos), g.constant("rotary_sin", sin)
        g.input(names.LAST_KEY, ir.DataType.INT32, [1])  # the runtime feeds both; one is enough here
        self._total = g.op("Cast", [g.input(names.TOTAL_LENGTH, ir.DataType.INT32, [1])], to=ir.DataType.INT64)
        self._placed: tuple[ir.Value, ir.Value] | None = None

    def attend_block(
        self, layer: int, query: ir.Value, key: ir.Value, value: ir.Value, context_rows: ir.Value
    ) -> ir.Value:
        c, g = self.config, self.g
        first, places = self._place(key)
        keys = self._append("key", layer, self._rotated(self._heads(key, c.num_kv_heads), first), places)
        values = self._append("value", layer, self._heads(value, c.num_kv_heads), places)
        block = self._heads(rows_after(g, query, context_rows), c.num_heads)
        block = self._rotated(block, g.op("Add", [first, context_rows]))
        scale = g.constant("attention_scale", np.array(c.head_dim**-0.5, np.float32))
        grouped = g.op("Reshape", [g.op("Mul", [block, scale]), g.ints(1, c.num_kv_heads, -1, c.head_dim)])
        scores = g.op("MatMul", [grouped, g.op("Transpose", [keys], perm=[0, 1, 3, 2])])
        mixed = g.op("MatMul", [g.op("Softmax", [scores], axis=-1), values])
        heads = g.op("Reshape", [mixed, g.ints(1, c.num_heads, -1, c.head_dim)])
        return g.op("Reshape", [g.op("Transpose", [heads], perm=[0, 2, 1, 3]), g.ints(1, -1, c.query_width)])

    def _place(self, key: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The first new row's position, int64 ``[1]``, and where each row goes in a buffer, ``[1, kv_heads, rows, 3]``:
        the same for all layers.
        """
        if self._placed is None:
            g, heads = self.g, self.config.num_kv_heads
            rows = g.num_rows(key)
            first = g.op("Sub", [self._total, rows])
            scalar = [g.op("Squeeze", [value, g.ints(0)]) for value in (first, self._total)]
            positions = g.op("Range", [*scalar, g.constant("scalar.1", np.array(1, np.int64))])
            shape = g.op("Concat", [g.ints(1, heads), rows, g.ints(1)], axis=0)
            index = [
                g.constant("batch_index", np.zeros((1, 1, 1, 1), np.int64)),
                g.constant("head_index", np.arange(heads, dtype=np.int64).reshape(1, heads, 1, 1)),
                g.op("Reshape", [positions, g.ints(1, 1, -1, 1)]),
            ]
            places = g.op("Concat", [g.op("Expand", [part, shape]) for part in index], axis=-1)
            self._placed = first, places
        return self._placed

    def _heads(self, x: ir.Value, heads: int) -> ir.Value:
        """``[1, rows, heads * head_dim]`` as ``[1, heads, rows, head_dim]``."""
        split = self.g.op("Reshape", [x, self.g.ints(1, -1, heads, self.config.head_dim)])
        return self.g.op("Transpose", [split], perm=[0, 2, 1, 3])

    def _rotated(self, x: ir.Value, first: ir.Value) -> ir.Value:
        """Rotary embedding of rows whose positions follow each other from ``first``."""
        return self.g.op("RotaryEmbedding", [x, first, self._cos, self._sin], domain=CONTRIB, interleaved=0)

    def _append(self, kind: str, layer: int, new: ir.Value, places: ir.Value) -> ir.Value:
        """Write rows into a buffer; gives all of its rows up to now, ``[1, kv_heads, total, head_dim]``."""
        c, g = self.config, self.g
        shape: list[int | str] = [1, c.num_kv_heads, "capacity", c.head_dim]
        past = g.input(names.past(kind, layer), ir.DataType.FLOAT, shape)
        present = g.op("ScatterND", [past, places, new])
        g.output(present, names.present(kind, layer), ir.DataType.FLOAT, shape)
        return g.op("Slice", [present, g.ints(0), self._total, g.ints(2)])


def rows_after(g: GraphBuilder, x: ir.Value, count: ir.Value) -> ir.Value:
    """Rows of axis 1 from number ``count``, int64 ``[1]``, on."""
    return g.op("Slice", [x, count, g.ints(np.iinfo(np.int64).max), g.ints(1)])
