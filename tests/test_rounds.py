"""The parts of a round, each against a naive reading of what it should do, on inputs that hypothesis thinks up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dflash_ort.params import SamplingParams
from dflash_ort.records import Request
from dflash_ort.runtime.acceptor import accept
from dflash_ort.runtime.cache import CacheLength
from dflash_ort.runtime.drafters import NgramDrafter, NoDrafter, PendingRows
from tests.fakes import (
    FakeTarget,
    OracleDrafter,
    RandomLengths,
    WatchedLength,
    byte_ids,
    cut_up,
    only_parts,
    start,
)

# Acceptance --------------------------------------------------


class CountingSampler:
    """Chooses a fixed list of tokens, and remembers what was asked and committed."""

    takes_argmax = False

    def __init__(self, choices: Sequence[int]) -> None:
        self.choices, self.history, self.asked = choices, [], []  # type: ignore[var-annotated]

    def choose(self, logits: np.ndarray) -> int:
        assert logits[0] == len(self.history), "a row was sampled with another row's history"
        self.asked.append(int(logits[0]))
        return self.choices[len(self.history)]

    def commit(self, token: int) -> None:
        self.history.append(token)


TOKENS = st.integers(0, 2)


@given(drafts=st.lists(TOKENS, max_size=7), choices=st.lists(TOKENS, min_size=8, max_size=8), greedy=st.booleans())
def test_acceptance_is_the_longest_agreeing_prefix_and_one_more(
    drafts: list[int], choices: list[int], greedy: bool
) -> None:
    agreed = next((i for i, draft in enumerate(drafts) if draft != choices[i]), len(drafts))
    sampler: Any = CountingSampler(choices)
    sampler.takes_argmax = greedy
    rows = np.repeat(np.arange(len(drafts) + 1, dtype=np.float32)[:, None], 3, axis=1)
    graph = np.array(choices[: len(drafts) + 1]) if greedy else np.full(len(drafts) + 1, 99)
    assert accept(drafts, rows, graph, sampler) == choices[: agreed + 1]
    assert sampler.history == choices[: agreed + 1], "the history must end behind what was chosen"
    assert sampler.asked == ([] if greedy else list(range(agreed + 1))), "rows after the first mismatch are not sampled"


# Caches --------------------------------------------------


class CacheMachine(RuleBasedStateMachine):
    """Any sequence of passes and roll-backs against a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.cache, self.rows = CacheLength(12), 0

    @rule(rows=st.integers(-1, 14))
    def append(self, rows: int) -> None:
        if 0 <= rows <= 12 - self.rows:
            self.cache.check_room(rows)
            self.cache.append(rows)
            self.rows += rows
        else:
            for method in (self.cache.check_room, self.cache.append):
                with pytest.raises(ValueError, match="do not fit"):
                    method(rows)

    @rule(length=st.integers(-1, 14))
    def trim(self, length: int) -> None:
        if 0 <= length <= self.rows:
            self.cache.trim(length)
            self.rows = length
        else:
            with pytest.raises(ValueError, match="cannot trim"):
                self.cache.trim(length)

    @invariant()
    def same(self) -> None:
        assert self.cache.value == self.rows


TestCacheLength = CacheMachine.TestCase


@given(data=st.data())
def test_pending_rows_come_out_once_and_in_order(data: st.DataObject) -> None:
    pending, expected, number = PendingRows(), [], 0
    for _ in range(data.draw(st.integers(0, 12))):
        if data.draw(st.booleans()):
            rows = data.draw(st.integers(0, 5))
            hidden = np.arange(number, number + rows, dtype=np.float32)[:, None].repeat(2, axis=1)
            pending.add(hidden)
            expected += range(number, number + rows)
            number += rows
            hidden[:] = -1  # the target's next pass overwrites it
        elif expected:
            limit = data.draw(st.integers(1, 9))
            taken = [row for piece in pending.take(limit) for row in piece[:, 0].tolist()]
            assert taken == expected[:limit]
            expected = expected[limit:]
        assert pending.count == len(expected)


# Lookup drafts --------------------------------------------------


def naive_lookup(tokens: list[int], low: int, high: int, limit: int) -> tuple[list[int], int, float]:
    """What followed that one of the latest four occurrences of the longest suffix that matches furthest back; how far
    it does, and how many of the others go on alike.
    """
    for length in range(high, low - 1, -1):
        if length == len(tokens):
            continue
        ends = [end for end in range(length, len(tokens)) if tokens[end - length : end] == tokens[-length:]][-4:]
        if ends:
            match, end = max((common_suffix(tokens[:end], tokens), end) for end in ends)
            others = [tokens[other] == tokens[end] for other in ends if other != end]
            return tokens[end : end + limit], match, (2 * sum(others) / len(others) - 1 if others else 0)
    return [], 0, 0


