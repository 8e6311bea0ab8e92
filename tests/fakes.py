"""Scripted stand-ins for models, drafters and controllers: round loop and engine run on them in milliseconds."""

from __future__ import annotations

import hashlib
import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from dflash_ort.controller.fixed import FixedLength, first_drafter
from dflash_ort.controller.protocol import Controller, DraftOrder, RoundState
from dflash_ort.models.manifest import Manifest
from dflash_ort.models.spec import DrafterSpec, ModelSpec
from dflash_ort.params import SamplingParams
from dflash_ort.records import Draft, Request, RequestRound, RoundRecord, VerifyPlan
from dflash_ort.runtime.answer import Answer
from dflash_ort.runtime.bundle import OpenBundle
from dflash_ort.runtime.cache import CacheLength, Slot
from dflash_ort.runtime.decoding import Decoding
from dflash_ort.runtime.drafters import Drafter, GoOn, NoDrafter
from dflash_ort.runtime.engine import Engine, Generation
from dflash_ort.runtime.sampler import Sampler
from dflash_ort.runtime.session import Backend
from dflash_ort.runtime.statistics import StatisticsBuilder
from dflash_ort.runtime.target import TargetModel, TargetPass
from dflash_ort.runtime.text import Detokenizer, Text
from tests.tiny import byte_tokenizer

VOCAB = 260
EOS = 2
_FIRST_BYTE = 4


def byte_ids(text: str | bytes) -> list[int]:
    """Token ids of a text under `tests.tiny.byte_tokenizer`; bytes may be half a character."""
    alphabet = _alphabet()
    raw = text.encode() if isinstance(text, str) else text
    return [alphabet[b] for b in raw]


def _alphabet() -> dict[int, int]:
    """Byte to token id: ByteLevel writes printable bytes as themselves and the others as letters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    letters = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    order = sorted(letters.values())
    return {b: _FIRST_BYTE + order.index(letter) for b, letter in letters.items()}


class FakeCache:
    """The tokens of the rows that were passed; a real `CacheLength` says how many of them count."""

    def __init__(self, capacity: int) -> None:
        self.length = CacheLength(capacity)
        self.tokens = np.full(capacity, -1, np.int64)

    @property
    def valid(self) -> list[int]:
        return self.tokens[: self.length.value].tolist()


class FakeTarget:
    """A target whose logits are a fixed random function of the whole context, with `TargetModel`'s interface.

    Where the context is a prefix of ``script`` the script's next token gets a logit far above the others. ``hidden``
    holds each row's position and token. Every pass dirties the rows behind those it was asked for, as a real one may.
    """

    def __init__(self, script: Sequence[int] = (), *, vocab_size: int = VOCAB, max_context: int = 512) -> None:
        self.script = list(script)
        self.passes: list[tuple[int, int]] = []
        """(rows before, rows passed), one per pass."""
        self.spec = ModelSpec(
            architecture="fake",
            num_layers=1,
            hidden_size=2,
            intermediate_size=2,
            num_heads=1,
            num_kv_heads=1,
            head_dim=2,
            vocab_size=vocab_size,
            max_context=max_context,
            eos_token_ids=(EOS,),
            bos_token_id=0,
            tapped_layers=(0,),
        )

    def new_cache(self, capacity: int) -> FakeCache:
        return FakeCache(capacity)

    def run(self, cache: FakeCache, token_ids: Sequence[int] | np.ndarray, num_logits: int) -> TargetPass:
        before, rows = cache.length.value, len(token_ids)
        cache.length.check_room(max(rows, 2))
        cache.tokens[before : before + rows] = token_ids
        cache.tokens[before + rows : before + max(rows, 2)] = -1
        cache.length.append(rows)
        self.passes.append((before, rows))
        context = cache.valid
        logits = [self.logits(context[: before + rows - num_logits + i + 1]) for i in range(num_logits)]
        stacked = np.array(logits, np.float32).reshape(num_logits, self.spec.vocab_size)
        hidden = np.array([(before + i, t) for i, t in enumerate(token_ids)], np.float32)
        return TargetPass(stacked, stacked.argmax(axis=-1) if num_logits else np.empty(0, np.int64), hidden)

    def logits(self, context: Sequence[int]) -> np.ndarray:
        """float32 ``[vocab]`` after a context."""
        assert min(context) >= 0, "a row that was taken back, or never written, is read"
        seed = zlib.crc32(np.array(context, np.int64).tobytes())
        row = np.random.default_rng(seed).standard_normal(self.spec.vocab_size, np.float32) * np.float32(2.0)
        at = len(context)
        if at < len(self.script) and list(context) == self.script[:at]:
            row[self.script[at]] += np.float32(60.0)
        return row


class Recording:
    """A target that checks that a context's logits and tapped states are the same bits in every pass it occurs in."""

    def __init__(self, target: TargetModel) -> None:
        self._target = target
        self._tokens: dict[int, list[int]] = {}
        self._bits: dict[bytes, tuple[bytes, int]] = {}
        self.compared = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def run(self, cache: Any, token_ids: Sequence[int], num_logits: int) -> TargetPass:
        before = cache.length.value
        tokens = self._tokens.setdefault(id(cache), [])
        tokens[before:] = token_ids
        result = self._target.run(cache, token_ids, num_logits)
        for row in range(len(token_ids)):
            context = np.array(tokens[: before + row + 1], np.int32).tobytes()
            self._same(b"hidden" + context, result.hidden[row], len(token_ids))
            if (asked := row - len(token_ids) + num_logits) >= 0:
                self._same(b"logits" + context, result.logits[asked], len(token_ids))
                assert result.greedy[asked] == result.logits[asked].argmax()
        return result

    def _same(self, key: bytes, row: np.ndarray, rows: int) -> None:
        bits = hashlib.blake2b(row.tobytes(), digest_size=16).digest()
        known, rows_then = self._bits.setdefault(hashlib.blake2b(key, digest_size=16).digest(), (bits, rows))
        self.compared += known is not bits
        assert known == bits, f"a row of a pass of {rows} rows has other bits than in one of {rows_then}"


