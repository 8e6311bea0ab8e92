"""What the round loop asks of a controller. Drafts and records in, lengths out; no clock, no files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dflash_ort.records import Draft, RoundRecord, VerifyPlan

PLAIN = "none"
"""The arm that asks no drafter."""
INJECTION_CHUNK = 256
"""Most rows injected in one drafter pass."""
MAX_PENDING = 1024
"""Most committed rows held back before they are injected although nobody asks for a draft."""


def still_pending(rows: int) -> int:
    """How many of so many rows stay back when as many as must be are injected."""
    return rows - max(-((MAX_PENDING - rows) // INJECTION_CHUNK), 0) * INJECTION_CHUNK


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
    """Each draft of a model is drawn from its distribution."""


@dataclass(frozen=True, slots=True)
class DraftOrder:
    """Which drafter to ask, `PLAIN` for none, and for how many tokens at most.

    ``go_on``: told the log-probabilities of the drafts so far (at least one), whether another is worth making; asked
    only where drafts are made one after the other.
    """

    kind: str = PLAIN
    limit: int = 0
    go_on: Callable[[Sequence[float]], bool] | None = field(default=None, compare=False)


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
