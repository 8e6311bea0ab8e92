"""The drafter in torch: what `exporter.drafter_graph` computes, for many anchors of several dialogues at once.

A dialogue's context rows are projected once and serve all its anchors; an anchor's block sees the rows before the
anchor and itself, both ways. Parameters carry z-lab's tensor names, but for the taps' scale, which is folded away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from dflash_ort.exporter.checkpoint import DecoderConfig, DrafterExtensions
from dflash_ort.exporter.drafter_reader import ARCHITECTURE

_SCALED = ("fc", "start")
"""Projections of the tapped states."""


@dataclass(frozen=True, slots=True)
class DrafterShape:
    """What a drafter is made of; ``config`` is the drafter's own, its vocabulary the target's."""

    config: DecoderConfig
    block_size: int
    taps: tuple[int, ...]
    extensions: DrafterExtensions
    mask_token_id: int
    num_target_layers: int

    @property
    def num_drafts(self) -> int:
        return self.extensions.num_drafts(self.block_size)

    @property
    def first_draft(self) -> int:
        """How far behind the anchor, in rows, the first drafted token's own row or its predecessor's stands."""
        return 0 if self.extensions.next_token else 1


def drafter_config(target: DecoderConfig, depth: int) -> DecoderConfig:
    """A drafter of ``depth`` layers like the target's, without biases."""
    return replace(
        target,
        architecture=ARCHITECTURE,
        num_layers=depth,
        attention_bias=False,
        attention_out_bias=False,
        mlp_bias=False,
    )


@dataclass(frozen=True, slots=True)
class Pack:
    """Dialogues side by side. ``taps`` float32 ``[rows, taps * hidden_size]``, one dialogue behind the other, each of
    ``lengths``; ``anchors`` int64 per dialogue, places in it, 1 or more; ``anchor_embeddings`` float32 ``[all anchors,
    hidden_size]``.
    """

    taps: Tensor
    lengths: tuple[int, ...]
    anchors: tuple[Tensor, ...]
    anchor_embeddings: Tensor

    @property
    def starts(self) -> list[int]:
        """The first row of each dialogue."""
        return [0, *np.cumsum(self.lengths)[:-1].tolist()]


class _Attention(nn.Module):
    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.q_proj = nn.Linear(c.hidden_size, c.query_width, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.kv_width, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.kv_width, bias=False)
        self.o_proj = nn.Linear(c.query_width, c.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(c.head_dim, c.norm_epsilon)
        self.k_norm = nn.RMSNorm(c.head_dim, c.norm_epsilon)
        self._head_dim = c.head_dim

    def queries(self, x: Tensor, rope: _Rotation) -> Tensor:
        """``[rows, heads, head_dim]``, turned."""
        return rope.turn(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self._head_dim))))

    def keys_values(self, x: Tensor, rope: _Rotation) -> tuple[Tensor, Tensor]:
        """Both ``[rows, kv_heads, head_dim]``, the keys turned."""
        keys = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self._head_dim)))
        return rope.turn(keys), self.v_proj(x).unflatten(-1, (-1, self._head_dim))


class _Mlp(nn.Module):
    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x)))


class _Layer(nn.Module):
    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c.hidden_size, c.norm_epsilon)
        self.self_attn = _Attention(c)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, c.norm_epsilon)
        self.mlp = _Mlp(c)

    def forward(self, x: Tensor, context: Tensor, places: _Places) -> Tensor:
        attention, normed = self.self_attn, self.input_layernorm(x)
        query = attention.queries(normed, places.block_rotation)
        block = attention.keys_values(normed, places.block_rotation)
        injected = attention.keys_values(context, places.context_rotation)
        x = x + attention.o_proj(places.attend(query, block, injected))
        return x + cast(Tensor, self.mlp(self.post_attention_layernorm(x)))


class _Markov(nn.Module):
    """Corrects rows by the embeddings of the tokens before their drafts, see `DrafterExtensions.markov_head`."""

    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        h = c.hidden_size
        self.gate_proj = nn.Linear(2 * h, h, bias=False)
        self.up_proj = nn.Linear(2 * h, h, bias=False)
        self.down_proj = nn.Linear(h, h, bias=False)
        self._epsilon = c.norm_epsilon

    def forward(self, rows: Tensor, previous: Tensor) -> Tensor:
        both = torch.cat([rms_norm(x, (x.shape[-1],), None, self._epsilon) for x in (rows, previous)], -1)
        return rows + cast(Tensor, self.down_proj(silu(self.gate_proj(both)) * self.up_proj(both)))


