"""Synthetic texts whose truth is known (hazards, evidence, costs, load), a replay of controllers on them, and bounds.

A text is fixed, as promise 1 makes real ones: at every position the block that the drafter would propose there, what
it says of it, and how much of it the target agrees with. A controller walks the text in virtual seconds. Two bounds
stand beside the controllers: `CurveOracle` knows the curves (hazards given the evidence, costs, and when a text
changes) and maximises the long-run rate of each stretch of text; `clairvoyant_seconds` knows what will be accepted,
which no controller can.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash_ort.controller.cost import CostModel, CostTable
from dflash_ort.controller.fixed import Stateless
from dflash_ort.controller.protocol import Controller, DraftOrder, RoundState
from dflash_ort.controller.replay import Seconds, Work, rounds
from dflash_ort.controller.trace import Proposals, TracedText
from dflash_ort.records import Draft, VerifyPlan

BLOCK, LOOKUP = 5, 10


def _table(milliseconds: Sequence[float], draft: float) -> CostTable:
    """A staircase over 1 to 16 rows at context 256, growing with the context as attention makes it."""
    contexts, growth = (16, 512, 2048), (0.96, 1.04, 1.3)
    verify = tuple(tuple(ms * 1e-3 * g for g in growth) for ms in milliseconds)
    drafts = tuple(draft * 1e-3 * g for g in growth)
    return CostTable(tuple(range(1, 17)), contexts, verify, drafts, inject_row=2e-5, other=1e-4)


FP32 = _table((20.1, 21.2, 22.9, 24.5, 25.8, 27.1, 29, 31, 31.6, 32.2, 32.9, 33.6, 34.3, 35, 35.8, 36.5), 1.7)
INT8 = _table((7.5, 7.6, 8.5, 9.4, 10.3, 11.2, 12.5, 13.7, 14.4, 15, 15.7, 16.4, 17.1, 17.8, 18.5, 19.2), 1.7)


@dataclass(frozen=True)
class Regime:
    """A kind of text. The draft's logit falls from ``level`` by ``decay`` per log of the position and differs between
    blocks by ``spread``; draft i is accepted with ``scale * sigmoid(shift + slope * logit)``: slope 1 and shift 0 is
    a drafter that knows how good it is, slope 0 one whose evidence says nothing.
    """

    level: float = -1.0
    spread: float = 2.0
    decay: float = 1.0
    slope: float = 1.0
    shift: float = 0.0
    scale: float = 1.0
    lookups: float = 0.0
    """Share of positions with an n-gram match; its drafts are accepted with probability ``lookup``."""
    lookup: float = 0.8


@dataclass(frozen=True)
class Text:
    """One request's answer: per position what would be drafted there and what would be accepted of it."""

    prompt: int
    log_probs: np.ndarray
    hazards: np.ndarray
    agreed: np.ndarray
    matches: np.ndarray
    """Match length of the lookup at a position, 0 for none."""
    lookup_hazards: np.ndarray
    lookup_agreed: np.ndarray
    regimes: np.ndarray
    load: np.ndarray
    """What else the machine is doing: factor on all costs, by position."""

    def __len__(self) -> int:
        return len(self.agreed)

    def traced(self, kinds: Sequence[str]) -> TracedText:
        """As a recording of it would be, behind a first token that prefill commits."""
        none, length = np.zeros(len(self), np.int64), len(self)
        left = np.arange(length, 0, -1)
        looked_up = np.where(self.matches > 0, LOOKUP, 0)
        lookup_agreed = np.minimum(np.minimum(self.lookup_agreed, looked_up), left)
        no_logs, agreement = np.empty((length, 0)), np.zeros(length)
        all_ = {
            "ngram": Proposals(LOOKUP, True, looked_up, lookup_agreed, no_logs, self.matches, agreement),
            "dflash": Proposals(
                BLOCK, False, none + BLOCK, np.minimum(self.agreed, left), self.log_probs, none, agreement
            ),
        }
        return TracedText("", "", self.prompt, length + 1, length + 1, False, {k: all_[k] for k in kinds}, 0)


