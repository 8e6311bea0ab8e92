"""Promise 1: tokens, text and finish reason are the same whatever is drafted, verified, prefilled or run beside.

Tiny models at each precision, every kind of sampling parameter, every way of running: each is compared with plain
decoding, and all rows' logits and tapped states, seen in any run, must be the same bits wherever a context recurs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_ort.controller.protocol import Controller
from dflash_ort.exporter.linear import Precision
from dflash_ort.params import SamplingParams
from dflash_ort.runtime.drafters import Drafter
from dflash_ort.runtime.engine import Generation
from dflash_ort.runtime.target import TargetPass
from tests.fakes import GivenDrafterEngine, OracleDrafter, RandomLengths, Recording, WatchedLength, byte_ids, only_parts
from tests.settings import PROVIDER
from tests.tiny import EXTENSIONS

PRECISIONS: tuple[Precision, ...] = ("fp32", "int8")
SURVIVAL = (0.85, 0.75, 0.65, 0.55, 0.45)
MAX = len(SURVIVAL)
LETTERS = dict.fromkeys(byte_ids("abcdefgh "), 7.0)
EOS_SOON = {2: 9.0}

PARAMS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(),
    "greedy, penalties": SamplingParams(repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.5),
    "greedy, bias": SamplingParams(logit_bias={37: -100.0, 112: 4.0, 90: 3.0}, ignore_eos=True),
    "greedy, min tokens": SamplingParams(logit_bias=EOS_SOON, min_tokens=23),
    "T 0.3": SamplingParams(temperature=0.3, seed=1),
    "T 0.8": SamplingParams(temperature=0.8, seed=2),
    "T 1.3": SamplingParams(temperature=1.3, seed=2**64 - 1),
    "T 0.8, top-k": SamplingParams(temperature=0.8, top_k=12, seed=4),
    "T 1.3, top-p": SamplingParams(temperature=1.3, top_p=0.85, seed=5),
    "T 1.3, min-p": SamplingParams(temperature=1.3, min_p=0.03, seed=6),
    "T 0.8, penalties": SamplingParams(
        temperature=0.8, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7, seed=7
    ),
    "T 1.3, bias": SamplingParams(temperature=1.3, logit_bias=LETTERS, seed=8),
    "T 0.3, min tokens": SamplingParams(temperature=0.3, logit_bias=EOS_SOON, min_tokens=17, seed=9),
    "T 1.3, stop strings": SamplingParams(
        temperature=1.3,
        logit_bias=LETTERS,
        stop=tuple(f"{a}{b}" for a in "aceg" for b in "abcefg"),
        min_tokens=12,
        seed=10,
    ),
    "T 0.8, stop tokens": SamplingParams(temperature=0.8, logit_bias=LETTERS, stop_token_ids=byte_ids("h"), seed=11),
    "T 0.8, all at once": SamplingParams(
        temperature=0.8,
        top_k=60,
        top_p=0.95,
        min_p=0.001,
        repetition_penalty=1.1,
        presence_penalty=-0.5,
        frequency_penalty=0.3,
        logit_bias={**LETTERS, 2: 3.0},
        min_tokens=9,
        stop=("agd",),
        seed=12,
    ),
}
PROMPTS = ("hello, what is it?", "x", "abc abc abc abc abc abc abc abc abc", "héllo wörld €😀 " * 3)


Outcome = tuple[tuple[int, ...], str, str]


class Lab:
    """One engine, and the many ways of getting an answer from it."""

    def __init__(self, directory: Path) -> None:
        engine = GivenDrafterEngine.load(directory, provider=PROVIDER)
        assert isinstance(engine, GivenDrafterEngine)
        self.engine = engine
        bundle = engine._opened()
        self.recording = Recording(bundle.target)
        target: Any = self.recording
        engine._bundle = replace(bundle, target=target)
        self.max_draft = engine.max_draft("dflash")

    def run(self, prompt: str, params: SamplingParams, **options: Any) -> Generation:
        return self.engine.generate(prompt, params, raw=True, **options)

    def plain(self, prompt: str, params: SamplingParams) -> Generation:
        return self.run(prompt, params, drafter="none")

    @contextmanager
    def drafting(self, make: Callable[[], Drafter]) -> Iterator[None]:
        self.engine.next_drafter = make
        try:
            yield
        finally:
            self.engine.next_drafter = None

    def oracle(self, truth: Generation, seed: int, *, cycle: bool = False) -> Callable[[], Drafter]:
        return lambda: OracleDrafter(
            truth.token_ids, SURVIVAL, vocab_size=self.engine.manifest.target.vocab_size, seed=seed, cycle=cycle
        )

    def other_ways(self, prompt: str, params: SamplingParams, truth: Generation) -> Iterator[tuple[str, Generation]]:
        """The same request run in every other way there is."""
        lengths = [*range(1, self.max_draft), None]
        for drafter, seed in itertools.product(("ngram", "dflash"), (0, 1)):
            controller: Controller = RandomLengths(seed)
            yield f"{drafter}, random lengths", self.run(prompt, params, drafter=drafter, controller=controller)
        yield "ngram, whole", self.run(prompt, params, drafter="ngram", controller="fixed:max")
        for length in lengths:
            yield f"dflash, {length}", self.run(prompt, params, drafter="dflash", controller=WatchedLength(length))
        for length in lengths:
            watched = WatchedLength(length)
            with self.drafting(self.oracle(truth, 0, cycle=True)):
                yield f"oracle, {length}", self.run(prompt, params, controller=watched)
            self.check_coverage(watched, len(truth.token_ids), MAX if length is None else length)
        for seed in (2, 3):
            rng = np.random.default_rng(seed)
            with self.drafting(self.oracle(truth, seed)):
                pieces = random_pieces(truth.statistics.prompt_tokens, rng)
                yield (
                    f"oracle, {pieces}",
                    self.run(prompt, params, controller=RandomLengths(seed), prefill_pieces=pieces),
                )

    @staticmethod
    def check_coverage(watched: WatchedLength, tokens: int, length: int) -> None:
        """A text long enough for the whole cycle saw every accepted count: nothing here passes for want of drafts."""
        if tokens >= 32:
            counts = {part.num_accepted for part in only_parts(watched.records) if part.num_verified == length}
            assert counts == set(range(length + 1))


def outcome(answer: Generation) -> Outcome:
    return answer.token_ids, answer.text, answer.finish_reason


def random_pieces(total: int, rng: np.random.Generator) -> list[int]:
    """Row counts, one row often among them, that add up to ``total``."""
    pieces = []
    while total:
        pieces.append(int(min(rng.choice([1, 1, 2, 3, 7, 40]), total)))
        total -= pieces[-1]
    return pieces


@pytest.fixture(scope="module", params=PRECISIONS)
def lab(request: pytest.FixtureRequest, tiny_bundle: Callable[..., Path]) -> Iterator[Lab]:
    lab = Lab(tiny_bundle(request.param))
    with lab.engine:
        yield lab


@pytest.mark.parametrize("name", PARAMS)
def test_every_way_of_running_gives_the_same_tokens_text_and_end(lab: Lab, name: str) -> None:
    prompt = PROMPTS[list(PARAMS).index(name) % len(PROMPTS)]
    params = replace(PARAMS[name], max_new_tokens=48)
    truth = lab.plain(prompt, params)
    assert truth.exact
    before = lab.recording.compared
    for way, answer in lab.other_ways(prompt, params, truth):
        assert outcome(answer) == outcome(truth), way
        assert answer.exact
    assert lab.recording.compared - before > 5 * len(truth.token_ids), "hardly a row was seen twice"


def test_the_matrix_has_every_end_and_lengths_differ(lab: Lab) -> None:
    ends = {
        name: lab.plain(PROMPTS[i % 4], replace(p, max_new_tokens=48)) for i, (name, p) in enumerate(PARAMS.items())
    }
    assert {answer.finish_reason for answer in ends.values()} == {"stop", "length"}
    assert ends["T 1.3, stop strings"].finish_reason == "stop"
    assert ends["greedy, min tokens"].finish_reason == "stop"
    assert len({answer.token_ids for answer in ends.values()}) == len(ends), "two parameter sets gave one text"


def test_a_long_prompt_is_the_same_in_any_pieces(lab: Lab) -> None:
    """More than one chunk of the default prefill, and pieces that straddle the chunk's border."""
    prompt = "The quick brown fox jumps over the lazy dog. " * 8
    params = SamplingParams(max_new_tokens=20, temperature=0.8, seed=3)
    truth = lab.plain(prompt, params)
    total = truth.statistics.prompt_tokens
    assert total > 256
    for pieces in (
        [total],
        [total - 1, 1],
        [1, total - 1],
        [255, 1, total - 256],
        random_pieces(total, np.random.default_rng(0)),
    ):
        for drafter in ("none", "dflash"):
            assert outcome(lab.run(prompt, params, drafter=drafter, prefill_pieces=pieces)) == outcome(truth), (
                pieces,
                drafter,
            )


