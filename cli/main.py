"""The `dflash-ort` command: the group, and the one place where errors become messages."""

from __future__ import annotations

import os
import sys

import click

from dflash_ort import __version__
from dflash_ort.cli.console import complain
from dflash_ort.cli.doctor import doctor
from dflash_ort.cli.export import export
from dflash_ort.cli.inspect import inspect
from dflash_ort.cli.run import run
from dflash_ort.errors import DFlashError

INTERRUPTED = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message="%(prog)s %(version)s")
def cli() -> None:
    """Fast lossless language-model decoding on CPUs.

    Make a bundle once with `dflash-ort export`, then talk to it with `dflash-ort run`. Speculation makes it faster
    and never changes a token of what it says.
    """


for command in (export, run, inspect, doctor):
    cli.add_command(command)


def main() -> None:
    """Entry point: exit status 0, 1 for an error, 2 for wrong usage, 130 when interrupted; never a traceback for a
    user's mistake.
    """
    try:
        cli.main(standalone_mode=False, prog_name="dflash-ort")
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        complain("stopped")
        sys.exit(INTERRUPTED)
    except DFlashError as error:
        complain(f"error: {error}")
        sys.exit(1)
    except BrokenPipeError:
        # Whoever read our output has left; a second complaint at exit would say nothing new.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (OSError, MemoryError) as error:
        complain(f"error: {error or 'out of memory'}")
        sys.exit(1)


if __name__ == "__main__":
    main()
