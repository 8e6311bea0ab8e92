"""The training loop: batches, steps, evaluations on held-out dialogues, states on the disk, an end."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from dflash_ort.distill.batches import Batches, Hidden
from dflash_ort.distill.dialogues import Dialogue
from dflash_ort.distill.evaluate import Acceptance, evaluate
from dflash_ort.distill.initial import borrow, resume_from
from dflash_ort.distill.interrupts import Deferred
from dflash_ort.distill.loss import Objective
from dflash_ort.distill.model import Drafter, DrafterShape, Pack, drafter_config, fold
from dflash_ort.distill.settings import TrainSettings
from dflash_ort.distill.shards import is_held_out
from dflash_ort.distill.state import STATE_FILE, CurvePoint, RunState, load_state, save_state
from dflash_ort.errors import CheckpointError, RequestError
from dflash_ort.exporter.checkpoint import DrafterCheckpoint, TargetCheckpoint
from dflash_ort.progress import Progress, silent
from dflash_ort.runtime.graph_io import Array

SAVE_EVERY_S = 300.0
_SAY_EVERY_S = 5.0
_SAMPLE_DIALOGUES, _SAMPLE_ROWS, _FIT_ROWS = 40, 8192, 200_000
_SHORT = 2
"""Drafts of short blocks."""
_SMOOTHING = 0.95
"""Of the running loss, a step."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A finished run: the drafter that was best on the held-out dialogues, and how it came about."""

    shape: DrafterShape
    tensors: dict[str, Array]
    """float32, under z-lab's names."""
    vocabulary: Array
    coverage: float
    """Share of the training dialogues' tokens that the draft vocabulary has."""
    acceptance: Acceptance
    """Over all held-out dialogues."""
    curve: tuple[CurvePoint, ...]
    dialogues: int
    tokens: int
    """Of the training dialogues, prompts included."""
    steps: int
    seconds: float
    rows: int
    """Block rows that were trained on."""
    ended_early: bool


def train(
    target: TargetCheckpoint,
    dialogues: Sequence[Dialogue],
    hidden: Hidden,
    settings: TrainSettings,
    directory: Path,
    *,
    vocab_size: int,
    init: DrafterCheckpoint | None = None,
    clock: Callable[[], float] = time.monotonic,
    progress: Progress = silent,
) -> Trained:
    """Train a drafter; a run that was interrupted goes on from the state in ``directory``, and ends as it would have.

    ``dialogues`` are all, the held-out ones among them; ``vocab_size``: tokens that the target can sample; ``init``: a
    drafter of the same shape to go on from. Ctrl-C, or a signal that the caller turns into an exception, ends it after
    the step and leaves a state.

    Raises RequestError for data that cannot be trained on, CheckpointError for a drafter or settings that do not fit
    the target, BundleError for a state of another run, OSError.
    """
    return _Run(target, dialogues, hidden, settings, directory, vocab_size, init, clock, progress).run()


