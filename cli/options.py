"""Options that several commands share, and how they become the library's arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from dflash_ort.defaults import DEFAULT_CONTROLLER, FPMATHS, PROVIDERS, SPINNINGS
from dflash_ort.models.manifest import MANIFEST
from dflash_ort.models.paths import default_bundle
from dflash_ort.params import SamplingParams

F = TypeVar("F", bound=Callable[..., Any])

_MOST_CPUS = 2**16
DRAFTERS = ("auto", "dflash", "ngram", "none")


def _apply(options: Iterable[Callable[[F], F]], function: F) -> F:
    for option in reversed(list(options)):
        function = option(function)
    return function


def sampling_options(function: F) -> F:
    """SamplingParams under vLLM's names."""
    return _apply(
        (
            click.option(
                "--max-new-tokens", type=int, help="Longest answer, in tokens.  [default: to the context's end]"
            ),
            click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy."),
            click.option(
                "--top-k", type=int, default=0, show_default=True, help="Keep the k likeliest tokens; 0 keeps all."
            ),
            click.option(
                "--top-p",
                type=float,
                default=1.0,
                show_default=True,
                help="Keep the fewest tokens that are this likely together.",
            ),
            click.option(
                "--min-p",
                type=float,
                default=0.0,
                show_default=True,
                help="Keep tokens at least this fraction as likely as the likeliest.",
            ),
            click.option(
                "--repetition-penalty",
                type=float,
                default=1.0,
                show_default=True,
                help="Above 1 for less of what prompt and answer hold already.",
            ),
            click.option(
                "--presence-penalty",
                type=float,
                default=0.0,
                show_default=True,
                help="Taken once from tokens already in the answer.",
            ),
            click.option(
                "--frequency-penalty",
                type=float,
                default=0.0,
                show_default=True,
                help="Taken for each time a token is in the answer.",
            ),
            click.option(
                "--logit-bias", multiple=True, metavar="ID=BIAS", help="Add BIAS to a token's logit; may be repeated."
            ),
            click.option(
                "--min-tokens", type=int, default=0, show_default=True, help="No end before this many tokens."
            ),
            click.option(
                "--stop", multiple=True, metavar="TEXT", help="End the answer before this text; may be repeated."
            ),
            click.option(
                "--stop-token-ids",
                type=int,
                multiple=True,
                metavar="ID",
                help="End the answer at this token; may be repeated.",
            ),
            click.option("--ignore-eos", is_flag=True, help="Go on after the end-of-sequence token."),
            click.option("--seed", type=int, help="Same seed, same text.  [default: drawn, and shown by --stats]"),
        ),
        function,
    )


SAMPLING_NAMES = tuple(SamplingParams.__dataclass_fields__)


def engine_options(function: F) -> F:
    """How the engine is loaded."""
    return _apply(
        (
            click.option(
                "--drafter",
                type=click.Choice(DRAFTERS),
                default="auto",
                show_default=True,
                help="Who drafts; auto: the bundle's.",
            ),
            click.option(
                "--controller",
                default=DEFAULT_CONTROLLER,
                show_default=True,
                metavar="NAME",
                help="How many drafts to verify a round: adaptive, off, fixed:N, fixed:max, threshold:P, hill-climb, "
                "step-ratio.",
            ),
            click.option(
                "--no-calibrate", is_flag=True, help="Do not measure this machine, where that was not done yet."
            ),
            click.option("--log", type=click.Path(), help="Append the round log to this file; no text is logged."),
            click.option("--log-text", is_flag=True, help="Log prompts and answers too."),
            click.option(
                "--max-context", type=int, help="Most tokens of prompt and answer together.  [default: the bundle's]"
            ),
            click.option(
                "--allow-inexact", is_flag=True, help="Run where rows are not independent; results say exact: false."
            ),
        ),
        function,
    )


BACKEND_NAMES = ("provider", "fpmath", "threads", "spinning", "shared_pool", "cpus", "session_options")


