"""`tune --report`: one self-contained page, in the style of a benchmark's, with nothing fetched from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from dflash_ort.cli import bench_charts
from dflash_ort.cli.bench_report import STYLE, grid, section
from dflash_ort.cli.svg import Plot, legend, tag, text

Whole = Mapping[str, Any]

_CHARTED = ("tuned", "current", "best fixed", "best fixed by suite", "oracle by suite")
_TIMES = ("current", "tuned", "bound")
_OVER = "held-out requests"


def page(whole: Whole) -> str:
    """The whole page; it is well-formed XML, too. ``whole`` is what `tune --json` prints."""
    judged = whole["held_out"]
    figures = [figure for one in whole["families"] if (figure := _reliability(one))]
    figures += [_survival(name, suites) for name, suites in whole["survival"].items()]
    body = [
        _head(whole),
        section("Verdict", _tiles(whole) + _state(whole)),
        section("Speed on held-out requests", _table(judged) + _apart(_speeds(judged))),
        section("Acceptance", _scores(whole["families"]) + _apart(grid(figures))),
        section("Where time would be won", _times(judged)),
        section("How it was tuned", _details(whole)),
    ]
    meta = '<meta charset="utf-8"/><meta name="viewport" content="width=device-width, initial-scale=1"/>'
    head = tag("head", meta + tag("title", "dflash-ort tune") + tag("style", STYLE))
    return "<!DOCTYPE html>\n" + tag("html", head + tag("body", tag("main", "\n".join(body))), lang="en") + "\n"


def _apart(content: str) -> str:
    return tag("div", content, style="margin-top:16px")


def _head(whole: Whole) -> str:
    counts, names = whole["requests"], ", ".join(source["name"] for source in whole["sources"])
    line = (
        f"{counts['training']:,} requests to fit to, {counts['held_out']:,} held out; from {whole['from']}; "
        f"{whole['created']}"
    )
    what = "All of it" if whole["from"] == "logs" else "What comes of logs"
    estimated = f" {what} is estimated: {whole['estimated']}." if "estimated" in whole else ""
    return (
        tag("h1", "A policy, tuned")
        + tag("p", escape(names), class_="sub")
        + tag("p", escape(f"{line}.{estimated}"), class_="sub")
    )


def _tiles(whole: Whole) -> str:
    """The tuned policy in a few large numbers."""
    judged = whole["held_out"]
    tiles = [_ratio_tile(judged["ratios"][name], f"the speed of {said}") for name, said in _BESIDE.items()]
    shown = "".join(tag("div", tag("b", value) + tag("span", escape(what)), class_="tile") for value, what in tiles)
    return tag("div", shown, class_="tiles")


_BESIDE = {
    "current": "the current policy",
    "off": "plain decoding",
    "best fixed": "the best fixed length in training",
    "oracle by suite": "the best fixed length of each suite, known afterwards",
}


def _ratio_tile(ratio: Mapping[str, Any], what: str) -> tuple[str, str]:
    low, high = ratio["interval"]
    return f"{ratio['ratio']:.3f}x", f"{what}, 95% interval {low:.3f} to {high:.3f}"


def _state(whole: Whole) -> str:
    state, css = ("better", "pass") if whole["better"] else ("not better", "fail")
    told = (
        "It is written."
        if whole["better"]
        else "It is written by --force."
        if whole["written"]
        else "It is not written."
    )
    rule = f"{told} The rule: a ratio above 1, and the lower end of its interval above 0.995, on held-out requests."
    item = tag(
        "li", tag("span", state, class_=f"state {css}") + tag("span", "than the current one") + tag("span", rule)
    )
    return tag("ul", item, class_="gates", style="margin-top:16px")


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]], judged: str = "") -> str:
    cells = tag("tr", "".join(tag("th", escape(name)) for name in head))
    lines = "".join(
        tag("tr", "".join(tag("td", escape(cell)) for cell in row), class_="judged" * (row[0] == judged))
        for row in rows
    )
    return tag("div", tag("table", tag("thead", cells) + tag("tbody", lines)), class_="scroll")


def _table(judged: Whole) -> str:
    head = ("policy", "tokens/s", "times off", "95% interval", "tuned / it", "95% interval", "tokens a round")
    rows = []
    for row in judged["policies"]:
        ratio = judged["ratios"].get(row["policy"])
        chosen = judged["chosen"].get(row["policy"])
        rows.append(
            (
                f"{row['policy']} ({chosen})" if isinstance(chosen, str) else row["policy"],
                f"{row['tokens_per_second']:,.1f}",
                f"{row['speedup']:.3f}",
                "{:.3f} to {:.3f}".format(*row["speedup_interval"]),
                f"{ratio['ratio']:.3f}" if ratio else "",
                "{:.3f} to {:.3f}".format(*ratio["interval"]) if ratio else "",
                f"{row['committed'] / row['rounds']:.2f}" if row["rounds"] else "-",
            )
        )
    rows.append(("bound (knows what is accepted)", "", f"{judged['bound']['speedup']:.3f}", "", "", "", ""))
    return _rows(head, rows, "tuned")


def _speeds(judged: Whole) -> str:
    """Speed over plain decoding by suite; the same chart as a benchmark's."""
    kept = [row for row in judged["policies"] if row["policy"] in _CHARTED]
    summary = [{"bundle": _OVER, "controller": row["policy"], **row} for row in kept]
    suites = [
        {"bundle": _OVER, "controller": row["policy"], "suite": suite, **row["suites"][suite]}
        for suite in kept[0]["suites"]
        for row in kept
    ]
    return bench_charts.speedups({"summary": summary, "suites": suites}, _OVER)