class _Run:
    def __init__(
        self,
        target: TargetCheckpoint,
        dialogues: Sequence[Dialogue],
        hidden: Hidden,
        settings: TrainSettings,
        directory: Path,
        vocab_size: int,
        init: DrafterCheckpoint | None,
        clock: Callable[[], float],
        progress: Progress,
    ) -> None:
        self._settings, self._hidden, self._clock, self._progress = settings, hidden, clock, progress
        self._path = directory / STATE_FILE
        training = [d for d in dialogues if not is_held_out(d)]
        self._held_out = held_out_dialogues(dialogues)
        counts = np.bincount(np.concatenate([d.ids for d in training]), minlength=target.config.vocab_size)
        mask = _mask_token(counts[:vocab_size], target) if init is None else init.mask_token_id
        # Drafters use the target's head, so what one can draft may follow the data, whatever it was before.
        self._vocabulary = draft_vocabulary(counts[:vocab_size], settings.vocabulary)
        self._coverage = float(counts[self._vocabulary].sum() / counts.sum())
        self._tokens = int(counts.sum())
        self._shape = drafter_shape(target, settings, mask, init)
        self._embeddings = np.ascontiguousarray(target.tensor("model.embed_tokens.weight"), np.float32)
        device = settings.device
        self._objective = Objective(
            target,
            self._shape,
            self._vocabulary,
            decay=settings.decay,
            token_weight=settings.token_weight,
            device=device,
        )
        positions = max(len(d.ids) for d in dialogues)
        self._drafter = Drafter(self._shape, torch.from_numpy(self._embeddings[mask].copy()), positions)
        self._batches = Batches(
            training,
            hidden,
            self._embeddings,
            per_step=settings.dialogues,
            anchors=settings.anchors,
            prompt_weight=settings.prompt_weight,
            rng=np.random.default_rng([settings.seed, 1]),
            device=device,
        )
        if not len(self._batches):
            raise RequestError("no dialogue has an answer to train on; make more data")
        identity = None if init is None else dict(init.source)
        self._data = _digest([[d.index, d.ids, d.spans] for d in dialogues], identity)
        self._begin(target, training, init)
        self._drafter.to(device)
        self._optimizers = optimizers(self._drafter, settings)
        self._rates = [group["lr"] for optimizer in self._optimizers for group in optimizer.param_groups]
        self._state = self._restore()

    def _begin(self, target: TargetCheckpoint, training: Sequence[Dialogue], init: DrafterCheckpoint | None) -> None:
        if self._path.exists():
            return  # the state has it all, and the sample costs passes where it is not kept
        sample = np.concatenate([self._hidden(d)[1:] for d in training[:_SAMPLE_DIALOGUES]])[:_SAMPLE_ROWS]
        sample = sample.astype(np.float32)
        if init is None:
            texts = ((self._hidden(d), self._embeddings[list(d.ids)]) for d in _up_to(training, _FIT_ROWS))
            borrow(self._drafter, target, sample, texts, torch.Generator().manual_seed(self._settings.seed))
        else:
            resume_from(self._drafter, init, sample)

    def _restore(self) -> RunState:
        settings = self._settings.as_json()
        state = load_state(self._path, settings, self._data)
        if state is None:
            return RunState(settings, self._data, {}, [], "", 0, 0.0, 0, 0.0, 0, 0, {}, 0.0, [])
        self._drafter.load_state_dict(state.model)
        for optimizer, values in zip(self._optimizers, state.optimizers, strict=True):
            optimizer.load_state_dict(values)
        self._batches.rng.bit_generator.state = json.loads(state.rng)
        return state

    def run(self) -> Trained:
        state = self._state
        began = self._clock() - state.seconds
        saved = said = self._clock()
        if not state.curve:
            self._evaluate()
        with Deferred() as deferred:
            while not state.finished and deferred.pending is None:
                self._step()
                now = self._clock()
                state.seconds = now - began
                self._evaluate_if_due()
                if now - said >= _SAY_EVERY_S:
                    self._say()
                    said = now
                if now - saved >= SAVE_EVERY_S:
                    self._save()
                    saved = now
            self._save()
        self._drafter.load_state_dict(state.best)
        self._progress("evaluating the best drafter on all held-out dialogues")
        acceptance = self._acceptance(self._held_out)
        return Trained(
            shape=self._shape,
            tensors=fold(state.best),
            vocabulary=self._vocabulary,
            coverage=self._coverage,
            acceptance=acceptance,
            curve=tuple(state.curve),
            dialogues=len(self._batches),
            tokens=self._tokens,
            steps=state.step,
            seconds=state.seconds,
            rows=state.rows,
            ended_early=self._fraction() < 1.0,
        )

    def _step(self) -> None:
        state, settings = self._state, self._settings
        scale = rate_scale(settings, state.step, self._fraction())
        groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"] = rate * scale
        block = self._shape.block_size
        if self._fraction() < settings.short_blocks:
            block = min(block, self._shape.first_draft + _SHORT)
        batch = self._batches.draw(self._shape.extensions.num_drafts(block))
        with self._autocast():
            loss = self._objective(self._drafter(self._noisy(batch.pack), batch.previous, block), batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._drafter.parameters(), settings.clip)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        value = float(loss.detach())
        if not math.isfinite(value):
            raise RequestError(f"the loss is {value} after {state.step} steps; choose a smaller learning rate")
        state.loss = value if not state.step else _SMOOTHING * state.loss + (1 - _SMOOTHING) * value
        state.step += 1
        state.rows += len(batch.tokens) * block

    def _noisy(self, pack: Pack) -> Pack:
        """The pack with noise on its taps, the same for a step whatever was interrupted."""
        settings = self._settings
        if not settings.noise:
            return pack
        scale = cast(Tensor, self._drafter.tap_scale)
        random = torch.Generator(scale.device).manual_seed(hash((settings.seed, self._state.step)) & (2**63 - 1))
        noise = torch.randn(pack.taps.shape, generator=random, device=scale.device)
        return replace(pack, taps=pack.taps + settings.noise * scale * noise)

    def _evaluate_if_due(self) -> None:
        """Evaluations are spread evenly over the run; the last is at its end."""
        state, settings = self._state, self._settings
        due = int(self._fraction() * settings.evaluations)
        if due > state.evaluations:
            state.evaluations = due
            self._evaluate()
        state.finished = self._fraction() >= 1.0 or state.since_best >= settings.patience

    def _evaluate(self) -> None:
        state = self._state
        acceptance = self._acceptance(self._held_out[: self._settings.held_out]).acceptance_length
        state.curve.append(CurvePoint(state.step, state.seconds, state.rows, state.loss, acceptance))
        state.since_best += self._fraction() > self._settings.short_blocks
        if acceptance >= state.best_acceptance:
            state.since_best = 0 if acceptance > state.best_acceptance else state.since_best
            state.best_acceptance = acceptance
            state.best = {name: tensor.detach().cpu().clone() for name, tensor in self._drafter.state_dict().items()}

    def _acceptance(self, dialogues: Sequence[Dialogue]) -> Acceptance:
        with self._autocast():
            return evaluate(
                self._drafter, self._objective, dialogues, self._hidden, self._embeddings, self._settings.device
            )

    def _autocast(self) -> AbstractContextManager[Any]:
        kind = torch.device(self._settings.device).type
        return nullcontext() if kind == "cpu" else torch.autocast(kind, torch.bfloat16)

    def _fraction(self) -> float:
        state, settings = self._state, self._settings
        if settings.steps is not None:
            return min(state.step / settings.steps, 1.0)
        return min(state.seconds / (settings.seconds or 1.0), 1.0)

    def _say(self) -> None:
        state, done = self._state, self._fraction()
        left = state.seconds * (1.0 - done) / max(done, 1e-9)
        self._progress(
            f"training: step {state.step:,}, loss {state.loss:.3f}, acceptance length "
            f"{state.curve[-1].acceptance_length:.2f}, {state.rows / max(state.seconds, 1e-9):,.0f} rows/s, "
            f"{left / 60:,.0f} min left",
            done,
        )

    def _save(self) -> None:
        state = self._state
        state.model = self._drafter.state_dict()
        state.optimizers = [optimizer.state_dict() for optimizer in self._optimizers]
        state.rng = json.dumps(self._batches.rng.bit_generator.state)
        save_state(self._path, state)


