"""`bench --report`: one self-contained page, with its style and charts inside and nothing fetched from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from dflash_ort.cli import bench_charts as charts
from dflash_ort.cli.bench_table import COLUMNS, noise_lines, row_cells
from dflash_ort.cli.bench_verdict import judged_row
from dflash_ort.cli.svg import tag

Report = Mapping[str, Any]

STYLE = """
:root { color-scheme: light dark; --bg: #f6f7f9; --card: #ffffff; --fg: #1b2430; --muted: #5d6978; --line: #dfe3e8;
  --band: #f1f3f6; --good: #1a7f4b; --bad: #c0322b; --open: #a06a00;
  --c0: #2563c9; --c1: #e07b1a; --c2: #1f9463; --c3: #c23b8f; --c4: #7a52d1; --c5: #a3861a; --c6: #1597ad;
  --c7: #d0483e; --c8: #6b7785; --c9: #55752b; }
@media (prefers-color-scheme: dark) { :root { --bg: #11161d; --card: #1a212b; --fg: #e6eaf0; --muted: #98a4b3;
  --line: #303a47; --band: #202936; --good: #4cc38a; --bad: #ff7b72; --open: #e3b341;
  --c0: #6ea8ff; --c1: #ffab5c; --c2: #52cf9b; --c3: #f08cc8; --c4: #b298ff; --c5: #dcc25a; --c6: #5bd0e4;
  --c7: #ff8a80; --c8: #a5b0bd; --c9: #a6c878; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--fg); font: 15px/1.5 system-ui, -apple-system, "Segoe UI",
  Roboto, "Liberation Sans", sans-serif; }
main { max-width: 1200px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 40px 0 12px; }
.sub, .note { color: var(--muted); margin: 0; } .note { font-size: 13px; margin-top: 6px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 12px; margin-top: 20px; }
.tile, figure, .scroll, .gates { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 14px 16px; } .tile b { display: block; font-size: 24px; font-variant-numeric: tabular-nums; }
.tile span { color: var(--muted); font-size: 13px; }
.gates { list-style: none; margin: 0; padding: 4px 16px; }
.gates li { display: grid; grid-template-columns: 84px 190px 1fr; gap: 12px; padding: 10px 0; align-items: baseline; }
.gates li + li { border-top: 1px solid var(--line); }
.state { font-weight: 700; font-size: 12px; letter-spacing: .05em; text-transform: uppercase; }
.pass { color: var(--good); } .fail { color: var(--bad); } .unknown { color: var(--open); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 12.5px; font-variant-numeric: tabular-nums; }
td small { display: block; color: var(--muted); font-weight: 400; }
th, td { padding: 7px 6px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th { color: var(--muted); font-weight: 600; } tr:last-child td { border-bottom: 0; }
th:first-child, td:first-child { text-align: left; } tr.judged td { background: var(--band); font-weight: 600; }
.grid2 { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(430px, 100%), 1fr)); gap: 16px; }
figure { margin: 0; padding: 14px 16px; } figure + figure { margin-top: 16px; } .grid2 figure { margin-top: 0; }
figcaption { font-weight: 600; margin-bottom: 8px; }
svg { display: block; width: 100%; height: auto; }
svg .label { fill: var(--muted); font-size: 11px; } svg .title { font-size: 12px; }
svg .strong { fill: var(--fg); font-weight: 700; } svg .middle { text-anchor: middle; } svg .end { text-anchor: end; }
svg .grid { stroke: var(--line); stroke-width: 1; } svg .axis { stroke: var(--muted); stroke-width: 1; }
svg .reference { stroke: var(--fg); stroke-width: 1.2; stroke-dasharray: 3 3; }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round; } svg .whisker { stroke-width: 1.6; }
svg .dot { stroke: var(--card); stroke-width: 1; } svg .band { fill: var(--band); }
svg .tried { opacity: .28; } svg .taken { opacity: .95; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 14px; margin-bottom: 6px; font-size: 12px; color: var(--muted); }
.key i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 5px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 18px; margin: 0; font-size: 13px; }
dt { color: var(--muted); } dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 640px) { .gates li { grid-template-columns: 1fr; gap: 2px; } main { padding: 20px 12px; } }
"""


def page(report: Report) -> str:
    """The whole page; it is well-formed XML, too."""
    labels = [bundle["bundle"] for bundle in report["bundles"]]
    several = len(labels) > 1
    body = [_head(report), *(_tiles(report, label, several) for label in labels)]
    body += [section("Verdict", _gates(report, several))]
    for label in labels:
        body.append(section(f"Summary, {label}" if several else "Summary", _table(report, label)))
    body.append(section("Speed-up by suite", "".join(filter(None, (charts.speedups(report, b) for b in labels)))))
    figures = [figure for label in labels for figure in charts.survivals(report, label)]
    figures += [chart for bundle in report["bundles"] if (chart := charts.staircase(bundle))]
    body.append(section("Drafts and costs", grid(figures)))
    traces = [figure for label in labels for figure in charts.lengths(report, label)]
    body.append(section("Length chosen over time", _lengths(report, traces)))
    body.append(section("How it was measured", _settings(report)))
    title = tag("title", f"dflash-ort bench: {escape(', '.join(labels))}")
    meta = '<meta charset="utf-8"/><meta name="viewport" content="width=device-width, initial-scale=1"/>'
    head = tag("head", meta + title + tag("style", STYLE))
    return "<!DOCTYPE html>\n" + tag("html", head + tag("body", tag("main", "\n".join(body))), lang="en") + "\n"


def section(title: str, content: str) -> str:
    """A part of the page; nothing where it would be empty."""
    return tag("section", tag("h2", escape(title)) + content) if content else ""


def grid(figures: Sequence[str]) -> str:
    """Figures in two columns."""
    return tag("div", "".join(figures), class_="grid2") if figures else ""


def _head(report: Report) -> str:
    machine, prompts = report["machine"], len(report["prompts"]) // len(report["bundles"])
    names = ", ".join(f"{b['name']} ({b['precision']})" for b in report["bundles"])
    stopped = " Stopped before its end." if report["interrupted"] else ""
    line = f"{prompts} prompts, {report['settings']['repeats']} repeats, {machine['threads']} threads, {machine['cpu']}"
    return (
        tag("h1", "Decoding side by side")
        + tag("p", escape(names), class_="sub")
        + tag("p", escape(f"{line}, {machine['time']}.{stopped}"), class_="sub")
    )


def _tiles(report: Report, label: str, several: bool) -> str:
    """The judged controller in a few large numbers."""
    row = judged_row([row for row in report["summary"] if row["bundle"] == label])
    if row is None:
        return ""
    name = f"{row['controller']}, {label}" if several else row["controller"]
    tiles = [
        (_number(row["speedup"], "{:.2f}x"), "speed over plain decoding" + _interval(row["speedup_interval"])),
        (
            _number(row["speedup_unpadded"], "{:.2f}x"),
            "over the fastest plain decoding" + _interval(row["speedup_unpadded_interval"]),
        ),
        (_number(row["tokens_per_second"], "{:.1f}"), "tokens a second"),
        (_number(row["acceptance_length"], "{:.2f}"), "tokens a verify round (acceptance length)"),
        (f"{row['prompts'] - row['different']} of {row['prompts']}", "texts are plain decoding's, token by token"),
    ]
    shown = "".join(tag("div", tag("b", value) + tag("span", escape(what)), class_="tile") for value, what in tiles)
    return tag("p", escape(f"What {name} gives:"), class_="sub", style="margin-top:18px") + tag(
        "div", shown, class_="tiles"
    )


def _number(value: float | None, pattern: str) -> str:
    return "-" if value is None else pattern.format(value)


def _interval(interval: Sequence[float] | None) -> str:
    return f", 95% interval {interval[0]:.2f} to {interval[1]:.2f}" if interval else ""


def _gates(report: Report, several: bool) -> str:
    items = []
    for gate in report["gates"]:
        name = f"{gate['gate']}, {gate['bundle']}" if several else gate["gate"]
        state = tag("span", gate["state"], class_=f"state {gate['state']}")
        items.append(tag("li", state + tag("span", escape(name)) + tag("span", escape(gate["reason"]))))
    return tag("ul", "".join(items), class_="gates")


def _table(report: Report, label: str) -> str:
    rows = [row for row in report["summary"] if row["bundle"] == label]
    judged = judged_row(rows)
    head = tag("tr", "".join(tag("th", escape(name)) for name in COLUMNS))
    lines = "".join(tag("tr", "".join(map(_cell, row_cells(row))), class_="judged" * (row is judged)) for row in rows)
    return tag("div", tag("table", tag("thead", head) + tag("tbody", lines)), class_="scroll")


def _cell(written: str) -> str:
    """A cell; an interval goes below its value."""
    value, bracket, interval = written.partition(" [")
    below = tag("small", escape(bracket.strip() + interval)) if bracket else ""
    return tag("td", escape(value) + below)


def _lengths(report: Report, traces: Sequence[str]) -> str:
    if not traces:
        return ""
    note = (
        "Each bar is a round: as wide as the tokens it committed, as high as the drafts it verified, solid as far as "
        "they were accepted. Gaps are plain rounds."
    )
    return charts.lengths_legend() + grid(traces) + tag("p", note, class_="note")


def _settings(report: Report) -> str:
    pairs = [("bundle " + b["bundle"], _bundle_line(b)) for b in report["bundles"]]
    pairs += [(name.replace("_", " "), _shown(value)) for name, value in report["settings"].items()]
    pairs += [(name, _shown(value)) for name, value in report["machine"].items()]
    pairs += [("speeds", report["method"]["aggregate"])]
    pairs += [("intervals", f"paired bootstrap over prompts, {report['method']['resamples']:,} resamples, 95%")]
    pairs += [("noise", line) for line in noise_lines(report)]
    pairs += [("skipped", f"{s['id']}, turn {s['turn']}: {s['reason']}") for s in report["skipped"]]
    items = "".join(tag("dt", escape(name)) + tag("dd", escape(value)) for name, value in pairs)
    return tag("figure", tag("dl", items))


def _bundle_line(bundle: Mapping[str, Any]) -> str:
    template = bundle["template"]
    sha = template["sha256"][:12] if template["sha256"] else "none"
    return (
        f"{bundle['name']}, {bundle['precision']}, drafter {bundle['drafter']}, identity {bundle['identity'][:12]}, "
        f"chat template {sha}, its arguments {json.dumps(template['arguments'])}"
    )


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name.replace('_', ' ')} {inner}" for name, inner in value.items()) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return "default" if value is None else str(value)
