"""Requests share nothing but weights: one after the other, interleaved, cancelled, on several threads."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_ort.params import SamplingParams
from dflash_ort.records import Draft
from dflash_ort.runtime.engine import Engine, Generation
from tests.fakes import (
    RandomLengths,
    WatchedLength,
    same_answer,
)


@pytest.fixture(scope="module")
def tiny(tiny_bundle: Callable[..., Path]) -> Iterator[Engine]:
    with Engine.load(tiny_bundle("int8")) as engine:
        yield engine


# Isolation --------------------------------------------------


def counted(answer: Generation) -> tuple[Any, ...]:
    """All of an answer but its seconds."""
    s = answer.statistics
    return (
        answer.token_ids,
        answer.text,
        answer.finish_reason,
        answer.seed,
        (s.committed, s.rounds, s.verify_rounds, s.drafted, s.verified, s.accepted),
    )


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_second_request_does_not_see_the_first(tiny_bundle: Callable[..., Path], temperature: float) -> None:
    """Tokens, text and acceptance are those of a fresh engine, whatever ran before, for every drafter."""
    params = SamplingParams(max_new_tokens=30, temperature=temperature, seed=5, frequency_penalty=0.5)
    prompts = ("abc abc abc abc", "x", "a much longer prompt than the others, so that stale rows would lie behind")
    fresh = {}
    for name in ("none", "ngram", "dflash"):
        for prompt in prompts:
            with Engine.load(tiny_bundle("fp32"), controller="fixed:max") as engine:
                fresh[name, prompt] = counted(engine.generate(prompt, params, raw=True, drafter=name))  # type: ignore[arg-type]
    with Engine.load(tiny_bundle("fp32"), controller="fixed:max") as engine:
        for (name, prompt), expected in [*fresh.items(), *reversed(fresh.items())]:
            assert counted(engine.generate(prompt, params, raw=True, drafter=name)) == expected, (name, prompt)  # type: ignore[arg-type]
        assert len(engine._free) == 1, "requests one after the other share one slot"


def test_what_is_drafted_does_not_depend_on_the_lengths_before(tiny: Engine) -> None:
    """Any sequence of lengths is legal, and replaying a policy is exact: a context has one block, however reached."""
    params = SamplingParams(max_new_tokens=70, temperature=0.5, seed=5)
    blocks: dict[int, set[tuple[int, ...]]] = {}

    class Noting(RandomLengths):
        def plan(self, drafts: Sequence[Draft]) -> Any:
            at = len(stream.token_ids)
            if drafts[0].token_ids:
                blocks.setdefault(at, set()).add(drafts[0].token_ids)
            return super().plan(drafts)

        def draft_limit(self, request_id: int, max_draft: int) -> int:
            # Long stretches without a draft, so that many rows are injected at once.
            return 0 if self._rng.random() < 0.6 else max_draft

    texts = set()
    for seed in range(12):
        stream = tiny.stream("Tell me", params, raw=True, drafter="dflash", controller=Noting(seed))
        assert list(stream)
        texts.add(stream.token_ids)
    assert len(texts) == 1
    assert len(blocks) > 40
    assert all(len(drafts) == 1 for at, drafts in blocks.items() if at < 65)


def test_many_pending_rows_are_injected_in_bounded_pieces(tiny_bundle: Callable[..., Path]) -> None:
    """A prompt longer than an injection chunk, a long plain stretch, and then a draft."""
    with Engine.load(tiny_bundle("fp32")) as engine:
        prompt = "0123456789 " * 30
        params = SamplingParams(max_new_tokens=120)

        class Late(WatchedLength):
            def draft_limit(self, request_id: int, max_draft: int) -> int:
                return 0 if len(self.records) < 100 else max_draft

        controller = Late(None)
        late = engine.generate(prompt, params, raw=True, drafter="dflash", controller=controller)
        assert controller.records[100].pending_rows == 330 + 100
        assert max(record.pending_rows for record in controller.records[102:]) <= 6
        assert same_answer(late, engine.generate(prompt, params, raw=True, drafter="none"))


# Cancelling and sharing --------------------------------------------------


def test_leaving_a_stream_early_frees_it_and_the_next_request_is_as_ever(tiny: Engine) -> None:
    params = SamplingParams(max_new_tokens=40, temperature=0.7, seed=2)
    truth = tiny.generate("hello", params)
    gc.collect()
    slots = len(tiny._free)

    def by_break() -> None:
        for chunk in tiny.stream("other", params):
            if chunk.token_ids:
                break

    def by_close() -> None:
        stream = tiny.stream("other", params)
        next(stream)
        stream.close()
        stream.close()
        assert stream.finish_reason == "cancelled"
        assert list(stream) == []
        assert stream.statistics.committed == len(stream.token_ids) == 1

    def by_exception() -> None:
        with suppress(KeyError), tiny.stream("other", params) as stream:
            for _ in stream:
                raise KeyError

    def by_generator_exit() -> None:
        def pieces() -> Iterator[str]:
            with tiny.stream("other", params) as stream:
                for chunk in stream:
                    yield chunk.text

        generator = pieces()
        next(generator)
        generator.close()

    def before_it_began() -> None:
        tiny.stream("other", params).close()
        tiny.stream("other", params)

    for leave in (by_break, by_close, by_exception, by_generator_exit, before_it_began):
        leave()
        gc.collect()
        assert len(tiny._free) == slots, leave.__name__
        assert same_answer(tiny.generate("hello", params), truth), leave.__name__


def test_a_finished_stream_keeps_its_finish_reason_when_closed(tiny: Engine) -> None:
    stream = tiny.stream("hello", SamplingParams(max_new_tokens=3))
    assert len(list(stream)) >= 1
    stream.close()
    assert stream.finish_reason == "length"


def test_closing_in_the_middle_of_a_round_keeps_the_slot_from_the_next_request(tiny: Engine) -> None:
    """As another thread would: were the slot free at once, the next request would start behind the first one's rows."""
    params = SamplingParams(max_new_tokens=12)
    truth = tiny.generate("the second", params)
    others = []

    class Closing(WatchedLength):
        def draft_limit(self, request_id: int, max_draft: int) -> int:
            if len(self.records) == 2:
                first.close()
                others.append(tiny.stream("the second", params))
            return max_draft

    first = tiny.stream("the first", SamplingParams(max_new_tokens=40), drafter="dflash", controller=Closing(None))
    assert list(first)
    assert first.finish_reason == "cancelled"
    for _ in others[0]:
        pass
    assert others[0].token_ids == truth.token_ids


