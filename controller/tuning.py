"""What a policy is tuned on: answers that were traced or logged, split into those it is fitted to and those it is
judged on; and the hazard models fitted to them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dflash_ort.controller.acceptance import GENERIC_PRIORS, HazardPrior, family
from dflash_ort.controller.adaptive import Adaptive
from dflash_ort.controller.cost import CostModel, CostTable
from dflash_ort.controller.cost_fitting import RoundCost
from dflash_ort.controller.drift import DriftReference, drift_reference, survival_given_evidence
from dflash_ort.controller.fitting import Fit, Scores, Trials, fit_request_prior, fit_weights, score, sigmoid, trials_of
from dflash_ort.controller.fixed import FixedLength
from dflash_ort.controller.from_log import FREE_KINDS, estimated_text
from dflash_ort.controller.policy import Policy
from dflash_ort.controller.protocol import Controller
from dflash_ort.controller.replay import Clock, TableClock, rounds
from dflash_ort.controller.trace import TracedText
from dflash_ort.errors import PolicyError
from dflash_ort.records import RequestRound, RoundRecord

FEWEST_ANSWERS = 8
"""With fewer, neither the half that is fitted nor the half that is judged says anything."""
FEWEST_TRIALS, _FEWEST_WITH_TRIALS = 200, 4
"""Observed trials of a family, and answers with any, below which it keeps the prior it has."""
_LEAST_DEVIATION = 0.1
"""Of the generic deviation: tuned again and again, a prior must not become too sure to learn."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One request: its text, to be replayed, and the rounds it had where it comes from a log (its text is then an
    estimate).
    """

    text: TracedText
    logged: tuple[RequestRound, ...] = ()

    def has(self, kind: str) -> bool:
        """Whether this drafter proposed anything."""
        if self.logged:
            return any(part.kind == kind and part.num_drafted for part in self.logged)
        return kind in self.text.proposals

    def trials(self, kind: str) -> Iterable[RequestRound]:
        """Rounds of a drafter: of a log those visited, censored; of a trace one at every anchor, uncensored."""
        if self.logged:
            return [part for part in self.logged if part.kind == kind]
        return self.text.rounds(kind) if kind in self.text.proposals else []

    def estimated(self, priors: Mapping[str, HazardPrior]) -> Answer:
        """The same, what a log did not show of its text drawn with these priors; a traced one as it is."""
        if not self.logged:
            return self
        text = self.text
        again = estimated_text(
            text.id,
            self.logged,
            prompt_tokens=text.prompt_tokens,
            max_tokens=text.max_tokens,
            draws=text.draws,
            seed=text.seed,
            priors=priors,
        )
        return replace(self, text=again)


def split(answers: Sequence[Answer], held_out: float, *, seed: int = 0) -> tuple[list[Answer], list[Answer]]:
    """Answers to fit to and answers to judge on, each in the order given.

    Within each suite the ``held_out`` share with the least hashes of their ids is held out, so that the same id is
    never on both sides. Raises `PolicyError` where fewer than `FEWEST_ANSWERS` answers are there, or a side is empty.
    """
    if len(answers) < FEWEST_ANSWERS:
        raise PolicyError(
            f"{len(answers)} requests are too few to tune on; at least {FEWEST_ANSWERS} are needed, some held out"
        )
    suites: dict[str, dict[str, str]] = {}
    for answer in answers:
        key = f"{seed} {answer.text.suite} {answer.text.id}"
        suites.setdefault(answer.text.suite, {})[answer.text.id] = hashlib.sha256(key.encode()).hexdigest()
    chosen, due = set[tuple[str, str]](), 0.0
    for suite, hashes in suites.items():
        # What one suite's share rounds off is the next one's, so that many small suites are halved together.
        due += held_out * len(hashes)
        count = min(int(due + 0.5), len(hashes))
        due -= count
        chosen |= {(suite, name) for name in sorted(hashes, key=hashes.__getitem__)[:count]}
    sides: tuple[list[Answer], list[Answer]] = ([], [])
    for answer in answers:
        sides[(answer.text.suite, answer.text.id) in chosen].append(answer)
    if not all(sides):
        raise PolicyError(f"of {len(answers)} requests, holding out {held_out:g} leaves none on one side")
    return sides


def families_of(answers: Iterable[Answer]) -> dict[str, tuple[str, bool]]:
    """The hazard families with proposals: drafter and whether drafts were drawn, in the order of the priors."""
    there = set[tuple[str, bool]]()
    for answer in answers:
        kinds = {part.kind for part in answer.logged if part.num_drafted} if answer.logged else answer.text.proposals
        there |= {(kind, answer.text.draws) for kind in kinds}
    named = {family(kind, draws): (kind, draws) for kind, draws in there}
    return {name: named[name] for name in GENERIC_PRIORS if name in named}


@dataclass(frozen=True, slots=True)
class Fitted:
    """One hazard family, fitted. ``fit`` is None, and ``prior`` is ``start``, where too little was observed.

    ``before`` and ``after``: scores of ``start`` and of ``prior`` on held-out requests; None where no trial was seen.
    """

    name: str
    start: HazardPrior
    prior: HazardPrior
    fit: Fit | None
    requests: int
    trials: int
    before: Scores | None
    after: Scores | None


def fit_families(
    training: Sequence[Answer],
    held_out: Sequence[Answer],
    current: Policy,
    *,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Fitted]:
    """Each family's hazards, then how requests differ in it, starting from ``current``'s prior.

    Raises `PolicyError` where no draft was observed at all, or scikit-learn is missing.
    """
    fitted = []
    for name, (kind, draws) in families_of([*training, *held_out]).items():
        progress(f"fitting {name}")
        mine, others = (
            [answer for answer in side if answer.text.draws == draws and answer.has(kind)]
            for side in (training, held_out)
        )
        trials, start = _trials(mine, kind), current.priors[name]
        prior, fit, known = start, None, len(np.unique(trials.groups))
        if len(trials) >= FEWEST_TRIALS and known >= _FEWEST_WITH_TRIALS:
            fit = fit_weights(trials, start=start, seed=seed)
            found = fit_request_prior(
                [_in_order(answer, kind) for answer in mine], replace(start, means=fit.weights), kind=kind, seed=seed
            )
            least = [_LEAST_DEVIATION * d for d in GENERIC_PRIORS[name].deviations]
            prior = replace(found, deviations=tuple(map(max, found.deviations, least)))
        unseen = _trials(others, kind)
        scores = [_score(p, unseen) if len(unseen) else None for p in (start, prior)]
        fitted.append(Fitted(name, start, prior, fit, known, len(trials), *scores))
    if not any(one.trials for one in fitted):
        raise PolicyError("no observed draft is in these requests, so nothing can be learnt of acceptance")
    return fitted


def _trials(answers: Sequence[Answer], kind: str) -> Trials:
    return trials_of((group, part) for group, answer in enumerate(answers) for part in answer.trials(kind))


def _score(prior: HazardPrior, trials: Trials) -> Scores:
    return score(sigmoid(trials.features @ np.array(prior.means)), trials.accepted)


def _in_order(answer: Answer, kind: str) -> list[RequestRound]:
    """A request's rounds one after the other, as it had them, or as verifying whole blocks would: what is remembered
    of a request is measured in rounds, not in anchors.
    """
    if answer.logged:
        return list(answer.logged)
    return _walk(FixedLength(None), answer.text, [kind], lambda _: (0.0, 0.0, 0.0, 0.0), 0)


def _walk(
    controller: Controller, text: TracedText, kinds: Sequence[str], clock: Clock, number: int
) -> list[RequestRound]:
    return [record.requests[0] for record in rounds(controller, text, kinds, clock, number)]


def visited(answers: Sequence[Answer], policy: Policy, table: CostTable) -> list[list[RequestRound]]:
    """The rounds of each answer: those logged, or those that ``policy`` would have where the text was traced.

    Anchors that are visited are harder than the average one, which lies in a run of accepted drafts more often; so
    only these are like those of a log.
    """
    controller, clock = Adaptive(CostModel(table), policy), TableClock(table)
    return [
        list(answer.logged) or _walk(controller, answer.text, list(answer.text.proposals), clock, number)
        for number, answer in enumerate(answers)
    ]


def of_family(
    answers: Sequence[Answer], rounds_of: Sequence[Sequence[RequestRound]], kind: str, draws: bool
) -> list[list[RequestRound]]:
    """Of `visited`'s rounds those of one family; answers without any are left out."""
    mine = [
        [part for part in parts if part.kind == kind and part.num_drafted]
        for answer, parts in zip(answers, rounds_of, strict=True)
        if answer.text.draws == draws
    ]
    return [parts for parts in mine if parts]


