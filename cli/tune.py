"""`dflash-ort tune`: a better policy from recorded texts and round logs, or none where there is no better one."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_ort import __version__
from dflash_ort.cli.console import ProgressBar, complain, warn
from dflash_ort.cli.output_file import check_writable, write_whole
from dflash_ort.cli.sources import costs_option, warn_of_unread

if TYPE_CHECKING:
    from dflash_ort.controller.cost import CostTable
    from dflash_ort.controller.policy import Policy
    from dflash_ort.controller.tuning import Answer, Fitted
    from dflash_ort.runtime.traces import Sources

DRIFTED = 3
"""Exit status of --check where newer logs are not what the policy was tuned on."""
REPORT_VERSION = 1
"""Version of the JSON object."""
DEFAULT_BUDGET = 60.0
_ESTIMATED = "fitted from visited anchors, with censoring"
_FILE = click.Path(path_type=Path)


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="TRACE|LOG...", type=_FILE)
@click.option("--output", type=_FILE, help="The policy file to write.  [required without --check]")
@click.option("--current", type=_FILE, help="The policy to be better than, and to start from.  [default: generic]")
@click.option("--from-logs", is_flag=True, help="Learn from logs alone; traces among the files are passed over.")
@click.option(
    "--held-out",
    type=click.FloatRange(0.0, 1.0, min_open=True, max_open=True),
    default=0.5,
    show_default=True,
    help="Share of each suite's requests that is judged on and never fitted to.",
)
@click.option(
    "--costs",
    "costs_file",
    type=_FILE,
    help="What passes cost, as `calibrate --json` prints it.  [default: fitted to the logs' seconds, else the trace's]",
)
@click.option(
    "--budget",
    type=click.FloatRange(min=0.0),
    help="Seconds for searching constants.  [default: 60, or no limit with --trials]",
)
@click.option(
    "--trials", type=click.IntRange(min=0), help="Most policies that the search tries: the same on any machine."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the split and the search.")
@click.option("--force", is_flag=True, help="Write the policy even where it is not better than the current one.")
@click.option(
    "--json",
    "json_file",
    is_flag=False,
    flag_value="-",
    type=click.Path(allow_dash=True, path_type=Path),
    help="Write all results here; alone or as - to standard output, and nothing else goes there.",
)
@click.option("--report", type=_FILE, help="Write a page with charts here: calibration, survival, speed by suite.")
@click.option("--check", type=_FILE, metavar="POLICY", help="Tune nothing: do these files look like what POLICY knew?")
def tune(files: tuple[Path, ...], **options: Any) -> None:
    """Tune a policy to recorded texts and logs.

    A TRACE (from `record`) has everything every drafter would have proposed; a round LOG what was visited, so that
    what is made of it is estimated: fitted from visited anchors, with censoring. Acceptance is fitted to one half of
    the requests, costs to logged seconds, and the controller's constants are searched by replay on the same half.

    The other half decides. The policy is written if it is faster there than the current one: ratio above 1, and the
    lower end of its 95% interval above 0.995. Else nothing is written to --output and the exit status is 1, unless
    --force is given; --json and --report tell why.

    With --check the exit status is 3 where acceptance has drifted away from what POLICY was tuned on, else 0.
    """
    for path in (options["output"], options["report"], options["json_file"]):
        if path is not None and str(path) != "-":
            check_writable(path)
    if options["check"] is not None:
        from dflash_ort.cli.tune_check import check

        if options["output"] is not None or options["report"] is not None:
            raise click.UsageError("--check writes no policy and no page; leave out --output and --report")
        drifted = check(files, options["check"], options["json_file"])
        click.get_current_context().exit(DRIFTED if drifted else 0)
    if options["output"] is None:
        raise click.UsageError("Missing option '--output'.")
    _tune(files, options)


def _tune(files: Sequence[Path], options: Mapping[str, Any]) -> None:
    from dflash_ort.controller.policy import GENERIC_POLICY
    from dflash_ort.runtime.policies import load_policy

    current = GENERIC_POLICY if options["current"] is None else load_policy(options["current"])
    with ProgressBar() as progress:
        material = read_material(files, current, progress, logs_only=options["from_logs"])
        table, costs_from = _costs(material, options["costs_file"])
        tuned, whole = _results(material, current, (table, costs_from), options, progress)
    _warn_of(material)
    policy_json = json.dumps(tuned.as_json(), indent=1) + "\n"
    better, ratio = whole["better"], whole["held_out"]["ratios"]["current"]
    whole["written"] = written = better or options["force"]
    out = options["json_file"]
    if out is not None and str(out) != "-":
        write_whole(out, json.dumps(whole, indent=1) + "\n")
    if options["report"] is not None:
        from dflash_ort.cli.tune_report import page

        write_whole(options["report"], page(whole))
    if str(out) == "-":
        click.echo(json.dumps(whole))
    else:
        _show(whole)
    low, high = ratio["interval"]
    said = f"{ratio['ratio']:.3f} times the current one's speed on held-out requests ({low:.3f} to {high:.3f})"
    if not written:
        raise click.ClickException(
            f"the tuned policy is not better: {said}; nothing is written, --force does so anyway"
        )
    write_whole(options["output"], policy_json)
    complain(f"{options['output']} is written: {said}" + ("" if better else "; not better, but --force was given"))


@dataclass(slots=True)
class Material:
    """What the files hold. ``described``: each file's hash, span and counts; ``whence``: traces, logs, or both."""

    sources: Sources
    answers: list[Answer] = field(default_factory=list)
    described: list[dict[str, Any]] = field(default_factory=list)
    whence: str = "traces"
    passed_over: int = 0


