"""A bundle appears whole or not at all, and an older one stays until the new one is complete."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from dflash_ort.errors import BundleError, CheckpointError
from dflash_ort.exporter import export
from dflash_ort.exporter.checkpoint import DrafterCheckpoint, TargetCheckpoint
from dflash_ort.exporter.drafter_graph import write_draft_vocabulary
from dflash_ort.exporter.export import ExportOptions, export_bundle, read_drafter_option, read_target
from dflash_ort.exporter.target_graph import write_embedding
from dflash_ort.models.manifest import (
    DRAFTER_GRAPH,
    MANIFEST,
    TARGET_GRAPH,
    DrafterCheck,
    Quality,
    SelfCheck,
    check_files,
    read_manifest,
)
from tests.settings import PORTABLE
from tests.shell import call
from tests.tiny import TinyShape, write_drafter, write_target

Pair = tuple[TargetCheckpoint, DrafterCheckpoint]
Fault = Callable[[pytest.MonkeyPatch], dict[str, Any]]
"""Arranges for an export to fail in its middle; returns the arguments that do it, if there are any."""

SHAPE = TinyShape(vocab=271, context=64)
"""No file of its bundle ends where a block of the disk ends: a lost end is where full disks are missed."""

QUALITY = Quality(0.01, 0.95, 21.5, 21.0, 100, "ab" * 32)
SELF_CHECK = SelfCheck(True, "a cpu", "1.32.0", DrafterCheck(2.5, (0.75, 0.5), 40))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("checkpoints")
    drafter = read_drafter_option(str(write_drafter(root / "drafter", SHAPE)))
    assert isinstance(drafter, DrafterCheckpoint)
    return read_target(write_target(root / "target", SHAPE)), drafter


def content(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


class TestWhatIsWritten:
    def test_the_manifest_lists_every_file_and_is_returned(self, pair: Pair, tmp_path: Path) -> None:
        manifest = export_bundle(*pair, tmp_path / "deep" / "out", ExportOptions(arguments={"target": "x"}))
        out = tmp_path / "deep" / "out"
        assert read_manifest(out) == manifest
        check_files(out, manifest, hashes=True)
        assert {p.name for p in out.iterdir()} == {*manifest.files, MANIFEST}
        assert manifest.provenance["arguments"] == {"target": "x"}
        assert [p.name for p in out.parent.iterdir()] == ["out"]

    def test_exporting_twice_gives_the_same_bytes(self, pair: Pair, tmp_path: Path) -> None:
        identities = {
            export_bundle(*pair, tmp_path / name, ExportOptions(precision="int8", name=name)).identity for name in "ab"
        }
        assert len(identities) == 1
        assert export_bundle(*pair, tmp_path / "c", ExportOptions()).identity not in identities

    @pytest.mark.parametrize("drafter", ["ngram", "none"])
    def test_without_a_model_drafter(self, drafter: Any, pair: Pair, tmp_path: Path) -> None:
        manifest = export_bundle(pair[0], drafter, tmp_path / "out", ExportOptions())
        assert manifest.drafter.kind == drafter
        assert manifest.drafter.max_draft == 0
        assert manifest.target.tapped_layers == ()
        assert manifest.draft_precision is None
        assert not [name for name in manifest.files if name.startswith("draft")]

    def test_the_drafter_may_have_a_precision_of_its_own(self, pair: Pair, tmp_path: Path) -> None:
        options = ExportOptions(precision="fp32", draft_precision="int8")
        manifest = export_bundle(*pair, tmp_path / "out", options)
        assert (manifest.precision, manifest.draft_precision) == ("fp32", "int8")
        operators = [{n.op_type for n in ir.load(tmp_path / "out" / g).graph} for g in (TARGET_GRAPH, DRAFTER_GRAPH)]
        assert ["MatMulIntegerToFloat" in found for found in operators] == [False, True]

    def test_rotary_tables_reach_a_block_and_a_padding_row_beyond_the_context(self, pair: Pair, tmp_path: Path) -> None:
        manifest = export_bundle(*pair, tmp_path / "out", ExportOptions(max_context=50))
        assert manifest.target.max_context == 50
        for graph in (TARGET_GRAPH, DRAFTER_GRAPH):
            table = ir.load(tmp_path / "out" / graph).graph.initializers["rotary_cos"]
            assert table.shape == ir.Shape([50 + manifest.drafter.block_size + 1, 8])

    @pytest.mark.parametrize("limit", [-1, 0, 1, 65])
    def test_a_context_beyond_the_checkpoint_s_is_refused(self, limit: int, pair: Pair, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=f"max_context is {limit}; .* 2 to 64"):
            export_bundle(*pair, tmp_path / "out", ExportOptions(max_context=limit))
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("limit", [2, 64, None])
    def test_a_context_within_is_kept(self, limit: int | None, pair: Pair, tmp_path: Path) -> None:
        manifest = export_bundle(*pair, tmp_path / "out", ExportOptions(max_context=limit))
        assert manifest.target.max_context == (limit or 64)


class TestCheck:
    @pytest.mark.parametrize("precision", ["fp32", "int8"])
    def test_runs_on_the_finished_bundle_and_is_recorded(self, precision: Any, pair: Pair, tmp_path: Path) -> None:
        def check(bundle: Path, twin: Path | None) -> tuple[Quality, SelfCheck]:
            check_files(bundle, read_manifest(bundle), hashes=True)
            if precision == "fp32":
                assert twin is None
            else:
                assert twin is not None
                reference = read_manifest(twin)
                check_files(twin, reference, hashes=True)
                assert (reference.precision, reference.drafter.kind) == ("fp32", "none")
                assert reference.target.max_context == read_manifest(bundle).target.max_context
            assert not (tmp_path / "out").exists()
            return QUALITY, SELF_CHECK

        manifest = export_bundle(*pair, tmp_path / "out", ExportOptions(precision=precision), check=check)
        assert (manifest.quality, manifest.self_check) == (QUALITY, SELF_CHECK)
        assert read_manifest(tmp_path / "out") == manifest
        assert [p.name for p in tmp_path.iterdir()] == ["out"]


class TestRuntime:
    @pytest.mark.skipif(PORTABLE, reason="only portable graphs load here")
    def test_without_a_drafter_ordinary_graphs_need_no_more(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("dflash_ort.runtime.bundle.runtime_version", lambda: "1.21.0")
        options = ("--target", write_target(tmp_path / "target"), "--output", tmp_path / "out")
        with_drafter = call("export", *options, "--drafter", write_drafter(tmp_path / "drafter"))
        assert with_drafter.error == (
            "an ordinary drafter needs ONNX Runtime 1.32, this is 1.21.0; upgrade it, or export with --portable"
        )
        assert call("export", *options).code == 0
        manifest = read_manifest(tmp_path / "out")
        assert (manifest.oldest_onnxruntime, manifest.portable) == ("1.21", False)


class TestExistingOutput:
    def test_a_bundle_is_kept_without_force(self, pair: Pair, tmp_path: Path) -> None:
        export_bundle(*pair, tmp_path / "out", ExportOptions(name="old"))
        before = content(tmp_path)
        with pytest.raises(BundleError, match="exists; pass --force") as caught:
            export_bundle(*pair, tmp_path / "out", ExportOptions(name="new"))
        assert "\n" not in str(caught.value)
        assert content(tmp_path) == before

    def test_a_bundle_is_replaced_with_force(self, pair: Pair, tmp_path: Path) -> None:
        export_bundle(*pair, tmp_path / "out", ExportOptions(name="old"))
        (tmp_path / "out" / "stray").write_text("left by hand")
        manifest = export_bundle(pair[0], "none", tmp_path / "out", ExportOptions(name="new"), force=True)
        assert read_manifest(tmp_path / "out") == manifest
        assert manifest.name == "new"
        assert {p.name for p in (tmp_path / "out").iterdir()} == {*manifest.files, MANIFEST}
        assert [p.name for p in tmp_path.iterdir()] == ["out"]

    def test_an_empty_directory_is_taken(self, pair: Pair, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        export_bundle(*pair, tmp_path / "out", ExportOptions())
        read_manifest(tmp_path / "out")

    @pytest.mark.parametrize("force", [False, True])
    @pytest.mark.parametrize("kind", ["directory", "file"])
    def test_anything_else_is_never_touched(self, kind: str, force: bool, pair: Pair, tmp_path: Path) -> None:
        if kind == "directory":
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "thesis.txt").write_text("all of it")
        else:
            (tmp_path / "out").write_text("all of it")
        before = content(tmp_path)
        with pytest.raises(BundleError, match="not a bundle; choose another"):
            export_bundle(*pair, tmp_path / "out", ExportOptions(), force=force)
        assert content(tmp_path) == before

    def test_a_place_that_cannot_be_written(self, pair: Pair, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("not a directory")
        with pytest.raises(BundleError, match=r"cannot write beside .*; choose another") as caught:
            export_bundle(*pair, tmp_path / "file" / "out", ExportOptions())
        assert "\n" not in str(caught.value)


class HaltError(Exception):
    """Stands for whatever a self-check may raise."""


def failing_check(_monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    def check(bundle: Path, twin: Path | None) -> tuple[Quality, SelfCheck]:
        raise HaltError

    return {"check": check}


def interrupt(_monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    def progress(message: str, fraction: float | None = None) -> None:
        if "drafter" in message:
            raise KeyboardInterrupt

    return {"progress": progress}


def no_space(function: str, module: Any) -> Fault:
    """The disk is full when this function is called."""

    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def arrange(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        monkeypatch.setattr(module, function, full)
        return {}

    return arrange


def no_second_rename(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Fails between moving the old bundle away and moving the new one in."""
    rename = os.rename

    def failing(source: Path, target: Path) -> None:
        if source.name == "bundle":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    return {}


