"""The provider that nobody named: the fastest that is exact, measured once; on targets that only take time."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_ort.defaults import Provider
from dflash_ort.errors import BundleError, InexactError, ProviderError
from dflash_ort.models.manifest import MANIFEST, FileEntry, Manifest
from dflash_ort.models.paths import cache_dir
from dflash_ort.models.spec import DrafterSpec
from dflash_ort.runtime import choice, providers
from dflash_ort.runtime.choice import Choice, choose_provider, resolve_backend
from dflash_ort.runtime.ort import ort
from dflash_ort.runtime.session import Backend
from tests.fakes import FakeCache, FakeTarget

BACKEND = Backend(2)
ROW_COUNTS = (1, 2, 4, 8)
MS = 2.0**-10
"""A millisecond or so, of which sums are exact."""


class TimedTarget(FakeTarget):
    """Takes time on the bench's clock and computes nothing."""

    def __init__(self, bench: Bench, provider: Provider) -> None:
        super().__init__(max_context=bench.max_context)
        self.bench, self.provider = bench, provider

    def run(self, cache: FakeCache, token_ids: Sequence[int] | np.ndarray, num_logits: int) -> Any:
        assert len(token_ids) > 0
        cache.length.append(len(token_ids))
        assert cache.length.value <= self.spec.max_context
        self.bench.pass_of(self.provider, len(token_ids))


@dataclass
class Bench:
    """An ONNX Runtime with some providers: how long a pass of each takes, and which of them are no good.

    ``speeds``: seconds of a pass, to which each row adds a sixteenth; ``noise``: standard deviation of the
    time's logarithm.
    """

    speeds: dict[Provider, float]
    faults: dict[Provider, Exception] = field(default_factory=dict)
    noise: float = 0.0
    seed: int = 0
    max_context: int = 512
    now: float = 0.0
    opened: list[Backend] = field(default_factory=list)
    passes: list[tuple[Provider, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)

    def pass_of(self, provider: Provider, rows: int) -> None:
        self.passes.append((provider, rows))
        self.now += self.speeds[provider] * (1 + rows / 16) * float(np.exp(self._rng.normal(0.0, self.noise)))

    def exact_target(self, directory: Path, manifest: Manifest, backend: Backend, progress: Any) -> TimedTarget:
        self.opened.append(backend)
        if backend.provider in self.faults:
            raise self.faults[backend.provider]
        return TimedTarget(self, backend.provider)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Bench], Bench]:
    """Puts a bench in the place of ONNX Runtime, the targets and the clock; the cache is the test's own."""
    monkeypatch.setenv("DFLASH_ORT_CACHE", str(tmp_path / "cache"))

    def put(bench: Bench) -> Bench:
        names = [providers.EXECUTION_PROVIDERS[name] for name in bench.speeds if name != "openvino"]
        monkeypatch.setattr(ort, "get_available_providers", lambda: names[::-1])
        monkeypatch.setattr(providers, "openvino_device", lambda: object() if "openvino" in bench.speeds else None)
        monkeypatch.setattr(choice, "_exact_target", bench.exact_target)
        monkeypatch.setattr(choice, "perf_counter", lambda: bench.now)
        return bench

    return put


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "bundle", "ab")


def write_bundle(directory: Path, content: str) -> Path:
    """A manifest and nothing else."""
    directory.mkdir()
    files = {"target.onnx": FileEntry(1, content * 32)}
    manifest = Manifest("fake", FakeTarget().spec, DrafterSpec(kind="none"), "fp32", None, files, portable=True)
    (directory / MANIFEST).write_text(manifest.to_json())
    return directory


def stored() -> list[Path]:
    return sorted((cache_dir() / "providers").glob("*"))


Install = Callable[[Bench], Bench]


