"""Dialogues on the disk: one .npz file for every few, which appears whole or not at all."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash_ort.distill.dialogues import Dialogue
from dflash_ort.errors import BundleError
from dflash_ort.whole import whole_file

FORMAT_VERSION = 1
HELD_OUT_EVERY = 16
_KEYS = ("version", "target", "settings", "shard", "dialogues", "answer_tokens", "suites")
_ARRAYS = ("ids", "lengths", "spans", "answers", "temperatures", "suites", "origins", "indices")


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """What a shard says of itself. ``target``: who answered (`target.identity`); ``settings``: all that it depends on
    besides.
    """

    target: str
    settings: Mapping[str, Any]
    shard: int
    dialogues: int
    answer_tokens: int

    def check(self, path: Path, target: str, settings: Mapping[str, Any] | None = None) -> None:
        """Raise BundleError unless the shard is this target's and made with these settings, where they are given."""
        if self.target != target:
            raise BundleError(f"'{path}' was made by another target; choose another directory, or delete it")
        if settings is not None and self.settings != settings:
            changed = sorted(key for key in {*settings, *self.settings} if settings.get(key) != self.settings.get(key))
            raise BundleError(
                f"'{path}' was made with other settings ({', '.join(changed)}); choose another directory, or delete it"
            )


def shard_path(directory: Path, shard: int) -> Path:
    """Where shard number ``shard`` lies."""
    return directory / f"shard-{shard:05d}.npz"


def write_shard(
    directory: Path, shard: int, dialogues: Sequence[Dialogue], *, target: str, settings: Mapping[str, Any], vocab: int
) -> ShardInfo:
    """Write the dialogues, in the order of their numbers, whole or not at all. Raises OSError.

    Token ids are uint16 where ``vocab`` allows. Equal dialogues give equal bytes.
    """
    ordered = sorted(dialogues, key=lambda dialogue: dialogue.index)
    suites = sorted({dialogue.suite for dialogue in ordered})
    info = ShardInfo(target, dict(settings), shard, len(ordered), sum(d.answer_tokens for d in ordered))
    meta = {
        "version": FORMAT_VERSION,
        "target": info.target,
        "settings": info.settings,
        "shard": shard,
        "dialogues": info.dialogues,
        "answer_tokens": info.answer_tokens,
        "suites": suites,
    }
    arrays = {
        "ids": np.array([i for d in ordered for i in d.ids], np.uint16 if vocab <= 1 << 16 else np.uint32),
        "lengths": np.array([len(d.ids) for d in ordered], np.int32),
        "spans": np.array([span for d in ordered for span in d.spans], np.int32).reshape(-1, 2),
        "answers": np.array([len(d.spans) for d in ordered], np.int32),
        "temperatures": np.array([d.temperature for d in ordered], np.float32),
        "suites": np.array([suites.index(d.suite) for d in ordered], np.uint16),
        "origins": np.array([d.origin for d in ordered], np.int64),
        "indices": np.array([d.index for d in ordered], np.int64),
        "meta": np.frombuffer(json.dumps(meta, sort_keys=True).encode(), np.uint8),
    }
    with whole_file(shard_path(directory, shard)) as file:
        np.savez(file, allow_pickle=False, **arrays)
    return info


def read_info(path: Path) -> ShardInfo:
    """What a shard says of itself, without its dialogues. Raises BundleError that names the file."""
    return _info(_meta(path, _load(path, ("meta",))["meta"]))


def read_shard(path: Path) -> tuple[ShardInfo, list[Dialogue]]:
    """A shard's dialogues, in the order of their numbers. Raises BundleError that names the file."""
    arrays = _load(path, ("meta", *_ARRAYS))
    meta = _meta(path, arrays["meta"])
    info = _info(meta)
    ends, span_ends = np.cumsum(arrays["lengths"]), np.cumsum(arrays["answers"])
    same = {len(arrays[name]) for name in _ARRAYS if name not in ("ids", "spans")}
    if same != {info.dialogues} or ends[-1] != len(arrays["ids"]) or span_ends[-1] != len(arrays["spans"]):
        raise _damaged(path, "its arrays contradict each other")
    dialogues = []
    for i in range(info.dialogues):
        spans = arrays["spans"][span_ends[i] - arrays["answers"][i] : span_ends[i]].tolist()
        dialogues.append(
            Dialogue(
                index=int(arrays["indices"][i]),
                origin=int(arrays["origins"][i]),
                suite=meta["suites"][arrays["suites"][i]],
                temperature=round(float(arrays["temperatures"][i]), 6),
                ids=tuple(arrays["ids"][ends[i] - arrays["lengths"][i] : ends[i]].tolist()),
                spans=tuple((start, end) for start, end in spans),
            )
        )
    return info, dialogues


def read_dialogues(directory: Path, target: str, *, held_out: bool | None = None) -> Iterator[Dialogue]:
    """All dialogues of a directory, shard by shard; ``held_out``: only those that are held out, or only the others.

    Raises BundleError that names a file that is damaged or not ``target``'s, or a directory without shards.
    """
    paths = sorted(directory.glob("shard-*.npz"))
    if not paths:
        raise BundleError(f"'{directory}' holds no shards; make some first")
    for path in paths:
        info, dialogues = read_shard(path)
        info.check(path, target)
        yield from (d for d in dialogues if held_out is None or is_held_out(d) == held_out)


def is_held_out(dialogue: Dialogue) -> bool:
    """Every 16th prompt is kept from training, in all its dialogues."""
    return dialogue.origin % HELD_OUT_EVERY == HELD_OUT_EVERY - 1


def _load(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in names}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise _damaged(path, str(error) or type(error).__name__) from error


def _meta(path: Path, array: np.ndarray) -> dict[str, Any]:
    try:
        meta = json.loads(array.tobytes())
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(meta, dict) or meta.get("version") != FORMAT_VERSION or not all(key in meta for key in _KEYS):
        raise BundleError(f"'{path}' is not a shard of format {FORMAT_VERSION}; delete it, and it is made again")
    return meta


def _info(meta: Mapping[str, Any]) -> ShardInfo:
    return ShardInfo(**{name: meta[name] for name in ("target", "settings", "shard", "dialogues", "answer_tokens")})


def _damaged(path: Path, reason: str) -> BundleError:
    return BundleError(f"'{path}' is not a whole shard ({' '.join(reason.split())}); delete it, and it is made again")
