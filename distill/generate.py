"""Continuous batched decoding: every slot runs a dialogue's script, and one that ends is replaced at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from dflash_ort.distill.dialogues import Ask, Dialogue, Script
from dflash_ort.params import SamplingParams
from dflash_ort.runtime.batched import BatchedTarget
from dflash_ort.runtime.graph_io import Array
from dflash_ort.runtime.sampler import Sampler

TOP_P = 0.95
_WINDOW, _CYCLES, _LONGEST_CYCLE = 64, 3, 40


class _Job:
    """A continuation in the making."""

    def __init__(self, script: Script, ask: Ask, target: BatchedTarget) -> None:
        self.script, self.tokens = script, list[int]()
        self._limit, self._ends = ask.limit, frozenset(target.spec.eos_token_ids)
        params = SamplingParams(temperature=ask.temperature, top_p=TOP_P)
        self._sampler = None
        if not params.is_greedy:
            self._sampler = Sampler(params, ask.seed, ask.ids, vocab_size=target.spec.vocab_size, stop_ids=())

    def take(self, logits: Array, greedy: int) -> bool:
        """Choose the next token from float32 ``[vocab]`` logits or take their argmax; True when that was the last."""
        token = greedy
        if self._sampler is not None:
            token = self._sampler.choose(logits)
            self._sampler.commit(token)
            self._sampler.forget_noise()
        self.tokens.append(token)
        return token in self._ends or len(self.tokens) >= self._limit or is_endless(self.tokens)


def generate(target: BatchedTarget, scripts: Iterable[Script]) -> Iterator[Dialogue]:
    """Run scripts to their ends, as many at once as the target has slots; dialogues come as they are finished.

    A dialogue does not depend on its slot or on the others. The target's slots are used from empty, and may hold texts
    still when the caller stops early.
    """
    waiting = iter(scripts)
    jobs: list[_Job | None] = [None] * target.slots
    for slot in range(target.slots):
        target.clear(slot)
    while True:
        for slot in range(target.slots):
            while jobs[slot] is None and (script := next(waiting, None)) is not None:
                outcome = _advance(target, slot, script)
                if isinstance(outcome, Dialogue):
                    yield outcome
                else:
                    jobs[slot] = outcome
        if not any(jobs):
            return
        logits, greedy = target.decode([job.tokens[-1] if job else 0 for job in jobs])
        for slot, job in enumerate(jobs):
            if job is not None and job.take(logits[slot], int(greedy[slot])):
                outcome = _advance(target, slot, job.script, job.tokens)
                jobs[slot] = None
                if isinstance(outcome, Dialogue):
                    yield outcome
                else:
                    jobs[slot] = outcome


def _advance(target: BatchedTarget, slot: int, script: Script, tokens: list[int] | None = None) -> _Job | Dialogue:
    """Give a script its tokens (None: begin it), and run the prompt it asks for next up to its first token."""
    while True:
        try:
            ask = next(script) if tokens is None else script.send(tokens)
        except StopIteration as end:
            target.clear(slot)  # the next dialogue must not depend on what this one left
            dialogue: Dialogue = end.value
            return dialogue
        job = _Job(script, ask, target)
        if not job.take(*target.prefill(slot, ask.ids)):
            return job
        tokens = job.tokens


def is_endless(tokens: Sequence[int]) -> bool:
    """True when the answer's end is nothing but a cycle, three times over and 64 tokens long at least.

    Small models loop: a little of that is what they say, the rest is a waste.
    """
    for period in range(1, min(_LONGEST_CYCLE, len(tokens) // _CYCLES) + 1):
        if tokens[-1] == tokens[-1 - period]:
            tail = tokens[-max(_WINDOW, _CYCLES * period) :]
            if len(tail) >= _WINDOW and tail[period:] == tail[:-period]:
                return True
    return False
