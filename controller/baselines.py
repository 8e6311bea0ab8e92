"""Rules of other engines behind the same protocol, to be measured against. Each always asks the first drafter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dflash_ort.controller.acceptance import GENERIC_PRIORS, HazardModel
from dflash_ort.controller.cost import CostModel
from dflash_ort.controller.fixed import Stateless, first_drafter
from dflash_ort.controller.protocol import DraftOrder, RoundState
from dflash_ort.records import Draft, RoundRecord, VerifyPlan


class Threshold(Stateless):
    """Verify up to the first draft whose probability is below ``floor``, as llama.cpp's ``--draft-p-min``.

    Lookup drafts carry no probabilities and are verified whole.
    """

    def __init__(self, floor: float) -> None:
        self.floor = floor

    def choose(self, state: RoundState, lookup: Draft | None) -> DraftOrder:
        return first_drafter(state)

    def plan(self, drafts: Sequence[Draft]) -> VerifyPlan:
        return VerifyPlan({d.request_id: self._length(d) for d in drafts})

    def _length(self, draft: Draft) -> int:
        if not draft.log_probs:
            return len(draft.token_ids)
        least = math.log(self.floor) if self.floor > 0.0 else -math.inf
        return next((i for i, log_p in enumerate(draft.log_probs) if log_p < least), len(draft.log_probs))


@dataclass(slots=True)
class _Climb:
    length: int = 1
    step: int = 1
    tokens: int = 0
    seconds: float = 0.0
    rounds: int = 0
    last: float = 0.0


class HillClimb:
    """One length a request, moved by one in the direction that last raised throughput, as ONNX Runtime GenAI."""

    def __init__(self, *, window: int = 8, most: int = 16) -> None:
        self.window, self.most = window, most
        self._requests: dict[int, _Climb] = {}

    def choose(self, state: RoundState, lookup: Draft | None) -> DraftOrder:
        climb = self._requests.setdefault(state.request_id, _Climb())
        return first_drafter(state, climb.length)

    def plan(self, drafts: Sequence[Draft]) -> VerifyPlan:
        lengths = {d.request_id: min(self._requests[d.request_id].length, len(d.token_ids)) for d in drafts}
        return VerifyPlan(lengths)

    def observe(self, record: RoundRecord) -> None:
        """Add up a window, then move on or turn round."""
        for part in record.requests:
            climb = self._requests.get(part.request_id)
            if climb is None:
                continue
            climb.tokens += part.num_committed
            climb.seconds += record.seconds
            climb.rounds += 1
            if climb.rounds == self.window and climb.seconds > 0.0:
                rate = climb.tokens / climb.seconds
                if rate < climb.last:
                    climb.step = -climb.step
                climb.last = rate
                climb.length = max(1, min(self.most, climb.length + climb.step))
                climb.tokens, climb.seconds, climb.rounds = 0, 0.0, 0

    def forget(self, request_id: int) -> None:
        """The request is over."""
        self._requests.pop(request_id, None)


class StepRatio:
    """Maximise each round's own ratio of expected tokens to expected seconds, with one acceptance model for all
    requests and a cost table that is never corrected, as vLLM. The drafter always runs.
    """

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs
        self.hazards = {
            kind: HazardModel(replace(p, offset_deviation=1e-6, useless=1e-6)) for kind, p in GENERIC_PRIORS.items()
        }
        self._states: dict[int, RoundState] = {}

    def choose(self, state: RoundState, lookup: Draft | None) -> DraftOrder:
        self._states[state.request_id] = state
        return first_drafter(state)

    def plan(self, drafts: Sequence[Draft]) -> VerifyPlan:
        return VerifyPlan({d.request_id: self._length(d) for d in drafts})

    def observe(self, record: RoundRecord) -> None:
        """Learn acceptance only."""
        for part in record.requests:
            if part.kind in self.hazards:
                self.hazards[part.kind].observe(part)

    def forget(self, request_id: int) -> None:
        """The request is over."""
        self._states.pop(request_id, None)
        for model in self.hazards.values():
            model.forget(request_id)

    def _length(self, draft: Draft) -> int:
        if not draft.token_ids:
            return 0
        state = self._states[draft.request_id]
        committed = 1.0 + np.cumsum([0.0, *self.hazards[draft.kind].survival(draft.request_id, draft)])
        drafting = self.costs.draft(state.context_length, state.pending_rows) if draft.log_probs else 0.0
        seconds = drafting + self.costs.other() + np.array(self.costs.verify(len(committed), state.context_length))
        return int(np.argmax(committed / seconds))


@dataclass(slots=True)
class Oracle(Stateless):
    """Knows how many leading drafts the target agrees with and verifies just those: an upper bound, in replay only.

    ``agreed`` maps a request to the next block's agreement; the replay fills it in before each round.
    """

    agreed: dict[int, int] = field(default_factory=dict)

    def choose(self, state: RoundState, lookup: Draft | None) -> DraftOrder:
        return first_drafter(state)

    def plan(self, drafts: Sequence[Draft]) -> VerifyPlan:
        return VerifyPlan({d.request_id: min(self.agreed[d.request_id], len(d.token_ids)) for d in drafts})
