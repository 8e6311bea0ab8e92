"""Costs: tables read between their points, drift, and calibration kept, refused and made anew."""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.synthetic import FP32, INT8
from dflash_ort.controller.cost import CostModel, CostTable, monotone
from dflash_ort.params import SamplingParams
from dflash_ort.records import RequestRound, RoundRecord
from dflash_ort.runtime import calibration
from dflash_ort.runtime.bundle import OpenBundle, open_bundle
from dflash_ort.runtime.calibration import calibrate, costs_path, known_costs, remember_costs
from dflash_ort.runtime.engine import Engine
from dflash_ort.runtime.session import Backend
from tests.tiny import TinyShape

TABLE = CostTable(
    rows=(1, 2, 4),
    contexts=(100, 200),
    verify=((0.010, 0.012), (0.011, 0.014), (0.015, 0.022)),
    draft=(0.002, 0.003),
    inject_row=1e-5,
    other=1e-4,
)


def seen(rows: int, context: int, verify_s: float, *, other_s: float = 1e-4, sample_s: float = 0.0) -> RoundRecord:
    part = RequestRound(0, rows - 1, rows - 1, 0, 1, context)
    return RoundRecord(0, (part,), 0.0, verify_s, sample_s, other_s, rows, 1)


class TestReading:
    def test_at_its_points_a_table_says_what_was_measured(self) -> None:
        costs = CostModel(FP32)
        for c, context in enumerate(FP32.contexts):
            assert costs.passes(16, context) == pytest.approx([row[c] for row in FP32.verify])
            assert costs.block(context) == FP32.draft[c]

    def test_between_points_it_is_a_straight_line(self) -> None:
        costs = CostModel(TABLE)
        assert costs.passes(3, 100)[2] == pytest.approx(0.013)  # rows 3, between 2 and 4
        assert costs.passes(3, 150) == pytest.approx([0.011, 0.0125, 0.0155])
        assert costs.block(125) == pytest.approx(0.00225)

    def test_before_the_first_context_it_is_flat_and_behind_the_last_it_goes_on(self) -> None:
        costs = CostModel(TABLE)
        assert costs.passes(4, 0) == costs.passes(4, 100)
        assert costs.passes(1, 400)[0] == pytest.approx(0.016)
        assert costs.block(300) == pytest.approx(0.004)

    def test_behind_the_last_row_it_goes_on_as_in_its_last_half(self) -> None:
        """Not as between the last two rows, which may stand on one stair."""
        stairs = replace(TABLE, contexts=(16,), verify=((0.01,), (0.02,), (0.02,)), draft=(0.001,))
        assert CostModel(stairs).passes(4, 16) == [0.01, 0.02, 0.02, 0.02]
        assert CostModel(FP32).passes(20, 16)[19] > CostModel(FP32).passes(16, 16)[15]
        more = CostModel(TABLE).passes(9, 100)
        assert np.all(np.diff(more) > 0)

    def test_one_row_and_one_context_will_do(self) -> None:
        costs = CostModel(CostTable((1,), (1,), ((0.01,),), (0.0,), 0.0, 1e-4))
        assert costs.passes(3, 999) == pytest.approx([0.01, 0.02, 0.03])
        assert costs.draft(999, 50) == 0.0

    def test_rows_to_inject_are_paid_for(self) -> None:
        costs = CostModel(TABLE)
        assert costs.draft(100, 1) == costs.draft(100, 0) == pytest.approx(0.002)
        assert costs.draft(100, 101) == pytest.approx(0.003)

    @given(
        rows=st.lists(st.integers(2, 40), unique=True, max_size=5),
        contexts=st.lists(st.integers(0, 4000), unique=True, min_size=1, max_size=4),
        most=st.integers(1, 60),
        context=st.integers(0, 10_000),
        seed=st.integers(0, 99),
    )
    def test_more_rows_never_cost_less(
        self, rows: list[int], contexts: list[int], most: int, context: int, seed: int
    ) -> None:
        rows, contexts = [1, *sorted(rows)], sorted(contexts)
        rng = np.random.default_rng(seed)
        verify = monotone(rng.uniform(0.01, 0.05, (len(rows), len(contexts))).tolist())
        table = CostTable(tuple(rows), tuple(contexts), verify, (0.001,) * len(contexts), 0.0, 0.0)
        passes = CostModel(table).passes(most, min(context, contexts[-1]))
        assert len(passes) == most
        assert np.all(np.diff(passes) >= -1e-12)
        assert min(passes) > 0.0


