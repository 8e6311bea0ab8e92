"""`dflash-ort run`: answer a prompt, or chat."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_ort.cli.console import ProgressBar, complain, warn
from dflash_ort.cli.options import (
    engine_options,
    find_bundle,
    named_values,
    sampling_options,
    sampling_params,
    template_arguments,
)
from dflash_ort.cli.statistics import comparison, statistics_lines
from dflash_ort.models.manifest import MANIFEST
from dflash_ort.params import SamplingParams

if TYPE_CHECKING:
    from dflash_ort.runtime.engine import Engine, Stream


@click.command()
@click.argument("bundle_and_prompt", nargs=-1, metavar="[BUNDLE] [PROMPT]")
@click.option("--raw", is_flag=True, help="No chat template: continue the text as it stands.")
@click.option("--system", help="A system message for the chat template.")
@click.option(
    "--template-arg", multiple=True, metavar="NAME=VALUE", help="An argument for the chat template; may be repeated."
)
@click.option(
    "--controller", help="off, fixed:N or fixed:max: how many drafts to verify a round.  [default: fixed:max]"
)
@sampling_options
@engine_options
@click.option("--stats", is_flag=True, help="Show counts and times on standard error.")
@click.option(
    "--compare", is_flag=True, help="Decode plainly too, and show the speed-up and whether the tokens are the same."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of streaming text.")
def run(bundle_and_prompt: tuple[str, ...], **options: Any) -> None:
    """Answer PROMPT with BUNDLE (the default one if none is named).

    The prompt also comes from standard input; with neither, a chat begins (Ctrl-D ends it). The text goes to
    standard output, everything else to standard error.
    """
    bundle, prompt = split_arguments(bundle_and_prompt)
    params = sampling_params(options)
    if prompt is None and not sys.stdin.isatty():
        prompt = _read_standard_input()
    if prompt is None and options["as_json"]:
        raise click.UsageError("--json needs a prompt")
    path = find_bundle(bundle)
    from dflash_ort.runtime.engine import DEFAULT_CONTROLLER, Engine

    with ProgressBar() as progress:
        engine = Engine.load(
            path,
            threads=options["threads"],
            drafter=options["drafter"],
            controller=options["controller"] or DEFAULT_CONTROLLER,
            max_context=options["max_context"],
            allow_inexact=options["allow_inexact"],
            session_options=named_values(options["session_options"], "--session-option"),
            progress=progress,
        )
    with engine:
        _warn_about_length(engine, options["controller"])
        if not engine.exact:
            warn("rows are not independent here: speculation may change the text (exact: false)")
        session = _Session(engine, params, options)
        if prompt is None:
            session.chat()
        else:
            session.answer_once(prompt)


def split_arguments(arguments: Sequence[str]) -> tuple[str | None, str | None]:
    """Bundle and prompt: a first argument that is a directory with bundle.json is the bundle."""
    if len(arguments) > 2:
        raise click.UsageError("expected at most a bundle and a prompt; put the prompt in quotes")
    if arguments and (Path(arguments[0]) / MANIFEST).is_file():
        return arguments[0], arguments[1] if len(arguments) == 2 else None
    if len(arguments) == 2:
        raise click.UsageError(
            f"'{arguments[0]}' is not a bundle: it has no {MANIFEST}; put the prompt in quotes if it is one"
        )
    return None, arguments[0] if arguments else None


def _read_standard_input() -> str:
    data = sys.stdin.buffer.read()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise click.ClickException(
            f"standard input is not UTF-8 (byte {error.start}); convert it, with iconv for instance"
        ) from error
    return text[:-1] if text.endswith("\n") else text


def _warn_about_length(engine: Engine, controller: str | None) -> None:
    """Say so, once, when more drafts are asked for than the drafter can propose."""
    value = (controller or "").partition(":")[2]
    most = engine.max_draft()
    if value.isdigit() and int(value) > most:
        warn(f"{controller} asks for more than the drafter proposes; {most} at most will be verified")


@dataclass(slots=True)
class _Session:
    """One invocation: the engine and how to answer."""

    engine: Engine
    params: SamplingParams
    options: dict[str, Any]

    def answer_once(self, prompt: str) -> None:
        stream = self._stream(self._messages(prompt))
        if self.options["as_json"]:
            with stream:
                for _ in stream:
                    pass
            click.echo(json.dumps(self._as_object(stream), ensure_ascii=False))
        else:
            self._show(stream)
        if self.options["stats"]:
            for line in statistics_lines(stream.statistics, stream.seed, stream.finish_reason):
                complain(line)
        if self.options["compare"]:
            self._compare(prompt, stream)

    def chat(self) -> None:
        """Ask and answer until standard input ends. Ctrl-C stops an answer; at the prompt it ends the chat."""
        complain(
            "chatting with " + self.engine.manifest.name + "; Ctrl-D ends, Ctrl-C stops an answer, /new starts over"
        )
        start = self._messages(None)
        messages = list(start)
        while True:
            try:
                line = input(click.style("> ", bold=True)) if sys.stdout.isatty() else input()
            except EOFError:
                complain("")
                return
            if not line.strip():
                continue
            if line.strip() == "/new":
                messages = list(start)
                continue
            messages.append({"role": "user", "content": line})
            answer = self._chat_answer(messages)
            if answer is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})

    def _chat_answer(self, messages: list[dict[str, str]]) -> str | None:
        """Stream one answer; None when the conversation cannot go on like this."""
        from dflash_ort.errors import RequestError

        try:
            stream = self._stream(messages)
        except RequestError as error:
            complain(f"error: {error} (/new starts over)")
            return None
        try:
            self._show(stream)
        except KeyboardInterrupt:
            stream.close()
            click.echo()
        if self.options["stats"]:
            for line in statistics_lines(stream.statistics, stream.seed, stream.finish_reason):
                complain(line)
        return stream.text

    def _messages(self, prompt: str | None) -> Any:
        """What the engine is given: text when raw, else messages with the system message first."""
        if self.options["raw"] and prompt is not None:
            return prompt
        system = self.options["system"]
        messages = [{"role": "system", "content": system}] if system else []
        if prompt is None:
            return messages
        return [*messages, {"role": "user", "content": prompt}] if system else prompt

    def _stream(self, prompt: Any, **overrides: Any) -> Stream:
        return self.engine.stream(
            prompt,
            self.params,
            raw=self.options["raw"],
            template_arguments=template_arguments(self.options["template_arg"]),
            **overrides,
        )

    def _show(self, stream: Stream) -> None:
        with stream:
            for chunk in stream:
                click.echo(chunk.text, nl=False)
                sys.stdout.flush()
            click.echo()

    def _as_object(self, stream: Stream) -> dict[str, Any]:
        return {
            "text": stream.text,
            "token_ids": list(stream.token_ids),
            "finish_reason": stream.finish_reason,
            "seed": stream.seed,
            "exact": self.engine.exact,
            "statistics": asdict(stream.statistics),
        }

    def _compare(self, prompt: str, stream: Stream) -> None:
        """Decode plainly with the same seed, then with speculation again, so that neither has had the cold start."""
        params = SamplingParams(**{**_fields(self.params), "seed": stream.seed})
        plain = self.engine.generate(
            self._messages(prompt), params, raw=self.options["raw"], drafter="none", controller="off",
            template_arguments=template_arguments(self.options["template_arg"]),
        )  # fmt: skip
        again = self.engine.generate(
            self._messages(prompt), params, raw=self.options["raw"],
            template_arguments=template_arguments(self.options["template_arg"]),
        )  # fmt: skip
        complain(comparison(plain, again))


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}