class TestFastest:
    @pytest.mark.parametrize("seed", range(10))
    @pytest.mark.parametrize("faster", ["cpu", "dnnl"])
    def test_is_chosen_in_spite_of_noise(self, faster: Provider, seed: int, install: Install, bundle: Path) -> None:
        speeds: dict[Provider, float] = {"cpu": MS, "dnnl": MS}
        install(Bench(speeds | {faster: MS / 1.5}, noise=0.2, seed=seed))
        assert choose_provider(bundle, BACKEND).provider == faster

    @pytest.mark.parametrize(("share", "chosen"), [(0.96, "dnnl"), (0.98, "cpu"), (1.0, "cpu"), (1.02, "cpu")])
    def test_a_hair_faster_is_not_enough(self, share: float, chosen: Provider, install: Install, bundle: Path) -> None:
        install(Bench({"cpu": MS, "dnnl": share * MS}))
        assert choose_provider(bundle, BACKEND).provider == chosen

    def test_of_three(self, install: Install, bundle: Path) -> None:
        install(Bench({"cpu": 3 * MS, "dnnl": 2 * MS, "openvino": MS}, noise=0.1))
        found = choose_provider(bundle, BACKEND)
        assert found.provider == "openvino"
        assert list(found.seconds) == ["cpu", "dnnl", "openvino"]
        assert found.refused == {}

    def test_all_row_counts_are_timed_in_turn(self, install: Install, bundle: Path) -> None:
        """Provider by provider within a repeat, so that what else the machine does falls on all alike."""
        bench = install(Bench({"cpu": MS, "dnnl": 2 * MS}))
        found = choose_provider(bundle, BACKEND)
        for name, speed in bench.speeds.items():
            assert found.seconds[name] == pytest.approx([speed * (1 + rows / 16) for rows in ROW_COUNTS])
        assert found.times() == pytest.approx({"cpu": 1.0, "dnnl": 2.0})
        timed = bench.passes[-2 * len(ROW_COUNTS) :]
        assert timed == [(name, rows) for name in ("cpu", "dnnl") for rows in ROW_COUNTS]
        assert bench.passes.count(("cpu", 1)) == bench.passes.count(("dnnl", 1)) >= 6

    def test_a_slow_moment_decides_nothing(self, install: Install, bundle: Path) -> None:
        bench = install(Bench({"cpu": MS, "dnnl": MS / 2}))
        quiet = bench.pass_of

        def pass_of(provider: Provider, rows: int) -> None:
            quiet(provider, rows)
            if provider == "dnnl" and len(bench.passes) % 3 == 0:
                bench.now += 1.0

        bench.pass_of = pass_of  # type: ignore[method-assign]
        assert choose_provider(bundle, BACKEND).provider == "dnnl"

    @pytest.mark.parametrize("max_context", [2, 3, 9, 100])
    def test_of_a_short_context(self, max_context: int, install: Install, bundle: Path) -> None:
        bench = install(Bench({"cpu": MS, "dnnl": MS / 2}, max_context=max_context))
        assert choose_provider(bundle, BACKEND).provider == "dnnl"
        assert bench.passes

    def test_the_other_settings_are_kept(self, install: Install, bundle: Path) -> None:
        bench = install(Bench({"cpu": MS, "dnnl": MS / 2}))
        choose_provider(bundle, Backend(3, spinning="never", shared_pool=True))
        assert bench.opened == [
            Backend(3, "cpu", spinning="never", shared_pool=True),
            Backend(3, "dnnl", "strict", spinning="never", shared_pool=True),
        ]


