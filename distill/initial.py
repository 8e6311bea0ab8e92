"""What training begins with: the target's last layers, or a drafter that is there already.

The drafter's layers are copies of the target's last ones, ``fc`` passes the tap below them through and ``hidden_norm``
is the first one's input norm, so that at first a block's rows attend to the context as the target's own rows would.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from dflash_ort.distill.model import Drafter
from dflash_ort.errors import CheckpointError
from dflash_ort.exporter.checkpoint import DrafterCheckpoint, TargetCheckpoint

_QUIET = 1e-3
"""Least scale of a tap's channel, against division by next to nothing."""
_START = 0.5
"""Share of the deepest tap that block rows start from."""
_SLOT_STD = 0.02


@torch.no_grad()
def set_tap_scale(drafter: Drafter, sample: np.ndarray) -> None:
    """Measure the taps' channels on float32 ``[rows, taps * hidden_size]``: a residual stream's differ a thousandfold,
    and what their projections see should not.
    """
    rows = torch.from_numpy(np.asarray(sample, np.float32))
    scale = rows.std(0, correction=0).clamp_min(_QUIET) + 0.5 * rows.mean(0).abs()
    cast(Tensor, drafter.tap_scale).copy_(scale)


@torch.no_grad()
def borrow(drafter: Drafter, target: TargetCheckpoint, sample: np.ndarray, generator: torch.Generator) -> None:
    """Initialise from the target's last layers; ``sample`` as in `set_tap_scale`, ``generator`` draws the mask slots.

    Per-head norms the target has are taken; where it has none they are set to the root mean square of the borrowed
    layer's queries and keys, so that attention is about as sharp as the target's. Raises CheckpointError when the
    target has fewer layers.
    """
    shape = drafter.shape
    first = target.config.num_layers - shape.config.num_layers
    if first < 0:
        raise CheckpointError(
            f"the drafter's depth is {shape.config.num_layers}, the target has {target.config.num_layers} layers to "
            "borrow; choose a smaller --depth"
        )
    set_tap_scale(drafter, sample)
    below = max((tap for tap in shape.taps if tap < first), default=min(shape.taps))
    _pass_through(drafter, drafter.fc, below, 1.0)
    _copy(drafter.hidden_norm, target, f"model.layers.{first}.input_layernorm")
    _copy(drafter.norm, target, "model.norm")
    context = drafter.hidden_norm(drafter.fc(torch.from_numpy(sample) / cast(Tensor, drafter.tap_scale)))
    for index, layer in enumerate(drafter.layers):
        at = f"model.layers.{first + index}"
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear) or name in ("input_layernorm", "post_attention_layernorm"):
                _copy(module, target, f"{at}.{name}")
        for side in "qk":
            norm, project = (getattr(layer.self_attn, f"{side}_{part}") for part in ("norm", "proj"))
            if _has_head_norms(target):
                _copy(norm, target, f"{at}.self_attn.{side}_norm")
            else:
                norm.weight.fill_(float(project(context).square().mean().sqrt()))
    if drafter.start is not None and drafter.start_embed is not None:
        _pass_through(drafter, drafter.start, max(shape.taps), _START)
        drafter.start_embed.weight.zero_()
    if drafter.slot_embeddings is not None:
        slots = drafter.slot_embeddings.weight
        slots.copy_(torch.randn(slots.shape, generator=generator) * _SLOT_STD)


def resume_from(drafter: Drafter, checkpoint: DrafterCheckpoint, sample: np.ndarray) -> None:
    """Go on from a drafter of the same shape; what it computes stays, ``sample`` only sets the taps' scale."""
    set_tap_scale(drafter, sample)
    drafter.load(checkpoint.tensor)


def _pass_through(drafter: Drafter, project: nn.Linear, tap: int, factor: float) -> None:
    """Make a projection of all scaled taps give one of them as it was, times ``factor``."""
    h = drafter.shape.config.hidden_size
    columns = slice(drafter.shape.taps.index(tap) * h, (drafter.shape.taps.index(tap) + 1) * h)
    project.weight.zero_()
    project.weight[:, columns] = torch.diag(cast(Tensor, drafter.tap_scale)[columns]) * factor


def _copy(module: nn.Module, target: TargetCheckpoint, name: str) -> None:
    weight = cast(Tensor, module.weight)
    weight.copy_(torch.from_numpy(np.array(target.tensor(f"{name}.weight"), np.float32)))


def _has_head_norms(target: TargetCheckpoint) -> bool:
    return target.config.architecture.startswith("Qwen3")


def head_logits(rows: Tensor, norm: Tensor, epsilon: float, head: Tensor) -> Tensor:
    """A head's logits for residual rows that are not normed yet, ``[..., head rows]``."""
    return rms_norm(rows, (rows.shape[-1],), norm, epsilon) @ head.T
