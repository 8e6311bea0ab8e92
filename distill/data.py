"""Makes a directory of dialogues for training: prompts to scripts, scripts to slots, dialogues to shards."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_ort.distill.dialogues import TEMPERATURES, Dialogue, Script, Scripts
from dflash_ort.distill.generate import TOP_P, generate
from dflash_ort.distill.prompts import openings, read_prompts
from dflash_ort.distill.shards import read_info, shard_path, write_shard
from dflash_ort.distill.target import DataTarget
from dflash_ort.errors import RequestError
from dflash_ort.progress import Progress, silent

SHARD_DIALOGUES = 64
MAX_NEW_TOKENS = 256
DATA_VERSION = 1
"""Of how dialogues come about: a change that makes other ones from the same seed is a new version."""


@dataclass(frozen=True, slots=True)
class DataSummary:
    """What a directory holds, and how much of it this call made; tokens are the answers'."""

    shards: int
    dialogues: int
    tokens: int
    new_dialogues: int
    new_tokens: int


def make_data(
    target: DataTarget,
    prompts: Path | None,
    directory: Path,
    *,
    dialogues: int | None = None,
    tokens: int | None = None,
    deadline: float | None = None,
    seed: int = 0,
    max_new_tokens: int = MAX_NEW_TOKENS,
    shard_dialogues: int = SHARD_DIALOGUES,
    clock: Callable[[], float] = time.monotonic,
    progress: Progress = silent,
) -> DataSummary:
    """Make dialogues until the directory holds ``dialogues`` or ``tokens`` of answers, or ``clock()`` is ``deadline``.

    Whichever comes first; shards are whole, so there may be some more of the first two, and what is unfinished at the
    third is lost. ``prompts``: the user's file; None lets the target write the user's turns. With a file and no goal
    each prompt is asked once. Shards that are there already count, and are not made again.

    Raises RequestError for a prompts file or goals that cannot be used, BundleError for a shard in the directory that
    is damaged, another target's or made with other settings, OSError where the disk cannot be written.
    """
    if prompts is None:
        asked, (_, source) = None, openings()
    else:
        asked, source = read_prompts(prompts)
    if dialogues is None and tokens is None and deadline is None:
        if asked is None:
            raise RequestError("self-prompting has no end of its own; say how many dialogues or tokens, or how long")
        dialogues = len(asked)
    capacity = target.model.capacity
    scripts = Scripts(target.text, target.spec, asked, seed=seed, max_new_tokens=max_new_tokens, capacity=capacity)
    scripts.check()
    settings: dict[str, Any] = {
        "version": DATA_VERSION,
        "seed": seed,
        "prompts": source,
        "precision": target.precision,
        "max_context": capacity,
        "max_new_tokens": max_new_tokens,
        "shard_dialogues": shard_dialogues,
        "temperatures": [list(pair) for pair in TEMPERATURES],
        "top_p": TOP_P,
    }
    goal = _Goal(dialogues, tokens, deadline, clock)
    return _Maker(target, scripts, directory, settings, goal, progress).run()


@dataclass(frozen=True, slots=True)
class _Goal:
    """When there is enough; None: never for this reason."""

    dialogues: int | None
    tokens: int | None
    deadline: float | None
    clock: Callable[[], float]

    def is_late(self) -> bool:
        return self.deadline is not None and self.clock() >= self.deadline

    def is_reached(self, dialogues: int, tokens: int) -> bool:
        enough = self.dialogues is not None and dialogues >= self.dialogues
        return enough or (self.tokens is not None and tokens >= self.tokens)

    def share(self, dialogues: int, tokens: int) -> float | None:
        """How much of the nearest goal is done, by what is counted; None with no such goal."""
        pairs = ((dialogues, self.dialogues), (tokens, self.tokens))
        return max((min(done / goal, 1.0) for done, goal in pairs if goal), default=None)


class _Maker:
    """One call of `make_data` under way."""

    def __init__(
        self,
        target: DataTarget,
        scripts: Scripts,
        directory: Path,
        settings: dict[str, Any],
        goal: _Goal,
        progress: Progress,
    ) -> None:
        self._target, self._scripts, self._directory = target, scripts, directory
        self._settings, self._goal, self._progress = settings, goal, progress
        self._size: int = settings["shard_dialogues"]
        self._shards = self._dialogues = self._tokens = self._new_dialogues = self._new_tokens = 0
        self._unfinished: dict[int, list[Dialogue]] = {}

    def run(self) -> DataSummary:
        began, made = self._goal.clock(), 0
        for dialogue in generate(self._target.model, self._waiting()):
            made += dialogue.answer_tokens
            self._keep(dialogue)
            waiting = [d for shard in self._unfinished.values() for d in shard]
            count, tokens = self._dialogues + len(waiting), self._tokens + sum(d.answer_tokens for d in waiting)
            speed = made / max(self._goal.clock() - began, 1e-9)
            self._progress(
                f"{count:,} dialogues, {tokens:,} tokens of answers, {speed:,.0f} a second",
                self._goal.share(count, tokens),
            )
            if self._goal.is_late() or self._goal.is_reached(self._dialogues, self._tokens):
                break
        return DataSummary(self._shards, self._dialogues, self._tokens, self._new_dialogues, self._new_tokens)

    def _waiting(self) -> Iterator[Script]:
        """The scripts of all shards that are not there, in order; what is there is counted."""
        for shard in itertools.count():
            path = shard_path(self._directory, shard)
            if path.exists():
                info = read_info(path)
                info.check(path, self._target.identity, self._settings)
                self._count(info.dialogues, info.answer_tokens)
                continue
            begun = len(self._unfinished) * self._size
            if self._goal.is_late() or self._goal.is_reached(self._dialogues + begun, self._tokens):
                return
            self._unfinished[shard] = []
            yield from (self._scripts.script(shard * self._size + i) for i in range(self._size))

    def _keep(self, dialogue: Dialogue) -> None:
        """Put a dialogue to its shard, and write the shard when it is whole."""
        shard = dialogue.index // self._size
        self._unfinished[shard].append(dialogue)
        if len(self._unfinished[shard]) == self._size:
            info = write_shard(
                self._directory,
                shard,
                self._unfinished.pop(shard),
                target=self._target.identity,
                settings=self._settings,
                vocab=self._target.spec.vocab_size,
            )
            self._count(info.dialogues, info.answer_tokens)
            self._new_dialogues += info.dialogues
            self._new_tokens += info.answer_tokens

    def _count(self, dialogues: int, tokens: int) -> None:
        self._shards += 1
        self._dialogues += dialogues
        self._tokens += tokens
