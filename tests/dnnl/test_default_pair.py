"""The default pair under oneDNN: end to end, with speculation and adaptive lengths, exact or honest about it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_ort.params import SamplingParams
from dflash_ort.runtime.engine import Engine
from dflash_ort.runtime.onednn import ask_onednn
from dflash_ort.runtime.placement import placement
from dflash_ort.runtime.providers import EXECUTION_PROVIDERS, installed_providers
from tests.settings import PROVIDER

BUNDLES = os.environ.get("DFLASH_ORT_TEST_BUNDLES")
pytestmark = [
    pytest.mark.skipif("dnnl" not in installed_providers(), reason="this ONNX Runtime has no oneDNN: make test-dnnl"),
    pytest.mark.skipif(not BUNDLES, reason="DFLASH_ORT_TEST_BUNDLES does not say where the pair is: make test-dnnl"),
]
PROMPT = "What is the capital of France?"


@pytest.fixture(scope="module", params=("fp32", "int8"))
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The default pair, which `make test-dnnl` has exported, under the provider that is tested."""
    bundle = Path(BUNDLES or "") / request.param
    with Engine.load(bundle, provider=PROVIDER, allow_inexact=True, calibrate=False) as loaded:
        yield loaded


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculation_runs_end_to_end_and_changes_nothing_where_rows_are_exact(
    engine: Engine, temperature: float
) -> None:
    params = SamplingParams(max_new_tokens=16, temperature=temperature, seed=5)
    plain = engine.generate(PROMPT, params, controller="off")
    assert plain.token_ids
    for controller in ("fixed:2", "adaptive"):
        answer = engine.generate(PROMPT, params, controller=controller)
        assert answer.exact == engine.exact
        if engine.exact:
            assert answer.token_ids == plain.token_ids
    if not temperature and engine.manifest.precision == "fp32":  # int8's near-ties fall differently by processor
        assert "Paris" in plain.text


def test_the_provider_really_computes(engine: Engine) -> None:
    bundle = Path(BUNDLES or "") / engine.manifest.precision
    for shares in placement(bundle, engine.manifest, engine.backend).values():
        assert EXECUTION_PROVIDERS[engine.backend.provider] in {share.provider for share in shares}


def test_onednn_says_what_it_computes_with() -> None:
    said = ask_onednn()
    assert said is not None
    assert said.isa
    assert "gemm" in said.kernel or "matmul" in said.kernel
