"""Sums a benchmark's runs up: by controller, by suite, by prompt; plain objects, ready to be written as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from dflash_ort.controller.cost import CostTable
from dflash_ort.controller.names import GENERIC_COSTS
from dflash_ort.runtime.bench import OFF, OFF_UNPADDED, Key, Measurements, Run, Turn
from dflash_ort.runtime.bench_stats import (
    CONFIDENCE,
    RESAMPLES,
    Totals,
    median,
    paired_ratio,
    percentiles,
    rate,
    spread,
    survival,
)
from dflash_ort.runtime.engine import Engine

AGGREGATE = (
    "total tokens over total seconds of all prompts; a prompt's seconds are the median over repeats; "
    "speeds are of what comes after the first token"
)


def summarise(measured: Measurements) -> dict[str, Any]:
    """``summary``, ``suites``, ``prompts``, ``survival``, ``noise``, ``skipped`` and ``interrupted`` of a benchmark."""
    keys = [(bundle, entry.label) for bundle in measured.bundles for entry in measured.entries]
    suites = list(dict.fromkeys(turn.suite for turn in measured.turns))
    seed = measured.settings.seed
    return {
        "summary": [_row(key, measured.turns, seed) for key in keys],
        "suites": [
            {"suite": suite, **_row(key, [t for t in measured.turns if t.suite == suite], seed)}
            for suite in suites
            for key in keys
        ],
        "survival": [
            curve for bundle in measured.bundles for suite in suites for curve in _curves(measured, bundle, suite)
        ],
        "noise": [_noise(bundle, measured.turns) for bundle in measured.bundles],
        "prompts": [_prompt(turn, bundle, measured) for turn in measured.turns for bundle in measured.bundles],
        "skipped": [asdict(skipped) for skipped in measured.skipped],
        "interrupted": measured.interrupted,
        "method": {"aggregate": AGGREGATE, "confidence": CONFIDENCE, "resamples": RESAMPLES},
    }


def _row(key: Key, turns: Sequence[Turn], seed: int) -> dict[str, Any]:
    """One controller over some turns. Counts are of all repeats together."""
    bundle, label = key
    mine, plain, fastest = (_columns((bundle, name), turns) for name in (label, OFF, OFF_UNPADDED))
    against_off = paired_ratio(mine.decoding, plain.decoding, seed=seed)
    against_unpadded = paired_ratio(mine.decoding, fastest.decoding, seed=seed)
    first = paired_ratio(mine.first, plain.first, seed=seed)
    cost, plain_cost, least_cost = rate(mine.whole), rate(plain.whole), rate(fastest.whole)
    runs = [run for turn in turns for run in turn.runs[key]]
    return {
        "controller": label,
        "bundle": bundle,
        "tokens_per_second": rate(mine.decoding),
        "speedup": against_off.value,
        "speedup_interval": against_off.interval,
        "speedup_unpadded": against_unpadded.value,
        "speedup_unpadded_interval": against_unpadded.interval,
        "seconds_per_token": cost,
        "cost_against_off": cost / plain_cost if cost and plain_cost else None,
        "cost_against_unpadded": cost / least_cost if cost and least_cost else None,
        "ttft_s": median(run.ttft_s for run in runs),
        "ttft_ratio": first.value,
        "ttft_ratio_interval": first.interval,
        "tpot_s": median(run.decode_s / run.decoded for run in runs if run.decoded),
        "itl_s": percentiles([gap for run in runs for gap in run.gaps]),
        **_counts(runs),
        "prompts": len(turns),
        "different": sum(_differs(turn, key) for turn in turns),
    }


class _Columns:
    """A controller's totals, prompt by prompt: turns of one conversation are one prompt."""

    def __init__(self, rows: Iterable[Sequence[float]]) -> None:
        seconds, decoded, first, committed, turns = zip(*rows, strict=True)
        self.decoding = Totals(decoded, seconds)
        self.first = Totals(first, turns)
        self.whole = Totals([a + b for a, b in zip(first, seconds, strict=True)], committed)


def _columns(key: Key, turns: Sequence[Turn]) -> _Columns:
    prompts: dict[int, list[float]] = {}
    for turn in turns:
        runs = turn.runs[key]
        values = [
            *(median(column) or 0.0 for column in ((r.decode_s for r in runs), (r.decoded for r in runs))),
            *(median(column) or 0.0 for column in ((r.ttft_s for r in runs), (len(r.token_ids) for r in runs))),
            1.0,
        ]
        before = prompts.setdefault(turn.conversation, [0.0] * len(values))
        prompts[turn.conversation] = [a + b for a, b in zip(before, values, strict=True)]
    return _Columns(prompts.values())


def _counts(runs: Sequence[Run]) -> dict[str, Any]:
    names = ("committed", "rounds", "verify_rounds", "drafted", "verified", "accepted")
    counts = {name: sum(getattr(run.statistics, name) for run in runs) for name in names}
    in_verify_rounds = sum(step.committed for run in runs for step in run.steps if step.verified)
    in_rounds = sum(step.committed for run in runs for step in run.steps)
    return {
        **counts,
        "acceptance_length": in_verify_rounds / counts["verify_rounds"] if counts["verify_rounds"] else None,
        "tokens_per_round": in_rounds / counts["rounds"] if counts["rounds"] else None,
    }