class TestRefused:
    @pytest.mark.parametrize(
        ("fault", "why"),
        [
            (InexactError("on this machine a row's bits ..."), "its rows are not independent"),
            (
                BundleError("ONNX Runtime 1.21 cannot load 'x': no kernel"),
                "ONNX Runtime 1.21 cannot load 'x': no kernel",
            ),
            (ProviderError("provider 'dnnl' did not start"), "provider 'dnnl' did not start"),
        ],
    )
    def test_is_never_chosen(self, fault: Exception, why: str, install: Install, bundle: Path) -> None:
        bench = install(Bench({"cpu": MS, "dnnl": MS / 1000}, {"dnnl": fault}))
        for time in range(2):
            found = choose_provider(bundle, BACKEND)
            assert (found.provider, found.refused) == ("cpu", {"dnnl": why})
            assert len(bench.opened) == (2 if isinstance(fault, InexactError) else 2 + 2 * time), (
                "rows that are not independent stay so, what went wrong may go right next time"
            )
            assert list(found.seconds) == ["cpu"]
            assert found.reason() == f"measured, passes in units of cpu's: cpu 1.00, dnnl: {why}"
        assert {provider for provider, _ in bench.passes} == {"cpu"}

    def test_another_that_is_exact_is(self, install: Install, bundle: Path) -> None:
        speeds: dict[Provider, float] = {"cpu": MS, "dnnl": MS / 1000, "openvino": MS / 2}
        install(Bench(speeds, {"dnnl": InexactError("...")}))
        assert choose_provider(bundle, BACKEND).provider == "openvino"

    def test_a_fault_of_the_default_one_is_left_to_loading(self, install: Install, bundle: Path) -> None:
        """Which says it in full."""
        install(Bench({"cpu": MS, "dnnl": MS}, dict.fromkeys(("cpu", "dnnl"), BundleError("it is damaged"))))
        found = choose_provider(bundle, BACKEND)
        assert found.provider == "cpu"
        assert set(found.refused) == {"cpu", "dnnl"}

    def test_a_fault_that_is_mended_is_forgotten(self, install: Install, bundle: Path) -> None:
        """A file was missing, say, and is there now: the bundle's identity is the same."""
        speeds: dict[Provider, float] = {"cpu": MS, "dnnl": MS / 2}
        bench = install(Bench(speeds, dict.fromkeys(speeds, BundleError("the bundle has no file 'target.onnx.data'"))))
        choose_provider(bundle, BACKEND)
        bench.faults.clear()
        assert choose_provider(bundle, BACKEND).provider == "dnnl"


class TestRemembered:
    @pytest.fixture
    def bench(self, install: Install) -> Bench:
        return install(Bench({"cpu": MS, "dnnl": MS / 2}))

    def test_it_is_measured_once(self, bench: Bench, bundle: Path) -> None:
        first = choose_provider(bundle, BACKEND)
        passes = len(bench.passes)
        bench.speeds["dnnl"] = 1.0
        again = choose_provider(bundle, BACKEND)
        assert (again.provider, again.times()) == (first.provider, first.times()) == ("dnnl", again.times())
        assert again.reason() == first.reason()
        assert len(bench.passes) == passes

    def test_again_means_anew(self, bench: Bench, bundle: Path) -> None:
        choose_provider(bundle, BACKEND)
        bench.speeds["dnnl"] = 2 * MS
        assert choose_provider(bundle, BACKEND, again=True).provider == "cpu"
        assert choose_provider(bundle, BACKEND).provider == "cpu", "the new verdict is the one that is kept"
        assert len(stored()) == 1

    @pytest.mark.parametrize(
        "text",
        [
            *("", "{", "[]", "null", "{}", '"cpu"', '{"provider": "cpu"}'),
            '{"provider": "cuda", "seconds": {}, "refused": {}}',
            '{"provider": "dnnl", "seconds": {"cpu": [1, 1], "dnnl": [1, 1, 1]}, "refused": {}}',
            '{"provider": "dnnl", "seconds": {"cpu": "slow"}, "refused": {}}',
            '{"provider": "dnnl", "seconds": [1], "refused": {}}',
            '{"provider": "cpu", "seconds": {"cpu": [1]}, "refused": []}',
            '{"provider": "cpu", "seconds": {}, "refused": {}, "more": 1}',
        ],
    )
    def test_a_damaged_file_is_measured_again(self, text: str, bench: Bench, bundle: Path) -> None:
        whole = choose_provider(bundle, BACKEND)
        (path,) = stored()
        path.write_text(text)
        bench.passes.clear()
        assert choose_provider(bundle, BACKEND) == whole
        assert bench.passes
        assert json.loads(path.read_text()) == json.loads(json.dumps(asdict(whole)))

    def test_a_cache_that_cannot_be_written_is_no_reason_to_stop(
        self, bench: Bench, bundle: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "cache").write_text("a file in its place")
        assert choose_provider(bundle, BACKEND).provider == "dnnl"

    def test_without_measuring_nothing_is_timed(self, bench: Bench, bundle: Path) -> None:
        assert choose_provider(bundle, BACKEND, measure=False).provider == "cpu"
        assert not bench.opened
        assert not stored()
        choose_provider(bundle, BACKEND)
        assert choose_provider(bundle, BACKEND, measure=False).provider == "dnnl", "what is known is used"

    def test_a_verdict_is_of_a_bundle_a_machine_and_settings(
        self, bench: Bench, install: Install, bundle: Path, tmp_path: Path
    ) -> None:
        other = write_bundle(tmp_path / "other", "cd")
        twin = write_bundle(tmp_path / "twin", "ab")
        known = []
        for directory, backend in (
            (bundle, BACKEND),
            (other, BACKEND),
            (bundle, Backend(1)),
            (bundle, Backend(2, spinning="always")),
        ):
            choose_provider(directory, backend)
            known.append(len(stored()))
        assert known == [1, 2, 3, 4]
        bench.passes.clear()
        choose_provider(twin, BACKEND)
        choose_provider(bundle, Backend(2, "dnnl", "strict"))
        assert not bench.passes, "the same files in another place, and whoever was the provider before"
        more = install(Bench({"cpu": MS, "dnnl": MS / 2, "openvino": MS / 10}))
        assert choose_provider(bundle, BACKEND).provider == "openvino"
        assert more.passes
        assert len(stored()) == 5

    def test_the_only_one_needs_no_measuring(self, install: Install, tmp_path: Path) -> None:
        install(Bench({"cpu": MS}))
        found = choose_provider(tmp_path / "not even a bundle", BACKEND, again=True)
        assert found.provider == "cpu"
        assert found.reason() == "the only one installed"
        assert not stored()