def _scores(families: Sequence[Whole]) -> str:
    """How well held-out drafts were predicted, before and after."""
    head = ("drafts", "fitted trials", "requests", "log-loss", "Brier", "calibration error", "AUC")
    rows = []
    for one in families:
        pair = one["held_out"]
        cells = ["-"] * 4
        if pair is not None:
            values = [
                [pair[when][name] for when in ("before", "after")] for name in ("log_loss", "brier", "ece", "auc")
            ]
            cells = ["-" if None in (a, b) else f"{a:.4f} to {b:.4f}" for a, b in values]
        rows.append((one["family"], f"{one['trials']:,}", f"{one['requests']:,}", *cells))
    return _rows(head, rows)


def _reliability(one: Whole) -> str:
    """Share accepted by share predicted, ten bins of equal mass."""
    bins = one["reliability"]
    if not bins["after"]:
        return ""
    plot = Plot((0.0, 1.0), (0.0, 1.0), height=300.0)
    plot.y_axis("accepted")
    plot.x_axis("predicted")
    ends = ((plot.x(0.0), plot.y(0.0)), (plot.x(1.0), plot.y(1.0)))
    (x1, y1), (x2, y2) = ends
    plot.parts.append(tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_="reference"))
    for index, when in enumerate(("before", "after")):
        points = [(predicted, accepted) for predicted, accepted, _ in bins[when]]
        plot.line(points, 1 - index, f"{when}, predicted and accepted", dashed=when == "before")
    name = one["family"]
    chart = legend([("before", 1), ("after", 0)]) + plot.svg(f"Reliability of what is predicted of {name} drafts")
    note = "Held-out drafts in ten bins of as many each; on the dashed diagonal what is predicted is what happens."
    return bench_charts.figure(f"Reliability, {name}", chart, note)


def _survival(name: str, suites: Mapping[str, Sequence[float]]) -> str:
    longest = max(len(curve) for curve in suites.values())
    plot = Plot((0.0, float(longest)), (0.0, 1.0), height=300.0)
    plot.y_axis("share of blocks")
    plot.x_axis("drafts right, at least", [float(i) for i in range(0, longest + 1, longest // 10 + 1)])
    for index, (suite, curve) in enumerate(suites.items()):
        plot.line([(0.0, 1.0), *((float(i), s) for i, s in enumerate(curve, 1))], index, suite)
    keys = legend([(suite, index) for index, suite in enumerate(suites)])
    note = "All requests; what was not verified is neither a success nor a failure."
    return bench_charts.figure(f"Survival of {name} drafts", keys + plot.svg(f"Survival of {name} drafts"), note)


def _times(judged: Whole) -> str:
    """Seconds of each suite as a share of plain decoding's: current, tuned, and the least there could be."""
    by_name = {row["policy"]: row["suites"] for row in judged["policies"]}
    suites, bound = list(by_name["off"]), judged["bound"]["suites"]
    plot = Plot((0.0, float(len(suites))), (0.0, 1.05), width=940.0, height=300.0)
    plot.y_axis("share of plain decoding's time", [0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    for number, suite in enumerate(suites):
        whole = by_name["off"][suite]["seconds"]
        for place, name in enumerate(_TIMES):
            seconds = bound[suite] if name == "bound" else by_name[name][suite]["seconds"]
            share = seconds / whole if whole else 0.0
            title = f"{suite}, {name}: {seconds:.2f} s of {whole:.2f} s, {share:.0%}"
            plot.bar(number + 0.14 + 0.24 * place, 0.24, 0.0, min(share, 1.05), "taken", _COLOURS[name], title)
        plot.parts.append(text(suite, plot.x(number + 0.5), plot.height - plot.bottom + 18, "middle"))
    base = plot.y(0.0)
    plot.parts.append(tag("line", x1=plot.left, x2=plot.width - plot.right, y1=base, y2=base, class_="axis"))
    keys = legend([(name, _COLOURS[name]) for name in _TIMES])
    chart = keys + plot.svg("Time of each suite as a share of plain decoding's")
    note = "The bound knows what will be accepted. What lies between it and a policy is lost to not knowing."
    return bench_charts.figure("Time of each suite, as a share of plain decoding's", chart, note)


_COLOURS = {"tuned": 0, "current": 1, "bound": 8}


def _details(whole: Whole) -> str:
    search, costs = whole["search"], whole["costs"]
    pairs = []
    for source in whole["sources"]:
        span = f", {source['first']} to {source['last']}" if source["first"] else ""
        pairs.append(("source", f"{source['name']}, {source['requests']:,} requests{span}, sha256 {source['sha256']}"))
    pairs += [("skipped", f"{path}: {count} lines cut off or foreign") for path, count in whole["skipped"].items()]
    pairs += [("costs", f"from {costs['from']}; a pass of one row takes {costs['verify'][0][0] * 1e3:.2f} ms")]
    pairs += [("hazards kept", whole["priors_kept"])]
    for one in whole["families"]:
        means = ", ".join(f"{mean:.3f}" for mean in one["prior"]["means"])
        start = ", ".join(f"{mean:.3f}" for mean in one["start"]["means"])
        pairs.append((f"weights, {one['family']}", f"{means}; before {start}"))
    pairs += [(name.replace("_", " "), f"{new:g}, was {old:g}") for name, (old, new) in search["changes"].items()]
    before, after = search["seconds"]
    said = f"{search['trials']} policies tried, ended: {search['ended']}; {before:.2f} s to {after:.2f} s in training"
    pairs += [("search", said), ("dflash-ort", whole["dflash_ort"])]
    pairs += [("intervals", "paired bootstrap over requests, 95%; seconds are modelled by the costs")]
    items = "".join(tag("dt", escape(name)) + tag("dd", escape(value)) for name, value in pairs)
    return tag("figure", tag("dl", items))
