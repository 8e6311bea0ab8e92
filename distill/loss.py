"""The objective: cross-entropy against what the target itself expects next, drafts further ahead counting less.

DFlash trains on the tokens alone. The target's whole next-token distribution says more per row, and where the last
layer is tapped it is there for the price of the head's rows.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dflash_ort.distill.batches import Batch
from dflash_ort.distill.initial import head_logits
from dflash_ort.distill.model import DrafterShape
from dflash_ort.exporter.checkpoint import TargetCheckpoint
from dflash_ort.exporter.target_graph import head_rows
from dflash_ort.runtime.graph_io import Array


class Objective:
    """The loss of drafted rows, over the draft vocabulary; it holds what is frozen of the target.

    ``vocabulary``: target ids of the draft vocabulary, int64, ascending. Draft ``i``, from 0, weighs ``exp(-i /
    decay)``. ``token_weight`` is that of the cross-entropy with the tokens beside the one with the target's
    distribution; where the last layer is not tapped the tokens are all there is. A token outside the draft vocabulary
    teaches nothing.
    """

    def __init__(
        self,
        target: TargetCheckpoint,
        shape: DrafterShape,
        vocabulary: Array,
        *,
        decay: float,
        token_weight: float = 0.0,
        device: str = "cpu",
    ) -> None:
        c = target.config
        self.vocabulary = vocabulary
        self.head = torch.from_numpy(np.ascontiguousarray(head_rows(target, vocabulary)(), np.float32)).to(device)
        self._norm = torch.from_numpy(np.array(target.tensor("model.norm.weight"), np.float32)).to(device)
        self._epsilon = c.norm_epsilon
        self._weights = torch.exp(-torch.arange(shape.num_drafts, device=device) / decay)
        self._token_weight = token_weight
        self._draft_ids = torch.full((c.vocab_size,), -1, device=device)
        self._draft_ids[torch.from_numpy(vocabulary).to(device)] = torch.arange(len(vocabulary), device=device)
        last = c.num_layers - 1
        self._teacher = None
        if last in shape.taps:
            at = shape.taps.index(last) * c.hidden_size
            self._teacher = slice(at, at + c.hidden_size)

    def __call__(self, rows: Tensor, batch: Batch) -> Tensor:
        """Mean loss, in nats per row, weighted. ``rows`` are the drafter's, ``[anchors, drafts, hidden_size]``."""
        expected = (rows @ self.head.T).float().log_softmax(-1)
        ids = self._draft_ids[batch.tokens]
        weights = batch.known * self._weights[: rows.shape[1]]
        if self._teacher is None:
            weights = weights * (ids >= 0)
            return (_on_tokens(expected, ids) * weights).sum() / weights.sum().clamp_min(1.0)
        places, which = torch.unique(batch.before, return_inverse=True)
        with torch.no_grad():
            residual = batch.pack.taps[places, self._teacher]
            taught = head_logits(residual, self._norm, self._epsilon, self.head).softmax(-1)
        losses = -(expected * taught[which]).sum(-1)
        if self._token_weight:
            losses = losses + self._token_weight * _on_tokens(expected, ids)
        return (losses * weights).sum() / weights.sum().clamp_min(1.0)

    def draft(self, rows: Tensor) -> Array:
        """The likeliest token of each row, as the target's ids, int64."""
        tokens: Array = self.vocabulary[(rows @ self.head.T).argmax(-1).cpu().numpy()]
        return tokens


def _on_tokens(expected: Tensor, ids: Tensor) -> Tensor:
    """Cross-entropy with the draft ids that stand there; 0 where -1 does."""
    return -expected.gather(-1, ids.clamp_min(0)[..., None])[..., 0] * (ids >= 0)
