"""Drafters: they propose tokens to follow what is committed. What they propose can cost time, never change the text."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dflash_ort.controller.protocol import INJECTION_CHUNK, MAX_PENDING
from dflash_ort.models import graph_names as names
from dflash_ort.models.spec import DrafterSpec
from dflash_ort.records import Draft, Request
from dflash_ort.runtime.cache import KVCache
from dflash_ort.runtime.graph_io import Array, Binding, Scratch

_LONGEST_MATCH = 32
"""A lookup's match is measured no further back."""
_OCCURRENCES = 4
"""Latest occurrences of an n-gram that a lookup chooses from."""
GoOn = Callable[[Sequence[float]], bool]
"""Told the log-probabilities of the drafts so far, whether another is worth making."""


class Drafter(Protocol):
    """Proposes tokens for one request; made anew for each."""

    max_draft: int
    """Most tokens a proposal can hold."""
    is_free: bool
    """A proposal costs microseconds, so it may be asked for before anything is decided."""

    @property
    def pending_rows(self) -> int:
        """Rows committed and not yet injected."""
        ...

    def observe(self, token_ids: Sequence[int], hidden: Array) -> None:
        """Learn of rows that the target has passed and that stay: their tokens, and their tapped states."""
        ...

    def draft(self, request: Request, limit: int, go_on: GoOn | None = None) -> Draft:
        """At most ``limit`` tokens to follow the request's last one; where they are made one after the other, as many
        as ``go_on`` asks for.
        """
        ...


class NoDrafter:
    """Proposes nothing: plain decoding through the same loop."""

    max_draft = 0
    is_free = True
    pending_rows = 0

    def observe(self, token_ids: Sequence[int], hidden: Array) -> None:
        pass

    def draft(self, request: Request, limit: int, go_on: GoOn | None = None) -> Draft:
        return Draft(request.id, request.last_token)


class NgramDrafter:
    """Prompt lookup (Saxena 2023): what followed an earlier occurrence of the longest matching suffix.

    A table from n-gram to the ends of its latest occurrences grows with the text, so a proposal costs ``max_match``
    look-ups whatever the length of the context. Of those occurrences the one that matches furthest back is taken, the
    latest of equals.
    """

    is_free = True
    pending_rows = 0

    def __init__(self, *, min_match: int = 2, max_match: int = 5, max_draft: int = 10) -> None:
        self.min_match, self.max_match, self.max_draft = min_match, max_match, max_draft
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], tuple[int, ...]] = {}

    def observe(self, token_ids: Sequence[int], hidden: Array) -> None:
        pass  # tokens are read from the request, which also has the anchor

    def draft(self, request: Request, limit: int, go_on: GoOn | None = None) -> Draft:
        self._extend(request)
        tokens = self._tokens
        for length in range(min(self.max_match, len(tokens) - 1), self.min_match - 1, -1):
            ends = self._ends.get(tuple(tokens[-length:]))
            if ends:
                match, end = max((self._matched(end, length), end) for end in ends)
                alike = sum(1 if tokens[other] == tokens[end] else -1 for other in ends if other != end)
                return Draft(
                    request.id,
                    request.last_token,
                    tuple(tokens[end : end + min(limit, self.max_draft)]),
                    match_length=match,
                    agreement=alike / max(len(ends) - 1, 1),
                    kind="ngram",
                )
        return Draft(request.id, request.last_token, kind="ngram")

    def _matched(self, end: int, length: int) -> int:
        """How many tokens before ``end`` equal the text's last ones, of which ``length`` are known to; not all are
        counted of a long match.
        """
        tokens, most = self._tokens, min(end, _LONGEST_MATCH)
        while length < most and tokens[end - length - 1] == tokens[-length - 1]:
            length += 1
        return length

    def _extend(self, request: Request) -> None:
        """Take in new tokens. An n-gram enters the table once a token follows it, so a suffix never matches itself."""
        known = len(self._tokens)
        prompt = len(request.prompt_ids)
        if known < prompt:
            self._tokens.extend(request.prompt_ids[known:])
        self._tokens.extend(request.output_ids[max(known - prompt, 0) :])
        for end in range(max(known, 1), len(self._tokens)):
            for length in range(self.min_match, min(self.max_match, end) + 1):
                gram = tuple(self._tokens[end - length : end])
                self._ends[gram] = (*self._ends.get(gram, ()), end)[-_OCCURRENCES:]


