"""The target model: one pass over some rows of one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_ort.models import graph_names as names
from dflash_ort.models.spec import ModelSpec
from dflash_ort.runtime.cache import KVCache
from dflash_ort.runtime.graph_io import Array, Scratch

ATTENTION_FLOOR = 2
"""Query rows that attention must see: one row alone is computed by other code, with other last bits (promise 1)."""

_KEPT_PLANS = 64
"""Passes of up to this many rows keep their index arrays, so that decoding binds nothing anew."""


@dataclass(frozen=True, slots=True)
class TargetPass:
    """What a pass gave; the arrays are overwritten by the model's next pass.

    ``logits`` float32 ``[asked rows, vocab]``; ``greedy`` int64 ``[asked rows]``; ``hidden`` float32 ``[rows, taps
    * hidden]``, with no columns when the bundle taps no layers.
    """

    logits: Array
    greedy: Array
    hidden: Array


class _Plan:
    """The inputs of a pass that depend only on how many rows it has; ids are refilled in place."""

    __slots__ = ("attention_rows", "ids", "logits_rows", "packed_rows", "query_rows")

    def __init__(self, rows: int, num_logits: int, fed: int, attention_rows: int) -> None:
        self.attention_rows = attention_rows
        self.ids = np.empty((1, fed), np.int64)
        self.logits_rows = np.arange(rows - num_logits, rows)
        self.query_rows = np.minimum(np.arange(attention_rows), fed - 1)
        self.packed_rows = np.arange(fed)


class TargetModel:
    """Runs the target's graph. Rows are appended to a cache; the caller trims what it does not keep.

    ``attention_floor`` is the least number of rows attention sees, ``row_floor`` the least number the whole graph
    sees: a machine whose one-row linear layers differ gets 2 there (see `runtime.exactness`). A graph exported
    without the gathers that pad attention runs as it is, and is not exact.
    """

    def __init__(
        self, session: Any, spec: ModelSpec, *, attention_floor: int = ATTENTION_FLOOR, row_floor: int = 1
    ) -> None:
        self._session, self.spec = session, spec
        self.attention_floor, self.row_floor = attention_floor, row_floor
        self.padded = names.QUERY_ROWS in {value.name for value in session.get_inputs()}
        self._logits, self._hidden, self._greedy = Scratch(np.float32), Scratch(np.float32), Scratch(np.int64)
        self._last_key, self._total = np.zeros(1, np.int32), np.zeros(1, np.int32)
        self._plans: dict[tuple[int, int, int, int], _Plan] = {}
        self._tap_width = len(spec.tapped_layers) * spec.hidden_size

    def new_cache(self, capacity: int) -> KVCache:
        return KVCache(self._session, self.spec, capacity)

    def run(self, cache: KVCache, token_ids: Sequence[int] | Array, num_logits: int) -> TargetPass:
        """Append ``token_ids`` (one or more) to the cache; logits of the last ``num_logits`` of them.

        Raises ValueError when the rows and their padding do not fit the cache.
        """
        rows = len(token_ids)
        plan = self._plan(rows, num_logits)
        cache.length.check_room(plan.attention_rows)
        plan.ids[0, :rows] = token_ids
        plan.ids[0, rows:] = token_ids[-1]
        self._total[0] = total = cache.length.value + plan.attention_rows
        self._last_key[0] = total - 1
        result = self._run(cache, plan, num_logits)
        cache.length.append(rows)
        return TargetPass(result.logits, result.greedy, result.hidden[:rows])

    def _plan(self, rows: int, num_logits: int) -> _Plan:
        fed = max(rows, self.row_floor)
        attention_rows = max(fed, self.attention_floor) if self.padded else fed
        key = (rows, num_logits, fed, attention_rows)
        plan = self._plans.get(key)
        if plan is None:
            plan = _Plan(*key)
            if rows <= _KEPT_PLANS:
                self._plans[key] = plan
        return plan

    def _run(self, cache: KVCache, plan: _Plan, num_logits: int) -> TargetPass:
        binding, fed = cache.binding, plan.ids.shape[1]
        logits = self._logits.take(1, num_logits, self.spec.vocab_size)
        greedy = self._greedy.take(1, num_logits)
        hidden = self._hidden.take(1, fed, self._tap_width)
        binding.input(names.INPUT_IDS, plan.ids)
        binding.input(names.LOGITS_ROWS, plan.logits_rows)
        binding.input(names.LAST_KEY, self._last_key)
        binding.input(names.TOTAL_LENGTH, self._total)
        if self.padded:
            binding.input(names.QUERY_ROWS, plan.query_rows)
            binding.input(names.PACKED_ROWS, plan.packed_rows)
        binding.output(names.LOGITS, logits)
        binding.output(names.GREEDY, greedy)
        if self._tap_width:
            binding.output(names.HIDDEN, hidden)
        binding.run()
        return TargetPass(logits[0], greedy[0], hidden[0])