def _agreed(hazards: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    accepted = rng.random(hazards.shape) < hazards
    agreed: np.ndarray = np.cumprod(accepted, axis=1).sum(axis=1)
    return agreed


def write_text(regimes: Sequence[Regime], stretch: int, length: int, prompt: int, seed: int) -> Text:
    """Stretches of ``stretch`` tokens, the regimes in turn."""
    rng = np.random.default_rng(seed)
    which = (np.arange(length) // stretch) % len(regimes)
    of = {name: np.array([getattr(regimes[int(r)], name) for r in which]) for name in Regime.__dataclass_fields__}
    column = {name: values[:, None] for name, values in of.items()}
    depth = np.log(np.arange(1, BLOCK + 1))
    logits = column["level"] + column["spread"] * rng.standard_normal((length, 1)) - column["decay"] * depth
    logits = np.clip(logits + 0.7 * rng.standard_normal((length, BLOCK)), -8.0, 8.0)
    hazards = column["scale"] / (1.0 + np.exp(-(column["shift"] + column["slope"] * logits)))
    lookup_hazards = np.repeat(column["lookup"], LOOKUP, axis=1)
    matched = rng.random(length) < of["lookups"]
    return Text(
        prompt,
        -np.log1p(np.exp(-logits)),
        hazards,
        _agreed(hazards, rng),
        np.where(matched, np.minimum(1 + rng.geometric(1.0 - of["lookup"]), 32), 0),  # as long as such copies are
        lookup_hazards,
        _agreed(lookup_hazards, rng),
        which,
        np.ones(length),
    )


@dataclass(frozen=True)
class Machine:
    """What passes truly cost, and what a clock says of it."""

    table: CostTable
    noise: float = 0.03
    outliers: float = 0.005
    """Share of rounds that a clock sees five times as long."""


class Clock:
    """True seconds at any rows and context, tabulated once, and a noisy reading of them."""

    def __init__(self, machine: Machine, seed: int) -> None:
        self._machine, self._rng = machine, np.random.default_rng(seed)
        costs = CostModel(machine.table)
        self._passes = {c: [float(x) for x in costs.verify(17, c * 16)] for c in range(256)}
        self._draft = [costs.draft(c * 16, 1) for c in range(256)]

    def verify(self, rows: int, context: int) -> float:
        return self._passes[context // 16][rows - 1]

    def draft(self, context: int, pending: int) -> float:
        return self._draft[context // 16] + self._machine.table.inject_row * max(pending - 1, 0)

    @property
    def other(self) -> float:
        return self._machine.table.other

    def reading(self, seconds: float) -> float:
        noisy = seconds * math.exp(self._machine.noise * self._rng.standard_normal())
        return noisy * (5.0 if self._rng.random() < self._machine.outliers else 1.0)


@dataclass
class Result:
    """What a controller made of some texts."""

    tokens: int = 0
    seconds: float = 0.0
    rounds: int = 0
    asked: int = 0
    """Rounds in which the drafter that costs time was asked."""
    predicted: float = 0.0
    realised: float = 0.0
    """Tokens that the controller expected of rounds it predicted, and that they gave."""

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def replay(
    controller: Controller, text: Text, clock: Clock, request_id: int, kinds: Sequence[str], result: Result
) -> None:
    """Walk a text; add to ``result``. True seconds are counted, what the controller sees is a clock's reading."""

    def take(work: Work) -> Seconds:
        load = float(text.load[work.anchor])
        draft_s = clock.draft(work.context, work.pending) * load if work.drafts else 0.0
        verify_s, other_s = clock.verify(work.rows, work.context) * load, clock.other * load
        result.seconds += draft_s + verify_s + other_s
        return clock.reading(draft_s), clock.reading(verify_s), 0.0, other_s

    if isinstance(controller, CurveOracle):
        controller.see(text)
    for record in rounds(controller, text.traced(kinds), kinds, take, request_id):
        part = record.requests[0]
        result.tokens += part.num_committed
        result.rounds += 1
        result.asked += part.kind == "dflash"
        if record.predicted_committed is not None:
            result.predicted += record.predicted_committed
            result.realised += part.num_committed


class CurveOracle(Stateless):
    """Knows hazards and costs, and the rate of each regime (Dinkelbach's iteration), but not what will be accepted."""

    def __init__(self, machine: Machine) -> None:
        self._clock = Clock(machine, 0)
        self._policies: dict[int, tuple[float, float]] = {}
        self._text: Text | None = None
        self._at = 0

    def see(self, text: Text) -> None:
        """The text that is replayed next."""
        self._text, self._policies = text, {}

    def choose(self, state: RoundState, lookup: Draft | None) -> DraftOrder:
        assert self._text is not None
        text = self._text
        self._at = state.context_length - text.prompt
        regime = int(text.regimes[self._at])
        if regime not in self._policies:
            self._policies[regime] = self._solve(text, regime)
        self._rate, worth = self._policies[regime]
        self._passes = [self._clock.verify(r, state.context_length) for r in range(1, LOOKUP + 2)]
        hazards = text.lookup_hazards[self._at][None]
        has_lookup = lookup is not None and bool(lookup.token_ids)
        free = max(float(self._gains(hazards)[0].max()), 0.0) if has_lookup else 0.0
        # Rows that wait are an investment: they must be injected once, whenever the drafter is first asked.
        price = self._rate * self._clock.draft(state.context_length, min(state.pending_rows, 8))
        if state.limits["dflash"] > 0 and worth - price > max(free, 0.0):
            return DraftOrder("dflash", state.limits["dflash"])
        return DraftOrder("ngram", LOOKUP) if free > 0.0 else DraftOrder()

    def plan(self, drafts: Sequence[Draft]) -> VerifyPlan:
        assert self._text is not None
        draft = drafts[0]
        if not draft.token_ids:
            return VerifyPlan({draft.request_id: 0})
        hazards = self._text.hazards if draft.kind == "dflash" else self._text.lookup_hazards
        gains = self._gains(hazards[self._at][None, : len(draft.token_ids)])[0]
        return VerifyPlan({draft.request_id: int(np.argmax(gains)) + 1 if gains.max() > 0.0 else 0})

    def _gains(self, hazards: np.ndarray) -> np.ndarray:
        """``sum S - lambda dt`` for n = 1, 2, ..., a row per block."""
        extra = np.array(self._passes[1 : hazards.shape[1] + 1]) - self._passes[0]
        return np.cumsum(np.cumprod(hazards, axis=1), axis=1) - self._rate * extra

    def _solve(self, text: Text, regime: int) -> tuple[float, float]:
        """The regime's best rate, and what a drafted block is worth there on average."""
        here = text.regimes == regime
        context = text.prompt + len(text) // 2
        self._passes = [self._clock.verify(r, context) for r in range(1, LOOKUP + 2)]
        self._rate, worth = 1.0 / (self._passes[0] + self._clock.other), 0.0
        for _ in range(8):
            tokens, seconds, values = [], [], []
            for hazards in (text.hazards[here], text.lookup_hazards[here]):
                gains = np.concatenate([np.zeros((len(hazards), 1)), self._gains(hazards)], axis=1)
                best = gains.argmax(axis=1)
                curve = np.concatenate([np.zeros((len(hazards), 1)), np.cumprod(hazards, axis=1)], axis=1)
                tokens.append(1.0 + np.take_along_axis(np.cumsum(curve, axis=1), best[:, None], axis=1)[:, 0])
                seconds.append(np.array(self._passes)[best] + self._clock.other)
                values.append(gains.max(axis=1))
            matched = text.matches[here] > 0
            worth, draft = float(values[0].mean()), self._clock.draft(context, 2)
            asks = worth - self._rate * draft > np.where(matched, values[1], 0.0)
            plain = 1.0, self._passes[0] + self._clock.other
            committed = np.where(asks, tokens[0], np.where(matched, tokens[1], plain[0]))
            spent = np.where(asks, seconds[0] + draft, np.where(matched, seconds[1], plain[1]))
            self._rate = float(committed.sum() / spent.sum())
        return self._rate, worth


def clairvoyant_seconds(text: Text, clock: Clock, kinds: Sequence[str]) -> float:
    """The least seconds that anyone who knows what is accepted could need: shortest path through the text."""
    length = len(text)
    rest = [0.0] * (length + 1)
    for at in range(length - 1, -1, -1):
        context, load = text.prompt + at, float(text.load[at])
        choices = [(0.0, 0)]
        if "ngram" in kinds and text.matches[at]:
            choices.append((0.0, int(text.lookup_agreed[at])))
        if "dflash" in kinds:
            choices.append((clock.draft(context, 2), int(text.agreed[at])))
        rest[at] = min(
            (draft_s + clock.verify(n + 1, context) + clock.other) * load + rest[at + n + 1]
            for draft_s, agreed in choices
            for n in range(min(agreed, length - at - 1) + 1)
        )
    return rest[0]