def read_material(files: Sequence[Path], policy: Policy, progress: ProgressBar, *, logs_only: bool = False) -> Material:
    """Read traces and logs; a request that is logged twice counts once. Raises LogError, ClickException."""
    from dflash_ort.controller.tuning import Answer
    from dflash_ort.runtime.traces import MOST_ROUNDS, Sources, read_sources

    material, logged = Material(Sources()), dict[str, Answer]()
    whole = material.sources
    for path in files:
        progress(f"reading {path.name}")
        part = read_sources([path], policy.priors, most=MOST_ROUNDS // len(files))
        whole.headers.extend(part.headers)
        whole.logged.extend(part.logged)
        whole.left_out += part.left_out
        whole.skipped.update(part.skipped)
        requests = {request.id: request for request in part.logged if request.rounds}
        for text in part.texts:
            request = requests.get(text.id) if text.suite == "log" else None
            if request is not None:
                rounds = tuple(record.requests[0] for record in request.rounds)
                logged[text.id] = Answer(text, rounds)
            elif logs_only:
                material.passed_over += 1
            else:
                material.answers.append(Answer(text))
        material.described.append(_described(path, part))
    traced = len(material.answers)
    material.answers += logged.values()
    material.answers = [answer for answer in material.answers if answer.text.num_anchors]
    if logs_only and not logged:
        raise click.ClickException("--from-logs: there is no round log with requests among these files")
    material.whence = "traces and logs" if traced and logged else "logs" if logged else "traces"
    return material


def _described(path: Path, part: Sources) -> dict[str, Any]:
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    times = sorted(time for r in part.logged if isinstance(time := r.request.get("time"), str))
    return {
        "name": path.name,
        "sha256": sha256,
        "requests": len(part.texts),
        "first": times[0] if times else None,
        "last": times[-1] if times else None,
    }


def _warn_of(material: Material) -> None:
    warn_of_unread(material.sources)
    if material.passed_over:
        warn(f"--from-logs: {material.passed_over} texts of traces are passed over")
    if material.whence != "traces":
        warn(f"logs know only the anchors that were visited: what comes of them is estimated, {_ESTIMATED}")


def _costs(material: Material, file: Path | None) -> tuple[CostTable, str]:
    """What passes cost, and where that is from: a file, the logs' seconds, the trace, or nowhere ("generic")."""
    from dflash_ort.controller.cost_fitting import fit_costs
    from dflash_ort.controller.names import GENERIC_COSTS
    from dflash_ort.controller.tuning import round_cost
    from dflash_ort.errors import PolicyError

    recorded = material.sources.costs
    if file is None and material.whence != "traces":
        rounds = (round_cost(record) for request in material.sources.logged for record in request.rounds)
        try:
            return fit_costs(rounds, recorded or GENERIC_COSTS), "logs"
        except PolicyError as error:
            warn(f"costs are not fitted: {error}")
    return costs_option(file, recorded), "file" if file else "trace" if recorded else "generic"


def _results(
    material: Material,
    current: Policy,
    costs: tuple[CostTable, str],
    options: Mapping[str, Any],
    progress: ProgressBar,
) -> tuple[Policy, dict[str, Any]]:
    """Fit, search and judge; the policy with its notes, and everything there is to say of it."""
    from dflash_ort.controller.policy import GENERIC_POLICY, Policy
    from dflash_ort.controller.tuning import drift_references, fit_families, split, survival_by_suite
    from dflash_ort.controller.tuning_search import compare, is_better, search

    (table, costs_from), seed = costs, options["seed"]
    training, held_out = split(material.answers, options["held_out"], seed=seed)
    families = fit_families(training, held_out, current, seed=seed, progress=progress)
    priors = {**current.priors, **{one.name: one.prior for one in families}}
    # What a log did not show is drawn with the hazards that its own half was fitted to, not with those to be replaced.
    training, held_out = ([answer.estimated(priors) for answer in side] for side in (training, held_out))
    texts, unseen = ([answer.text for answer in side] for side in (training, held_out))
    progress("searching constants")
    starts = {"tuned": priors, "weights only": _weights_only(current, families), "current": current.priors}
    start, *others = (Policy(one, current.settings) for one in starts.values())
    most, deadline = options["trials"], _deadline(options)
    found = search(start, others, texts, table, most=most, expired=lambda: time.monotonic() > deadline, seed=seed)
    kept = next(name for name, one in starts.items() if one is found.policy.priors)
    progress("judging on held-out requests")
    policies = {"tuned": found.policy, "current": current, "generic": GENERIC_POLICY}
    judged = compare(policies, texts, unseen, table)
    answers = [*training, *held_out]
    ratio = judged["ratios"]["current"]
    notes = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "dflash_ort": __version__,
        "from": material.whence,
        **({"estimated": _ESTIMATED} if material.whence != "traces" else {}),
        "sources": material.described,
        "requests": {"training": len(training), "held_out": len(held_out)},
        "priors_kept": kept,
        "scores": {one.name: _scores(one) for one in families},
        "held_out": judged["ratios"],
        "costs": {"from": costs_from, **asdict(table)},
        "drift": {name: asdict(one) for name, one in drift_references(answers, found.policy, table).items()},
    }
    whole = {
        "version": REPORT_VERSION,
        "better": is_better(ratio["ratio"], ratio["interval"]),
        **notes,
        "skipped": material.sources.skipped,
        "left_out": material.sources.left_out,
        "families": [_family(one) for one in families],
        "search": {
            "trials": found.trials,
            "seconds": list(found.seconds),
            "ended": found.ended,
            "changes": found.changes(current.settings),
        },
        "held_out": judged,
        "survival": survival_by_suite(answers, found.policy.priors),
    }
    return Policy(found.policy.priors, found.policy.settings, notes), whole


