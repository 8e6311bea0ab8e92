"""Writes docs/cli.md from the commands' own help, so that the two cannot disagree: python -m docs.cli_reference"""

from __future__ import annotations

import os
from pathlib import Path

import click

from dflash_ort.cli.main import cli

PAGE = Path(__file__).parent / "cli.md"


def reference() -> str:
    """The page: the group's help, then each command's."""
    os.environ.pop("COLUMNS", None)
    parts = ["# Command line", "Written by `make docs` from the commands' own help."]
    for name, command in [("dflash-ort", cli), *((f"dflash-ort {n}", c) for n, c in cli.commands.items())]:
        context = click.Context(command, info_name=name, terminal_width=100, max_content_width=100)
        context.help_option_names = ["-h", "--help"]
        parts.append(f"## {name}\n\n```\n{command.get_help(context)}\n```")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(reference(), "utf-8")
