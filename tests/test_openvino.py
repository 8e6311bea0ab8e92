"""OpenVINO's plugin, where it is installed and has a device: end to end, exact, and honest about what it cannot run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dflash_ort.errors import BundleError
from dflash_ort.params import SamplingParams
from dflash_ort.runtime.engine import Engine
from dflash_ort.runtime.graph_io import Binding
from dflash_ort.runtime.placement import placement
from dflash_ort.runtime.providers import EXECUTION_PROVIDERS, openvino_device
from tests.tiny import EXTENSIONS

needs_openvino = pytest.mark.skipif(openvino_device() is None, reason="OpenVINO's plugin has no device here")


@needs_openvino
@pytest.mark.parametrize(("precision", "portable"), [("fp32", False), ("fp32", True), ("int8", True)])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculation_changes_nothing(
    tiny_bundle: Callable[..., Path], precision: str, portable: bool, temperature: float
) -> None:
    bundle = tiny_bundle(precision, portable=portable, extensions=EXTENSIONS)
    params = SamplingParams(max_new_tokens=24, temperature=temperature, seed=3)
    with Engine.load(bundle, provider="openvino", calibrate=False) as engine:
        plain = engine.generate("hello", params, controller="off")
        for controller in ("fixed:1", "fixed:3", "adaptive"):
            assert engine.generate("hello", params, controller=controller).token_ids == plain.token_ids
        shares = placement(bundle, engine.manifest, engine.backend)
    assert EXECUTION_PROVIDERS["openvino"] in {share.provider for share in shares["target.onnx"]}
    assert {share.provider for share in shares["drafter.onnx"]} == {EXECUTION_PROVIDERS["cpu"]}


@needs_openvino
def test_an_ordinary_int8_target_is_refused(tiny_bundle: Callable[..., Path]) -> None:
    with pytest.raises(BundleError, match=r"OpenVINO cannot run the int8 target .* --portable"):
        Engine.load(tiny_bundle("int8"), provider="openvino")


class _Session:
    """Counts bindings."""

    def __init__(self, provider: str) -> None:
        self.provider, self.bound = provider, 0

    def get_providers(self) -> list[str]:
        return [EXECUTION_PROVIDERS[self.provider], EXECUTION_PROVIDERS["cpu"]]  # type: ignore[index]

    def io_binding(self) -> _Session:
        return self

    def bind_input(self, *_: object) -> None:
        self.bound += 1


@pytest.mark.parametrize(("provider", "times"), [("cpu", 1), ("dnnl", 1), ("openvino", 3)])
def test_inputs_are_bound_for_every_run_where_binding_copies(provider: str, times: int) -> None:
    """What is refilled in place would not be seen: the same token came again and again."""
    session = _Session(provider)
    binding, ids = Binding(session), np.zeros(2, np.int64)
    for _ in range(3):
        binding.input("input_ids", ids)
    assert session.bound == times
