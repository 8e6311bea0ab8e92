"""Judges controllers on synthetic texts whose truth is known. No model is run; seconds are virtual.

python -m benchmarks.simulate [SCENARIO ...]
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from benchmarks.synthetic import (
    BLOCK,
    FP32,
    INT8,
    LOOKUP,
    Clock,
    CurveOracle,
    Machine,
    Regime,
    Result,
    Text,
    clairvoyant_seconds,
    replay,
    write_text,
)
from dflash_ort.controller.cost import CostTable
from dflash_ort.controller.names import make_controller
from dflash_ort.controller.protocol import Controller, RoundState
from dflash_ort.records import Draft, RequestRound, RoundRecord


@dataclass(frozen=True)
class Scenario:
    """Texts to learn from, texts to be judged by, a machine."""

    name: str
    machine: Machine
    texts: Sequence[Sequence[Regime]]
    """Each request's regimes; the requests take turns."""
    stretch: int = 10_000
    length: int = 160
    prompt: int = 100
    earlier: Sequence[Sequence[Regime]] | None = None
    """What was answered before; None: the like of ``texts``."""
    cold: bool = False
    """Every request meets a new controller."""
    load: str = "none"
    requests: int = 24
    warm: int = 16
    kinds: tuple[str, ...] = ("ngram", "dflash")
    calibrated: CostTable | None = None
    """What the controllers believe of the machine; None: the truth."""

    def write(self, regimes: Sequence[Sequence[Regime]], count: int, seed: int) -> list[Text]:
        texts = []
        for i in range(count):
            text = write_text(regimes[i % len(regimes)], self.stretch, self.length, self.prompt, seed + i)
            where = np.arange(self.length) / self.length
            loads = {"none": 1.0 + 0.0 * where, "drift": 1.0 + 0.6 * where, "sudden": 1.0 + (where > 0.5)}
            texts.append(replace(text, load=loads[self.load]))
        return texts


# As the shipped drafter was measured on the default pair; survival 0.27, 0.05, 0.01.
SHIPPED = Regime(level=-0.2, spread=1.25, decay=0.85, slope=0.7, shift=-1.05)
EASY = Regime(level=1.6, spread=1.5, decay=0.5)
HARD = Regime(level=-3.0, spread=1.3)
MEDIUM = Regime(level=0.0, spread=2.0, decay=0.6)
VAGUE = Regime(level=0.5, spread=1.5, decay=0.3, slope=0.15, shift=-0.2)
QUIET_NOISE = Regime(level=-3.0, scale=0.0)
LOUD_NOISE = Regime(level=2.0, scale=0.0)
COPYING = replace(SHIPPED, lookups=0.9, lookup=0.93)
SOME_LOOKUPS = replace(SHIPPED, lookups=0.25, lookup=0.6)
BAD_LOOKUPS = replace(QUIET_NOISE, lookups=0.6, lookup=0.02)

_FP32, _INT8 = Machine(FP32), Machine(INT8)
_ROUGH = Machine(FP32, noise=0.15, outliers=0.03)
_SHIPPED = tuple((replace(SHIPPED, shift=SHIPPED.shift + offset),) for offset in (-0.6, 0.0, 0.6))
"""Texts differ as measured."""
_MIX = ((SHIPPED,), (EASY,), (HARD,), (MEDIUM,))
SCENARIOS = [
    Scenario("shipped fp32", _FP32, _SHIPPED),
    Scenario("shipped int8", _INT8, _SHIPPED),
    Scenario("easy fp32", _FP32, [(EASY,)]),
    Scenario("easy int8", _INT8, [(EASY,)]),
    Scenario("hard fp32", _FP32, [(HARD,)]),
    Scenario("hard int8", _INT8, [(HARD,)]),
    Scenario("medium fp32", _FP32, [(MEDIUM,)]),
    Scenario("medium int8", _INT8, [(MEDIUM,)]),
    Scenario("vague evidence fp32", _FP32, [(VAGUE,)]),
    Scenario("mixed texts fp32", _FP32, _MIX),
    Scenario("mixed texts int8", _INT8, _MIX),
    Scenario("switching fp32", _FP32, [(EASY, HARD)], stretch=120, length=720, requests=8),
    Scenario("switching int8", _INT8, [(EASY, HARD)], stretch=120, length=720, requests=8),
    Scenario("copying fp32", _FP32, [(COPYING, SHIPPED)], stretch=40),
    Scenario("copying int8", _INT8, [(COPYING, SHIPPED)], stretch=40),
    Scenario("some lookups int8", _INT8, [(SOME_LOOKUPS,)]),
    Scenario("slow drift", _ROUGH, _MIX, load="drift"),
    Scenario("sudden load", _ROUGH, _MIX, load="sudden"),
    Scenario("long prompt", _FP32, _SHIPPED, prompt=1000),
    Scenario("cold shipped fp32", _FP32, _SHIPPED, cold=True, length=128),
    Scenario("cold easy int8", _INT8, [(EASY,)], cold=True, length=128),
    Scenario("noise fp32", _FP32, [(QUIET_NOISE,), (LOUD_NOISE,)], earlier=_MIX),
    Scenario("noise int8", _INT8, [(QUIET_NOISE,), (LOUD_NOISE,)], earlier=_MIX),
    Scenario("cold quiet noise fp32", _FP32, [(QUIET_NOISE,)], cold=True, length=128),
    Scenario("cold quiet noise int8", _INT8, [(QUIET_NOISE,)], cold=True, length=128),
    Scenario("cold loud noise fp32", _FP32, [(LOUD_NOISE,)], cold=True, length=128),
    Scenario("cold loud noise int8", _INT8, [(LOUD_NOISE,)], cold=True, length=128),
    Scenario("cold bad lookups int8", _INT8, [(BAD_LOOKUPS,)], cold=True, length=128),
]

