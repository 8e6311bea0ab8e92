"""The tokenizer rebuilt from a GGUF gives the ids, and the text, that the checkpoint's original gives."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers

from dflash_ort.errors import CheckpointError
from dflash_ort.exporter.gguf_tokenizer import tokenizer_from_gguf
from dflash_ort.models.presets import PRESETS, fetch_target

Fields = dict[str, Any]

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
WORDS = ["he", "ll", "hell", "hello", "Ġw"]
CONTROL = ["<|end|>", "<s>"]
BOS = 256 + len(WORDS) + 1


def tiny(**changes: Any) -> Fields:
    """A complete vocabulary: every byte, five merged words, two control tokens. Keys are short; None takes one away."""
    tokens = [*ALPHABET, *WORDS, *CONTROL]
    short = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3 if token in CONTROL else 1 for token in tokens],
        "merges": ["h e", "l l", "he ll", "hell o", "Ġ w"],
        "bos_token_id": BOS,
        "eos_token_id": BOS - 1,
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in short.items() if value is not None}


def build(fields: Fields) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_from_gguf(fields))


def with_token(token: str, kind: int) -> Fields:
    fields = tiny()
    return tiny(
        tokens=[*fields["tokenizer.ggml.tokens"], token], token_type=[*fields["tokenizer.ggml.token_type"], kind]
    )


def words(pre: str, text: str) -> list[str]:
    """How the pre-tokenizer cuts ``text``, in characters again."""
    pieces = build(tiny(pre=pre)).pre_tokenizer.pre_tokenize_str(text)
    return [decoders.ByteLevel().decode([piece]) for piece, _ in pieces]


class TestTinyVocabulary:
    def test_ids_are_the_gguf_s(self) -> None:
        fields = tiny()
        tokenizer = build(fields)
        assert [tokenizer.id_to_token(i) for i in range(BOS + 1)] == fields["tokenizer.ggml.tokens"]
        assert tokenizer.get_vocab_size() == BOS + 1

    def test_merges_apply_in_order(self) -> None:
        assert build(tiny()).encode("hello well").tokens == ["hello", "Ġw", "e", "ll"]

    def test_control_tokens_are_whole_in_text_and_skippable(self) -> None:
        tokenizer = build(tiny())
        ids = tokenizer.encode("hello<|end|>he").ids
        assert [tokenizer.id_to_token(i) for i in ids] == ["hello", "<|end|>", "he"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == "hellohe"
        assert tokenizer.decode(ids, skip_special_tokens=False) == "hello<|end|>he"

    def test_user_defined_tokens_are_whole_in_text_and_never_skipped(self) -> None:
        tokenizer = build(with_token("<think>", 4))
        ids = tokenizer.encode("he<think>he").ids
        assert ids[1] == BOS + 1
        assert tokenizer.decode(ids, skip_special_tokens=True) == "he<think>he"

    def test_unused_tokens_are_left_out(self) -> None:
        tokenizer = build(with_token("[PAD263]", 5))
        assert tokenizer.id_to_token(BOS + 1) is None
        assert tokenizer.decode([BOS + 1]) == ""

    @pytest.mark.parametrize("pre", ["default", "gpt-2", "llama-bpe", "llama3", "qwen2", "smollm"])
    def test_every_family_gives_the_text_back(self, pre: str) -> None:
        text = "Don't  stop\n\n\t12345 ½ naïve 漢字 👩‍👩‍👧 \x00\x7f <|end|>  "
        tokenizer = build(tiny(pre=pre, add_bos_token=False))
        given_back = tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False)
        assert given_back == unicodedata.normalize("NFC", text)

    def test_an_original_without_normalizer_keeps_combining_marks_apart(self) -> None:
        decomposed = "e\u0301"
        for pre, expected in (("smollm", decomposed), ("qwen2", "é")):
            tokenizer = build(tiny(pre=pre))
            assert tokenizer.decode(tokenizer.encode(decomposed).ids) == expected


class TestPreTokenizers:
    @pytest.mark.parametrize(
        ("pre", "expected"),
        [
            ("gpt-2", ["in", " 2024", ",", " it", "'s", "\n", "\n", "1234", " x"]),
            ("smollm", ["in", " ", "2", "0", "2", "4", ",", " it", "'s", "\n\n", "1", "2", "3", "4", " x"]),
            ("llama3", ["in", " ", "202", "4", ",", " it", "'s", "\n\n", "123", "4", " x"]),
            ("qwen2", ["in", " ", "2", "0", "2", "4", ",", " it", "'s", "\n\n", "1", "2", "3", "4", " x"]),
        ],
    )
    def test_each_name_cuts_as_its_original(self, pre: str, expected: list[str]) -> None:
        assert words(pre, "in 2024, it's\n\n1234 x") == expected

    def test_contractions_in_capitals_split_only_in_the_newer_families(self) -> None:
        assert words("smollm", "IT'S") == ["IT", "'", "S"]
        assert words("llama3", "IT'S") == ["IT", "'S"]

    def test_qwen2_is_transformers_qwen2(self) -> None:
        from transformers import Qwen2Tokenizer

        self.check_same("qwen2", Qwen2Tokenizer)

    def test_gpt2_is_transformers_gpt2(self) -> None:
        from transformers import GPT2Tokenizer

        self.check_same("gpt-2", GPT2Tokenizer)

    @staticmethod
    def check_same(pre: str, original: Callable[..., Any]) -> None:
        fields = tiny(pre=pre)
        vocabulary = {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"])}
        merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
        theirs = original(vocab=vocabulary, merges=merges).backend_tokenizer
        ours = build(fields)
        # The classes bring control tokens of their own, which a GGUF would list.
        for text in (text for text in VARIED if "<|" not in text):
            assert ours.encode(text).ids == theirs.encode(text, add_special_tokens=False).ids

    def test_llama3_takes_a_whole_word_before_merging(self) -> None:
        tokens = [*ALPHABET, "hello"]
        fields = tiny(tokens=tokens, token_type=[1] * len(tokens), merges=["h e"], add_bos_token=False)
        fields["tokenizer.ggml.tokens"] = tokens = [*tokens, "he"]
        fields["tokenizer.ggml.token_type"] = [1] * len(tokens)
        assert build(fields).encode("hello").tokens == ["he", "l", "l", "o"]
        assert build(fields | {"tokenizer.ggml.pre": "llama3"}).encode("hello").tokens == ["hello"]


class TestMarkers:
    def test_add_bos_token_opens_a_sequence(self) -> None:
        tokenizer = build(tiny(add_bos_token=True))
        assert tokenizer.encode("hello").ids[0] == BOS
        assert tokenizer.encode("").ids == [BOS]
        assert tokenizer.encode("hello", add_special_tokens=False).tokens == ["hello"]

    @pytest.mark.parametrize(("pre", "added"), [("gpt-2", 0), ("smollm", 0), ("qwen2", 0), ("llama-bpe", 1)])
    def test_a_silent_gguf_does_as_its_original(self, pre: str, added: int) -> None:
        assert len(build(tiny(pre=pre)).encode("").ids) == added

    def test_false_is_obeyed(self) -> None:
        assert build(tiny(pre="llama3", add_bos_token=False)).encode("").ids == []

    def test_add_eos_token_closes_a_sequence(self) -> None:
        assert build(tiny(add_bos_token=True, add_eos_token=True)).encode("he").tokens == ["<s>", "he", "<|end|>"]

    def test_add_space_prefix(self) -> None:
        assert build(tiny(add_space_prefix=True)).encode("we").tokens == ["Ġw", "e"]
        assert build(tiny(add_space_prefix=False)).encode("we").tokens == ["w", "e"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (tiny(model="llama"), "tokenizer.ggml.model is 'llama', and only 'gpt2'"),
        (tiny(model=None), "tokenizer.ggml.model is None"),
        (tiny(pre="tekken"), "pre is 'tekken', and only default, gpt-2, llama-bpe, llama3, qwen2, smollm are known"),
        (tiny(pre=None), "tokenizer.ggml.pre is None"),
        (tiny(tokens=None), "tokenizer.ggml.tokens is missing, expected a list of str"),
        (tiny(tokens=[]), "tokenizer.ggml.tokens is empty or of another type"),
        (tiny(token_type=None), "tokenizer.ggml.token_type is missing, expected a list of int"),
        (tiny(token_type=[1, 1]), "263 tokenizer.ggml.tokens but 2 tokenizer.ggml.token_type"),
        (tiny(token_type=[6] * (BOS + 1)), "token 0 has tokenizer.ggml.token_type 6"),
        (with_token("hello", 1), "lists a token twice"),
        (tiny(merges=None), "tokenizer.ggml.merges is missing"),
        (tiny(merges=["h e", "he"]), "merge 1 is 'he', expected two tokens with a space between"),
        (tiny(merges=["h e x"]), "merge 0 is 'h e x'"),
        (tiny(merges=["h "]), "merge 0 is 'h '"),
        (tiny(merges=["h x"]), "merge 0 is 'h x', but the vocabulary has no 'hx'"),
        (tiny(merges=["h qq"]), "the vocabulary has no 'qq'"),
        (tiny(merges=["h e", 7]), "tokenizer.ggml.merges is empty or of another type"),
        (tiny(add_bos_token=True, bos_token_id=None), "bos_token_id is None, expected an id below 263"),
        (tiny(add_bos_token=True, bos_token_id=BOS + 1), "bos_token_id is 263, expected an id below 263"),
        (tiny(add_space_prefix=True, pre="smollm"), "add_space_prefix with the pre-tokenizer 'smollm'"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused_in_one_line(fields: Fields, said: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        tokenizer_from_gguf(fields)
    message = str(caught.value)
    assert said in message
    assert message.endswith("pass a Hugging Face directory with its tokenizer.json instead")
    assert "\n" not in message


# ---------------------------------------------------------------------------------------------- the real vocabulary

VARIED = [
    "",
    " ",
    "The quick brown fox jumps over the lazy dog, doesn't it? They've said we'll see; I'd rather not.",
    "def fib(n: int) -> int:\n    if n < 2:\n        return n\n    return fib(n - 1) + fib(n - 2)\n",
    '{"a": [1, 2.5e-10, null], "b": "\\u00e9"}\t// comment\r\n#include <stdio.h>\r\n',
    "3.14159, 1234567890, 0x1F, 10^6, 2024-11-29T16:50:00Z, 1,000,000 and 007",
    "½ ² ³ Ⅳ ٣٤ १२३ ① 五",
    "naïve café façade Ångström ß ẞ İstanbul ﬁne",
    "e\u0301 a\u0308\u0323 n\u0303 Z\u0351\u036b\u0343 \u1112\u1161\u11ab",
    "👍🏽 👩‍👩‍👧‍👦 🇫🇷 ❤️ 🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "汉字和漢字、ひらがな カタカナ。한국어 텍스트",
    "مرحبا بالعالم ١٢٣ שלום עולם \u202eabc\u202c \u200f",
    "tab\tthen\u00a0nbsp\u2003em\u200bzero\u3000wide   three\n\n\nlines \r\n \v \f  end   ",
    "  leading and trailing  ",
    "\x00\x01\x02\x1b[31mred\x1b[0m\x7f\x80\x9f\ufeff\ufffd\uffff",
    "<|im_start|>user\nhi<|im_end|><|endoftext|>",
    "a<|im_end|>b <|im_start|> <|im_start|  |im_end|> <file_sep><repo_name>x<empty_output>",
    "https://example.org/path?q=1&r=%20#frag user@example.org @handle #tag $100 €5",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 5,
    "!!!???...---===___***~~~```'''\"\"\"",
]

# SmolLM2's vocabulary lacks these bytes, so its tokenizer, whoever implements it, drops them from a text. 13 of the 21
# never occur in UTF-8; the rest are six control characters and what begins U+40000 to U+BFFFF, all of it unassigned.
LOST_CONTROLS = "\x04\x06\x13\x14\x16\x1d"
LOST_BYTES = frozenset({*LOST_CONTROLS.encode(), 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)})

PIECES = st.one_of(
    st.text(max_size=12),
    st.text(alphabet=" \n\t\r\u00a0\u3000", max_size=6),
    st.text(alphabet="0123456789٣½²Ⅳ.,-", max_size=8),
    st.text(alphabet="abcdefghij'sStTrevmld ", max_size=16),
    st.sampled_from(["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<file_sep>", "<|im_", "end|>"]),
    st.sampled_from(VARIED),
)
TEXTS = st.lists(PIECES, max_size=8).map("".join)
QUICK = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def keeps_all_bytes(text: str) -> bool:
    return LOST_BYTES.isdisjoint(text.encode())


@pytest.fixture(scope="module")
def fields() -> Fields:
    from gguf import GGUFReader

    reader = GGUFReader(fetch_target(PRESETS["smollm2-135m"]))
    return {key: field.contents() for key, field in reader.fields.items() if key.startswith("tokenizer.")}


@pytest.fixture(scope="module")
def ours(fields: Fields) -> Tokenizer:
    return build(fields)


@pytest.fixture(scope="module")
def transformers_tokenizer() -> Any:
    """What transformers makes of the same file."""
    from transformers import AutoTokenizer

    target = fetch_target(PRESETS["smollm2-135m"])
    return AutoTokenizer.from_pretrained(target.parent, gguf_file=target.name)


@pytest.fixture(scope="module")
def original(transformers_tokenizer: Any) -> Tokenizer:
    """SmolLM2's own: transformers' vocabulary and merges, with the pre-tokenizer of the tokenizer.json it came with."""
    made = Tokenizer.from_str(transformers_tokenizer.backend_tokenizer.to_str())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    made.decoder = decoders.ByteLevel()
    return made


@pytest.mark.pair
class TestSmolLM2:
    def test_ids_are_the_gguf_s(self, ours: Tokenizer, fields: Fields) -> None:
        tokens = fields["tokenizer.ggml.tokens"]
        assert ours.get_vocab(with_added_tokens=True) == {token: i for i, token in enumerate(tokens)}
        added = ours.get_added_tokens_decoder()
        assert sorted(added) == list(range(17))
        assert all(token.special for token in added.values())

    @pytest.mark.parametrize("text", VARIED)
    def test_varied_text_has_the_original_s_ids(self, text: str, ours: Tokenizer, original: Tokenizer) -> None:
        ids = ours.encode(text).ids
        assert ids == original.encode(text, add_special_tokens=False).ids
        assert keeps_all_bytes(text)
        assert ours.decode(ids, skip_special_tokens=False) == text

    def test_a_chat_has_the_original_s_ids(
        self, ours: Tokenizer, original: Tokenizer, transformers_tokenizer: Any
    ) -> None:
        messages = [{"role": "user", "content": "Count to 10:\n\n1, 2"}, {"role": "assistant", "content": "  3 4"}]
        text = transformers_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = ours.encode(text).ids
        assert ids == original.encode(text, add_special_tokens=False).ids
        assert ids[0] == 1
        assert ids.count(1) == 4
        assert ids.count(2) == 3
        assert ours.decode(ids, skip_special_tokens=False) == text

    @QUICK
    @given(text=TEXTS)
    def test_any_text_has_the_original_s_ids(self, text: str, ours: Tokenizer, original: Tokenizer) -> None:
        ids = ours.encode(text).ids
        assert ids == original.encode(text, add_special_tokens=False).ids
        if keeps_all_bytes(text):
            assert ours.decode(ids, skip_special_tokens=False) == text

    @QUICK
    @given(text=TEXTS.map(lambda text: "".join(c for c in text if not c.isnumeric())))
    def test_transformers_agrees_where_there_are_no_digits(
        self, text: str, ours: Tokenizer, transformers_tokenizer: Any
    ) -> None:
        assert ours.encode(text).ids == transformers_tokenizer.encode(text, add_special_tokens=False)

    @pytest.mark.parametrize("text", ["a  1", "list:\n\n1. one", "x =\t\t2"])
    def test_transformers_misses_the_digit_split(
        self, text: str, ours: Tokenizer, original: Tokenizer, transformers_tokenizer: Any
    ) -> None:
        """transformers 5 does not know the pre-tokenizer "smollm" and falls back to GPT-2's, which keeps a blank for
        the number that follows; the original cuts at every digit first, so the blanks stay together."""
        theirs = transformers_tokenizer.encode(text, add_special_tokens=False)
        assert ours.encode(text).ids == original.encode(text, add_special_tokens=False).ids
        assert ours.encode(text).ids != theirs
        assert transformers_tokenizer.decode(theirs) == text

    def test_blank_lines_before_a_number_are_one_token(self, ours: Tokenizer) -> None:
        assert ours.encode("list:\n\n1. one").tokens == ["list", ":", "ĊĊ", "1", ".", "Ġone"]

    def test_the_vocabulary_loses_some_bytes_as_the_original_does(
        self, ours: Tokenizer, original: Tokenizer, fields: Fields
    ) -> None:
        assert len(set(ALPHABET) - set(fields["tokenizer.ggml.tokens"])) == len(LOST_BYTES) == 21
        for lost in LOST_CONTROLS:
            text = f"a{lost}b"
            assert ours.encode(text).ids == original.encode(text).ids
            assert ours.decode(ours.encode(text).ids) == "ab"
        unassigned = "\U00050000"
        assert ours.encode(unassigned).ids == original.encode(unassigned).ids
        assert ours.decode(ours.encode(unassigned).ids) != unassigned

    def test_no_token_is_added_around_a_text(self, ours: Tokenizer) -> None:
        assert ours.encode("", add_special_tokens=True).ids == []
        assert ours.encode("hi", add_special_tokens=True).ids == ours.encode("hi", add_special_tokens=False).ids

    def test_the_json_survives_the_library(self, fields: Fields) -> None:
        text = tokenizer_from_gguf(fields)
        assert json.loads(Tokenizer.from_str(text).to_str())["model"]["vocab"] == json.loads(text)["model"]["vocab"]
