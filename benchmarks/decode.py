"""Decoding speed side by side: plain, plain without the attention floor, n-gram and DFlash at fixed lengths.

One process, one prompt at a time, every configuration on it in an order that alternates, so that the machine's
drift falls on all alike. Speeds are of the rounds after prefill. The last line is one JSON object.

    python -m benchmarks.decode --prompts FILE.jsonl --per-suite 2 --bundle fp32=DIR --unpadded fp32=DIR

An unpadded bundle is one exported with ``pad_attention=False`` (`python -m benchmarks.unpadded`): its plain
decoding is the fastest there is, and its last bits may differ from what speculation verifies.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from dflash_ort import Engine, SamplingParams
from dflash_ort.runtime.graph_io import Binding

SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "t0.8-p0.95": {"temperature": 0.8, "top_p": 0.95},
    "t1": {"temperature": 1.0},
}
SEED = 7


@dataclass
class Timer:
    """Seconds inside ONNX Runtime, taken around every graph run."""

    seconds: float = 0.0

    def install(self) -> None:
        run = Binding.run

        def timed(binding: Binding) -> None:
            began = perf_counter()
            run(binding)
            self.seconds += perf_counter() - began

        Binding.run = timed  # type: ignore[method-assign]

    def lap(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


@dataclass
class Tally:
    """What one configuration did over all prompts."""

    speeds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    acceptance: list[float] = field(default_factory=list)
    overhead: list[float] = field(default_factory=list)
    different: int = 0


def main() -> None:
    arguments = _arguments()
    timer = Timer()
    timer.install()
    prompts = list(_prompts(arguments.prompts, arguments.per_suite))
    report: dict[str, Any] = {"prompts": len(prompts), "max_new_tokens": arguments.max_new_tokens}
    for precision, directory in arguments.bundle:
        unpadded = dict(arguments.unpadded).get(precision)
        with Engine.load(directory) as engine:
            report["threads"], report["cpu"] = engine.backend.threads, _cpu()
            plain = Engine.load(unpadded, allow_inexact=True, drafter="none") if unpadded else None
            for sampling in arguments.sampling:
                tallies = _measure(engine, plain, prompts, sampling, arguments, timer)
                report.setdefault(precision, {})[sampling] = _show(precision, sampling, tallies)
            if plain is not None:
                plain.close()
    print(json.dumps(report))


def _measure(
    engine: Engine,
    unpadded: Engine | None,
    prompts: list[str],
    sampling: str,
    arguments: argparse.Namespace,
    timer: Timer,
) -> dict[str, Tally]:
    configurations = [("off", engine, "none", "off")]
    if unpadded is not None:
        configurations.append(("off-unpadded", unpadded, "none", "off"))
    configurations += [(f"{drafter} {length}", engine, drafter, length) for drafter, length in arguments.arm]
    tallies: dict[str, Tally] = defaultdict(Tally)
    params = SamplingParams(
        max_new_tokens=arguments.max_new_tokens, seed=SEED, ignore_eos=arguments.ignore_eos, **SAMPLINGS[sampling]
    )
    for _, chosen, drafter, controller in configurations:  # warm-up, not counted
        chosen.generate(prompts[0], SamplingParams(max_new_tokens=8), drafter=drafter, controller=controller)
    for number, prompt in enumerate(prompts):
        results: dict[str, list[Any]] = defaultdict(list)
        for repeat in range(arguments.repeats):
            turn = (number + repeat) % len(configurations)
            for name, chosen, drafter, controller in configurations[turn:] + configurations[:turn]:
                with chosen.stream(prompt, params, drafter=drafter, controller=controller) as stream:
                    next(stream)
                    timer.lap()
                    for _ in stream:
                        pass
                    results[name].append((stream.statistics, timer.lap(), stream.token_ids))
        _tally(tallies, results)
    return tallies


def _tally(tallies: dict[str, Tally], results: dict[str, list[Any]]) -> None:
    speed = {name: statistics.median(s.tokens_per_second or 0.0 for s, _, _ in runs) for name, runs in results.items()}
    reference = results["off"][0][2]
    for name, runs in results.items():
        tally = tallies[name]
        if not speed["off"] or not speed[name]:
            continue
        tally.speeds.append(speed[name])
        tally.ratios.append(speed[name] / speed["off"])
        tally.different += any(tokens != reference for _, _, tokens in runs)
        for s, inside, _ in runs:
            total = s.draft_s + s.verify_s + s.sample_s + s.other_s
            tally.overhead.append((total - inside) / total)
            if s.acceptance_length is not None:
                tally.acceptance.append(s.acceptance_length)


def _show(precision: str, sampling: str, tallies: dict[str, Tally]) -> dict[str, Any]:
    print(f"\n{precision}, {sampling}: medians over prompts (quartiles of the ratio)")
    print(f"{'':<18}{'tok/s':>8}{'x off':>8}{'quartiles':>16}{'accept.':>9}{'overhead':>10}{'texts changed':>15}")
    rows = {}
    for name, t in tallies.items():
        low, middle, high = statistics.quantiles(t.ratios, n=4) if len(t.ratios) > 1 else [t.ratios[0]] * 3
        acceptance = statistics.mean(t.acceptance) if t.acceptance else None
        rows[name] = {
            "tokens_per_second": statistics.median(t.speeds),
            "ratio": middle,
            "quartiles": [low, high],
            "acceptance_length": acceptance,
            "overhead": statistics.median(t.overhead),
            "texts_changed": t.different,
        }
        shown = f"{acceptance:.2f}" if acceptance is not None else "-"
        print(
            f"{name:<18}{rows[name]['tokens_per_second']:>8.1f}{middle:>8.3f}{f'{low:.3f} {high:.3f}':>16}"
            f"{shown:>9}{rows[name]['overhead']:>10.2%}{t.different:>15}"
        )
    return rows


def _prompts(path: Path, per_suite: int) -> Iterator[str]:
    taken: dict[str, int] = defaultdict(int)
    for line in path.read_text("utf-8").splitlines():
        item = json.loads(line)
        if taken[item["suite"]] < per_suite:
            taken[item["suite"]] += 1
            yield item["turns"][0]


def _cpu() -> str:
    from dflash_ort.runtime.machine import cpu_model

    return cpu_model()


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value


def _arm(text: str) -> tuple[str, str]:
    drafter, _, length = text.partition("=")
    return drafter, length


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with suite and turns")
    parser.add_argument("--per-suite", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--ignore-eos", action="store_true", help="always generate the full number of tokens")
    parser.add_argument("--bundle", type=_pair, action="append", required=True, metavar="PRECISION=DIR")
    parser.add_argument("--unpadded", type=_pair, action="append", default=[], metavar="PRECISION=DIR")
    parser.add_argument("--sampling", action="append", choices=list(SAMPLINGS), default=None)
    parser.add_argument("--arm", type=_arm, action="append", default=None, metavar="DRAFTER=LENGTH")
    arguments = parser.parse_args()
    arguments.sampling = arguments.sampling or ["greedy"]
    arguments.arm = arguments.arm or [
        ("ngram", "fixed:3"),
        ("dflash", "fixed:1"),
        ("dflash", "fixed:2"),
        ("auto", "adaptive"),
    ]
    return arguments


if __name__ == "__main__":
    main()
