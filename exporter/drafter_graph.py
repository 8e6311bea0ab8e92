"""The DFlash drafter's graph: committed rows' hidden states and a block of mask tokens in, one draft per mask out.

As in z-lab's reference: ``fc`` and ``hidden_norm`` turn the target's tapped states into context features; every layer
projects them with its own k and v (KV injection) and the block's rows attend to the context and to each other, both
ways. Slot ``i`` of the block, a mask token, predicts the token *at* slot ``i``; slot 0 holds the last committed token.
Extensions of ours change what the rows start from and what they predict (see `DrafterExtensions`).

Context rows and block rows go through a layer's projections together, context first, and both are appended to the
cache; the runtime takes the block's rows back by length.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import onnx_ir as ir

from dflash_ort.exporter.attention import BlockAttention, OneOperator, WrittenOut, rows_after
from dflash_ort.exporter.builder import GraphBuilder
from dflash_ort.exporter.checkpoint import DecoderConfig, DrafterCheckpoint, TargetCheckpoint
from dflash_ort.exporter.layers import LayerBuilder
from dflash_ort.exporter.linear import LinearWeights, Recipe
from dflash_ort.exporter.target_graph import embedding, head_rows
from dflash_ort.models import graph_names as names


def build_drafter_graph(
    drafter: DrafterCheckpoint,
    target: TargetCheckpoint,
    recipe: Recipe,
    *,
    positions: int,
    vocab_size: int,
    portable: bool = False,
) -> GraphBuilder:
    """The drafter as a graph.

    ``vocab_size``: rows of the target's own LM head; ids beyond it are never drafted. ``portable``: see `GraphBuilder`.
    """
    config = drafter.config
    g = GraphBuilder("drafter", portable=portable)
    width = len(drafter.target_layer_ids) * target.config.hidden_size
    injected = g.input(names.INJECTED, ir.DataType.FLOAT, [1, "injected", width])
    block_ids = g.input(names.BLOCK_IDS, ir.DataType.INT64, [1, "block"])
    attention = (WrittenOut if portable else OneOperator)(g, config, positions)

    rows = _Rows(g, injected, block_ids)
    context_layers = LayerBuilder(g, config, drafter.tensor, recipe, "", rows=rows.context)
    all_layers, layers = context_layers.over(rows.all), context_layers.over(rows.block)

    features = context_layers.linear(injected, "fc", ["fc"], width, config.hidden_size)
    context = g.rms_norm(features, layers.norm_weight("hidden_norm"), config.norm_epsilon)
    residual = _block_start(g, layers, drafter, embedding(g, target.config), injected, block_ids)
    normed = g.rms_norm(residual, layers.norm_weight("layers.0.input_layernorm"), config.norm_epsilon)
    for layer in range(config.num_layers):
        qkv = all_layers.qkv(g.op("Concat", [context, normed], axis=1), layer)
        attended = _attend(g, layers, attention, qkv, layer, rows.context)
        after = layers.norm_weight(f"layers.{layer}.post_attention_layernorm")
        normed, residual = g.add_rms_norm(layers.attention_out(attended, layer), residual, after, config.norm_epsilon)
        mlp = layers.mlp(normed, layer)
        last = layer + 1 == config.num_layers
        weight = layers.norm_weight("norm" if last else f"layers.{layer + 1}.input_layernorm")
        normed, residual = g.add_rms_norm(mlp, residual, weight, config.norm_epsilon)

    if not drafter.extensions.next_token:
        normed = rows_after(g, normed, g.ints(1))
    if drafter.extensions.markov_head:
        g.output(normed, names.DRAFT_ROWS, ir.DataType.FLOAT, [1, "drafts", config.hidden_size])
    else:
        _head(g, drafter, target, recipe, normed, vocab_size)
    return g


def build_draft_head_graph(
    drafter: DrafterCheckpoint, target: TargetCheckpoint, recipe: Recipe, *, vocab_size: int, portable: bool = False
) -> GraphBuilder:
    """A Markov head and the LM head, for rows of the drafter's graph and the tokens before their drafts."""
    config, h = drafter.config, target.config.hidden_size
    g = GraphBuilder("draft_head", portable=portable)
    rows = g.input(names.DRAFT_ROWS, ir.DataType.FLOAT, [1, "drafts", h])
    previous_ids = g.input(names.PREVIOUS_IDS, ir.DataType.INT64, [1, "drafts"])
    previous = g.op("Gather", [embedding(g, target.config), previous_ids])
    layers = LayerBuilder(g, config, drafter.tensor, recipe, "markov.", g.num_rows(rows))
    ones = g.constant("ones", np.ones(h, np.float32))
    both = g.op("Concat", [g.rms_norm(x, ones, config.norm_epsilon) for x in (rows, previous)], axis=-1)
    gate_up = layers.linear(both, "gate_up", ["gate_proj", "up_proj"], 2 * h, 2 * h)
    corrected = g.op("Add", [rows, layers.linear(g.swiglu(gate_up, h), "down", ["down_proj"], h, h)])
    _head(g, drafter, target, recipe, corrected, vocab_size)
    return g


