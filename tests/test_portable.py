"""Portable graphs: the ordinary ones' numbers, in operators that ONNX Runtime 1.21 has."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from safetensors.numpy import load_file

from dflash_ort.errors import BundleError
from dflash_ort.exporter.export import ExportOptions, export_bundle, read_target
from dflash_ort.exporter.linear import PRECISIONS, Precision
from dflash_ort.models.manifest import DRAFT_HEAD_GRAPH, DRAFTER_GRAPH, TARGET_GRAPH, read_manifest
from dflash_ort.params import SamplingParams
from dflash_ort.runtime.bundle import check_runtime, open_bundle, open_drafter
from dflash_ort.runtime.cache import KVCache
from dflash_ort.runtime.drafters import DFlashModel
from dflash_ort.runtime.engine import Engine
from dflash_ort.runtime.exactness import least_exact_floor
from dflash_ort.runtime.session import Backend
from dflash_ort.runtime.target import TargetModel
from tests.fakes import RandomLengths
from tests.settings import PORTABLE, PROVIDER
from tests.shell import call
from tests.test_lossless import Lab, outcome
from tests.tiny import EXTENSIONS, TinyShape, edit_tensors, write_drafter, write_target

Bundles = Callable[..., Path]
Answer = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Draft ids, their log-probabilities, and the logits of each draft behind a token that is no draft."""

CPU = Backend(2)
BACKEND = Backend.of(threads=2, provider="cpu" if PROVIDER == "auto" else PROVIDER)
"""What portable graphs run on; ordinary ones run on the default provider."""
ORDINARY = pytest.mark.skipif(PORTABLE, reason="this ONNX Runtime is too old for ordinary graphs: there are none")
TOLERANCE = 1e-4
ROWS, CONTEXT, ANCHOR = 70, 41, 77
CAPACITY = CONTEXT + 64
SHAPES = {
    "grouped": TinyShape(),
    "multi-head-tied": TinyShape(kv_heads=4, tied=True),
    "odd-sizes": TinyShape(hidden=48, intermediate=88, heads=3, kv_heads=1, head_dim=32, vocab=263),
}
DRAFTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reduced": {"draft_vocab": 100},
    "one draft": {"block_size": 2},
    "odd sizes": {"shape": SHAPES["odd-sizes"]},
    **{name: {"extensions": (name,)} for name in EXTENSIONS},
    "all extensions": {"extensions": EXTENSIONS},
    "all extensions, reduced": {"extensions": EXTENSIONS, "draft_vocab": 100},
}


def close(a: np.ndarray, b: np.ndarray) -> bool:
    assert a.shape == b.shape
    return bool(np.abs(a - b).max(initial=0.0) < TOLERANCE)


# The target --------------------------------------------------


def target_of(bundle: Path, backend: Backend = BACKEND) -> TargetModel:
    return open_bundle(bundle, backend, with_drafter=False).target


def random_ids(rows: int) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 260, rows)


def feed(target: TargetModel, ids: np.ndarray, pieces: Sequence[int]) -> list[np.ndarray]:
    """Logits, argmax and tapped states of every row, fed in passes of these sizes."""
    cache = target.new_cache(len(ids) + 1)
    found = []
    for rows in np.split(ids, np.cumsum(pieces)[:-1]):
        result = target.run(cache, rows, len(rows))
        found.append((result.logits.copy(), result.greedy.copy(), result.hidden.copy()))
    return [np.concatenate(part) for part in zip(*found, strict=True)]


