"""`dflash-ort distill`: a drafter of one's own for a target."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_ort.cli.console import ProgressBar, complain, warn
from dflash_ort.cli.export import PRECISION_CHOICES
from dflash_ort.cli.process import one_interrupt
from dflash_ort.models.presets import PRESETS

if TYPE_CHECKING:
    from dflash_ort.distill.pipeline import Distilled, Order

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[smh])+")
_WEAK = 1.2
"""Acceptance length below which a drafter hardly ever pays for itself."""


def _duration(_ctx: click.Context, _param: click.Parameter, value: str) -> float:
    """Seconds from text such as 90s, 30m, 2h or 1h30m."""
    if not _DURATION.fullmatch(value):
        raise click.BadParameter(f"'{value}' is not a duration, such as 90s, 30m or 2h")
    seconds = sum(float(number) * _UNITS[unit] for number, unit in re.findall(r"([\d.]+)([smh])", value))
    if seconds <= 0:
        raise click.BadParameter(f"'{value}' is no time at all")
    return seconds


def _layers(_ctx: click.Context, _param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Different layers from text such as 1,9,17, in their order."""
    if value is None:
        return None
    if not re.fullmatch(r"\d+(,\d+)*", value):
        raise click.BadParameter(f"'{value}' is not a list of layers, such as 1,9,17")
    return tuple(sorted({int(layer) for layer in value.split(",")}))


@click.command()
@click.argument("target")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Where to write the drafter.")
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    help="JSON lines with 'turns', 'prompt' or 'text', or a prompt a line.  [default: the target writes them itself]",
)
@click.option(
    "--budget",
    callback=_duration,
    default="2h",
    show_default=True,
    metavar="TIME",
    help="For data and training together, as in 90s, 30m, 2h.",
)
@click.option(
    "--data-share",
    type=click.FloatRange(0.0, 0.95),
    default=0.4,
    show_default=True,
    help="Of the budget, for making data.",
)
@click.option("--no-data", is_flag=True, help="Make no data: train on what the working directory has.")
@click.option(
    "--work", type=click.Path(path_type=Path), help="Where to keep data and training state.  [default: OUTPUT.work]"
)
@click.option(
    "--cache-gb",
    type=click.FloatRange(0.0),
    default=8.0,
    show_default=True,
    help="Disk for hidden states; what does not fit is computed again and again.",
)
@click.option("--bundle", type=click.Path(path_type=Path), help="Export a bundle of target and drafter to here, too.")
@click.option(
    "--precision",
    type=click.Choice(PRECISION_CHOICES),
    default="fp32",
    show_default=True,
    help="The target's weights, for the data and in the bundle.",
)
@click.option(
    "--init",
    type=click.Path(path_type=Path),
    metavar="DRAFTER",
    help="Go on from this drafter, the shipped one for instance; its shape is kept, its vocabulary chosen anew.",
)
@click.option("--depth", type=click.IntRange(1), help="Layers of the drafter.  [default: 3]")
@click.option("--block-size", type=click.IntRange(1), help="Slots of a block, the last token's too.  [default: 5]")
@click.option("--vocabulary", type=click.IntRange(1), help="Tokens it can draft, the commonest.  [default: 8192]")
@click.option(
    "--taps",
    callback=_layers,
    metavar="LAYERS",
    help="Target layers that it sees, as in 1,9,17.  [default: six]",
)
@click.option("--plain", is_flag=True, help="Keep to z-lab's format: other programs can read it, and it learns slower.")
@click.option("--learning-rate", type=click.FloatRange(0.0, min_open=True), help="AdamW's.  [default: 0.002]")
@click.option(
    "--muon",
    type=click.FloatRange(0.0, min_open=True),
    metavar="RATE",
    help="Train matrices with Muon, at this rate.",
)
@click.option("--max-context", type=click.IntRange(32), help="Longest dialogue, in tokens.  [default: 1024]")
@click.option(
    "--max-new-tokens", type=click.IntRange(2), default=256, show_default=True, help="Longest answer, in tokens."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of data and training.")
@click.option("--threads", type=click.IntRange(1), help="Threads to use.  [default: the physical cores]")
@click.option("--device", default="cpu", show_default=True, help="Where torch trains: cpu, or cuda.")
@click.option("--force", is_flag=True, help="Replace an output that is already there.")
def distill(target: str, output: Path, **options: Any) -> None:
    """Train a drafter for TARGET on this machine.

    TARGET is a preset's name, a Llama-family Hugging Face directory or a .gguf file. It answers your prompts, or
    prompts it writes itself, and a DFlash drafter learns to guess those answers: one that has seen your own traffic
    guesses it best. Interrupted, the same command goes on where it was.
    """
    if options["no_data"]:
        options["data_share"] = 0.0
    try:
        from dflash_ort.distill.pipeline import Order
        from dflash_ort.distill.pipeline import distill as run
    except ImportError as error:
        raise click.ClickException(f"{error.name} is missing: pip install 'dflash-ort[distill]'") from error
    order = Order(
        target=target,
        output=output,
        work=options["work"] or output.with_name(f"{output.name}.work"),
        cache_bytes=int(options["cache_gb"] * 1e9),
        **{name: value for name, value in options.items() if name not in ("work", "cache_gb", "no_data")},
    )
    try:
        with one_interrupt(), ProgressBar() as progress:
            distilled = run(order, progress=progress)
    except KeyboardInterrupt:
        complain(f"what was done is in '{order.work}'; the same command goes on from there")
        raise
    _report(distilled, order)


def _report(distilled: Distilled, order: Order) -> None:
    """What was made and how good it is, on standard error."""
    trained = distilled.trained
    acceptance = trained.acceptance
    early = ", ended early" if trained.ended_early else ""
    complain(
        f"trained on {trained.dialogues:,} dialogues: {trained.steps:,} steps, {trained.rows:,} block rows in "
        f"{trained.seconds / 60:,.1f} min ({trained.rows / max(trained.seconds, 1e-9):,.0f} a second){early}"
    )
    survival = ", ".join(f"{share:.2f}" for share in acceptance.survival)
    complain(
        f"held out: acceptance length {acceptance.acceptance_length:.2f} "
        f"(before training {trained.curve[0].acceptance_length:.2f}), survival {survival}, "
        f"over {acceptance.rounds:,} rounds"
    )
    if len(acceptance.suites) > 1:
        complain("by suite: " + ", ".join(f"{name} {length:.2f}" for name, length in acceptance.suites.items()))
    if acceptance.acceptance_length < _WEAK:
        warn("this drafter is weak: more data and a longer --budget help, and so do prompts like those it will meet")
    complain(f"wrote {order.output}" + (f" and the bundle {order.bundle}" if order.bundle is not None else ""))
    if order.bundle is None:
        option = "--preset" if order.target in PRESETS else "--target"
        complain(f"export it with 'dflash-ort export {option} {order.target} --drafter {order.output}'")
