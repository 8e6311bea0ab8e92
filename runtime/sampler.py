"""Chooses tokens, so that a choice depends on context, parameters and seed alone: not on what was drafted or verified.

Order: penalties, bias, min-tokens, / T, min-p, top-k, top-p, + noise, argmax; ties to the lowest id. Greedy is the
same without noise. The drafter's tokens are chosen by the same code from the drafter's logits with the same noise,
which keeps acceptance high.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from dflash_ort.params import GREEDY_BELOW, SamplingParams
from dflash_ort.runtime.noise import PositionNoise
from dflash_ort.runtime.truncation import truncate


class History:
    """What penalties see: the prompt's tokens, and how often each token is in the answer so far. Tokens can be taken
    back.
    """

    def __init__(self, prompt_ids: Iterable[int], vocab_size: int) -> None:
        self._prompt = np.zeros(vocab_size, bool)
        ids = np.fromiter(prompt_ids, np.int64)
        self._prompt[ids[ids < vocab_size]] = True
        self._counts = np.zeros(vocab_size, np.int32)
        self._output: list[int] = []

    def __len__(self) -> int:
        return len(self._output)

    def push(self, token: int) -> None:
        self._output.append(token)
        self._counts[token] += 1

    def truncate(self, length: int) -> None:
        """Take back all but the first ``length`` tokens of the answer."""
        while len(self._output) > length:
            self._counts[self._output.pop()] -= 1

    def seen(self) -> np.ndarray:
        """Ids in prompt or answer."""
        return np.flatnonzero(self._prompt | (self._counts > 0))

    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Ids in the answer, and how often."""
        ids = np.flatnonzero(self._counts)
        return ids, self._counts[ids].astype(np.float32)


class Sampler:
    """Chooses one request's tokens.

    ``stop_ids`` are the tokens that would end the answer; they cannot be chosen before ``min_tokens``.
    """

    def __init__(
        self, params: SamplingParams, seed: int, prompt_ids: Sequence[int], *, vocab_size: int, stop_ids: Iterable[int]
    ) -> None:
        self.params, self._seed, self._vocab_size = params, seed, vocab_size
        self._prompt_length = len(prompt_ids)
        self._banned_at_first = np.array(sorted(i for i in stop_ids if i < vocab_size), np.int64)
        self._bias_ids = np.fromiter(params.logit_bias.keys(), np.int64)
        self._bias = np.fromiter(params.logit_bias.values(), np.float32)
        self._noise: dict[int, PositionNoise] = {}
        self._row, self._scaled, self._workspace = (np.empty(vocab_size, np.float32) for _ in range(3))
        self.history = History(prompt_ids, vocab_size)

    @property
    def takes_argmax(self) -> bool:
        """True when every choice from here on is the plain argmax of the logits, so the graph's own can be used."""
        bans = len(self.history) < self.params.min_tokens and self._banned_at_first.size > 0
        return self.params.is_greedy and not self.params.changes_logits and not bans

    def choose(self, logits: np.ndarray) -> int:
        """The token that follows the history, from float32 ``[vocab]`` logits, which are left as they are."""
        logits = self._processed(logits)
        if self.params.is_greedy:
            return int(np.argmax(logits))
        params, noise = self.params, self._noise_here()
        if params.min_p == 0.0 and params.top_p == 1.0 and not 0 < params.top_k < self._vocab_size:
            return noise.winner(logits, params.temperature)
        scaled = np.subtract(logits, logits.max(), out=self._scaled)
        scaled *= np.float32(1.0 / params.temperature)
        ids = truncate(scaled, min_p=params.min_p, top_k=params.top_k, top_p=params.top_p, workspace=self._workspace)
        if ids is None:
            return noise.winner(logits, params.temperature)
        return noise.winner_among(ids, scaled[ids].astype(np.float64))

    def commit(self, token: int) -> None:
        """Append a chosen token to the history."""
        self.history.push(token)

    def take_back(self, length: int) -> None:
        """Forget all but the first ``length`` tokens of the answer."""
        self.history.truncate(length)

    def forget_noise(self) -> None:
        """Drop the noise of positions that are committed."""
        here = self._position
        for position in [p for p in self._noise if p < here]:
            del self._noise[position]

    @property
    def _position(self) -> int:
        return self._prompt_length + len(self.history)

    def _noise_here(self) -> PositionNoise:
        position = self._position
        noise = self._noise.get(position)
        if noise is None:
            noise = self._noise[position] = PositionNoise(self._seed, position, self._vocab_size)
        return noise

    def _processed(self, logits: np.ndarray) -> np.ndarray:
        """Penalties, bias and min-tokens; the same array back when none applies."""
        params = self.params
        bans = len(self.history) < params.min_tokens
        if not (params.changes_logits or bans):
            return logits
        row = self._row
        np.copyto(row, logits)
        if params.repetition_penalty != 1.0:
            seen = self.history.seen()
            penalty = np.float32(params.repetition_penalty)
            row[seen] = np.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
        if params.frequency_penalty or params.presence_penalty:
            ids, counts = self.history.counts()
            row[ids] -= np.float32(params.frequency_penalty) * counts + np.float32(params.presence_penalty)
        row[self._bias_ids] += self._bias
        if bans:
            row[self._banned_at_first] = -np.inf
        return row

    def choose_drafts(
        self,
        logits: Callable[[int, int], np.ndarray],
        count: int,
        vocabulary: np.ndarray,
        last_token: int,
        go_on: Callable[[Sequence[float]], bool] | None = None,
    ) -> tuple[list[int], list[float]]:
        """Draw a block's tokens, ``count`` or as many as ``go_on`` asks for, with the noise that their positions will
        be verified with.

        ``logits(draft, previous)``: float32 ``[draft vocabulary]`` of a draft, by number and the token before it;
        ``vocabulary``: their target ids. Returns tokens and each one's log-probability at the request's temperature.
        The history is left as it was.
        """
        committed = len(self.history)
        full = np.full(self._vocab_size, -np.inf, np.float32)
        tokens, log_probs, token = list[int](), list[float](), last_token
        for draft in range(count):
            if draft and go_on is not None and not go_on(log_probs):
                break
            row = logits(draft, token)
            full[vocabulary] = row
            token = self.choose(full)
            tokens.append(token)
            log_probs.append(_log_probability(row, float(full[token]), self.params.temperature))
            self.commit(token)
        self.take_back(committed)
        return tokens, log_probs


def _log_probability(logits: np.ndarray, logit: float, temperature: float) -> float:
    """log-softmax of one logit at a temperature (1 for greedy requests), before truncation; to float32's precision, as
    the graphs give it.
    """
    scale = 1.0 if temperature < GREEDY_BELOW else temperature
    top = float(logits.max())
    return float(np.float32((logit - top) / scale - float(np.log(np.exp((logits - top) / np.float32(scale)).sum()))))