def common_suffix(a: list[int], b: list[int]) -> int:
    return next((n for n in range(min(len(a), 32)) if a[-1 - n] != b[-1 - n]), min(len(a), 32))


@given(data=st.data())
@settings(max_examples=300)
def test_lookup_drafts_are_those_of_a_naive_search(data: st.DataObject) -> None:
    """At every length of a growing text, drafting or not on the way, and the same from a fresh start."""
    low = data.draw(st.integers(1, 3))
    high = low + data.draw(st.integers(0, 3))
    most = data.draw(st.integers(1, 6))
    text = data.draw(st.lists(TOKENS, min_size=1, max_size=40))
    prompt = data.draw(st.integers(1, len(text)))
    request = Request(4, text[:prompt], SamplingParams(), 0)
    drafter = NgramDrafter(min_match=low, max_match=high, max_draft=most)
    for token in [None, *text[prompt:]]:
        if token is not None:
            request.output_ids.append(token)
        if data.draw(st.booleans()):
            limit = data.draw(st.integers(1, 8))
            draft = drafter.draft(request, limit)
            seen = request.prompt_ids + request.output_ids
            found = list(draft.token_ids), draft.match_length, pytest.approx(draft.agreement)
            assert found == naive_lookup(seen, low, high, min(limit, most))
            assert (draft.request_id, draft.anchor) == (4, seen[-1])
            assert draft == NgramDrafter(min_match=low, max_match=high, max_draft=most).draft(request, limit)


# Whole rounds on a fake target --------------------------------------------------


@given(
    lengths=st.integers(0, 2**32),
    survival=st.lists(st.floats(0, 1), min_size=1, max_size=6),
    tokens=st.integers(1, 30),
    temperature=st.sampled_from([0.0, 0.9]),
    penalty=st.sampled_from([0.0, 1.5]),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_any_drafts_and_any_lengths_give_the_plain_tokens_and_true_records(
    lengths: int, survival: list[float], tokens: int, temperature: float, penalty: float, data: st.DataObject
) -> None:
    """After every round: both models have seen exactly what is committed, and the record says what happened."""
    survival.sort(reverse=True)
    prompt = byte_ids("a short prompt")
    params = SamplingParams(max_new_tokens=tokens, temperature=temperature, frequency_penalty=penalty)
    plain = start(FakeTarget(), prompt, params, NoDrafter(), WatchedLength(0))
    truth = [token for chunk in plain.chunks([len(prompt)]) for token in chunk.token_ids]

    controller, target = RandomLengths(lengths), FakeTarget()
    drafter = OracleDrafter(truth, survival, seed=lengths, check=True)
    decoding = start(target, prompt, params, drafter, controller)
    chunks = [decoding.prefill([len(piece) for piece in cut_up(data.draw, prompt) if piece])]
    while decoding.request.finish_reason is None:
        before = decoding.request.num_tokens
        chunks.append(decoding.round())
        part = controller.records[-1].requests[0]
        assert part.context_length == before - 1
        assert part.num_committed == len(chunks[-1].token_ids) == decoding.request.num_tokens - before
        assert part.num_accepted <= part.num_verified <= part.num_drafted
        assert part.num_accepted <= part.num_committed <= part.num_accepted + 1
        assert controller.records[-1].total_rows == part.num_verified + 1 == target.passes[-1][1]
        everything = prompt + decoding.request.output_ids
        assert decoding.cache.length.value == len(everything) - 1, "rows after the end, or rejected, were kept"
        assert decoding.cache.valid == drafter.seen == everything[:-1]  # type: ignore[attr-defined]
        assert len(decoding.sampler.history) == len(decoding.request.output_ids)
    assert [token for chunk in chunks for token in chunk.token_ids] == truth == decoding.request.output_ids
    assert [r.round_id for r in controller.records] == list(range(len(controller.records)))
    assert decoding.request.finish_reason == plain.request.finish_reason


@pytest.mark.parametrize("length", range(1, 6))
def test_every_accepted_count_occurs_and_is_recorded(length: int) -> None:
    prompt, params = byte_ids("p"), SamplingParams(max_new_tokens=60, ignore_eos=True)
    truth = start(FakeTarget(), prompt, params, NoDrafter(), WatchedLength(0))
    list(truth.chunks([1]))
    watched = WatchedLength(length)
    drafter = OracleDrafter(truth.request.output_ids, (1.0,) * 5, cycle=True)
    decoding = start(FakeTarget(), prompt, params, drafter, watched)
    list(decoding.chunks([1]))
    parts = only_parts(watched.records)
    whole_rounds = [p.num_accepted for p in parts if p.num_verified == length]
    expected = [min(k % 6, length) for k in range(len(whole_rounds))]
    assert whole_rounds == expected
    assert decoding.request.output_ids == truth.request.output_ids
