"""Who computed a bundle's graphs, by ONNX Runtime's own account of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_ort.models.manifest import DRAFT_HEAD_GRAPH, DRAFTER_GRAPH, TARGET_GRAPH, read_manifest
from dflash_ort.runtime.placement import Share, _shares, placement
from dflash_ort.runtime.session import Backend, open_session
from tests.shell import SHAPE, Home, at_home, call, json_of
from tests.tiny import EXTENSIONS

CPU, DNNL = "CPUExecutionProvider", "DnnlExecutionProvider"
ATTENTION = "GroupQueryAttention"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    with at_home(tmp_path_factory.mktemp("home")) as made:
        yield made


def attentions(shares: list[Share]) -> int:
    return sum(share.operators.get(ATTENTION, 0) for share in shares)


class TestPlacement:
    @pytest.mark.parametrize("precision", ["fp32", "int8"])
    def test_the_default_provider_computes_everything(self, precision: str, tiny_bundle: Callable[..., Path]) -> None:
        bundle = tiny_bundle(precision)
        manifest = read_manifest(bundle)
        found = placement(bundle, manifest, Backend(1))
        assert list(found) == [TARGET_GRAPH, DRAFTER_GRAPH]
        for shares in found.values():
            (share,) = shares
            assert share.provider == CPU
            assert share.seconds > 0
            assert share.kernels == sum(share.operators.values()) > 20
            counts = list(share.operators.values())
            assert counts == sorted(counts, reverse=True)
        assert attentions(found[TARGET_GRAPH]) == manifest.target.num_layers
        assert attentions(found[DRAFTER_GRAPH]) == manifest.drafter.num_layers

    def test_every_graph_of_a_drafter_has_its_own(self, tiny_bundle: Callable[..., Path]) -> None:
        bundle = tiny_bundle("fp32", extensions=EXTENSIONS)
        found = placement(bundle, read_manifest(bundle), Backend(1))
        assert list(found) == [TARGET_GRAPH, DRAFTER_GRAPH, DRAFT_HEAD_GRAPH]
        assert [attentions(shares) for shares in found.values()] == [3, 2, 0]
        (head,), (drafter,) = found[DRAFT_HEAD_GRAPH], found[DRAFTER_GRAPH]
        assert head.operators["MatMul"] == 3, "gate and up, down, and the LM head"
        assert 0 < head.kernels < drafter.kernels

    def test_a_portable_drafter_has_its_attention_written_out(self, tiny_bundle: Callable[..., Path]) -> None:
        bundle = tiny_bundle("fp32", portable=True)
        found = placement(bundle, read_manifest(bundle), Backend(1))
        assert [attentions(shares) for shares in found.values()] == [3, 0]
        (drafter,) = found[DRAFTER_GRAPH]
        assert drafter.operators["ScatterND"] == 2 * 2, "keys and values of two layers"

    def test_every_session_has_a_profile_of_its_own(
        self, tiny_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """ONNX Runtime 1.21 puts the second behind the prefix, and nothing finer: prefixes must differ."""
        prefixes: list[Path | None] = []

        def noting(path: Path, backend: Backend, *, profile: Path | None = None) -> Any:
            prefixes.append(profile)
            return open_session(path, backend, profile=profile)

        for module in ("bundle", "placement"):
            monkeypatch.setattr(f"dflash_ort.runtime.{module}.open_session", noting)
        bundle = tiny_bundle("fp32", extensions=EXTENSIONS)
        placement(bundle, read_manifest(bundle), Backend(1))
        assert len(prefixes) == len(set(prefixes)) == 3

    def test_nothing_is_left_behind(
        self, tiny_bundle: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        monkeypatch.chdir(tmp_path)
        bundle = tiny_bundle("fp32")
        before = sorted(path.name for path in bundle.iterdir())
        placement(bundle, read_manifest(bundle), Backend(1))
        assert list(tmp_path.iterdir()) == []
        assert sorted(path.name for path in bundle.iterdir()) == before


def node(name: str, operator: str, provider: str, *microseconds: int) -> list[dict[str, Any]]:
    """A kernel's events, one a run."""
    return [
        {"cat": "Node", "name": f"{name}_kernel_time", "dur": dur, "args": {"op_name": operator, "provider": provider}}
        for dur in microseconds
    ]


def other(category: str, name: str) -> dict[str, Any]:
    return {"cat": category, "name": name, "dur": 10**9, "args": {}}


class Profiled:
    """A session whose profile lies in a file."""

    def __init__(self, path: Path, events: list[dict[str, Any]]) -> None:
        path.write_text(json.dumps(events))
        self._path = path

    def end_profiling(self) -> str:
        return str(self._path)