class TestMonotone:
    def test_noise_is_pooled_and_order_kept(self) -> None:
        assert monotone([[1.0], [3.0], [2.0], [4.0]]) == ((1.0,), (2.5,), (2.5,), (4.0,))

    def test_context_never_makes_a_pass_cheaper(self) -> None:
        assert monotone([[2.0, 1.0], [3.0, 5.0]]) == ((2.0, 2.0), (3.0, 5.0))

    def test_a_monotone_table_stays_as_it_is(self) -> None:
        assert monotone(FP32.verify) == FP32.verify

    @given(st.lists(st.tuples(*[st.floats(1e-4, 1.0)] * 3), min_size=1, max_size=8))
    def test_both_axes_never_fall(self, table: list[tuple[float, ...]]) -> None:
        out = np.array(monotone(table))
        assert np.all(np.diff(out, axis=0) >= 0)
        assert np.all(np.diff(out, axis=1) >= 0)
        assert out.min() >= np.min(table) - 1e-12
        assert out.max() <= np.max(table) + 1e-12


class TestDrift:
    def test_a_slow_change_is_followed(self) -> None:
        costs = CostModel(TABLE)
        for factor in np.linspace(1.0, 1.6, 200):
            costs.observe(seen(2, 100, 0.011 * factor))
        assert costs.drift == pytest.approx(1.6, rel=0.04)
        assert costs.verify(2, 100)[1] == pytest.approx(0.011 * 1.6, rel=0.04)
        assert costs.passes(2, 100)[1] == pytest.approx(0.011), "decisions are made in the table's seconds"

    def test_sudden_load_is_believed_after_some_rounds(self) -> None:
        costs = CostModel(TABLE)
        for _ in range(60):
            costs.observe(seen(2, 100, 0.022))
        assert costs.drift == pytest.approx(2.0, rel=0.05)

    def test_one_outlier_moves_little(self) -> None:
        costs = CostModel(TABLE)
        costs.observe(seen(2, 100, 0.011 * 1000, other_s=10.0))
        assert costs.drift < 1.03
        assert costs.other() < 1e-3

    def test_what_cannot_be_is_ignored(self) -> None:
        costs = CostModel(TABLE)
        costs.observe(seen(2, 100, 0.0))
        costs.observe(seen(2, 100, -1.0))
        assert costs.drift == 1.0

    def test_a_rounds_rest_and_sampling_are_learnt(self) -> None:
        costs = CostModel(TABLE)
        for _ in range(100):
            costs.observe(seen(2, 100, 0.011, other_s=4e-4, sample_s=2e-3))
        assert costs.other() == pytest.approx(4e-4, rel=0.02)
        assert costs.sampling() == pytest.approx(2e-3, rel=0.02)


# Calibration --------------------------------------------------


@pytest.fixture(scope="module")
def opened(tiny_bundle: Callable[..., Path]) -> OpenBundle:
    return open_bundle(tiny_bundle("fp32"), Backend(1), with_drafter=True)


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_ORT_CACHE", str(tmp_path / "cache"))


def measured(bundle: OpenBundle, **options: Any) -> CostTable:
    return calibrate(bundle, seconds=0.0, **options)


def check_table(table: CostTable, *, drafter: bool) -> None:
    assert table.rows[0] == 1
    assert len(table.verify) == len(table.rows)
    verify = np.array(table.verify)
    assert verify.shape == (len(table.rows), len(table.contexts))
    assert verify.min() > 0.0
    assert np.all(np.diff(verify, axis=0) >= 0)
    assert (min(table.draft) > 0.0) is drafter
    assert table.inject_row >= 0.0


