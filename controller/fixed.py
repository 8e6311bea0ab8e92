"""Controllers that never change their mind: plain decoding, and one length for every round."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_ort.controller.protocol import Controller
from dflash_ort.errors import PolicyError
from dflash_ort.records import Draft, RoundRecord, VerifyPlan

NAMES = "off, fixed:N (N drafts a round) or fixed:max (whole proposals)"


class FixedLength:
    """Verify up to ``length`` drafts every round; None verifies whole proposals, 0 never drafts (plain decoding)."""

    def __init__(self, length: int | None) -> None:
        self.length = length

    def draft_limit(self, request_id: int, max_draft: int) -> int:
        return max_draft if self.length is None else min(self.length, max_draft)

    def plan(self, drafts: Sequence[Draft]) -> VerifyPlan:
        lengths = {d.request_id: self.draft_limit(d.request_id, len(d.token_ids)) for d in drafts}
        return VerifyPlan(lengths)

    def observe(self, record: RoundRecord) -> None:
        pass


def make_controller(name: str) -> Controller:
    """A controller from its name on the command line. Raises PolicyError for any other."""
    if name == "off":
        return FixedLength(0)
    kind, _, value = name.partition(":")
    if kind == "fixed":
        if value == "max":
            return FixedLength(None)
        if value.isascii() and value.isdigit():
            return FixedLength(int(value))
    raise PolicyError(f"unknown controller '{name}'; expected {NAMES}")
