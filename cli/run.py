"""`dflash-ort run`: answer a prompt, or chat."""

from __future__ import annotations

import codecs
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from dflash_ort.cli.console import ProgressBar, complain, warn
from dflash_ort.cli.explain import explain
from dflash_ort.cli.options import (
    backend_arguments,
    backend_options,
    engine_options,
    find_bundle,
    sampling_options,
    sampling_params,
    template_arguments,
)
from dflash_ort.cli.statistics import comparison, statistics_lines
from dflash_ort.errors import RequestError
from dflash_ort.models.manifest import CHAT_TEMPLATE, MANIFEST
from dflash_ort.params import SamplingParams

if TYPE_CHECKING:
    from dflash_ort.runtime.engine import Engine
    from dflash_ort.runtime.stream import Stream


@click.command()
@click.argument("bundle_and_prompt", nargs=-1, metavar="[BUNDLE] [PROMPT]")
@click.option("--raw", is_flag=True, help="No chat template: continue the text as it stands.")
@click.option("--system", help="A system message for the chat template.")
@click.option(
    "--template-arg", multiple=True, metavar="NAME=VALUE", help="An argument for the chat template; may be repeated."
)
@sampling_options
@engine_options
@backend_options
@click.option(
    "--explain",
    "explained",
    is_flag=True,
    help="Show what was expected of each round and what came, on standard error.",
)
@click.option("--stats", is_flag=True, help="Show counts and times on standard error.")
@click.option(
    "--compare", is_flag=True, help="Decode plainly too, and show the speed-up and whether the tokens are the same."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of streaming text.")
def run(bundle_and_prompt: tuple[str, ...], **options: Any) -> None:
    """Answer PROMPT with BUNDLE, or chat.

    BUNDLE is a directory made by `export`, by default the one that it makes without --output. The prompt also
    comes from standard input; with neither, a chat begins (Ctrl-D ends it). The text goes to standard output,
    everything else to standard error.
    """
    bundle, prompt = split_arguments(bundle_and_prompt)
    params = sampling_params(options)
    templating = template_arguments(options["template_arg"])
    if options["raw"] and (options["system"] or templating):
        raise click.UsageError("--raw takes no chat template, so --system and --template-arg have no use")
    path = find_bundle(bundle)
    if prompt is None and not sys.stdin.isatty():
        prompt = _read_standard_input()
    _check_prompt(prompt, options)
    from dflash_ort.runtime.engine import Engine

    with ProgressBar() as progress:
        engine = Engine.load(
            path,
            drafter=options["drafter"],
            controller=options["controller"],
            max_context=options["max_context"],
            allow_inexact=options["allow_inexact"],
            calibrate=not options["no_calibrate"],
            log=options["log"],
            log_text=options["log_text"],
            **backend_arguments(options),
            progress=progress,
        )
    with engine:
        _warn_about_length(engine, options["controller"])
        if engine.backend.provider != "cpu" and options["stats"]:
            complain(f"provider   {engine.backend.provider}; 'inspect --placement' shows what it left to cpu")
        if not engine.exact:
            warn("rows are not independent here: speculation may change the text (exact: false)")
        session = _Session(engine, params, options, templating)
        if prompt is None:
            session.chat()
        else:
            session.answer_once(prompt)


def split_arguments(arguments: Sequence[str]) -> tuple[str | None, str | None]:
    """Bundle and prompt: a first argument that is a directory with bundle.json is the bundle."""
    if len(arguments) > 2:
        raise click.UsageError("expected at most a bundle and a prompt; put the prompt in quotes")
    # Unlike Path.is_file, this says no to a prompt that is too long to be a path.
    if arguments and os.path.isfile(os.path.join(arguments[0], MANIFEST)):
        return arguments[0], arguments[1] if len(arguments) == 2 else None
    if len(arguments) == 2:
        raise click.UsageError(
            f"'{arguments[0]}' is not a bundle: it has no {MANIFEST}; put the prompt in quotes if it is one"
        )
    prompt = arguments[0] if arguments else None
    if prompt and os.sep in prompt and not any(letter.isspace() for letter in prompt):
        warn(f"there is no bundle at '{prompt}', so it is taken as the prompt")
    return None, prompt


def _check_prompt(prompt: str | None, options: dict[str, Any]) -> None:
    """Say what cannot work before a model is loaded for it."""
    if prompt is None:
        for name, flag in (("as_json", "--json"), ("raw", "--raw"), ("compare", "--compare")):
            if options[name]:
                raise click.UsageError(f"{flag} needs a prompt, as an argument or from standard input")
    elif not prompt.strip():
        raise RequestError("the prompt is empty; expected some text, as an argument or from standard input")


def _read_standard_input() -> str:
    data = sys.stdin.buffer.read()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise click.ClickException(
            f"standard input is not UTF-8 (byte {error.start}); convert it, with iconv for instance"
        ) from error
    return text[:-1] if text.endswith("\n") else text


def _warn_about_length(engine: Engine, controller: str) -> None:
    """Say so, once, when more drafts are asked for than the drafter can propose."""
    kind, _, value = controller.partition(":")
    most = engine.max_draft()
    if kind == "fixed" and value.isdigit() and int(value) > most:
        warn(f"{controller} asks for more than the drafter proposes; {most} at most will be verified")


@dataclass(slots=True)
class _Session:
    """One invocation: the engine and how to answer."""

    engine: Engine
    params: SamplingParams
    options: dict[str, Any]
    templating: dict[str, Any]

    def answer_once(self, prompt: str) -> None:
        stream = self._stream(self._messages(prompt))
        if self.options["as_json"]:
            with stream:
                for _ in stream:
                    pass
            unicode = codecs.lookup(sys.stdout.encoding or "ascii").name.startswith("utf")
            click.echo(json.dumps(self._as_object(stream), ensure_ascii=not unicode))
        else:
            self._show(stream)
        if self.options["stats"]:
            for line in statistics_lines(stream.statistics, stream.seed, stream.finish_reason):
                complain(line)
        if self.options["compare"]:
            self._compare(prompt, stream)

    def chat(self) -> None:
        """Ask and answer until standard input ends. Ctrl-C stops an answer; at the prompt it ends the chat."""
        if CHAT_TEMPLATE not in self.engine.manifest.files:
            raise RequestError("this bundle has no chat template, so it cannot chat; give it a prompt")
        complain(
            "chatting with " + self.engine.manifest.name + "; Ctrl-D ends, Ctrl-C stops an answer, /new starts over"
        )
        start = self._messages(None)
        messages = list(start)
        while True:
            try:
                line = _ask()
            except EOFError:
                complain("")
                return
            except UnicodeDecodeError:
                complain("error: that was not UTF-8; type it again")
                continue
            if not line.strip():
                continue
            if line.strip() == "/new":
                messages = list(start)
                complain("started over")
                continue
            messages.append({"role": "user", "content": line})
            answer = self._chat_answer(messages)
            if answer is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})

    def _chat_answer(self, messages: list[dict[str, str]]) -> str | None:
        """Stream one answer; None when the conversation cannot go on like this."""
        try:
            stream = self._stream(messages)
        except RequestError as error:
            complain(f"error: {error} (/new starts over)")
            return None
        with suppress(KeyboardInterrupt):
            self._show(stream)
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

    def _stream(self, prompt: Any) -> Stream:
        return self.engine.stream(
            prompt,
            self.params,
            raw=self.options["raw"],
            template_arguments=self.templating,
            on_round=explain if self.options["explained"] else None,
        )

    def _show(self, stream: Stream) -> None:
        with stream:
            try:
                for chunk in stream:
                    click.echo(chunk.text, nl=False)
            except KeyboardInterrupt:
                click.echo()  # what was said ends its line, and what comes next begins one
                raise
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
        messages = self._messages(prompt)
        how: dict[str, Any] = {"raw": self.options["raw"], "template_arguments": self.templating}
        plain = self.engine.generate(messages, params, drafter="none", controller="off", **how)
        again = self.engine.generate(messages, params, **how)
        complain(comparison(plain, again))


def _ask() -> str:
    """The next line of a chat, with arrow keys and history where Python has readline."""
    with suppress(ImportError):
        import readline  # noqa: F401
    if sys.stdout.isatty():
        return input("> ")
    click.echo("> ", nl=False, err=True)
    return input()


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}