class TestTarget:
    @pytest.mark.parametrize("name", SHAPES)
    def test_the_ordinary_graph_s_logits_states_and_choices(self, name: str, tiny_bundle: Bundles) -> None:
        ordinary = target_of(tiny_bundle("fp32", SHAPES[name]), CPU)
        portable = target_of(tiny_bundle("fp32", SHAPES[name], portable=True))
        for pieces in ([ROWS], [1] * 5 + [2, 3, 30, 1, 29]):
            expected, found = (feed(target, random_ids(ROWS), pieces) for target in (ordinary, portable))
            assert close(found[0], expected[0])
            assert np.array_equal(found[1], expected[1])
            assert close(found[2], expected[2])

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_rows_are_exact(self, precision: Precision, tiny_bundle: Bundles) -> None:
        """Under the default provider with any number of rows; oneDNN may need two in every pass."""
        floor = least_exact_floor(target_of(tiny_bundle(precision, portable=True)))
        assert floor == 1 if BACKEND == CPU else floor > 0

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_only_the_asked_rows_are_answered(self, precision: Precision, tiny_bundle: Bundles) -> None:
        """None among them, for which ONNX Runtime 1.21's own operators are not made."""
        target, ids = target_of(tiny_bundle(precision, portable=True)), random_ids(11)
        every, greedy, _ = feed(target, ids, [11])
        for asked in (0, 1, 4, 11):
            result = target.run(target.new_cache(12), ids, asked)
            assert close(result.logits, every[11 - asked :])
            assert np.array_equal(result.greedy, greedy[11 - asked :])

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_ties_go_to_the_lowest_id(self, precision: Precision, tmp_path: Path) -> None:
        checkpoint = write_target(tmp_path / "target")
        head = load_file(checkpoint / "model.safetensors")["lm_head.weight"]
        edit_tensors(checkpoint, {"lm_head.weight": np.resize(head[:13], head.shape)})  # twins 13, 26, ... further on
        export_bundle(
            read_target(checkpoint), "none", tmp_path / "bundle", ExportOptions(precision=precision, portable=True)
        )
        logits, greedy, _ = feed(target_of(tmp_path / "bundle"), random_ids(ROWS), [ROWS])
        assert np.array_equal(greedy, logits.argmax(axis=-1))
        assert 0 < greedy.max() < 13


# The drafter --------------------------------------------------


class Models(NamedTuple):
    """A drafter in both forms."""

    ordinary: DFlashModel
    portable: DFlashModel


def drafter_of(bundle: Path, backend: Backend = BACKEND) -> DFlashModel:
    return open_drafter(bundle, read_manifest(bundle), backend)[1]


def run(model: DFlashModel, cache: KVCache, hidden: np.ndarray, anchor: int | None = ANCHOR) -> Answer:
    drafts = 0 if anchor is None else model.spec.max_draft
    block = model.run(cache, [hidden], anchor)
    ids, log_probs = block.greedy(drafts)
    logits = [block.logits(i, 50 + i).copy() for i in range(drafts)]
    return np.array(ids, np.int64), np.array(log_probs), np.array(logits).reshape(drafts, len(model.vocabulary))


def draft(model: DFlashModel, hidden: np.ndarray, cuts: Iterable[int] = (), anchor: int = ANCHOR) -> Answer:
    """A block after ``hidden`` was injected in pieces; the last piece shares the block's pass."""
    cache = model.new_cache(CAPACITY)
    *early, last = np.split(hidden, sorted(cuts))
    for piece in early:
        run(model, cache, piece, None)
    return run(model, cache, last, anchor)


def random_hidden(model: DFlashModel, rows: int = CONTEXT) -> np.ndarray:
    rng = np.random.default_rng(1)
    return (rng.standard_normal((rows, model.hidden_width)) * rng.uniform(0.5, 2.0, (rows, 1))).astype(np.float32)


def alike(a: Answer, b: Answer) -> bool:
    """The same ids, and nearly the same log-probabilities and logits."""
    return np.array_equal(a[0], b[0]) and close(a[1], b[1]) and close(a[2], b[2])


def same(a: Answer, b: Answer) -> bool:
    """The same bits, where the default provider computes; a draft of oneDNN's may differ in the last of them."""
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True)) if BACKEND == CPU else alike(a, b)


@pytest.fixture(params=DRAFTERS)
def models(request: pytest.FixtureRequest, tiny_bundle: Bundles) -> Models:
    bundles = [tiny_bundle("fp32", **DRAFTERS[request.param], portable=portable) for portable in (False, True)]
    return Models(drafter_of(bundles[0], CPU), drafter_of(bundles[1]))


