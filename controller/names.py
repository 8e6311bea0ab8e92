"""Controllers by the names that the command line and the API use."""

from __future__ import annotations

from dflash_ort.controller.adaptive import Adaptive
from dflash_ort.controller.baselines import HillClimb, StepRatio, Threshold
from dflash_ort.controller.cost import CostModel, CostTable
from dflash_ort.controller.fixed import FixedLength
from dflash_ort.controller.policy import GENERIC_POLICY, Policy
from dflash_ort.controller.protocol import Controller
from dflash_ort.errors import PolicyError

EXPECTED = "adaptive, off, fixed:N, fixed:max, threshold:P, hill-climb, step-ratio or a policy file (.json)"


def needs_costs(name: str) -> bool:
    """Whether a controller of this name reads the machine's calibrated costs."""
    return name.partition(":")[0] in ("adaptive", "step-ratio")


def check_name(name: str) -> None:
    """Raise PolicyError unless there is a controller of this name."""
    make_controller(name, GENERIC_COSTS)


def make_controller(name: str, costs: CostTable, policy: Policy = GENERIC_POLICY) -> Controller:
    """A controller from its name, an adaptive one of this policy. Raises PolicyError for an unknown one.

    "adaptive:generic" has the generic policy whatever is given, "adaptive:frozen" reads no clock.
    """
    kind, _, value = name.partition(":")
    if name in ("adaptive", "adaptive:frozen"):
        return Adaptive(CostModel(costs), policy, frozen=value == "frozen")
    if name == "adaptive:generic":
        return Adaptive(CostModel(costs))
    if name == "off":
        return FixedLength(0)
    if name == "hill-climb":
        return HillClimb()
    if name == "step-ratio":
        return StepRatio(CostModel(costs))
    if kind == "fixed" and value == "max":
        return FixedLength(None)
    if kind == "fixed" and value.isascii() and value.isdigit() and len(value) < 10:
        return FixedLength(int(value))
    if kind == "threshold":
        return Threshold(_probability(name, value))
    raise PolicyError(f"unknown controller '{name}'; expected {EXPECTED}")


def _probability(name: str, value: str) -> float:
    try:
        p = float(value)
    except ValueError:
        p = -1.0
    if not 0.0 <= p <= 1.0:
        raise PolicyError(f"controller '{name}' has no probability from 0 to 1 after the colon, as in threshold:0.4")
    return p


GENERIC_COSTS = CostTable(
    rows=(1, 2, 4, 8, 16),
    contexts=(16, 1024),
    verify=((0.02, 0.022), (0.0212, 0.0235), (0.0236, 0.027), (0.029, 0.034), (0.042, 0.052)),
    draft=(0.002, 0.0022),
    inject_row=0.0001,
    other=0.0002,
)
"""Used where calibration was turned off: the shape of an fp32 model on two cores; its scale is corrected while
running.
"""
