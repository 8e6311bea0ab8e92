"""What the round loop asks of a controller. Drafts and records in, lengths out; no clock, no files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dflash_ort.records import Draft, RoundRecord, VerifyPlan


class Controller(Protocol):
    """Decides, each round and for each request, whether to draft and how many drafts to verify."""

    def draft_limit(self, request_id: int, max_draft: int) -> int:
        """Most drafts it could use this round, 0 to ``max_draft``; 0 means that nothing need be drafted."""
        ...

    def plan(self, drafts: Sequence[Draft]) -> VerifyPlan:
        """Verify lengths, each 0 to the number of that request's drafts."""
        ...

    def observe(self, record: RoundRecord) -> None:
        """Learn what the round did and cost."""
        ...