def _deadline(options: Mapping[str, Any]) -> float:
    budget = options["budget"]
    if budget is None:
        budget = DEFAULT_BUDGET if options["trials"] is None else float("inf")
    return time.monotonic() + float(budget)


def _weights_only(current: Policy, families: Sequence[Fitted]) -> dict[str, Any]:
    """The current priors with fitted weights, but with what they say of how requests differ."""
    return {**current.priors, **{one.name: replace(one.start, means=one.prior.means) for one in families}}


def _scores(one: Fitted) -> dict[str, Any]:
    """Scores of a family without their bins; before is the current prior's, after the tuned one's."""
    pairs: dict[str, Any] = {"out_of_fold": (one.fit.start_scores, one.fit.scores) if one.fit else None}
    pairs["held_out"] = (one.before, one.after) if one.before and one.after else None
    found: dict[str, Any] = {"requests": one.requests, "trials": one.trials}
    for name, pair in pairs.items():
        found[name] = None
        if pair is not None:
            values = [{k: v for k, v in asdict(scores).items() if k != "reliability"} for scores in pair]
            found[name] = dict(zip(("before", "after"), values, strict=True))
    return found


def _family(one: Fitted) -> dict[str, Any]:
    return {
        "family": one.name,
        **_scores(one),
        "start": asdict(one.start),
        "prior": asdict(one.prior),
        "errors": one.fit.errors if one.fit else None,
        "strength": one.fit.strength if one.fit else None,
        "reliability": {
            name: scores.reliability if scores else None
            for name, scores in (("before", one.before), ("after", one.after))
        },
    }


def _show(whole: Mapping[str, Any]) -> None:
    """Tables: how well acceptance is predicted, and what policies give on held-out requests."""
    from rich.console import Console
    from rich.table import Table

    # What led to an error goes where the error goes.
    console = Console(stderr=not whole["written"])
    requests, search = whole["requests"], whole["search"]
    complain(
        f"{requests['training']:,} requests to fit to, {requests['held_out']:,} held out; costs from: "
        f"{whole['costs']['from']}; {search['trials']} policies tried ({search['ended']})"
    )
    table = Table("held-out drafts", "trials", "log-loss", "calibration error", "AUC", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for one in whole["families"]:
        table.add_row(one["family"], f"{one['trials']:,}", *_before_after(one["held_out"]))
    console.print(table)
    changes = ", ".join(f"{name} {old:g} to {new:g}" for name, (old, new) in search["changes"].items())
    complain(f"constants changed: {changes or 'none'}; hazards: {whole['priors_kept']}")
    judged = whole["held_out"]
    table = Table("policy", "tokens/s", "times off", "95%", "tuned / it", "95% ", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in judged["policies"]:
        ratio = judged["ratios"].get(row["policy"])
        table.add_row(
            row["policy"],
            f"{row['tokens_per_second']:,.1f}",
            f"{row['speedup']:.3f}",
            "{:.2f}-{:.2f}".format(*row["speedup_interval"]),
            f"{ratio['ratio']:.3f}" if ratio else "",
            "{:.3f}-{:.3f}".format(*ratio["interval"]) if ratio else "",
        )
    table.add_row("bound", "", f"{judged['bound']['speedup']:.3f}", "", "", "")
    console.print(table)
    complain(f"best fixed in training: {judged['chosen']['best fixed']}")


def _before_after(pair: Mapping[str, Mapping[str, float | None]] | None) -> list[str]:
    if pair is None:
        return ["-"] * 3
    shown = []
    for name in ("log_loss", "ece", "auc"):
        before, after = (pair[when][name] for when in ("before", "after"))
        shown.append("-" if before is None or after is None else f"{before:.4f} to {after:.4f}")
    return shown
