"""`--provider auto`, measured anew several times: how often it takes the provider that it should.

    python -m benchmarks.choices BUNDLE [--times 10]

It should take the fastest by the medians over all times, but the first one unless the fastest is clearly faster: the
rule of `dflash_ort.runtime.choice`. The user's cache is neither read nor written.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from dflash_ort.errors import DFlashError
from dflash_ort.runtime.choice import _CLEARLY, Choice, choose_provider
from dflash_ort.runtime.session import Backend


def verdict(choices: Sequence[Choice]) -> str:
    """Who should have been chosen, and how often it was, in a line.

    Only times that timed every provider count: one may be refused, or fail, in some of them.
    """
    names = dict.fromkeys(name for choice in choices for name in choice.seconds)
    whole = [choice for choice in choices if choice.seconds.keys() == names.keys()]
    if not whole or not names:
        return "nothing was timed" if not names else f"none of the {len(choices)} times timed all of {', '.join(names)}"
    times = [choice.times() for choice in whole]
    overall = {name: median(of[name] for of in times) for name in whole[0].seconds}
    first, best = next(iter(overall)), min(overall, key=overall.__getitem__)
    right = best if overall[best] < _CLEARLY else first
    shown = ", ".join(f"{name} {time:.2f}" for name, time in overall.items())
    taken = sum(choice.provider == right for choice in whole)
    return f"{right} is the right one (medians: {shown}); chosen {taken} of {len(whole)} times"


def main() -> None:
    """A line for each time, and a last one that counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--times", type=int, default=10)
    arguments = parser.parse_args()
    choices = []
    with TemporaryDirectory() as cache:
        os.environ["DFLASH_ORT_CACHE"] = cache
        try:
            for _ in range(arguments.times):
                choices.append(choose_provider(arguments.bundle, Backend.of(), again=True))
                print(f"{choices[-1].provider}: {choices[-1].reason()}", flush=True)
        except DFlashError as error:
            sys.exit(f"error: {error}")
    print(verdict(choices))


if __name__ == "__main__":
    main()
