"""Chat templates: code from a stranger, rendered by jinja2's immutable sandbox, bounded in time and size."""

from __future__ import annotations

import ctypes
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.filters import do_format, do_replace, sync_do_join
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dflash_ort.errors import BundleError, RequestError

Message = Mapping[str, Any]

MAX_CHARACTERS = 16_000_000
"""Most characters a template may write: far above any context, far below what would hurt."""
MAX_SECONDS = 10.0
_MAX_REPEAT = 1_000_000
_MAX_INDENT = 100
_MAX_BITS = 4096
_WIDE_PERCENT = re.compile(r"%[-+ #0-9.]*(\*|\d{7})")
_WIDE_FORMAT = re.compile(r"\{[^{}]*(\d{7}|[^{}]\{|:\{)")
"""A width (or index) of seven digits, or one that an argument gives."""
_MEND = "mend chat_template.jinja and export again, or pass raw"


class ChatTemplate:
    """A compiled template. Raises BundleError when the source is not one."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, max_seconds: float = MAX_SECONDS) -> None:
        self._special, self._max_seconds = dict(special_tokens), max_seconds
        try:
            with _deadline(max_seconds):
                self._template = _Sandbox().from_string(source)
        except _OutOfTime:
            raise BundleError(f"the chat template did not compile in {max_seconds:g} seconds; {_MEND}") from None
        except (jinja2.TemplateError, RecursionError, SyntaxError, MemoryError, ValueError) as error:
            # Deep nesting fails in jinja2's parser or in Python's own compiler.
            raise BundleError(f"the chat template cannot be read: {_one_line(error)}; {_MEND}") from error

    def render(self, messages: Sequence[Message], arguments: Mapping[str, Any]) -> str:
        """The prompt for these messages up to where the answer begins.

        ``arguments`` are the template's own (``enable_thinking`` and the like) and win over the defaults. Raises
        RequestError when the template refuses the messages, fails, or runs past its bounds.
        """
        values = {"add_generation_prompt": True, **self._special, **arguments, "messages": [dict(m) for m in messages]}
        pieces, size = [], 0
        try:
            with _deadline(self._max_seconds):
                for piece in self._template.generate(values):
                    pieces.append(piece)
                    size += len(piece)
                    if size > MAX_CHARACTERS:
                        raise SecurityError(f"it wrote more than {MAX_CHARACTERS:,} characters")
        except _OutOfTime:
            raise RequestError(f"the chat template did not finish in {self._max_seconds:g} seconds; pass raw") from None
        except Exception as error:  # a template can fail in any way that Python can
            raise RequestError(f"the chat template refused the messages: {_one_line(error)}") from error
        return "".join(pieces)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox, and a bound on what makes much out of little: repetition, powers, padding."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        for name in ("center", "indent", "wordwrap"):
            self.filters[name] = _bounded(self.filters[name])
        self.filters |= {"format": _format, "replace": _replace, "join": _join}

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(times, int) and hasattr(sequence, "__len__") and len(sequence) * times > _MAX_REPEAT:
                    raise SecurityError("it repeats a text too often")
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > _MAX_BITS:
                raise SecurityError("it multiplies numbers too large")
        if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            _check_size(len(left) + len(right))
        if operator == "**" and (abs(left) > _MAX_REPEAT or abs(right) > 64):
            raise SecurityError("it raises a number too high")
        if operator == "%" and isinstance(left, str):
            _check_pattern(_WIDE_PERCENT, left)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  jinja2's own names
        text = getattr(__obj, "__self__", None)
        if isinstance(text, str):
            _check_numbers(args, kwargs)
            _check_growth(__obj.__name__, text, args)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        """jinja2's own safe ``str.format``, which comes here when the method is looked up."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_pattern(_WIDE_FORMAT, value.__self__.replace("{{", ""))
        return wrapped


class _OutOfTime(BaseException):
    """Raised in the rendering thread from outside; not an Exception, so that nothing inside swallows it."""


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Interrupt the code inside after ``seconds``: a loop without output never comes back to us otherwise."""
    thread, lock, done = threading.get_ident(), threading.Lock(), False

    def interrupt() -> None:
        with lock:
            if not done:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_OutOfTime))

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            done = True
        timer.cancel()


def _bounded(function: Any) -> Any:
    """A filter that pads, refused when asked to pad by more than could be meant."""

    def bounded(*args: Any, **kwargs: Any) -> Any:
        _check_numbers(args, kwargs)
        return function(*args, **kwargs)

    bounded.__dict__.update(getattr(function, "__dict__", {}))
    return bounded


def _check_numbers(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if any(isinstance(value, int) and value > _MAX_REPEAT for value in (*args, *kwargs.values())):
        raise SecurityError("it pads a text too far")


def _check_pattern(wide: re.Pattern[str], pattern: Any) -> None:
    if wide.search(str(pattern)):
        raise SecurityError("it pads a text too far")


def _check_size(characters: int) -> None:
    if characters > MAX_CHARACTERS:
        raise SecurityError(f"it makes a text of more than {MAX_CHARACTERS:,} characters")


def _check_growth(method: str, text: str, args: Sequence[Any]) -> None:
    """Refuse a method call that makes much out of little."""
    if method == "replace" and len(args) > 1 and isinstance(args[0], str) and isinstance(args[1], str):
        _check_size(text.count(args[0]) * len(args[1]))
    elif method == "join" and args and hasattr(args[0], "__len__"):
        _check_size(len(text) * len(args[0]))
    elif method == "expandtabs" and args and isinstance(args[0], int):
        _check_size(text.count("\t") * args[0])
    elif method == "translate":
        raise SecurityError("it calls translate, which no chat template needs")


def _format(pattern: Any, *args: Any, **kwargs: Any) -> str:
    _check_pattern(_WIDE_PERCENT, pattern)
    return do_format(pattern, *args, **kwargs)


@jinja2.pass_eval_context
def _replace(context: Any, text: Any, old: Any, new: Any, count: int | None = None) -> str:
    _check_size(str(text).count(str(old)) * len(str(new)))
    return do_replace(context, text, old, new, count)


@jinja2.pass_eval_context
def _join(context: Any, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    items = list(value)
    _check_size(len(items) * len(str(d)))
    return sync_do_join(context, items, d, attribute)


def _to_json(value: Any, **options: Any) -> str:
    """tojson as chat templates expect it: no HTML escapes."""
    indent = options.get("indent")
    if (indent if isinstance(indent, int) else len(indent or "")) > _MAX_INDENT:
        raise SecurityError("it indents JSON too far")
    options.setdefault("ensure_ascii", False)
    return json.dumps(value, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
