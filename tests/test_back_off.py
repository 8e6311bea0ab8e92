"""Giving a drafter up, and trying it again: how often, and what that may cost."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.synthetic import FP32
from dflash_ort.controller.cost import CostModel
from dflash_ort.controller.policy import AdaptiveSettings
from dflash_ort.records import Draft, RequestRound, RoundRecord
from tests.test_adaptive import LOOKUP, NO_LOOKUP, adaptive, block, one_round, state


class TestBackOff:
    def test_a_losing_drafter_is_tried_at_doubling_distances(self) -> None:
        controller = adaptive(first_value=0.2)
        asked = [
            i for i in range(2000) if one_round(controller, block(0.02), NO_LOOKUP, {})[0].kind == "dflash"
        ]  # fmt: skip
        start = next(i for i, (a, b) in enumerate(itertools.pairwise(asked)) if b - a > 1)
        gaps = np.diff(asked[start:])
        assert start < 12, "given up after a few blocks"
        assert gaps[0] == AdaptiveSettings().first_retry
        assert all(b == min(2 * a, 512) for a, b in itertools.pairwise(gaps))
        assert len(gaps) <= math.log2(2000)

    def test_every_try_shows_something(self) -> None:
        controller = adaptive(first_value=0.2)
        tries = [one_round(controller, block(0.02), NO_LOOKUP, {}) for _ in range(500)][20:]
        assert all(length >= 1 for order, length in tries if order.kind == "dflash")

    def test_a_text_that_turns_easy_is_noticed(self) -> None:
        controller = adaptive()
        for _ in range(60):
            one_round(controller, block(0.02), NO_LOOKUP, {})
        kinds = [one_round(controller, block(0.95), NO_LOOKUP, {"dflash": 5})[0].kind for _ in range(200)]
        assert kinds.index("dflash") < 100
        assert kinds[-40:] == ["dflash"] * 40

    def test_what_no_request_asked_for_teaches_nothing(self) -> None:
        """A dear drafter is never asked, and what it is hoped to be worth stays what it was."""
        controller = adaptive(table=replace(FP32, draft=(1.0,) * 3))
        for request in range(30):
            controller.choose(state(request=request), NO_LOOKUP)
            controller.forget(request)
        assert controller._populations["dflash"].value == AdaptiveSettings().first_value

    def test_short_answers_may_spend_what_earlier_ones_left_for_tries(self) -> None:
        """No request of 40 rounds has room for a try, all together have; no more than their share is spent."""
        asked, table = [], replace(FP32, draft=(0.03,) * 3)
        controller = adaptive(table=table, first_value=0.01)
        for request in range(1, 200):
            for _ in range(40):
                part = RequestRound(request, 0, 0, 0, 1, 100)
                order = controller.choose(state(request=request), NO_LOOKUP)
                asked.append(order.kind == "dflash")
                draft = replace(block(0.02), request_id=request) if asked[-1] else Draft(request, 0)
                length = controller.plan([draft]).lengths[request]
                part = RequestRound(request, len(draft.token_ids), length, 0, 1, 100, draft.log_probs, 0, draft.kind)
                draft_s = 0.03 if asked[-1] else 0.0
                verify_s = CostModel(table).passes(length + 1, 100)[-1]
                controller.observe(RoundRecord(0, (part,), draft_s, verify_s, 0.0, 1e-4, length + 1, 2))
            controller.forget(request)
        plain = CostModel(table).passes(1, 100)[0]
        assert not any(asked[:40])
        assert 10 < sum(asked) <= 0.013 * len(asked) * plain / 0.03

    def test_recoveries_make_tries_more_frequent(self) -> None:
        """Where texts turn hard and easy again, giving up for long would miss it; the population teaches how often."""
        longest = []
        for recovers in (False, True):
            controller = adaptive()
            for stretch in range(20):
                easy = recovers and stretch % 2 == 1
                for _ in range(100):
                    one_round(controller, block(0.95 if easy else 0.02), NO_LOOKUP, {"dflash": 5 * easy})
            if recovers:
                for _ in range(40):
                    one_round(controller, block(0.02), NO_LOOKUP, {})
            longest.append(controller._requests[1].arms["dflash"].backoff)
        assert longest == [512, pytest.approx(12, abs=8)]

    def test_lookups_that_fail_are_tried_again_too(self) -> None:
        """They cost nothing to make, but what is never verified is never learnt."""
        controller = adaptive()
        for _ in range(40):
            one_round(controller, block(0.01), LOOKUP, {})
        kinds = [one_round(controller, block(0.01), LOOKUP, {"ngram": 10})[0].kind for _ in range(300)]
        assert kinds[-50:].count("ngram") > 40
