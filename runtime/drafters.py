"""Drafters: they propose tokens to follow what is committed. What they propose can cost time, never change the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from dflash_ort.models import graph_names as names
from dflash_ort.models.spec import DrafterSpec
from dflash_ort.records import Draft, Request
from dflash_ort.runtime.cache import KVCache
from dflash_ort.runtime.graph_io import Scratch, bind_input, bind_output

INJECTION_CHUNK = 256
"""Most rows injected in one drafter pass."""
MAX_PENDING = 1024
"""Most committed rows held back before they are injected although nobody asks for a draft."""


class Drafter(Protocol):
    """Proposes tokens for one request; made anew for each."""

    max_draft: int
    """Most tokens a proposal can hold."""

    @property
    def pending_rows(self) -> int:
        """Rows committed and not yet injected."""
        ...

    def observe(self, token_ids: Sequence[int], hidden: np.ndarray) -> None:
        """Learn of rows that the target has passed and that stay: their tokens, and their tapped states."""
        ...

    def draft(self, request: Request, limit: int) -> Draft:
        """At most ``limit`` tokens to follow the request's last one."""
        ...


class NoDrafter:
    """Proposes nothing: plain decoding through the same loop."""

    max_draft = 0
    pending_rows = 0

    def observe(self, token_ids: Sequence[int], hidden: np.ndarray) -> None:
        pass

    def draft(self, request: Request, limit: int) -> Draft:
        return Draft(request.id, request.last_token)


class NgramDrafter:
    """Prompt lookup (Saxena 2023): what followed the latest earlier occurrence of the longest matching suffix.

    A table from n-gram to the end of its latest occurrence grows with the text, so a proposal costs ``max_match`` look-ups
    whatever the length of the context.
    """

    pending_rows = 0

    def __init__(self, *, min_match: int = 2, max_match: int = 5, max_draft: int = 10) -> None:
        self.min_match, self.max_match, self.max_draft = min_match, max_match, max_draft
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}

    def observe(self, token_ids: Sequence[int], hidden: np.ndarray) -> None:
        pass  # tokens are read from the request, which also has the anchor

    def draft(self, request: Request, limit: int) -> Draft:
        self._extend(request)
        limit = min(limit, self.max_draft)
        for length in range(min(self.max_match, len(self._tokens) - 1), self.min_match - 1, -1):
            end = self._ends.get(tuple(self._tokens[-length:]))
            if end is not None:
                following = self._tokens[end : end + limit]
                return Draft(request.id, request.last_token, tuple(following), match_length=length)
        return Draft(request.id, request.last_token)

    def _extend(self, request: Request) -> None:
        """Take in new tokens. An n-gram enters the table once a token follows it, so a suffix never matches itself."""
        known = len(self._tokens)
        prompt = len(request.prompt_ids)
        if known < prompt:
            self._tokens.extend(request.prompt_ids[known:])
        self._tokens.extend(request.output_ids[max(known - prompt, 0) :])
        for end in range(max(known, 1), len(self._tokens)):
            for length in range(self.min_match, min(self.max_match, end) + 1):
                self._ends[tuple(self._tokens[end - length : end])] = end


class PendingRows:
    """Tapped states of committed rows that are not injected yet, oldest first; float32 ``[rows, width]`` pieces."""

    def __init__(self) -> None:
        self._pieces: list[np.ndarray] = []
        self.count = 0

    def add(self, hidden: np.ndarray) -> None:
        """Keep a copy: the target's next pass overwrites the array."""
        if len(hidden):
            self._pieces.append(hidden.copy())
            self.count += len(hidden)

    def take(self, limit: int) -> np.ndarray:
        """Remove and return the oldest rows, at most ``limit``; at least one must be pending."""
        taken = []
        while self._pieces and limit > 0:
            piece = self._pieces.pop(0)
            if len(piece) > limit:
                self._pieces.insert(0, piece[limit:])
                piece = piece[:limit]
            taken.append(piece)
            limit -= len(piece)
        rows = taken[0] if len(taken) == 1 else np.concatenate(taken)
        self.count -= len(rows)
        return np.ascontiguousarray(rows)


