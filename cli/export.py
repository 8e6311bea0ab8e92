"""`dflash-ort export`: checkpoints to a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_ort.cli.console import ProgressBar, complain, warn
from dflash_ort.cli.process import one_interrupt
from dflash_ort.models.manifest import POLICY, Manifest
from dflash_ort.models.paths import default_bundle
from dflash_ort.models.presets import PRESETS, drafter_dir, fetch_target

if TYPE_CHECKING:
    from dflash_ort.exporter.linear import Precision

DEFAULT_PRESET = "smollm2-135m"
PRECISION_CHOICES = ("fp32", "int8")
IMPLAUSIBLY_LOW = 0.05
"""Share of rounds in which the first draft is accepted: a drafter wired rightly is far above, one wired wrongly at
about zero.
"""


@click.command()
@click.option(
    "--preset",
    type=click.Choice(sorted(PRESETS)),
    help=f"A known pair of target and drafter.  [default: {DEFAULT_PRESET}]",
)
@click.option(
    "--target", type=click.Path(path_type=Path), help="A Llama-family Hugging Face directory, or a .gguf file."
)
@click.option("--drafter", help="A DFlash drafter's directory, 'ngram' or 'none'.  [default: the preset's, or ngram]")
@click.option(
    "--output", type=click.Path(path_type=Path), help="Where to write the bundle.  [default: where 'run' looks]"
)
@click.option(
    "--precision", type=click.Choice(PRECISION_CHOICES), default="fp32", show_default=True, help="The target's weights."
)
@click.option(
    "--draft-precision",
    type=click.Choice(PRECISION_CHOICES),
    default="int8",
    show_default=True,
    help="The drafter's weights; this cannot change the text.",
)
@click.option(
    "--max-context",
    type=click.IntRange(2),
    help="Most tokens of prompt and answer together.  [default: the checkpoint's]",
)
@click.option(
    "--portable",
    is_flag=True,
    help="Graphs for ONNX Runtime 1.21 and its oneDNN provider too; drafting is a little slower.",
)
@click.option("--force", is_flag=True, help="Replace a bundle that is already there.")
def export(
    preset: str | None,
    target: Path | None,
    drafter: str | None,
    output: Path | None,
    precision: Precision,
    draft_precision: Precision,
    max_context: int | None,
    portable: bool,
    force: bool,
) -> None:
    """Export a target and a drafter to a bundle.

    With no options, the default pair is fetched and exported to where `run` looks for it. Every export
    ends with a self-check: rows independent of their neighbours, quality against fp32, the drafter's acceptance.
    """
    if preset is not None and target is not None:
        raise click.UsageError("--preset and --target exclude each other")
    arguments: dict[str, Any] = {"preset": preset, "target": target and target.name}
    arguments |= {"drafter": drafter and Path(drafter).name, "precision": precision}
    arguments |= {"draft_precision": draft_precision, "max_context": max_context, "portable": portable}
    place = output or default_bundle()
    with one_interrupt(), ProgressBar() as progress:
        manifest = _export(preset, target, drafter, place, arguments, force, progress)
    _report(manifest, place)


def _export(
    preset: str | None,
    target: Path | None,
    drafter: str | None,
    output: Path,
    arguments: dict[str, Any],
    force: bool,
    progress: ProgressBar,
) -> Manifest:
    try:
        from dflash_ort.exporter.export import (
            ExportOptions,
            check_output,
            export_bundle,
            read_drafter_option,
            read_target,
        )
    except ImportError as error:
        raise click.ClickException(
            f"exporting needs more packages ({error.name}): pip install 'dflash-ort[export]'"
        ) from error
    from dflash_ort.runtime.bundle import check_exportable
    from dflash_ort.runtime.selfcheck import check_bundle

    check_output(output, force)
    known = PRESETS[preset or DEFAULT_PRESET] if target is None else None
    if drafter is None:
        drafter = "ngram" if known is None else str(drafter_dir(known))
    check_exportable("none" if drafter in ("ngram", "none") else "dflash", arguments["portable"])
    if known is not None:
        target = fetch_target(known, progress=progress)
    assert target is not None
    progress("reading the checkpoint")
    policy = Path(drafter) / POLICY
    options = ExportOptions(
        precision=arguments["precision"],
        draft_precision=arguments["draft_precision"],
        max_context=arguments["max_context"],
        portable=arguments["portable"],
        policy=policy if policy.is_file() else None,
        name=None if known is None else known.name,
        arguments=arguments,
    )
    return export_bundle(
        read_target(target),
        read_drafter_option(drafter),
        output,
        options,
        force=force,
        check=lambda bundle, twin: check_bundle(bundle, twin, progress=progress),
        progress=progress,
    )


def _report(manifest: Manifest, output: Path) -> None:
    """What was made and what the self-check found, on standard error."""
    size = sum(entry.size for entry in manifest.files.values())
    drafter = manifest.drafter.kind + (f" ({manifest.draft_precision})" if manifest.draft_precision else "")
    complain(f"wrote {output}: {manifest.name}, {manifest.precision}, drafter {drafter}, {size / 1e6:,.1f} MB")
    quality, check = manifest.quality, manifest.self_check
    if quality is not None and manifest.precision != "fp32":
        complain(
            f"quality against fp32 over {quality.rows:,} rows: same top token {quality.top1_agreement:.1%}, "
            f"mean KL {quality.mean_kl:.3f}, "
            f"perplexity {quality.perplexity:.2f} (fp32 {quality.reference_perplexity:.2f})"
        )
    if check is None:
        return
    if not check.rows_independent:
        warn("rows are not independent of their neighbours on this machine; 'run' will refuse without --allow-inexact")
    if check.drafter is not None:
        survival = ", ".join(f"{s:.2f}" for s in check.drafter.survival)
        complain(f"drafter: acceptance length {check.drafter.acceptance_length:.2f}, survival {survival}")
        if check.drafter.survival[0] < IMPLAUSIBLY_LOW:
            warn(
                f"only {check.drafter.survival[0]:.1%} of first drafts are accepted "
                f"over {check.drafter.verify_rounds:,} rounds: was this drafter trained for this target?"
            )
