"""What a target and a drafter are, in numbers: the part of a bundle that every other package reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

DrafterKind = Literal["dflash", "ngram", "none"]

MAY_BE_ABSENT = MappingProxyType({"may_be_absent": True})
"""Metadata of a field that is younger than bundle format 1: a bundle without it means the default."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A target model's shape.

    ``tapped_layers`` index decoder layers from 0 and mean the residual stream *after* that layer
    (``hidden_states[id + 1]`` in transformers); they are empty when the bundle has no model drafter.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    """Most tokens, prompt and answer together, that a request may hold."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    tapped_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """A drafter's shape. ``kind``: "dflash" has a graph, "ngram" looks continuations up, "none" drafts nothing.

    ``block_size`` counts the anchor in slot 0, so a block proposes ``block_size - 1`` tokens, or ``block_size`` where
    each row drafts the token after its slot (``next_token``). ``draft_vocab_size`` is smaller than the target's where
    the drafter has a reduced vocabulary (the graph maps ids back). ``markov_head``: each draft depends on the token
    before it, by a graph of its own.
    """

    kind: DrafterKind
    block_size: int = 0
    mask_token_id: int = 0
    num_layers: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    draft_vocab_size: int = 0
    next_token: bool = field(default=False, metadata=MAY_BE_ABSENT)
    markov_head: bool = field(default=False, metadata=MAY_BE_ABSENT)

    @property
    def max_draft(self) -> int:
        """Most tokens one block can propose."""
        return self.block_size if self.next_token else max(self.block_size - 1, 0)
