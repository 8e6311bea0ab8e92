"""Logs as they come: requests end in any order, lines are missing or foreign, texts are guessed from the rest."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_ort.controller.acceptance import GENERIC_PRIORS
from dflash_ort.controller.from_log import estimated_text
from dflash_ort.jsonlines import JsonLines
from dflash_ort.logs import LoggedRequest, LogReader
from dflash_ort.params import SamplingParams
from dflash_ort.records import RequestRound, RoundRecord
from dflash_ort.runtime.engine import Engine
from dflash_ort.runtime.traces import read_sources


@pytest.fixture(scope="module")
def logged(tiny_bundle: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A log of two streams that took turns, and of one that was left; and what their callers were told."""
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    told: dict[int, list[RoundRecord]] = {0: [], 1: [], 2: []}
    params = SamplingParams(max_new_tokens=20, ignore_eos=True, seed=3)
    with Engine.load(tiny_bundle("fp32"), threads=1, calibrate=False, log=path) as engine:
        first = engine.stream("abcabcabc", params, on_round=told[0].append)
        second = engine.stream(
            "the the", SamplingParams(max_new_tokens=8, temperature=0.7, seed=1), on_round=told[1].append
        )
        for _ in second:
            next(first, None)
        for _ in first:
            pass
        with engine.stream("left", params, on_round=told[2].append) as third:
            for _ in range(3):
                next(third)
    return path, told


def requests(lines: Any) -> tuple[list[LoggedRequest], int]:
    reader = LogReader()
    return list(reader.requests(lines)), reader.foreign


def test_requests_come_back_as_they_end_with_their_own_rounds(logged: Any) -> None:
    path, told = logged
    found, foreign = requests(JsonLines(path))
    assert foreign == 0
    assert [request.id.rpartition("-")[2] for request in found] == ["1", "0", "2"]
    assert [request.finish_reason for request in found] == ["length", "length", "cancelled"]
    assert [request.draws for request in found] == [True, False, False]
    for request, number in zip(found, (1, 0, 2), strict=True):
        assert len(request.rounds) == len(told[number]) > 0
        for ours, theirs in zip(request.rounds, told[number], strict=True):
            part = theirs.requests[0]
            assert ours.requests[0].log_probs == part.log_probs
            assert ours.requests[0].num_committed == part.num_committed
            assert (ours.seconds, ours.total_rows, ours.pending_rows) == (
                theirs.seconds, theirs.total_rows, theirs.pending_rows
            )  # fmt: skip
    assert found[1].committed == 20


def test_a_log_that_was_cut_at_either_end_gives_what_is_whole(logged: Any) -> None:
    lines = list(JsonLines(logged[0]))
    first_end = next(i for i, line in enumerate(lines) if line["event"] == "end")
    found, foreign = requests(lines[: first_end - 1])
    assert foreign == 0
    assert {request.finish_reason for request in found} == {None}
    found, foreign = requests(lines[3:])
    assert foreign == 0
    assert all(request.rounds for request in found)


@pytest.mark.parametrize(
    "change",
    [
        {"v": 9},
        {"event": "other"},
        {"num_accepted": 99},
        {"num_committed": "x"},
        {"log_probs": None},
        {"kind": None, "v": 2},
    ],
)
def test_foreign_lines_are_counted(change: dict[str, Any], logged: Any) -> None:
    lines = list(JsonLines(logged[0]))
    at = next(i for i, line in enumerate(lines) if line["event"] == "round")
    lines[at] = {**lines[at], **change}
    found, foreign = requests([*lines, {}, {"v": 1}])
    assert foreign == 3
    assert len(found) == 3


def test_of_more_than_memory_should_hold_an_even_sample_is_kept(logged: Any, tmp_path: Path) -> None:
    """Whole requests, the same each time, from both ends of the file."""
    lines, path = list(JsonLines(logged[0])), tmp_path / "long.jsonl"
    with path.open("w") as file:
        for copy in range(300):
            for line in lines:
                file.write(json.dumps({**line, "request_id": f"{copy}-{line['request_id']}"}) + "\n")
    whole, some = read_sources([path], GENERIC_PRIORS), read_sources([path], GENERIC_PRIORS, most=600)
    assert (len(whole.logged), whole.left_out) == (900, 0)
    assert len(some.logged) + some.left_out == 900
    assert 400 < sum(len(request.rounds) for request in some.logged) <= 600
    assert [r.id for r in some.logged] == [r.id for r in read_sources([path], GENERIC_PRIORS, most=600).logged]
    copies = [int(request.id.partition("-")[0]) for request in some.logged]
    assert copies == sorted(copies)
    assert min(copies) < 60
    assert max(copies) > 240
    kept = {request.id: len(request.rounds) for request in whole.logged}
    assert all(kept[request.id] == len(request.rounds) for request in some.logged)


def part(kind: str, drafted: int, verified: int, accepted: int, committed: int, log_p: float = -0.5) -> RequestRound:
    logs = (log_p,) * drafted if kind == "dflash" else ()
    return RequestRound(0, drafted, verified, accepted, committed, 10, logs, 3 * (kind == "ngram"), kind)


class TestEstimates:
    def estimate(self, rounds: list[RequestRound], seed: int = 0) -> Any:
        return estimated_text(
            "x", rounds, prompt_tokens=7, max_tokens=None, draws=False, seed=seed, priors=GENERIC_PRIORS
        )

    def test_what_was_observed_stands(self) -> None:
        text = self.estimate([part("dflash", 5, 3, 1, 2), part("none", 0, 0, 0, 1), part("ngram", 4, 4, 2, 3)])
        assert (text.num_tokens, text.num_anchors) == (7, 6)
        model, lookup = text.proposals["dflash"], text.proposals["ngram"]
        assert list(text.proposals) == ["ngram", "dflash"]
        assert model.agreed[0] == 1
        assert model.drafted.tolist() == [5] * 6
        np.testing.assert_allclose(model.log_probs, -0.5)
        assert lookup.drafted.tolist() == [0, 0, 0, 4, 0, 0]
        assert lookup.agreed[3] == 2

    def test_what_was_censored_is_drawn_from_the_hazards(self) -> None:
        """A sure draft of which all that was verified was right goes on being right more often than an unsure one."""

        def mean(log_p: float) -> float:
            agreed = [
                self.estimate([part("dflash", 5, 1, 1, 2, log_p)] * 9, s).proposals["dflash"].agreed for s in range(40)
            ]
            assert min(int(a.min()) for a in agreed) >= 0
            return float(np.mean([a[:8] for a in agreed]))

        assert mean(-0.02) > mean(-2.0) + 1.0
        assert mean(-2.0) >= 1.0

    def test_the_lot_is_the_same_each_time(self) -> None:
        rounds = [part("dflash", 5, 1, 1, 2, -0.3)] * 20
        first, second = self.estimate(rounds), self.estimate(rounds)
        assert json.dumps(first.as_json()) == json.dumps(second.as_json())
