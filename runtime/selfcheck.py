"""The end of every export: the written bundle is run on text that nothing was calibrated on.

Logits must be finite, rows independent of their neighbours; what quantising changed is measured against the fp32
twin, and the drafter is measured on prompts, since a drafter wired wrongly costs time and says nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflash_ort.controller.fixed import FixedLength
from dflash_ort.errors import BundleError, RequestError
from dflash_ort.models.manifest import DrafterCheck, Quality, SelfCheck
from dflash_ort.models.texts import CheckTexts, selfcheck_texts
from dflash_ort.params import SamplingParams
from dflash_ort.progress import Progress, silent
from dflash_ort.records import RoundRecord
from dflash_ort.runtime import machine
from dflash_ort.runtime.bundle import OpenBundle, open_bundle
from dflash_ort.runtime.decoding import PREFILL_CHUNK
from dflash_ort.runtime.engine import Engine
from dflash_ort.runtime.exactness import least_exact_floor
from dflash_ort.runtime.session import Backend, runtime_version
from dflash_ort.runtime.target import TargetModel

DRAFT_TOKENS = 48
"""Tokens generated for each of the drafter's prompts."""


def check_bundle(directory: Path, reference: Path | None, *, progress: Progress = silent) -> tuple[Quality, SelfCheck]:
    """Run a bundle's self-check. ``reference`` is its fp32 twin, None when it is fp32 itself.

    Raises BundleError when logits are not finite.
    """
    texts = selfcheck_texts()
    backend = Backend.of()
    bundle = open_bundle(directory, backend, with_drafter=False)
    twin = bundle if reference is None else open_bundle(reference, backend, with_drafter=False)
    quality = _quality(bundle, twin, texts, progress)
    del twin
    progress("self-check: rows independent of their neighbours")
    floor = least_exact_floor(bundle.target)
    has_drafter = bundle.manifest.drafter.kind == "dflash"
    del bundle
    drafter = _drafter(directory, texts, progress) if has_drafter else None
    return quality, SelfCheck(
        rows_independent=floor > 0, cpu=machine.cpu_model(), onnxruntime=runtime_version(), drafter=drafter
    )


def _sequences(bundle: OpenBundle, texts: CheckTexts) -> list[list[int]]:
    """Token ids of every passage and dialogue, cut to the context."""
    limit = bundle.manifest.target.max_context - 2
    text = bundle.text
    encoded = [text.encode(passage, raw=True, template_arguments={}) for passage in texts.passages]
    for dialogue in texts.dialogues:
        if text.template is None:
            plain = "\n\n".join(message["content"] for message in dialogue)
            encoded.append(text.encode(plain, raw=True, template_arguments={}))
        else:
            encoded.append(text.encode(dialogue, raw=False, template_arguments={"add_generation_prompt": False}))
    return [ids[:limit] for ids in encoded]


@dataclass(slots=True)
class _Sums:
    rows: int = 0
    kl: float = 0.0
    agree: int = 0
    nll: float = 0.0
    reference_nll: float = 0.0


def _quality(bundle: OpenBundle, twin: OpenBundle, texts: CheckTexts, progress: Progress) -> Quality:
    sums = _Sums()
    sequences = _sequences(bundle, texts)
    for done, ids in enumerate(sequences):
        progress("self-check: quality", done / len(sequences))
        both = [_all_logits(bundle.target, ids)]
        if twin is not bundle:
            both.append(_all_logits(twin.target, ids))
        for start, pieces in enumerate(zip(*both, strict=True)):
            _add(sums, pieces[0], pieces[-1], ids[start * PREFILL_CHUNK + 1 :])
    return Quality(
        mean_kl=sums.kl / sums.rows,
        top1_agreement=sums.agree / sums.rows,
        perplexity=float(np.exp(sums.nll / sums.rows)),
        reference_perplexity=float(np.exp(sums.reference_nll / sums.rows)),
        rows=sums.rows,
        text_sha256=texts.sha256,
    )


def _all_logits(target: TargetModel, ids: Sequence[int]) -> Iterator[np.ndarray]:
    """Logits of every row, float32 ``[rows, vocab]``, a chunk at a time; each chunk is overwritten by the model's next
    pass.
    """
    cache = target.new_cache(len(ids) + 2)
    for start in range(0, len(ids), PREFILL_CHUNK):
        piece = ids[start : start + PREFILL_CHUNK]
        yield target.run(cache, piece, len(piece)).logits


def _add(sums: _Sums, logits: np.ndarray, reference: np.ndarray, following: Sequence[int]) -> None:
    """Compare the rows that a token of the text follows."""
    if not (np.isfinite(logits).all() and np.isfinite(reference).all()):
        raise BundleError(
            "the exported model's logits are not finite; the checkpoint is damaged or does not survive this precision"
        )
    rows = min(len(logits), len(following))
    ours, theirs = _log_softmax(logits[:rows]), _log_softmax(reference[:rows])
    at = (np.arange(rows), np.asarray(following[:rows]))
    sums.rows += rows
    sums.kl += float((np.exp(theirs) * (theirs - ours)).sum())
    sums.agree += int((ours.argmax(1) == theirs.argmax(1)).sum())
    sums.nll -= float(ours[at].sum())
    sums.reference_nll -= float(theirs[at].sum())


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


class _WholeBlocks(FixedLength):
    """Verifies whole blocks and keeps how much of each was accepted and committed."""

    def __init__(self) -> None:
        super().__init__(None)
        self.rounds: list[tuple[int, int]] = []

    def observe(self, record: RoundRecord) -> None:
        self.rounds += [(part.num_accepted, part.num_committed) for part in record.requests if part.num_verified]


def _drafter(directory: Path, texts: CheckTexts, progress: Progress) -> DrafterCheck:
    """Acceptance of whole blocks under greedy decoding."""
    counter = _WholeBlocks()
    with Engine.load(directory, provider="cpu", allow_inexact=True) as engine:
        for done, prompt in enumerate(texts.prompts):
            progress("self-check: drafter", done / len(texts.prompts))
            with suppress(RequestError):  # a prompt that does not fit a small context
                engine.generate(
                    prompt, SamplingParams(max_new_tokens=DRAFT_TOKENS), drafter="dflash", controller=counter
                )
        max_draft = engine.max_draft("dflash")
    if not counter.rounds:
        return DrafterCheck(acceptance_length=1.0, survival=(0.0,) * max_draft, verify_rounds=0)
    accepted, committed = np.array(counter.rounds).T
    return DrafterCheck(
        acceptance_length=float(committed.mean()),
        survival=tuple(float(np.mean(accepted >= i)) for i in range(1, max_draft + 1)),
        verify_rounds=len(accepted),
    )
