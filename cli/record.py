"""`dflash-ort record`: what every drafter would propose at every place of answers, for policies to be judged by."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_ort.cli.bench import select_prompts
from dflash_ort.cli.console import ProgressBar, complain
from dflash_ort.cli.options import backend_arguments, backend_options, find_bundle, template_arguments
from dflash_ort.cli.output_file import check_writable
from dflash_ort.errors import LogError
from dflash_ort.jsonlines import JsonLines, JsonLinesWriter
from dflash_ort.models.texts import bench_prompts

if TYPE_CHECKING:
    from dflash_ort.runtime.engine import Engine

_POSITIVE = click.IntRange(min=1)


@click.command()
@click.argument("bundle", required=False)
@click.option(
    "--prompts",
    "prompts_file",
    type=click.Path(path_type=Path),
    help="JSON lines with turns (and suite, id, temperature).  [default: built in]",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help="The trace, JSON lines; a name that ends in .zst is compressed.",
)
@click.option("--suites", metavar="LIST", help="Only these suites of the prompts.  [default: all]")
@click.option("--per-suite", type=_POSITIVE, help="Only so many prompts of each suite.  [default: all]")
@click.option("--max-new-tokens", type=_POSITIVE, default=128, show_default=True, help="Longest answer, in tokens.")
@click.option("--temperature", type=float, help="For all prompts; 0 is greedy.  [default: each prompt's own, or 0]")
@click.option("--seed", type=int, default=7, show_default=True, help="Of sampling.")
@click.option("--ignore-eos", is_flag=True, help="Go on after the end-of-sequence token.")
@click.option("--template-arg", multiple=True, metavar="NAME=VALUE", help="For the chat template; may be repeated.")
@click.option("--text", "with_text", is_flag=True, help="Write prompts and answers too, as token ids.")
@click.option("--force", is_flag=True, help="Replace a finished trace, and do not go on with an unfinished one.")
@backend_options
@click.option("--no-calibrate", is_flag=True, help="Do not measure this machine, where that was not done yet.")
@click.option("--allow-inexact", is_flag=True, help="Record where rows are not independent; replays are not exact.")
def record(bundle: str | None, prompts_file: Path | None, output: Path, **options: Any) -> None:
    """Record what drafters would propose.

    BUNDLE (by default the one that `run` uses) answers every prompt once. At every place of every answer each drafter
    drafts, and the trace keeps its evidence and how much of it the answer agrees with: no text unless asked for. With
    it, `replay` says exactly what any policy would have done, and `tune` looks for a better one.

    An interrupted recording goes on when the same command is given again; until it is finished it is named .part.
    """
    from dflash_ort.runtime.bench import BenchSettings
    from dflash_ort.runtime.engine import Engine

    check_writable(output)
    unfinished = output.with_name(output.name + ".part")
    if options["force"]:
        unfinished.unlink(missing_ok=True)
    elif output.exists():
        raise click.ClickException(f"'{output}' is there already; choose another --output, or --force")
    prompts = select_prompts(bench_prompts(prompts_file), options["suites"], options["per_suite"])
    names = ("max_new_tokens", "temperature", "seed", "ignore_eos")
    settings = BenchSettings(
        **{name: options[name] for name in names}, template_arguments=template_arguments(options["template_arg"])
    )
    for prompt in prompts:
        settings.params(prompt)
    with (
        ProgressBar() as progress,
        Engine.load(
            find_bundle(bundle),
            **backend_arguments(options),
            calibrate=not options["no_calibrate"],
            allow_inexact=options["allow_inexact"],
            progress=progress,
        ) as engine,
    ):
        texts, anchors = _record(engine, prompts, settings, unfinished, options["with_text"], progress)
    os.replace(unfinished, output)
    complain(f"{texts:,} texts with {anchors:,} anchors are in {output}")


def _record(
    engine: Engine, prompts: Any, settings: Any, path: Path, with_text: bool, progress: ProgressBar
) -> tuple[int, int]:
    """Write what is missing; returns how many texts and anchors there are then."""
    from dflash_ort.runtime.record import header, record, same_recording

    first = header(engine, settings, prompts)
    done: dict[str, dict[str, Any]] = {}
    begun = JsonLines(path)
    for number, line in enumerate(begun if path.exists() else ()):
        if number == 0 and not same_recording(first, line):
            raise LogError(f"'{path}' was begun with another bundle, prompts or settings; --force begins anew")
        if line.get("event") == "text":
            done[str(line["id"])] = line
    anchors = sum(int(line["num_tokens"]) - 1 for line in done.values())
    with JsonLinesWriter(path) as writer:
        if not writer.size:
            writer.write(first)
        if done:
            progress(f"going on behind {len(done)} texts")
        for answered in record(engine, prompts, settings, done):
            line = answered.line(with_text=with_text)
            writer.write(line)
            done[answered.traced.id] = line
            anchors += answered.traced.num_anchors
            progress(f"recording: {len(done)} texts, {anchors:,} anchors", min(len(done) / len(prompts), 1.0))
    return len(done), anchors
