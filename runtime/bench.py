"""Runs controllers side by side over prompts and keeps what each run did: the measuring half of `dflash-ort bench`.

One process, one request at a time. Every contestant answers a prompt before the next prompt begins, in an order that
turns by one from prompt to prompt and from repeat to repeat, so that the machine's drift falls on all alike.
Interleaved, their answers take turns round by round: then what the machine does for a second falls on all alike too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, get_args

from dflash_ort.controller.protocol import Controller
from dflash_ort.errors import PolicyError, RequestError
from dflash_ort.models.texts import BenchPrompt
from dflash_ort.params import SamplingParams
from dflash_ort.progress import Progress, silent
from dflash_ort.records import RoundRecord, Statistics
from dflash_ort.runtime.engine import DrafterName, Engine
from dflash_ort.runtime.policies import check_controller
from dflash_ort.runtime.text import Prompt
from dflash_ort.runtime.unpadded import unpadded

OFF = "off"
"""Plain decoding as the engine does it: what every other text is compared with."""
OFF_UNPADDED = "off-unpadded"
"""Plain decoding with one row in every pass: the fastest there is; its last bits may differ."""
_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """One way of decoding: a controller, and who drafts for it."""

    label: str
    controller: str
    drafter: DrafterName = "auto"
    unpadded: bool = False


def parse_controllers(text: str) -> tuple[Entry, ...]:
    """Entries from ``off,fixed:3,ngram@fixed:3,adaptive``, in that order; the baselines that it lacks come last.

    Raises PolicyError for what is unknown or named twice.
    """
    labels = [label.strip() for label in text.split(",")]
    for label in labels:
        if labels.count(label) > 1:
            raise PolicyError(f"controller '{label}' is named twice; once is enough")
    labels += [label for label in (OFF, OFF_UNPADDED) if label not in labels]
    return tuple(_entry(label) for label in labels)


def _entry(label: str) -> Entry:
    if label in (OFF, OFF_UNPADDED):
        return Entry(label, OFF, "none", unpadded=label == OFF_UNPADDED)
    drafter, at, controller = label.rpartition("@")
    if at and drafter not in get_args(DrafterName):
        expected = ", ".join(get_args(DrafterName))
        raise PolicyError(f"unknown drafter '{drafter}' in '{label}'; expected {expected}, as in ngram@fixed:3")
    if controller == OFF_UNPADDED:
        raise PolicyError(f"'{label}': {OFF_UNPADDED} takes no drafter")
    check_controller(controller)
    return Entry(label, controller, drafter if at else "auto")  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """How prompts are answered. ``temperature`` None takes each prompt's own, greedy where it has none.

    ``interleave``: all answers to a prompt grow together, the shortest of them next, instead of one after the other.
    """

    max_new_tokens: int = 128
    repeats: int = 3
    interleave: bool = False
    temperature: float | None = None
    seed: int = 7
    ignore_eos: bool = False
    template_arguments: Mapping[str, Any] = field(default_factory=dict)

    def params(self, prompt: BenchPrompt) -> SamplingParams:
        chosen = self.temperature if self.temperature is not None else prompt.temperature
        return SamplingParams(
            max_new_tokens=self.max_new_tokens, temperature=chosen or 0.0, seed=self.seed, ignore_eos=self.ignore_eos
        )


@dataclass(frozen=True, slots=True)
class Step:
    """A round, as far as a report shows it."""

    kind: str
    drafted: int
    verified: int
    accepted: int
    committed: int


@dataclass(frozen=True, slots=True)
class Run:
    """One answer. Seconds are the caller's: spent waiting for the first chunk, and for the others."""

    token_ids: tuple[int, ...]
    text: str
    ttft_s: float
    decode_s: float
    decoded: int
    """Tokens that came in ``decode_s``: all but the first chunk's."""
    gaps: tuple[float, ...]
    """Seconds of each chunk but the first."""
    statistics: Statistics
    steps: tuple[Step, ...]


Key = tuple[str, str]
"""A bundle's label and an entry's."""


@dataclass(frozen=True, slots=True)
class Turn:
    """All runs of one turn of a prompt, repeat by repeat. Turns of one prompt share its number, ``conversation``."""

    conversation: int
    suite: str
    id: str
    turn: int
    temperature: float
    runs: Mapping[Key, Sequence[Run]]

    def reference(self, bundle: str) -> tuple[int, ...]:
        """Plain decoding's tokens."""
        return self.runs[bundle, OFF][0].token_ids


@dataclass(frozen=True, slots=True)
class Skipped:
    """A turn that could not be asked, and why."""

    suite: str
    id: str
    turn: int
    reason: str


@dataclass(slots=True)
class Measurements:
    """What was measured. ``interrupted``: somebody stopped it; the prompts before that are here, whole."""

    bundles: tuple[str, ...]
    entries: tuple[Entry, ...]
    settings: BenchSettings
    turns: list[Turn] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    interrupted: bool = False


@dataclass(frozen=True, slots=True)
class _Contestant:
    key: Key
    engine: Engine
    entry: Entry
    controller: Controller