class TestDrafter:
    def test_a_block_is_the_ordinary_graph_s(self, models: Models) -> None:
        for rows, anchor in ((1, ANCHOR), (2, 5), (CONTEXT, ANCHOR)):
            hidden = random_hidden(models.portable, rows)
            found = draft(models.portable, hidden, anchor=anchor)
            assert len(found[0]) == models.portable.spec.max_draft
            assert alike(found, draft(models.ordinary, hidden, anchor=anchor))

    def test_what_came_before_matters(self, models: Models) -> None:
        """The comparison sees the anchor and the rows of the context."""
        hidden = random_hidden(models.portable)
        found = draft(models.portable, hidden)
        assert not alike(found, draft(models.portable, hidden, anchor=ANCHOR + 1))
        for other in (hidden[1:], np.concatenate([hidden[1:20], hidden[:1], hidden[20:]])):
            assert not alike(found, draft(models.portable, other))

    def test_an_empty_block_only_injects(self, models: Models) -> None:
        """The buffers then hold what the ordinary graph puts into them, and nothing behind it is new."""
        hidden = random_hidden(models.portable)
        caches = []
        for model in (models.ordinary, models.portable):
            caches.append(model.new_cache(CAPACITY))
            assert [len(part) for part in run(model, caches[-1], hidden[:30], None)] == [0, 0, 0]
            run(model, caches[-1], hidden[30:], None)
            assert caches[-1].length.value == CONTEXT
        for expected, found in zip(*(cache._buffers for cache in caches), strict=True):
            assert close(found[:, :, :CONTEXT], expected[:, :, :CONTEXT])
            assert found[:, :, :CONTEXT].all()
            assert not found[:, :, CONTEXT:].any()

    def test_in_any_pieces_it_is_the_same(self, models: Models) -> None:
        hidden = random_hidden(models.portable)
        whole = draft(models.portable, hidden)
        for cuts in ([30], [1, 2, 3, 20, 40], range(1, CONTEXT)):
            assert same(draft(models.portable, hidden, cuts), whole)
            assert alike(whole, draft(models.ordinary, hidden, cuts))

    def test_what_was_taken_back_leaves_no_trace(self, models: Models) -> None:
        model = models.portable
        hidden, wrong = random_hidden(model), random_hidden(model)[::-1]
        cache = model.new_cache(CAPACITY)
        run(model, cache, hidden[:30], anchor=5)
        assert cache.length.value == 30, "the block's rows are taken back, the injected ones stay"
        run(model, cache, wrong[:8], anchor=6)
        run(model, cache, wrong[8:11], None)
        cache.length.trim(29)
        run(model, cache, hidden[29:33], anchor=7)
        assert same(run(model, cache, hidden[33:]), draft(model, hidden))
        assert cache.length.value == CONTEXT

    def test_neither_capacity_nor_what_lies_behind_matters(self, models: Models) -> None:
        model = models.portable
        snug = model.new_cache(CONTEXT + model.spec.block_size)
        snug.fill(np.nan)
        assert same(run(model, snug, random_hidden(model)), draft(model, random_hidden(model)))


@pytest.mark.parametrize("extensions", [(), EXTENSIONS])
def test_int8_rounds_as_the_ordinary_graphs_do(extensions: tuple[str, ...], tiny_bundle: Bundles) -> None:
    """Not to the bit, as a last bit before the rounding may be another; what int8 itself changes is far more."""
    logits = []
    for precision, backend, portable in (("fp32", BACKEND, True), ("int8", CPU, False), ("int8", BACKEND, True)):
        bundle = tiny_bundle(precision, extensions=extensions, portable=portable)
        drafter = drafter_of(bundle, backend)
        block = draft(drafter, random_hidden(drafter))[2]
        logits.append((block, feed(target_of(bundle, backend), random_ids(ROWS), [ROWS])[0]))
    for exact, ordinary, found in zip(*logits, strict=True):
        assert np.abs(found - ordinary).mean() < 0.2 * np.abs(ordinary - exact).mean()