def _differs(turn: Turn, key: Key) -> bool:
    return any(run.token_ids != turn.reference(key[0]) for run in turn.runs[key])


def _curves(measured: Measurements, bundle: str, suite: str) -> list[dict[str, Any]]:
    """Survival of each drafter's drafts on a suite.

    Fixed lengths alone are looked at, where some were measured: a controller that verifies more where it expects more
    sees a better curve than there is.
    """
    fixed = {entry.label for entry in measured.entries if entry.controller.startswith("fixed:")}
    everyone = {entry.label for entry in measured.entries}
    turns = [turn for turn in measured.turns if turn.suite == suite]
    kinds = sorted({s.kind for t in turns for runs in t.runs.values() for r in runs for s in r.steps if s.verified})
    curves = []
    for kind in kinds:
        for labels, source in ((fixed, "fixed lengths"), (everyone, "all controllers")):
            steps = [
                (step.verified, step.accepted)
                for turn in turns
                for label in labels
                for run in turn.runs[bundle, label]
                for step in run.steps
                if step.kind == kind
            ]
            curve, reached = survival(steps)
            if curve:
                found = {"bundle": bundle, "suite": suite, "drafter": kind, "source": source}
                curves.append({**found, "survival": curve, "rounds": reached})
                break
    return curves


def _noise(bundle: str, turns: Sequence[Turn]) -> dict[str, Any]:
    """How far plain decoding's seconds per token differ between repeats of one prompt, over their median."""
    spreads = []
    for turn in turns:
        found = spread([run.decode_s / run.decoded for run in turn.runs[bundle, OFF] if run.decoded])
        if found is not None:
            spreads.append(found)
    return {"bundle": bundle, "median": median(spreads), "worst": max(spreads, default=None)}


def _prompt(turn: Turn, bundle: str, measured: Measurements) -> dict[str, Any]:
    return {
        "suite": turn.suite,
        "id": turn.id,
        "turn": turn.turn,
        "bundle": bundle,
        "temperature": turn.temperature,
        "prompt_tokens": turn.runs[bundle, OFF][0].statistics.prompt_tokens,
        "controllers": [_controller(turn, (bundle, entry.label)) for entry in measured.entries],
    }


def _controller(turn: Turn, key: Key) -> dict[str, Any]:
    """One controller on one turn: against plain, and run by run."""
    mine, plain = _columns(key, [turn]), _columns((key[0], OFF), [turn])
    reference = turn.reference(key[0])
    other = next((r.token_ids for r in turn.runs[key] if r.token_ids != reference), None)
    return {
        "controller": key[1],
        "speedup": paired_ratio(mine.decoding, plain.decoding, seed=0).value,
        "same_tokens": other is None,
        "first_difference": None if other is None else _first_difference(other, reference),
        "runs": [_run(run) for run in turn.runs[key]],
    }


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """The first position at which they differ, which may be the shorter one's end."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _run(run: Run) -> dict[str, Any]:
    s = run.statistics
    found: dict[str, Any] = {
        "ttft_s": run.ttft_s,
        "decode_s": run.decode_s,
        "tokens_per_second": run.decoded / run.decode_s if run.decoded and run.decode_s > 0 else None,
        "tpot_s": run.decode_s / run.decoded if run.decoded else None,
        "itl_s": percentiles(run.gaps),
        "committed": s.committed,
        "rounds": s.rounds,
        "verify_rounds": s.verify_rounds,
        "acceptance_length": s.acceptance_length,
        "drafted": s.drafted,
        "verified": s.verified,
        "accepted": s.accepted,
    }
    if run.steps:
        found["trace"] = {
            "drafter": [step.kind for step in run.steps],
            "verified": [step.verified for step in run.steps],
            "accepted": [step.accepted for step in run.steps],
            "committed": [step.committed for step in run.steps],
        }
    return found


def describe(label: str, engine: Engine, costs: CostTable, template_arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A bundle's identity, its quality and what passes cost with it here (None: not measured)."""
    manifest = engine.manifest
    chat = manifest.files.get("chat_template.jinja")
    return {
        "bundle": label,
        "name": manifest.name,
        "precision": manifest.precision,
        "draft_precision": manifest.draft_precision,
        "drafter": manifest.drafter.kind,
        "identity": manifest.identity,
        "exact": engine.exact,
        "row_floor": engine.row_floor,
        "threads": engine.backend.threads,
        "provider": engine.backend.provider,
        "template": {"sha256": chat.sha256 if chat else None, "arguments": dict(template_arguments)},
        "quality": asdict(manifest.quality) if manifest.quality else None,
        "costs": None if costs is GENERIC_COSTS else asdict(costs),
    }
