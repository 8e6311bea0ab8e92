"""The state of a training run between two steps, on the disk whole or not at all."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dflash_ort.errors import BundleError
from dflash_ort.whole import whole_file

STATE_VERSION = 1
STATE_FILE = "state.pt"


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """What the held-out dialogues said after some steps; ``loss`` is the running mean of training."""

    step: int
    seconds: float
    rows: int
    loss: float
    acceptance_length: float


@dataclass(slots=True)
class RunState:
    """Everything that the rest of a run depends on, but for its data and settings, which are compared."""

    settings: dict[str, Any]
    data: str
    """A hash over the dialogues."""
    model: dict[str, torch.Tensor]
    optimizers: list[dict[str, Any]]
    rng: str
    """State of the generator that draws batches, as JSON."""
    step: int
    seconds: float
    rows: int
    loss: float
    evaluations: int
    since_best: int
    best: dict[str, torch.Tensor]
    best_acceptance: float
    curve: list[CurvePoint]
    finished: bool = False


def save_state(path: Path, state: RunState) -> None:
    """Write a state. Raises OSError."""
    values = {name: getattr(state, name) for name in RunState.__dataclass_fields__}
    values |= {"version": STATE_VERSION, "curve": [asdict(point) for point in state.curve]}
    with whole_file(path) as file:
        torch.save(values, file)


def load_state(path: Path, settings: dict[str, Any], data: str | None) -> RunState | None:
    """The state of the run with these settings and data (None: whatever data); None where there is none.

    Raises BundleError for one that is damaged, of another version, or of another run.
    """
    if not path.exists():
        return None
    again = "delete it to begin anew"
    try:
        values = torch.load(path, map_location="cpu", weights_only=True)
        version = values.pop("version")
        state = RunState(**values | {"curve": [CurvePoint(**point) for point in values["curve"]]})
    except Exception as error:  # a damaged pickle raises anything
        reason = " ".join(str(error).split())[:120]
        raise BundleError(f"'{path}' is not a whole training state ({reason}); {again}") from error
    if version != STATE_VERSION:
        raise BundleError(f"'{path}' is a training state of version {version}, not {STATE_VERSION}; {again}")
    if state.settings != settings:
        changed = sorted(k for k in {*settings, *state.settings} if settings.get(k) != state.settings.get(k))
        raise BundleError(
            f"'{path}' was trained with other settings ({', '.join(changed)}); {again}, or choose another --work"
        )
    if data is not None and state.data != data:
        raise BundleError(f"'{path}' was trained on other data; {again}, or choose another --work")
    return state