# The engine --------------------------------------------------


@pytest.mark.parametrize("extensions", [(), EXTENSIONS])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_speculation_does_not_change_the_text(
    precision: Precision, extensions: tuple[str, ...], tiny_bundle: Bundles
) -> None:
    lab = Lab(tiny_bundle(precision, extensions=extensions, portable=True))
    with lab.engine:
        assert lab.engine.exact
        for params in (
            SamplingParams(max_new_tokens=40),
            SamplingParams(max_new_tokens=40, temperature=0.8, top_p=0.95, frequency_penalty=0.4, seed=3),
        ):
            truth = lab.plain("hello, what is it?", params)
            for drafter in ("dflash", "ngram"):
                for controller in ("fixed:1", "fixed:max", RandomLengths(0)):
                    answer = lab.run("hello, what is it?", params, drafter=drafter, controller=controller)
                    assert outcome(answer) == outcome(truth), (drafter, controller)
            with lab.drafting(lab.oracle(truth, 0, cycle=True)):  # random drafters are hardly ever right
                answer = lab.run("hello, what is it?", params, controller="fixed:max")
            assert outcome(answer) == outcome(truth)
            assert answer.statistics.accepted > 10
        assert lab.recording.compared > 200


# What they are made of --------------------------------------------------

KNOWN = json.loads((Path(__file__).parent / "data" / "onnxruntime-1.21.json").read_text("utf-8"))


def strangers(model: onnx.ModelProto) -> set[str]:
    """What of a model ONNX Runtime 1.21 does not know."""
    opsets = {imported.domain: imported.version for imported in model.opset_import}
    found = {f"opset {v} of '{d}'" for d, v in opsets.items() if v > KNOWN["opsets"].get(d, 0)}
    found |= {f"IR version {model.ir_version}"} if model.ir_version > KNOWN["ir_version"] else set()
    found |= {f"function {function.name}" for function in model.functions}
    for node in model.graph.node:
        name = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        known = KNOWN["operators"].get(node.domain, {}).get(node.op_type)
        if known is None:
            found.add(name)
            continue
        since, inputs, outputs, attributes = known
        if since > opsets[node.domain]:
            found.add(f"{name}: the table tells of opset {since}")
        for kind, values, most in (("inputs", node.input, inputs), ("outputs", node.output, outputs)):
            found |= {f"{name}: {len(values)} {kind}"} if most is not None and len(values) > most else set()
        found |= {f"{name}: attribute {a.name}" for a in node.attribute if a.name not in attributes}
        found |= {f"{name}: a graph in it" for a in node.attribute if a.type in (a.GRAPH, a.GRAPHS)}
    return found


def graphs_of(bundle: Path) -> dict[str, onnx.ModelProto]:
    return {path.name: onnx.load(path, load_external_data=False) for path in bundle.glob("*.onnx")}


def reductions(graphs: dict[str, onnx.ModelProto]) -> set[str]:
    kinds = {node.op_type for model in graphs.values() for node in model.graph.node}
    return {kind for kind in kinds if kind.startswith("Reduce")}


@pytest.mark.parametrize("extensions", [(), EXTENSIONS])
@pytest.mark.parametrize("precision", PRECISIONS)
class TestOperators:
    def test_all_are_in_onnx_runtime_1_21(
        self, precision: Precision, extensions: tuple[str, ...], tiny_bundle: Bundles
    ) -> None:
        graphs = graphs_of(tiny_bundle(precision, extensions=extensions, portable=True))
        assert set(graphs) == {TARGET_GRAPH, DRAFTER_GRAPH} | ({DRAFT_HEAD_GRAPH} if extensions else set())
        assert {name: found for name, model in graphs.items() if (found := strangers(model))} == {}
        assert not reductions(graphs), "oneDNN's provider there does not see their axes"

    @ORDINARY
    def test_ordinary_graphs_differ_by_one_attribute(
        self, precision: Precision, extensions: tuple[str, ...], tiny_bundle: Bundles
    ) -> None:
        """What 1.21 lacks is known, and the test above can fail."""
        graphs = graphs_of(tiny_bundle(precision, extensions=extensions))
        assert {name: found for name, model in graphs.items() if (found := strangers(model))} == {
            DRAFTER_GRAPH: {"com.microsoft.GroupQueryAttention: attribute causal"}
        }
        assert reductions(graphs) == {"ReduceMax", "ReduceMean"}