@dataclass(frozen=True, slots=True)
class _Rotation:
    """Rows of the rotary tables, ``[rows, 1, head_dim / 2]``; the halves of a head are the pairs that turn together."""

    cos: Tensor
    sin: Tensor

    def turn(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], -1)


class _Places:
    """Who stands where in a pack, and so who sees whom."""

    def __init__(self, pack: Pack, block: int, cos: Tensor, sin: Tensor) -> None:
        self._pack, self._block, device = pack, block, cos.device
        context = torch.cat([torch.arange(length, device=device) for length in pack.lengths])
        slots = torch.arange(block, device=device)
        blocks = (torch.cat(pack.anchors)[:, None] + slots).flatten()
        self.context_rotation = _Rotation(cos[context, None], sin[context, None])
        self.block_rotation = _Rotation(cos[blocks, None], sin[blocks, None])
        self._unseen = [
            torch.arange(length, device=device) >= anchors.repeat_interleave(block)[:, None]
            for length, anchors in zip(pack.lengths, pack.anchors, strict=True)
        ]

    def attend(self, query: Tensor, block: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor]) -> Tensor:
        """Attention of all blocks, ``[rows, heads * head_dim]``, one dialogue after the other."""
        counts = [len(anchors) * self._block for anchors in self._pack.anchors]
        lengths = list(self._pack.lengths)
        split = [torch.split(rows, counts) for rows in (query, *block)]
        split += [torch.split(rows, lengths) for rows in context]
        parts = zip(*split, self._unseen, strict=True)
        return torch.cat([_attend(*part, block=self._block) for part in parts])


def _attend(
    query: Tensor,
    block_keys: Tensor,
    block_values: Tensor,
    context_keys: Tensor,
    context_values: Tensor,
    unseen: Tensor,
    *,
    block: int,
) -> Tensor:
    """One dialogue's blocks: softmax over the context's rows, less those ``unseen`` (bool ``[rows, context]``), and the
    block's own.
    """
    rows, heads, dim = query.shape
    context, kv, _ = context_keys.shape
    shared, blocks = heads // kv, rows // block
    query = query.view(rows, kv, shared, dim).permute(1, 2, 0, 3) * dim**-0.5
    far = (query.reshape(kv, shared * rows, dim) @ context_keys.permute(1, 2, 0)).view(kv, shared, rows, context)
    own_keys = block_keys.view(blocks, block, kv, dim).permute(2, 0, 3, 1)
    near = query.reshape(kv, shared, blocks, block, dim) @ own_keys[:, None]
    scores = torch.cat([far.masked_fill(unseen, float("-inf")), near.reshape(kv, shared, rows, block)], -1)
    weights = scores.softmax(-1)
    to_far, to_near = torch.split(weights, [context, block], -1)  # not slices, whose gradients are filled up with zeros
    out = (to_far.reshape(kv, shared * rows, context) @ context_values.transpose(0, 1)).view(kv, shared, rows, dim)
    own_values = block_values.view(blocks, block, kv, dim).permute(2, 0, 1, 3)
    own = to_near.reshape(kv, shared, blocks, block, block) @ own_values[:, None]
    return (out + own.reshape(kv, shared, rows, dim)).permute(2, 0, 1, 3).reshape(rows, heads * dim)


