"""Statistics as a person reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_ort.records import FinishReason, Statistics

if TYPE_CHECKING:
    from dflash_ort.runtime.stream import Generation


def statistics_lines(s: Statistics, seed: int, finish_reason: FinishReason | None) -> list[str]:
    """A few aligned lines."""
    lines = [
        f"tokens     {s.prompt_tokens} prompt, {s.committed} answer ({finish_reason}), seed {seed}",
        f"speed      {_number(s.tokens_per_second, '.1f')} tokens/s, first after {s.ttft_s:.3f} s, "
        f"then {_milliseconds(s.tpot_s)} a token",
        f"rounds     {s.rounds}, {s.verify_rounds} with drafts; {_number(s.tokens_per_round, '.2f')} tokens a round, "
        f"acceptance length {_number(s.acceptance_length, '.2f')}",
        f"drafts     {s.drafted} drafted, {s.verified} verified, {s.accepted} accepted",
    ]
    total = s.draft_s + s.verify_s + s.sample_s + s.other_s
    if total > 0:
        parts = (("draft", s.draft_s), ("verify", s.verify_s), ("sample", s.sample_s), ("other", s.other_s))
        lines.append(
            "time       " + ", ".join(f"{name} {seconds / total:.1%}" for name, seconds in parts) + f" of {total:.2f} s"
        )
    if s.survival:
        lines.append("survival   " + ", ".join(f"{share:.2f}" for share in s.survival[:8]))
    if s.predicted_committed is not None and s.predicted_seconds is not None:
        lines.append(
            f"predicted  {s.predicted_committed:.0f} tokens in {s.predicted_seconds:.2f} s without drafting; "
            f"{s.predicted_rounds_committed} in {s.predicted_rounds_seconds:.2f} s came"
        )
    if s.plain_seconds is not None and total > 0:
        lines.append(f"plain      would have taken about {s.plain_seconds:.2f} s, by this machine's calibrated costs")
    return lines


def comparison(plain: Generation, speculative: Generation) -> str:
    """One line: plain decoding beside speculation, measured one after the other."""
    same = (
        "the same tokens"
        if plain.token_ids == speculative.token_ids
        else "DIFFERENT TOKENS (this is a bug; please report it)"
    )
    slow, fast = plain.statistics.tokens_per_second, speculative.statistics.tokens_per_second
    if not slow or not fast:
        return f"measured   too short an answer to compare speeds; {same}"
    return f"measured   {slow:.1f} tokens/s plain, {fast:.1f} with speculation: {fast / slow:.2f}x; {same}"


def _number(value: float | None, pattern: str) -> str:
    return "-" if value is None else format(value, pattern)


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f} ms"
