"""`run --explain`: what the controller expected of each round, and what came."""

from __future__ import annotations

from dflash_ort.cli.console import complain
from dflash_ort.records import RoundRecord

HEADER = "round  context  drafter  drafted  verified  accepted  committed (expected)   pass ms (expected)  draft ms"


def explain(record: RoundRecord) -> None:
    """One line for a round."""
    if record.round_id == 0:
        complain(HEADER)
    part = record.requests[0]
    seconds = record.verify_s + record.sample_s + record.other_s
    committed = _expected(record.predicted_committed, "{:.2f}")
    milliseconds = _expected(None if record.predicted_seconds is None else record.predicted_seconds * 1e3, "{:.1f}")
    counts = f"{part.num_drafted:>7}  {part.num_verified:>8}  {part.num_accepted:>8}  {part.num_committed:>9}"
    complain(
        f"{record.round_id:>5}  {part.context_length:>7}  {part.kind:<7}  {counts} {committed:<11}  "
        f"{seconds * 1e3:>7.1f} {milliseconds:<11} {record.draft_s * 1e3:>8.1f}"
    )


def _expected(value: float | None, pattern: str) -> str:
    return "" if value is None else f"({pattern.format(value)})"