def test_streams_taking_turns_are_as_if_alone(lab: Lab) -> None:
    """Two and more requests interleaved at random, with different drafters, lengths and parameters."""
    names = ("greedy", "T 0.8", "T 0.8, penalties", "T 1.3, stop strings", "T 0.8, all at once")
    requests = [(PROMPTS[i % 4], replace(PARAMS[name], max_new_tokens=40)) for i, name in enumerate(names)]
    alone = [lab.plain(*request) for request in requests]
    for seed in range(4):
        rng = np.random.default_rng(seed)
        streams = []
        for (prompt, params), truth in zip(requests, alone, strict=True):
            drafter = rng.choice(["none", "ngram", "dflash", "oracle"])
            with lab.drafting(lab.oracle(truth, seed)):
                if drafter != "oracle":
                    lab.engine.next_drafter = None
                options = {} if drafter == "oracle" else {"drafter": drafter}
                streams.append(lab.engine.stream(prompt, params, raw=True, controller=RandomLengths(seed), **options))
        going = list(streams)
        while going:
            stream = going[int(rng.integers(len(going)))]
            if next(stream, None) is None:
                going.remove(stream)
        results = [(stream.token_ids, stream.text, stream.finish_reason) for stream in streams]
        assert results == [outcome(truth) for truth in alone]


