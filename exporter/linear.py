"""How one linear layer is computed: a small object per role, so that a recipe is a table from role to format.

Every format must be *row independent*: the bits of a row may not depend on which rows share the pass (design, promise
1). ``onnxruntime.quantization.quantize_dynamic`` makes ``DynamicQuantizeMatMul``-shaped graphs with one activation
scale for all rows, which breaks that and the model's text too; nothing here does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
import onnx_ir as ir

from dflash_ort.exporter.builder import CONTRIB, Array, GraphBuilder

Role = Literal["qkv", "attention_out", "gate_up", "down", "lm_head", "fc"]
Precision = Literal["fp32", "int8"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "int8")

_INT8_MAX = 127.0
_TINY = np.float32(1e-30)
"""Keeps an all-zero row from dividing by zero; its quantised values are zero whatever the scale."""


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """A linear layer to be written. ``load`` returns float32 ``[out_features, in_features]``, as in checkpoints."""

    name: str
    in_features: int
    out_features: int
    load: Callable[[], Array]
    load_bias: Callable[[], Array] | None = None


class LinearFormat(Protocol):
    """One way of computing ``x @ W.T + b``."""

    def apply(self, g: GraphBuilder, x: ir.Value, weights: LinearWeights, rows: ir.Value) -> ir.Value:
        """Add the nodes; ``x`` is ``[1, rows, in_features]``, the result ``[1, rows, out_features]``, float32.

        ``rows`` is the number of rows, int64 ``[1]``.
        """
        ...


@dataclass(frozen=True, slots=True)
class Float32:
    """Plain ``MatMul`` with constant weights, which ONNX Runtime packs at load and keeps row independent."""

    def apply(self, g: GraphBuilder, x: ir.Value, weights: LinearWeights, rows: ir.Value) -> ir.Value:
        w = g.weight(
            f"{weights.name}.weight",
            lambda: weights.load().T,
            (weights.in_features, weights.out_features),
            ir.DataType.FLOAT,
        )
        return _add_bias(g, g.op("MatMul", [x, w]), weights)


@dataclass(frozen=True, slots=True)
class Int8PerRow:
    """8-bit weights with one scale per output channel; 8-bit activations with one scale per *row*, made in the graph.

    Two traps (measured): signed activations in ``MatMulIntegerToFloat`` take a slow path, so activations are unsigned
    with zero point 128; and an elementwise Div/Round/Cast chain costs more than ``QuantizeLinear`` along the row axis.
    """

    def apply(self, g: GraphBuilder, x: ir.Value, weights: LinearWeights, rows: ir.Value) -> ir.Value:
        quantised, row_scale = _quantise_rows(g, x, rows)
        w, scale = quantise_channels(weights.load())
        q = g.weight(
            f"{weights.name}.weight_int8", lambda: w.T, (weights.in_features, weights.out_features), ir.DataType.INT8
        )
        s = g.weight(f"{weights.name}.weight_scale", lambda: scale, scale.shape, ir.DataType.FLOAT)
        one = g.constant("one", np.array(1, np.float32))
        zero_point = g.constant("activation_zero_point", np.array(128, np.uint8))
        y = g.op("MatMulIntegerToFloat", [quantised, q, one, s, zero_point], domain=CONTRIB)
        return _add_bias(g, g.op("Mul", [y, row_scale]), weights)


@dataclass(frozen=True, slots=True)
class Int8Balanced:
    """`Int8PerRow` for inputs whose channels differ by orders of magnitude, as residual streams do.

    One scale per row would leave nothing of the quiet channels, whose weights are large. Each channel is multiplied by
    the root mean square of its weights, and these are divided by it, so that a row is quantised by what its channels
    contribute.
    """

    def apply(self, g: GraphBuilder, x: ir.Value, weights: LinearWeights, rows: ir.Value) -> ir.Value:
        weight = weights.load()
        size = np.sqrt(np.mean(np.square(weight, dtype=np.float64), axis=0)).astype(np.float32)
        even = weight / np.where(size > 0, size, np.float32(1))
        scaled = g.op("Mul", [x, g.weight(f"{weights.name}.channels", lambda: size, size.shape, ir.DataType.FLOAT)])
        return Int8PerRow().apply(g, scaled, replace(weights, load=lambda: even), rows)


Recipe = Mapping[Role, LinearFormat]

_ROLES: tuple[Role, ...] = ("qkv", "attention_out", "gate_up", "down", "lm_head", "fc")
_FORMATS: dict[Precision, LinearFormat] = {"fp32": Float32(), "int8": Int8PerRow()}


def recipe(precision: Precision) -> Recipe:
    """The format of every role at a named precision. Roles of ``fc`` read the target's tapped states."""
    formats = dict.fromkeys(_ROLES, _FORMATS[precision])
    return formats | {"fc": Int8Balanced()} if precision == "int8" else formats


def quantise_channels(weight: Array) -> tuple[Array, Array]:
    """float32 ``[out, in]`` as int8 ``[out, in]`` and float32 ``[out]``, one symmetric scale per output channel.

    Two neighbouring weights add up to at most 128, so that on processors without VNNI, which add two products of a
    byte and a weight in 16 bits and saturate, no sum exceeds 255 * 128: integers are exact everywhere. A scale grows by
    a fifth for it, where weights of 7 bits would double it.
    """
    sizes = np.abs(weight)
    pairs = np.pad(sizes, ((0, 0), (0, sizes.shape[1] % 2))).reshape(len(sizes), -1, 2).sum(axis=2)
    scale = np.maximum(pairs.max(axis=1) / _INT8_MAX, _TINY).astype(np.float32)
    return np.clip(np.rint(weight / scale[:, None]), -_INT8_MAX, _INT8_MAX).astype(np.int8), scale


def _quantise_rows(g: GraphBuilder, x: ir.Value, rows: ir.Value) -> tuple[ir.Value, ir.Value]:
    """uint8 activations around 128, and the float32 scale ``[1, rows, 1]`` of each row."""
    largest = g.row_max(g.op("Abs", [x]))
    step = g.op("Mul", [largest, g.constant("one_over_127", np.array(1 / _INT8_MAX, np.float32))])
    row_scale = g.op("Max", [step, g.constant("tiny", np.array(_TINY))])
    if g.portable:  # the same bits, and a form that OpenVINO takes
        byte = g.constant("activation_zero_point", np.array(128, np.uint8))
        scaled = g.op("Div", [x, row_scale])
        return g.op("QuantizeLinear", [scaled, g.constant("one", np.array(1, np.float32)), byte]), row_scale
    flat_scale = g.op("Reshape", [row_scale, g.ints(-1)])
    return g.op("QuantizeLinear", [x, flat_scale, g.repeat_byte(128, rows)], axis=1), row_scale


def _add_bias(g: GraphBuilder, y: ir.Value, weights: LinearWeights) -> ir.Value:
    if weights.load_bias is None:
        return y
    bias = g.weight(f"{weights.name}.bias", weights.load_bias, (weights.out_features,), ir.DataType.FLOAT)
    return g.op("Add", [y, bias])
