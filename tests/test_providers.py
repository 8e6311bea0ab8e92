"""Who computes, on which threads: what may be asked for, what ONNX Runtime is told, and errors that say what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from dflash_ort.defaults import FPMATHS, SPINNINGS
from dflash_ort.errors import BundleError, ProviderError
from dflash_ort.models.manifest import read_manifest
from dflash_ort.runtime import onednn, providers, session
from dflash_ort.runtime.bundle import check_runtime
from dflash_ort.runtime.machine import machine_key
from dflash_ort.runtime.onednn import OneDnn, ask_onednn, read_verbose
from dflash_ort.runtime.ort import ort
from dflash_ort.runtime.providers import check_provider, effective_fpmath, installed_providers, prepare_options
from dflash_ort.runtime.session import Backend, default_threads

VARIABLE = "ONEDNN_DEFAULT_FPMATH_MODE"
CPU, DNNL = "CPUExecutionProvider", "DnnlExecutionProvider"


def install(patch: pytest.MonkeyPatch, *names: str, openvino: bool = False) -> None:
    """Let ONNX Runtime say that it has these, as a build with them does, the default one last; OpenVINO is a plugin."""
    patch.setattr(ort, "get_available_providers", lambda: [*names, CPU])
    patch.setattr(providers, "openvino_device", lambda: object() if openvino else None)


def refusal(**settings: Any) -> str:
    """The one line that a backend is refused with."""
    with pytest.raises(ProviderError) as caught:
        Backend.of(**settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def dnnl(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ONNX Runtime with oneDNN, and a process that has not used it."""
    install(monkeypatch, DNNL)
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(providers, "_fpmath_in_use", None)


@pytest.fixture
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_allowed_cpus", lambda: set(range(8)))