class PendingRows:
    """Tapped states of committed rows that are not injected yet, oldest first; float32 ``[rows, width]`` pieces."""

    def __init__(self) -> None:
        self._pieces: deque[Array] = deque()
        self.count = 0

    def add(self, hidden: Array) -> None:
        """Keep a copy: the target's next pass overwrites the array."""
        if len(hidden):
            self._pieces.append(hidden.copy())
            self.count += len(hidden)

    def take(self, limit: int) -> list[Array]:
        """Remove and return the oldest rows, at most ``limit``, in pieces."""
        taken: list[Array] = []
        while self._pieces and limit > 0:
            piece = self._pieces.popleft()
            if len(piece) > limit:
                self._pieces.appendleft(piece[limit:])
                piece = piece[:limit]
            taken.append(piece)
            limit -= len(piece)
            self.count -= len(piece)
        return taken


class Block(Protocol):
    """A block that was drafted; the next one's arrays are the same memory."""

    def greedy(self, limit: int, go_on: GoOn | None = None) -> tuple[list[int], list[float]]:
        """The likeliest drafts, at most ``limit``, and their log-probabilities."""
        ...

    def logits(self, draft: int, previous: int) -> Array:
        """float32 ``[draft vocabulary]`` of draft number ``draft``, which follows the token ``previous``."""
        ...


@dataclass(slots=True)
class _ParallelBlock:
    """All drafts at once: ids int64 ``[drafts]``, log-probabilities and logits float32, a row for each."""

    ids: Array
    log_probs: Array
    all_logits: Array

    def greedy(self, limit: int, go_on: GoOn | None = None) -> tuple[list[int], list[float]]:
        del go_on  # they are all there
        return self.ids[:limit].tolist(), self.log_probs[:limit].tolist()

    def logits(self, draft: int, previous: int) -> Array:
        del previous
        row: Array = self.all_logits[draft]
        return row


class _MarkovBlock:
    """Rows, of which the head's graph makes one draft after the other, each with the token before it."""

    def __init__(self, head: Any, vocabulary: Array, hidden_size: int) -> None:
        self._binding, self._rows = Binding(head), np.empty((0, hidden_size), np.float32)
        self._row, self._previous = np.empty((1, 1, hidden_size), np.float32), np.empty((1, 1), np.int64)
        self._id, self._log_prob = np.empty((1, 1), np.int64), np.empty((1, 1), np.float32)
        self._logits = np.empty((1, 1, len(vocabulary)), np.float32)
        self._binding.input(names.DRAFT_ROWS, self._row)
        self._binding.input(names.PREVIOUS_IDS, self._previous)
        self._binding.output(names.DRAFT_IDS, self._id)
        self._binding.output(names.DRAFT_LOGPROBS, self._log_prob)
        self._binding.output(names.DRAFT_LOGITS, self._logits)
        self._anchor = 0

    def begin(self, rows: Array, anchor: int) -> _MarkovBlock:
        """Of float32 ``[drafts, hidden_size]``, behind the token ``anchor``."""
        self._rows, self._anchor = rows, anchor
        return self

    def greedy(self, limit: int, go_on: GoOn | None = None) -> tuple[list[int], list[float]]:
        ids, log_probs, previous = list[int](), list[float](), self._anchor
        for draft in range(min(limit, len(self._rows))):
            if draft and go_on is not None and not go_on(log_probs):
                break
            self.logits(draft, previous)
            previous = int(self._id[0, 0])
            ids.append(previous)
            log_probs.append(float(self._log_prob[0, 0]))
        return ids, log_probs

    def logits(self, draft: int, previous: int) -> Array:
        self._row[0, 0] = self._rows[draft]
        self._previous[0, 0] = previous
        self._binding.run()
        row: Array = self._logits[0, 0]
        return row


