"""Names of the graphs' inputs and outputs: what exporter and runtime agree on, kept in one table.

Shapes: ``rows`` token rows of this pass; ``attention_rows`` rows seen by attention (``rows``, padded to the two-row
floor); ``logits`` rows that go through the LM head; ``injected`` newly committed rows for the drafter; ``block`` the
drafter's block; ``drafts`` what a block proposes, `DrafterSpec.max_draft`. The leading 1 is the batch axis. Key and
value buffers are ``[1, kv_heads, capacity, head_dim]``.

The target's *batched* form, which no bundle holds, answers several requests with as many rows each: ``rows`` are then
all requests' rows, one request behind the other, `LAST_KEY` is ``[batch]``, `TOTAL_LENGTH` the longest request's and
the buffers are ``[batch, kv_heads, capacity, head_dim]``.
"""

from __future__ import annotations

INPUT_IDS = "input_ids"  # int64 [1, rows]
QUERY_ROWS = "query_rows"  # int64 [attention_rows]: the row that feeds each attention row
PACKED_ROWS = "packed_rows"  # int64 [rows]: the attention row that answers each row
LOGITS_ROWS = "logits_rows"  # int64 [logits]: rows that go through the LM head
BATCH = "batch"  # int64 [1]: requests that share the pass; the batched form only
LAST_KEY = "seqlens_k"  # int32 [1]: keys after this pass, padding included, less one
TOTAL_LENGTH = "total_sequence_length"  # int32 [1]: keys after this pass, padding included

LOGITS = "logits"  # float32 [1, logits, vocab]
GREEDY = "greedy"  # int64 [1, logits]: argmax, ties to the lowest id
HIDDEN = "hidden"  # float32 [1, rows, taps * hidden_size]: residual streams after the tapped layers, concatenated

INJECTED = "injected_hidden"  # float32 [1, injected, taps * hidden_size]
BLOCK_IDS = "block_ids"  # int64 [1, block]: the anchor, then mask tokens
DRAFT_IDS = "draft_ids"  # int64 [1, drafts], in the target's vocabulary
DRAFT_LOGPROBS = "draft_logprobs"  # float32 [1, drafts]: log-probability of each draft id at temperature 1
DRAFT_LOGITS = "draft_logits"  # float32 [1, drafts, draft_vocab]

# A Markov drafter's block ends in rows; a second graph, the head, makes drafts of them one after the other.
DRAFT_ROWS = "draft_rows"  # float32 [1, drafts, hidden_size]
PREVIOUS_IDS = "previous_ids"  # int64 [1, drafts]: the token before each draft, in the target's vocabulary

EMBEDDING_FILE = "embedding.bin"  # float32 [vocab, hidden_size], little endian; both graphs map it
DRAFT_VOCABULARY_FILE = "draft_vocabulary.npy"  # int64 [draft_vocab]: the target id of each column of draft_logits


def past(kind: str, layer: int) -> str:
    """Name of a key or value buffer's input; ``kind`` is "key" or "value"."""
    return f"past_{kind}.{layer}"


def present(kind: str, layer: int) -> str:
    """Name of the same buffer's output, bound to the same memory."""
    return f"present_{kind}.{layer}"
