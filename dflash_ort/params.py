"""Sampling parameters, under the names that vLLM and OpenAI use, checked when made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dflash_ort.errors import RequestError

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow float32 logits."""

MAX_TEMPERATURE = 1e6
"""Far above any use; above 1e38 its inverse would vanish in float32, and with it the ban on excluded tokens."""

REPETITION_PENALTIES = (1e-3, 1e3)
"""Beyond these float32 logits could overflow, and 0 times infinity is not a number."""

MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled. Wrong values raise RequestError here, not in the middle of an answer.

    The order of application is: penalties, ``logit_bias``, ``min_tokens``, ``temperature``, ``min_p``, ``top_k``,
    ``top_p``. The same seed gives the same text whatever the drafter or the verify lengths.
    """

    max_new_tokens: int | None = None
    """Most tokens to generate; None: to the end of the context."""
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the fewest most likely tokens whose probabilities sum to this."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the likeliest."""
    repetition_penalty: float = 1.0
    """Divides (or multiplies, where negative) the logits of tokens in prompt or answer."""
    presence_penalty: float = 0.0
    """Taken once from the logits of tokens that are in the answer."""
    frequency_penalty: float = 0.0
    """Taken from the logits of tokens once for each time they are in the answer."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids."""
    min_tokens: int = 0
    """Neither end-of-sequence nor a stop ends the answer before this many tokens."""
    stop: Sequence[str] = ()
    """Strings that end the answer; they are left out of the text."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end the answer, besides the model's own."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence tokens."""
    seed: int | None = None
    """0 to 2**64 - 1; None: one is drawn, used and returned."""

    def __post_init__(self) -> None:
        _whole("max_new_tokens", self.max_new_tokens, 1, optional=True)
        _whole("top_k", self.top_k, 0)
        _whole("min_tokens", self.min_tokens, 0)
        _whole("seed", self.seed, 0, MAX_SEED, optional=True)
        _number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _number("top_p", self.top_p, 0.0, 1.0, above=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, *REPETITION_PENALTIES)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.max_new_tokens is not None and self.min_tokens > self.max_new_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens}, more than max_new_tokens, {self.max_new_tokens}")
        self._freeze()

    def _freeze(self) -> None:
        """Check the collections and keep copies that the caller cannot change."""
        _kind("stop", self.stop, (str, Sequence), "a string or a list of strings")
        _kind("stop_token_ids", self.stop_token_ids, (Sequence,), "a list of token ids")
        _kind("logit_bias", self.logit_bias, (Mapping,), "a mapping from token id to number")
        _kind("ignore_eos", self.ignore_eos, (bool,), "True or False")
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if any(not isinstance(s, str) or not s for s in stops):
            raise RequestError("stop holds an empty or non-text entry; expected non-empty strings")
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0)
        for token, bias in self.logit_bias.items():
            _whole("logit_bias's token id", token, 0)
            _number(f"logit_bias[{token}]", bias, -1e6, 1e6)
        object.__setattr__(self, "stop", stops)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    @property
    def is_greedy(self) -> bool:
        """True when the likeliest token is taken, after penalties and bias."""
        return self.temperature < GREEDY_BELOW

    @property
    def changes_logits(self) -> bool:
        """True when penalties or bias change logits on every row (``min_tokens`` changes them at first)."""
        return bool(
            self.logit_bias
            or self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise RequestError if a token id is not one of the model's."""
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token in ids:
                if token >= vocab_size:
                    raise RequestError(f"{name} names token {token}; this model's ids are 0 to {vocab_size - 1}")


def _kind(name: str, value: object, kinds: tuple[type, ...], expected: str) -> None:
    if not isinstance(value, kinds):
        raise RequestError(f"{name} is {value!r}; expected {expected}")


def _whole(name: str, value: object, low: int, high: int | None = None, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    upper = f"{low} or more" if high is None else f"{low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise RequestError(f"{name} is {value!r}; expected a whole number, {upper}")


def _number(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    """Check a finite number in [low, high], or (low, high] where ``above``."""
    # Comparing, unlike math.isfinite, takes whole numbers that no float can hold.
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and -math.inf < value < math.inf
    if not ok or not low <= value <= high or (above and value == low):  # type: ignore[operator]
        lower = f"more than {low:g}" if above else f"{low:g} or more"
        upper = "" if math.isinf(high) else f" and at most {high:g}"
        raise RequestError(f"{name} is {value!r}; expected a number {lower}{upper}")