class DFlashModel:
    """Runs the drafter's graph. One per engine; requests bring their caches."""

    def __init__(self, session: Any, spec: DrafterSpec, *, vocabulary: np.ndarray, hidden_width: int) -> None:
        self._session, self.spec, self.vocabulary, self.hidden_width = session, spec, vocabulary, hidden_width
        self._ids, self._logprobs, self._logits = Scratch(np.int64), Scratch(np.float32), Scratch(np.float32)

    def new_cache(self, capacity: int) -> KVCache:
        spec = self.spec
        return KVCache(
            self._session, num_layers=spec.num_layers, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, capacity=capacity
        )

    def run(self, cache: KVCache, injected: np.ndarray, anchor: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Inject rows, and draft a block after ``anchor`` (no block when None).

        ``injected`` float32 ``[rows, hidden_width]``. Returns draft ids int64 ``[drafts]``, their log-probabilities float32
        ``[drafts]`` and logits float32 ``[drafts, draft vocabulary]``; the next run overwrites them. The block's rows are taken
        back from the cache, the injected ones stay.
        """
        block = np.full((1, 0 if anchor is None else self.spec.block_size), self.spec.mask_token_id, np.int64)
        if anchor is not None:
            block[0, 0] = anchor
        rows = len(injected) + block.shape[1]
        cache.length.check_room(rows)
        total = cache.length.value + rows
        inputs = {
            names.INJECTED: injected[None],
            names.BLOCK_IDS: block,
            names.LAST_KEY: np.array([total - 1], np.int32),
            names.TOTAL_LENGTH: np.array([total], np.int32),
        }
        drafts = max(block.shape[1] - 1, 0)
        ids, logprobs = self._ids.take(1, drafts), self._logprobs.take(1, drafts)
        logits = self._logits.take(1, drafts, len(self.vocabulary))
        for name, array in inputs.items():
            bind_input(cache.binding, name, array)
        for name, array in ((names.DRAFT_IDS, ids), (names.DRAFT_LOGPROBS, logprobs), (names.DRAFT_LOGITS, logits)):
            bind_output(cache.binding, name, array)
        self._session.run_with_iobinding(cache.binding)
        cache.length.append(len(injected))
        return ids[0], logprobs[0], logits[0]


class DraftChooser(Protocol):
    """Draws a block's tokens from its logits ``[drafts, draft vocabulary]`` and the draft vocabulary's target ids."""

    def __call__(self, logits: np.ndarray, vocabulary: np.ndarray) -> tuple[list[int], list[float]]: ...


class DFlashDrafter:
    """The block-diffusion drafter of one request: lazy injection, one parallel pass for a block.

    ``choose`` draws the block's tokens from its logits, for sampled requests; None takes the graph's own argmax.
    """

    def __init__(self, model: DFlashModel, cache: KVCache, choose: DraftChooser | None) -> None:
        self._model, self._cache, self._choose = model, cache, choose
        self._pending = PendingRows()
        self.max_draft = model.spec.max_draft

    @property
    def pending_rows(self) -> int:
        return self._pending.count

    def observe(self, token_ids: Sequence[int], hidden: np.ndarray) -> None:
        self._pending.add(hidden)
        while self._pending.count > MAX_PENDING:
            self._inject()

    def draft(self, request: Request, limit: int) -> Draft:
        if limit < 1:
            return Draft(request.id, request.last_token)
        while self._pending.count > INJECTION_CHUNK:
            self._inject()
        rows = self._pending.take(INJECTION_CHUNK) if self._pending.count else self._no_rows()
        ids, log_probs, logits = self._model.run(self._cache, rows, request.last_token)
        if self._choose is None:
            drafted, evidence = ids[:limit].tolist(), log_probs[:limit].tolist()
        else:
            drafted, evidence = self._choose(logits[:limit], self._model.vocabulary)
        return Draft(request.id, request.last_token, tuple(drafted), tuple(evidence))

    def _inject(self) -> None:
        self._model.run(self._cache, self._pending.take(INJECTION_CHUNK), None)

    def _no_rows(self) -> np.ndarray:
        return np.empty((0, self._model.hidden_width), np.float32)