class OracleDrafter:
    """Knows the true continuation and gets the first K tokens of it right, P(K >= i) = ``survival[i - 1]``.

    With ``cycle`` K is 0, 1, ... ``len(survival)`` in turn instead. The token after them is always wrong. The drafter
    also checks what it is told: by the time it drafts it must have seen each committed token but the last, once; and
    with ``check``, for a `FakeTarget`, with its own hidden row.
    """

    pending_rows = 0
    is_free = False

    def __init__(
        self,
        continuation: Sequence[int],
        survival: Sequence[float],
        *,
        vocab_size: int = VOCAB,
        seed: int = 0,
        cycle: bool = False,
        check: bool = False,
    ) -> None:
        self.continuation, self.survival, self._vocab_size = list(continuation), list(survival), vocab_size
        self.max_draft, self._check = len(survival), check
        self._rng = np.random.default_rng(seed)
        self._cycle = itertools.cycle(range(len(survival) + 1)) if cycle else None
        self.seen: list[int] = []

    def observe(self, token_ids: Sequence[int], hidden: np.ndarray) -> None:
        assert len(hidden) == len(token_ids)
        if self._check:
            assert hidden[:, 0].tolist() == list(range(len(self.seen), len(self.seen) + len(token_ids)))
            assert hidden[:, 1].tolist() == list(token_ids)
        self.seen += token_ids

    def draft(self, request: Request, limit: int, go_on: GoOn | None = None) -> Draft:
        assert self.seen == [*request.prompt_ids, *request.output_ids][:-1], (
            "the drafter was not told of what was committed"
        )
        at = len(request.output_ids)
        correct = self._how_many()
        tokens = self.continuation[at : at + limit]
        tokens += self._rng.integers(0, self._vocab_size, limit - len(tokens)).tolist()
        if correct < limit:
            tokens[correct] = (tokens[correct] + 1 + int(self._rng.integers(self._vocab_size - 1))) % self._vocab_size
        log_probs = tuple(float(x) for x in -self._rng.random(limit))
        return Draft(request.id, request.last_token, tuple(tokens), log_probs)

    def _how_many(self) -> int:
        if self._cycle is not None:
            return next(self._cycle)
        return int((np.array(self.survival) > self._rng.random()).sum())


class Limited:
    """A controller by two methods: `draft_limit`, how many drafts it could use, and `plan`."""

    def draft_limit(self, request_id: int, max_draft: int) -> int:
        return max_draft

    def choose(self, state: RoundState, lookup: Draft | None) -> DraftOrder:
        return first_drafter(state, self.draft_limit(state.request_id, max(state.limits.values(), default=0)))

    def forget(self, request_id: int) -> None:
        pass


