"""From a target to a drafter for it: data, hidden states, training, result; each stage goes on where it was left.

The working directory holds the target's batched graph, ``data/`` (shards and hidden states), ``training/`` (the state
of the run) and ``plan.json`` (the time that was spent, and what is left for training).
"""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dflash_ort.distill.data import MAX_NEW_TOKENS, make_data
from dflash_ort.distill.features import Features
from dflash_ort.distill.prompts import read_prompts
from dflash_ort.distill.result import write_trained
from dflash_ort.distill.settings import EXTENDED, TrainSettings, default_taps
from dflash_ort.distill.shards import read_info, shard_path
from dflash_ort.distill.state import STATE_FILE, load_state
from dflash_ort.distill.target import DataTarget, open_target
from dflash_ort.distill.train import Trained, held_out_dialogues, train
from dflash_ort.errors import BundleError, CheckpointError, RequestError
from dflash_ort.exporter.checkpoint import PLAIN, DrafterCheckpoint
from dflash_ort.exporter.drafter_reader import read_drafter
from dflash_ort.exporter.drafter_writer import check_drafter_output
from dflash_ort.exporter.export import ExportOptions, check_output, export_bundle
from dflash_ort.exporter.linear import Precision
from dflash_ort.models.manifest import Manifest
from dflash_ort.progress import Progress, silent
from dflash_ort.runtime.providers import reason_of
from dflash_ort.runtime.selfcheck import check_bundle
from dflash_ort.runtime.session import default_threads
from dflash_ort.whole import whole_file

PLAN_FILE = "plan.json"
_LEAST_TRAINING = 0.5
"""Of the training's share of the budget: it is left however long the other stages took."""
_SAY_EVERY_S = 2.0
_SAVE_EVERY_S = 10.0
_SHARD_DIALOGUES = 16
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Few, so that a short budget ends with some whole ones."""
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be made, and from what. None: `distill` chooses, or with ``init`` takes what that drafter has."""

    target: str
    """A preset's name, a Hugging Face directory or a .gguf file."""
    output: Path
    work: Path
    budget: float
    """Seconds for data and training together."""
    data_share: float = 0.4
    """Of the budget; 0 makes no data and trains on what there is."""
    prompts: Path | None = None
    bundle: Path | None = None
    init: Path | None = None
    depth: int | None = None
    block_size: int | None = None
    vocabulary: int | None = None
    taps: tuple[int, ...] | None = None
    plain: bool = False
    """Keep to z-lab's format: no extensions."""
    precision: Precision = "fp32"
    """Of the target that makes the data, and of the bundle's."""
    learning_rate: float | None = None
    muon: float | None = None
    max_context: int | None = None
    max_new_tokens: int = MAX_NEW_TOKENS
    cache_bytes: int = 8_000_000_000
    """For hidden states on the disk."""
    seed: int = 0
    threads: int | None = None
    device: str = "cpu"
    force: bool = False


@dataclass(frozen=True, slots=True)
class Distilled:
    """What came of an order. ``manifest`` is the bundle's, where one was asked for."""

    trained: Trained
    manifest: Manifest | None


@dataclass(slots=True)
class _Plan:
    """How far a working directory has come, and what its run was told of time."""

    budget: float
    data_share: float
    data_seconds: float = 0.0
    training_seconds: float | None = None
    """Set once the data is complete."""


