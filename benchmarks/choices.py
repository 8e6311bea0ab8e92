"""`--provider auto`, measured anew several times: how often it takes the faster provider.

    python -m benchmarks.choices BUNDLE [--times 10]

The faster one is that of the medians over all times.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median

from dflash_ort.runtime.choice import choose_provider
from dflash_ort.runtime.session import Backend


def main() -> None:
    """A line for each time, and a last one that counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--times", type=int, default=10)
    arguments = parser.parse_args()
    choices = [choose_provider(arguments.bundle, Backend.of(), again=True) for _ in range(arguments.times)]
    for choice in choices:
        print(f"{choice.provider}: {choice.reason()}")
    timed = [choice.times() for choice in choices if choice.seconds]
    if timed:
        overall = {name: median(times[name] for times in timed) for name in timed[0]}
        fastest = min(overall, key=overall.__getitem__)
        print(f"{fastest} is the fastest; chosen {sum(c.provider == fastest for c in choices)} of {len(choices)} times")


if __name__ == "__main__":
    main()
