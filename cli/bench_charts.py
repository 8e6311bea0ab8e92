"""The charts of a benchmark's page, each from the report's plain objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from dflash_ort.cli.bench_verdict import judged_row
from dflash_ort.cli.svg import Plot, legend, tag, text
from dflash_ort.runtime.bench import OFF

Report = Mapping[str, Any]
_MOST_TRACES = 8
_KINDS = {"dflash": 0, "ngram": 1}


def figure(title: str, chart: str, note: str = "") -> str:
    """A chart with what it shows above it, and a note below."""
    caption = tag("figcaption", escape(title))
    return tag("figure", caption + chart + (tag("p", escape(note), class_="note") if note else ""))


def _of(report: Report, what: str, bundle: str) -> list[Mapping[str, Any]]:
    return [entry for entry in report[what] if entry["bundle"] == bundle]


def speedups(report: Report, bundle: str) -> str:
    """Speed over plain decoding by suite, a dot and an interval for each controller."""
    everything = [{"suite": "all suites", **row} for row in _of(report, "summary", bundle)]
    rows = [row for row in [*everything, *_of(report, "suites", bundle)] if row["controller"] != OFF]
    rows = [row for row in rows if row["speedup"] is not None]
    if not rows:
        return ""
    suites = list(dict.fromkeys(row["suite"] for row in rows))
    names = list(dict.fromkeys(row["controller"] for row in rows))
    ends = [1.0, *(end for row in rows for end in (row["speedup_interval"] or (row["speedup"],)))]
    step = len(names) + 1.5
    margin = 0.04 * (max(ends) - min(ends)) + 0.02
    height = 60.0 + len(suites) * step * 12.0
    plot = Plot(
        (min(ends) - margin, max(ends) + margin), (len(suites) * step, 0.0), width=940.0, height=height, left=120.0
    )
    for i, suite in enumerate(suites):
        if i % 2 == 0:
            top, bottom = plot.y(i * step), plot.y((i + 1) * step)
            width = plot.width - plot.left - plot.right
            plot.parts.append(tag("rect", x=plot.left, y=top, width=width, height=bottom - top, class_="band"))
        plot.parts.append(text(suite, plot.left - 10, plot.y((i + 0.5) * step) + 4, "end" + (" strong" * (i == 0))))
    plot.x_axis("speed over plain decoding (times), 95% interval", grid=True)
    plot.upright(1.0)
    for row in rows:
        at = suites.index(row["suite"]) * step + 1.25 + names.index(row["controller"])
        index, interval = names.index(row["controller"]), row["speedup_interval"]
        if interval:
            plot.whisker(interval[0], interval[1], at, index)
        shown = f" [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else ""
        plot.dot(row["speedup"], at, index, f"{row['suite']}, {row['controller']}: {row['speedup']:.3f}x{shown}")
    chart = legend([(name, i) for i, name in enumerate(names)]) + plot.svg(f"Speed-up by suite, {bundle}")
    return figure(f"Speed-up by suite, {bundle}", chart)


def survivals(report: Report, bundle: str) -> list[str]:
    """How far drafts are agreed with, one chart for each drafter, one line for each suite."""
    curves = _of(report, "survival", bundle)
    suites = list(dict.fromkeys(curve["suite"] for curve in report["survival"]))
    figures = []
    for kind in dict.fromkeys(curve["drafter"] for curve in curves):
        mine = [curve for curve in curves if curve["drafter"] == kind]
        longest = max(len(curve["survival"]) for curve in mine)
        plot = Plot((0.0, float(longest)), (0.0, 1.0))
        plot.y_axis("share of rounds")
        plot.x_axis("drafts accepted, at least", [float(i) for i in range(0, longest + 1, longest // 10 + 1)])
        for curve in mine:
            points = [(0.0, 1.0), *((float(i), s) for i, s in enumerate(curve["survival"], start=1))]
            plot.line(points, suites.index(curve["suite"]), curve["suite"])
        keys = legend([(curve["suite"], suites.index(curve["suite"])) for curve in mine])
        sources = " and ".join(sorted({curve["source"] for curve in mine}))
        chart = keys + plot.svg(f"Survival of {kind} drafts by suite, {bundle}")
        note = f"From the rounds of {sources}; positions that at least five rounds reached."
        figures.append(figure(f"Survival of {kind} drafts, {bundle}", chart, note))
    return figures


def staircase(bundle: Mapping[str, Any]) -> str:
    """What a target pass costs by rows, and a draft, as calibrated on this machine."""
    costs = bundle["costs"]
    if costs is None:
        return ""
    rows, contexts = costs["rows"], costs["contexts"]
    most = max(max(line) for line in costs["verify"]) * 1e3
    plot = Plot((0.0, float(max(rows))), (0.0, most * 1.06))
    plot.y_axis("milliseconds")
    plot.x_axis("rows of the pass (drafts verified + 1)")
    keys = []
    for c, context in enumerate(contexts):
        points = [(float(r), line[c] * 1e3) for r, line in zip(rows, costs["verify"], strict=True)]
        plot.line(points, c, f"verify behind {context:,} tokens, rows and ms")
        keys.append((f"verify behind {context:,} tokens", c))
    if any(costs["draft"]):
        draft, index = costs["draft"][0] * 1e3, len(contexts)
        name = f"one draft block behind {contexts[0]:,} tokens"
        plot.line([(1.0, draft), (float(max(rows)), draft)], index, f"{name}, ms", dashed=True)
        keys.append((name, index))
    label = bundle["bundle"]
    return figure(
        f"Cost staircase: what a pass takes here, {label}", legend(keys) + plot.svg(f"Cost of a pass by rows, {label}")
    )


def lengths(report: Report, bundle: str) -> list[str]:
    """The lengths that one controller chose along a few answers, and how much of each was accepted."""
    judged = judged_row(_of(report, "summary", bundle))
    if judged is None:
        return []
    figures: list[str] = []
    seen: set[str] = set()
    for prompt in _of(report, "prompts", bundle):
        mine = next(c for c in prompt["controllers"] if c["controller"] == judged["controller"])
        trace = next((run["trace"] for run in mine["runs"] if "trace" in run), None)
        if trace is None or prompt["suite"] in seen or len(figures) == _MOST_TRACES:
            continue
        seen.add(prompt["suite"])
        figures.append(_trace(f"{prompt['id']}, {bundle}", trace))
    return figures


def _trace(title: str, trace: Mapping[str, Sequence[Any]]) -> str:
    most = max(*trace["verified"], 4)
    plot = Plot((0.0, float(sum(trace["committed"]))), (0.0, float(most)), height=170.0)
    plot.y_axis("drafts", [float(v) for v in range(0, most + 1, max(1, most // 4))])
    plot.x_axis("tokens of the answer")
    at = 0
    for kind, verified, accepted, committed in zip(
        trace["drafter"], trace["verified"], trace["accepted"], trace["committed"], strict=True
    ):
        index = _KINDS.get(kind, 2)
        if verified:
            told = f"{kind}: {verified} verified, {accepted} accepted, {committed} committed"
            plot.bar(at, committed, 0.0, verified, "tried", index, told)
            plot.bar(at, committed, 0.0, min(accepted, verified), "taken", index, told)
        at += committed
    return figure(title, plot.svg(f"Verify length over the answer to {title}"))


def lengths_legend() -> str:
    """What the colours of `lengths` mean."""
    return legend([("drafted by dflash", 0), ("drafted by ngram", 1)])
