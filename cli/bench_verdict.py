"""The verdict of a benchmark: four gates that must open before a bundle goes live, each in one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dflash_ort.runtime.bench import OFF, OFF_UNPADDED

State = Literal["pass", "fail", "unknown"]


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the gates ask for; all are options of the command."""

    min_agreement: float = 0.9
    """Least share of rows with fp32's top token."""
    max_kl: float = 0.05
    """Most mean KL divergence from fp32, in nats."""
    max_ttft: float = 1.05
    """Most time to first token, over plain decoding's."""
    min_speedup: float = 1.0
    """Least speed over the fastest plain decoding's."""


@dataclass(frozen=True, slots=True)
class Gate:
    """One gate of one bundle."""

    bundle: str
    gate: str
    state: State
    reason: str


def verdict(report: Mapping[str, Any], bounds: Bounds) -> list[Gate]:
    """The gates of every bundle of a report (`runtime.bench_summary`, with its ``bundles``)."""
    gates: list[Gate] = []
    for bundle in report["bundles"]:
        label = bundle["bundle"]
        rows = [row for row in report["summary"] if row["bundle"] == label]
        judged = judged_row(rows)
        found = {
            "correctness": _correctness(bundle, rows),
            "quality": _quality(bundle, bounds),
            "latency": _latency(rows, judged, bounds),
            "capacity and cost": _capacity(judged, bounds),
        }
        gates += [Gate(label, gate, state, reason) for gate, (state, reason) in found.items()]
    return gates


def judged_row(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The controller that latency and capacity are judged by: adaptive, else the first that is not a baseline."""
    candidates = [row for row in rows if row["controller"] not in (OFF, OFF_UNPADDED)]
    adaptive = [row for row in candidates if row["controller"] == "adaptive"]
    return next(iter(adaptive or candidates), None)


def _correctness(bundle: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> tuple[State, str]:
    exact = [row for row in rows if row["controller"] != OFF_UNPADDED]
    wrong = {row["controller"]: row["different"] for row in exact if row["different"]}
    prompts = exact[0]["prompts"]
    if wrong:
        shown = ", ".join(f"{name} on {count}" for name, count in wrong.items())
        return "fail", f"other tokens than plain decoding, of {prompts} prompts: {shown}"
    if not bundle["exact"]:
        return "fail", "the tokens are plain decoding's here, but rows are not independent on this machine"
    return "pass", f"{len(exact)} controllers gave plain decoding's tokens on {prompts} prompts; rows are independent"


def _quality(bundle: Mapping[str, Any], bounds: Bounds) -> tuple[State, str]:
    quality = bundle["quality"]
    asked = f"(asked: {bounds.min_agreement:.1%} or more, {bounds.max_kl:g} or less)"
    if quality is None:
        return "unknown", f"the bundle was exported without its self-check {asked}"
    agreement, kl = quality["top1_agreement"], quality["mean_kl"]
    good = agreement >= bounds.min_agreement and kl <= bounds.max_kl
    return "pass" if good else "fail", f"same top token as fp32 {agreement:.1%}, mean KL {kl:.4f} {asked}"


def _latency(rows: Sequence[Mapping[str, Any]], judged: Mapping[str, Any] | None, bounds: Bounds) -> tuple[State, str]:
    if judged is None:
        return "unknown", "only plain decoding was measured"
    plain = next(row for row in rows if row["controller"] == OFF)
    value, interval = judged["ttft_ratio"], judged["ttft_ratio_interval"]
    state = _compare(value, interval, bounds.max_ttft, most=True)
    return state, (
        f"{judged['controller']}'s first token after {_times(value, interval)} plain decoding's time (asked: "
        f"{bounds.max_ttft:g} or less); 95% of gaps below {_p95(judged)}, plain {_p95(plain)}{_why(state, interval)}"
    )


def _capacity(judged: Mapping[str, Any] | None, bounds: Bounds) -> tuple[State, str]:
    if judged is None:
        return "unknown", "only plain decoding was measured"
    value, interval = judged["speedup_unpadded"], judged["speedup_unpadded_interval"]
    state = _compare(value, interval, bounds.min_speedup, most=False)
    cost = judged["cost_against_unpadded"]
    shown = "-" if cost is None else f"{cost:.3f}x"
    return state, (
        f"{judged['controller']} decodes at {_times(value, interval)} the speed of {OFF_UNPADDED} (asked: "
        f"{bounds.min_speedup:g} or more); a token costs {shown}, prefill counted{_why(state, interval)}"
    )


def _compare(value: float | None, interval: Sequence[float] | None, bound: float, *, most: bool) -> State:
    """Pass or fail where the whole interval lies on one side of the bound."""
    if value is None or interval is None:
        return "unknown"
    low, high = interval
    if (high <= bound) if most else (low >= bound):
        return "pass"
    return "fail" if ((low > bound) if most else (high < bound)) else "unknown"


def _why(state: State, interval: Sequence[float] | None) -> str:
    if state != "unknown":
        return ""
    return "; too few prompts to tell" if interval is None else "; the interval holds the bound: measure more"


def _times(value: float | None, interval: Sequence[float] | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}x" + (f" [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else "")


def _p95(row: Mapping[str, Any]) -> str:
    return f"{row['itl_s']['p95'] * 1e3:.1f} ms" if row["itl_s"] else "-"
