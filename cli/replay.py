"""`dflash-ort replay`: what policies would have done with recorded texts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from dflash_ort.cli.console import ProgressBar, complain, warn
from dflash_ort.cli.output_file import check_writable, write_whole
from dflash_ort.cli.sources import costs_option, warn_of_unread

DEFAULT_POLICIES = ("off", "fixed:1", "fixed:3", "adaptive")
REPORT_VERSION = 1
"""Version of the JSON object."""


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="TRACE|LOG...", type=click.Path(path_type=Path))
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME",
    help="A controller's name, DRAFTER@NAME, or a policy file; may be repeated.  [default: "
    + ", ".join(DEFAULT_POLICIES)
    + "]",
)
@click.option("--suites", metavar="LIST", help="Only these suites of the texts.  [default: all]")
@click.option(
    "--costs",
    "costs_file",
    type=click.Path(path_type=Path),
    help="What passes cost, as `calibrate --json` prints it on the machine in question.  [default: the trace's own]",
)
@click.option(
    "--log",
    "logs",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A round log of the trace's own texts: its runs are repeated with its own seconds, and compared.",
)
@click.option(
    "--json",
    "json_file",
    is_flag=False,
    flag_value="-",
    type=click.Path(allow_dash=True, path_type=Path),
    help="Write all results here; alone or as - to standard output, and nothing else goes there.",
)
def replay(files: tuple[Path, ...], policies: tuple[str, ...], **options: Any) -> None:
    """Replay policies over recorded texts.

    Since no policy changes a token, a TRACE (from `record`) gives each one's rounds and tokens exactly; its seconds
    are modelled by the costs of the machine it was recorded on, or of any other. From a round LOG alone, which knows
    only what was visited, all is an estimate, and says so.

    Beside them stand the best fixed length, the best one of each suite, and the bound that knows what will be accepted.
    """
    from dflash_ort.controller.judge import judge, kinds_for, report
    from dflash_ort.controller.policy import GENERIC_POLICY
    from dflash_ort.controller.replay_fast import clairvoyant_seconds
    from dflash_ort.runtime.policies import check_controller, named_controller
    from dflash_ort.runtime.repeat import repeat
    from dflash_ort.runtime.traces import read_sources

    labels = policies or DEFAULT_POLICIES
    for label in labels:
        check_controller(label.rpartition("@")[2])
    out = options["json_file"]
    if out is not None and str(out) != "-":
        check_writable(out)
    with ProgressBar() as progress:
        progress("reading")
        sources = read_sources(files, GENERIC_POLICY.priors)
        wanted = None if options["suites"] is None else [name.strip() for name in options["suites"].split(",")]
        texts = [text for text in sources.texts if text.num_anchors and (wanted is None or text.suite in wanted)]
        if not texts:
            suites = ", ".join(sorted({text.suite for text in sources.texts}))
            raise click.ClickException(f"no text is left to replay; the suites are {suites or 'none'}")
        table = costs_option(options["costs_file"], sources.costs)
        outcomes = {}
        for number, label in enumerate(labels):
            progress(f"replaying {label}", number / len(labels))
            drafter, _, name = label.rpartition("@")
            controller = named_controller(name, table, sources.policy)
            outcomes[label] = judge(controller, kinds_for(controller, drafter or "auto", texts), texts, table)
        result = report(texts, outcomes, table, clairvoyant_seconds(texts, table).tolist())
        if options["logs"]:
            logged = read_sources(options["logs"], GENERIC_POLICY.priors)
            sources.skipped.update(logged.skipped)
            result["logged"] = [asdict(run) for run in repeat(logged.logged, texts, table, sources.policy)]
    warn_of_unread(sources)
    if not sources.exact:
        warn("logs know only the anchors that were visited: what follows is an estimate")
    whole = {
        "version": REPORT_VERSION,
        "exact": sources.exact,
        "texts": len(texts),
        "anchors": sum(text.num_anchors for text in texts),
        "skipped": sources.skipped,
        "left_out": sources.left_out,
        "costs": asdict(table),
        **result,
    }
    if str(out) == "-":
        click.echo(json.dumps(whole))
        return
    if out is not None:
        write_whole(out, json.dumps(whole, indent=1) + "\n")
    _show(whole)


def _show(whole: Mapping[str, Any]) -> None:
    """Two tables: all texts together, and speed by suite."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    complain(f"{whole['texts']:,} texts, {whole['anchors']:,} anchors; seconds are modelled")
    table = Table("policy", "rounds", "tokens", "AL", "tokens/s", "times off", "95% interval", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    rows = [*whole["policies"], *_bests(whole)]
    for row in rows:
        low, high = row["speedup_interval"]
        length = row["acceptance_length"]
        table.add_row(
            row["policy"],
            f"{row['rounds']:,}",
            f"{row['committed']:,}",
            "-" if length is None else f"{length:.2f}",
            f"{row['tokens_per_second']:,.1f}",
            f"{row['speedup']:.3f}",
            f"{low:.3f} to {high:.3f}",
        )
    bound = whole["clairvoyant"]
    table.add_row("bound", "", "", "", f"{bound['tokens_per_second']:,.1f}", f"{bound['speedup']:.3f}", "")
    console.print(table)
    for run in whole.get("logged", ()):
        complain(
            f"logged {run['controller']}, {run['requests']} requests: {run['logged_rounds']:,} rounds, repeated "
            f"{'exactly' if run['same'] else 'otherwise, ' + format(run['rounds'], ',')}; "
            f"{run['logged_seconds']:.2f} s, modelled {run['modelled_seconds']:.2f} s"
        )
    suites = list(whole["policies"][0]["suites"])
    if len(suites) > 1:
        console.print(_by_suite(whole["policies"], suites, whole["best_fixed_by_suite"]["policies"]))


def _bests(whole: Mapping[str, Any]) -> list[dict[str, Any]]:
    best = whole["best_fixed"]
    each = whole["best_fixed_by_suite"]
    return [
        {**best, "policy": f"best fixed ({best['policy']})"},
        {**each, "policy": "best fixed of each suite"},
    ]


def _by_suite(policies: Sequence[Mapping[str, Any]], suites: Sequence[str], best: Mapping[str, str]) -> Any:
    from rich.table import Table

    table = Table("times off", *(p["policy"] for p in policies), "best fixed", box=None)
    for suite in suites:
        table.add_row(suite, *(f"{p['suites'][suite]['speedup']:.3f}" for p in policies), best[suite])
    return table
