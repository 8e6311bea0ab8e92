"""`dflash-ort calibrate`: measure what passes cost on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from dflash_ort.cli.console import ProgressBar, complain, warn
from dflash_ort.cli.options import backend_arguments, backend_options, find_bundle
from dflash_ort.controller.cost import CostTable

if TYPE_CHECKING:
    from dflash_ort.runtime.choice import Choice


@click.command()
@click.argument("bundle", required=False, metavar="[BUNDLE]")
@backend_options
@click.option(
    "--seconds", type=click.FloatRange(0.0, 600.0), default=20.0, show_default=True, help="About how long to measure."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def calibrate(bundle: str | None, seconds: float, as_json: bool, **options: Any) -> None:
    """Measure what passes cost here, and which provider is fastest.

    The adaptive controller does this by itself when it first meets a bundle on a machine, for some seconds; do it again
    when the machine has changed in a way that it cannot see, or was busy then.
    """
    from dflash_ort.runtime.choice import choose_provider
    from dflash_ort.runtime.engine import Engine
    from dflash_ort.runtime.session import Backend

    path = find_bundle(bundle)
    arguments = backend_arguments(options)
    choice: Choice | None = None
    with ProgressBar() as progress:
        if arguments["provider"] == "auto":
            backend = Backend.of(**arguments | {"provider": "cpu"})
            choice = choose_provider(path, backend, again=True, progress=progress)
            arguments["provider"] = choice.provider
        with Engine.load(path, **arguments, controller="off", allow_inexact=True, progress=progress) as engine:
            costs, warning = engine.calibrate(seconds)
    if warning:
        warn(warning)
    if as_json:
        click.echo(json.dumps(asdict(costs) | {"provider": engine.backend.provider}))
        return
    if choice is not None:
        complain(f"provider {choice.provider} ({choice.reason()})")
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