class TestProviders:
    def test_the_default_one_comes_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, "XnnpackExecutionProvider", DNNL, openvino=True)
        assert installed_providers() == ["cpu", "dnnl", "openvino"]
        install(monkeypatch, "AzureExecutionProvider")
        assert installed_providers() == ["cpu"]

    @pytest.mark.usefixtures("dnnl")
    def test_what_one_does_not_take_the_default_one_computes(self) -> None:
        assert prepare_options(ort.SessionOptions(), "dnnl", "strict", 1) == [DNNL, CPU]
        assert prepare_options(ort.SessionOptions(), "cpu", None, 1) == [CPU]

    def test_an_unknown_one(self) -> None:
        assert refusal(provider="cuda") == "unknown provider 'cuda'; expected auto, cpu, dnnl, openvino"

    @pytest.mark.parametrize(
        ("name", "how"), [("dnnl", "no wheel has it; Debian 13's"), ("openvino", "pip install onnxruntime-ep-openvino")]
    )
    def test_a_missing_one_says_what_is_there_and_how_to_get_it(
        self, name: str, how: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        install(monkeypatch, "AzureExecutionProvider")
        said = refusal(provider=name)
        assert said.startswith(f"provider '{name}' is not in this ONNX Runtime {ort.__version__} (it has cpu): {how}")
        with pytest.raises(ProviderError, match=f"provider '{name}' is not in this"):
            Backend.of(threads=1).under(name)  # type: ignore[arg-type]

    @pytest.mark.usefixtures("dnnl")
    def test_what_is_there_is_named_in_full(self) -> None:
        assert "(it has cpu, dnnl): pip install" in refusal(provider="openvino")
        assert check_provider("dnnl") == "dnnl"

    @pytest.mark.usefixtures("dnnl")
    @pytest.mark.filterwarnings("ignore:Specified provider")
    def test_one_that_does_not_start_is_one_line(self, tmp_path: Path) -> None:
        """It was announced, and is not among those of the session."""
        (tmp_path / "g.onnx").write_bytes(onednn._MATRIX_PRODUCT)
        with pytest.raises(
            ProviderError, match=r"^provider 'dnnl' did not start for '.*g\.onnx'; choose provider cpu$"
        ):
            session.open_session(tmp_path / "g.onnx", Backend.of(provider="dnnl", threads=1))

    def test_openvino_has_its_targets_and_no_drafters(
        self, tiny_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        install(monkeypatch, openvino=True)
        backend = Backend.of(provider="openvino", threads=2)
        assert backend.for_drafter() == Backend.of(threads=2)
        assert Backend.of(threads=2).for_drafter() == Backend.of(threads=2)
        for portable, precision in ((True, "int8"), (True, "fp32"), (False, "fp32")):
            bundle = tiny_bundle(precision, portable=portable)
            check_runtime(bundle, read_manifest(bundle), backend)
        bundle = tiny_bundle("int8")
        with pytest.raises(BundleError, match=r"^OpenVINO cannot run the int8 target of .*--portable, or choose"):
            check_runtime(bundle, read_manifest(bundle), backend)

    def test_onednn_has_portable_graphs_only(
        self, tiny_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It computes the others' reductions over everything, and says nothing."""
        install(monkeypatch, DNNL)
        bundle = tiny_bundle("fp32", portable=True)
        check_runtime(bundle, read_manifest(bundle), Backend.of(provider="dnnl"))
        bundle = tiny_bundle("fp32")
        with pytest.raises(BundleError, match=r"^oneDNN computes .* wrongly; export with --portable, or choose"):
            check_runtime(bundle, read_manifest(bundle), Backend.of(provider="dnnl"))


@pytest.mark.usefixtures("dnnl")
class TestFpmath:
    def test_the_default_provider_has_none(self) -> None:
        said = "provider 'cpu' has no fpmath modes; choose provider dnnl or openvino"
        assert refusal(fpmath="bf16") == refusal(fpmath="strict", provider="cpu") == said
        assert Backend.of().fpmath is None

    @pytest.mark.parametrize("provider", ["cpu", "dnnl"])
    def test_an_unknown_one(self, provider: str) -> None:
        said = "unknown fpmath mode 'fp8'; expected strict, bf16, f16, tf32, any"
        assert refusal(fpmath="fp8", provider=provider) == said

    def test_as_asked_else_as_the_environment_says_else_strict(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert effective_fpmath("dnnl", None) == "strict"
        monkeypatch.setenv(VARIABLE, "BF16")
        assert effective_fpmath("dnnl", None) == "bf16"
        assert effective_fpmath("dnnl", "tf32") == "tf32"
        assert effective_fpmath("cpu", None) is None
        assert Backend.of(provider="dnnl").fpmath == "bf16"

    def test_what_one_engine_asked_for_is_not_what_the_user_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        prepare_options(ort.SessionOptions(), "dnnl", "bf16", 1)
        assert os.environ[VARIABLE] == "BF16"
        assert effective_fpmath("dnnl", None) == "strict"

    def test_what_else_onednn_listens_to_is_part_of_the_key(self, monkeypatch: pytest.MonkeyPatch) -> None:
        keys = [Backend.of(provider="dnnl").key()]
        for name, value in (("ONEDNN_MAX_CPU_ISA", "AVX2"), ("OMP_NUM_THREADS", "1")):
            monkeypatch.setenv(name, value)
            keys.append(Backend.of(provider="dnnl").key())
        assert len({str(key) for key in keys}) == 3
        assert "identity" not in Backend.of().key()

    def test_openvino_knows_fewer_and_not_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, openvino=True)
        monkeypatch.setenv(VARIABLE, "BF16")
        assert Backend.of(provider="openvino").fpmath == "strict"
        assert Backend.of(provider="openvino", fpmath="bf16").fpmath == "bf16"
        said = "OpenVINO has no fpmath mode 'tf32'; expected strict, bf16, f16"
        assert refusal(provider="openvino", fpmath="tf32") == said

    def test_openvino_is_told_its_precision(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Left alone it computes in bf16 where the processor can."""
        device = object()
        monkeypatch.setattr(providers, "openvino_device", lambda: device)
        for mode, precision in (("strict", "f32"), ("bf16", "bf16"), ("f16", "f16")):
            options = mock.Mock()
            assert prepare_options(options, "openvino", mode, 3) == [], "names would take the place of devices"
            ((devices, settings),) = (call.args for call in options.add_provider_for_devices.mock_calls)
            assert devices == [device]
            hints = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": 3}
            assert json.loads(settings["load_config"]) == {"CPU": hints}
        assert VARIABLE not in os.environ

    def test_another_provider_has_its_own(self) -> None:
        asked = Backend.of(provider="dnnl", fpmath="f16", threads=3, spinning="never")
        assert asked.under("cpu") == Backend.of(threads=3, spinning="never")
        assert asked.under("cpu").under("dnnl") == replace(asked, fpmath="strict")

    @pytest.mark.parametrize("mode", FPMATHS)
    def test_a_process_has_one_mode(self, mode: str) -> None:
        """oneDNN reads it once, so a second one would silently be the first."""
        prepare_options(ort.SessionOptions(), "cpu", None, 1)
        assert VARIABLE not in os.environ
        for _ in range(2):
            prepare_options(ort.SessionOptions(), "dnnl", mode, 1)
            assert os.environ[VARIABLE] == mode.upper()
        for other in set(FPMATHS) - {mode}:
            with pytest.raises(ProviderError, match=f"already computes with fpmath '{mode}'.*process for '{other}'$"):
                prepare_options(ort.SessionOptions(), "dnnl", other, 1)
        assert os.environ[VARIABLE] == mode.upper()


class TestThreads:
    def test_one_for_each_processor_asked_for_else_for_each_core(
        self, eight_cpus: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(session, "_core_of", lambda cpu: str(cpu // 2))
        assert default_threads() == Backend.of().threads == 4
        assert Backend.of(cpus=(0, 2, 5)).threads == 3

    @pytest.mark.parametrize("threads", [0, -1, 513, 1.5, "2", True])
    def test_a_number_that_is_none(self, threads: Any) -> None:
        assert refusal(threads=threads) == f"threads is {threads!r}; expected a whole number, 1 to 512"

    def test_unknown_spinning(self) -> None:
        assert refusal(spinning="yes") == "unknown spinning 'yes'; expected stop, always, never"

    @pytest.mark.usefixtures("eight_cpus")
    def test_processors_that_may_not_be_used(self) -> None:
        for cpus in ((0, 8), (8,), (0, -1)):
            assert refusal(cpus=cpus, threads=len(cpus)) == (
                f"this process may not use processor {cpus[-1]}; it may use 0, 1, 2, 3, 4, 5, 6, 7"
            )

    @pytest.mark.usefixtures("eight_cpus")
    def test_as_many_different_processors_as_threads(self) -> None:
        expected = "expected as many different processors"
        assert refusal(cpus=(3, 3)) == f"cpus is [3, 3] for 2 threads; {expected}"
        assert refusal(cpus=(0, 1), threads=3) == f"cpus is [0, 1] for 3 threads; {expected}"
        assert refusal(cpus=(0, 1, 2), threads=2) == f"cpus is [0, 1, 2] for 2 threads; {expected}"
        assert Backend.of(cpus=(1, 0), threads=2).cpus == (1, 0)

    @pytest.mark.usefixtures("eight_cpus")
    def test_the_shared_pool_is_not_pinned(self) -> None:
        assert refusal(cpus=(0, 1), shared_pool=True).endswith("choose cpus or the shared pool")
        assert refusal(spinning="never", shared_pool=True).endswith("choose spinning or the pool")

    @pytest.mark.usefixtures("eight_cpus")
    def test_openvino_has_threads_of_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, openvino=True)
        assert refusal(cpus=(0, 1), provider="openvino").startswith("OpenVINO's threads are its own")


class TestSessionOptions:
    @pytest.mark.parametrize("spinning", SPINNINGS)
    def test_spinning(self, spinning: str) -> None:
        assert (
            Backend.of(spinning=spinning).session_options()
            == {
                "stop": {"session.force_spinning_stop": "1"},
                "always": {},
                "never": {"session.intra_op.allow_spinning": "0"},
            }[spinning]
        )

    def test_beside_openvino_s_threads_nobody_waits_busily(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, openvino=True)
        never = {"session.intra_op.allow_spinning": "0"}
        assert Backend.of(provider="openvino").session_options() == never
        assert Backend.of(provider="openvino", spinning="always").session_options() == {}, "unless asked to"

    @pytest.mark.usefixtures("eight_cpus")
    def test_onnx_runtime_counts_processors_from_one_and_the_first_is_the_caller_s(self) -> None:
        def pinned(*cpus: int) -> str | None:
            return Backend.of(cpus=cpus).session_options().get("session.intra_op_thread_affinities")

        assert pinned() is None
        assert pinned(4) is None
        assert pinned(0, 1) == "2"
        assert pinned(5, 0, 7, 2) == "1;8;3"

    @pytest.mark.usefixtures("eight_cpus")
    def test_the_user_s_own_go_over_ours(self) -> None:
        mine = {"session.force_spinning_stop": "0", "session.set_denormal_as_zero": "1"}
        assert Backend.of(session_options=mine).session_options() == mine
        affinity = {"session.intra_op_thread_affinities": "7"}
        assert Backend.of(cpus=(0, 1), session_options=affinity).session_options() == {
            "session.force_spinning_stop": "1",
            **affinity,
        }

    def test_every_one_that_we_set_is_known(self) -> None:
        ours = Backend(2, cpus=(0, 1)).session_options() | Backend(1, spinning="never").session_options()
        assert set(ours) <= session.SESSION_OPTIONS


@pytest.mark.usefixtures("dnnl", "eight_cpus")
class TestKey:
    def test_defaults_are_left_out(self) -> None:
        """What was measured before there were these settings stays true of them."""
        assert Backend.of(threads=2).key() == {"provider": CPU, "threads": 2}

    def test_it_differs_with_everything_that_bits_or_speed_depend_on(self) -> None:
        backends = [
            Backend.of(threads=2),
            Backend.of(threads=3),
            Backend.of(threads=2, provider="dnnl"),
            Backend.of(threads=2, provider="dnnl", fpmath="bf16"),
            Backend.of(threads=2, provider="dnnl", fpmath="any"),
            Backend.of(cpus=(0, 1)),
            Backend.of(cpus=(1, 0)),
            Backend.of(cpus=(0, 2)),
            Backend.of(threads=2, spinning="always"),
            Backend.of(threads=2, spinning="never"),
            Backend.of(threads=2, shared_pool=True),
            Backend.of(threads=2, session_options={"session.set_denormal_as_zero": "1"}),
            Backend.of(threads=2, session_options={"session.set_denormal_as_zero": "0"}),
        ]
        assert len({machine_key(backend, bundle="x") for backend in backends}) == len(backends)
        assert machine_key(backends[0], bundle="x") != machine_key(backends[0], bundle="y")

    def test_saying_the_default_changes_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert Backend.of(threads=2, spinning="stop", provider="cpu").key() == Backend.of(threads=2).key()
        asked = Backend.of(provider="dnnl", fpmath="bf16")
        monkeypatch.setenv(VARIABLE, "bf16")
        assert Backend.of(provider="dnnl").key() == asked.key()


SHARED = """
import sys
from dflash_ort.errors import DFlashError, ProviderError
from dflash_ort.params import SamplingParams
from dflash_ort.runtime.engine import Engine

def tokens(**settings):
    params = SamplingParams(max_new_tokens=40, temperature=0.8, seed=3)
    options = {"threads": 2, "controller": "fixed:3", "calibrate": False} | settings
    with Engine.load(sys.argv[1], **options) as engine:
        return engine.generate("hello, what is it?", params, raw=True).token_ids

def refused(kind, **settings):
    try:
        tokens(**settings)
    except kind as error:
        return str(error)

own = tokens()
shared = tokens(shared_pool=True), tokens(shared_pool=True)
print(len(own), shared == (own, own))
print(refused(ProviderError, threads=1, shared_pool=True))
print(refused(DFlashError))
"""


@pytest.mark.skipif(not hasattr(ort, "set_global_thread_pool_sizes"), reason="this ONNX Runtime shares no pool")
def test_the_shared_pool_gives_the_same_tokens_and_has_one_number_of_threads(tiny_bundle: Callable[..., Path]) -> None:
    """In a process of its own: the pool is the process's, and there are no others beside it from then on."""
    command = [sys.executable, "-W", "error", "-c", SHARED, str(tiny_bundle("fp32"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    same, other_number, other_pool = done.stdout.splitlines()
    assert same == "40 True"
    assert other_number == "this process's shared pool cannot have 1 threads any more: it has 2 threads"
    assert "pool" in other_pool


ISA = "Intel AVX-512 with float16, Intel DL Boost and bfloat16 support"
HEADER = f"""\
onednn_verbose,v1,info,oneDNN v3.7.2 (commit N/A)
onednn_verbose,v1,info,cpu,runtime:OpenMP,nthr:2
onednn_verbose,v1,info,cpu,isa:{ISA} \n\
onednn_verbose,v1,info,gpu,runtime:none
onednn_verbose,v1,primitive,info,template:operation,engine,primitive,implementation,prop_kind,memory_descriptors,\
attributes,auxiliary,problem_desc,exec_time
"""
REORDER = (
    "onednn_verbose,v1,primitive,exec,cpu,reorder,jit:uni,undef,"
    "src:f32::blocked:ab::f0 dst:f32::blocked:ab::f0,,,16x16,0.00781\n"
)
PRODUCT = (
    "onednn_verbose,v1,primitive,exec,cpu,matmul,brg_matmul:avx512_core,undef,"
    "src:f32::blocked:ab::f0 wei:f32::blocked:ab::f0 dst:f32::blocked:ab::f0,,,16x16:16x16,3.94995\n"
)


class TestOneDnnSays:
    def test_version_instruction_set_and_kernel(self) -> None:
        assert read_verbose(HEADER + REORDER + PRODUCT) == OneDnn("3.7.2", ISA, "brg_matmul:avx512_core")
        second = PRODUCT.replace("brg_matmul:avx512_core", "gemm:jit:f32")
        assert read_verbose("noise\n" + HEADER + PRODUCT + second) == OneDnn("3.7.2", ISA, "brg_matmul:avx512_core")

    def test_without_a_matrix_product(self) -> None:
        assert read_verbose(HEADER) == read_verbose(HEADER + REORDER) == OneDnn("3.7.2", ISA, "")

    @pytest.mark.parametrize("text", ["", "Schema error: ...\n", PRODUCT, HEADER.splitlines()[0], "isa:AVX2\n"])
    def test_nothing_that_is_understood(self, text: str) -> None:
        assert read_verbose(text) is None

    def test_the_model_that_it_is_asked_with_is_one(self) -> None:
        model = ort.InferenceSession(onednn._MATRIX_PRODUCT, providers=[CPU])
        x = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)
        np.testing.assert_allclose(model.run(None, {"x": x})[0], x @ x, rtol=1e-4, atol=1e-5)

    def test_where_it_is_not_it_says_nothing(self) -> None:
        if "dnnl" in installed_providers():
            assert ask_onednn() is not None
        else:
            assert ask_onednn() is None
            with pytest.raises(ProviderError, match="provider 'dnnl' is not in this"):
                onednn.multiply()