FAULTS: dict[str, tuple[Fault, type[BaseException], str]] = {
    "check": (failing_check, HaltError, ""),
    "interrupt": (interrupt, KeyboardInterrupt, ""),
    "full-at-embedding": (no_space("write_embedding", export), BundleError, "No space left on device; free some space"),
    "full-at-graph": (no_space("save", ir), BundleError, "No space left on device; free some space"),
    "full-at-vocabulary": (
        no_space("write_draft_vocabulary", export),
        BundleError,
        "No space left on device; free some space",
    ),
    "full-at-sync": (no_space("fsync", os), BundleError, "No space left on device; free some space"),
    "rename": (no_second_rename, BundleError, "Input/output error"),
}


class TestFailure:
    @pytest.mark.parametrize("name", FAULTS)
    @pytest.mark.parametrize("replacing", [False, True])
    def test_leaves_everything_as_it_was(
        self, replacing: bool, name: str, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if replacing:
            export_bundle(*pair, tmp_path / "out", ExportOptions(name="old"))
        before = content(tmp_path)
        fault, kind, words = FAULTS[name]
        with monkeypatch.context() as patch, pytest.raises(kind) as caught:
            export_bundle(*pair, tmp_path / "out", ExportOptions(), force=True, **fault(patch))
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)
        assert content(tmp_path) == before
        assert [p.name for p in tmp_path.iterdir()] == (["out"] if replacing else [])

    def test_a_disk_that_fills_up_anywhere(self, pair: Pair, tmp_path: Path) -> None:
        sizes = sorted(entry.size for entry in export_bundle(*pair, tmp_path / "ok", ExportOptions()).files.values())
        for limit in {0, *(size - short for size in sizes for short in (1, 100, 4000) if size > short)}:
            with largest_file(limit), pytest.raises(BundleError, match=r"cannot write the bundle .* free some space"):
                export_bundle(*pair, tmp_path / "out", ExportOptions())
            assert [p.name for p in tmp_path.iterdir()] == ["ok"]

    def test_a_lost_end_of_the_smaller_files_is_noticed_too(self, pair: Pair, tmp_path: Path) -> None:
        target, drafter = pair
        for short in (1, 100):
            with largest_file(4 * SHAPE.vocab * SHAPE.hidden - short), pytest.raises(OSError, match="large"):
                write_embedding(target, tmp_path)
            with largest_file(8 * 200 - short), pytest.raises(OSError, match="large"):
                write_draft_vocabulary(drafter, tmp_path, 200)


@contextmanager
def largest_file(limit: int) -> Iterator[None]:
    """Writing beyond this many bytes of a file fails in its middle, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
