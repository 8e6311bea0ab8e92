"""The shared vocabulary: what passes between drafter, controller, verifier and caller. Frozen, but for `Request`.

`num_accepted` never counts the bonus token. Prefill commits one token and is not a round.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from dflash_ort.params import SamplingParams

LOG_VERSION = 1
"""Version of the round log's lines (docs/log-format.md)."""

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(slots=True)
class Request:
    """One request's state; everything else about it follows from these fields."""

    id: int
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    output_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and answer together; the last one is the anchor of the next block."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def last_token(self) -> int:
        return self.output_ids[-1] if self.output_ids else self.prompt_ids[-1]


@dataclass(frozen=True, slots=True)
class Draft:
    """What a drafter proposes to follow ``anchor``, the last committed token.

    ``log_probs`` are the drafter's own, one per token. A lookup draft has none; its evidence is how many tokens before
    it match (``match_length``) and whether other places that match go on alike (``agreement``, from -1, all
    otherwise, to 1; 0 where there is no other).
    """

    request_id: int
    anchor: int
    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    match_length: int = 0
    kind: str = "none"
    """Which drafter proposed it."""
    agreement: float = 0.0


@dataclass(frozen=True, slots=True)
class VerifyPlan:
    """How many drafts of each request to verify, and what is expected of it (None where a controller does not
    predict).
    """

    lengths: dict[int, int]
    predicted_committed: float | None = None
    predicted_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class RequestRound:
    """One request's part of a round."""

    request_id: int
    num_drafted: int
    num_verified: int
    num_accepted: int
    """Drafts that were verified, accepted and, after every cut, committed."""
    num_committed: int
    context_length: int
    """Tokens in the cache when the round began."""
    log_probs: tuple[float, ...] = ()
    match_length: int = 0
    kind: str = "none"
    """Which drafter proposed; "none" where nobody was asked."""
    agreement: float = 0.0


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """What a round did and what it cost, in seconds."""

    round_id: int
    requests: tuple[RequestRound, ...]
    draft_s: float
    verify_s: float
    sample_s: float
    other_s: float
    total_rows: int
    """Query rows of the target pass, padding not counted."""
    pending_rows: int
    """Rows committed and not yet injected into the drafter when the round began."""
    predicted_committed: float | None = None
    predicted_seconds: float | None = None
    """What the controller expected of the target pass and the rest; the draft, already made, is not in it."""

    @property
    def seconds(self) -> float:
        return self.draft_s + self.verify_s + self.sample_s + self.other_s


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of an answer as it is streamed."""

    request_id: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a request did and cost; counts are of what the caller got.

    ``committed`` includes prefill's token. ``rounds`` counts every round after prefill, ``verify_rounds`` those
    with a draft verified. ``acceptance_length`` is tokens committed per verify round, ``tokens_per_round`` per
    round; both None before there is one. ``ttft_s`` includes prefill; ``tpot_s`` is the mean time of a token after
    the first.
    """

    prompt_tokens: int
    committed: int
    rounds: int
    verify_rounds: int
    drafted: int
    verified: int
    accepted: int
    acceptance_length: float | None
    tokens_per_round: float | None
    ttft_s: float
    tpot_s: float | None
    draft_s: float
    verify_s: float
    sample_s: float
    other_s: float
    tokens_per_second: float | None
    survival: tuple[float, ...] = ()
    """Of the rounds that verified at least i drafts, the share that accepted i of them, i = 1, 2, ..."""
    predicted_committed: float | None = None
    """Tokens that the controller expected of the rounds that it made a prediction for, and (below) what they gave."""
    predicted_rounds_committed: int = 0
    predicted_seconds: float | None = None
    """Seconds that it expected of those rounds, drafting left out, and (below) what they took."""
    predicted_rounds_seconds: float = 0.0
    plain_seconds: float | None = None
    """What plain decoding would have taken for the same tokens, by the cost table; None without one."""
