"""Repeats the runs of a round log on the trace of the same texts, with the seconds that the log has: whether a replay
is what happened, and how far modelled seconds are from a clock's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dflash_ort.controller.cost import CostTable
from dflash_ort.controller.policy import Policy
from dflash_ort.controller.protocol import Controller
from dflash_ort.controller.replay import Outcome, Seconds, TableClock, Work, replay
from dflash_ort.controller.trace import TracedText
from dflash_ort.errors import LogError, PolicyError
from dflash_ort.logs import LoggedRequest
from dflash_ort.records import RoundRecord
from dflash_ort.runtime.policies import named_controller

_ALIKE = 1e-3
"""Log-probabilities no further apart than this are the same draft's."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """The runs of one controller in one process. ``same``: every round had the same counts. ``modelled_seconds`` are
    those of the same rounds by the cost table.
    """

    controller: str
    requests: int
    same: bool
    rounds: int
    logged_rounds: int
    committed: int
    logged_committed: int
    logged_seconds: float
    modelled_seconds: float


class _Log:
    """A clock that shows what the log says, round by round; behind its last round, what it said last."""

    def __init__(self, records: Sequence[RoundRecord]) -> None:
        self._records, self._next = records, 0

    def __call__(self, work: Work) -> Seconds:
        record = self._records[min(self._next, len(self._records) - 1)]
        self._next += 1
        return record.draft_s, record.verify_s, record.sample_s, record.other_s


def repeat(
    logged: Sequence[LoggedRequest], texts: Sequence[TracedText], table: CostTable, policy: Policy
) -> list[Repeated]:
    """Every run of the log that has its text in the trace, each process's controllers learning as they did there;
    adaptive ones start from ``policy``, as those of the trace's bundle do.

    A log has no text, so a request's is found by its lengths, its seed and the evidence of its rounds. Raises LogError
    when no request has one.
    """
    found = []
    for name, runs in _by_controller(logged, texts).items():
        try:
            controller = named_controller(name[1], table, policy)
        except PolicyError:
            continue  # a controller of the caller's own
        found.append(_repeat(name[1], controller, runs, table))
    if not found:
        raise LogError("no request of the log has its text in the trace: same prompt, settings and seed")
    return found


def _by_controller(
    logged: Sequence[LoggedRequest], texts: Sequence[TracedText]
) -> Mapping[tuple[str, str], list[tuple[LoggedRequest, TracedText]]]:
    runs: dict[tuple[str, str], list[tuple[LoggedRequest, TracedText]]] = {}
    for request in logged:
        key = request.id.rpartition("-")[0], str(request.request.get("controller"))
        taken = {id(text) for _, text in runs.get(key, ())}
        text = next((t for t in texts if id(t) not in taken and _is_of(request, t)), None)
        if text is not None and request.rounds:
            runs.setdefault(key, []).append((request, text))
    return runs


def _is_of(request: LoggedRequest, text: TracedText) -> bool:
    """Same lengths and seed, and at every anchor that the run visited the trace has what the log has."""
    ours = text.prompt_tokens, text.seed, text.num_tokens, text.draws
    if ours != (int(request.request["prompt_tokens"]), int(request.request["seed"]), request.committed, request.draws):
        return False
    anchor = 0
    for record in request.rounds:
        part = record.requests[0]
        proposals = text.proposals.get(part.kind)
        if proposals is not None and part.num_drafted:
            draft = proposals.draft(0, part.kind, anchor, part.num_drafted)
            theirs = (part.num_drafted, part.match_length, len(part.log_probs))
            if (len(draft.token_ids), draft.match_length, len(draft.log_probs)) != theirs:
                return False
            if not np.allclose(draft.log_probs, part.log_probs, atol=_ALIKE):
                return False
        anchor += part.num_committed
    return True


def _repeat(
    name: str, controller: Controller, runs: Sequence[tuple[LoggedRequest, TracedText]], table: CostTable
) -> Repeated:
    whole, theirs, same, modelled = Outcome(), Outcome(), True, 0.0
    clock = TableClock(table)
    for number, (request, text) in enumerate(runs):
        kinds = [kind for kind in request.request["drafters"] if kind in text.proposals]
        outcome = replay(controller, text, kinds, _Log(request.rounds), number)
        logged = Outcome()
        for record in request.rounds:
            logged.add_round(record)
            modelled += _modelled(clock, record, text)
        same = same and _counts(outcome) == _counts(logged)
        whole.add(outcome)
        theirs.add(logged)
    return Repeated(
        name,
        len(runs),
        same,
        whole.rounds,
        theirs.rounds,
        whole.committed,
        theirs.committed,
        theirs.seconds,
        modelled,
    )


def _modelled(clock: TableClock, record: RoundRecord, text: TracedText) -> float:
    part = record.requests[0]
    proposals = text.proposals.get(part.kind)
    drafts = part.num_drafted if proposals is not None and not proposals.is_free else 0
    return sum(clock(Work(0, part.context_length, record.pending_rows, drafts, record.total_rows)))


def _counts(outcome: Outcome) -> tuple[int, ...]:
    return outcome.rounds, outcome.drafted, outcome.verified, outcome.accepted, outcome.committed
