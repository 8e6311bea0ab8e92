"""What the adaptive controller knows: of a drafter over all requests, of a drafter on one text, of one request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from dflash_ort.controller.acceptance import HazardModel
from dflash_ort.controller.protocol import RoundState

RIGHT_BLOCKS = 16.0
"""Blocks that stand for a drafter's being right, until its own have shown otherwise."""

_LEAST_WILLING = 0.2
_ROUNDS_OF_ALL = 2.0
"""Rounds of whatever kind that the pace of those of one kind starts from."""


@dataclass(slots=True)
class Population:
    """What all requests taught of a drafter that costs time: what new ones start from."""

    value: float
    requests: float = 0.0
    recoveries: float = 0.0
    waited: float = 0.0
    """Rounds without it after it was given up."""
    slowness: float = 0.0
    """Log of its seconds over the table's, load apart: settings such as temperature change it."""
    drafts: float = 3.0
    """Made of a block, lately."""
    elapsed: float = 0.0
    """Table seconds of all requests that are over, and of all tries."""
    spent: float = 0.0
    tries: float = 0.0
    returns: float = 0.0
    """Tries, and how often it came into use again after it was given up."""

    def willing(self) -> float:
        """Part of their share of time that tries may take: less where they hardly ever bring it back."""
        return max(_LEAST_WILLING, min(1.0, 2.0 * (2.0 + self.returns) / (4.0 + self.tries)))


@dataclass(slots=True)
class Arm:
    """What is known of a drafter that costs time, for one request."""

    value: float
    """Recent mean of ``max_n (sum S - lambda dt)``, tokens a block if the drafter is of use, over ``blocks``."""
    blocks: float
    seen: float
    """Blocks in all since it was last tried again, by which its worth is certain."""
    backoff: int
    variance: float = 0.1
    """Between blocks."""
    surplus: float = 0.0
    checked: float = RIGHT_BLOCKS
    """Tokens accepted beyond expectation, and over how many blocks, those that stand for its being right included."""
    expected: float = 0.0
    """Tokens expected to be accepted of this round's block."""
    retry_in: int = 0
    """Rounds until it is tried again; 0 while it is in use."""
    trying: bool = False
    learnt: bool = False
    """A block was seen."""
    spent: float = 0.0
    """Table seconds of the tries so far."""
    revived: int = -1
    """Rounds in use since a try brought it back; -1 once that is settled."""

    def hope(self, optimism: float) -> float:
        """Its worth, and what is not known of it in its favour."""
        return self.corrected + optimism * math.sqrt(self.variance / self.seen)

    @property
    def corrected(self) -> float:
        """Its worth, by what its verified blocks gave and not only by what they promised."""
        return self.value + self.surplus / self.checked


@dataclass(slots=True)
class Pace:
    """Tokens, rounds and table seconds; the latest count most."""

    tokens: float = 0.0
    rounds: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float, memory: float) -> None:
        """One more round, of about ``memory`` that count."""
        keep = 1.0 - 1.0 / memory
        self.tokens = keep * self.tokens + tokens
        self.rounds = keep * self.rounds + 1.0
        self.seconds = keep * self.seconds + seconds

    def of(self, rounds: float) -> Pace:
        """The same pace, of so many rounds."""
        part = rounds / self.rounds
        return Pace(self.tokens * part, rounds, self.seconds * part)


@dataclass(slots=True)
class Progress:
    """One request's pace, and its drafters."""

    recent: Pace
    models: Mapping[str, HazardModel] = field(default_factory=dict)
    """Of its drafters, by kind."""
    arms: dict[str, Arm] = field(default_factory=dict)
    rate: float = 0.0
    """lambda of rounds like this one: tokens a table second."""
    alike: tuple[Pace, Pace] = field(default_factory=lambda: (Pace(), Pace()))
    """Of the rounds without and with a proposal by lookup: text that repeats goes faster than what is between."""
    has_lookup: bool = False
    elapsed: float = 0.0
    """Table seconds of all rounds."""
    verify_rounds: int = 0
    state: RoundState | None = None
    passes: list[float] = field(default_factory=list)
    """Table seconds of passes of 1, 2, ... rows in this round's context; none before something needs them."""

    def begin(self, state: RoundState, has_lookup: bool) -> None:
        """Another round."""
        self.state, self.passes, self.has_lookup = state, [], has_lookup
        alike, recent = self.alike[has_lookup], self.recent
        share = _ROUNDS_OF_ALL / recent.rounds
        self.rate = (alike.tokens + share * recent.tokens) / (alike.seconds + share * recent.seconds)

    def end(self, tokens: int, seconds: float, memory: float) -> None:
        """What the round gave and took."""
        self.elapsed += seconds
        self.recent.add(tokens, seconds, memory)
        self.alike[self.has_lookup].add(tokens, seconds, memory)
