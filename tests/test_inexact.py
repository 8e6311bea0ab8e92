"""Made to fail on purpose: bundles whose rows depend on their neighbours are caught, refused, or marked as inexact."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from dflash_ort.errors import InexactError
from dflash_ort.exporter.builder import CONTRIB, GraphBuilder
from dflash_ort.exporter.export import ExportOptions, export_bundle, read_drafter_option, read_target
from dflash_ort.exporter.linear import LinearWeights, Precision, quantise_channels
from dflash_ort.models.manifest import TARGET_GRAPH, read_manifest
from dflash_ort.params import SamplingParams
from dflash_ort.runtime.engine import Engine
from dflash_ort.runtime.exactness import probe
from dflash_ort.runtime.session import Backend, open_session
from dflash_ort.runtime.target import TargetModel
from tests.fakes import same_answer
from tests.tiny import write_drafter, write_target

PRECISIONS: tuple[Precision, ...] = ("fp32", "int8")
PROMPTS = ("hello, what is it?", "x", "abc abc abc abc")


class PerTensorScale:
    """What ``onnxruntime.quantization.quantize_dynamic`` makes of a linear layer: one activation scale for all rows."""

    def apply(self, g: GraphBuilder, x: ir.Value, weights: LinearWeights, rows: ir.Value) -> ir.Value:
        quantised, scale, zero_point = g.op_multi("DynamicQuantizeLinear", [x], 3)
        w, w_scale = quantise_channels(weights.load())
        stored = g.weight(
            f"{weights.name}.int8", lambda: w.T, (weights.in_features, weights.out_features), ir.DataType.INT8
        )
        stored_scale = g.weight(f"{weights.name}.scale", lambda: w_scale, w_scale.shape, ir.DataType.FLOAT)
        return g.op("MatMulIntegerToFloat", [quantised, stored, scale, stored_scale, zero_point], domain=CONTRIB)


@pytest.fixture(scope="module")
def per_tensor_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with the fault that this project exists to avoid."""
    root = tmp_path_factory.mktemp("inexact")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dflash_ort.exporter.export.recipe", lambda precision: defaultdict(PerTensorScale))
        drafter = read_drafter_option(str(write_drafter(root / "drafter")))
        export_bundle(
            read_target(write_target(root / "target")), drafter, root / "bundle", ExportOptions(precision="int8")
        )
    return root / "bundle"


def _target(directory: Path) -> TargetModel:
    return TargetModel(open_session(directory / TARGET_GRAPH, Backend(2)), read_manifest(directory).target)


def _worst_difference(target: TargetModel, rows: int) -> float:
    """Largest difference that sharing a pass with ``rows - 1`` others makes to a logit."""
    tokens = np.random.default_rng(0).integers(0, target.spec.vocab_size, 60)
    cache = target.new_cache(80)
    together = target.run(cache, tokens, len(tokens)).logits.copy()
    cache.length.trim(20)
    parts = [
        target.run(cache, tokens[i : i + rows], len(tokens[i : i + rows])).logits.copy() for i in range(20, 60, rows)
    ]
    return float(np.abs(np.concatenate(parts) - together[20:]).max())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_without_padded_attention_the_probe_says_no(tiny_bundle: Callable[..., Path], precision: Precision) -> None:
    """Made to fail on purpose: one query row alone is computed by other code than several, with other last bits."""
    target = _target(tiny_bundle(precision, pad_attention=False))
    assert _worst_difference(target, 1) > 0
    assert not probe(target)
    target.row_floor = 2
    assert _worst_difference(target, 1) == 0
    assert probe(target)
    padded = _target(tiny_bundle(precision))
    assert _worst_difference(padded, 1) == _worst_difference(padded, 3) == 0
    assert probe(padded)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_bundle_without_padding_runs_with_a_higher_floor(
    tiny_bundle: Callable[..., Path], precision: Precision
) -> None:
    """What the probe finds is acted on: the engine feeds two rows, and the text is that of the padded bundle."""
    texts = []
    for padded in (True, False):
        with Engine.load(tiny_bundle(precision, **({} if padded else {"pad_attention": False}))) as engine:
            assert engine._opened().target.row_floor == (1 if padded else 2)
            texts.append(engine.generate("hello", SamplingParams(max_new_tokens=24, temperature=0.8, seed=1)))
    assert same_answer(*texts)


def test_one_activation_scale_for_all_rows_is_refused(per_tensor_bundle: Path) -> None:
    """Made to fail on purpose: with ``DynamicQuantizeLinear`` no floor helps, a row's neighbours are in its logits."""
    target = _target(per_tensor_bundle)
    for floor in (1, 2):
        target.row_floor = floor
        assert _worst_difference(target, 3) > 0.1
        assert not probe(target)
    for _ in range(2):  # the second time from the remembered verdict
        with pytest.raises(InexactError, match=r"^on this machine .*--allow-inexact$"):
            Engine.load(per_tensor_bundle)


def test_an_inexact_bundle_that_is_allowed_says_so_and_really_is_lossy(per_tensor_bundle: Path) -> None:
    """The comparison that the matrix above makes does fail where rows depend on their neighbours."""
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    with Engine.load(per_tensor_bundle, allow_inexact=True, controller="fixed:3") as engine:
        assert not engine.exact
        answers = [engine.generate(text, params, drafter=d) for text in PROMPTS for d in ("none", "dflash")]
    assert not any(answer.exact for answer in answers)
    assert any(a.token_ids != b.token_ids for a, b in zip(answers[::2], answers[1::2], strict=True))


def test_a_context_too_short_for_the_usual_probe_is_probed_all_the_same(tmp_path: Path) -> None:
    """A verdict is not given for want of room: 16 positions hold no 17 rows, but they hold two."""
    target = read_target(write_target(tmp_path / "target"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dflash_ort.exporter.export.recipe", lambda precision: defaultdict(PerTensorScale))
        export_bundle(target, "none", tmp_path / "bundle", ExportOptions(precision="int8", max_context=16))
    with pytest.raises(InexactError):
        Engine.load(tmp_path / "bundle")
