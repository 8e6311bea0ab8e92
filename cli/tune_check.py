"""`tune --check`: whether newer logs still look like what a policy was tuned on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_ort.cli.console import ProgressBar, complain
from dflash_ort.cli.output_file import write_whole
from dflash_ort.cli.sources import warn_of_unread

if TYPE_CHECKING:
    from dflash_ort.controller.cost import CostTable
    from dflash_ort.controller.drift import DriftReference
    from dflash_ort.controller.policy import Policy

CHECK_VERSION = 1
"""Version of the JSON object."""


def check(files: Sequence[Path], policy_file: Path, json_file: Path | None) -> bool:
    """Compare, and say so; whether any family drifted. Raises LogError, PolicyError, ClickException."""
    from dflash_ort.cli.tune import read_material
    from dflash_ort.controller.drift import check_drift
    from dflash_ort.controller.tuning import families_of, of_family, visited
    from dflash_ort.runtime.policies import load_policy

    policy = load_policy(policy_file)
    references = _references(policy, policy_file)
    with ProgressBar() as progress:
        material = read_material(files, policy, progress)
        progress("comparing")
        rounds_of = visited(material.answers, policy, _table(policy, material.sources.costs))
        there = families_of(material.answers)
        families = []
        for name, (kind, draws) in there.items():
            found: dict[str, Any] = {"family": name, "drifted": False, "enough": False, "requests": 0}
            if name in references:
                mine = of_family(material.answers, rounds_of, kind, draws)
                found |= asdict(check_drift(policy.priors[name], references[name], mine))
                found["expected"] = asdict(references[name])
            else:
                found["reasons"] = ("the policy was not tuned on such drafts",)
            families.append(found)
        for name in references.keys() - there.keys():
            reason = "there are no such drafts in these files"
            families.append({"family": name, "drifted": False, "enough": False, "requests": 0, "reasons": (reason,)})
    warn_of_unread(material.sources)
    drifted = any(found["drifted"] for found in families)
    whole = {
        "version": CHECK_VERSION,
        "drifted": drifted,
        "enough": any(found["enough"] for found in families),
        "requests": len(material.answers),
        "sources": material.described,
        "skipped": material.sources.skipped,
        "families": families,
    }
    if str(json_file) == "-":
        click.echo(json.dumps(_finite(whole)))
        return drifted
    if json_file is not None:
        write_whole(json_file, json.dumps(_finite(whole), indent=1) + "\n")
    for found in families:
        state = "drifted" if found["drifted"] else "as expected" if found["enough"] else "not known"
        click.echo(f"{found['family']}: {state}, {found['requests']:,} requests")
        for reason in found["reasons"]:
            click.echo(f"  {reason}")
    complain("tune again with these files" if drifted else "no drift was found")
    return drifted


def _references(policy: Policy, path: Path) -> dict[str, DriftReference]:
    """What `tune` stored of each family."""
    from dflash_ort.controller.drift import DriftReference

    stored = policy.notes.get("drift")
    if not isinstance(stored, Mapping) or not stored:
        raise click.ClickException(f"'{path}' does not say what it was tuned on; tune it with 'dflash-ort tune' first")
    try:
        return {
            name: DriftReference(
                tuple(float(s) for s in one["survival"]), float(one["gap"]), float(one["log_loss"]), float(one["ece"])
            )
            for name, one in stored.items()
            if name in policy.priors
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise click.ClickException(f"'{path}': what it says of drift cannot be read ({error!r})") from None


def _table(policy: Policy, recorded: CostTable | None) -> CostTable:
    """What passes cost where the policy was tuned, by which traced texts are walked."""
    from dflash_ort.controller.cost import CostTable
    from dflash_ort.controller.names import GENERIC_COSTS

    try:
        return CostTable.from_json(policy.notes["costs"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return recorded or GENERIC_COSTS


def _finite(value: Any) -> Any:
    """JSON has no infinity, which is how far the interval of a single request reaches."""
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and value in (float("inf"), float("-inf")) else value
