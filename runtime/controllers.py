"""An engine's controllers and the costs they read: made when first asked for, one of a name for all requests."""

from __future__ import annotations

import logging
from collections.abc import Callable

from dflash_ort.controller.cost import CostTable
from dflash_ort.controller.names import GENERIC_COSTS
from dflash_ort.controller.policy import Policy
from dflash_ort.controller.protocol import Controller
from dflash_ort.models.manifest import Manifest
from dflash_ort.runtime.calibration import SECONDS, known_costs, remember_costs
from dflash_ort.runtime.policies import named_controller, reads_costs
from dflash_ort.runtime.session import Backend

logger = logging.getLogger("dflash_ort")


class Controllers:
    """Controllers by name. One serves all requests, so that what one request teaches the next has.

    ``measure`` measures costs for about so many seconds; None where calibration was turned off. ``policy`` is where
    adaptive ones start from.
    """

    def __init__(
        self, manifest: Manifest, backend: Backend, measure: Callable[[float], CostTable] | None, policy: Policy
    ) -> None:
        self._manifest, self._backend, self._measure, self._policy = manifest, backend, measure, policy
        self._costs: CostTable | None = None
        self._made: dict[str, Controller] = {}

    def get(self, name: str) -> Controller:
        """The controller of this name. Raises PolicyError for an unknown one."""
        known = self._made.get(name)
        return known if known is not None else self._made.setdefault(name, self.new(name))

    def new(self, name: str) -> Controller:
        """One of this name that has learnt nothing yet. Raises PolicyError for an unknown one."""
        return named_controller(name, self.costs() if reads_costs(name) else GENERIC_COSTS, self._policy)

    def costs(self) -> CostTable:
        """What passes cost here: measured once for this bundle and machine, and kept; else a generic shape."""
        if self._costs is None:
            known, warning = known_costs(self._manifest, self._backend)
            if warning:
                logger.warning("%s", warning)
            self._costs = known or (GENERIC_COSTS if self._measure is None else self._measured(self._measure))
        return self._costs

    def _measured(self, measure: Callable[[float], CostTable]) -> CostTable:
        costs = measure(SECONDS)
        if warning := remember_costs(self._manifest, self._backend, costs):
            logger.warning("%s", warning)
        return costs


def plain_pass(controller: Controller) -> Callable[[int], float] | None:
    """Seconds of a plain round behind a context, where the controller knows costs."""
    costs = getattr(controller, "costs", None)
    if costs is None:
        return None
    return lambda context: float(costs.verify(1, context)[0]) + costs.other()
