"""Tapped hidden states of dialogues, read again and again in training: kept beside the shards while there is room.

What is not kept is computed whenever it is asked for, by a pass of the target.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from dflash_ort.distill.dialogues import Dialogue
from dflash_ort.distill.shards import read_shard
from dflash_ort.distill.target import DataTarget
from dflash_ort.errors import BundleError
from dflash_ort.progress import Progress, silent
from dflash_ort.runtime.graph_io import Array
from dflash_ort.whole import whole_file

_LARGEST = 65504.0
"""float16's; a residual stream's outliers are cut to it."""


class Features:
    """The dialogues of a directory of shards, and their tapped states, float16 in files of a shard each.

    ``budget``: most bytes that files may take in the directory; those that belong to none of its shards, or to other
    layers or weights, are deleted. Values do not depend on whether they were kept.

    Raises BundleError for a directory without shards, or one that is damaged or another target's.
    """

    def __init__(self, target: DataTarget, directory: Path, *, budget: int) -> None:
        self._target, self._directory, self._budget = target, directory, budget
        self._width = len(target.spec.tapped_layers) * target.spec.hidden_size
        self._shards: dict[Path, list[Dialogue]] = {}
        for path in sorted(directory.glob("shard-*.npz")):
            info, dialogues = read_shard(path)
            info.check(path, target.identity)
            self._shards[self._file(info.shard, dialogues)] = dialogues
        if not self._shards:
            raise BundleError(f"'{directory}' holds no shards; make some first")
        for path in directory.glob("hidden-*.npy"):
            if path not in self._shards:
                path.unlink()
        self.dialogues = [dialogue for dialogues in self._shards.values() for dialogue in dialogues]
        """All of them, in the order of their numbers."""
        self._kept: dict[int, Array] = {}
        for path, dialogues in self._shards.items():
            self._open(path, dialogues)

    @property
    def kept(self) -> int:
        """Dialogues whose states are on the disk."""
        return len(self._kept)

    def fill(self, *, progress: Progress = silent) -> None:
        """Compute and keep the states of whole shards until all are kept or the next has no room. Raises OSError."""
        used = sum(path.stat().st_size for path in self._directory.glob("hidden-*.npy"))
        for done, (path, dialogues) in enumerate(self._shards.items()):
            size = 2 * self._width * sum(len(dialogue.ids) for dialogue in dialogues)
            if dialogues[0].index in self._kept:
                continue
            if used + size > self._budget:
                return
            progress(f"hidden states of {len(self.dialogues):,} dialogues", done / len(self._shards))
            self._write(path, dialogues)
            self._open(path, dialogues)
            used += size

    def __call__(self, dialogue: Dialogue) -> Array:
        """The states of one of the dialogues, float16 ``[tokens, taps * hidden_size]``."""
        kept = self._kept.get(dialogue.index)
        return self._compute(dialogue) if kept is None else kept

    def _compute(self, dialogue: Dialogue) -> Array:
        hidden = self._target.model.hidden(dialogue.ids)
        rounded: Array = np.clip(hidden, -_LARGEST, _LARGEST).astype(np.float16)
        return rounded

    def _file(self, shard: int, dialogues: list[Dialogue]) -> Path:
        """Named for all that the content depends on."""
        key = [self._target.identity, self._target.precision, self._target.spec.tapped_layers]
        digest = hashlib.sha256(json.dumps([*key, [dialogue.ids for dialogue in dialogues]]).encode()).hexdigest()
        return self._directory / f"hidden-{shard:05d}-{digest[:16]}.npy"

    def _open(self, path: Path, dialogues: list[Dialogue]) -> None:
        """Take a file that is there and whole; another is deleted, and made again."""
        if not path.exists():
            return
        ends = np.cumsum([len(dialogue.ids) for dialogue in dialogues])
        try:
            rows = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError):
            path.unlink()
            return
        if rows.shape != (ends[-1], self._width) or rows.dtype != np.float16:
            path.unlink()
            return
        for dialogue, end in zip(dialogues, ends.tolist(), strict=True):
            self._kept[dialogue.index] = rows[end - len(dialogue.ids) : end]

    def _write(self, path: Path, dialogues: list[Dialogue]) -> None:
        """A dialogue at a time, whole or not at all."""
        shape = (sum(len(dialogue.ids) for dialogue in dialogues), self._width)
        header = {"descr": "<f2", "fortran_order": False, "shape": shape}
        with whole_file(path) as file:
            np.lib.format.write_array_header_1_0(file, header)
            for dialogue in dialogues:
                file.write(np.ascontiguousarray(self._compute(dialogue), "<f2").data)