def _block_start(
    g: GraphBuilder,
    layers: LayerBuilder,
    drafter: DrafterCheckpoint,
    embeddings: ir.Value,
    injected: ir.Value,
    block_ids: ir.Value,
) -> ir.Value:
    """What the block's rows start from, ``[1, block, hidden_size]``; the block may be empty.

    With `context_start` a block needs a row injected in the same pass, which the runtime always has: the round before
    has committed one.
    """
    extensions, h = drafter.extensions, layers.config.hidden_size
    if not (extensions.context_start or extensions.slot_embeddings):
        return g.op("Gather", [embeddings, block_ids])
    anchor = g.op("Gather", [embeddings, g.op("Slice", [block_ids, g.ints(0), g.ints(1), g.ints(1)])])
    if extensions.slot_embeddings:
        name = "slot_embeddings.weight"
        table = g.weight(name, lambda: drafter.tensor(name), (drafter.block_size, h), ir.DataType.FLOAT)
        masks = g.op("Slice", [table, g.ints(1), g.num_rows(block_ids), g.ints(0)])
        rows = g.op("Concat", [anchor, g.op("Unsqueeze", [masks, g.ints(0)])], axis=1)
    else:
        rows = g.op("Gather", [embeddings, block_ids])
    if not extensions.context_start:
        return rows
    # As many rows as there are anchors, one or none: oneDNN's provider crashes on a sum of one row and none.
    count = g.num_rows(anchor)
    last = g.op("Slice", [rows_after(g, injected, g.ints(-1)), g.ints(0), count, g.ints(1)])
    starting = layers.over(count)
    start = starting.linear(last, "fc", ["start"], len(drafter.target_layer_ids) * h, h)
    start_embed = starting.linear(anchor, "fc", ["start_embed"], h, h)
    return g.op("Add", [rows, g.op("Add", [start, start_embed])])


class _Rows:
    """How many rows are context, block and both, int64 ``[1]``."""

    def __init__(self, g: GraphBuilder, injected: ir.Value, block_ids: ir.Value) -> None:
        self.context, self.block = g.num_rows(injected), g.num_rows(block_ids)
        self.all = g.op("Add", [self.context, self.block])


def _attend(
    g: GraphBuilder,
    layers: LayerBuilder,
    attention: BlockAttention,
    qkv: ir.Value,
    layer: int,
    context_rows: ir.Value,
) -> ir.Value:
    """Per-head q/k norms (explicit nodes: the CPU kernel refuses its own), then attention."""
    c = layers.config
    query, key, value = g.split(qkv, [c.query_width, c.kv_width, c.kv_width])
    query = _head_norm(g, layers, query, f"layers.{layer}.self_attn.q_norm", c.num_heads)
    key = _head_norm(g, layers, key, f"layers.{layer}.self_attn.k_norm", c.num_kv_heads)
    return attention.attend_block(layer, query, key, value, context_rows)


def _head_norm(g: GraphBuilder, layers: LayerBuilder, x: ir.Value, name: str, heads: int) -> ir.Value:
    c: DecoderConfig = layers.config
    split = g.op("Reshape", [x, g.ints(1, -1, c.head_dim)])
    normed = g.rms_norm(split, layers.norm_weight(name, c.head_dim), c.norm_epsilon)
    return g.op("Reshape", [normed, g.ints(1, -1, heads * c.head_dim)])


def _head(
    g: GraphBuilder,
    drafter: DrafterCheckpoint,
    target: TargetCheckpoint,
    recipe: Recipe,
    rows: ir.Value,
    vocab_size: int,
) -> None:
    """The target's LM head on the draft vocabulary's rows, the best id of each drafting row and its log-probability."""
    ids = draft_vocabulary(drafter, vocab_size)
    head = LinearWeights("lm_head", target.config.hidden_size, len(ids), head_rows(target, ids))
    logits = recipe["lm_head"].apply(g, rows, head, g.num_rows(rows))
    draft_ids = g.op("Gather", [g.constant("draft_vocabulary", ids), g.row_argmax(logits, len(ids))])
    # log p(best) = max - logsumexp: the largest entry of log-softmax.
    logprobs = g.op("Squeeze", [g.row_max(g.op("LogSoftmax", [logits], axis=-1)), g.ints(-1)])
    g.output(draft_ids, names.DRAFT_IDS, ir.DataType.INT64, [1, "drafts"])
    g.output(logprobs, names.DRAFT_LOGPROBS, ir.DataType.FLOAT, [1, "drafts"])
    g.output(logits, names.DRAFT_LOGITS, ir.DataType.FLOAT, [1, "drafts", len(ids)])


def write_draft_vocabulary(drafter: DrafterCheckpoint, directory: Path, vocab_size: int) -> None:
    """Write the target id of each column of the draft logits."""
    file = io.BytesIO()  # np.save straight to a path would not notice a full disk (see `builder`)
    np.save(file, draft_vocabulary(drafter, vocab_size))
    (directory / names.DRAFT_VOCABULARY_FILE).write_bytes(file.getvalue())


def draft_vocabulary(drafter: DrafterCheckpoint, vocab_size: int) -> np.ndarray:
    """Target ids of the draft logits' rows, int64 ``[draft_vocab]``, without those that the target cannot sample."""
    ids = drafter.draft_vocabulary
    if ids is None:
        return np.arange(vocab_size, dtype=np.int64)
    return ids[ids < vocab_size].astype(np.int64)
