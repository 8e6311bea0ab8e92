"""`dflash-ort calibrate`: measure what passes cost on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from dflash_ort.cli.console import ProgressBar, complain, warn
from dflash_ort.cli.options import find_bundle
from dflash_ort.controller.cost import CostTable


@click.command()
@click.argument("bundle", required=False, metavar="[BUNDLE]")
@click.option("--threads", type=int, help="Threads of each graph.  [default: the physical cores]")
@click.option(
    "--seconds", type=click.FloatRange(0.0, 600.0), default=20.0, show_default=True, help="About how long to measure."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def calibrate(bundle: str | None, threads: int | None, seconds: float, as_json: bool) -> None:
    """Measure what passes cost here.

    The adaptive controller does this by itself when it first meets a bundle on a machine, for some seconds; do it again
    when the machine has changed in a way that it cannot see, or was busy then.
    """
    from dflash_ort.runtime.engine import Engine

    with (
        ProgressBar() as progress,
        Engine.load(
            find_bundle(bundle), threads=threads, controller="off", allow_inexact=True, progress=progress
        ) as engine,
    ):
        costs, warning = engine.calibrate(seconds)
    if warning:
        warn(warning)
    if as_json:
        click.echo(json.dumps(asdict(costs)))
    else:
        _show(costs)


def _show(costs: CostTable) -> None:
    """The table, in milliseconds and against one row."""
    complain("milliseconds of a target pass (times one row's), by rows and context")
    click.echo("rows    " + "".join(f"{context:>18,}" for context in costs.contexts))
    for rows, line in zip(costs.rows, costs.verify, strict=True):
        cells = (f"{s * 1e3:.2f} ({s / first:.2f})" for s, first in zip(line, costs.verify[0], strict=True))
        click.echo(f"{rows:>4}    " + "".join(f"{cell:>18}" for cell in cells))
    if any(costs.draft):
        click.echo("draft   " + "".join(f"{s * 1e3:>18.2f}" for s in costs.draft))
        click.echo(f"inject  {costs.inject_row * 1e3:>18.4f} for each row beyond the first")
        click.echo(
            f"after   {costs.after_draft * 1e3:>18.2f} that a pass takes longer when a block was drafted just before"
        )
