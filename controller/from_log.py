"""A text as a log lets one guess it: an ordinary log has only the anchors that were visited, and of their drafts only
what was verified. For policies where no trace was recorded; what is made of it is an estimate, never exact.

An anchor that was not visited is taken to be like the last visited one before it that has a draft of the same kind.
Drafts behind the last one that was observed are accepted or not by lot, with the hazards of a policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dflash_ort.controller.acceptance import HazardModel, HazardPrior, family, observed_trials
from dflash_ort.controller.trace import Proposals, TracedText
from dflash_ort.records import RequestRound

FREE_KINDS = frozenset({"ngram"})


def estimated_text(
    name: str,
    rounds: Sequence[RequestRound],
    *,
    prompt_tokens: int,
    max_tokens: int | None,
    draws: bool,
    seed: int,
    priors: Mapping[str, HazardPrior],
) -> TracedText:
    """One request of a log as a text to be replayed. The lot is drawn from ``seed``, so it is the same each time."""
    anchors = sum(part.num_committed for part in rounds)
    visited = np.cumsum([0, *(part.num_committed for part in rounds)])[:-1]
    rng = np.random.default_rng([seed, prompt_tokens])
    kinds = sorted({part.kind for part in rounds if part.num_drafted and part.kind in priors})
    proposals = {}
    for kind in sorted(kinds, key=lambda kind: kind not in FREE_KINDS):
        model = HazardModel(priors[family(kind, draws)])
        parts = [(int(at), part) for at, part in zip(visited, rounds, strict=True) if part.kind == kind]
        proposals[kind] = _proposals(kind, parts, anchors, model, rng)
    most = max(max_tokens or 0, anchors + 1)
    return TracedText(name, "log", prompt_tokens, anchors + 1, most, draws, proposals, seed)


def _proposals(
    kind: str, parts: Sequence[tuple[int, RequestRound]], anchors: int, model: HazardModel, rng: np.random.Generator
) -> Proposals:
    is_free = kind in FREE_KINDS
    most = max(part.num_drafted for _, part in parts)
    drafted, agreed, matches = (np.zeros(anchors, np.int64) for _ in range(3))
    agreement, log_probs = np.zeros(anchors), np.full((anchors, 0 if is_free else most), np.nan)
    for number, (at, part) in enumerate(parts):
        until = parts[number + 1][0] if number + 1 < len(parts) else anchors
        # A lookup is there or not: of anchors that nobody looked at nothing is known. A model always has a draft.
        here = slice(at, at + 1) if is_free else slice(at if number else 0, until)
        drafted[here], agreed[here] = part.num_drafted, _whole(part, model, rng)
        matches[here], agreement[here] = part.match_length, part.agreement
        log_probs[here, : len(part.log_probs)] = part.log_probs[: log_probs.shape[1]]
    left = anchors - np.arange(anchors)
    return Proposals(most, is_free, drafted, np.minimum(agreed, left), log_probs, matches, agreement)


def _whole(part: RequestRound, model: HazardModel, rng: np.random.Generator) -> int:
    """How many of all its drafts the target agreed with, those that were not observed by lot."""
    outcomes = observed_trials(part)
    accepted = sum(outcomes)
    if accepted < len(outcomes):
        return accepted
    for hazard in model.hazards(0, part, part.num_drafted)[accepted:]:
        if rng.random() >= hazard:
            break
        accepted += 1
    return accepted
