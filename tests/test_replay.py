"""Recording and exact replay: what a replay says a controller would have done is what it does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_ort.controller.adaptive import Adaptive
from dflash_ort.controller.cost import CostModel
from dflash_ort.controller.judge import kinds_for
from dflash_ort.controller.names import GENERIC_COSTS, make_controller
from dflash_ort.controller.replay import Outcome, Seconds, TableClock, Work, replay, rounds
from dflash_ort.controller.replay_fast import clairvoyant_seconds, replay_stateless
from dflash_ort.controller.trace import TracedText
from dflash_ort.models.texts import BenchPrompt
from dflash_ort.params import SamplingParams
from dflash_ort.records import RoundRecord
from dflash_ort.runtime.bench import BenchSettings
from dflash_ort.runtime.engine import Engine
from dflash_ort.runtime.record import record

PROMPTS = [
    BenchPrompt("letters", f"p{i}", (text,), temperature)
    for i, (text, temperature) in enumerate(
        [("abcabcabcabc", 0.0), ("the the the", 0.8), ("xyz" * 30, 0.0), ("Q: 1 2 3 4 5 6", 1.2)]
    )
]
CLOCK = TableClock(GENERIC_COSTS)
CLOCKLESS = ("off", "fixed:1", "fixed:3", "fixed:max", "threshold:0.01", "threshold:0.5", "adaptive:frozen")


@pytest.fixture(scope="module", params=[False, True], ids=["parallel", "markov"])
def engine(request: pytest.FixtureRequest, tiny_bundle: Callable[..., Path]) -> Any:
    bundle = tiny_bundle("int8", extensions=("markov_head",)) if request.param else tiny_bundle("fp32")
    with Engine.load(bundle, threads=1, calibrate=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def texts(engine: Engine) -> list[TracedText]:
    settings = BenchSettings(max_new_tokens=48, seed=5)
    return [recorded.traced for recorded in record(engine, PROMPTS, settings, {})]


def real(engine: Engine, controller: Any, drafter: Any = "auto") -> list[list[RoundRecord]]:
    """The rounds of real runs, one prompt after the other."""
    runs = []
    for prompt in PROMPTS:
        seen: list[RoundRecord] = []
        params = SamplingParams(max_new_tokens=48, temperature=prompt.temperature or 0.0, seed=5)
        engine.generate(prompt.turns[0], params, controller=controller, drafter=drafter, on_round=seen.append)
        runs.append(seen)
    return runs


def fed_back(run: list[RoundRecord]) -> Callable[[Work], Seconds]:
    """A clock that shows what a run's did."""
    logged = iter(run)

    def clock(work: Work) -> Seconds:
        r = next(logged)
        return r.draft_s, r.verify_s, r.sample_s, r.other_s

    return clock


def counts(records: list[RoundRecord]) -> list[Any]:
    """All of rounds but their seconds and the request's number."""
    return [(replace(r.requests[0], request_id=0), r.total_rows, r.pending_rows) for r in records]


@pytest.mark.parametrize("name", CLOCKLESS)
def test_a_replay_has_the_rounds_of_the_real_run(name: str, engine: Engine, texts: list[TracedText]) -> None:
    """Every field of every round: counts, evidence, context, pending rows."""
    kinds = ["ngram", "dflash"] if name.startswith("adaptive") else ["dflash"] if name != "off" else []
    runs = real(engine, make_controller(name, GENERIC_COSTS), "none" if name == "off" else "auto")
    controller = make_controller(name, GENERIC_COSTS)
    for i, (run, text) in enumerate(zip(runs, texts, strict=True)):
        assert counts(list(rounds(controller, text, kinds, CLOCK, i))) == counts(run), text.id


def test_lookups_are_replayed_too(engine: Engine, texts: list[TracedText]) -> None:
    runs = real(engine, make_controller("fixed:4", GENERIC_COSTS), "ngram")
    assert any(r.requests[0].num_accepted for r in chain(*runs))
    for i, (run, text) in enumerate(zip(runs, texts, strict=True)):
        controller = make_controller("fixed:4", GENERIC_COSTS)
        assert counts(list(rounds(controller, text, ["ngram"], CLOCK, i))) == counts(run)


def test_a_run_whose_seconds_are_fed_back_is_repeated_exactly(engine: Engine, texts: list[TracedText]) -> None:
    """The clock is part of what an adaptive controller decides by: with its readings come its decisions."""
    runs = real(engine, Adaptive(CostModel(GENERIC_COSTS)))
    controller = Adaptive(CostModel(GENERIC_COSTS))
    for i, (run, text) in enumerate(zip(runs, texts, strict=True)):
        again = list(rounds(controller, text, ["ngram", "dflash"], fed_back(run), i))
        assert counts(again) == counts(run)
        assert [r.predicted_committed for r in again] == [r.predicted_committed for r in run]


