"""Whatever a caller gets wrong is one line that names it, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_ort.errors import BundleError, DFlashError, PolicyError, ProviderError, RequestError
from dflash_ort.exporter.export import ExportOptions, export_bundle, read_target
from dflash_ort.params import SamplingParams
from dflash_ort.runtime.engine import Engine
from tests.fakes import (
    same_answer,
)
from tests.tiny import write_target


@pytest.fixture(scope="module")
def tiny(tiny_bundle: Callable[..., Path]) -> Iterator[Engine]:
    with Engine.load(tiny_bundle("int8")) as engine:
        yield engine


def test_prompts_that_cannot_be_used_are_refused_before_anything_runs(tiny: Engine) -> None:
    limit = tiny.max_context
    for prompt, message in [
        ("", "the prompt is empty"),
        (" \n\t", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([4] * limit, f"the prompt has {limit} tokens"),
        ([4] * (limit + 7), f"the prompt has {limit + 7} tokens"),
        ([4, -1], "outside 0 to 259"),
        ([4, 260], "outside 0 to 259"),
        ([{"role": "user"}], "expected an object with 'role' and 'content'"),
        ([{"role": 3, "content": "x"}], "expected an object with 'role' and 'content'"),
        (["text"], "expected an object with 'role' and 'content'"),
        ([4, True], "expected an object with 'role' and 'content'"),
        ("\ud800", "lone surrogates"),
    ]:
        with pytest.raises(RequestError, match=message) as caught:
            tiny.stream(prompt)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
    for pieces in ([], [1], [2, 0], [3, -1], [1, 1, 1]):
        with pytest.raises(RequestError, match="prefill_pieces"):
            tiny.stream([4, 5], prefill_pieces=pieces)


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": -1},
        {"max_new_tokens": 1.5},
        {"max_new_tokens": True},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 1e300},
        {"temperature": 10**400},
        {"temperature": "hot"},
        {"temperature": False},
        {"temperature": None},
        {"top_k": -1},
        {"top_k": 1.0},
        {"top_p": 0},
        {"top_p": 2},
        {"top_p": float("nan")},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"repetition_penalty": 0},
        {"repetition_penalty": -1},
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e300},
        {"presence_penalty": 2.5},
        {"frequency_penalty": -2.5},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {"1": 1.0}},
        {"logit_bias": {1: float("inf")}},
        {"logit_bias": {1: None}},
        {"logit_bias": None},
        {"logit_bias": [1, 2]},
        {"min_tokens": -1},
        {"min_tokens": 5, "max_new_tokens": 4},
        {"stop": ""},
        {"stop": ["a", ""]},
        {"stop": [1]},
        {"stop": None},
        {"stop": 5},
        {"stop": b"a"},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": [True]},
        {"stop_token_ids": 5},
        {"stop_token_ids": "ab"},
        {"ignore_eos": "yes"},
        {"seed": -1},
        {"seed": 2**64},
        {"seed": 1.0},
    ],
    ids=str,
)
def test_wrong_parameters_are_one_line(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**options)
    assert "\n" not in str(caught.value)
    assert next(iter(options)) in str(caught.value)


def test_token_ids_must_be_the_models(tiny: Engine) -> None:
    for params in (SamplingParams(logit_bias={260: 1.0}), SamplingParams(stop_token_ids=[9999])):
        with pytest.raises(RequestError, match="0 to 259"):
            tiny.generate("a", params)


def test_parameters_cannot_change_under_a_request() -> None:
    bias, stop = {5: 1.0}, ["a"]
    params = SamplingParams(logit_bias=bias, stop=stop)
    bias[6], stop[0] = 2.0, "b"
    assert (params.logit_bias, params.stop) == ({5: 1.0}, ("a",))


# Engines --------------------------------------------------


def test_a_closed_engine_says_so(tiny_bundle: Callable[..., Path]) -> None:
    with Engine.load(tiny_bundle("fp32")) as engine:
        stream = engine.stream("hello", SamplingParams(max_new_tokens=20))
        next(stream)
    engine.close()
    with pytest.raises(DFlashError, match=r"^the engine is closed; load it again$"):
        next(stream)
    assert stream.finish_reason == "cancelled"
    for later in (engine.generate, engine.stream):
        with pytest.raises(DFlashError, match="the engine is closed"):
            later("hello")


def test_unknown_names_are_refused_in_one_line(tiny_bundle: Callable[..., Path], tiny: Engine) -> None:
    bundle = tiny_bundle("int8")
    with pytest.raises(RequestError, match=r"unknown drafter 'eagle'; expected auto, dflash, ngram, none"):
        Engine.load(bundle, drafter="eagle")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"unknown drafter 'eagle'"):
        tiny.stream("a", drafter="eagle")  # type: ignore[arg-type]
    for name in ("adapt", "fixed", "fixed:", "fixed:-1", "fixed:1.5", "fixed:²", "", "off:1x"):
        with pytest.raises(PolicyError, match=r"unknown controller '.*'; expected"):
            Engine.load(bundle, controller=name)
        with pytest.raises(PolicyError):
            tiny.stream("a", controller=name)
    with pytest.raises(ProviderError, match=r"unknown session option 'session.dynamic_block_bose'"):
        Engine.load(bundle, session_options={"session.dynamic_block_bose": "4"})
    with pytest.raises(ProviderError, match=r"'session.disable_prepacking' is refused"):
        Engine.load(bundle, session_options={"session.disable_prepacking": "1"})
    for threads in (0, -1, True):
        with pytest.raises(ProviderError, match="threads"):
            Engine.load(bundle, threads=threads)
    for context in (1, 0, 513):
        with pytest.raises(RequestError, match="max_context"):
            Engine.load(bundle, max_context=context)


def test_a_bundle_without_a_drafter(tmp_path: Path, tiny_bundle: Callable[..., Path]) -> None:
    target = read_target(write_target(tmp_path / "target"))
    export_bundle(target, "none", tmp_path / "none", ExportOptions())
    export_bundle(target, "ngram", tmp_path / "ngram", ExportOptions())
    params = SamplingParams(max_new_tokens=20, temperature=0.8, seed=1)
    with Engine.load(tiny_bundle("fp32")) as engine:
        truth = engine.generate("hello", params)
    for kind, longest in (("none", 0), ("ngram", 10)):
        with pytest.raises(BundleError, match="no DFlash drafter"):
            Engine.load(tmp_path / kind, drafter="dflash")
        with Engine.load(tmp_path / kind) as engine:
            assert engine.max_draft() == longest
            assert same_answer(engine.generate("hello", params), truth)
            assert same_answer(engine.generate("hello", params, drafter="ngram"), truth)
            with pytest.raises(BundleError, match="no DFlash drafter"):
                engine.stream("hello", params, drafter="dflash")
    with (
        Engine.load(tiny_bundle("fp32"), drafter="ngram") as engine,
        pytest.raises(BundleError, match="loaded without it"),
    ):
        engine.stream("hello", params, drafter="dflash")