RULES = (
    "off", "fixed:1", "fixed:2", "fixed:3", "fixed:4", "fixed:max", "threshold:0.3", "threshold:0.5", "threshold:0.8",
    "hill-climb", "step-ratio", "ngram fixed:max",
)  # fmt: skip


def run(scenario: Scenario, name: str, seed: int = 1) -> Result:
    """One controller on a scenario; `ngram fixed:max` and the like ask the lookup only."""
    kinds: tuple[str, ...] = scenario.kinds if name in ("adaptive", "oracle") else ("dflash",)
    if name.startswith("ngram "):
        kinds, name = ("ngram",), name.removeprefix("ngram ")
    result, clock = Result(), Clock(scenario.machine, seed)
    texts = scenario.write(scenario.texts, scenario.requests, 1000 * seed + 500)
    controller = _make(scenario, name)
    if name != "oracle" and not scenario.cold:
        earlier = scenario.texts if scenario.earlier is None else scenario.earlier
        for i, text in enumerate(scenario.write(earlier, scenario.warm, 1000 * seed)):
            replay(controller, text, clock, i, kinds, Result())
    for i, text in enumerate(texts):
        used = _make(scenario, name) if scenario.cold else controller
        replay(used, text, clock, 100_000 + i, kinds, result)
    return result


def _make(scenario: Scenario, name: str) -> Controller:
    if name == "oracle":
        return CurveOracle(scenario.machine)
    return make_controller(name, scenario.calibrated or scenario.machine.table)


def clairvoyant(scenario: Scenario, seed: int = 1) -> Result:
    """The bound that knows the future."""
    clock, texts = Clock(scenario.machine, seed), scenario.write(scenario.texts, scenario.requests, 1000 * seed + 500)
    return Result(sum(map(len, texts)), sum(clairvoyant_seconds(t, clock, scenario.kinds) for t in texts))


def report(scenario: Scenario, seed: int = 1) -> str:
    """A table line: tokens per virtual second, and what adaptive is beside its bounds and rivals."""
    results = {name: run(scenario, name, seed) for name in ("adaptive", *RULES, "oracle")}
    rates = {name: result.rate for name, result in results.items()}
    rates["clairvoyant"] = clairvoyant(scenario, seed).rate
    mine = rates["adaptive"]
    ratios = [mine / rates[name] for name in ("oracle", "clairvoyant", "off")]
    fixed = max((n for n in RULES if "fixed" in n), key=lambda n: rates[n])
    rule = max((n for n in RULES if "fixed" not in n and n != "off"), key=lambda n: rates[n])
    adaptive = results["adaptive"]
    calibration = adaptive.predicted / adaptive.realised if adaptive.realised else math.nan
    cells = [f"{scenario.name:24}", f"{mine:7.1f}", *(f"{ratio:7.3f}" for ratio in ratios)]
    cells += [f"{mine / rates[n]:7.3f} {n:15}" for n in (fixed, rule)]
    cells += [f"{adaptive.asked / adaptive.rounds:6.2f}", f"{calibration:6.2f}"]
    return " ".join(cells)


HEADER = (
    f"{'scenario':24}  tok/s  /oracle /clairv   /off  {'/best fixed':23} {'/best rule':23}  asked expected/committed"
)


def microseconds(repeats: int = 2000) -> float:
    """What a decision and its update cost: the median round of one request with a lookup and a block."""
    controller, rng = make_controller("adaptive", FP32), np.random.default_rng(0)
    logs = [tuple(x) for x in np.log(rng.uniform(0.05, 0.95, (repeats, BLOCK))).tolist()]
    lookup = Draft(0, 0, (0,) * LOOKUP, match_length=3, kind="ngram")
    times = []
    for i in range(repeats):
        state = RoundState(0, 100 + i % 400, 2, 100, {"ngram": LOOKUP, "dflash": BLOCK})
        began = perf_counter()
        order = controller.choose(state, lookup)
        deciding = perf_counter() - began
        draft = Draft(0, 0, (0,) * BLOCK, logs[i], kind="dflash") if order.kind == "dflash" else lookup
        began = perf_counter()
        verified = controller.plan([draft]).lengths[0]
        deciding += perf_counter() - began
        accepted = min(verified, i % 4)
        part = RequestRound(
            0, len(draft.token_ids), verified, accepted, accepted + 1, state.context_length, draft.log_probs,
            draft.match_length, draft.kind,
        )  # fmt: skip
        record = RoundRecord(i, (part,), 1.7e-3, 2e-2, 0.0, 1e-4, verified + 1, 2)
        began = perf_counter()
        controller.observe(record)
        times.append(deciding + perf_counter() - began)
    return float(np.median(times)) * 1e6


def main() -> None:
    """Print a line per scenario."""
    print(f"a decision and its update: {microseconds():.0f} microseconds")
    wanted = sys.argv[1:]
    print(HEADER)
    for scenario in SCENARIOS:
        if not wanted or any(word in scenario.name for word in wanted):
            print(report(scenario), flush=True)


if __name__ == "__main__":
    main()