class DFlashModel:
    """Runs the drafter's graph. One per engine; requests bring their caches. ``head``: a Markov drafter's other one."""

    def __init__(
        self, session: Any, head: Any = None, *, spec: DrafterSpec, vocabulary: Array, hidden_width: int
    ) -> None:
        self._session, self.spec, self.vocabulary = session, spec, vocabulary
        self._ids, self._logprobs, self._logits = Scratch(np.int64), Scratch(np.float32), Scratch(np.float32)
        self._rows, self._markov = Scratch(np.float32), None
        if head is not None:
            self._width = next(value.shape[-1] for value in head.get_inputs() if value.name == names.DRAFT_ROWS)
            self._markov = _MarkovBlock(head, vocabulary, self._width)
        self._injected, self.hidden_width = Scratch(np.float32), hidden_width
        self._block = np.full((1, spec.block_size), spec.mask_token_id, np.int64)
        self._no_block = self._block[:, :0].copy()
        self._last_key, self._total = np.zeros(1, np.int32), np.zeros(1, np.int32)

    @property
    def is_sequential(self) -> bool:
        """Each draft costs time of its own."""
        return self._markov is not None

    def new_cache(self, capacity: int) -> KVCache:
        return KVCache(self._session, self.spec, capacity)

    def run(self, cache: KVCache, injected: Sequence[Array], anchor: int | None) -> Block:
        """Inject rows, and draft a block after ``anchor`` (an empty one when None).

        ``injected`` is pieces of float32 ``[rows, taps * hidden]``. The block's rows are taken back from the cache, the
        injected ones stay. A block comes with at least one injected row: some drafters start from the last one.
        """
        block = self._no_block if anchor is None else self._block
        if anchor is not None:
            block[0, 0] = anchor
        rows = self._gather(injected)
        self._total[0] = total = cache.length.value + rows.shape[1] + block.shape[1]
        self._last_key[0] = total - 1
        cache.length.check_room(rows.shape[1] + block.shape[1])
        binding, drafts = cache.binding, 0 if anchor is None else self.spec.max_draft
        binding.input(names.INJECTED, rows)
        binding.input(names.BLOCK_IDS, block)
        binding.input(names.LAST_KEY, self._last_key)
        binding.input(names.TOTAL_LENGTH, self._total)
        drafted = self._bind(binding, drafts, anchor or 0)
        binding.run()
        cache.length.append(rows.shape[1])
        return drafted

    def _bind(self, binding: Binding, drafts: int, anchor: int) -> Block:
        """Bind what the graph gives, and return it as the block that it will be."""
        if self._markov is not None:
            rows = self._rows.take(1, drafts, self._width)
            binding.output(names.DRAFT_ROWS, rows)
            return self._markov.begin(rows[0], anchor)
        ids, logprobs = self._ids.take(1, drafts), self._logprobs.take(1, drafts)
        logits = self._logits.take(1, drafts, len(self.vocabulary))
        binding.output(names.DRAFT_IDS, ids)
        binding.output(names.DRAFT_LOGPROBS, logprobs)
        binding.output(names.DRAFT_LOGITS, logits)
        return _ParallelBlock(ids[0], logprobs[0], logits[0])

    def _gather(self, pieces: Sequence[Array]) -> Array:
        """The pieces as one array ``[1, rows, taps * hidden]``, in memory that stays bound."""
        rows = self._injected.take(1, sum(map(len, pieces)), self.hidden_width)
        start = 0
        for piece in pieces:
            rows[0, start : start + len(piece)] = piece
            start += len(piece)
        return rows


class DraftChooser(Protocol):
    """Draws ``count`` tokens behind the request's last, one after the other: ``logits(draft, previous)`` are those of a
    draft, by number and the token before it, ``vocabulary`` their target ids.
    """

    def __call__(
        self,
        logits: Callable[[int, int], Array],
        count: int,
        vocabulary: Array,
        last_token: int,
        go_on: GoOn | None = None,
    ) -> tuple[list[int], list[float]]: ...


class DFlashDrafter:
    """The block-diffusion drafter of one request: lazy injection, one parallel pass for a block.

    ``choose`` draws the block's tokens from their logits, for sampled requests; None takes the graph's own argmax.
    """

    is_free = False

    def __init__(self, model: DFlashModel, cache: KVCache, choose: DraftChooser | None) -> None:
        self._model, self._cache, self._choose = model, cache, choose
        self._pending = PendingRows()
        self.max_draft = model.spec.max_draft

    @property
    def pending_rows(self) -> int:
        return self._pending.count

    def observe(self, token_ids: Sequence[int], hidden: Array) -> None:
        self._pending.add(hidden)
        while self._pending.count > MAX_PENDING:
            self._inject()

    def draft(self, request: Request, limit: int, go_on: GoOn | None = None) -> Draft:
        if limit < 1:
            return Draft(request.id, request.last_token, kind="dflash")
        while self._pending.count > INJECTION_CHUNK:
            self._inject()
        block = self._model.run(self._cache, self._pending.take(INJECTION_CHUNK), request.last_token)
        limit = min(limit, self.max_draft)
        if self._choose is None:
            drafted, evidence = block.greedy(limit, go_on)
        else:
            drafted, evidence = self._choose(block.logits, limit, self._model.vocabulary, request.last_token, go_on)
        return Draft(request.id, request.last_token, tuple(drafted), tuple(evidence), kind="dflash")

    def _inject(self) -> None:
        self._model.run(self._cache, self._pending.take(INJECTION_CHUNK), None)
