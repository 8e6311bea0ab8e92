"""Providers, threads and their options side by side on one bundle: speed against the first, and whose texts are equal.

All in one process, every prompt by all before the next, in turn. Ratios are medians over prompts of decoding's tokens
per second, plain and adaptive, over the first backend's plain decoding.

    python -m benchmarks.backends BUNDLE provider=cpu provider=dnnl
    python -m benchmarks.backends BUNDLE spinning=stop spinning=always spinning=never shared_pool=1

A shared pool is the process's: it can stand beside other backends, and oneDNN's fpmath has one mode a process.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from dflash_ort import Engine
from dflash_ort.cli.bench import select_prompts
from dflash_ort.errors import DFlashError
from dflash_ort.models.texts import bench_prompts
from dflash_ort.runtime.bench import OFF, BenchSettings, Entry, Measurements, Run, measure

ADAPTIVE = "adaptive"
_ENTRIES = (Entry(OFF, OFF, "none"), Entry(ADAPTIVE, ADAPTIVE))


def settings_of(text: str) -> dict[str, Any]:
    """`Engine.load`'s arguments from ``name=value,name=value``; ``cpus`` are joined by "+"."""
    settings: dict[str, Any] = {"provider": "cpu"}
    for pair in text.split(","):
        name, _, value = pair.partition("=")
        if name == "cpus":
            settings[name] = tuple(int(cpu) for cpu in value.split("+"))
        elif name == "shared_pool":
            settings[name] = value == "1"
        elif name == "threads":
            settings[name] = int(value)
        else:
            settings[name] = value
    return settings


def load(stack: ExitStack, bundle: Path, labels: list[str]) -> dict[str, Engine]:
    """Engines by label, in this order; those with a shared pool are opened first, as ONNX Runtime demands."""
    engines = {}
    for label in sorted(labels, key=lambda label: "shared_pool=1" not in label):
        engine = Engine.load(bundle, allow_inexact=True, **settings_of(label))
        engines[label] = stack.enter_context(engine)
    return {label: engines[label] for label in labels}


def compare(found: Measurements, label: str, entry: str) -> dict[str, float]:
    """Speed over the first backend's plain decoding, and the shares of texts that are the same as its and as one's own
    plain decoding.
    """
    first = found.bundles[0]
    ratios, as_first, as_own = [], [], []
    for turn in found.turns:
        mine, base = turn.runs[label, entry], turn.runs[first, OFF]
        if all(run.decoded for run in (*mine, *base)):
            ratios.append(_seconds_per_token(base) / _seconds_per_token(mine))
        as_first.append(mine[0].token_ids == turn.reference(first))
        as_own.append(all(run.token_ids == turn.reference(label) for run in mine))
    return {
        "speed": median(ratios),
        "slowest": min(ratios),
        "fastest": max(ratios),
        "same_as_first": sum(as_first) / len(as_first),
        "same_as_own_plain": sum(as_own) / len(as_own),
        "tokens_per_second": 1 / median(_seconds_per_token(turn.runs[label, entry]) for turn in found.turns),
    }


def _seconds_per_token(runs: Any) -> float:
    return median(_rate(run) for run in runs)


def _rate(run: Run) -> float:
    return run.decode_s / max(run.decoded, 1)


def main() -> None:
    """A table, and one JSON object in the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("backends", nargs="+", metavar="NAME=VALUE[,NAME=VALUE]")
    parser.add_argument("--prompts", type=Path, help="JSON lines with turns; built in otherwise")
    parser.add_argument("--per-suite", type=int, default=1)
    parser.add_argument("--suites", help="only these, separated by commas")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    prompts = select_prompts(bench_prompts(arguments.prompts), arguments.suites, arguments.per_suite)
    settings = BenchSettings(max_new_tokens=arguments.max_new_tokens, repeats=arguments.repeats)
    report: dict[str, Any] = {"prompts": len(prompts), "repeats": arguments.repeats, "backends": []}
    try:
        with ExitStack() as stack:
            engines = load(stack, arguments.bundle, arguments.backends)
            found = measure(engines, _ENTRIES, prompts, settings)
            for label, engine in engines.items():
                about = {"backend": label, "exact": engine.exact, "row_floor": engine.row_floor}
                compared = {entry.label: compare(found, label, entry.label) for entry in _ENTRIES}
                report["backends"].append(about | compared)
            report |= engines[arguments.backends[0]].describe()
    except DFlashError as error:
        sys.exit(f"error: {error}")
    print(f"{'backend':<34} exact  rows  entry      speed [worst, best]  same as first  same as own plain")
    for row in report["backends"]:
        for entry in (OFF, ADAPTIVE):
            at = row[entry]
            spread = f"{at['speed']:6.3f} [{at['slowest']:.3f}, {at['fastest']:.3f}]"
            print(
                f"{row['backend']:<34} {row['exact']!s:<6} {row['row_floor']:<5} {entry:<10} {spread:<21}"
                f"{at['same_as_first']:13.0%}  {at['same_as_own_plain']:17.0%}"
            )
    print(json.dumps(report))


if __name__ == "__main__":
    main()