def measure(
    engines: Mapping[str, Engine],
    entries: Sequence[Entry],
    prompts: Sequence[BenchPrompt],
    settings: BenchSettings,
    progress: Progress = silent,
) -> Measurements:
    """Measure every entry on every engine, which are named by label, over the prompts.

    Each entry has a controller of its own, which learns from prompt to prompt as it would in use. Later turns of a
    prompt build on the first engine's plain answers, so that all see the same. Raises RequestError when no prompt can
    be asked, BundleError when a bundle lacks an entry's drafter. Ctrl-C, once a prompt is done, returns what there is.
    """
    for engine in engines.values():
        for entry in entries:
            engine.max_draft(entry.drafter)
    result = Measurements(tuple(engines), tuple(entries), settings)
    _warm_up(_contestants(engines, entries), settings, progress)
    contestants = _contestants(engines, entries)
    try:
        for number, prompt in enumerate(prompts):
            progress(f"prompt {number + 1} of {len(prompts)}: {prompt.id}", number / len(prompts))
            turns, skipped = _conversation(contestants, number, prompt, settings)
            result.turns += turns
            result.skipped += skipped
    except KeyboardInterrupt:
        if not result.turns:
            raise
        result.interrupted = True
    if not result.turns:
        raise RequestError(f"none of the {len(prompts)} prompts could be asked; the first: {result.skipped[0].reason}")
    return result


def _contestants(engines: Mapping[str, Engine], entries: Sequence[Entry]) -> list[_Contestant]:
    """With new controllers, which have learnt nothing yet."""
    return [
        _Contestant((bundle, entry.label), engine, entry, engine.new_controller(entry.controller))
        for bundle, engine in engines.items()
        for entry in entries
    ]


def _warm_up(contestants: Sequence[_Contestant], settings: BenchSettings, progress: Progress) -> None:
    """A short answer of each, of which nothing is kept, so that nobody pays for what is done once."""
    progress("warming up")
    params = SamplingParams(max_new_tokens=_WARM_UP_TOKENS, seed=settings.seed, ignore_eos=True)
    for contestant in contestants:
        _answers([contestant], "Count to ten.", params, settings)


def _conversation(
    contestants: Sequence[_Contestant], number: int, prompt: BenchPrompt, settings: BenchSettings
) -> tuple[list[Turn], list[Skipped]]:
    """Every turn of a prompt, up to one that cannot be asked."""
    params = settings.params(prompt)
    said: list[dict[str, str]] = []
    turns: list[Turn] = []
    for turn, text in enumerate(prompt.turns, start=1):
        said.append({"role": "user", "content": text})
        message: Prompt = text if len(said) == 1 else list(said)
        try:
            for engine in {id(c.engine): c.engine for c in contestants}.values():
                engine.stream(message, params, template_arguments=settings.template_arguments).close()
        except RequestError as error:
            return turns, [Skipped(prompt.suite, prompt.id, turn, str(error))]
        runs: dict[Key, list[Run]] = {c.key: [] for c in contestants}
        for repeat in range(settings.repeats):
            for key, run in _answers(in_turn(contestants, number + repeat), message, params, settings).items():
                runs[key].append(run)
        turns.append(Turn(number, prompt.suite, prompt.id, turn, params.temperature, runs))
        said.append({"role": "assistant", "content": _plain(contestants, runs).text})
    return turns, []


def _plain(contestants: Sequence[_Contestant], runs: Mapping[Key, Sequence[Run]]) -> Run:
    """The first engine's plain answer."""
    return runs[contestants[0].key[0], OFF][0]


def in_turn(contestants: Sequence[Any], turn: int) -> list[Any]:
    """The same in a circle, another one first each turn."""
    start = turn % len(contestants)
    return [*contestants[start:], *contestants[:start]]


def _answers(
    contestants: Sequence[_Contestant], message: Prompt, params: SamplingParams, settings: BenchSettings
) -> dict[Key, Run]:
    """One answer of each, one after the other or interleaved."""
    with ExitStack() as stack:
        answers = [_Answer(contestant) for contestant in contestants]
        together = [answers] if settings.interleave else [[answer] for answer in answers]
        for group in together:
            for answer in group:
                answer.ask(message, params, settings.template_arguments, stack)
            growing = list(group)
            while growing:
                shortest = min(growing, key=lambda answer: answer.tokens)
                if not shortest.grow():
                    growing.remove(shortest)
        return {answer.contestant.key: answer.run() for answer in answers}


class _Answer:
    """An answer that grows chunk by chunk; between chunks others may use the engine."""

    def __init__(self, contestant: _Contestant) -> None:
        self.contestant = contestant
        self.tokens = 0
        self._first = 0
        self._seconds: list[float] = []
        self._records: list[RoundRecord] = []

    def ask(
        self, message: Prompt, params: SamplingParams, template_arguments: Mapping[str, Any], stack: ExitStack
    ) -> None:
        """Begin; what it holds is let go at the stack's end. The time is a part of the first chunk's."""
        with self._padding():
            began = perf_counter()
            stream = self.contestant.engine.stream(
                message,
                params,
                template_arguments=template_arguments,
                drafter=self.contestant.entry.drafter,
                controller=self.contestant.controller,
                on_round=self._records.append,
            )
            self._stream = stack.enter_context(stream)
            self._asking = perf_counter() - began

    def grow(self) -> bool:
        """Wait for the next chunk; False when there is none."""
        with self._padding():
            began = perf_counter()
            chunk = next(self._stream, None)
            ended = perf_counter()
        if chunk is None:
            return False
        self._seconds.append(ended - began)
        self.tokens += len(chunk.token_ids)
        if len(self._seconds) == 1:
            self._first = self.tokens
        return True

    def _padding(self) -> AbstractContextManager[None]:
        return unpadded(self.contestant.engine) if self.contestant.entry.unpadded else nullcontext()

    def run(self) -> Run:
        first, *others = self._seconds
        return Run(
            token_ids=self._stream.token_ids,
            text=self._stream.text,
            ttft_s=self._asking + first,
            decode_s=sum(others),
            decoded=len(self._stream.token_ids) - self._first,
            gaps=tuple(others),
            statistics=self._stream.statistics,
            steps=tuple(_step(record) for record in self._records),
        )


def _step(record: RoundRecord) -> Step:
    part = record.requests[0]
    return Step(part.kind, part.num_drafted, part.num_verified, part.num_accepted, part.num_committed)
