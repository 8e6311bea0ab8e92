"""From tokens to text: incremental decoding, stop strings, and the first end of an answer, against naive readings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from dflash_ort.params import SamplingParams
from dflash_ort.records import Request
from dflash_ort.runtime.answer import Answer
from dflash_ort.runtime.stops import StopStrings
from dflash_ort.runtime.text import Detokenizer
from tests.fakes import (
    PieceDetokenizer,
    byte_ids,
    cut_up,
)
from tests.tiny import byte_tokenizer

# Stop strings --------------------------------------------------


def naive_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the stop string begins that a reader of the growing text sees completed first."""
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stops if text[:end].endswith(s)]
        if starts:
            return min(starts)
    return None


SHORT = st.text("ab€", min_size=1, max_size=4)


@given(text=st.text("ab€", max_size=24), stops=st.lists(SHORT, max_size=4), data=st.data())
@settings(max_examples=400)
def test_stop_strings_in_any_pieces_are_found_as_in_the_whole_text(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    found = naive_stop(text, stops)
    searcher, shown, fed = StopStrings(stops), "", ""
    for piece in cut_up(data.draw, text):
        new, hit = searcher.feed(piece)
        shown, fed = shown + new, fed + piece
        assert hit == (naive_stop(fed, stops) is not None)
        if hit:
            assert shown == text[:found]
            assert searcher.flush() == ""
            return
        assert fed.startswith(shown)
        held = fed[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops), "held back without need"
    assert found is None
    assert shown + searcher.flush() == text


# Incremental decoding --------------------------------------------------


def feed_all(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[list[str], str]:
    detokenizer = Detokenizer(tokenizer)
    return [detokenizer.feed(token) for token in ids], detokenizer.flush()


@given(text=st.text(st.sampled_from("a é€😀\u200d🏽\u0301\n\x00"), max_size=16))
@settings(max_examples=200)
def test_every_character_is_shown_with_its_last_byte_and_no_sooner(text: str) -> None:
    pieces, rest = feed_all(byte_tokenizer(), byte_ids(text))
    expected = []
    for character in text:
        expected += [""] * (len(character.encode()) - 1) + [character]
    assert pieces == expected
    assert rest == ""


@given(ids=st.lists(st.one_of(st.integers(0, 259), st.sampled_from(byte_ids("€😀")), st.integers(0, 3)), max_size=30))
@settings(max_examples=300)
def test_pieces_add_up_to_the_whole_decode_for_any_bytes(ids: list[int]) -> None:
    """Broken characters, stray continuation bytes and special tokens in the middle of a character."""
    pieces, rest = feed_all(byte_tokenizer(), ids)
    assert "".join(pieces) + rest == byte_tokenizer().decode(ids, skip_special_tokens=True)


def test_half_a_character_at_the_end_is_shown_as_a_replacement() -> None:
    pieces, rest = feed_all(byte_tokenizer(), byte_ids("ok" + "€")[:-1])
    assert ("".join(pieces), rest) == ("ok", "\ufffd")


def sentencepiece_like() -> Tokenizer:
    """Pieces that carry their space, bytes as a fallback, and a decoder that strips the first space: Llama 2's way."""
    words = ["<s>", "\u2581a", "\u2581", "b", "\u2581c\u2581d", *(f"<0x{b:02X}>" for b in range(256))]
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


WORDS = st.one_of(
    st.integers(0, 4).map(lambda i: [i]), st.sampled_from("€a😀 ").map(lambda c: [5 + b for b in c.encode()])
)


@given(words=st.lists(WORDS, max_size=14))
@settings(max_examples=200)
def test_pieces_add_up_where_the_decoder_strips_a_first_space(words: list[list[int]]) -> None:
    ids = [token for word in words for token in word]
    tokenizer = sentencepiece_like()
    pieces, rest = feed_all(tokenizer, ids)
    assert "".join(pieces) + rest == tokenizer.decode(ids, skip_special_tokens=True)


@given(ids=st.lists(st.one_of(st.integers(0, 4), st.sampled_from([5 + b for b in "€a😀".encode()])), max_size=20))
@settings(max_examples=200)
def test_a_broken_character_never_breaks_decoding(ids: list[int]) -> None:
    """A byte-fallback decoder reads a run of bytes as a whole, so a broken byte changes the text of those before it."""
    pieces, rest = feed_all(sentencepiece_like(), ids)
    shown = "".join(pieces) + rest
    assert [c for c in shown if c in "bcd"] == [c for i in ids for c in {3: "b", 4: "cd"}.get(i, "")]
    assert not any(piece.endswith("\ufffd") for piece in pieces)


def test_a_character_broken_off_behind_a_whole_one_is_shown_as_such() -> None:
    """tokenizers' own DecodeStream raises here ("Invalid prefix encountered")."""
    ids = [5 + b for b in "😀".encode()] + [5 + 0xF0, 1]
    pieces, rest = feed_all(sentencepiece_like(), ids)
    assert pieces == ["", "", "", "😀", "", "\ufffd a"]
    assert rest == ""


# Answers --------------------------------------------------

PIECES = ["a", "b", "ab", "", "ba", "a€b", "€"]
END = 3


def naive_answer(tokens: Sequence[int], params: SamplingParams, most: int) -> tuple[int, str, str | None]:
    """Tokens kept, text and reason, one token at a time, searching all the text since min_tokens each time."""
    text = free = ""
    for count, token in enumerate(tokens, 1):
        if count < params.min_tokens:
            free += PIECES[token]
        else:
            text += PIECES[token]
            if (found := naive_stop(text, list(params.stop))) is not None:
                return count, free + text[:found], "stop"
            if token == END:
                return count, free + text, "stop"
        if count == most:
            return count, free + text, "length"
    return len(tokens), free + text, None


@given(
    tokens=st.lists(st.integers(0, len(PIECES) - 1), max_size=16),
    stops=st.lists(SHORT, max_size=3),
    most=st.integers(1, 16),
    data=st.data(),
)
@settings(max_examples=400)
def test_an_answer_ends_at_the_first_end_however_its_tokens_are_grouped(
    tokens: list[int], stops: list[str], most: int, data: st.DataObject
) -> None:
    params = SamplingParams(stop=stops, min_tokens=data.draw(st.integers(0, 3)))
    request = Request(0, [0], params, 0)
    detokenizer: Any = PieceDetokenizer(PIECES)
    answer = Answer(request, detokenizer, stop_ids={END}, max_tokens=most)
    kept, text, reason = naive_answer(tokens, params, most)
    shown = ""
    for group in cut_up(data.draw, tokens):
        if request.finish_reason is not None:
            break
        before = len(request.output_ids)
        added, new = answer.extend(group)
        shown += new
        assert request.output_ids[before:] == added == list(group[: len(added)])
        assert answer.remaining == most - len(request.output_ids)
    assert (len(request.output_ids), request.finish_reason) == (kept, reason)
    if reason is None:
        assert text.startswith(shown)
    else:
        assert shown == text
