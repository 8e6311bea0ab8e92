"""The parts of a decoder layer that target and drafter share: norms, fused projections, rotary tables, gated MLP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from dflash_ort.exporter.builder import Array, GraphBuilder
from dflash_ort.exporter.checkpoint import DecoderConfig, TensorLoader
from dflash_ort.exporter.linear import LinearWeights, Recipe, Role


@dataclass(frozen=True, slots=True)
class LayerBuilder:
    """Adds the pieces of decoder layers to one graph, reading weights under a common name prefix.

    ``prefix`` is "model." for a target and "" for a drafter in z-lab's format; ``rows`` is the number of rows that the
    linear layers see, int64 ``[1]``.
    """

    g: GraphBuilder
    config: DecoderConfig
    tensor: TensorLoader
    recipe: Recipe
    prefix: str
    rows: ir.Value

    def over(self, rows: ir.Value) -> LayerBuilder:
        """The same layers over another number of rows."""
        return replace(self, rows=rows)

    def norm_weight(self, name: str, size: int | None = None) -> ir.Value:
        """The weight of an RMSNorm, ``[hidden_size]`` unless ``size`` says otherwise."""
        full = f"{self.prefix}{name}.weight"
        return self.g.weight(full, lambda: self.tensor(full), (size or self.config.hidden_size,), ir.DataType.FLOAT)

    def linear(
        self, x: ir.Value, role: Role, parts: Sequence[str], in_features: int, out_features: int, *, bias: bool = False
    ) -> ir.Value:
        """A projection in its role's format; several ``parts`` are stacked along the outputs and run as one."""
        names_ = [f"{self.prefix}{part}" for part in parts]

        def load(kind: str) -> Array:
            return np.concatenate([self.tensor(f"{name}.{kind}") for name in names_])

        weights = LinearWeights(
            name="+".join([names_[0], *(name.rsplit(".", 1)[-1] for name in names_[1:])]),
            in_features=in_features,
            out_features=out_features,
            load=lambda: load("weight"),
            load_bias=(lambda: load("bias")) if bias else None,
        )
        return self.recipe[role].apply(self.g, x, weights, self.rows)

    def qkv(self, x: ir.Value, layer: int) -> ir.Value:
        """Fused query, key and value rows, ``[1, rows, (heads + 2 kv_heads) * head_dim]``."""
        c = self.config
        parts = [f"layers.{layer}.self_attn.{p}_proj" for p in "qkv"]
        return self.linear(x, "qkv", parts, c.hidden_size, c.query_width + 2 * c.kv_width, bias=c.attention_bias)

    def attention_out(self, x: ir.Value, layer: int) -> ir.Value:
        c = self.config
        part = [f"layers.{layer}.self_attn.o_proj"]
        return self.linear(x, "attention_out", part, c.query_width, c.hidden_size, bias=c.attention_out_bias)

    def mlp(self, x: ir.Value, layer: int) -> ir.Value:
        """``down(silu(gate(x)) * up(x))`` with gate and up fused."""
        c, at = self.config, f"layers.{layer}.mlp"
        wide = [f"{at}.gate_proj", f"{at}.up_proj"]
        gate_up = self.linear(x, "gate_up", wide, c.hidden_size, 2 * c.intermediate_size, bias=c.mlp_bias)
        inner = self.g.swiglu(gate_up, c.intermediate_size)
        return self.linear(inner, "down", [f"{at}.down_proj"], c.intermediate_size, c.hidden_size, bias=c.mlp_bias)