def test_a_reduced_vocabulary_and_another_block_size_change_nothing(tiny_bundle: Callable[..., Path]) -> None:
    """Drafters differ, extensions and all, the target does not: neither may the text."""
    params = SamplingParams(max_new_tokens=32, temperature=0.8, top_p=0.95, seed=1)
    answers = set()
    extended = [{"extensions": (name,)} for name in EXTENSIONS] + [{"extensions": EXTENSIONS, "block_size": 1}]
    for options in ({}, {"draft_vocab": 100}, {"block_size": 2}, {"block_size": 11}, *extended):
        with GivenDrafterEngine.load(tiny_bundle("int8", **options), provider=PROVIDER) as engine:
            for drafter, length in itertools.product(("none", "dflash"), ("fixed:1", "fixed:max")):
                answer = engine.generate("hello", params, raw=True, drafter=drafter, controller=length)
                answers.add(outcome(answer))
    assert len(answers) == 1


def test_the_recording_sees_one_wrong_bit(tiny_bundle: Callable[..., Path]) -> None:
    """The check itself can fail: the last bit of one logit, in one pass, is noticed."""
    lab = Lab(tiny_bundle("fp32"))
    with lab.engine:
        lab.plain("hello", SamplingParams(max_new_tokens=8))
        inner = lab.recording._target

        class Flipping:
            def run(self, *args: Any) -> TargetPass:
                result = inner.run(*args)
                if len(args[1]) > 1:
                    result.logits[0, 0] = np.nextafter(result.logits[0, 0], np.float32(np.inf))
                return result

            def __getattr__(self, name: str) -> Any:
                return getattr(inner, name)

        flipping: Any = Flipping()
        lab.recording._target = flipping
        with pytest.raises(AssertionError, match="other bits"):
            lab.run("hello", SamplingParams(max_new_tokens=8), drafter="dflash")


PAIR_PROMPTS = (
    "Write one sentence about the sea.",
    "Count: one, two, three, four, one, two, three, four,",
    "What is the capital of France, and why is it famous?",
    'Return {"a": 1, "b": [1, 2, 3]} as YAML.',
)
PAIR_PARAMS = {
    "greedy": SamplingParams(),
    "T 0.7, top-p": SamplingParams(temperature=0.7, top_p=0.9, seed=5),
    "T 1, penalties": SamplingParams(
        temperature=1.0, min_p=0.05, repetition_penalty=1.1, frequency_penalty=0.2, seed=6
    ),
}


def _pair_rows(full: bool) -> list[tuple[int, str]]:
    """(prompt, parameters): a seeded sample in which every parameter set occurs, or all."""
    if full:
        return list(itertools.product(range(len(PAIR_PROMPTS)), PAIR_PARAMS))
    prompts = np.random.default_rng(1).permutation(len(PAIR_PROMPTS)).tolist()
    return list(zip(prompts, PAIR_PARAMS, strict=False))


def _check_pair(directory: Path, *, full: bool, tokens: int) -> None:
    lab = Lab(directory)
    with lab.engine:
        longest = lab.max_draft
        lengths = range(1, longest + 1) if full else (1, 3, longest)
        accepted = committed = 0
        for index, name in _pair_rows(full):
            params = replace(PAIR_PARAMS[name], max_new_tokens=tokens)
            truth = lab.engine.generate(PAIR_PROMPTS[index], params, drafter="none")
            ways: list[tuple[str, Controller]] = [("dflash", WatchedLength(n)) for n in lengths]
            ways += [("dflash", RandomLengths(index)), ("ngram", RandomLengths(index))]
            ways += [("ngram", WatchedLength(None))] if full else []
            for drafter, controller in ways:
                answer = lab.engine.generate(PAIR_PROMPTS[index], params, drafter=drafter, controller=controller)
                assert outcome(answer) == outcome(truth), (index, name, drafter, controller)
                accepted += answer.statistics.accepted
                committed += answer.statistics.committed
        assert accepted > committed / 10, "the drafters were hardly ever right: little was tested"


@pytest.mark.pair
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_default_pair_sampled(default_bundle: Callable[[Precision], Path], precision: Precision) -> None:
    _check_pair(default_bundle(precision), full=False, tokens=36)


@pytest.mark.full
@pytest.mark.pair
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_default_pair_whole_matrix(default_bundle: Callable[[Precision], Path], precision: Precision) -> None:
    _check_pair(default_bundle(precision), full=True, tokens=96)
