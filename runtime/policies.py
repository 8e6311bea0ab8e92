"""Policy files: where they are read from, and controllers by name or by file."""

from __future__ import annotations

import json
from pathlib import Path

from dflash_ort.controller.adaptive import Adaptive
from dflash_ort.controller.cost import CostModel, CostTable
from dflash_ort.controller.names import check_name, make_controller, needs_costs
from dflash_ort.controller.policy import GENERIC_POLICY, Policy
from dflash_ort.controller.protocol import Controller
from dflash_ort.errors import PolicyError
from dflash_ort.models.manifest import POLICY, Manifest


def load_policy(path: Path) -> Policy:
    """A policy from its file. Raises PolicyError that names it."""
    try:
        raw = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise PolicyError(f"the policy '{path}' cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise PolicyError(f"the policy '{path}' is not JSON ({error})") from None
    return Policy.from_json(raw, f"'{path}'")


def bundle_policy(directory: Path, manifest: Manifest) -> Policy:
    """The policy that lies in a bundle, else the generic one, after what its self-check found of its drafter.

    Raises PolicyError for one that is not usable.
    """
    path = directory / POLICY
    policy = load_policy(path) if path.is_file() else GENERIC_POLICY
    check = manifest.self_check.drafter if manifest.self_check else None
    if check is None:
        return policy
    return policy.after_check(manifest.drafter.kind, check.survival[0] * check.verify_rounds, check.verify_rounds)


def is_policy_file(name: str) -> bool:
    """Whether a controller's name is a policy file's."""
    return name.endswith(".json")


def check_controller(name: str) -> None:
    """Raise PolicyError unless there is a controller of this name, or a policy in this file."""
    if is_policy_file(name):
        load_policy(Path(name))
    else:
        check_name(name)


def reads_costs(name: str) -> bool:
    """Whether the controller of this name reads the machine's calibrated costs."""
    return is_policy_file(name) or needs_costs(name)


def named_controller(name: str, costs: CostTable, policy: Policy = GENERIC_POLICY) -> Controller:
    """A new controller: by name, an adaptive one starting from ``policy``; or adaptive, from a policy file.

    Raises PolicyError for an unknown name or a file that is not usable.
    """
    if is_policy_file(name):
        return Adaptive(CostModel(costs), load_policy(Path(name)))
    return make_controller(name, costs, policy)
