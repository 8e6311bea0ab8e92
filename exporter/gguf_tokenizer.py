"""A GGUF's tokenizer, rebuilt as the ``tokenizer.json`` that its Hugging Face original would have.

GGUF stores the vocabulary, the merges and a *name* for the pre-tokenizer; the rules behind that name are the
original's, and they decide the ids as much as the merges do. A name whose rules are not known is refused, not guessed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_ort.errors import CheckpointError

_REMEDY = "pass a Hugging Face directory with its tokenizer.json instead"

_Json = dict[str, Any]

# GGUF token types (gguf.TokenType). UNUSED are rows that pad the embedding: the original tokenizer does not have them.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_SPECIAL_BY_TYPE = {_UNKNOWN: True, _CONTROL: True, _USER_DEFINED: False}


@dataclass(frozen=True, slots=True)
class _Family:
    """What a pre-tokenizer's name stands for in the originals, beyond vocabulary and merges."""

    splits: tuple[_Json, ...] = ()
    """Pre-tokenizers that run before the byte-level one."""
    gpt2_regex: bool = True
    """Whether the byte-level step then splits by GPT-2's rule as well."""
    normalizer: _Json | None = None
    ignore_merges: bool = False
    """A word that is itself in the vocabulary is one token, whatever the merges say."""
    adds_bos: bool = False
    """What a GGUF that is silent about ``add_bos_token`` means."""


def _split_words(number: str) -> _Json:
    """The split that cl100k introduced; its followers differ in how many digits make a ``number``."""
    pattern = "|".join(
        (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",  # an English contraction's tail
            r"[^\r\n\p{L}\p{N}]?\p{L}+",  # a word, with the one space or mark before it
            number,
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",  # punctuation, with the line ends behind it
            r"\s*[\r\n]+",  # blank lines
            r"\s+(?!\S)",  # spaces, but for the one that belongs to the next word
            r"\s+",
        )
    )
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


_GPT2 = _Family()
_SMOLLM = _Family(splits=({"type": "Digits", "individual_digits": True},))
_LLAMA3 = _Family(splits=(_split_words(r"\p{N}{1,3}"),), gpt2_regex=False, ignore_merges=True, adds_bos=True)
_QWEN2 = _Family(splits=(_split_words(r"\p{N}"),), gpt2_regex=False, normalizer={"type": "NFC"})

_FAMILIES = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "smollm": _SMOLLM,
}


def tokenizer_from_gguf(fields: Mapping[str, Any]) -> str:
    """The text of a ``tokenizer.json`` for the byte-level BPE tokenizer in a GGUF's metadata.

    ``fields`` maps GGUF keys to plain Python values; only ``tokenizer.ggml.*`` is read. Every token keeps its id.
    Control tokens become special added tokens and user-defined ones plain added tokens; unused ones are left out, so
    their ids decode to nothing, as in the originals.

    Raises ``CheckpointError`` when the tokenizer is of another kind, or its parts are missing or contradict each other.
    Source: the GGUF specification for the keys, the Hugging Face originals for what each pre-tokenizer's name means.
    """
    family = _family(fields)
    tokens, types = _tokens(fields)
    vocabulary = {token: index for index, token in enumerate(tokens) if types[index] != _UNUSED}
    if len(vocabulary) != len(tokens) - types.count(_UNUSED):
        raise CheckpointError(f"the GGUF's tokenizer.ggml.tokens lists a token twice, so ids are ambiguous: {_REMEDY}")
    prefix_space = bool(fields.get("tokenizer.ggml.add_space_prefix", False))
    if prefix_space and family.splits:
        # ByteLevel would add the space to every piece of the earlier split; no original of these families asks for one.
        raise CheckpointError(
            f"the GGUF has tokenizer.ggml.add_space_prefix with the pre-tokenizer {fields['tokenizer.ggml.pre']!r}, "
            f"which never adds one: {_REMEDY}"
        )
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(tokens, types),
        "normalizer": family.normalizer,
        "pre_tokenizer": _pre_tokenizer(family, prefix_space),
        "post_processor": _post_processor(fields, family, tokens),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": family.ignore_merges,
            "vocab": vocabulary,
            "merges": _merges(fields, vocabulary),
        },
    }
    return json.dumps(document, ensure_ascii=False)


