"""A thin layer over onnx-ir's tape: one method per kind of node the two graphs use, so a graph reads like the model.

Values are activations ``[1, rows, features]`` unless a docstring says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

CONTRIB = "com.microsoft"
OPSET = 21
IR_VERSION = 10
EXTERNAL_THRESHOLD_BYTES = 1024

Array = np.ndarray


class _PlainTensor(ir.Tensor[Array]):
    """A tensor that Python writes: on a full disk numpy's ``tofile`` loses the end of an array and says nothing."""

    def tofile(self, file: BinaryIO) -> None:
        file.write(self.tobytes())


class GraphBuilder:
    """Collects inputs, nodes, weights and outputs, and writes one ONNX file with its external data.

    ``portable``: use only what ONNX Runtime 1.21 has and its oneDNN provider computes rightly. That provider does not
    see the axes of ``ReduceMax`` and ``ReduceMean``, which are inputs since opset 18, and reduces over all of them
    (measured, docs/log.md).
    """

    def __init__(self, name: str, *, portable: bool = False) -> None:
        self.name, self.portable = name, portable
        self._tape = Tape()
        self._inputs: list[ir.Value] = []
        self._outputs: list[ir.Value] = []
        self._constants: dict[str, ir.Value] = {}
        self._repeated: dict[tuple[int, int], ir.Value] = {}

    def input(self, name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
        """Declare a graph input; strings in ``shape`` are symbolic axes."""
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
        self._inputs.append(value)
        return value

    def output(self, value: ir.Value, name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> None:
        """Declare ``value`` a graph output under ``name``."""
        value.name = name
        value.shape = ir.Shape(shape)
        value.type = ir.TensorType(dtype)
        self._outputs.append(value)

    def op(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        domain: str = "",
        **attributes: int | float | str | Sequence[int],
    ) -> ir.Value:
        """Add a node with one output."""
        return self._tape.op(op_type, inputs, attributes, domain=domain)

    def op_multi(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        num_outputs: int,
        domain: str = "",
        **attributes: int | float | str | Sequence[int],
    ) -> Sequence[ir.Value]:
        """Add a node with several outputs."""
        return self._tape.op_multi_out(op_type, inputs, attributes, num_outputs=num_outputs, domain=domain)

    def weight(self, name: str, load: Callable[[], Array], shape: Sequence[int], dtype: ir.DataType) -> ir.Value:
        """An initializer whose array is made only when the file is written: the model need not fit in memory."""
        tensor = ir.LazyTensor(
            lambda: _PlainTensor(np.ascontiguousarray(load()), name=name), dtype, ir.Shape(shape), name=name
        )
        return self._tape.initializer(tensor, name=name)

    def stored(self, name: str, file_name: str, shape: Sequence[int]) -> ir.Value:
        """A float32 initializer that is a whole file beside the graph, so that two graphs can share its pages."""
        size = 4 * int(np.prod(shape))
        tensor = ir.ExternalTensor(file_name, 0, size, ir.DataType.FLOAT, shape=ir.Shape(shape), name=name)
        return self._tape.initializer(tensor, name=name)

    def constant(self, name: str, array: Array) -> ir.Value:
        """An initializer that is at hand; the same name gives the same value."""
        if name not in self._constants:
            self._constants[name] = self._tape.initializer(_PlainTensor(array, name=name), name=name)
        return self._constants[name]

    def rms_norm(self, x: ir.Value, weight: ir.Value, epsilon: float) -> ir.Value:
        """``x / sqrt(mean(x^2) + epsilon) * weight`` over the last axis.

        Written out in standard operators, in the shape that ONNX Runtime fuses into one node at load: its own
        SimplifiedLayerNormalization fails onnx's checker, and RMSNormalization needs opset 23. The portable form adds
        two halves, which is exact.
        """
        if self.portable:
            half = self.op("Mul", [x, self.constant("half", np.array(0.5, np.float32))])
            return self.add_rms_norm(half, half, weight, epsilon)[0]
        square = self.op("Pow", [x, self.constant("two", np.array(2, np.float32))])
        mean = self.op("ReduceMean", [square, self.ints(-1)], keepdims=1)
        shifted = self.op("Add", [mean, self.constant(f"epsilon.{epsilon}", np.array(epsilon, np.float32))])
        return self.op("Mul", [self.op("Div", [x, self.op("Sqrt", [shifted])]), weight])

    def add_rms_norm(
        self, x: ir.Value, residual: ir.Value, weight: ir.Value, epsilon: float
    ) -> tuple[ir.Value, ir.Value]:
        """The norm of ``x + residual``, and that sum (the new residual stream)."""
        outputs = self.op_multi(
            "SkipSimplifiedLayerNormalization", [x, residual, weight], 4, domain=CONTRIB, epsilon=epsilon
        )
        return outputs[0], outputs[3]

    def row_max(self, x: ir.Value) -> ir.Value:
        """The largest of each row, ``[1, rows, 1]``.

        The portable form pools with rows where images stand: there may be none of them, as there may not be channels.
        """
        if self.portable:
            pooled = self.op("GlobalMaxPool", [self.op("Reshape", [x, self.ints(-1, 1, 0)])])
            return self.op("Reshape", [pooled, self.ints(1, -1, 1)])
        return self.op("ReduceMax", [x, self.ints(-1)], keepdims=1)

    def row_argmax(self, x: ir.Value, width: int) -> ir.Value:
        """The place of the largest of each row of ``width``, the first of equals; int64 ``[1, rows]``.

        Where there are no rows ONNX Runtime 1.21's ``ArgMax`` does not reduce, and its ``TopK`` crashes: one is added.
        """
        if self.portable:
            more = self.op("Concat", [x, self.constant(f"row.{width}", np.zeros((1, 1, width), np.float32))], axis=1)
            return self.op("Slice", [self._argmax(more), self.ints(0), self.ints(-1), self.ints(1)])
        return self._argmax(x)

    def _argmax(self, x: ir.Value) -> ir.Value:
        return self.op("ArgMax", [x], axis=-1, keepdims=0, select_last_index=0)

    def swiglu(self, gate_up: ir.Value, width: int) -> ir.Value:
        """``silu(gate) * up`` of a fused ``[gate, up]``.

        QuickGelu at alpha 1 is silu in one node, split at fixed places whatever the number of threads, which row
        independence needs.
        """
        gate, up = self.split(gate_up, [width, width])
        return self.op("Mul", [self.op("QuickGelu", [gate], domain=CONTRIB, alpha=1.0), up])

    def split(self, x: ir.Value, sizes: Sequence[int]) -> Sequence[ir.Value]:
        """Split the last axis into ``sizes``."""
        name = "split." + "_".join(map(str, sizes))
        return self.op_multi("Split", [x, self.constant(name, np.array(sizes, np.int64))], len(sizes), axis=-1)

    def ints(self, *values: int) -> ir.Value:
        """A small int64 vector."""
        return self.constant("ints." + "_".join(map(str, values)), np.array(values, np.int64))

    def num_rows(self, x: ir.Value) -> ir.Value:
        """The size of axis 1, int64 ``[1]``."""
        return self.op("Shape", [x], start=1, end=2)

    def repeat_byte(self, byte: int, rows: ir.Value) -> ir.Value:
        """uint8 ``[rows]`` filled with ``byte``, one node for all that ask with the same ``rows``."""
        key = (byte, id(rows))
        if key not in self._repeated:
            self._repeated[key] = self.op("Expand", [self.constant(f"byte.{byte}", np.array(byte, np.uint8)), rows])
        return self._repeated[key]

    def save(self, path: Path, external_data: str) -> None:
        """Write ``path`` and, beside it, ``external_data``."""
        graph = ir.Graph(
            self._inputs,
            self._outputs,
            nodes=self._tape.nodes,
            initializers=self._tape.initializers,
            opset_imports={"": OPSET, CONTRIB: 1},
            name=self.name,
        )
        for index, node in enumerate(graph):
            node.name = f"{index}.{node.op_type}"
        self._write_weights(path.parent, external_data)
        ir.save(ir.Model(graph, ir_version=IR_VERSION, producer_name="dflash-ort"), path)

    def _write_weights(self, directory: Path, external_data: str) -> None:
        """Move all but the small weights into one file; tensors that already lie in a file of their own stay there."""
        large = [
            value
            for value in self._tape.initializers
            if (tensor := value.const_value) is not None
            and not isinstance(tensor, ir.ExternalTensor)
            and tensor.nbytes > EXTERNAL_THRESHOLD_BYTES
        ]
        tensors = [value.const_value for value in large if value.const_value is not None]
        for value, stored in zip(
            large, ir.external_data.convert_tensors_to_external(tensors, directory, external_data), strict=True
        ):
            value.const_value = stored
