"""`dflash-ort bench`: controllers, drafters and precisions side by side."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_ort import __version__
from dflash_ort.cli.console import ProgressBar, complain, warn
from dflash_ort.cli.options import backend_arguments, backend_options, find_bundle, template_arguments
from dflash_ort.cli.output_file import check_writable, write_whole
from dflash_ort.models.manifest import read_manifest
from dflash_ort.models.texts import BenchPrompt, bench_prompts

if TYPE_CHECKING:
    from dflash_ort.runtime.bench import Entry, Measurements
    from dflash_ort.runtime.engine import Engine

DEFAULT_CONTROLLERS = "off-unpadded,off,fixed:1,fixed:3,adaptive"
REPORT_VERSION = 1
"""Version of the JSON object."""
_POSITIVE = click.IntRange(min=1)
_SHARE = click.FloatRange(0.0, 1.0)
_HOW_MEASURED = ("max_new_tokens", "repeats", "interleave", "temperature", "seed", "ignore_eos")
"""Options that are `BenchSettings`' too, and settings of the report."""


@click.command()
@click.argument("bundles", nargs=-1, metavar="[BUNDLE]...")
@click.option(
    "--controllers",
    default=DEFAULT_CONTROLLERS,
    show_default=True,
    metavar="LIST",
    help="What to measure; DRAFTER@CONTROLLER names who drafts, as in ngram@fixed:3.",
)
@click.option(
    "--prompts",
    "prompts_file",
    type=click.Path(path_type=Path),
    help="JSON lines with turns (and suite, id, temperature).  [default: built in]",
)
@click.option("--suites", metavar="LIST", help="Only these suites of the prompts.  [default: all]")
@click.option("--per-suite", type=_POSITIVE, help="Only so many prompts of each suite.  [default: all]")
@click.option("--max-new-tokens", type=_POSITIVE, default=128, show_default=True, help="Longest answer, in tokens.")
@click.option("--repeats", type=_POSITIVE, default=3, show_default=True, help="Times each answers each prompt.")
@click.option(
    "--interleave", is_flag=True, help="Let all answers to a prompt grow together, round by round: less noise."
)
@click.option("--temperature", type=float, help="For all prompts; 0 is greedy.  [default: each prompt's own, or 0]")
@click.option("--seed", type=int, default=7, show_default=True, help="Of sampling, and of the intervals.")
@click.option("--ignore-eos", is_flag=True, help="Go on after the end-of-sequence token.")
@click.option("--template-arg", multiple=True, metavar="NAME=VALUE", help="For the chat template; may be repeated.")
@backend_options
@click.option("--no-calibrate", is_flag=True, help="Do not measure this machine, where that was not done yet.")
@click.option("--allow-inexact", is_flag=True, help="Measure where rows are not independent; the verdict says so.")
@click.option(
    "--json",
    "json_file",
    type=click.Path(allow_dash=True, path_type=Path),
    help="Write all results here; - is standard output, and the tables go to standard error.",
)
@click.option("--report", "report_file", type=click.Path(path_type=Path), help="Write a page with charts here (HTML).")
@click.option("--min-agreement", type=_SHARE, default=0.9, show_default=True, help="Quality gate: same top token.")
@click.option("--max-kl", type=float, default=0.05, show_default=True, help="Quality gate: mean KL from fp32, nats.")
@click.option("--max-ttft", type=float, default=1.05, show_default=True, help="Latency gate: first token, times off's.")
@click.option(
    "--min-speedup", type=float, default=1.0, show_default=True, help="Cost gate: speed, times off-unpadded's."
)
@click.option("--strict", is_flag=True, help="Exit with status 1 when a gate fails.")
def bench(bundles: tuple[str, ...], **options: Any) -> None:
    """Measure controllers side by side.

    Every controller answers every prompt with every BUNDLE (by default the one that `run` uses), one after the
    other, in an order that turns. Both plain baselines are always among them: off, whose tokens all others must
    give, and off-unpadded, the fastest plain decoding. All built-in prompts take an hour or more; for a
    quick look, --per-suite 1 --max-new-tokens 64.

    Shown are speeds with 95% intervals (a bootstrap over prompts), latencies, acceptance, and a verdict by four
    gates: correctness, quality, latency, and capacity and cost.
    """
    from dflash_ort.runtime.bench import BenchSettings, measure, parse_controllers

    entries = parse_controllers(options["controllers"])
    prompts = select_prompts(bench_prompts(options["prompts_file"]), options["suites"], options["per_suite"])
    settings = BenchSettings(
        **{name: options[name] for name in _HOW_MEASURED},
        template_arguments=template_arguments(options["template_arg"]),
    )
    for prompt in prompts:
        settings.params(prompt)
    for path in (options["json_file"], options["report_file"]):
        if path is not None and str(path) != "-":
            check_writable(path)
    paths = [find_bundle(bundle) for bundle in bundles or (None,)]
    with ProgressBar() as progress, _engines(paths, options, progress) as engines:
        described = _describe(engines, entries, settings.template_arguments)
        measured = measure(engines, entries, prompts, settings, progress)
    _finish(_report(measured, described, options), options)
    if measured.interrupted:
        raise KeyboardInterrupt


