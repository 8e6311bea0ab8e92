"""A recorded text: at each of its anchors what every drafter would propose, and how much of it the target agrees with.

Since the output does not depend on the policy, any policy can be judged on it (`dflash_ort.controller.replay`).
Anchor ``a`` of a text stands after its first ``a + 1`` tokens; the last token is nobody's anchor. The lines of a trace
file are described in docs/trace-format.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dflash_ort.records import Draft, RequestRound

TRACE_VERSION = 1
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Proposals:
    """One drafter's proposals, a row for each anchor.

    ``drafted`` int64 ``[anchors]``: tokens it proposes where it is free to; ``agreed`` int64 ``[anchors]``: how many of
    them, from the first, the text goes on with; ``log_probs`` float64 ``[anchors, max_draft]``, NaN behind the last, or
    ``[anchors, 0]`` of a lookup; its evidence are ``match_length`` int64 and ``agreement`` float64 ``[anchors]``.
    ``is_free``: a proposal costs no time.
    """

    max_draft: int
    is_free: bool
    drafted: Array
    agreed: Array
    log_probs: Array
    match_length: Array
    agreement: Array

    def draft(self, request_id: int, kind: str, anchor: int, limit: int) -> Draft:
        """What would be proposed for at most ``limit`` tokens; token ids are not known here and are 0."""
        count = min(limit, int(self.drafted[anchor]))
        return Draft(
            request_id,
            0,
            (0,) * count,
            tuple(self.log_probs[anchor, :count].tolist()),
            int(self.match_length[anchor]),
            kind,
            float(self.agreement[anchor]),
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values; log-probabilities as short as float32's precision allows."""
        values: dict[str, Any] = {"max_draft": self.max_draft, "free": self.is_free}
        values["drafted"], values["agreed"] = self.drafted.tolist(), self.agreed.tolist()
        if self.log_probs.shape[1]:
            rows = zip(self.log_probs.tolist(), self.drafted.tolist(), strict=True)
            values["log_probs"] = [[float(f"{x:.9g}") for x in row[:count]] for row, count in rows]
        else:
            values["match_length"], values["agreement"] = self.match_length.tolist(), self.agreement.tolist()
        return values

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Proposals:
        """Raises KeyError, TypeError or ValueError for values that cannot be."""
        drafted, agreed = (np.array(raw[name], np.int64).reshape(-1) for name in ("drafted", "agreed"))
        anchors, most = len(drafted), int(raw["max_draft"])
        width = most if "log_probs" in raw else 0
        log_probs = np.full((anchors, width), np.nan)
        if width:
            for row, values, count in zip(log_probs, raw["log_probs"], drafted.tolist(), strict=True):
                row[:count] = np.array(values, np.float32)
            matches, agreement = np.zeros(anchors, np.int64), np.zeros(anchors)
        else:
            matches, agreement = np.array(raw["match_length"], np.int64), np.array(raw["agreement"], np.float64)
        right = len(agreed) == len(matches) == len(agreement) == anchors
        if not right or (anchors and not ((agreed >= 0) & (agreed <= drafted) & (drafted <= most)).all()):
            raise ValueError("counts that cannot be")
        return Proposals(most, bool(raw["free"]), drafted, agreed, log_probs, matches, agreement)


@dataclass(frozen=True)
class TracedText:
    """One request's answer: ``num_tokens`` long, at most ``max_tokens``; ``proposals`` in the engine's order."""

    id: str
    suite: str
    prompt_tokens: int
    num_tokens: int
    max_tokens: int
    draws: bool
    """Drafts were drawn: the request was sampled."""
    proposals: Mapping[str, Proposals]
    seed: int

    @cached_property
    def num_anchors(self) -> int:
        return max(self.num_tokens - 1, 0)

    def rounds(self, kind: str) -> list[RequestRound]:
        """All proposals of a drafter as rounds that verified the whole of them: trials without censoring."""
        proposals, rounds = self.proposals[kind], []
        for anchor in range(self.num_anchors):
            draft = proposals.draft(0, kind, anchor, self.max_tokens - anchor - 2)
            count, agreed = len(draft.token_ids), int(proposals.agreed[anchor])
            left = self.num_tokens - anchor - 1
            rounds.append(
                RequestRound(
                    0,
                    count,
                    count,
                    min(agreed, count),
                    min(min(agreed, count) + 1, left),
                    self.prompt_tokens + anchor,
                    draft.log_probs,
                    draft.match_length,
                    kind,
                    draft.agreement,
                )
            )
        return rounds

    def as_json(self) -> dict[str, Any]:
        """A line of a trace file, but for its version."""
        return {
            "event": "text",
            "id": self.id,
            "suite": self.suite,
            "prompt_tokens": self.prompt_tokens,
            "num_tokens": self.num_tokens,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "draws": self.draws,
            "proposals": {kind: proposals.as_json() for kind, proposals in self.proposals.items()},
        }

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> TracedText:
        """Raises KeyError, TypeError or ValueError for values that cannot be."""
        proposals = {str(kind): Proposals.from_json(values) for kind, values in raw["proposals"].items()}
        text = TracedText(
            id=str(raw["id"]),
            suite=str(raw["suite"]),
            prompt_tokens=int(raw["prompt_tokens"]),
            num_tokens=int(raw["num_tokens"]),
            max_tokens=int(raw["max_tokens"]),
            draws=bool(raw["draws"]),
            proposals=proposals,
            seed=int(raw["seed"]),
        )
        if not text.prompt_tokens >= 1 or not 1 <= text.num_tokens <= text.max_tokens:
            raise ValueError("lengths that cannot be")
        if any(len(p.drafted) != text.num_anchors for p in proposals.values()):
            raise ValueError("not a row for each anchor")
        return text


def agreed_lengths(drafts: Sequence[Sequence[int]], tokens: Sequence[int]) -> Array:
    """How many tokens of each anchor's draft the text ``tokens`` goes on with, int64 ``[anchors]``."""
    agreed = np.zeros(len(drafts), np.int64)
    for anchor, draft in enumerate(drafts):
        for token, right in zip(draft, tokens[anchor + 1 :], strict=False):
            if token != right:
                break
            agreed[anchor] += 1
    return agreed


def proposals_of(drafts: Sequence[Draft], agreed: Array, *, max_draft: int, is_free: bool) -> Proposals:
    """A drafter's drafts at the anchors of a text, in order."""
    counts = np.array([len(d.token_ids) for d in drafts], np.int64)
    width = 0 if is_free else max_draft
    log_probs = np.full((len(drafts), width), math.nan)
    if width:
        for row, draft in zip(log_probs, drafts, strict=True):
            row[: len(draft.log_probs)] = draft.log_probs
    matches = np.array([d.match_length for d in drafts], np.int64)
    agreement = np.array([d.agreement for d in drafts], np.float64)
    return Proposals(max_draft, is_free, counts, agreed, log_probs, matches, agreement)