class Drafter(nn.Module):
    """The drafter. ``mask_embedding``: the target's, float32 ``[hidden_size]``, for slots that have none of their own;
    ``positions``: most rows of a dialogue.
    """

    def __init__(self, shape: DrafterShape, mask_embedding: Tensor, positions: int) -> None:
        super().__init__()
        c, h, extensions = shape.config, shape.config.hidden_size, shape.extensions
        self.shape = shape
        self.fc = nn.Linear(len(shape.taps) * h, h, bias=False)
        self.hidden_norm = nn.RMSNorm(h, c.norm_epsilon)
        self.layers = nn.ModuleList(_Layer(c) for _ in range(c.num_layers))
        self.norm = nn.RMSNorm(h, c.norm_epsilon)
        self.start: nn.Linear | None = None
        self.start_embed: nn.Linear | None = None
        self.slot_embeddings: nn.Embedding | None = None
        self.markov: _Markov | None = None
        if extensions.context_start:
            self.start = nn.Linear(len(shape.taps) * h, h, bias=False)
            self.start_embed = nn.Linear(h, h, bias=False)
        if extensions.slot_embeddings:
            self.slot_embeddings = nn.Embedding(shape.block_size, h)
        if extensions.markov_head:
            self.markov = _Markov(c)
        self.register_buffer("tap_scale", torch.ones(len(shape.taps) * h))
        self.register_buffer("mask_embedding", mask_embedding, persistent=False)
        cos, sin = c.rope.tables(positions + shape.block_size, c.head_dim)
        self.register_buffer("cos", torch.from_numpy(cos), persistent=False)
        self.register_buffer("sin", torch.from_numpy(sin), persistent=False)

    def forward(self, pack: Pack, previous: Tensor, block_size: int | None = None) -> Tensor:
        """The rows that draft, ready for the LM head, float32 ``[anchors, num_drafts, hidden_size]``; of blocks of
        ``block_size`` slots, where given.

        ``previous``: embeddings of the tokens before the drafts, of the rows' shape; only a Markov head looks at them.
        """
        shape = self.shape if block_size is None else replace(self.shape, block_size=block_size)
        taps = pack.taps / cast(Tensor, self.tap_scale)
        context = self.hidden_norm(self.fc(taps))
        places = _Places(pack, shape.block_size, cast(Tensor, self.cos), cast(Tensor, self.sin))
        x = self._start(taps, pack, shape.block_size).flatten(0, 1)
        for layer in self.layers:
            x = layer(x, context, places)
        x = x.view(-1, shape.block_size, shape.config.hidden_size)[:, shape.first_draft :]
        rows = cast(Tensor, self.norm(x))
        return rows if self.markov is None else cast(Tensor, self.markov(rows, previous))

    def _start(self, taps: Tensor, pack: Pack, block: int) -> Tensor:
        """What the blocks' rows start from, ``[anchors, block, hidden_size]``."""
        anchor = pack.anchor_embeddings[:, None]
        masks = cast(Tensor, self.mask_embedding).expand(block, -1)
        if self.slot_embeddings is not None:
            masks = self.slot_embeddings.weight[:block]
        rows = torch.cat([anchor, masks[1:].expand(len(anchor), -1, -1)], 1)
        if self.start is None or self.start_embed is None:
            return rows
        last = torch.cat([anchors + start - 1 for anchors, start in zip(pack.anchors, pack.starts, strict=True)])
        return cast(Tensor, rows + self.start(taps[last])[:, None] + self.start_embed(anchor))

    def tensors(self) -> dict[str, np.ndarray]:
        """A checkpoint's tensors, float32, the taps' scale folded into their projections."""
        return fold({name: tensor.detach().cpu() for name, tensor in self.state_dict().items()})

    @torch.no_grad()
    def load(self, tensor: Callable[[str], np.ndarray]) -> None:
        """Take a checkpoint's tensors by name; the taps' scale stays, and what is computed is the checkpoint's."""
        scale = cast(Tensor, self.tap_scale)
        for name, parameter in self.named_parameters():
            value = torch.from_numpy(np.array(tensor(name), np.float32)).to(parameter.device)
            parameter.copy_(value * scale if name.removesuffix(".weight") in _SCALED else value)


def fold(state: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """A checkpoint's tensors from a `Drafter`'s state: scaled taps times a weight are taps times the scaled weight."""
    scale = state["tap_scale"].float()
    folded = {}
    for name, tensor in state.items():
        if name != "tap_scale":
            weight = tensor.float()
            folded[name] = (weight / scale if name.removesuffix(".weight") in _SCALED else weight).numpy()
    return folded


def pack_of(
    taps: Sequence[np.ndarray], anchors: Sequence[np.ndarray], embeddings: Sequence[np.ndarray], device: str = "cpu"
) -> Pack:
    """A pack from each dialogue's tapped states, anchors and anchors' embeddings."""
    return Pack(
        torch.from_numpy(np.concatenate(taps).astype(np.float32, copy=False)).to(device),
        tuple(len(rows) for rows in taps),
        tuple(torch.from_numpy(np.asarray(places, np.int64)).to(device) for places in anchors),
        torch.from_numpy(np.concatenate(embeddings).astype(np.float32, copy=False)).to(device),
    )
