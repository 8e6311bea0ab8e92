"""Providers, threads and their options side by side on one bundle: speed against the first, and whose texts are equal.

All in one process, every prompt by all before the next, in turn. Ratios are medians over prompts of decoding's tokens
per second, plain and adaptive, over the first backend's plain decoding.

    python -m benchmarks.backends BUNDLE provider=cpu provider=dnnl
    python -m benchmarks.backends BUNDLE spinning=stop spinning=always spinning=never cpus=0+1

A process has a shared pool for all graphs or for none, so `shared_pool=1` must be of all backends of a call or of none;
and oneDNN's fpmath has one mode a process.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import click

from dflash_ort import Engine
from dflash_ort.cli.bench import select_prompts
from dflash_ort.errors import DFlashError, RequestError
from dflash_ort.models.texts import bench_prompts
from dflash_ort.runtime.bench import OFF, BenchSettings, Entry, Measurements, Run, measure

ADAPTIVE = "adaptive"
_ENTRIES = (Entry(OFF, OFF, "none"), Entry(ADAPTIVE, ADAPTIVE))


_SETTINGS: dict[str, tuple[Callable[[str], Any], str]] = {
    "provider": (str, "a name"),
    "threads": (int, "a whole number"),
    "fpmath": (str, "a name"),
    "cpus": (lambda text: tuple(map(int, text.split("+"))), "processors joined by +, as in 0+1"),
    "spinning": (str, "a name"),
    "shared_pool": ({"0": False, "1": True}.__getitem__, "0 or 1"),
}
"""How each is read, and what is expected."""


def settings_of(text: str) -> dict[str, Any]:
    """`Engine.load`'s arguments from ``name=value,name=value``; ``cpus`` are joined by "+". Raises RequestError."""
    settings: dict[str, Any] = {"provider": "cpu"}
    for pair in text.split(","):
        name, _, value = pair.partition("=")
        if name not in _SETTINGS:
            raise RequestError(f"unknown setting '{name}' in '{text}'; expected {', '.join(_SETTINGS)}")
        read, expected = _SETTINGS[name]
        try:
            settings[name] = read(value)
        except (ValueError, KeyError):
            raise RequestError(f"{name} is '{value}' in '{text}'; expected {expected}") from None
    return settings


def load(stack: ExitStack, bundle: Path, labels: list[str]) -> dict[str, Engine]:
    """Engines by label, in this order. Raises RequestError for labels that cannot stand beside each other."""
    settings = {label: settings_of(label) for label in labels}
    for label in settings:
        if labels.count(label) > 1:
            raise RequestError(f"backend '{label}' is named twice; once is enough")
    if len({chosen.get("shared_pool", False) for chosen in settings.values()}) > 1:
        raise RequestError("a shared pool is the whole process's; give shared_pool=1 to all backends or to none")
    return {
        label: stack.enter_context(Engine.load(bundle, allow_inexact=True, **chosen))
        for label, chosen in settings.items()
    }


def compare(found: Measurements, label: str, entry: str) -> dict[str, float]:
    """Speed over the first backend's plain decoding, and the shares of texts that are the same as its and as one's own
    plain decoding. Raises RequestError when no answer has a speed.
    """
    first = found.bundles[0]
    ratios, rates, as_first, as_own = [], [], [], []
    for turn in found.turns:
        mine, base = turn.runs[label, entry], turn.runs[first, OFF]
        if all(run.decoded for run in (*mine, *base)):
            rates.append(_seconds_per_token(mine))
            ratios.append(_seconds_per_token(base) / rates[-1])
        as_first.append(mine[0].token_ids == turn.reference(first))
        as_own.append(all(run.token_ids == turn.reference(label) for run in mine))
    if not ratios:
        raise RequestError(
            f"no prompt's answers by '{label}' and '{first}' go on behind the first chunk, so there is no speed; "
            "choose other prompts or a larger --max-new-tokens"
        )
    return {
        "speed": median(ratios),
        "slowest": min(ratios),
        "fastest": max(ratios),
        "same_as_first": sum(as_first) / len(as_first),
        "same_as_own_plain": sum(as_own) / len(as_own),
        "tokens_per_second": 1 / median(rates),
    }


def _seconds_per_token(runs: Any) -> float:
    return median(_rate(run) for run in runs)


def _rate(run: Run) -> float:
    return run.decode_s / run.decoded


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def main() -> None:
    """A table, and one JSON object in the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("backends", nargs="+", metavar="NAME=VALUE[,NAME=VALUE]")
    parser.add_argument("--prompts", type=Path, help="JSON lines with turns; built in otherwise")
    parser.add_argument("--per-suite", type=_positive, default=1)
    parser.add_argument("--suites", help="only these, separated by commas")
    parser.add_argument("--max-new-tokens", type=_positive, default=48)
    parser.add_argument("--repeats", type=_positive, default=3)
    arguments = parser.parse_args()
    settings = BenchSettings(max_new_tokens=arguments.max_new_tokens, repeats=arguments.repeats)
    try:
        prompts = select_prompts(bench_prompts(arguments.prompts), arguments.suites, arguments.per_suite)
        report: dict[str, Any] = {"prompts": len(prompts), "repeats": arguments.repeats, "backends": []}
        with ExitStack() as stack:
            engines = load(stack, arguments.bundle, arguments.backends)
            found = measure(engines, _ENTRIES, prompts, settings)
            for label, engine in engines.items():
                about = {"backend": label, "exact": engine.exact, "row_floor": engine.row_floor}
                compared = {entry.label: compare(found, label, entry.label) for entry in _ENTRIES}
                report["backends"].append(about | compared)
            report |= engines[arguments.backends[0]].describe()
    except click.BadParameter as error:
        sys.exit(f"error: {error.message}")
    except (DFlashError, OSError) as error:
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