def test_calibration_covers_the_bundle(opened: OpenBundle) -> None:
    told: list[float] = []
    table = measured(opened, progress=lambda _, share: told.append(share))
    check_table(table, drafter=True)
    assert table.rows[-1] == 11, "a lookup proposes up to ten tokens"
    assert table.contexts == (16,), "of the contexts measured, this bundle has room for one"
    assert len(told) == 3, "where time is up, three repeats are enough"
    assert told == sorted(told)


def test_calibration_without_a_drafter(tiny_bundle: Callable[..., Path]) -> None:
    bundle = open_bundle(tiny_bundle("fp32"), Backend(1), with_drafter=False)
    check_table(measured(bundle), drafter=False)


@pytest.mark.parametrize("context", [2, 3, 12, 20, 83])
def test_calibration_where_there_is_hardly_any_context(tiny_bundle: Callable[..., Path], context: int) -> None:
    bundle = open_bundle(tiny_bundle("fp32", shape=TinyShape(context=context)), Backend(1), with_drafter=True)
    table = measured(bundle)
    check_table(table, drafter=True)
    assert max(table.rows) <= max(context, 1)


def test_an_engine_for_short_contexts_measures_for_long_ones_too(tiny_bundle: Callable[..., Path]) -> None:
    """The table is kept for every engine of this bundle."""
    with Engine.load(tiny_bundle("fp32"), max_context=20, controller="adaptive") as engine:
        short = engine.costs()
    assert short.contexts == (16,)
    assert short.rows[-1] == 11


def test_what_was_measured_is_kept(opened: OpenBundle) -> None:
    manifest = opened.manifest
    assert known_costs(manifest, Backend(1)) == (None, None)
    assert remember_costs(manifest, Backend(1), TABLE) is None
    assert known_costs(manifest, Backend(1)) == (TABLE, None)
    assert [p.suffix for p in costs_path(manifest, Backend(1)).parent.iterdir()] == [".json"], (
        "nothing half-written is left"
    )


def test_a_table_for_anything_else_is_not_used(opened: OpenBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = opened.manifest
    remember_costs(manifest, Backend(1), TABLE)
    assert known_costs(manifest, Backend(2)) == (None, None)
    assert known_costs(replace(manifest, files={}), Backend(1)) == (None, None)
    monkeypatch.setattr(calibration, "CALIBRATION_VERSION", 999)
    assert known_costs(manifest, Backend(1)) == (None, None)
    monkeypatch.undo()


@pytest.mark.parametrize("part", ["cpu_model", "runtime_version", "cpu_features"])
def test_a_table_of_another_machine_is_not_used(
    opened: OpenBundle, monkeypatch: pytest.MonkeyPatch, part: str, tmp_path: Path
) -> None:
    remember_costs(opened.manifest, Backend(1), TABLE)
    assert known_costs(opened.manifest, Backend(1))[0] is not None
    monkeypatch.setattr(f"dflash_ort.runtime.machine.{part}", lambda: "another")
    assert known_costs(opened.manifest, Backend(1)) == (None, None)


def damaged() -> dict[str, str]:
    """Ways in which a file may be no table."""
    whole = asdict(TABLE)

    def changed(**changes: Any) -> str:
        return json.dumps({k: v for k, v in (whole | changes).items() if v is not None})

    return {
        "empty": "",
        "cut off": json.dumps(whole)[:50],
        "not text": "\x00\x01",
        "a list": "[1]",
        "another object": "{}",
        "a part missing": changed(draft=None),
        "not numbers": changed(rows=["a", "b", "c"]),
        "rows not lists": changed(verify=5),
        "wrong shape": changed(rows=[1, 2]),
        "uneven": changed(verify=[[0.01, 0.02], [0.01], [0.02, 0.03]]),
        "not a number": changed(other=float("nan")),
        "infinite": changed(rows=[1, 2, float("inf")]),
        "negative": changed(verify=[[-0.01, 0.02]] * 3),
        "negative draft": changed(draft=[-0.1, 0.1]),
        "rows out of order": changed(rows=[1, 4, 2]),
        "contexts out of order": changed(contexts=[200, 100]),
        "no first row": changed(rows=[2, 4, 8]),
        "nothing in it": changed(rows=[], contexts=[], verify=[], draft=[]),
    }


@pytest.mark.parametrize("how", sorted(damaged()))
def test_a_damaged_table_is_refused_with_one_warning(opened: OpenBundle, how: str) -> None:
    path = costs_path(opened.manifest, Backend(1))
    path.parent.mkdir(parents=True)
    path.write_text(damaged()[how], encoding="utf-8")
    table, warning = known_costs(opened.manifest, Backend(1))
    assert table is None
    assert warning is not None
    assert str(path) in warning
    assert "again" in warning


def answer(bundle: Path) -> tuple[int, ...]:
    params = SamplingParams(max_new_tokens=12, seed=3, ignore_eos=True)
    with Engine.load(bundle, controller="adaptive", threads=1) as engine:
        return engine.generate("abc abc abc", params, raw=True).token_ids


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and "calibration" in r.getMessage()]


