"""Proves, on this machine, that a row's bits do not depend on the rows that share its pass (promise 1).

The whole model runs over random rows, alone, in pairs and among many, behind contexts of several lengths; every row
must come out as it did in one long pass. The verdict is kept in the user's cache, keyed by everything the bits
depend on.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dflash_ort.errors import InexactError
from dflash_ort.models.paths import cache_dir
from dflash_ort.progress import Progress
from dflash_ort.runtime.decoding import PREFILL_CHUNK
from dflash_ort.runtime.machine import machine_key
from dflash_ort.runtime.session import Backend
from dflash_ort.runtime.stored import load_json, store_json
from dflash_ort.runtime.target import TargetModel

ROW_COUNTS = (1, 2, 3, 8, 17)
_CONTEXTS = (0, 3, 61, 530)
_SEED = 20260101
PROBE_VERSION = 1


def probe(target: TargetModel) -> bool:
    """True when all rows come out the same. Takes a few dozen passes."""
    rng = np.random.default_rng(_SEED)
    for context in _CONTEXTS:
        span = min(max(ROW_COUNTS), target.spec.max_context - context)
        if span < 2:
            break
        tokens = rng.integers(0, target.spec.vocab_size, context + span)
        if not _same_everywhere(target, tokens, context, rng):
            return False
    return True


def _same_everywhere(target: TargetModel, tokens: np.ndarray, context: int, rng: np.random.Generator) -> bool:
    """Rows ``context`` and on: from one pass, and again in passes of every row count, with other rows behind them."""
    cache = target.new_cache(len(tokens) + max(ROW_COUNTS) + 2)
    span = len(tokens) - context
    whole = target.run(cache, tokens, span)
    logits, hidden = whole.logits.copy(), whole.hidden[context:].copy()
    cache.length.trim(0)
    for start in range(0, context, PREFILL_CHUNK):
        target.run(cache, tokens[start : min(start + PREFILL_CHUNK, context)], 0)
    for count in (count for count in ROW_COUNTS if count <= span):
        cache.length.trim(context)
        for start in range(0, span, count):
            rows = tokens[context + start : context + start + count]
            kept, fed = len(rows), rows
            if start == 0:
                kept, fed = 1, np.concatenate([rows[:1], rng.integers(0, target.spec.vocab_size, count - 1)])
            result = target.run(cache, fed, len(fed))
            same_logits = np.array_equal(result.logits[:kept], logits[start : start + kept])
            if not (same_logits and np.array_equal(result.hidden[:kept], hidden[start : start + kept])):
                return False
            if not np.isfinite(result.logits[:kept]).all():
                return False
            if not start:
                cache.length.trim(context)
                target.run(cache, rows, 0)
    return True


def make_exact(target: TargetModel, *, identity: str, backend: Backend, progress: Progress) -> None:
    """Set the target's row floor to the least that is exact here. Raises InexactError when none is.

    ``identity`` is the bundle's. A verdict already in the user's cache is believed.
    """
    path = _path(identity, backend, target)
    known, _ = load_json(path, "the exactness probe's verdict")
    floor = (known or {}).get("row_floor")
    if floor not in (0, 1, 2):
        progress("checking that this machine computes rows exactly (once per bundle and machine)")
        floor = least_exact_floor(target)
        store_json(path, {"row_floor": floor}, "the exactness probe's verdict")
    target.row_floor = max(floor, 1)
    if floor == 0:
        raise InexactError(
            "on this machine a row's bits depend on its neighbours, so speculation could change the text; "
            "use another precision, or allow it with --allow-inexact"
        )


def least_exact_floor(target: TargetModel) -> int:
    """The least number of rows that every pass must have to be exact here: 1, 2, or 0 when neither will do.

    Leaves the target with the last floor tried.
    """
    for floor in (1, 2):
        target.row_floor = floor
        if probe(target):
            return floor
    return 0


def _path(identity: str, backend: Backend, target: TargetModel) -> Path:
    key = machine_key(
        backend,
        bundle=identity,
        probe=PROBE_VERSION,
        prefill_chunk=PREFILL_CHUNK,
        attention_floor=target.attention_floor,
    )
    return cache_dir() / "exactness" / f"{key}.json"
