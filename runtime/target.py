"""The target model: one pass over some rows of one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_ort.models import graph_names as names
from dflash_ort.models.spec import ModelSpec
from dflash_ort.runtime.cache import KVCache
from dflash_ort.runtime.graph_io import Scratch, bind_input, bind_output

ATTENTION_FLOOR = 2
"""Query rows that attention must see: one row alone is computed by other code, with other last bits (promise 1)."""


@dataclass(frozen=True, slots=True)
class TargetPass:
    """What a pass gave; the arrays are overwritten by the model's next pass.

    ``logits`` float32 ``[asked rows, vocab]``; ``greedy`` int64 ``[asked rows]``; ``hidden`` float32 ``[rows, taps * hidden]``,
    with no columns when the bundle taps no layers.
    """

    logits: np.ndarray
    greedy: np.ndarray
    hidden: np.ndarray


class TargetModel:
    """Runs the target's graph. Rows are appended to a cache; the caller trims what it does not keep.

    ``attention_floor`` is the least number of rows attention sees, ``row_floor`` the least number the whole graph sees: a
    machine whose one-row linear layers differ gets 2 there (see `runtime.exactness`).
    """

    def __init__(
        self, session: Any, spec: ModelSpec, *, attention_floor: int = ATTENTION_FLOOR, row_floor: int = 1, padded: bool = True
    ) -> None:
        self._session, self.spec = session, spec
        self.attention_floor, self.row_floor, self._padded = attention_floor, row_floor, padded
        self._logits, self._hidden, self._greedy = Scratch(np.float32), Scratch(np.float32), Scratch(np.int64)
        self._tap_width = len(spec.tapped_layers) * spec.hidden_size

    def new_cache(self, capacity: int) -> KVCache:
        spec = self.spec
        return KVCache(
            self._session, num_layers=spec.num_layers, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, capacity=capacity
        )

    def run(self, cache: KVCache, token_ids: Sequence[int] | np.ndarray, num_logits: int) -> TargetPass:
        """Append ``token_ids`` to the cache; logits of the last ``num_logits`` of them.

        Raises ValueError when the rows and their padding do not fit the cache.
        """
        rows = len(token_ids)
        fed = max(rows, self.row_floor)
        attention_rows = max(fed, self.attention_floor) if self._padded else fed
        cache.length.check_room(attention_rows)
        ids = np.empty((1, fed), np.int64)
        ids[0, :rows] = token_ids
        ids[0, rows:] = token_ids[-1]
        total = cache.length.value + attention_rows
        inputs = {
            names.INPUT_IDS: ids,
            names.LOGITS_ROWS: np.arange(rows - num_logits, rows),
            names.LAST_KEY: np.array([total - 1], np.int32),
            names.TOTAL_LENGTH: np.array([total], np.int32),
        }
        if self._padded:
            inputs[names.QUERY_ROWS] = np.minimum(np.arange(attention_rows), fed - 1)
            inputs[names.PACKED_ROWS] = np.arange(fed)
        result = self._run(cache.binding, inputs, fed, num_logits)
        cache.length.append(rows)
        return TargetPass(result.logits, result.greedy, result.hidden[:rows])

    def _run(self, binding: Any, inputs: dict[str, np.ndarray], fed: int, num_logits: int) -> TargetPass:
        logits = self._logits.take(1, num_logits, self.spec.vocab_size)
        greedy = self._greedy.take(1, num_logits)
        hidden = self._hidden.take(1, fed, self._tap_width)
        for name, array in inputs.items():
            bind_input(binding, name, array)
        bind_output(binding, names.LOGITS, logits)
        bind_output(binding, names.GREEDY, greedy)
        if self._tap_width:
            bind_output(binding, names.HIDDEN, hidden)
        self._session.run_with_iobinding(binding)
        return TargetPass(logits[0], greedy[0], hidden[0])
