"""What the adaptive controller starts from: beliefs about acceptance, and the constants of its rule. As plain JSON it
is the policy file that `dflash-ort tune` writes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from dflash_ort.controller.acceptance import GENERIC_PRIORS, HazardPrior, family
from dflash_ort.errors import PolicyError

FORMAT, VERSION = "dflash-ort policy", 1
_OF_USE = 0.1
"""Part of the first drafts accepted from which on a drafter's check says nothing against it."""
_CHECK_PRIOR = 2.0
"""Blocks, half of them accepted, that a check begins with."""
FEATURES = ("intercept", "logit", "log_position", "log2_match", "agreement")
"""Names of `HazardPrior`'s entries."""


@dataclass(frozen=True, slots=True)
class AdaptiveSettings:
    """Constants of the policy, in rounds unless said otherwise."""

    rate_memory: float = 15.0
    """A request's rate is that of about this many rounds."""
    value_memory: float = 6.0
    """A drafter's worth is that of about this many blocks."""
    surplus_memory: float = 20.0
    """What it gave beyond what was expected is that of about this many blocks."""
    prior_blocks: float = 2.0
    """A new request believes as many blocks of the worth that earlier requests saw."""
    population_memory: float = 200.0
    """A new request's rate starts from that of about this many rounds of all requests."""
    population_requests: float = 10.0
    """A drafter's worth starts from that in about this many requests."""
    optimism: float = 1.0
    """Standard errors of a drafter's worth that it is given the benefit of, in a long answer."""
    long_answer: int = 32
    """Tokens still to come from which on that is so; what may be learnt is worth less where less can be made of it."""
    first_value: float = 0.4
    """What a block is worth, in tokens, before any was seen."""
    first_retry: int = 12
    longest_retry: int = 512
    most_for_tries: float = 0.011
    """Share of a request's time that tries may take, what they inject included."""
    cautious_length: int = 2
    """No more is verified of a drafter that may well be useless on this text."""
    lengthen_every: int = 250
    """Now and then two drafts more are verified than seem to pay, so that what lies behind is learnt."""
    injection_horizon: int = 24
    """Most rounds over which the cost of injecting a long backlog (a prompt's rows) is spread."""
    tokens_per_use: float = 8.0
    """Of the tokens still to come, one in so many is a round that pays for a backlog."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Where a controller starts. ``notes`` are what a file says besides: where it comes from, how it scored."""

    priors: Mapping[str, HazardPrior] = field(default_factory=lambda: GENERIC_PRIORS)
    settings: AdaptiveSettings = AdaptiveSettings()
    notes: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values that `from_json` reads."""
        priors = {}
        for kind, prior in self.priors.items():
            values = asdict(prior)
            for name in ("means", "deviations"):
                values[name] = dict(zip(FEATURES, values[name], strict=True))
            priors[kind] = values
        settings = asdict(self.settings)
        return {"format": FORMAT, "version": VERSION, **self.notes, "settings": settings, "priors": priors}

    def after_check(self, kind: str, accepted: float, blocks: int) -> Policy:
        """What to start from where ``accepted`` first drafts out of ``blocks`` blocks of a drafter were accepted on
        some texts: if next to none was, it is useless on texts like them, whatever this policy believes.
        """
        share = (accepted + 0.5 * _CHECK_PRIOR) / (blocks + _CHECK_PRIOR)
        useless = min(1.0 - share / _OF_USE, 0.98)
        families = [family(kind, draws) for draws in (False, True)]
        doubted = {
            name: replace(prior, useless=max(prior.useless, useless))
            for name, prior in self.priors.items()
            if name in families
        }
        return replace(self, priors={**self.priors, **doubted})

    @staticmethod
    def from_json(raw: object, where: str) -> Policy:
        """A policy from JSON values; what it leaves out is generic. Raises PolicyError that begins with ``where``."""
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise PolicyError(f"{where} is not a policy file; expected one that 'dflash-ort tune' wrote")
        if raw.get("version") != VERSION:
            raise PolicyError(
                f"{where} has version {raw.get('version')!r}, this program reads {VERSION}; tune it again with this one"
            )
        given = raw.get("priors", {})
        if not isinstance(given, dict):
            raise PolicyError(f"{where}: priors is not an object")
        priors = dict(GENERIC_PRIORS)
        for kind, values in given.items():
            if kind not in GENERIC_PRIORS:
                raise PolicyError(f"{where}: unknown prior '{kind}'; expected {', '.join(GENERIC_PRIORS)}")
            priors[kind] = _prior(values, f"{where}: prior '{kind}'")
        settings = AdaptiveSettings(**_numbers(AdaptiveSettings(), raw.get("settings", {}), f"{where}: settings"))
        notes = {k: v for k, v in raw.items() if k not in ("format", "version", "priors", "settings")}
        return Policy(priors, settings, notes)


GENERIC_POLICY = Policy()
"""For pairs that nobody has tuned for."""


def _prior(values: object, where: str) -> HazardPrior:
    if not isinstance(values, dict):
        raise PolicyError(f"{where} is not an object")
    vectors = {}
    for name in ("means", "deviations"):
        entries = values.get(name)
        if not isinstance(entries, dict) or set(entries) != set(FEATURES):
            raise PolicyError(f"{where}: {name} has not just the entries {', '.join(FEATURES)}")
        vectors[name] = tuple(_number(entries[f], f"{where}: {name}.{f}") for f in FEATURES)
    if min(vectors["deviations"]) <= 0.0:
        raise PolicyError(f"{where}: a deviation is not above 0")
    generic = HazardPrior(vectors["means"], vectors["deviations"])
    rest = {name: value for name, value in values.items() if name not in vectors}
    prior = replace(generic, **_numbers(generic, rest, where))
    if not 0.0 < prior.useless < 1.0:
        raise PolicyError(f"{where}: useless is {prior.useless}; expected a probability between 0 and 1")
    return prior


def _numbers(defaults: AdaptiveSettings | HazardPrior, values: object, where: str) -> dict[str, Any]:
    """Positive numbers of a dataclass's fields, by name, as many as are given."""
    if not isinstance(values, dict):
        raise PolicyError(f"{where}: not an object")
    known = {f.name: getattr(defaults, f.name) for f in fields(defaults)}
    found: dict[str, Any] = {}
    for name, value in values.items():
        default = known.get(name)
        if not isinstance(default, (int, float)):
            raise PolicyError(f"{where}: unknown entry '{name}'")
        number = _number(value, f"{where}: {name}")
        if number < 0.0 or (number == 0.0 and name != "optimism"):
            raise PolicyError(f"{where}: {name} is {value}; expected a positive number")
        if isinstance(default, int) and number != int(number):
            raise PolicyError(f"{where}: {name} is {value}; expected a whole number")
        found[name] = int(number) if isinstance(default, int) else number
    return found


def _number(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise PolicyError(f"{what} is {value!r}; expected a number")
    return float(value)
