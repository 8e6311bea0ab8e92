"""What a training run leaves: a drafter's directory in z-lab's format, with a model card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from dflash_ort.distill.evaluate import Acceptance
from dflash_ort.distill.model import DrafterShape
from dflash_ort.distill.state import CurvePoint
from dflash_ort.distill.train import Trained
from dflash_ort.exporter.checkpoint import TargetCheckpoint
from dflash_ort.exporter.drafter_writer import write_drafter
from dflash_ort.runtime.graph_io import Array

_CURVE_LINES = 20


def write_weights(
    directory: Path,
    shape: DrafterShape,
    tensors: Mapping[str, Array],
    vocabulary: Array | None,
    *,
    readme: str = "",
    force: bool = False,
) -> None:
    """Write a drafter from a shape and its tensors (`model.fold` makes them from a state), whole or not at all.

    ``vocabulary``: target ids of the draft vocabulary, int64, ascending; None for all. Raises CheckpointError as
    `write_drafter` does.
    """
    write_drafter(
        directory,
        shape.config,
        tensors,
        block_size=shape.block_size,
        mask_token_id=shape.mask_token_id,
        target_layer_ids=shape.taps,
        num_target_layers=shape.num_target_layers,
        extensions=shape.extensions,
        draft_vocabulary=vocabulary,
        readme=readme,
        force=force,
    )


def write_trained(
    directory: Path,
    trained: Trained,
    target: TargetCheckpoint,
    *,
    vocab_size: int,
    data: Mapping[str, Any],
    settings: Mapping[str, Any],
    force: bool = False,
) -> None:
    """Write a run's drafter and its model card. ``data`` and ``settings`` are facts for the card, by name.

    Raises CheckpointError as `write_drafter` does.
    """
    whole = np.array_equal(trained.vocabulary, np.arange(vocab_size))
    write_weights(
        directory,
        trained.shape,
        trained.tensors,
        None if whole else trained.vocabulary,
        readme=model_card(trained, target, data=data, settings=settings),
        force=force,
    )


def model_card(
    trained: Trained, target: TargetCheckpoint, *, data: Mapping[str, Any], settings: Mapping[str, Any]
) -> str:
    """README.md: what the drafter is, what it was trained on and how, and what it does; nothing about the machine."""
    shape, acceptance = trained.shape, trained.acceptance
    name = target.source.get("name", "the target")
    on = [name for name, value in asdict(shape.extensions).items() if value]
    parameters = sum(int(tensor.size) for tensor in trained.tensors.values())
    extended = (
        f"Extensions of the format (`dflash_config`, `extensions`): {', '.join(on)}. Only dflash-ort knows them."
        if on
        else "Plain z-lab format."
    )
    parts = [
        f"# A DFlash drafter for {name}",
        f"Made by `dflash-ort distill` (dflash-ort {version('dflash-ort')}). It drafts for this target alone, cannot "
        f"change its text, and shares its embeddings and LM head. {extended}",
        _table(
            "What it is",
            {
                "layers": shape.config.num_layers,
                "block": f"{shape.block_size} slots, {shape.num_drafts} drafts",
                "taps after layers": ", ".join(map(str, shape.taps)),
                "draft vocabulary": f"{len(trained.vocabulary):,} tokens, {trained.coverage:.2%} of the training text",
                "parameters": f"{parameters:,}",
            }
            | {f"target, {key}": value for key, value in sorted(target.source.items()) if key.startswith("sha256")},
        ),
        _table(
            "Trained on",
            {"dialogues": f"{trained.dialogues:,} of {trained.tokens:,} tokens, the target's own answers"} | dict(data),
        ),
        _table(
            "How",
            {
                "steps": f"{trained.steps:,}" + (", ended early" if trained.ended_early else ""),
                "block rows": f"{trained.rows:,}",
            }
            | dict(settings),
        ),
        "## What it does\n\n" + _results(acceptance),
        "## Learning curve\n\nAcceptance length on some of the held-out dialogues; loss in nats per row.\n\n"
        + _curve(trained.curve),
    ]
    return "\n\n".join(parts) + "\n"


def _results(acceptance: Acceptance) -> str:
    survival = ", ".join(f"{share:.3f}" for share in acceptance.survival)
    lines = [
        f"Whole blocks, greedy, on {acceptance.dialogues} held-out dialogues, {acceptance.rounds:,} rounds: acceptance "
        f"length **{acceptance.acceptance_length:.3f}** (tokens a round, the target's own included), "
        f"survival {survival}.",
        "",
        "| suite | acceptance length |",
        "|---|---|",
        *(f"| {suite} | {length:.3f} |" for suite, length in acceptance.suites.items()),
    ]
    return "\n".join(lines)


def _curve(curve: tuple[CurvePoint, ...]) -> str:
    stride = -(-len(curve) // _CURVE_LINES)
    shown = [point for place, point in enumerate(reversed(curve)) if place % stride == 0][::-1]
    lines = ["| step | block rows | loss | acceptance length |", "|---|---|---|---|"]
    for p in shown:
        loss = f"{p.loss:.3f}" if p.step else ""
        lines.append(f"| {p.step:,} | {p.rows:,} | {loss} | {p.acceptance_length:.3f} |")
    return "\n".join(lines)


def _table(title: str, rows: Mapping[str, Any]) -> str:
    lines = [f"| {name} | {value} |" for name, value in rows.items()]
    return "\n".join([f"## {title}", "", "| | |", "|---|---|", *lines])
