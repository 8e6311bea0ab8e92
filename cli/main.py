"""The `dflash-ort` command: the group, and the one place where errors become messages."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

import click
from click.exceptions import NoArgsIsHelpError

from dflash_ort import __version__
from dflash_ort.cli.bench import bench
from dflash_ort.cli.calibrate import calibrate
from dflash_ort.cli.console import complain, show_log_warnings
from dflash_ort.cli.distill import distill
from dflash_ort.cli.doctor import doctor
from dflash_ort.cli.export import export
from dflash_ort.cli.inspect import inspect
from dflash_ort.cli.process import end_on_signals, open_streams
from dflash_ort.cli.record import record
from dflash_ort.cli.replay import replay
from dflash_ort.cli.run import run
from dflash_ort.cli.tune import tune
from dflash_ort.errors import DFlashError

INTERRUPTED = 130


class Interrupted(click.ClickException):
    """Ctrl-C, carried past click, which would add a line of its own."""


class Commands(click.Group):
    """The group of commands."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted("stopped") from None


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message="%(prog)s %(version)s")
def cli() -> None:
    """Fast lossless language-model decoding on CPUs.

    Make a bundle once with `export`, then talk to it with `run`. Speculation makes it faster and never changes a
    token of what it says.
    """


for command in (export, run, inspect, calibrate, bench, record, replay, tune, distill, doctor):
    cli.add_command(command)


def main() -> None:
    """Entry point: exit status 0, 1 for an error, 2 for wrong usage, 130 when interrupted; an error is one line on
    standard error, never a traceback.
    """
    open_streams()
    end_on_signals()
    show_log_warnings()
    try:
        # click itself ends the process, with status 1 and no word, when whoever read our output has left.
        sys.exit(cli.main(standalone_mode=False, prog_name="dflash-ort"))
    except (Interrupted, KeyboardInterrupt):
        complain("\nstopped" if sys.stderr.isatty() else "stopped")
        sys.exit(INTERRUPTED)
    except NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        complain(f"error: {_one_line(error.format_message())}{_where_to_look(error)}")
        sys.exit(error.exit_code)
    except Exception as error:
        complain(f"error: {_one_line(_message(error))}")
        sys.exit(1)


def _where_to_look(error: click.ClickException) -> str:
    context = error.ctx if isinstance(error, click.UsageError) else None
    return f" (see '{context.command_path} --help')" if context else ""


def _message(error: Exception) -> str:
    if isinstance(error, DFlashError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, MemoryError):
        return "out of memory; a smaller --max-context needs less"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(frame.filename).name}:{frame.lineno}"
    return f"{type(error).__name__}: {error} (at {place}); this is a bug in dflash-ort, please report it"


def _one_line(message: str) -> str:
    return " ".join(message.split()).removesuffix(".")


if __name__ == "__main__":
    main()