def test_an_error_in_a_controller_ends_its_stream_and_no_other(tiny: Engine) -> None:
    class Failing(WatchedLength):
        def observe(self, record: Any) -> None:
            raise ZeroDivisionError

    params = SamplingParams(max_new_tokens=12)
    truth = tiny.generate("hello", params)
    stream = tiny.stream("hello", params, controller=Failing(None))
    with pytest.raises(ZeroDivisionError):
        list(stream)
    assert stream.finish_reason == "cancelled"
    assert same_answer(tiny.generate("hello", params), truth)


def test_threads_sharing_an_engine_get_what_they_would_alone(tiny: Engine) -> None:
    requests = [
        (
            f"prompt {i}",
            SamplingParams(max_new_tokens=25, temperature=0.3 * (i % 3), seed=i),
            ("dflash", "ngram", "none")[i % 3],
        )
        for i in range(6)
    ]
    alone = [tiny.generate(prompt, params, drafter="none") for prompt, params, _ in requests]
    together: dict[int, list[Generation]] = {}

    def work(i: int) -> None:
        prompt, params, name = requests[i]
        together[i] = [tiny.generate(prompt, params, drafter=name) for _ in range(3)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(together) == len(requests)
    for i, truth in enumerate(alone):
        assert all(same_answer(answer, truth) for answer in together[i])


def test_seeds_are_drawn_returned_and_reproducible(tiny: Engine) -> None:
    params = SamplingParams(max_new_tokens=20, temperature=1.0)
    first, second = tiny.generate("hello", params), tiny.generate("hello", params)
    assert first.seed != second.seed
    assert first.token_ids != second.token_ids
    again = tiny.generate("hello", replace(params, seed=first.seed), drafter="none")
    assert same_answer(again, first)
    assert again.seed == first.seed
    for seed in (0, 2**64 - 1):
        assert tiny.generate("hello", replace(params, seed=seed)).seed == seed