class TestReason:
    def test_what_was_measured_and_what_was_not(self) -> None:
        found = Choice("dnnl", {"cpu": (2.0, 4.0), "dnnl": (1.0, 2.0)}, {"openvino": "its rows are not independent"})
        assert found.reason() == (
            "measured, passes in units of cpu's: cpu 1.00, dnnl 0.50, openvino: its rows are not independent"
        )

    def test_nothing_is_said_of_one_alone_where_there_are_others(self, install: Install, bundle: Path) -> None:
        bench = install(Bench({"cpu": MS, "dnnl": MS / 2}))
        assert choose_provider(bundle, BACKEND, measure=False).reason() != "the only one installed"
        bench.faults |= dict.fromkeys(("cpu", "dnnl"), InexactError("..."))
        assert choose_provider(bundle, BACKEND).reason() == (
            "cpu: its rows are not independent; dnnl: its rows are not independent"
        )

    def test_where_the_default_is_not_exact_another_is_taken(self, install: Install, bundle: Path) -> None:
        install(Bench({"cpu": MS, "dnnl": 3 * MS, "openvino": 2 * MS}, {"cpu": InexactError("...")}))
        found = choose_provider(bundle, BACKEND)
        assert found.provider == "openvino"
        assert found.reason() == (
            "measured, passes in units of dnnl's: dnnl 1.00, openvino 0.67, cpu: its rows are not independent"
        )

    def test_times_are_geometric_means(self) -> None:
        """A row count that takes long counts as much as one that takes little."""
        found = Choice("cpu", {"cpu": (1.0, 100.0), "dnnl": (2.0, 50.0), "openvino": (4.0, 100.0)}, {})
        assert found.times() == pytest.approx({"cpu": 1.0, "dnnl": 1.0, "openvino": 2.0})


class TestResolve:
    @pytest.fixture
    def bench(self, install: Install) -> Bench:
        return install(Bench({"cpu": MS, "dnnl": MS / 2}))

    def test_auto_is_the_choice_with_the_other_settings(self, bench: Bench, bundle: Path) -> None:
        found = resolve_backend(bundle, provider="auto", threads=3, spinning="always")
        assert found == Backend(3, "dnnl", "strict", spinning="always")
        assert resolve_backend(bundle, provider="auto", threads=4, measure=False) == Backend(4)

    def test_a_named_one_is_taken_at_its_word(self, bench: Bench, tmp_path: Path) -> None:
        nowhere = tmp_path / "not even a bundle"
        assert resolve_backend(nowhere, provider="cpu", threads=2) == Backend(2)
        found = resolve_backend(nowhere, provider="dnnl", threads=2, fpmath="bf16")
        assert found == Backend(2, "dnnl", "bf16")
        assert not bench.opened

    def test_what_cannot_be_is_said_before_anything_is_measured(self, bench: Bench, bundle: Path) -> None:
        with pytest.raises(ProviderError, match="fpmath"):
            resolve_backend(bundle, provider="auto", fpmath="bf16")
        with pytest.raises(ProviderError, match="threads"):
            resolve_backend(bundle, provider="auto", threads=0)
        assert not bench.opened
