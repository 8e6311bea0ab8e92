"""`dflash-ort doctor`: what this machine is, and what would be used on it and why."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Sequence
from typing import Any

import click

from dflash_ort import __version__
from dflash_ort.cli.console import ProgressBar
from dflash_ort.defaults import DEFAULT_CONTROLLER, PROVIDERS
from dflash_ort.errors import DFlashError, InexactError
from dflash_ort.models.manifest import MANIFEST
from dflash_ort.models.paths import cache_dir, default_bundle


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(as_json: bool) -> None:
    """Show what this machine is, and what would be used on it.

    The CPU, ONNX Runtime, whether the default bundle is exact here, and the reasons for what would be used.
    """
    with ProgressBar() as progress:
        report = _examine(progress)
    click.echo(
        json.dumps(report, indent=2)
        if as_json
        else "\n".join(f"{key:<18} {_plain(value)}" for key, value in report.items())
    )


def _examine(progress: ProgressBar) -> dict[str, Any]:
    from dflash_ort.runtime import machine
    from dflash_ort.runtime.providers import how_to_get, installed_providers
    from dflash_ort.runtime.session import Backend, default_threads, runtime_version

    threads, installed = default_threads(), installed_providers()
    missing = [
        name
        for name in ("onnx", "onnx_ir", "gguf", "safetensors", "ml_dtypes")
        if importlib.util.find_spec(name) is None
    ]
    return {
        "dflash-ort": __version__,
        "cpu": machine.cpu_model(),
        "cpu features": list(machine.cpu_features()),
        "logical cpus": os.cpu_count(),
        "threads": f"{threads} (the physical cores this process may use)",
        "onnxruntime": runtime_version(),
        "providers": [name if name in installed else f"{name} is not here ({how_to_get(name)})" for name in PROVIDERS],
        **_onednn(installed),
        "session options": ", ".join(f"{name}={value}" for name, value in Backend.of().session_options().items()),
        "telemetry": "off"
        if os.environ.get("ORT_DISABLE_TELEMETRY") == "1"
        else "ON: ORT_DISABLE_TELEMETRY is set to another value",
        "export": "ready" if not missing else f"needs pip install 'dflash-ort[export]' ({', '.join(missing)} missing)",
        "cache": str(cache_dir()),
        **_default_bundle(progress),
    }


def _onednn(installed: Sequence[str]) -> dict[str, str]:
    """What oneDNN computes with here, in its own words."""
    if "dnnl" not in installed:
        return {}
    from dflash_ort.runtime.onednn import ask_onednn

    said = {mode: ask_onednn(fpmath=mode) for mode in ("strict", "bf16")}
    kernels = [f"{mode}: {found.kernel or 'it does not say'}" for mode, found in said.items() if found is not None]
    first = next((found for found in said.values() if found is not None), None)
    if first is None:
        return {"onednn": "does not say what it computes with"}
    return {"onednn": f"{first.version}, {first.isa}; fp32 matrix products run as {', '.join(kernels)}"}


def _default_bundle(progress: ProgressBar) -> dict[str, str]:
    """Exactness of the default bundle here, and what `run` would do."""
    path = default_bundle()
    if not (path / MANIFEST).is_file():
        return {"default bundle": "none yet; make it with 'dflash-ort export'"}
    from dflash_ort.runtime.choice import choose_provider
    from dflash_ort.runtime.engine import Engine
    from dflash_ort.runtime.session import Backend

    try:
        reason = choose_provider(path, Backend.of(), progress=progress).reason()
        with Engine.load(path, progress=progress) as engine:
            manifest = engine.manifest
            return {
                "default bundle": f"{path} ({manifest.name}, {manifest.precision})",
                "exact here": "yes: every row has the same bits alone and among others"
                + ("" if engine.row_floor == 1 else ", with two rows in every pass"),
                "would use": f"provider {engine.backend.provider} ({reason}), drafter {manifest.drafter.kind} "
                f"(the bundle's), controller {DEFAULT_CONTROLLER}",
            }
    except InexactError as error:
        return {"default bundle": str(path), "exact here": f"NO: {error}"}
    except DFlashError as error:
        return {"default bundle": f"{path} cannot be used: {error}"}


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