def model_of(node: onnx.NodeProto, opset: int = 21, ir_version: int = 10) -> onnx.ModelProto:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    graph = helper.make_graph([node], "g", values[:1], values[1:])
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=ir_version)


def test_every_way_of_being_strange_is_seen() -> None:
    fine = helper.make_node("Relu", ["x"], ["y"])
    assert strangers(model_of(fine)) == set()
    assert strangers(model_of(fine, opset=22)) == {"opset 22 of ''"}
    assert strangers(model_of(fine, ir_version=11)) == {"IR version 11"}
    for (kind, inputs, outputs, domain), said in {
        ("RMSNormalization", "x", "y", ""): "RMSNormalization",
        ("Relu", "x", "y", "com.microsoft"): "com.microsoft.Relu",
        ("Relu", "xx", "y", ""): "Relu: 2 inputs",
        ("Relu", "x", "yz", ""): "Relu: 2 outputs",
    }.items():
        assert strangers(model_of(helper.make_node(kind, [*inputs], [*outputs], domain=domain))) == {said}
    assert strangers(model_of(fine, opset=13)) == {"Relu: the table tells of opset 14"}


# Where they load --------------------------------------------------


class TestOldRuntime:
    @ORDINARY
    def test_manifests_say_what_they_need(self, tiny_bundle: Bundles) -> None:
        assert read_manifest(tiny_bundle("fp32")).oldest_onnxruntime == "1.32"
        assert read_manifest(tiny_bundle("fp32", portable=True)).oldest_onnxruntime == "1.21"

    def test_the_command_makes_them(self, tmp_path: Path) -> None:
        target, drafter = write_target(tmp_path / "target"), write_drafter(tmp_path / "drafter")
        made = call("export", "--target", target, "--drafter", drafter, "--output", tmp_path / "out", "--portable")
        assert made.code == 0, made
        manifest = read_manifest(tmp_path / "out")
        assert (manifest.oldest_onnxruntime, manifest.provenance["arguments"]["portable"]) == ("1.21", True)
        assert manifest.self_check is not None
        assert manifest.self_check.rows_independent

    @ORDINARY
    @pytest.mark.parametrize("command", ["run", "inspect", "calibrate"])
    def test_an_ordinary_bundle_is_one_line(
        self, command: str, tiny_bundle: Bundles, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("dflash_ort.runtime.bundle.runtime_version", lambda: "1.21.0")
        bundle = tiny_bundle("fp32")
        assert call(command, bundle, *(["Hello"] if command == "run" else [])).error == (
            f"'{bundle}' needs ONNX Runtime 1.32, this is 1.21.0; upgrade it, or export with --portable"
        )
        with Engine.load(tiny_bundle("fp32", portable=True), calibrate=False) as engine:
            assert engine.generate("Hello", SamplingParams(max_new_tokens=4), raw=True).exact

    @pytest.mark.parametrize("have", ["1.9", "1.20.2", "1.21", "1.21.1", "1.100.0", "1.32.0.dev20261130", "2.0"])
    def test_versions_are_numbers(self, have: str, tiny_bundle: Bundles, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("dflash_ort.runtime.bundle.runtime_version", lambda: have)
        bundle = tiny_bundle("fp32", portable=True)
        if have in ("1.9", "1.20.2"):
            with pytest.raises(BundleError, match=f"needs ONNX Runtime 1.21, this is {have};"):
                check_runtime(bundle, read_manifest(bundle), CPU)
        else:
            check_runtime(bundle, read_manifest(bundle), CPU)
