"""Bundles that many tests share, made once per session: tiny ones at each precision, and the default pair."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from dflash_ort.exporter.export import ExportOptions, export_bundle, read_drafter_option, read_target
from dflash_ort.exporter.linear import Precision
from dflash_ort.models.presets import PRESETS, drafter_dir, fetch_target
from tests.settings import PORTABLE
from tests.tiny import TinyShape, write_drafter, write_target


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests neither read nor write the user's cache, except for the preset's download."""
    os.environ["DFLASH_ORT_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function from precision (and shape, and drafter options) to a tiny bundle's directory."""
    root = tmp_path_factory.mktemp("tiny")

    def make(
        precision: Precision,
        shape: TinyShape = TinyShape(),  # noqa: B008  frozen
        draft_vocab: int | None = None,
        block_size: int = 6,
        pad_attention: bool = True,
        extensions: tuple[str, ...] = (),
        portable: bool = False,
    ) -> Path:
        name = f"{precision}-{abs(hash((shape, draft_vocab, block_size, pad_attention, extensions, portable)))}"
        output = root / name
        if output.exists():
            return output
        target = write_target(root / f"{name}-target", shape)
        drafter = write_drafter(
            root / f"{name}-drafter", shape, draft_vocab=draft_vocab, block_size=block_size, extensions=extensions
        )
        options = ExportOptions(
            precision=precision,
            draft_precision=precision,
            pad_attention=pad_attention,
            portable=portable or PORTABLE,
        )
        export_bundle(read_target(target), read_drafter_option(str(drafter)), output, options)
        return output

    return make


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target of the default shape."""
    return write_target(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a module keeps its batched graphs."""
    return tmp_path_factory.mktemp("work")


_USER_CACHE = os.environ.get("DFLASH_ORT_CACHE")


@pytest.fixture(scope="session")
def default_target() -> Path:
    """The default preset's target file, from the user's real cache (downloaded once)."""
    own = os.environ.pop("DFLASH_ORT_CACHE", None)
    try:
        if _USER_CACHE is not None:
            os.environ["DFLASH_ORT_CACHE"] = _USER_CACHE
        return fetch_target(PRESETS["smollm2-135m"])
    finally:
        if own is not None:
            os.environ["DFLASH_ORT_CACHE"] = own


@pytest.fixture(scope="session")
def default_bundle(tmp_path_factory: pytest.TempPathFactory, default_target: Path) -> Callable[[Precision], Path]:
    """A function from precision to the default pair's bundle, exported without its self-check."""
    root = tmp_path_factory.mktemp("pair")

    @cache
    def make(precision: Precision = "fp32") -> Path:
        output = root / precision
        drafter = read_drafter_option(str(drafter_dir(PRESETS["smollm2-135m"])))
        export_bundle(
            read_target(default_target), drafter, output, ExportOptions(precision=precision, draft_precision=precision)
        )
        return output

    return make