def backend_options(function: F) -> F:
    """What the graphs run on."""
    return _apply(
        (
            click.option(
                "--provider",
                type=click.Choice(("auto", *PROVIDERS)),
                default="auto",
                show_default=True,
                help="Who computes; auto: the fastest that is exact here, measured once.",
            ),
            click.option(
                "--fpmath",
                type=click.Choice(FPMATHS),
                help="What dnnl or openvino may do to fp32 arithmetic.  [default: strict]",
            ),
            click.option("--threads", type=int, help="Threads of each graph.  [default: the physical cores]"),
            click.option("--cpus", metavar="LIST", help="Pin threads to these, as in 0-3,8; the first stays free."),
            click.option(
                "--spinning",
                type=click.Choice(SPINNINGS),
                default="stop",
                show_default=True,
                help="Whether idle threads wait busily: while their graph runs, always, or never.",
            ),
            click.option("--shared-pool", is_flag=True, help="One thread pool for all graphs instead of one each."),
            click.option(
                "--session-option",
                "session_options",
                multiple=True,
                metavar="NAME=VALUE",
                help="An ONNX Runtime session option; may be repeated.",
            ),
        ),
        function,
    )


def changed_backend_options() -> list[str]:
    """Those of `backend_options` that the command line of this command names."""
    context = click.get_current_context()
    return [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name in BACKEND_NAMES
        and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    ]


def backend_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """`Engine.load`'s arguments from the options' values. Raises click.BadParameter."""
    return {
        **{name: values[name] for name in BACKEND_NAMES},
        "cpus": _cpu_list(values["cpus"]),
        "session_options": named_values(values["session_options"], "--session-option"),
    }


def _cpu_list(text: str | None) -> tuple[int, ...]:
    """Numbers and ranges, as Linux writes them."""
    cpus: list[int] = []
    for part in (text or "").split(",") if text is not None else ():
        first, dash, last = part.partition("-")
        numbers = first.isdecimal() and (not dash or last.isdecimal())
        if not numbers or not int(first) <= int(last or first) < _MOST_CPUS:
            raise click.BadParameter(f"'{text}' is not a list of processors, as in 0-3,8", param_hint="--cpus")
        cpus += range(int(first), int(last or first) + 1)
    return tuple(cpus)


def sampling_params(values: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams from the options' values. Raises RequestError or click.BadParameter."""
    chosen = {name: values[name] for name in SAMPLING_NAMES}
    chosen["logit_bias"] = _biases(values["logit_bias"])
    return SamplingParams(**chosen)


def _biases(pairs: Iterable[str]) -> dict[int, float]:
    biases = {}
    for pair in pairs:
        token, _, bias = pair.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError as error:
            raise click.BadParameter(f"'{pair}' is not ID=BIAS, as in 42=-1.5", param_hint="--logit-bias") from error
    return biases


def named_values(pairs: Iterable[str], hint: str) -> dict[str, str]:
    """NAME=VALUE pairs as a dict."""
    values = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise click.BadParameter(f"'{pair}' is not NAME=VALUE", param_hint=hint)
        values[name] = value
    return values


def template_arguments(pairs: Iterable[str]) -> dict[str, Any]:
    """NAME=VALUE pairs for the chat template; a VALUE that is JSON (true, 3, "x") is read as such, others are text."""
    values: dict[str, Any] = {}
    for name, value in named_values(pairs, "--template-arg").items():
        try:
            values[name] = json.loads(value)
        except json.JSONDecodeError:
            values[name] = value
    return values


def find_bundle(bundle: str | None) -> Path:
    """The named bundle, or the default one. Raises click.ClickException when there is none yet."""
    if bundle is not None:
        return Path(bundle)
    path = default_bundle()
    if not (path / MANIFEST).is_file():
        raise click.ClickException("there is no default bundle yet; make it with 'dflash-ort export'")
    return path
