"""The target's batched form: one row each for many texts at once, or many rows of one. Fast, and not exact.

It makes training data: a row's last bits may differ from the engine's, which pads attention (the two-row floor).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dflash_ort.models import graph_names as names
from dflash_ort.models.spec import ModelSpec
from dflash_ort.runtime.cache import reserve
from dflash_ort.runtime.graph_io import Array, Binding

CHUNK = 128
"""Rows of a prefill pass."""


class BatchedTarget:
    """Runs a batched graph over ``slots`` texts of at most ``capacity`` tokens each.

    A slot holds the text whose keys and values are in its part of the buffers, float32 ``[slots, kv_heads, capacity,
    head_dim]``, two a layer. What a slot computes depends on its own text alone, not on the slot or its neighbours.
    """

    def __init__(self, session: Any, spec: ModelSpec, *, slots: int, capacity: int) -> None:
        self._session, self.spec, self.slots, self.capacity = session, spec, slots, capacity
        size = (slots, spec.num_kv_heads, capacity, spec.head_dim)
        self._buffers = {(kind, layer): reserve(size) for layer in range(spec.num_layers) for kind in ("key", "value")}
        self._texts: list[list[int]] = [[] for _ in range(slots)]
        self._bindings: dict[tuple[int, bool], Binding] = {}
        self._tap_width = len(spec.tapped_layers) * spec.hidden_size
        self._one, self._total, self._last_key = np.ones(1, np.int64), np.zeros(1, np.int32), np.zeros(1, np.int32)
        self._last_logits, self._last_greedy = np.empty((1, 1, spec.vocab_size), np.float32), np.empty((1, 1), np.int64)
        self._decoding = self._bind_decoding()

    def _bind_decoding(self) -> Binding:
        slots = self.slots
        self._ids, self._last_keys = np.zeros((1, slots), np.int64), np.zeros(slots, np.int32)
        self._logits = np.empty((1, slots, self.spec.vocab_size), np.float32)
        self._greedy = np.empty((1, slots), np.int64)
        binding = self._bind(slice(None), np.full(1, slots, np.int64), self._last_keys)
        binding.input(names.INPUT_IDS, self._ids)
        binding.input(names.LOGITS_ROWS, np.arange(slots))
        binding.output(names.LOGITS, self._logits)
        binding.output(names.GREEDY, self._greedy)
        return binding

    def _bind(self, part: slice, batch: Array, last_key: Array) -> Binding:
        """A binding of these slots' buffers, as past and present alike, and of the lengths, refilled in place."""
        binding = Binding(self._session)
        for (kind, layer), buffer in self._buffers.items():
            view = buffer[part]
            binding.input(names.past(kind, layer), view)
            binding.output(names.present(kind, layer), view)
        binding.input(names.BATCH, batch)
        binding.input(names.LAST_KEY, last_key)
        binding.input(names.TOTAL_LENGTH, self._total)
        return binding

    def length(self, slot: int) -> int:
        """Tokens of the slot's text."""
        return len(self._texts[slot])

    def clear(self, slot: int) -> None:
        """Forget the slot's text. An empty slot takes no part in `decode`, though a dummy row runs for it."""
        self._texts[slot] = []

    def prefill(self, slot: int, ids: Sequence[int]) -> tuple[Array, int]:
        """Make ``ids`` (one or more) the slot's text; rows that it begins with already are not run again.

        Returns the logits after the last token, float32 ``[vocab]``, which the next prefill overwrites, and their
        argmax. Raises ValueError when the text does not fit the capacity, DFlashError with ONNX Runtime's reason.
        """
        kept = self._keep_common(slot, ids)
        self._append(slot, ids[kept:], None)
        return self._last_logits[0, 0], int(self._last_greedy[0, 0])

    def decode(self, tokens: Sequence[int] | Array) -> tuple[Array, Array]:
        """Append one token to the text of every slot that has one; ``tokens`` int ``[slots]``, ignored where empty.

        Returns logits, float32 ``[slots, vocab]``, and their argmax, int64 ``[slots]``, which the next call overwrites;
        an empty slot's row means nothing. Raises as `prefill`.
        """
        for slot, text in enumerate(self._texts):
            if len(text) >= self.capacity:
                raise ValueError(f"slot {slot} is full: it holds {len(text)} tokens")
            self._last_keys[slot] = len(text)
            self._ids[0, slot] = tokens[slot] if text else 0
        self._total[0] = self._last_keys.max() + 1
        self._decoding.run()
        for text, token in zip(self._texts, self._ids[0].tolist(), strict=True):
            if text:
                text.append(token)
        return self._logits[0], self._greedy[0]

    def hidden(self, ids: Sequence[int], *, slot: int = 0) -> Array:
        """The tapped layers' residual streams for a whole text, float32 ``[len(ids), taps * hidden_size]``.

        The slot holds the text afterwards. Raises ValueError when the graph taps no layers, and as `prefill`.
        """
        if not self._tap_width:
            raise ValueError("this graph taps no layers")
        self.clear(slot)
        self._keep_common(slot, ids)
        out: Array = np.empty((1, len(ids), self._tap_width), np.float32)
        self._append(slot, ids, out)
        return out.reshape(len(ids), self._tap_width)

    def _keep_common(self, slot: int, ids: Sequence[int]) -> int:
        """Cut the slot's text to where ``ids`` begins to differ, at least one token before its end."""
        if not 0 < len(ids) <= self.capacity:
            raise ValueError(f"{len(ids)} tokens do not fit a slot of {self.capacity}")
        text, kept = self._texts[slot], 0
        for ours, theirs in zip(text, ids[:-1], strict=False):
            if ours != theirs:
                break
            kept += 1
        del text[kept:]
        return kept

    def _append(self, slot: int, ids: Sequence[int], hidden: Array | None) -> None:
        """Run rows behind the slot's text, a chunk at a time; only the last row has logits."""
        key = (slot, hidden is not None)
        binding = self._bindings.get(key)
        if binding is None:
            binding = self._bindings[key] = self._bind(slice(slot, slot + 1), self._one, self._last_key)
        text = self._texts[slot]
        for start in range(0, len(ids), CHUNK):
            piece = list(ids[start : start + CHUNK])
            last = len(piece) - 1
            self._total[0] = len(text) + len(piece)
            self._last_key[0] = self._total[0] - 1
            binding.input(names.INPUT_IDS, np.array([piece], np.int64))
            binding.input(names.LOGITS_ROWS, np.array([last], np.int64))
            binding.output(names.LOGITS, self._last_logits)
            binding.output(names.GREEDY, self._last_greedy)
            if hidden is not None:
                binding.output(names.HIDDEN, hidden[:, start : start + len(piece)])
            binding.run()
            text += piece