def distill(order: Order, *, clock: Clock = time.monotonic, progress: Progress = silent) -> Distilled:
    """Make a drafter. Called again with the same order after an interruption, it goes on.

    Raises CheckpointError for a target, a drafter or an output that cannot be used, RequestError for prompts or options
    that cannot, BundleError for a working directory that belongs to something else, OSError.
    """
    check_drafter_output(order.output, order.force)
    if order.bundle is not None:
        check_output(order.bundle, order.force)
    if order.prompts is not None:
        read_prompts(order.prompts)
    _check_device(order.device)
    init = None if order.init is None else read_drafter(order.init)
    settings = _settings(order, init)
    plan = _read_plan(order)
    say = _throttled(progress, clock)
    threads = default_threads() if order.threads is None else order.threads
    torch.set_num_threads(threads)
    keep_freed_memory()
    target = open_target(
        order.target,
        order.work,
        precision=order.precision,
        taps=order.taps or (init and init.target_layer_ids) or (lambda layers: default_taps(layers, settings.depth)),
        max_context=order.max_context,
        threads=threads,
        progress=progress,
    )
    if init is None and settings.depth > target.spec.num_layers:
        raise CheckpointError(
            f"the depth is {settings.depth}; this target has {target.spec.num_layers} layers to borrow"
        )
    settings = replace(settings, taps=target.spec.tapped_layers)
    if plan.training_seconds is not None:
        settings = replace(settings, seconds=plan.training_seconds)
        load_state(order.work / "training" / STATE_FILE, settings.as_json(), None)  # raises before anything is undone
    elif order.data_share > 0.0:
        _make_data(order, target, plan, clock, say)
    features = Features(target, order.work / "data", budget=order.cache_bytes)
    held_out_dialogues(features.dialogues)  # raises before the long work
    made = clock()
    features.fill(progress=say)
    if plan.training_seconds is None:
        least = _LEAST_TRAINING * (1.0 - plan.data_share) * plan.budget
        plan.training_seconds = max(plan.budget - plan.data_seconds - (clock() - made), least)
        _write_plan(order, plan)
        settings = replace(settings, seconds=plan.training_seconds)
    trained = train(
        target.checkpoint,
        features.dialogues,
        features,
        settings,
        order.work / "training",
        vocab_size=target.spec.vocab_size,
        init=init,
        clock=clock,
        progress=say,
    )
    progress("writing the drafter")
    write_trained(
        order.output,
        trained,
        target.checkpoint,
        vocab_size=target.spec.vocab_size,
        data=_data_facts(order, target, features),
        settings=_setting_facts(settings),
        force=order.force,
    )
    return Distilled(trained, _bundle(order, target, progress))


