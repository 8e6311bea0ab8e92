"""What training begins with: the target's last layers, or a drafter that is there already.

The drafter's layers are copies of the target's last ones, ``fc`` passes the tap below them through and ``hidden_norm``
is the first one's input norm, so that at first a block's rows attend to the context as the target's own rows would.
Where block rows start from the context, the start is fitted by least squares to what the target itself would hand those
layers at the anchor: so much of a drafter needs no training at all.
"""

from __future__ import annotations

from collections.abc import Iterable
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
_RIDGE = 1e-3
"""Of the mean square of an input, against fits to what too few rows say."""
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
def borrow(
    drafter: Drafter,
    target: TargetCheckpoint,
    sample: np.ndarray,
    texts: Iterable[tuple[np.ndarray, np.ndarray]],
    generator: torch.Generator,
) -> None:
    """Initialise from the target's last layers; ``sample`` as in `set_tap_scale`, ``generator`` draws what nothing
    is borrowed for: the mask slots, and a Markov head, which corrects nothing yet.

    ``texts``: tapped states and embeddings of some, ``[rows, taps * hidden_size]`` and ``[rows, hidden_size]``, to fit
    the start to. Per-head norms the target has are taken; where it has none they are set to the root mean square of the
    borrowed layer's queries and keys, so that attention is about as sharp as the target's. Raises CheckpointError when
    the target has fewer layers.
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
    columns = _columns(drafter, below)
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, columns] = torch.diag(cast(Tensor, drafter.tap_scale)[columns])
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
        _fit_start(drafter, drafter.start, drafter.start_embed, columns, texts)
    if drafter.markov is not None:
        for module in (drafter.markov.gate_proj, drafter.markov.up_proj):
            drawn = torch.randn(module.weight.shape, generator=generator)
            module.weight.copy_(drawn / module.in_features**0.5)
        drafter.markov.down_proj.weight.zero_()
    if drafter.slot_embeddings is not None:
        slots = drafter.slot_embeddings.weight
        slots.copy_(torch.randn(slots.shape, generator=generator) * _SLOT_STD)


def resume_from(drafter: Drafter, checkpoint: DrafterCheckpoint, sample: np.ndarray) -> None:
    """Go on from a drafter of the same shape; what it computes stays, ``sample`` only sets the taps' scale."""
    set_tap_scale(drafter, sample)
    drafter.load(checkpoint.tensor)


def _columns(drafter: Drafter, tap: int) -> slice:
    """Where a tap's states are among all taps'."""
    h = drafter.shape.config.hidden_size
    at = drafter.shape.taps.index(tap) * h
    return slice(at, at + h)


def _fit_start(
    drafter: Drafter,
    start: nn.Linear,
    start_embed: nn.Linear,
    wanted: slice,
    texts: Iterable[tuple[np.ndarray, np.ndarray]],
) -> None:
    """Ridge regression of a row's state below the borrowed layers on its own embedding and the taps of the row before.

    The normal equations are float32 sums over all texts, solved in float64.
    """
    width, h = start.in_features, start.out_features
    squares, products = torch.zeros(width + h, width + h), torch.zeros(width + h, h)
    loud = 0.0
    for taps, embeddings in texts:
        states, own = (torch.from_numpy(np.asarray(rows, np.float32)) for rows in (taps, embeddings))
        loud = loud or float(own.square().mean().sqrt().clamp_min(_QUIET))
        inputs = torch.cat([states[1:-1] / cast(Tensor, drafter.tap_scale), own[2:] / loud], 1)
        squares += inputs.T @ inputs
        products += inputs.T @ (states[2:, wanted] - own[2:])
    squares.diagonal().add_(_RIDGE * float(squares.diagonal().mean()) + _QUIET)
    fitted = torch.linalg.solve(squares.double(), products.double()).float()
    start.weight.copy_(fitted[:width].T)
    start_embed.weight.copy_(fitted[width:].T / (loud or 1.0))


def _copy(module: nn.Module, target: TargetCheckpoint, name: str) -> None:
    weight = cast(Tensor, module.weight)
    weight.copy_(torch.from_numpy(np.array(target.tensor(f"{name}.weight"), np.float32)))


def _has_head_norms(target: TargetCheckpoint) -> bool:
    return target.config.architecture.startswith("Qwen3")


def head_logits(rows: Tensor, norm: Tensor, epsilon: float, head: Tensor) -> Tensor:
    """A head's logits for residual rows that are not normed yet, ``[..., head rows]``."""
    return rms_norm(rows, (rows.shape[-1],), norm, epsilon) @ head.T
