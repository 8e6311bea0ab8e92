"""How one dialogue comes about: a generator that asks for continuations and ends with the finished dialogue.

A script knows text and nothing of slots or passes, `generate` the other way round. Everything random in a dialogue
is drawn from its seed and number alone.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np

from dflash_ort.distill.prompts import Opening, UserPrompt, openings
from dflash_ort.errors import RequestError
from dflash_ort.models.spec import ModelSpec
from dflash_ort.runtime.text import Text

TEMPERATURES = ((0.0, 0.60), (0.7, 0.25), (1.0, 0.15))
"""Temperatures of answers, and the share of dialogues at each."""
DOCUMENT_SUITES = frozenset({"summarization", "rag", "extraction"})
_TURN_TOKENS, _DOCUMENT_TOKENS = (60, 121), (150, 301)
"""Longest user's turn that the target may write, drawn from this range."""
_FOLLOW_UPS = 0.2
"""Share of self-prompted dialogues, those about documents apart, that get a second turn."""
_ROOM = 16
"""Fewest tokens that must be left for an answer."""
_ENDINGS = re.compile(r"[.!?][\"')\]]*(?=\s|$)|\n")
_MARK = "\u2060turn\u2060"


@dataclass(frozen=True, slots=True)
class Ask:
    """A continuation that a script wants: at most ``limit`` tokens behind ``ids``, to the end-of-sequence token."""

    ids: list[int]
    temperature: float
    limit: int
    seed: int


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Token ids of a whole dialogue, and the half-open ``spans`` of them that the target chose as its answers.

    An end-of-sequence token belongs to the answer. ``origin`` is the number of the prompt it began with: of the user's
    file, or, self-prompted, its own.
    """

    index: int
    origin: int
    suite: str
    temperature: float
    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]

    @property
    def answer_tokens(self) -> int:
        return sum(end - start for start, end in self.spans)


Script = Generator[Ask, list[int], Dialogue]


class Scripts:
    """Makes the script of dialogue ``index``; ``prompts`` None: the target writes the user's turns too.

    Prompts are asked in an order drawn anew for each pass over them; passes after the first sample at all times, since
    a greedy answer would be the same again. ``capacity``: most tokens of a dialogue.
    """

    def __init__(
        self,
        text: Text,
        spec: ModelSpec,
        prompts: Sequence[UserPrompt] | None,
        *,
        seed: int,
        max_new_tokens: int,
        capacity: int,
    ) -> None:
        self._text, self._spec, self._prompts = text, spec, prompts
        self._seed, self._max_new_tokens, self._capacity = seed, max_new_tokens, capacity

    def check(self) -> None:
        """Raise RequestError that names the first prompt whose first turn cannot be asked."""
        for prompt in self._prompts or ():
            if len(prompt.prompt.turns) > 1 and self._text.template is None:
                raise RequestError(f"{prompt.where} has several turns, and this target no chat template; use one")
            length = len(self._prompt_ids(_messages(prompt.prompt.turns[:1]), raw=prompt.raw))
            if length > self._capacity - _ROOM:
                raise RequestError(
                    f"{prompt.where} begins with {length} tokens, and a dialogue has {self._capacity}; "
                    "shorten it, or raise max_context"
                )

    def script(self, index: int) -> Script:
        """The dialogue's script; its first `Ask` is there at once."""
        rng = np.random.default_rng([self._seed, index])
        if self._prompts is None:
            return self._self_prompted(index, rng)
        turn, place = divmod(index, len(self._prompts))
        order = np.random.default_rng([self._seed, turn, len(self._prompts)]).permutation(len(self._prompts))
        return self._prompted(index, int(order[place]), rng, again=turn > 0)

    def _prompted(self, index: int, origin: int, rng: np.random.Generator, *, again: bool) -> Script:
        assert self._prompts is not None
        user = self._prompts[origin]
        temperature = _draw_temperature(rng, sampled=again)
        if user.prompt.temperature is not None:
            temperature = user.prompt.temperature
        talk = _Talk(self, rng, temperature)
        for turn in user.prompt.turns:
            if not (yield from talk.answer(turn, raw=user.raw)):
                break
        return Dialogue(index, origin, user.prompt.suite, temperature, *talk.result())

    def _self_prompted(self, index: int, rng: np.random.Generator) -> Script:
        opening = _draw_opening(rng)
        temperature = _draw_temperature(rng, sampled=False)
        talk = _Talk(self, rng, temperature)
        if self._text.template is None:
            yield from talk.answer(opening.text, raw=True)
            return Dialogue(index, index, opening.suite, temperature, *talk.result())
        document = opening.suite in DOCUMENT_SUITES
        turn = yield from talk.user_turn(opening, _DOCUMENT_TOKENS if document else _TURN_TOKENS)
        more = yield from talk.answer(turn, raw=False)
        if more and not document and rng.random() < _FOLLOW_UPS:
            turn = yield from talk.user_turn(Opening(opening.suite, ""), _TURN_TOKENS)
            if turn:
                yield from talk.answer(turn, raw=False)
        return Dialogue(index, index, opening.suite, temperature, *talk.result())

    def _prompt_ids(self, messages: Sequence[dict[str, str]], *, raw: bool) -> list[int]:
        if raw or self._text.template is None:
            return self._text.encode(messages[-1]["content"], raw=True, template_arguments={})
        return self._text.encode(messages, raw=False, template_arguments={})


