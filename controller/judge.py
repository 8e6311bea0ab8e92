"""Judges policies on recorded texts: an outcome for each text, the best fixed length, the bound, and intervals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_ort.controller.adaptive import Adaptive
from dflash_ort.controller.cost import CostTable
from dflash_ort.controller.fixed import FixedLength
from dflash_ort.controller.protocol import Controller
from dflash_ort.controller.replay import Outcome, TableClock, replay
from dflash_ort.controller.replay_fast import is_stateless, replay_stateless
from dflash_ort.controller.trace import TracedText
from dflash_ort.errors import PolicyError

_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class FixedBest:
    """The fixed length of a drafter that was fastest, and its outcomes."""

    name: str
    outcomes: list[Outcome]


def kinds_for(controller: Controller, drafter: str, texts: Sequence[TracedText]) -> list[str]:
    """The drafters that a policy may ask, as the engine decides it: all for an adaptive one, else the model's.

    ``drafter``: "auto", "none" or a kind. Raises PolicyError for one that the texts do not have.
    """
    there = list(dict.fromkeys(kind for text in texts for kind in text.proposals))
    if drafter == "none" or (isinstance(controller, FixedLength) and controller.length == 0):
        return []
    if drafter == "auto":
        if isinstance(controller, Adaptive):
            return there
        models = [kind for kind in there if any(not t.proposals[kind].is_free for t in texts if kind in t.proposals)]
        return (models or there)[:1]
    if drafter not in there:
        raise PolicyError(f"the trace has no drafter '{drafter}'; it has {', '.join(there) or 'none'}")
    return [drafter]


def judge(controller: Controller, kinds: Sequence[str], texts: Sequence[TracedText], table: CostTable) -> list[Outcome]:
    """An outcome for each text, answered one after the other; the controller learns on the way, as in use."""
    if is_stateless(controller) and all(kind in text.proposals for kind in kinds for text in texts):
        return replay_stateless(controller, texts, kinds, table)
    clock = TableClock(table)
    return [
        replay(controller, text, [kind for kind in kinds if kind in text.proposals], clock, number)
        for number, text in enumerate(texts)
    ]


def best_fixed(texts: Sequence[TracedText], table: CostTable) -> FixedBest:
    """Of all lengths of all drafters, and plain decoding, the fastest over these texts together."""
    plain = judge(FixedLength(0), [], texts, table)
    best, least = FixedBest("off", plain), total(plain).seconds
    for kind in dict.fromkeys(kind for text in texts for kind in text.proposals):
        most = max(text.proposals[kind].max_draft for text in texts if kind in text.proposals)
        for length in range(1, most + 1):
            outcomes = judge(FixedLength(length), [kind], texts, table)
            if (seconds := total(outcomes).seconds) < least:
                best, least = FixedBest(f"{kind}@fixed:{length}", outcomes), seconds
    return best


def total(outcomes: Iterable[Outcome]) -> Outcome:
    """All together."""
    whole = Outcome()
    for outcome in outcomes:
        whole.add(outcome)
    return whole


def by_suite(texts: Sequence[TracedText]) -> dict[str, list[int]]:
    """Which texts a suite has, by number, in the order in which the suites come."""
    suites: dict[str, list[int]] = {}
    for number, text in enumerate(texts):
        suites.setdefault(text.suite, []).append(number)
    return suites


def speed_ratio(
    ours: Sequence[Outcome], theirs: Sequence[Outcome], *, seed: int = 0
) -> tuple[float, tuple[float, float]]:
    """How many times as fast ours is on the same texts, and its 95% interval by a bootstrap over texts."""
    mine, other = (np.array([o.seconds for o in outcomes]) for outcomes in (ours, theirs))
    if not mine.sum() or not other.sum():
        return 1.0, (1.0, 1.0)
    picks = np.random.default_rng(seed).integers(0, len(mine), (_RESAMPLES, len(mine)))
    below = mine[picks].sum(axis=1)
    ratios = other[picks].sum(axis=1)[below > 0] / below[below > 0]
    low, high = np.percentile(ratios, (2.5, 97.5)).tolist()
    return float(other.sum() / mine.sum()), (low, high)


def figures(outcomes: Sequence[Outcome], plain: Sequence[Outcome]) -> dict[str, Any]:
    """What a report says of a policy over some texts, beside plain decoding of the same.

    ``committed`` counts prefill's token of each text, as the engine's statistics do; ``tokens_per_second`` does not.
    """
    whole = total(outcomes)
    in_verify = whole.in_verify_rounds
    ratio, interval = speed_ratio(outcomes, plain)
    return {
        "rounds": whole.rounds,
        "verify_rounds": whole.verify_rounds,
        "drafted": whole.drafted,
        "verified": whole.verified,
        "accepted": whole.accepted,
        "committed": whole.committed + len(outcomes),
        "seconds": whole.seconds,
        "tokens_per_second": whole.committed / whole.seconds if whole.seconds else None,
        "acceptance_length": in_verify / whole.verify_rounds if whole.verify_rounds else None,
        "speedup": ratio,
        "speedup_interval": list(interval),
    }


def report(
    texts: Sequence[TracedText], policies: Mapping[str, list[Outcome]], table: CostTable, bound: Sequence[float]
) -> dict[str, Any]:
    """Policies side by side, over all and by suite; the best fixed lengths and the bound beside them."""
    plain = judge(FixedLength(0), [], texts, table)
    suites = by_suite(texts)

    def of(outcomes: Sequence[Outcome], numbers: Sequence[int]) -> list[Outcome]:
        return [outcomes[n] for n in numbers]

    found = []
    for name, outcomes in policies.items():
        found.append(
            {
                "policy": name,
                **figures(outcomes, plain),
                "suites": {s: figures(of(outcomes, ns), of(plain, ns)) for s, ns in suites.items()},
                "requests": [
                    {
                        "id": text.id,
                        "suite": text.suite,
                        "rounds": o.rounds,
                        "committed": o.committed + 1,
                        "seconds": o.seconds,
                        "tokens_per_second": o.committed / o.seconds if o.seconds else None,
                    }
                    for text, o in zip(texts, outcomes, strict=True)
                ],
            }
        )
    best = best_fixed(texts, table)
    each = {suite: best_fixed([texts[n] for n in ns], table) for suite, ns in suites.items()}
    chosen: list[Outcome] = [Outcome()] * len(texts)
    for suite, numbers in suites.items():
        for number, outcome in zip(numbers, each[suite].outcomes, strict=True):
            chosen[number] = outcome
    tokens = total(plain).committed
    return {
        "policies": found,
        "best_fixed": {"policy": best.name, **figures(best.outcomes, plain)},
        "best_fixed_by_suite": {"policies": {s: b.name for s, b in each.items()}, **figures(chosen, plain)},
        "clairvoyant": {
            "seconds": float(sum(bound)),
            "tokens_per_second": tokens / float(sum(bound)) if sum(bound) else None,
            "speedup": total(plain).seconds / float(sum(bound)) if sum(bound) else None,
        },
    }
