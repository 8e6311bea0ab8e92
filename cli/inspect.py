"""`dflash-ort inspect`: what a bundle is."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_ort.cli.console import ProgressBar
from dflash_ort.cli.options import backend_arguments, backend_options, changed_backend_options, find_bundle
from dflash_ort.models.manifest import Manifest, check_files, read_manifest

if TYPE_CHECKING:
    from dflash_ort.runtime.placement import Share


@click.command()
@click.argument("bundle", required=False, metavar="[BUNDLE]")
@click.option(
    "--placement",
    "with_placement",
    is_flag=True,
    help="Run passes, and show who computed them: kernels and time by provider, as the options after this say.",
)
@backend_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect(bundle: str | None, with_placement: bool, as_json: bool, **options: Any) -> None:
    """Show what a bundle is, and check its files.

    BUNDLE is a directory made by `export`, by default the one that `run` uses. Shown are its
    sizes, precision, drafter and quality, and its graphs' inputs and outputs; every file's hash is checked.
    """
    if not with_placement and (changed := changed_backend_options()):
        raise click.UsageError(f"{changed[0]} says nothing without --placement")
    path = find_bundle(bundle)
    manifest = read_manifest(path)
    check_files(path, manifest, hashes=True)
    from dflash_ort.runtime.bundle import graph_signatures

    graphs = graph_signatures(path, manifest)
    shares = _placement(path, manifest, options) if with_placement else None
    described = {
        "path": str(path.resolve()),
        "name": manifest.name,
        "precision": manifest.precision,
        "draft_precision": manifest.draft_precision,
        "size_bytes": sum(entry.size for entry in manifest.files.values()),
        "target": asdict(manifest.target),
        "drafter": asdict(manifest.drafter),
        "quality": asdict(manifest.quality) if manifest.quality else None,
        "self_check": asdict(manifest.self_check) if manifest.self_check else None,
        "files": {name: asdict(entry) for name, entry in manifest.files.items()},
        "graphs": graphs,
        **({"placement": {g: [asdict(share) for share in found] for g, found in shares.items()}} if shares else {}),
        "provenance": manifest.provenance,
        "format_version": manifest.format_version,
    }
    click.echo(json.dumps(described, indent=2) if as_json else _text(path, manifest, graphs))
    if shares and not as_json:
        click.echo("\n".join(_placement_lines(shares)))


def _placement(path: Path, manifest: Manifest, options: Mapping[str, Any]) -> dict[str, list[Share]]:
    from dflash_ort.runtime.choice import resolve_backend
    from dflash_ort.runtime.placement import placement

    with ProgressBar() as progress:
        backend = resolve_backend(path, progress=progress, **backend_arguments(options))
        progress("running passes")
        return placement(path, manifest, backend)


def _placement_lines(shares: Mapping[str, list[Share]]) -> Iterator[str]:
    for graph, found in shares.items():
        total = sum(share.seconds for share in found) or 1.0  # a tiny graph's kernels round to nothing
        yield f"{graph} was computed by"
        for share in found:
            kinds = ", ".join(f"{kind} {count}" for kind, count in share.operators.items())
            time = f"{share.seconds / total:.0%} of the time"
            yield f"           {share.provider}: {time}, {share.kernels} kernels ({kinds})"


def _text(path: Path, manifest: Manifest, graphs: dict[str, Any]) -> str:
    target, drafter, quality, check = manifest.target, manifest.drafter, manifest.quality, manifest.self_check
    lines = [
        f"bundle     {path}",
        f"target     {manifest.name} ({target.architecture}), {manifest.precision}",
        f"           {target.num_layers} layers, hidden {target.hidden_size}, {target.num_heads} heads over "
        f"{target.num_kv_heads}, vocabulary {target.vocab_size:,}, context {target.max_context:,}",
        f"drafter    {drafter.kind}"
        + (
            f", {manifest.draft_precision}, {drafter.num_layers} layers, block {drafter.block_size} "
            f"({drafter.max_draft} drafts), vocabulary {drafter.draft_vocab_size:,}, "
            f"taps after layers {', '.join(map(str, target.tapped_layers))}"
            if drafter.kind == "dflash"
            else ""
        ),
    ]
    if quality:
        lines.append(
            f"quality    same top token as fp32 {quality.top1_agreement:.1%}, mean KL {quality.mean_kl:.4f}, "
            f"perplexity {quality.perplexity:.2f} (fp32 {quality.reference_perplexity:.2f}), {quality.rows:,} rows"
        )
    if check:
        lines.append(
            f"exact      {'yes' if check.rows_independent else 'NO'}, on {check.cpu}, ONNX Runtime {check.onnxruntime}"
        )
        if check.drafter:
            survival = ", ".join(f"{s:.2f}" for s in check.drafter.survival)
            lines.append(f"acceptance length {check.drafter.acceptance_length:.2f}, survival {survival}")
    lines += ["files      " + f"{sum(e.size for e in manifest.files.values()) / 1e6:,.1f} MB"]
    lines += [f"           {entry.size:>13,}  {name}" for name, entry in manifest.files.items()]
    for graph, sides in graphs.items():
        for side, values in sides.items():
            lines.append(f"{graph} {side}")
            lines += [f"           {_signature(name, value)}" for name, value in _without_layers(values).items()]
    return "\n".join(lines)


def _signature(name: str, value: dict[str, Any]) -> str:
    return f"{name}: {value['type']} [{', '.join(map(str, value['shape']))}]"


def _without_layers(values: dict[str, Any]) -> dict[str, Any]:
    """Key and value buffers of the first layer stand for all."""
    return {
        (name.replace(".0", ".*") if name.endswith(".0") else name): value
        for name, value in values.items()
        if not name.rpartition(".")[2].isdigit() or name.endswith(".0")
    }