def drift_references(answers: Sequence[Answer], policy: Policy, table: CostTable) -> dict[str, DriftReference]:
    """By family, what later logs are to be compared with; families that ``policy`` would not ask are left out."""
    rounds_of, references = visited(answers, policy, table), {}
    for name, (kind, draws) in families_of(answers).items():
        mine = of_family(answers, rounds_of, kind, draws)
        if any(part.num_verified for parts in mine for part in parts):
            try:
                references[name] = drift_reference(policy.priors[name], mine)
            except PolicyError:  # verified, and yet no trial was observed: all at answers' ends
                continue
    return references


def survival_by_suite(
    answers: Sequence[Answer], priors: Mapping[str, HazardPrior]
) -> dict[str, dict[str, list[float]]]:
    """By family and suite, the share of blocks whose first i drafts are right, i = 1, 2, ..., censoring counted."""
    curves: dict[str, dict[str, list[float]]] = {}
    for name, (kind, draws) in families_of(answers).items():
        for suite in dict.fromkeys(answer.text.suite for answer in answers):
            mine = [
                [part for part in answer.trials(kind) if part.num_drafted]
                for answer in answers
                if answer.text.suite == suite and answer.text.draws == draws
            ]
            longest = max((part.num_drafted for parts in mine for part in parts), default=0)
            if longest:
                found = survival_given_evidence(mine, priors[name].means, positions=longest, resamples=1)
                curves.setdefault(name, {})[suite] = list(found.curve)
    return curves


def round_cost(record: RoundRecord) -> RoundCost:
    """A logged round's seconds, and what they were spent on."""
    part = record.requests[0]
    drafted = part.num_drafted > 0 and part.kind not in FREE_KINDS
    return RoundCost(
        rows=record.total_rows,
        context=part.context_length,
        verify_s=record.verify_s,
        draft_s=record.draft_s,
        pending=record.pending_rows,
        other_s=record.other_s,
        drafted=drafted,
        drafts=max(part.num_drafted, 1) if drafted else 1,
    )
