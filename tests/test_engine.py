"""Where an answer ends and what is counted: end-of-sequence, stop strings, limits, the context's end.

Kinds of fault that other engines had (public issues) are tests by name. Scripted targets say texts to order; tiny
bundles show the same of real graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_ort.controller.names import GENERIC_COSTS, make_controller
from dflash_ort.params import SamplingParams
from dflash_ort.records import Draft, Request
from dflash_ort.runtime.drafters import GoOn, NoDrafter
from dflash_ort.runtime.engine import Engine
from tests.fakes import (
    EOS,
    FakeTarget,
    OracleDrafter,
    RandomLengths,
    WatchedLength,
    byte_ids,
    fake_engine,
    only_parts,
    same_answer,
)
from tests.tiny import TinyShape

PROMPT = byte_ids("Say:")
LENGTHS = ["off", *(f"fixed:{n}" for n in range(1, 8)), "fixed:max"]
PERFECT = (1.0,) * 8


def scripted(answer: Sequence[int], *, max_context: int | None = None) -> Engine:
    """An engine whose target says ``answer``, with a drafter that knows it to the last token and beyond every end."""
    target = FakeTarget([*PROMPT, *answer])
    return fake_engine(target, lambda: OracleDrafter(answer, PERFECT, check=True), max_context=max_context)


def in_chunks(engine: Engine, params: SamplingParams, **options: Any) -> tuple[list[Any], Any]:
    stream = engine.stream(PROMPT, params, **options)
    return list(stream), stream


@pytest.fixture(scope="module")
def tiny(tiny_bundle: Callable[..., Path]) -> Iterator[Engine]:
    with Engine.load(tiny_bundle("int8")) as engine:
        yield engine


# Ends --------------------------------------------------


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("place", range(1, 11))
def test_end_of_sequence_accepted_in_mid_block_ends_the_answer_there(length: str, place: int) -> None:
    text = "abcdefghijkl"
    answer = [*byte_ids(text[:place]), EOS, *byte_ids("never shown, never counted")]
    for params in (SamplingParams(), SamplingParams(temperature=0.7, seed=3), SamplingParams(max_new_tokens=place + 1)):
        controller = WatchedLength(getattr(make_controller(length, GENERIC_COSTS), "length"))  # noqa: B009  FixedLength's
        chunks, stream = in_chunks(scripted(answer), params, controller=controller)
        assert stream.token_ids == tuple(answer[: place + 1])
        assert (stream.text, stream.finish_reason) == (text[:place], "stop")
        assert [t for chunk in chunks for t in chunk.token_ids] == answer[: place + 1]
        assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
        decoding = stream._decoding
        assert decoding.cache.valid == decoding.drafters["scripted"].seen == [*PROMPT, *answer[:place]], (
            "kept behind the end"
        )
        assert len(decoding.sampler.history) == place + 1
        statistics = stream.statistics
        assert statistics.committed == place + 1
        assert statistics.accepted <= place
        assert sum(part.num_committed for part in only_parts(controller.records)) == place


def test_ignoring_end_of_sequence_goes_on() -> None:
    answer = [*byte_ids("ab"), EOS, *byte_ids("cd"), EOS, *byte_ids("ef")]
    _, stream = in_chunks(scripted(answer), SamplingParams(ignore_eos=True, max_new_tokens=8))
    assert (stream.text, stream.token_ids, stream.finish_reason) == ("abcdef", tuple(answer), "length")


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("most", [1, 2, 3, 6, 7, 8, 9, 12])
def test_max_new_tokens_inside_a_block_cuts_there(length: str, most: int) -> None:
    answer = byte_ids("abcdefghijklmnopqrstuvwxyz")
    _, stream = in_chunks(scripted(answer), SamplingParams(max_new_tokens=most), controller=length)
    assert (stream.token_ids, stream.finish_reason) == (tuple(answer[:most]), "length")
    statistics = stream.statistics
    assert statistics.committed == most
    assert statistics.verified == statistics.accepted, "a draft was verified that could not have been committed"
    assert statistics.verified == most - 1 - statistics.rounds


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("STOP", "One €uro, "),
        ("S", "One €uro, "),
        ("€u", "One "),
        ("€", "One "),
        ("ro, STOP and", "One €u"),
        ("One", ""),
        ("after", "One €uro, STOP and "),
        ("r\n", None),
    ],
)
def test_a_stop_string_is_found_wherever_it_falls(length: str, stop: str, text: str | None) -> None:
    """In mid-run, across commits and tokens, inside the bytes of a character; nothing of it or after it is shown."""
    whole = "One €uro, STOP and after"
    answer = [*byte_ids(whole), EOS]
    for temperature in (0.0, 0.9):
        params = SamplingParams(stop=stop, temperature=temperature, seed=1)
        chunks, stream = in_chunks(scripted(answer), params, controller=length)
        assert stream.text == "".join(chunk.text for chunk in chunks) == (whole if text is None else text)
        assert stream.finish_reason == "stop"
        end = len(answer) if text is None else len(byte_ids(text + stop))
        assert stream.token_ids == tuple(answer[:end]), "tokens end with the one that completes the stop string"
        assert stream.statistics.committed == end
        shown = ""
        for chunk in chunks:
            shown += chunk.text
            assert whole.startswith(shown)


def test_the_first_end_wins_whichever_kind_it_is() -> None:
    answer = [*byte_ids("one two"), EOS, *byte_ids("three")]
    cases = [
        ({"stop": ["two"], "max_new_tokens": 7}, "one ", 7, "stop"),
        ({"stop": ["two"], "max_new_tokens": 6}, "one tw", 6, "length"),
        ({"stop": ["two", "e t"]}, "on", 5, "stop"),
        ({"max_new_tokens": 8}, "one two", 8, "stop"),
        ({"max_new_tokens": 7}, "one two", 7, "length"),
        ({"stop": ["twofold", "xx"]}, "one two", 8, "stop"),
        ({"stop_token_ids": byte_ids("w")}, "one tw", 6, "stop"),
        ({"stop_token_ids": byte_ids("w"), "stop": ["w"]}, "one t", 6, "stop"),
        ({"min_tokens": 7}, "one two", 8, "stop"),
        ({"stop": ["one"], "min_tokens": 4}, "one two", 8, "stop"),
    ]
    for options, text, tokens, reason in cases:
        for length in LENGTHS:
            params = SamplingParams(**options)  # type: ignore[arg-type]
            _, stream = in_chunks(scripted(answer), params, controller=length)
            assert (stream.text, len(stream.token_ids), stream.finish_reason) == (text, tokens, reason), (
                options,
                length,
            )


def test_text_held_back_for_a_stop_string_is_shown_when_the_answer_ends() -> None:
    _, stream = in_chunks(scripted([*byte_ids("well, ST"), EOS]), SamplingParams(stop="STOP"))
    assert (stream.text, stream.finish_reason) == ("well, ST", "stop")
    _, stream = in_chunks(scripted(byte_ids("well, STOP")), SamplingParams(stop="STOP", max_new_tokens=9))
    assert (stream.text, stream.finish_reason) == ("well, STO", "length")


def test_a_character_cut_in_half_by_the_limit_is_shown_as_a_replacement() -> None:
    answer = byte_ids("ab€")
    for most, text in ((3, "ab\ufffd"), (4, "ab\ufffd"), (5, "ab€")):
        chunks, stream = in_chunks(scripted(answer), SamplingParams(max_new_tokens=most))
        assert stream.text == text
        assert not any("\ufffd" in chunk.text for chunk in chunks[:-1])


# Counts --------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_counts_are_of_what_the_user_got(tiny: Engine, temperature: float) -> None:
    """Committed, drafted, verified and accepted are four numbers; accepted never counts the free token."""
    for name in ("none", "ngram", "dflash"):
        controller = RandomLengths(2)
        params = SamplingParams(max_new_tokens=50, temperature=temperature, seed=1)
        answer = tiny.generate("ab ab ab ab", params, raw=True, drafter=name, controller=controller)  # type: ignore[arg-type]
        parts, s = only_parts(controller.records), answer.statistics
        assert s.committed == len(answer.token_ids) == 1 + sum(p.num_committed for p in parts)
        assert s.prompt_tokens == 11
        assert (s.rounds, s.verify_rounds) == (len(parts), sum(p.num_verified > 0 for p in parts))
        assert s.drafted == sum(p.num_drafted for p in parts)
        assert s.verified == sum(p.num_verified for p in parts) <= s.drafted
        assert s.accepted == sum(p.num_accepted for p in parts) <= s.verified
        in_verify = sum(p.num_committed for p in parts if p.num_verified)
        assert s.acceptance_length == (in_verify / s.verify_rounds if s.verify_rounds else None)
        assert s.tokens_per_round == (s.committed - 1) / s.rounds
        assert all(p.num_committed == p.num_accepted + 1 for p in parts), (
            "nothing was cut, so each round has one for free"
        )
        assert s.committed == 1 + s.accepted + s.rounds
        if name == "none":
            assert (s.drafted, s.verified, s.accepted, s.acceptance_length) == (0, 0, 0, None)


def test_an_end_in_mid_block_is_not_counted_beyond() -> None:
    answer = [*byte_ids("a"), *byte_ids("bc"), EOS, *byte_ids("defghijk")]
    _, stream = in_chunks(scripted(answer), SamplingParams())
    s = stream.statistics
    assert (s.committed, s.rounds, s.drafted, s.verified, s.accepted, s.acceptance_length) == (4, 1, 8, 8, 3, 3.0)


def test_rejected_drafts_leave_no_trace_in_penalties() -> None:
    """Drafts that are always wrong, all of one token: were they counted, the penalties would move the text."""

    class WrongDrafter(NoDrafter):
        max_draft = 5

        def draft(self, request: Request, limit: int, go_on: GoOn | None = None) -> Draft:
            return Draft(request.id, request.last_token, (77,) * limit)

    params = SamplingParams(
        max_new_tokens=60, presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=1.5, ignore_eos=True
    )
    for temperature in (0.0, 1.2):
        truth = fake_engine(FakeTarget()).generate(PROMPT, replace(params, temperature=temperature, seed=4))
        answer = fake_engine(FakeTarget(), WrongDrafter).generate(
            PROMPT, replace(params, temperature=temperature, seed=4)
        )
        assert answer.token_ids == truth.token_ids
        assert answer.statistics.verified > 200


# Limits --------------------------------------------------


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("room", [1, 2, 3, 5, 8, 9])
def test_near_the_end_of_the_context_the_block_shrinks_and_then_the_answer_ends(length: str, room: int) -> None:
    answer = byte_ids("abcdefghijklmnopqrstuvwxyz")
    engine = scripted(answer, max_context=len(PROMPT) + room)
    _, stream = in_chunks(engine, SamplingParams(), controller=length)
    assert (stream.token_ids, stream.finish_reason) == (tuple(answer[:room]), "length")
    _, stream = in_chunks(engine, SamplingParams(max_new_tokens=1000), controller=length)
    assert (stream.token_ids, stream.finish_reason) == (tuple(answer[:room]), "length")


@pytest.mark.parametrize("limit", [None, 40])
def test_a_bundle_runs_to_the_end_of_its_context(tiny_bundle: Callable[..., Path], limit: int | None) -> None:
    """To the last position of buffers and rotary tables, with every drafter and prompts up to one token short of it."""
    with Engine.load(tiny_bundle("fp32", TinyShape(context=64)), max_context=limit) as engine:
        for size in (1, 30, *((engine.max_context - k) for k in (8, 7, 6, 5, 3, 2, 1))):
            prompt = byte_ids("ab" * 40)[:size]
            for temperature in (0.0, 0.8):
                params = SamplingParams(temperature=temperature, seed=1, ignore_eos=True)
                plain = engine.generate(prompt, params, drafter="none")
                assert (len(plain.token_ids), plain.finish_reason) == (engine.max_context - size, "length")
                for name in ("ngram", "dflash"):
                    assert same_answer(engine.generate(prompt, params, drafter=name), plain)  # type: ignore[arg-type]
