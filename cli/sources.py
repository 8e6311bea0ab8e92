"""What the commands that read traces and logs have in common: what passes cost, and what was not read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dflash_ort.cli.console import warn

if TYPE_CHECKING:
    from dflash_ort.controller.cost import CostTable
    from dflash_ort.runtime.traces import Sources


def costs_option(path: Path | None, recorded: CostTable | None) -> CostTable:
    """The table of a --costs file, else the recorded one, else a generic one with a warning."""
    from dflash_ort.controller.cost import CostTable
    from dflash_ort.controller.names import GENERIC_COSTS

    if path is None:
        if recorded is None:
            warn("these files do not say what passes cost; a generic shape is taken, --costs gives a machine's own")
        return recorded or GENERIC_COSTS
    try:
        return CostTable.from_json(json.loads(path.read_text("utf-8")))
    except OSError as error:
        raise click.ClickException(f"'{path}' cannot be read: {error.strerror or error}") from error
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise click.ClickException(f"'{path}' is not what 'dflash-ort calibrate --json' prints ({error})") from None


def warn_of_unread(sources: Sources) -> None:
    """Say which lines were skipped, and how many requests were left out."""
    for path, count in sources.skipped.items():
        warn(f"'{path}': {count} lines were cut off or foreign, and are skipped")
    if sources.left_out:
        warn(f"{sources.left_out:,} requests are left out, an even share of all: more than memory should hold")
