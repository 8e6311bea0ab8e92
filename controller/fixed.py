"""Controllers that never change their mind: plain decoding, and one length for every round."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_ort.controller.protocol import DraftOrder, RoundState
from dflash_ort.records import Draft, RoundRecord, VerifyPlan


def first_drafter(state: RoundState, limit: int | None = None) -> DraftOrder:
    """An order to the first drafter that may propose something, for at most ``limit`` tokens."""
    for kind, most in state.limits.items():
        wanted = most if limit is None else min(limit, most)
        if wanted > 0:
            return DraftOrder(kind, wanted)
    return DraftOrder()


class Stateless:
    """What controllers that learn nothing have in common."""

    def observe(self, record: RoundRecord) -> None:
        """Nothing to learn."""

    def forget(self, request_id: int) -> None:
        """Nothing to forget."""


class FixedLength(Stateless):
    """Verify up to ``length`` drafts every round; None verifies whole proposals, 0 never drafts (plain decoding)."""

    def __init__(self, length: int | None) -> None:
        self.length = length

    def choose(self, state: RoundState, lookup: Draft | None) -> DraftOrder:
        return first_drafter(state, self.length)

    def plan(self, drafts: Sequence[Draft]) -> VerifyPlan:
        most = self.length
        return VerifyPlan(
            {d.request_id: len(d.token_ids) if most is None else min(most, len(d.token_ids)) for d in drafts}
        )
