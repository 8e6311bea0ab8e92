"""The target's graph: token rows in; logits of the asked rows, their argmax and the tapped residual streams out.

Attention runs over ``query_rows``, a gather of this pass's rows that repeats one where a request would otherwise have
a single query row: ``GroupQueryAttention`` answers one row with other bits than several (the two-row floor of the
design). The repeated row's key and value land behind the last real one and are overwritten by the next pass.
``packed_rows`` takes the real rows back.

The batched form is for making training data, where the last bits do not matter: linear layers run over all requests'
rows as one, and only attention sees the batch. It has no padding.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir

from dflash_ort.exporter.attention import CachedAttention
from dflash_ort.exporter.builder import Array, GraphBuilder
from dflash_ort.exporter.checkpoint import DecoderConfig, TargetCheckpoint
from dflash_ort.exporter.layers import LayerBuilder
from dflash_ort.exporter.linear import LinearWeights, Recipe
from dflash_ort.models import graph_names as names


def build_target_graph(
    checkpoint: TargetCheckpoint,
    recipe: Recipe,
    *,
    positions: int,
    vocab_size: int,
    taps: tuple[int, ...],
    pad_attention: bool = True,
    batched: bool = False,
    portable: bool = False,
) -> GraphBuilder:
    """The target as a graph.

    ``positions``: length of the rotary tables. ``vocab_size``: rows of the LM head, at most the checkpoint's; rows
    beyond the tokenizer are padding that must never be sampled, so they are left out. ``taps``: layers whose residual
    stream is put out. ``pad_attention=False`` leaves the two gathers out: faster for one row and not exact; benchmarks
    and tests use it. ``batched`` adds an input `names.BATCH` and leaves them out too: one row each for several
    requests, or many rows for one (several rows each is more than ``GroupQueryAttention`` takes on a past).
    ``portable``: see `GraphBuilder`.
    """
    config = checkpoint.config
    g = GraphBuilder("target", portable=portable)
    input_ids = g.input(names.INPUT_IDS, ir.DataType.INT64, [1, "rows"])
    pad = pad_attention and not batched
    query_rows = g.input(names.QUERY_ROWS, ir.DataType.INT64, ["attention_rows"]) if pad else None
    packed_rows = g.input(names.PACKED_ROWS, ir.DataType.INT64, ["rows"]) if pad else None
    logits_rows = g.input(names.LOGITS_ROWS, ir.DataType.INT64, ["logits"])
    batch = g.input(names.BATCH, ir.DataType.INT64, [1]) if batched else None
    attention = CachedAttention(g, config, positions, causal=True, batched=batched)
    layers = LayerBuilder(g, config, checkpoint.tensor, recipe, "model.", rows=g.num_rows(input_ids))

    width = config.query_width + 2 * config.kv_width
    by_request = g.op("Concat", [batch, g.ints(-1, width)], axis=0) if batch is not None else None
    residual = g.op("Gather", [embedding(g, config), input_ids])
    normed = g.rms_norm(residual, layers.norm_weight("layers.0.input_layernorm"), config.norm_epsilon)
    tapped: dict[int, ir.Value] = {}
    for layer in range(config.num_layers):
        qkv = layers.qkv(normed, layer)
        if query_rows is not None:
            qkv = g.op("Gather", [qkv, query_rows], axis=1)
        if by_request is not None:
            qkv = g.op("Reshape", [qkv, by_request])
        attended = attention.attend(layer, qkv)
        if by_request is not None:
            attended = g.op("Reshape", [attended, g.ints(1, -1, config.query_width)])
        if packed_rows is not None:
            attended = g.op("Gather", [attended, packed_rows], axis=1)
        after = layers.norm_weight(f"layers.{layer}.post_attention_layernorm")
        normed, residual = g.add_rms_norm(layers.attention_out(attended, layer), residual, after, config.norm_epsilon)
        mlp = layers.mlp(normed, layer)
        if layer + 1 < config.num_layers:
            weight = layers.norm_weight(f"layers.{layer + 1}.input_layernorm")
            normed, residual = g.add_rms_norm(mlp, residual, weight, config.norm_epsilon)
        else:
            residual = g.op("Add", [mlp, residual])
        if layer in taps:
            tapped[layer] = residual

    _head(g, checkpoint, layers, g.op("Gather", [residual, logits_rows], axis=1), vocab_size)
    if taps:
        hidden = g.op("Concat", [tapped[layer] for layer in taps], axis=-1)
        g.output(hidden, names.HIDDEN, ir.DataType.FLOAT, [1, "rows", len(taps) * config.hidden_size])
    return g


def _head(g: GraphBuilder, checkpoint: TargetCheckpoint, layers: LayerBuilder, rows: ir.Value, vocab_size: int) -> None:
    """Final norm, LM head and argmax over the asked rows."""
    config = checkpoint.config
    normed = g.rms_norm(rows, layers.norm_weight("norm"), config.norm_epsilon)
    head = LinearWeights("lm_head", config.hidden_size, vocab_size, head_rows(checkpoint, np.arange(vocab_size)))
    logits = layers.recipe["lm_head"].apply(g, normed, head, g.num_rows(normed))
    g.output(logits, names.LOGITS, ir.DataType.FLOAT, [1, "logits", vocab_size])
    greedy = g.row_argmax(logits, vocab_size)
    g.output(greedy, names.GREEDY, ir.DataType.INT64, [1, "logits"])


def embedding(g: GraphBuilder, config: DecoderConfig) -> ir.Value:
    """The token embedding table ``[vocab, hidden_size]``, a file that both graphs map (see `write_embedding`)."""
    return g.stored("embed_tokens.weight", names.EMBEDDING_FILE, (config.vocab_size, config.hidden_size))


def write_embedding(checkpoint: TargetCheckpoint, directory: Path) -> None:
    """Write the table that `embedding` refers to."""
    table = np.ascontiguousarray(checkpoint.tensor("model.embed_tokens.weight"), dtype="<f4")
    (directory / names.EMBEDDING_FILE).write_bytes(table.data)  # not tofile: see `builder`


def head_rows(checkpoint: TargetCheckpoint, ids: Array) -> Callable[[], Array]:
    """Loads the LM head's rows for these token ids, ``[len(ids), hidden_size]``; a tied head is the embedding table."""
    tied = checkpoint.config.tie_embeddings
    return lambda: checkpoint.tensor("model.embed_tokens.weight" if tied else "lm_head.weight")[ids]