def _family(fields: Mapping[str, Any]) -> _Family:
    model = fields.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise CheckpointError(
            f"the GGUF's tokenizer.ggml.model is {model!r}, and only 'gpt2' (byte-level BPE) can be rebuilt: {_REMEDY}"
        )
    pre = fields.get("tokenizer.ggml.pre")
    family = _FAMILIES.get(pre) if isinstance(pre, str) else None
    if family is None:
        raise CheckpointError(
            f"the GGUF's tokenizer.ggml.pre is {pre!r}, and only {', '.join(sorted(_FAMILIES))} are known: {_REMEDY}"
        )
    return family


def _list(fields: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    values = fields.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or not values or not all(isinstance(value, kind) for value in values):
        found = "missing" if values is None else "empty or of another type"
        raise CheckpointError(
            f"the GGUF's tokenizer.ggml.{name} is {found}, expected a list of {kind.__name__}: {_REMEDY}"
        )
    return values


def _tokens(fields: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """The tokens in the order of their ids, and the type of each."""
    tokens, types = _list(fields, "tokens", str), _list(fields, "token_type", int)
    if len(tokens) != len(types):
        raise CheckpointError(
            f"the GGUF has {len(tokens)} tokenizer.ggml.tokens but {len(types)} tokenizer.ggml.token_type, expected as "
            f"many: {_REMEDY}"
        )
    known = {_NORMAL, _UNUSED, *_SPECIAL_BY_TYPE}
    for index, kind in enumerate(types):
        if kind not in known:
            raise CheckpointError(
                f"the GGUF's token {index} has tokenizer.ggml.token_type {kind}, expected one of {sorted(known)} in a "
                f"BPE vocabulary: {_REMEDY}"
            )
    return tokens, types


def _merges(fields: Mapping[str, Any], vocabulary: Mapping[str, int]) -> list[list[str]]:
    """The merges in order of rank, each checked to join two tokens into a third."""
    pairs = []
    for rank, merge in enumerate(_list(fields, "merges", str)):
        pair = merge.split(" ")
        if len(pair) != 2 or not all(pair):
            raise CheckpointError(
                f"the GGUF's merge {rank} is {merge!r}, expected two tokens with a space between: {_REMEDY}"
            )
        for token in (*pair, "".join(pair)):
            if token not in vocabulary:
                raise CheckpointError(
                    f"the GGUF's merge {rank} is {merge!r}, but the vocabulary has no {token!r}: {_REMEDY}"
                )
        pairs.append(pair)
    return pairs


def _added_tokens(tokens: list[str], types: list[int]) -> list[_Json]:
    # They are in the model's vocabulary as well: that is what makes the tokenizers library keep their ids.
    return [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": _SPECIAL_BY_TYPE[kind],
        }
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in _SPECIAL_BY_TYPE
    ]


def _pre_tokenizer(family: _Family, prefix_space: bool) -> _Json:
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": prefix_space,
        "trim_offsets": True,
        "use_regex": family.gpt2_regex,
    }
    if not family.splits:
        return byte_level
    return {"type": "Sequence", "pretokenizers": [*family.splits, byte_level]}


def _post_processor(fields: Mapping[str, Any], family: _Family, tokens: list[str]) -> _Json | None:
    """What ``add_special_tokens=True`` adds: the tokens that open and close a sequence, where the GGUF asks for any."""
    opening = _marker(fields, "bos", family.adds_bos, tokens)
    closing = _marker(fields, "eos", False, tokens)
    if not opening and not closing:
        return None

    def wrap(sequence: str, type_id: int) -> list[_Json]:
        marks = [
            [{"SpecialToken": {"id": tokens[index], "type_id": type_id}} for index in ids] for ids in (opening, closing)
        ]
        return [*marks[0], {"Sequence": {"id": sequence, "type_id": type_id}}, *marks[1]]

    return {
        "type": "TemplateProcessing",
        "single": wrap("A", 0),
        "pair": [*wrap("A", 0), *wrap("B", 1)],
        "special_tokens": {
            tokens[index]: {"id": tokens[index], "ids": [index], "tokens": [tokens[index]]}
            for index in (*opening, *closing)
        },
    }


def _marker(fields: Mapping[str, Any], name: str, default: bool, tokens: list[str]) -> list[int]:
    """The id of "bos" or "eos" in a list where the GGUF adds it to every sequence, else an empty list."""
    if not fields.get(f"tokenizer.ggml.add_{name}_token", default):
        return []
    index = fields.get(f"tokenizer.ggml.{name}_token_id")
    if not isinstance(index, int) or not 0 <= index < len(tokens):
        raise CheckpointError(
            f"the GGUF adds a {name} token but its tokenizer.ggml.{name}_token_id is {index!r}, expected an id below "
            f"{len(tokens)}: {_REMEDY}"
        )
    return [index]