def keep_freed_memory() -> None:
    """Have the C library keep what a training step frees for the next one, where it is glibc.

    By default large blocks go back to the system, and touching them anew took 13% of a step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        for parameter in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            mallopt(parameter, 2**31 - 1)


def _check_device(device: str) -> None:
    """Raise RequestError unless torch can train there."""
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise RequestError(f"torch cannot use the device '{device}' ({reason_of(error)}); choose cpu") from None


def _settings(order: Order, init: DrafterCheckpoint | None) -> TrainSettings:
    """Settings whose time, and taps where none are named, `distill` fills in once it knows the target.

    Raises CheckpointError where the order and the drafter to go on from disagree.
    """
    extensions = PLAIN if order.plain else EXTENDED
    known = TrainSettings(taps=(0,), seconds=order.budget)
    depth, block = order.depth or known.depth, order.block_size or known.block_size
    vocabulary, taps = order.vocabulary or known.vocabulary, order.taps or known.taps
    if init is not None:
        depth, block, taps, extensions = init.config.num_layers, init.block_size, init.target_layer_ids, init.extensions
        ids = init.draft_vocabulary
        vocabulary = order.vocabulary or (init.config.vocab_size if ids is None else len(ids))
        asked = {
            "--depth": (order.depth, depth),
            "--block-size": (order.block_size, block),
            "--taps": (order.taps, taps),
            "--plain": (order.plain or None, extensions == PLAIN),
        }
        for name, (wanted, found) in asked.items():
            if wanted is not None and wanted != found:
                raise CheckpointError(f"'{order.init}' was made with another {name}; leave the option away")
    return replace(
        known,
        taps=taps,
        depth=depth,
        block_size=block,
        vocabulary=vocabulary,
        extensions=extensions,
        learning_rate=order.learning_rate or known.learning_rate,
        muon=order.muon,
        seed=order.seed,
        device=order.device,
    )


def _make_data(order: Order, target: DataTarget, plan: _Plan, clock: Clock, progress: Progress) -> None:
    """Make data for what is left of its share; the time spent is kept whatever ends it."""
    before, began = plan.data_seconds, clock()
    saved = began

    def keep_time(message: str, fraction: float | None = None) -> None:
        nonlocal saved
        now = clock()
        plan.data_seconds = before + now - began
        if now - saved >= _SAVE_EVERY_S:
            _write_plan(order, plan)
            saved = now
        progress(f"data: {message}", min(plan.data_seconds / (plan.budget * plan.data_share), 1.0))

    try:
        summary = make_data(
            target,
            order.prompts,
            order.work / "data",
            deadline=began + plan.budget * plan.data_share - before,
            seed=order.seed,
            max_new_tokens=order.max_new_tokens,
            shard_dialogues=_shard_dialogues(order.work / "data"),
            clock=clock,
            progress=keep_time,
        )
    finally:
        plan.data_seconds = before + clock() - began
        _write_plan(order, plan)
    if not summary.shards:
        raise RequestError(
            f"{plan.data_seconds:,.0f} s were too short to make any data; "
            "give a longer --budget or a larger --data-share"
        )


def _shard_dialogues(directory: Path) -> int:
    """As in the shards that are there."""
    first = shard_path(directory, 0)
    return (
        int(read_info(first).settings.get("shard_dialogues", _SHARD_DIALOGUES)) if first.exists() else _SHARD_DIALOGUES
    )


def _bundle(order: Order, target: DataTarget, progress: Progress) -> Manifest | None:
    if order.bundle is None:
        return None
    return export_bundle(
        target.checkpoint,
        read_drafter(order.output),
        order.bundle,
        ExportOptions(precision=order.precision, arguments={"target": Path(order.target).name, "distilled": True}),
        force=order.force,
        check=lambda bundle, twin: check_bundle(bundle, twin, progress=progress),
        progress=progress,
    )


def _read_plan(order: Order) -> _Plan:
    """Raises RequestError when the directory holds a run that was given other times, BundleError when it is damaged."""
    fresh = _Plan(order.budget, order.data_share)
    path = order.work / PLAN_FILE
    if not path.exists():
        return fresh
    try:
        plan = _Plan(**json.loads(path.read_text("utf-8")))
        times = (plan.budget, plan.data_share)
        fresh.data_seconds = float(plan.data_seconds)
    except (ValueError, TypeError, AttributeError) as error:
        raise BundleError(f"'{path}' is damaged; delete it, or choose another --work") from error
    if times == (order.budget, order.data_share):
        return plan
    if (order.work / "training" / STATE_FILE).exists():
        raise RequestError(
            f"'{order.work}' holds a run of {plan.budget:,.0f} s, {plan.data_share:.0%} of them for data; "
            "ask for the same to go on with it, delete its 'training' to begin anew, or choose another --work"
        )
    return fresh


def _write_plan(order: Order, plan: _Plan) -> None:
    with whole_file(order.work / PLAN_FILE) as file:
        file.write(json.dumps(asdict(plan)).encode())


def _data_facts(order: Order, target: DataTarget, features: Features) -> dict[str, Any]:
    answers = sum(dialogue.answer_tokens for dialogue in features.dialogues)
    greedy = sum(dialogue.temperature == 0.0 for dialogue in features.dialogues)
    return {
        "prompts": "self-prompted from built-in openings" if order.prompts is None else f"'{order.prompts.name}'",
        "answers": f"{answers:,} tokens, held-out ones included; {greedy / len(features.dialogues):.0%} greedy",
        "target's precision": target.precision,
    }


def _setting_facts(settings: TrainSettings) -> dict[str, Any]:
    """The settings that the rest of the card does not say."""
    said = {"taps", "depth", "block_size", "vocabulary", "extensions", "seconds", "steps"}
    return {
        name.replace("_", " "): value
        for name, value in settings.as_json().items()
        if name not in said and value is not None
    }


def _throttled(progress: Progress, clock: Clock) -> Progress:
    """A message every two seconds, and the first of each stage."""
    last: tuple[str, float] = ("", float("-inf"))

    def say(message: str, fraction: float | None = None) -> None:
        nonlocal last
        stage, now = message.split(" ")[0], clock()
        if stage != last[0] or now - last[1] >= _SAY_EVERY_S:
            last = (stage, now)
            progress(message, fraction)

    return say