class TestShares:
    def test_medians_are_summed_by_provider_and_subgraphs_lose_their_numbers(self, tmp_path: Path) -> None:
        """Names of compiled subgraphs as oneDNN's and OpenVINO's providers give them."""
        graph = "DNNL_6214874688972982532"
        events = [
            other("Session", "model_run"),
            other("Session", "SequentialExecutor::Execute"),
            *node("3.Gather", "Gather", CPU, 5, 5, 500),
            *node("4.MatMul", "MatMul", CPU, 20, 30, 31),
            *node("9.MatMul", "MatMul", CPU, 1, 1, 1),
            *node(f"{DNNL}_{graph}_0_0", f"{graph}_0", DNNL, 900, 100, 100),
            *node(f"{DNNL}_{graph}_1_1", f"{graph}_1", DNNL, 200, 200, 7000),
            {**other("Node", "4.MatMul_fence_before"), "args": {"op_name": "MatMul"}},
        ]
        slow, fast = _shares(Profiled(tmp_path / "profile.json", events))
        assert (slow.provider, slow.kernels, slow.operators) == (DNNL, 2, {"DNNL subgraph": 2})
        assert slow.seconds == pytest.approx(300e-6)
        assert (fast.provider, fast.kernels) == (CPU, 3)
        assert fast.operators == {"MatMul": 2, "Gather": 1}
        assert list(fast.operators) == ["MatMul", "Gather"]
        assert fast.seconds == pytest.approx(36e-6)

    @pytest.mark.parametrize(
        ("operator", "shown"),
        [
            ("DNNL_6214874688972982532_12", "DNNL subgraph"),
            ("OpenVINOExecutionProvider_OpenVINO-EP-subgraph_1_0", "OpenVINOExecutionProvider subgraph"),
            ("MatMulIntegerToFloat", "MatMulIntegerToFloat"),
            ("ScatterND", "ScatterND"),
        ],
    )
    def test_how_operators_are_called(self, operator: str, shown: str, tmp_path: Path) -> None:
        (share,) = _shares(Profiled(tmp_path / "profile.json", node("1", operator, CPU, 3)))
        assert share == Share(CPU, 1, pytest.approx(3e-6), {shown: 1})  # type: ignore[arg-type]

    def test_a_session_that_never_ran_has_none(self, tmp_path: Path) -> None:
        assert _shares(Profiled(tmp_path / "profile.json", [other("Session", "session_initialization")])) == []


class TestInspect:
    def test_text(self, home: Home) -> None:
        shown = call("inspect", home.bundle, "--placement", "--provider", "cpu", "--threads", 1)
        assert (shown.code, shown.err) == (0, "running passes\n")
        plain = call("inspect", home.bundle)
        assert "computed by" not in plain.out
        assert shown.out.startswith(plain.out)
        target, by, drafter, also_by = shown.out.removeprefix(plain.out).splitlines()
        assert (target, drafter) == ("target.onnx was computed by", "drafter.onnx was computed by")
        assert by.strip().startswith(f"{CPU}: 100% of the time, ")
        assert f"{ATTENTION} {SHAPE.layers}" in by
        assert f"{ATTENTION} 1" in also_by

    def test_json(self, home: Home) -> None:
        shown = json_of(call("inspect", "--placement", "--provider", "cpu", "--json"))
        plain = json_of(call("inspect", "--json"))
        shares = shown.pop("placement")
        assert shown == plain
        assert set(shares) == {TARGET_GRAPH, DRAFTER_GRAPH}
        for (share,) in shares.values():
            assert set(share) == {"provider", "kernels", "seconds", "operators"}
            assert share["provider"] == CPU
            assert share["seconds"] > 0
            assert share["kernels"] == sum(share["operators"].values())
        assert shares[TARGET_GRAPH][0]["operators"][ATTENTION] == SHAPE.layers

    def test_a_bundle_without_a_model_drafter_has_one_graph(self, home: Home, tmp_path: Path) -> None:
        made = call("export", "--target", home.target, "--drafter", "none", "--output", tmp_path / "b")
        assert made.code == 0
        shown = json_of(call("inspect", tmp_path / "b", "--placement", "--provider", "cpu", "--json"))
        assert set(shown["placement"]) == {TARGET_GRAPH}

    def test_options_that_cannot_be_are_one_line(self, home: Home) -> None:
        assert "has no fpmath modes" in call("inspect", "--placement", "--provider", "cpu", "--fpmath", "bf16").error
        assert "threads is 0" in call("inspect", "--placement", "--threads", 0).error
        assert "--threads says nothing without --placement" in call("inspect", "--threads", 2).error
        assert "--spinning says nothing without --placement" in call("inspect", "--spinning", "stop").error
