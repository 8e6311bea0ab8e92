"""Records, for every anchor of every text, what each drafter would propose there: the measuring half of
`dflash-ort record`.

The texts are answered by the engine as ever, at its own speed; a listener hears of every row that stays and lets
drafters of its own draft at each anchor, whatever the answering controller does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from dflash_ort.controller.trace import TRACE_VERSION, TracedText, agreed_lengths, proposals_of
from dflash_ort.errors import RequestError
from dflash_ort.models.texts import BenchPrompt
from dflash_ort.records import Draft, Request
from dflash_ort.runtime.bench import BenchSettings
from dflash_ort.runtime.drafters import Drafter, GoOn
from dflash_ort.runtime.engine import Engine
from dflash_ort.runtime.graph_io import Array
from dflash_ort.runtime.sampler import Sampler
from dflash_ort.runtime.text import Prompt


class Recorder:
    """Listens to one request: before a row of its answer is taken in, every drafter drafts at it."""

    max_draft, is_free, pending_rows = 0, False, 0

    def __init__(self, request: Request, drafters: Mapping[str, Drafter], sampler: Sampler) -> None:
        self.request, self.drafters, self._sampler = request, drafters, sampler
        self._shadow = Request(request.id, request.prompt_ids, request.params, request.seed)
        self._rows = 0
        self.drafts: dict[str, list[Draft]] = {kind: [] for kind in drafters}

    def observe(self, token_ids: Sequence[int], hidden: Array) -> None:
        """Rows that the target has passed; those of the answer are anchors, in order."""
        for row in range(len(token_ids)):
            if self._rows >= len(self.request.prompt_ids):
                self._draft()
            self._rows += 1
            for drafter in self.drafters.values():
                drafter.observe(token_ids[row : row + 1], hidden[row : row + 1])

    def draft(self, request: Request, limit: int, go_on: GoOn | None = None) -> Draft:
        raise AssertionError("a recorder proposes nothing")

    def _draft(self) -> None:
        shadow = self._shadow
        token = self.request.output_ids[len(shadow.output_ids)]
        shadow.output_ids.append(token)
        self._sampler.commit(token)
        self._sampler.forget_noise()
        for kind, drafter in self.drafters.items():
            self.drafts[kind].append(drafter.draft(shadow, drafter.max_draft))


@dataclass(frozen=True, slots=True)
class Recorded:
    """One answer: its line of the trace, without and with text."""

    traced: TracedText
    prompt_ids: Sequence[int] = field(repr=False)
    token_ids: Sequence[int] = field(repr=False)

    def line(self, *, with_text: bool) -> dict[str, Any]:
        words = {"prompt_ids": list(self.prompt_ids), "token_ids": list(self.token_ids)} if with_text else {}
        return {"v": TRACE_VERSION, **self.traced.as_json(), **words}


def header(engine: Engine, settings: BenchSettings, prompts: Sequence[BenchPrompt]) -> dict[str, Any]:
    """The first line: the bundle, the machine and what passes cost on it, the settings. What `same_recording` compares
    of it tells whether two recordings can be one.
    """
    return {
        "v": TRACE_VERSION,
        "event": "trace",
        **engine.describe(),
        "settings": {
            name: value for name, value in asdict(settings).items() if name not in ("repeats", "template_arguments")
        },
        "template_arguments": sorted(settings.template_arguments),
        "prompts": _digest([asdict(prompt) for prompt in prompts], dict(settings.template_arguments)),
        "costs": asdict(engine.costs()),
        "policy": replace(engine.policy, notes={}).as_json(),
    }


def same_recording(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two headers are of the same bundle, prompts and settings."""
    return all(one.get(name) == other.get(name) for name in ("v", "bundle", "settings", "prompts"))


def record(
    engine: Engine, prompts: Sequence[BenchPrompt], settings: BenchSettings, done: Mapping[str, Mapping[str, Any]]
) -> Iterator[Recorded]:
    """Answer every turn of every prompt and yield what was recorded, but for texts already ``done``, lines by id.

    A later turn builds on the answers before it, so a prompt of several turns is answered from its first again where
    it was not finished. A turn that cannot be asked (too long) ends its prompt. Raises RequestError when none can.
    """
    asked, refused = 0, ""
    for prompt in prompts:
        names = [
            f"{prompt.id}/{turn}" if len(prompt.turns) > 1 else prompt.id for turn in range(1, len(prompt.turns) + 1)
        ]
        if all(name in done for name in names):
            asked += 1
            continue
        said: list[dict[str, str]] = []
        for name, content in zip(names, prompt.turns, strict=True):
            said.append({"role": "user", "content": content})
            message: Prompt = content if len(said) == 1 else list(said)
            try:
                answer, text = _record(engine, message, settings, prompt, name)
            except RequestError as error:
                refused = refused or str(error)
                break
            asked += 1
            said.append({"role": "assistant", "content": text})
            if name not in done:
                yield answer
    if not asked:
        raise RequestError(f"none of the {len(prompts)} prompts could be asked; the first: {refused}")


def _record(
    engine: Engine, message: Prompt, settings: BenchSettings, prompt: BenchPrompt, name: str
) -> tuple[Recorded, str]:
    params = settings.params(prompt)
    heard: list[Recorder] = []

    def listen(request: Request, drafters: Mapping[str, Drafter], sampler: Sampler) -> Recorder:
        heard.append(Recorder(request, drafters, sampler))
        return heard[0]

    with engine.stream(message, params, template_arguments=settings.template_arguments, listener=listen) as stream:
        for _ in stream:
            pass
        words = stream.text
    request = heard[0].request
    tokens = request.output_ids
    proposals = {}
    for kind, drafter in heard[0].drafters.items():
        drafts = heard[0].drafts[kind]
        agreed = agreed_lengths([draft.token_ids for draft in drafts], tokens)
        proposals[kind] = proposals_of(drafts, agreed, max_draft=drafter.max_draft, is_free=drafter.is_free)
    traced = TracedText(
        id=name,
        suite=prompt.suite,
        prompt_tokens=len(request.prompt_ids),
        num_tokens=len(tokens),
        max_tokens=engine.max_tokens(request),
        draws=not params.is_greedy,
        proposals=proposals,
        seed=request.seed,
    )
    return Recorded(traced, request.prompt_ids, tokens), words


def _digest(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
