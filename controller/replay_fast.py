"""Replay of what needs no controller's memory, whole traces at once: fixed lengths, thresholds, and the bound that
knows what will be accepted.

Where a rule's length depends on the anchor alone, so does the next anchor, and all texts can be walked in step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_ort.controller.baselines import Threshold
from dflash_ort.controller.cost import CostModel, CostTable
from dflash_ort.controller.fixed import FixedLength
from dflash_ort.controller.protocol import INJECTION_CHUNK, MAX_PENDING, Controller
from dflash_ort.controller.replay import Outcome
from dflash_ort.controller.trace import TracedText

Array = np.ndarray[Any, np.dtype[Any]]


def is_stateless(controller: Controller) -> bool:
    """Whether `replay_stateless` knows the rule."""
    return isinstance(controller, (FixedLength, Threshold))


def replay_stateless(
    controller: Controller, texts: Sequence[TracedText], kinds: Sequence[str], table: CostTable
) -> list[Outcome]:
    """An outcome for each text, the same as `dflash_ort.controller.replay.replay` with a `TableClock`.

    ``kinds``: the drafters it may ask, of which such rules ask the first. Raises ValueError for another controller.
    """
    walks = [_steps(controller, text, kinds[0] if kinds else None) for text in texts]
    sizes = np.array([len(w.committed) for w in walks], np.int64)
    starts = np.concatenate([[0], np.cumsum(sizes)])[:-1]
    whole = _Steps(*(np.concatenate([getattr(w, name) for w in walks]) for name in _Steps.__slots__))
    contexts = np.concatenate([text.prompt_tokens + np.arange(text.num_anchors) for text in texts])
    seconds = _Seconds(table, whole, contexts)
    here = np.flatnonzero(sizes)
    at: Array = np.zeros(len(here), np.int64)
    injects = bool(kinds) and any(not text.proposals[kind].is_free for text in texts for kind in kinds)
    prompts = np.array([text.prompt_tokens for text in texts], np.int64)
    pending = _still_pending(prompts[here]) * injects
    sums = np.zeros((8, len(texts)))
    while len(here):
        rows = starts[here] + at
        asked = whole.drafted[rows] > 0
        committed = whole.committed[rows]
        verified = whole.verified[rows]
        drafting = asked & ~whole.is_free[rows]
        sums[:, here] += (
            np.ones(len(here)),
            verified > 0,
            whole.drafted[rows],
            verified,
            whole.accepted[rows],
            committed,
            np.where(verified > 0, committed, 0),
            seconds(rows, drafting, pending),
        )
        pending = np.where(drafting, 0, pending) + (committed if injects else 0)
        pending = _still_pending(pending)
        at = at + committed
        going = at < sizes[here]
        here, at, pending = here[going], at[going], pending[going]
    return [_outcome(values) for values in sums.T.tolist()]


def _outcome(sums: Sequence[float]) -> Outcome:
    """From sums in the order of its fields, of which the last are seconds."""
    counts = [int(value) for value in sums[:-1]]
    return Outcome(*counts, sums[-1])  # type: ignore[call-arg]  # as many as it has fields


@dataclass(slots=True)
class _Steps:
    """What a rule does at each anchor, ``[anchors]``."""

    drafted: Array
    verified: Array
    accepted: Array
    committed: Array
    is_free: Array


def _steps(controller: Controller, text: TracedText, kind: str | None) -> _Steps:
    anchors = np.arange(text.num_anchors)
    left = text.num_tokens - 1 - anchors
    if kind is None:
        none = np.zeros(len(anchors), np.int64)
        return _Steps(none, none, none, np.ones(len(anchors), np.int64), none > 0)
    proposals = text.proposals[kind]
    most = controller.length if isinstance(controller, FixedLength) else None
    limit = np.minimum(proposals.max_draft if most is None else min(most, proposals.max_draft), left_room(text))
    drafted = np.minimum(proposals.drafted, np.maximum(limit, 0))
    verified = drafted
    if isinstance(controller, Threshold) and proposals.log_probs.shape[1]:
        least = math.log(controller.floor) if controller.floor > 0.0 else -math.inf
        below = ~(proposals.log_probs >= least)
        first = np.where(below.any(axis=1), below.argmax(axis=1), proposals.log_probs.shape[1])
        verified = np.minimum(drafted, first)
    elif not is_stateless(controller):
        raise ValueError(f"{type(controller).__name__} has a memory")
    accepted = np.minimum(proposals.agreed, verified)
    committed = np.minimum(accepted + 1, left)
    free = np.full(len(anchors), proposals.is_free)
    return _Steps(drafted, verified, np.minimum(accepted, committed), committed, free)


def left_room(text: TracedText) -> Array:
    """How many drafts could be committed at each anchor before the answer's longest end, int64 ``[anchors]``."""
    room: Array = text.max_tokens - 2 - np.arange(text.num_anchors)
    return room


def _still_pending(rows: Array) -> Array:
    """`dflash_ort.controller.protocol.still_pending` of many."""
    left: Array = rows - np.maximum(-((MAX_PENDING - rows) // INJECTION_CHUNK), 0) * INJECTION_CHUNK
    return left


class _Seconds:
    """Seconds of rounds at anchors, by a cost table."""

    def __init__(self, table: CostTable, steps: _Steps, contexts: Array) -> None:
        self._table = table
        costs = CostModel(table)
        most = int(steps.verified.max(initial=0)) + 1
        unique, index = np.unique(contexts, return_inverse=True)
        passes = np.array([costs.passes(most, int(c)) for c in unique]).reshape(-1, most)
        self._pass = passes[index, steps.verified]
        self._block = np.array([costs.block(int(c)) for c in unique])[index] if len(unique) else np.zeros(0)
        self._further = np.maximum(steps.drafted - 1, 0) * table.draft_step

    def __call__(self, rows: Array, drafting: Array, pending: Array) -> Array:
        table = self._table
        block = self._block[rows] + self._further[rows] + table.inject_row * np.maximum(pending - 1, 0)
        seconds: Array = self._pass[rows] + table.other + np.where(drafting, block + table.after_draft, 0.0)
        return seconds


def clairvoyant_seconds(texts: Sequence[TracedText], table: CostTable) -> Array:
    """The least seconds that anyone who knows what will be accepted could need, float64 ``[texts]``: the shortest path
    through each, blocks drafted with one row to inject.
    """
    costs = CostModel(table)
    least = np.zeros(len(texts))
    for number, text in enumerate(texts):
        anchors, room = text.num_anchors, left_room(text)
        rest = np.zeros(anchors + 1)
        most = max((p.max_draft for p in text.proposals.values()), default=0) + 1
        middle = text.prompt_tokens + anchors // 2
        passes = np.array(costs.passes(most, middle)) + table.other
        options = [
            (np.minimum(p.agreed, room), 0.0 if p.is_free else costs.block(middle) + table.after_draft, p.is_free)
            for p in text.proposals.values()
        ]
        for anchor in range(anchors - 1, -1, -1):
            best = passes[0] + rest[anchor + 1]
            for agreed, price, is_free in options:
                count = int(agreed[anchor])
                if count:
                    ends = np.minimum(anchor + 2 + np.arange(count), anchors)
                    steps = 0.0 if is_free else table.draft_step * np.arange(count)
                    best = min(best, price + float((passes[1 : count + 1] + steps + rest[ends]).min()))
            rest[anchor] = best
        least[number] = rest[0]
    return least
