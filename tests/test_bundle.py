"""A bundle says what it is and is refused when it is anything else; its graphs are made of the documented parts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest

from dflash_ort.errors import BundleError
from dflash_ort.models import graph_names as names
from dflash_ort.models.manifest import (
    DRAFTER_GRAPH,
    FORMAT_VERSION,
    MANIFEST,
    TARGET_GRAPH,
    DrafterCheck,
    FileEntry,
    Quality,
    SelfCheck,
    check_files,
    read_manifest,
)

Json = dict[str, Any]

QUALITY = Quality(0.01, 0.95, 21.5, 21.0, 100, "ab" * 32)
SELF_CHECK = SelfCheck(True, "a cpu", "1.32.0", DrafterCheck(2.5, (0.75, 0.5), 40))


@pytest.fixture
def bundle(tiny_bundle: Callable[..., Path], tmp_path: Path) -> Path:
    """A bundle of its own to damage."""
    return Path(shutil.copytree(tiny_bundle("fp32"), tmp_path / "bundle"))


def edit(bundle: Path, change: Callable[[Json], object]) -> None:
    raw = json.loads((bundle / MANIFEST).read_text())
    change(raw)
    (bundle / MANIFEST).write_text(json.dumps(raw))


def refuse(bundle: Path, *words: str, hashes: bool = False) -> None:
    with pytest.raises(BundleError) as caught:
        check_files(bundle, read_manifest(bundle), hashes=hashes)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


class TestManifest:
    def test_round_trip(self, tmp_path: Path, bundle: Path) -> None:
        written = replace(read_manifest(bundle), quality=QUALITY, self_check=SELF_CHECK, provenance={"a": [1, None]})
        (tmp_path / MANIFEST).write_text(written.to_json())
        assert read_manifest(tmp_path) == written

    def test_identity_follows_the_content_of_files(self, bundle: Path) -> None:
        manifest = read_manifest(bundle)
        other = {**manifest.files, TARGET_GRAPH: FileEntry(manifest.files[TARGET_GRAPH].size, "0" * 64)}
        renamed = {("x" if name == TARGET_GRAPH else name): entry for name, entry in manifest.files.items()}
        identities = {replace(manifest, files=files).identity for files in (manifest.files, other, renamed, {})}
        assert len(identities) == 4
        assert replace(manifest, name="another", quality=QUALITY).identity == manifest.identity
        backwards = dict(reversed(manifest.files.items()))
        assert replace(manifest, files=backwards).identity == manifest.identity

    def test_bundles_from_before_the_extensions_are_read(self, bundle: Path) -> None:
        written = read_manifest(bundle)
        edit(bundle, lambda m: m["drafter"].pop("next_token"))
        assert read_manifest(bundle) == written
        assert not written.drafter.next_token

    DAMAGES: dict[str, tuple[Callable[[Json], object], tuple[str, ...]]] = {  # noqa: RUF012
        "unknown-key": (lambda m: m.update(extra=1), ("unknown key 'extra'", "Manifest")),
        "unknown-nested-key": (lambda m: m["target"].update(extra=1), ("unknown key 'extra'", "ModelSpec")),
        "unknown-file-key": (lambda m: m["files"][TARGET_GRAPH].update(extra=1), ("unknown key 'extra'", TARGET_GRAPH)),
        "no-key": (lambda m: m.pop("precision"), ("no key 'precision'", "Manifest")),
        "no-nested-key": (lambda m: m["drafter"].pop("block_size"), ("no key 'block_size'", "DrafterSpec")),
        "no-optional-key": (lambda m: m.pop("quality"), ("no key 'quality'",)),
        "text-for-number": (lambda m: m["target"].update(num_layers="3"), ("num_layers", "'3'")),
        "fraction": (lambda m: m["target"].update(num_layers=3.0), ("num_layers", "3.0")),
        "flag-for-number": (lambda m: m["target"].update(num_layers=True), ("num_layers", "True")),
        "null": (lambda m: m.update(name=None), ("name", "None")),
        "number-for-list": (lambda m: m["target"].update(eos_token_ids=2), ("eos_token_ids", "2")),
        "text-in-list": (lambda m: m["target"].update(eos_token_ids=["2"]), ("eos_token_ids", "'2'")),
        "list-for-object": (lambda m: m.update(target=[]), ("target", "ModelSpec")),
        "list-for-files": (lambda m: m.update(files=[]), ("files",)),
        "drafter-kind": (lambda m: m["drafter"].update(kind="eagle"), ("kind", "'eagle'")),
        "newer": (lambda m: m.update(format_version=FORMAT_VERSION + 1, extra=1), ("upgrade dflash-ort",)),
        "version-kind": (lambda m: m.update(format_version="1"), ("format_version", "'1'")),
        "version-zero": (lambda m: m.update(format_version=0), ("format_version", "0")),
        "no-version": (lambda m: m.pop("format_version"), ("format_version",)),
        "path-above": (lambda m: m["files"].update({"../x": m["files"][TARGET_GRAPH]}), ("../x", "not inside")),
        "path-below": (lambda m: m["files"].update({"a/b": m["files"][TARGET_GRAPH]}), ("a/b", "not inside")),
        "path-absolute": (lambda m: m["files"].update({"/etc/hosts": m["files"][TARGET_GRAPH]}), ("not inside",)),
        "path-parent": (lambda m: m["files"].update({"..": m["files"][TARGET_GRAPH]}), ("'..'",)),
    }

    @pytest.mark.parametrize("name", DAMAGES)
    def test_anything_else_is_refused_by_name(self, name: str, bundle: Path) -> None:
        check_files(bundle, read_manifest(bundle), hashes=True)
        damage, words = self.DAMAGES[name]
        (bundle.parent / "x").write_bytes((bundle / TARGET_GRAPH).read_bytes())
        edit(bundle, damage)
        refuse(bundle, *words)

    @pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b'"text"', b"null"])
    def test_not_a_json_object(self, content: bytes, bundle: Path) -> None:
        (bundle / MANIFEST).write_bytes(content)
        refuse(bundle, MANIFEST, "export the bundle again")

    @pytest.mark.parametrize("name", ["nowhere", "empty", "text"])
    def test_not_a_bundle(self, name: str, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "text").write_text("hello")
        refuse(tmp_path / name, name, "is not a bundle", "dflash-ort export")


class TestFiles:
    @pytest.mark.parametrize("name", [TARGET_GRAPH, f"{TARGET_GRAPH}.data", "tokenizer.json", DRAFTER_GRAPH])
    def test_a_file_that_is_there_but_not_listed(self, name: str, bundle: Path) -> None:
        edit(bundle, lambda m: m["files"].pop(name))
        refuse(bundle, name, "does not list")

    def test_a_missing_file(self, bundle: Path) -> None:
        for name in read_manifest(bundle).files:
            (bundle / name).rename(bundle / "aside")
            refuse(bundle, name, "no file")
            (bundle / "aside").rename(bundle / name)

    def test_another_size(self, bundle: Path) -> None:
        with (bundle / names.EMBEDDING_FILE).open("ab") as file:
            file.write(b"x")
        refuse(bundle, names.EMBEDDING_FILE, "69,633 bytes", "69,632")

    def test_another_content_of_the_same_size(self, bundle: Path) -> None:
        content = bytearray((bundle / names.EMBEDDING_FILE).read_bytes())
        content[1000] ^= 1
        (bundle / names.EMBEDDING_FILE).write_bytes(content)
        check_files(bundle, read_manifest(bundle))
        refuse(bundle, names.EMBEDDING_FILE, "SHA-256", hashes=True)


class TestGraphs:
    @pytest.mark.parametrize("precision", ["fp32", "int8"])
    def test_operators_and_versions_are_the_documented_ones(
        self, precision: str, tiny_bundle: Callable[..., Path]
    ) -> None:
        for graph in (TARGET_GRAPH, DRAFTER_GRAPH):
            onnx.checker.check_model(tiny_bundle(precision) / graph)
            model = ir.load(tiny_bundle(precision) / graph)
            assert model.ir_version == 10
            assert model.graph.opset_imports == {"": 21, "com.microsoft": 1}
            found = {node.op_type for node in model.graph if node.domain == "com.microsoft"}
            linear = {"MatMulIntegerToFloat"} if precision == "int8" else set()
            assert found == {"GroupQueryAttention", "SkipSimplifiedLayerNormalization", "QuickGelu"} | linear
            assert ("MatMul" in {node.op_type for node in model.graph}) == (precision == "fp32")
            assert not {"DynamicQuantizeLinear", "Loop", "If"} & {node.op_type for node in model.graph}

    def test_inputs_and_outputs_are_those_of_the_table(self, tiny_bundle: Callable[..., Path]) -> None:
        def caches(kind: Callable[[str, int], str], layers: int) -> set[str]:
            return {kind(part, layer) for part in ("key", "value") for layer in range(layers)}

        lengths = {names.LAST_KEY, names.TOTAL_LENGTH}
        target, drafter = (ir.load(tiny_bundle("fp32") / graph).graph for graph in (TARGET_GRAPH, DRAFTER_GRAPH))
        rows = {names.INPUT_IDS, names.QUERY_ROWS, names.PACKED_ROWS, names.LOGITS_ROWS}
        assert {v.name for v in target.inputs} == rows | lengths | caches(names.past, 3)
        assert {v.name for v in target.outputs} == {names.LOGITS, names.GREEDY, names.HIDDEN} | caches(names.present, 3)
        assert {v.name for v in drafter.inputs} == {names.INJECTED, names.BLOCK_IDS} | lengths | caches(names.past, 2)
        answers = {names.DRAFT_IDS, names.DRAFT_LOGPROBS, names.DRAFT_LOGITS}
        assert {v.name for v in drafter.outputs} == answers | caches(names.present, 2)

    def test_both_graphs_map_one_embedding_file(self, tiny_bundle: Callable[..., Path]) -> None:
        for graph in (TARGET_GRAPH, DRAFTER_GRAPH):
            stored = ir.load(tiny_bundle("fp32") / graph).graph.initializers["embed_tokens.weight"].const_value
            assert isinstance(stored, ir.ExternalTensor)
            assert (stored.location, stored.offset, stored.length) == (names.EMBEDDING_FILE, 0, 4 * 272 * 64)