class _Talk:
    """A dialogue under way: its messages, and the ids of the last prompt and answer."""

    def __init__(self, scripts: Scripts, rng: np.random.Generator, temperature: float) -> None:
        self._scripts, self._rng, self._temperature = scripts, rng, temperature
        self._messages: list[dict[str, str]] = []
        self._ids: list[int] = []
        self._spans: list[tuple[int, int]] = []

    def result(self) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
        """Ids and spans."""
        return tuple(self._ids), tuple(self._spans)

    def answer(self, turn: str, *, raw: bool) -> Generator[Ask, list[int], bool]:
        """Have a user's turn answered; False when there is no room for it, or none for another."""
        scripts = self._scripts
        room = scripts._capacity - _ROOM
        prompt = scripts._prompt_ids([*self._messages, *_messages([turn])], raw=raw)
        while len(prompt) > room and not self._messages:
            turn = turn[: len(turn) // 2]
            prompt = scripts._prompt_ids(_messages([turn]), raw=raw)
        if len(prompt) > room:
            return False
        tokens = yield self._ask(prompt, self._temperature, scripts._max_new_tokens)
        # An answer whose text is cut into other tokens when it is read back is no longer what the target chose.
        same = _common(self._ids, prompt)
        self._spans = [span for span in self._spans if span[1] <= same]
        self._ids = prompt + tokens
        self._spans.append((len(prompt), len(self._ids)))
        self._messages += [*_messages([turn]), {"role": "assistant", "content": self._decode(tokens)}]
        return len(self._ids) < room

    def user_turn(self, opening: Opening, lengths: tuple[int, int]) -> Generator[Ask, list[int], str]:
        """Have the target write a user's turn that begins with the opening."""
        text = self._scripts._text
        assert text.template is not None
        around = text.template.render([*self._messages, *_messages([_MARK])], {"add_generation_prompt": False})
        ids = text.tokenizer.encode(around.split(_MARK)[0] + opening.text, add_special_tokens=False).ids
        limit = min(int(self._rng.integers(*lengths)), (self._scripts._capacity - len(ids)) // 2)
        if limit < 1:
            return opening.text + opening.end
        tokens = yield self._ask(ids, 1.0, limit)
        written = self._decode(tokens)
        if tokens[-1] not in self._scripts._spec.eos_token_ids:
            written = cut_at_end(written)
        turn = (opening.text + written).strip()
        if turn.count("```") % 2:
            turn += "\n```"
        return turn + opening.end

    def _ask(self, ids: list[int], temperature: float, limit: int) -> Ask:
        limit = min(limit, self._scripts._capacity - len(ids))
        return Ask(ids, temperature, limit, int(self._rng.integers(2**63)))

    def _decode(self, tokens: Sequence[int]) -> str:
        decoded: str = self._scripts._text.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return decoded


def cut_at_end(text: str) -> str:
    """The text up to its last end of a sentence or of a line; all of it where there is none."""
    ends = [match.end() for match in _ENDINGS.finditer(text)]
    return text[: ends[-1]] if ends and text[: ends[-1]].strip() else text


def _messages(turns: Sequence[str]) -> list[dict[str, str]]:
    return [{"role": "user", "content": turn} for turn in turns]


def _draw_temperature(rng: np.random.Generator, *, sampled: bool) -> float:
    choices = [(t, share) for t, share in TEMPERATURES if t > 0.0 or not sampled]
    shares = np.array([share for _, share in choices])
    return choices[int(rng.choice(len(choices), p=shares / shares.sum()))][0]


def _draw_opening(rng: np.random.Generator) -> Opening:
    """Every suite as often as the others."""
    known, _ = openings()
    suites = sorted({opening.suite for opening in known})
    suite = suites[int(rng.integers(len(suites)))]
    mine = [opening for opening in known if opening.suite == suite]
    return mine[int(rng.integers(len(mine)))]


def _common(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many first ids are the same."""
    for place, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return place
    return min(len(ours), len(theirs))
