"""A benchmark as a person reads it on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dflash_ort.runtime.bench import OFF

Report = Mapping[str, Any]

COLUMNS = (
    "controller", "tok/s", "x off [95%]", "x unpadded [95%]", "cost/token", "accept.", "verified", "accepted",
    "TTFT ms", "TPOT ms", "ITL ms p50/p95/p99", "other text",
)  # fmt: skip
# Two tables on a terminal, which is narrower than a page.
_SPEED, _DETAIL = (0, 1, 2, 3, 4, 11), (0, 5, 6, 7, 8, 9, 10)
_WIDTH = 160
"""Columns to print in where nobody says how many there are."""
_STYLES = {"pass": "green", "fail": "bold red", "unknown": "yellow"}


def row_cells(row: Mapping[str, Any]) -> list[str]:
    """A row of the summary, under `COLUMNS`."""
    itl = row["itl_s"]
    return [
        row["controller"],
        _number(row["tokens_per_second"], "{:.1f}"),
        _ratio(row["speedup"], row["speedup_interval"]),
        _ratio(row["speedup_unpadded"], row["speedup_unpadded_interval"]),
        _number(row["cost_against_off"], "{:.3f}x"),
        _number(row["acceptance_length"], "{:.2f}"),
        f"{row['verified']:,}",
        f"{row['accepted']:,}",
        _milliseconds(row["ttft_s"]),
        _milliseconds(row["tpot_s"]),
        "/".join(_milliseconds(itl[p]) for p in ("p50", "p95", "p99")) if itl else "-",
        f"{row['different']} of {row['prompts']}",
    ]


def show(report: Report, console: Console) -> None:
    """Tables and verdict of all bundles."""
    several = len(report["bundles"]) > 1
    for bundle in report["bundles"]:
        label = bundle["bundle"]
        rows = [row for row in report["summary"] if row["bundle"] == label]
        title = f"{bundle['name']}, {bundle['precision']}" + (f" ({label})" if label != bundle["precision"] else "")
        cells = [row_cells(row) for row in rows]
        for heading, chosen in ((title, _SPEED), ("drafts and latency", _DETAIL)):
            _print(console, heading, [COLUMNS[i] for i in chosen], [[line[i] for i in chosen] for line in cells])
        suites = [row for row in report["suites"] if row["bundle"] == label]
        _print(console, "speed over off, by suite", *_by_suite(suites))
    for line in noise_lines(report):
        console.print(Text(line))
    console.print(Text(report["method"]["aggregate"]))
    for skipped in report["skipped"]:
        console.print(Text(f"not asked: {skipped['id']}, turn {skipped['turn']}: {skipped['reason']}"))
    for gate in report["gates"]:
        name = f"{gate['gate']} ({gate['bundle']})" if several else gate["gate"]
        state = (f"{gate['state']:<8}", _STYLES[gate["state"]])
        console.print(Text.assemble(state, f"{name}: {gate['reason']}"), soft_wrap=not console.is_terminal)


def console_for(*, stderr: bool) -> Console:
    """A console that takes text as it is; a wide one where it is no terminal."""
    console = Console(stderr=stderr, markup=False, highlight=False)
    if not console.is_terminal:
        console = Console(stderr=stderr, markup=False, highlight=False, width=_WIDTH)
    return console


def _print(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)
    console.print()


def _by_suite(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: suites down, controllers across."""
    names = [name for name in dict.fromkeys(row["controller"] for row in rows) if name != OFF]
    lines: dict[str, list[str]] = {}
    for row in rows:
        line = lines.setdefault(row["suite"], [row["suite"], str(row["prompts"])])
        if row["controller"] != OFF:
            line.append(_ratio(row["speedup"], row["speedup_interval"], decimals=2))
    return ["suite", "prompts", *names], list(lines.values())


def noise_lines(report: Report) -> list[str]:
    """How steady the machine was, a line for each bundle."""
    lines = []
    for noise in report["noise"]:
        if noise["median"] is None:
            lines.append(f"noise of the machine ({noise['bundle']}): unknown from one repeat")
        else:
            lines.append(
                f"noise of the machine ({noise['bundle']}): plain decoding's speed differed by {noise['median']:.1%} "
                f"between repeats (median prompt), {noise['worst']:.1%} on the worst"
            )
    return lines


def _ratio(value: float | None, interval: Sequence[float] | None, decimals: int = 3) -> str:
    if value is None:
        return "-"
    return f"{value:.{decimals}f}" + (f" [{interval[0]:.{decimals}f}, {interval[1]:.{decimals}f}]" if interval else "")


def _number(value: float | None, pattern: str) -> str:
    return "-" if value is None else pattern.format(value)


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"