def held_out_dialogues(dialogues: Sequence[Dialogue]) -> list[Dialogue]:
    """Those to evaluate on: the greedy ones, or all where none is. Raises RequestError when there are none."""
    held_out = [d for d in dialogues if is_held_out(d) and any(end - start > 1 for start, end in d.spans)]
    if not held_out or len(held_out) == len(dialogues):
        raise RequestError(
            f"{len(dialogues)} dialogues are too few to hold some out; give at least 16 prompts, or make more data"
        )
    return [d for d in held_out if d.temperature == 0.0] or held_out


def draft_vocabulary(counts: Array, most: int) -> Array:
    """The ``most`` tokens seen most, int64, ascending; ``counts`` int64 ``[tokens that can be sampled]``."""
    return np.sort(np.argsort(-counts, kind="stable")[:most]).astype(np.int64)


def _up_to(dialogues: Sequence[Dialogue], tokens: int) -> list[Dialogue]:
    """The first dialogues, of about so many tokens together."""
    ends = np.cumsum([len(dialogue.ids) for dialogue in dialogues])
    return list(dialogues[: int(np.searchsorted(ends, tokens)) + 1])


def _mask_token(counts: Array, target: TargetCheckpoint) -> int:
    """A token that the data has not, or hardly, and that is no end or beginning; the first of equals."""
    taken = [token for token in (*target.eos_token_ids, target.bos_token_id) if token is not None]
    counts = counts.copy()
    counts[[token for token in taken if 0 <= token < len(counts)]] = np.iinfo(counts.dtype).max
    return int(np.argmin(counts))


def drafter_shape(
    target: TargetCheckpoint, settings: TrainSettings, mask_token_id: int, init: DrafterCheckpoint | None = None
) -> DrafterShape:
    """The shape that the settings ask for. Raises CheckpointError unless ``init`` has it."""
    c = target.config
    config = drafter_config(c, settings.depth)
    if init is not None:
        init.check_fits(c)
        wanted = (settings.depth, settings.block_size, settings.taps, settings.extensions)
        found = (init.config.num_layers, init.block_size, init.target_layer_ids, init.extensions)
        for name, ours, theirs in zip(("depth", "block size", "taps", "extensions"), wanted, found, strict=True):
            if ours != theirs:
                raise CheckpointError(f"the drafter to go on from has {name} {theirs}, the settings say {ours}")
        config = init.config
        if config.attention_bias or config.attention_out_bias or config.mlp_bias:
            raise CheckpointError("the drafter to go on from has biases, which are not trained; begin without --init")
    return DrafterShape(
        config, settings.block_size, settings.taps, settings.extensions, mask_token_id, target.config.num_layers
    )


def optimizers(drafter: Drafter, settings: TrainSettings) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the matrices and AdamW for the rest (norms and tables of embeddings)."""
    matrices, rest = list[torch.nn.Parameter](), list[torch.nn.Parameter]()
    for name, parameter in drafter.named_parameters():
        is_matrix = parameter.ndim == 2 and not name.startswith("slot_embeddings")
        (matrices if is_matrix else rest).append(parameter)
    betas = (0.9, 0.98)
    if settings.muon is None:
        groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        return [torch.optim.AdamW(groups, lr=settings.learning_rate, betas=betas)]
    muon = torch.optim.Muon(
        matrices,
        lr=settings.muon,
        weight_decay=settings.weight_decay,
        adjust_lr_fn="match_rms_adamw",
        ns_steps=4,
    )
    return [muon, torch.optim.AdamW(rest, lr=settings.learning_rate, weight_decay=0.0, betas=betas)]


def rate_scale(settings: TrainSettings, step: int, fraction: float) -> float:
    """What of the learning rate a step has: a linear rise over the warm-up, a half cosine over the run."""
    cosine = 0.5 * (1 + math.cos(math.pi * fraction))
    return min(1.0, (step + 1) / settings.warm_up) * (cosine * (1 - settings.final_rate) + settings.final_rate)


def _digest(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