@pytest.mark.parametrize("name", ["off", "fixed:1", "fixed:3", "fixed:max", "threshold:0.01", "threshold:0.2"])
@pytest.mark.parametrize("kinds", [["dflash"], ["ngram"], []])
def test_walking_all_texts_in_step_gives_what_walking_each_gives(
    name: str, kinds: list[str], texts: list[TracedText]
) -> None:
    table = replace(GENERIC_COSTS, draft_step=1e-4, after_draft=2e-4)
    long = [replace(text, prompt_tokens=prompt) for text, prompt in zip(texts, (12, 1500, 900, 2000), strict=True)]
    controller = make_controller(name, table)
    fast = replay_stateless(controller, long, kinds, table)
    for i, (text, outcome) in enumerate(zip(long, fast, strict=True)):
        slow = replay(controller, text, kinds, TableClock(table), i)
        assert replace(slow, seconds=0.0) == replace(outcome, seconds=0.0)
        assert outcome.seconds == pytest.approx(slow.seconds)


def test_nobody_is_faster_than_who_knows_what_will_be_accepted(texts: list[TracedText]) -> None:
    least = clairvoyant_seconds(texts, GENERIC_COSTS)
    names = ("off", "fixed:1", "fixed:2", "fixed:5", "adaptive")
    best = np.full(len(texts), np.inf)
    for name in names:
        for kinds in (["dflash"], ["ngram", "dflash"]):
            controller = make_controller(name, GENERIC_COSTS)
            outcomes = [replay(controller, t, kinds, CLOCK, i) for i, t in enumerate(texts)]
            best = np.minimum(best, [o.seconds for o in outcomes])
    assert (least <= best * 1.001).all()
    assert (least > 0.2 * best).all()


def test_a_texts_line_gives_the_text_back(texts: list[TracedText]) -> None:
    for text in texts:
        again = TracedText.from_json(json.loads(json.dumps(text.as_json())))
        assert again.as_json() == text.as_json()
        for kind, proposals in text.proposals.items():
            np.testing.assert_array_equal(proposals.log_probs, again.proposals[kind].log_probs)


@pytest.mark.parametrize(
    "change",
    [
        {"num_tokens": 3},
        {"num_tokens": 10**6},
        {"prompt_tokens": 0},
        {"proposals": {"dflash": {}}},
        {"proposals": None},
        {"id": None, "suite": None, "max_tokens": "x"},
    ],
)
def test_lines_that_cannot_be_are_refused(change: dict[str, Any], texts: list[TracedText]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
        TracedText.from_json({**texts[0].as_json(), **change})


def test_recording_goes_on_where_it_stopped(engine: Engine, texts: list[TracedText]) -> None:
    settings = BenchSettings(max_new_tokens=48, seed=5)
    done = {text.id: text.as_json() for text in texts[:2]}
    rest = [recorded.traced for recorded in record(engine, PROMPTS, settings, done)]
    assert [text.as_json() for text in rest] == [text.as_json() for text in texts[2:]]


def test_outcomes_add_up() -> None:
    one = Outcome(1, 1, 5, 3, 2, 3, 3, 0.5)
    one.add(Outcome(2, 1, 5, 3, 0, 2, 1, 0.25))
    assert one == Outcome(3, 2, 10, 6, 2, 5, 4, 0.75)


@pytest.mark.pair
def test_replays_of_the_default_pair_have_its_rounds(default_bundle: Callable[[str], Path]) -> None:
    """Here drafts are accepted, texts end by themselves, and some are sampled."""
    with Engine.load(default_bundle("int8"), threads=2, calibrate=False) as engine:
        texts = [recorded.traced for recorded in record(engine, PROMPTS, BenchSettings(max_new_tokens=48, seed=5), {})]
        accepted = 0
        for name in ("fixed:3", "fixed:max", "adaptive:frozen", "adaptive"):
            runs = real(engine, make_controller(name, GENERIC_COSTS))
            controller = make_controller(name, GENERIC_COSTS)
            kinds = kinds_for(controller, "auto", texts)
            for i, (run, text) in enumerate(zip(runs, texts, strict=True)):
                again = list(rounds(controller, text, kinds, fed_back(run) if name == "adaptive" else CLOCK, i))
                assert counts(again) == counts(run), (name, text.id)
                accepted += sum(r.requests[0].num_accepted for r in run if r.requests[0].kind == "dflash")
        assert accepted > 20