@contextmanager
def _engines(paths: Sequence[Path], options: Mapping[str, Any], progress: ProgressBar) -> Iterator[dict[str, Engine]]:
    """All bundles loaded at once, by labels that tell them apart."""
    from dflash_ort.runtime.engine import Engine

    with ExitStack() as stack:
        engines = {}
        for label, path in zip(_labels(paths), paths, strict=True):
            engine = Engine.load(
                path,
                **backend_arguments(options),
                controller="off",
                calibrate=not options["no_calibrate"],
                allow_inexact=options["allow_inexact"],
                progress=progress,
            )
            engines[label] = stack.enter_context(engine)
        yield engines


def _labels(paths: Sequence[Path]) -> list[str]:
    """Precisions, where they differ; else directory names, where those do; else numbers too."""
    by_precision = [read_manifest(path).precision for path in paths]
    by_name = [path.resolve().name for path in paths]
    for labels in (by_precision, by_name):
        if len(set(labels)) == len(labels):
            return labels
    return [f"{i}-{name}" for i, name in enumerate(by_name, start=1)]


def select_prompts(prompts: Sequence[BenchPrompt], suites: str | None, per_suite: int | None) -> list[BenchPrompt]:
    """The first so many prompts of each of these suites. Raises click.BadParameter for a suite that there is not."""
    known = list(dict.fromkeys(prompt.suite for prompt in prompts))
    wanted = known if suites is None else [name.strip() for name in suites.split(",")]
    for name in wanted:
        if name not in known:
            raise click.BadParameter(f"there is no suite '{name}'; expected {', '.join(known)}", param_hint="--suites")
    taken = dict.fromkeys(wanted, 0)
    selected = []
    for prompt in prompts:
        if prompt.suite in taken and (per_suite is None or taken[prompt.suite] < per_suite):
            taken[prompt.suite] += 1
            selected.append(prompt)
    return selected


def _describe(
    engines: Mapping[str, Engine], entries: Sequence[Entry], arguments: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """What the bundles are, before anything is measured; the costs are, here, where that was not done yet."""
    from dflash_ort.runtime.bench_summary import describe

    return [describe(label, engine, engine.costs(), arguments) for label, engine in engines.items()]


def _report(measured: Measurements, bundles: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that is known, as one object."""
    from dflash_ort.cli.bench_verdict import Bounds, verdict
    from dflash_ort.runtime.bench_summary import summarise

    report: dict[str, Any] = {
        "version": REPORT_VERSION,
        "bundles": list(bundles),
        "machine": _machine(bundles),
        "settings": {
            "controllers": [entry.label for entry in measured.entries],
            "prompts": "built in" if options["prompts_file"] is None else options["prompts_file"].name,
            **{name: options[name] for name in ("suites", "per_suite", *_HOW_MEASURED)},
            "template_arguments": dict(measured.settings.template_arguments),
        },
        **summarise(measured),
    }
    bounds = Bounds(**{name: options[name] for name in ("min_agreement", "max_kl", "max_ttft", "min_speedup")})
    report["gates"] = [asdict(gate) for gate in verdict(report, bounds)]
    report["settings"]["gates"] = asdict(bounds)
    return report


def _machine(bundles: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    from dflash_ort.runtime.machine import cpu_features, cpu_model
    from dflash_ort.runtime.session import runtime_version

    return {
        "cpu": cpu_model(),
        "features": list(cpu_features()),
        "cpus": os.cpu_count(),
        "threads": bundles[0]["threads"],
        "system": platform.system(),
        "python": platform.python_version(),
        "onnxruntime": runtime_version(),
        "dflash_ort": __version__,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _finish(report: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Show and write it; a failed gate ends the command only when asked to, and after everything is written."""
    from dflash_ort.cli.bench_report import page
    from dflash_ort.cli.bench_table import console_for, show

    to_standard_output = str(options["json_file"]) == "-"
    if report["interrupted"]:
        warn("stopped; what was measured before is shown")
    show(report, console_for(stderr=to_standard_output))
    if to_standard_output:
        click.echo(json.dumps(report))
    elif options["json_file"] is not None:
        write_whole(options["json_file"], json.dumps(report, indent=1) + "\n")
    if options["report_file"] is not None:
        write_whole(options["report_file"], page(report))
        complain(f"the report is in {options['report_file']}")
    failed = [gate for gate in report["gates"] if gate["state"] == "fail"]
    if options["strict"] and failed and not report["interrupted"]:
        names = ", ".join(f"{gate['gate']} ({gate['bundle']})" for gate in failed)
        raise click.ClickException(f"{len(failed)} of {len(report['gates'])} gates failed: {names}")
