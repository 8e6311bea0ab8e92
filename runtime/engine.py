"""The engine: a bundle loaded and ready to answer. This is what applications embed."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, get_args

from dflash_ort.controller.adaptive import Adaptive
from dflash_ort.controller.cost import CostTable
from dflash_ort.controller.policy import GENERIC_POLICY, Policy
from dflash_ort.controller.protocol import Controller
from dflash_ort.defaults import DEFAULT_CONTROLLER
from dflash_ort.errors import BundleError, DFlashError, InexactError, RequestError
from dflash_ort.models.manifest import Manifest, read_manifest
from dflash_ort.params import SamplingParams
from dflash_ort.progress import Progress, silent
from dflash_ort.records import Chunk, Request, RoundRecord
from dflash_ort.runtime import machine
from dflash_ort.runtime.answer import Answer
from dflash_ort.runtime.bundle import OpenBundle, open_bundle
from dflash_ort.runtime.cache import KVCache, Slot
from dflash_ort.runtime.calibration import calibrate, remember_costs
from dflash_ort.runtime.choice import resolve_backend
from dflash_ort.runtime.controllers import Controllers, plain_pass
from dflash_ort.runtime.decoding import Decoding, pieces_of
from dflash_ort.runtime.drafters import DFlashDrafter, Drafter, NgramDrafter
from dflash_ort.runtime.exactness import make_exact
from dflash_ort.runtime.policies import bundle_policy, check_controller
from dflash_ort.runtime.roundlog import RoundLog
from dflash_ort.runtime.sampler import Sampler
from dflash_ort.runtime.session import Backend, runtime_version
from dflash_ort.runtime.statistics import StatisticsBuilder
from dflash_ort.runtime.stream import Generation, Lease, Stream
from dflash_ort.runtime.text import Prompt

Listener = Callable[[Request, Mapping[str, Drafter], Sampler], Drafter]
"""Makes a drafter that proposes nothing and hears of every row that stays: of a request, of drafters for it that nobody
else asks, and of the sampler that they draw with.
"""
DrafterName = Literal["auto", "dflash", "ngram", "none"]


class Engine:
    """Runs one bundle. Make it with `Engine.load`; use it as a context manager, or `close` it.

    It may be shared between threads: streams take turns round by round, and share nothing but the weights.
    """

    def __init__(
        self,
        bundle: OpenBundle,
        *,
        max_context: int,
        exact: bool,
        backend: Backend,
        drafter: DrafterName,
        controller: str,
        calibrate: bool = True,
        policy: Policy = GENERIC_POLICY,
        progress: Progress = silent,
    ) -> None:
        self._bundle: OpenBundle | None = bundle
        self.manifest: Manifest = bundle.manifest
        self.max_context, self.exact, self.backend = max_context, exact, backend
        self._drafter_name, self._controller_name = drafter, controller
        self.policy = policy
        self._progress = progress
        self._controllers = Controllers(bundle.manifest, backend, self._measure if calibrate else None, policy)
        self._log: RoundLog | None = None
        self._free: list[Slot] = []
        self._turn = threading.Lock()
        self._ids = itertools.count()

    @classmethod
    def load(
        cls,
        directory: str | Path,
        *,
        drafter: DrafterName = "auto",
        controller: str = DEFAULT_CONTROLLER,
        max_context: int | None = None,
        allow_inexact: bool = False,
        threads: int | None = None,
        provider: str = "auto",
        fpmath: str | None = None,
        cpus: Sequence[int] = (),
        spinning: str = "stop",
        shared_pool: bool = False,
        session_options: Mapping[str, str] | None = None,
        calibrate: bool = True,
        log: str | Path | None = None,
        log_text: bool = False,
        progress: Progress = silent,
    ) -> Engine:
        """Load a bundle.

        ``drafter``: "auto" is the bundle's own, and for the adaptive controller n-gram lookup too. ``controller``:
        "adaptive", "off", "fixed:N", "fixed:max" or another rule's name. ``max_context``: most tokens of prompt and
        answer, at most the bundle's. ``provider``: "cpu", "dnnl", "openvino", or "auto" for the fastest that is exact;
        ``threads``, ``fpmath``, ``cpus``, ``spinning``, ``shared_pool``, ``session_options``: see `Backend`.
        ``calibrate``: measure passes and providers here, once, where that is needed. ``log``: a file for the round log,
        without text unless ``log_text``. ``progress`` is told of slow steps.

        Raises BundleError for a directory that is not a usable bundle, InexactError when this machine does not
        compute rows independently of each other (unless ``allow_inexact``; results then say ``exact=False``),
        ProviderError for options.
        """
        check_controller(controller)
        _check_drafter(drafter)
        limit = read_manifest(Path(directory)).target.max_context
        if max_context is not None and not 2 <= max_context <= limit:
            raise RequestError(f"max_context is {max_context}; this bundle was exported for 2 to {limit}")
        backend = resolve_backend(
            Path(directory),
            provider=provider,
            measure=calibrate,
            progress=progress,
            threads=threads,
            fpmath=fpmath,
            cpus=cpus,
            spinning=spinning,
            shared_pool=shared_pool,
            session_options=session_options,
        )
        bundle = open_bundle(Path(directory), backend, with_drafter=drafter in ("auto", "dflash"))
        exact = True
        try:
            make_exact(bundle.target, identity=bundle.manifest.identity, backend=backend, progress=progress)
        except InexactError:
            if not allow_inexact:
                raise
            exact = False
        engine = cls(
            bundle,
            max_context=max_context or limit,
            exact=exact,
            backend=backend,
            drafter=drafter,
            controller=controller,
            calibrate=calibrate,
            policy=bundle_policy(Path(directory), bundle.manifest),
            progress=progress,
        )
        engine.max_draft(drafter)
        engine._controllers.get(controller)
        if log is not None:
            engine._log = RoundLog(log, with_text=log_text, common=engine.describe())
        return engine

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        template_arguments: Mapping[str, Any] | None = None,
        drafter: DrafterName | None = None,
        controller: str | Controller | None = None,
        prefill_pieces: Sequence[int] | None = None,
        on_round: Callable[[RoundRecord], None] | None = None,
        listener: Listener | None = None,
    ) -> Stream:
        """Answer piece by piece.

        ``prompt``: text (one user message, unless ``raw`` or the bundle has no chat template), chat messages, or
        token ids. ``template_arguments`` go to the chat template. ``drafter`` and ``controller`` override the
        engine's. ``prefill_pieces`` cuts the prompt's prefill into these row counts instead of the default; the
        text is the same. ``on_round`` is told of every round, from inside it. ``listener``: somebody who hears of
        every row that stays.

        Raises RequestError for a prompt or parameters that cannot be used, before anything runs.
        """
        bundle = self._opened()
        params = params or SamplingParams()
        params.check_vocabulary(self.manifest.target.vocab_size)
        ids = bundle.text.encode(prompt, raw=raw, template_arguments=template_arguments or {})
        self._check_prompt(ids)
        pieces = list(prefill_pieces) if prefill_pieces is not None else pieces_of(len(ids))
        if sum(pieces) != len(ids) or min(pieces) < 1:
            raise RequestError(
                f"prefill_pieces is {pieces}; expected positive counts that add up to the prompt's {len(ids)}"
            )
        name = drafter or self._drafter_name
        self.max_draft(name)
        label = self._controller_name if controller is None else controller
        chosen = self._controllers.get(label) if isinstance(label, str) else label
        kinds = self._kinds(name, chosen)
        seed = params.seed if params.seed is not None else secrets.randbits(32)
        request = Request(next(self._ids), ids, params, seed)
        stream = self._start(bundle, request, kinds, chosen, pieces, on_round, listener)
        if self._log is not None:
            shown = label if isinstance(label, str) else type(label).__name__
            template = {
                "sha256": bundle.text.template_sha256,
                "arguments": sorted(template_arguments or {}),
                "raw": raw,
            }
            self._log.request(request, controller=shown, drafters=kinds, template=template)
        return stream

    def generate(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Generation:
        """Answer in one piece; arguments as for `stream`."""
        with self.stream(prompt, params, **options) as stream:
            for _ in stream:
                pass
            reason = stream.finish_reason
            assert reason is not None
            return Generation(stream.text, stream.token_ids, reason, stream.seed, self.exact, stream.statistics)

    def max_draft(self, drafter: DrafterName | None = None) -> int:
        """Most tokens that a drafter ("auto" by default) can propose. Raises BundleError if the bundle does not have
        it.
        """
        kind = self._kind(drafter or self._drafter_name)
        return {"dflash": self.manifest.drafter.max_draft, "ngram": NgramDrafter().max_draft, "none": 0}[kind]

    @property
    def row_floor(self) -> int:
        """Rows that every target pass has at least, padding included, to be exact on this machine."""
        return self._opened().target.row_floor

    def close(self) -> None:
        """Free the graphs and caches. Streams in progress end with an error at their next chunk."""
        self._bundle = None
        self._free.clear()
        if self._log is not None:
            self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _opened(self) -> OpenBundle:
        if self._bundle is None:
            raise DFlashError("the engine is closed; load it again")
        return self._bundle

    def _kind(self, name: DrafterName) -> Literal["dflash", "ngram", "none"]:
        kind = self.manifest.drafter.kind if _check_drafter(name) == "auto" else name
        if kind == "dflash" and self._opened().dflash is None:
            raise BundleError(
                "the bundle has no DFlash drafter, or the engine was loaded without it; "
                "export with --drafter, or choose ngram or none"
            )
        return kind  # type: ignore[return-value]

    def _check_prompt(self, ids: Sequence[int]) -> None:
        vocabulary = self.manifest.target.vocab_size
        if any(not 0 <= token < vocabulary for token in ids):
            raise RequestError(
                f"the prompt holds a token id outside 0 to {vocabulary - 1}; encode it with this bundle's tokenizer"
            )
        if len(ids) >= self.max_context:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, the context holds {self.max_context} with the answer; "
                "shorten it, or export with a larger --max-context"
            )

    def _start(
        self,
        bundle: OpenBundle,
        request: Request,
        kinds: Sequence[str],
        controller: Controller,
        pieces: Sequence[int],
        on_round: Callable[[RoundRecord], None] | None,
        listener: Listener | None,
    ) -> Stream:
        spec, params = self.manifest.target, request.params
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else spec.eos_token_ids)}
        make_sampler = partial(
            Sampler, params, request.seed, request.prompt_ids, vocab_size=spec.vocab_size, stop_ids=stops
        )
        sampler = make_sampler()
        slot = self._take_slot(bundle)
        drafters = {kind: self._make_drafter(bundle, kind, slot.drafter, sampler) for kind in kinds}
        if listener is not None:
            own = make_sampler()
            every = ("ngram", "dflash") if bundle.dflash is not None else ("ngram",)
            heard = {kind: self._make_drafter(bundle, kind, self._draft_cache(bundle), own) for kind in every}
            drafters["listener"] = listener(request, heard, own)
        decoding = Decoding(
            request=request,
            target=bundle.target,
            cache=slot.target,
            drafters=drafters,
            controller=controller,
            sampler=sampler,
            answer=Answer(request, bundle.text.detokenizer(), stop_ids=stops, max_tokens=self.max_tokens(request)),
            statistics=StatisticsBuilder(request.id, len(request.prompt_ids), plain_pass(controller)),
            on_round=on_round if self._log is None else self._log.observer(request, on_round),
        )
        lease = Lease(slot, self._free)

        def release() -> None:
            lease.end()
            controller.forget(request.id)

        return Stream(self._in_turn(decoding.chunks(pieces), lease), decoding, release, self._log)

    def _in_turn(self, chunks: Iterator[Chunk], lease: Lease) -> Iterator[Chunk]:
        """One round at a time: the models' output buffers are shared."""
        while True:
            with self._turn, lease.in_use() as usable:
                self._opened()
                chunk = next(chunks, None) if usable else None
            if chunk is None:
                return
            yield chunk

    def _kinds(self, name: DrafterName, controller: Controller) -> list[str]:
        """The drafters that a request may use, the free one first: all for a controller that chooses among them."""
        kind = self._kind(name)
        if kind == "none":
            return []
        if name == "auto" and kind == "dflash" and isinstance(controller, Adaptive):
            return ["ngram", "dflash"]
        return [kind]

    def max_tokens(self, request: Request) -> int:
        """Most tokens that its answer can have."""
        room = self.max_context - len(request.prompt_ids)
        return min(request.params.max_new_tokens or room, room)

    def _make_drafter(self, bundle: OpenBundle, kind: str, cache: KVCache | None, sampler: Sampler) -> Drafter:
        if kind == "ngram":
            return NgramDrafter()
        assert bundle.dflash is not None
        assert cache is not None
        graph_chooses = sampler.params.is_greedy and not sampler.params.changes_logits
        return DFlashDrafter(bundle.dflash, cache, None if graph_chooses else sampler.choose_drafts)

    def costs(self) -> CostTable:
        """What passes cost here, measured first where that was not done yet."""
        return self._controllers.costs()

    def new_controller(self, name: str) -> Controller:
        """One of this name, or of a policy file, that has learnt nothing yet. Raises PolicyError for an unknown one."""
        return self._controllers.new(name)

    def calibrate(self, seconds: float) -> tuple[CostTable, str | None]:
        """Measure costs anew for about ``seconds`` and keep them for the next time this bundle is loaded.

        Returns them, and a warning where they could not be kept.
        """
        costs = self._measure(seconds)
        return costs, remember_costs(self.manifest, self.backend, costs)

    def _measure(self, seconds: float) -> CostTable:
        with self._turn:
            return calibrate(self._opened(), progress=self._progress, seconds=seconds)

    def describe(self) -> dict[str, Any]:
        """Bundle, machine and exactness, as logs and traces say them."""
        return {
            "bundle": {
                "name": self.manifest.name,
                "identity": self.manifest.identity,
                "precision": self.manifest.precision,
            },
            "machine": {"cpu": machine.cpu_model(), "onnxruntime": runtime_version(), **self.backend.key()},
            "exact": self.exact,
        }

    def _take_slot(self, bundle: OpenBundle) -> Slot:
        with suppress(IndexError):  # not "if self._free": another thread may take the last one in between
            slot = self._free.pop()
            slot.clear()
            return slot
        return Slot(bundle.target.new_cache(self._capacity), self._draft_cache(bundle))

    def _draft_cache(self, bundle: OpenBundle) -> KVCache | None:
        return bundle.dflash.new_cache(self._capacity) if bundle.dflash is not None else None

    @property
    def _capacity(self) -> int:
        """Rows of a cache; behind the last token there is room for the drafter's block, or for one row of padding."""
        return self.max_context + self.manifest.drafter.block_size + 1


def _check_drafter(name: str) -> str:
    if name not in get_args(DrafterName):
        raise RequestError(f"unknown drafter '{name}'; expected {', '.join(get_args(DrafterName))}")
    return name
