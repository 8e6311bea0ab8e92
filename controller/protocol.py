"""What the round loop asks of a controller. Drafts and records in, lengths out; no clock, no files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dflash_ort.records import Draft, RoundRecord, VerifyPlan

PLAIN = "none"
"""The arm that asks no drafter."""


@dataclass(frozen=True, slots=True)
class RoundState:
    """What is known of a request before its round."""

    request_id: int
    context_length: int
    """Rows in the target's cache."""
    pending_rows: int
    """Rows committed and not yet injected into the model drafter."""
    remaining: int
    """Tokens the answer may still have."""
    limits: Mapping[str, int]
    """The drafters that may be asked, and the most tokens each may propose now."""
    draws: bool = False
    """Each draft of a model is drawn from its distribution, which costs time by the token."""


@dataclass(frozen=True, slots=True)
class DraftOrder:
    """Which drafter to ask, `PLAIN` for none, and for how many tokens at most."""

    kind: str = PLAIN
    limit: int = 0


class Controller(Protocol):
    """Decides, each round and for each request, whether to draft and how many drafts to verify."""

    def choose(self, state: RoundState, lookup: Draft | None) -> DraftOrder:
        """Whom to ask. ``lookup`` is a proposal that cost nothing and is already there."""
        ...

    def plan(self, drafts: Sequence[Draft]) -> VerifyPlan:
        """Verify lengths, each 0 to the number of that request's drafts."""
        ...

    def observe(self, record: RoundRecord) -> None:
        """Learn what the round did and cost."""
        ...

    def forget(self, request_id: int) -> None:
        """The request is over."""
        ...