def test_a_damaged_table_is_made_again(tiny_bundle: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    bundle = tiny_bundle("fp32")
    first = answer(bundle)
    path = costs_path(open_manifest(bundle), Backend(1))
    path.write_text("{", encoding="utf-8")
    assert not warnings_of(caplog)
    assert answer(bundle) == first
    assert len(warnings_of(caplog)) == 1
    assert known_costs(open_manifest(bundle), Backend(1))[0] is not None
    assert answer(bundle) == first
    assert len(warnings_of(caplog)) == 1, "what was made again is whole"


def open_manifest(bundle: Path) -> Any:
    return open_bundle(bundle, Backend(1), with_drafter=False).manifest


@pytest.mark.parametrize("how", ["a file in its place", "read-only"])
def test_a_cache_that_cannot_be_written_costs_one_warning(
    how: str,
    tiny_bundle: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = answer(tiny_bundle("fp32"))
    monkeypatch.setenv("DFLASH_ORT_CACHE", str(tmp_path / "other"))
    if how == "read-only":  # permissions would not stop root

        def refuse(_path: Path) -> None:
            raise OSError(errno.EROFS, "Read-only file system")

        monkeypatch.setattr("dflash_ort.runtime.stored.whole_file", refuse)
    else:
        (tmp_path / "other").write_text("", encoding="utf-8")
    caplog.clear()
    with Engine.load(tiny_bundle("fp32"), controller="adaptive", threads=1) as engine:
        params = SamplingParams(max_new_tokens=12, seed=3, ignore_eos=True)
        for _ in range(2):
            assert engine.generate("abc abc abc", params, raw=True).token_ids == expected
    assert len(warnings_of(caplog)) == 1
    assert "cannot be kept" in warnings_of(caplog)[0]


def test_calibration_can_be_turned_off(tiny_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_: Any, **__: Any) -> CostTable:
        raise AssertionError("nothing may be measured")

    monkeypatch.setattr("dflash_ort.runtime.engine.calibrate", measure)
    with Engine.load(tiny_bundle("fp32"), controller="adaptive", calibrate=False) as engine:
        assert engine.generate("abc", SamplingParams(max_new_tokens=5), raw=True).statistics.committed > 0
        assert engine.costs().rows[0] == 1


def test_the_staircases_differ_by_precision() -> None:
    """What one precision verifies for nothing another pays for: no table may stand for another."""
    fp32, int8 = (np.array(CostModel(t).passes(16, 256)) for t in (FP32, INT8))
    assert (fp32 / fp32[0])[1] > (int8 / int8[0])[1]
    assert (fp32 / fp32[0])[15] < (int8 / int8[0])[15]