class RandomLengths(Limited):
    """Another limit and another verify length every round, 0 included."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.records: list[RoundRecord] = []

    def draft_limit(self, request_id: int, max_draft: int) -> int:
        return int(self._rng.integers(0, max_draft + 1))

    def plan(self, drafts: Sequence[Draft]) -> VerifyPlan:
        return VerifyPlan({d.request_id: int(self._rng.integers(0, len(d.token_ids) + 1)) for d in drafts})

    def observe(self, record: RoundRecord) -> None:
        self.records.append(record)


class WatchedLength(Limited, FixedLength):
    """A fixed length that keeps the records it is shown."""

    def __init__(self, length: int | None) -> None:
        FixedLength.__init__(self, length)
        self.records: list[RoundRecord] = []

    def draft_limit(self, request_id: int, max_draft: int) -> int:
        return max_draft if self.length is None else min(self.length, max_draft)

    def observe(self, record: RoundRecord) -> None:
        self.records.append(record)


def only_parts(records: Sequence[RoundRecord]) -> list[RequestRound]:
    """Each record's single request."""
    return [part for record in records for part in record.requests]


class PieceDetokenizer:
    """Every token is a given piece of text, so stops can be placed across tokens at will."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = list(pieces)

    def feed(self, token: int) -> str:
        return self._pieces[token]

    def flush(self) -> str:
        return ""


class FakeText(Text):
    """The byte tokenizer without a directory."""

    def __init__(self) -> None:
        self.tokenizer = byte_tokenizer()
        self.template = None


def start(
    target: FakeTarget,
    prompt: Sequence[int],
    params: SamplingParams,
    drafter: Drafter,
    controller: Controller,
    *,
    seed: int = 0,
) -> Decoding:
    """A decoding of its own over a fake target, with the byte tokenizer."""
    request = Request(0, list(prompt), params, seed)
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else target.spec.eos_token_ids)}
    room = target.spec.max_context - len(prompt)
    cache: Any = target.new_cache(target.spec.max_context + 2)
    model: Any = target
    return Decoding(
        request=request,
        target=model,
        cache=cache,
        drafters={"scripted": drafter},
        controller=controller,
        sampler=Sampler(params, seed, request.prompt_ids, vocab_size=target.spec.vocab_size, stop_ids=stops),
        answer=Answer(
            request, Detokenizer(byte_tokenizer()), stop_ids=stops, max_tokens=min(params.max_new_tokens or room, room)
        ),
        statistics=StatisticsBuilder(0, len(prompt)),
    )


class GivenDrafterEngine(Engine):
    """An engine that takes its next request's drafter from ``next_drafter`` when one is set."""

    next_drafter: Callable[[], Drafter] | None = None

    def _kinds(self, name: Any, controller: Any) -> list[str]:
        return ["scripted"] if self.next_drafter is not None else super()._kinds(name, controller)

    def _make_drafter(self, bundle: OpenBundle, name: Any, slot: Slot, sampler: Sampler) -> Drafter:
        if self.next_drafter is not None:
            return self.next_drafter()
        return super()._make_drafter(bundle, name, slot, sampler)


def fake_engine(
    target: FakeTarget, drafter: Callable[[], Drafter] = NoDrafter, *, max_context: int | None = None
) -> Engine:
    """An engine around a fake target."""
    model: Any = target
    manifest = Manifest("fake", target.spec, DrafterSpec(kind="none"), "fp32", None, {})
    bundle = OpenBundle(manifest, FakeText(), model, None)
    engine = GivenDrafterEngine(
        bundle,
        max_context=max_context or target.spec.max_context,
        exact=True,
        backend=Backend(threads=1),
        drafter="none",
        controller="fixed:max",
    )
    engine.next_drafter = drafter
    return engine


LANDSCAPES: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "normal": lambda rng, n: rng.standard_normal(n) * 3,
    "flat": lambda rng, n: np.zeros(n),
    "peaked": lambda rng, n: np.where(np.arange(n) == rng.integers(n), 30.0, rng.standard_normal(n)),
    "ties": lambda rng, n: rng.integers(-2, 3, n),
    "two levels": lambda rng, n: np.where(rng.random(n) < 0.01, 5.0, -5.0),
    "huge": lambda rng, n: rng.standard_normal(n) * 1e6,
    "mostly -inf": lambda rng, n: np.where(rng.random(n) < min(0.9, 3 / n), rng.standard_normal(n), -np.inf),
    "one left": lambda rng, n: np.where(np.arange(n) == rng.integers(n), -4.0, -np.inf),
    "none left": lambda rng, n: np.full(n, -np.inf),
}


def cut_up(draw: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """The same sequence in consecutive pieces of any size, empty ones too."""
    borders = sorted(draw(st.lists(st.integers(0, len(items)), max_size=8)))
    return [items[a:b] for a, b in zip([0, *borders], [*borders, len(items)], strict=True)]


def same_answer(a: Generation, b: Generation) -> bool:
    return (a.token_ids, a.text, a.finish_reason) == (b.token_ids, b.text, b.finish_reason)
