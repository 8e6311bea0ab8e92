"""Policy files: what is written is read, mistakes are named, and who starts from which."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_ort.controller.acceptance import GENERIC_PRIORS
from dflash_ort.controller.adaptive import Adaptive
from dflash_ort.controller.policy import GENERIC_POLICY, AdaptiveSettings, Policy
from dflash_ort.errors import PolicyError
from dflash_ort.models.manifest import MANIFEST, POLICY, DrafterCheck, SelfCheck, read_manifest
from dflash_ort.params import SamplingParams
from dflash_ort.runtime.engine import Engine
from dflash_ort.runtime.policies import load_policy
from tests.shell import Home, at_home, call, json_of

OTHER = Policy(
    {**GENERIC_PRIORS, "dflash": replace(GENERIC_PRIORS["dflash"], means=(-0.5, 1.0, 0.1, 0.0, 0.0), useless=0.1)},
    AdaptiveSettings(rate_memory=9.0, cautious_length=3),
    {"provenance": {"why": "a test"}},
)


def written(policy: Policy, path: Path) -> Path:
    path.write_text(json.dumps(policy.as_json()))
    return path


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    with at_home(tmp_path_factory.mktemp("home")) as home:
        yield home


@pytest.mark.parametrize("policy", [GENERIC_POLICY, OTHER])
def test_what_is_written_is_read(policy: Policy, tmp_path: Path) -> None:
    assert load_policy(written(policy, tmp_path / "p.json")) == policy


def test_what_a_file_leaves_out_is_generic() -> None:
    sparse = {"format": "dflash-ort policy", "version": 1, "settings": {"rate_memory": 9}}
    assert Policy.from_json(sparse, "it") == Policy(settings=AdaptiveSettings(rate_memory=9.0))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "other"}, "is not a policy file"),
        ({"version": 2}, "has version 2, this program reads 1"),
        ({"settings": {"rate_memory": 0}}, "rate_memory is 0; expected a positive number"),
        ({"settings": {"rate_memory": "x"}}, "rate_memory is 'x'; expected a number"),
        ({"settings": {"long_answer": 1.5}}, "long_answer is 1.5; expected a whole number"),
        ({"settings": {"speed": 3}}, "unknown entry 'speed'"),
        ({"settings": []}, "settings: not an object"),
        ({"priors": {"eagle": {}}}, "unknown prior 'eagle'"),
        ({"priors": {"dflash": {"means": {"intercept": 1}}}}, "has not just the entries intercept, logit"),
        ({"priors": []}, "priors is not an object"),
    ],
)
def test_mistakes_in_a_file_are_named(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps({**OTHER.as_json(), **change}))
    with pytest.raises(PolicyError) as caught:
        load_policy(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [("useless", 1.0), ("offset_deviation", -1), ("offset_memory", True)])
def test_a_prior_that_cannot_be_is_refused(name: str, value: float) -> None:
    raw = OTHER.as_json()
    raw["priors"]["ngram"][name] = value
    with pytest.raises(PolicyError, match=f"prior 'ngram'.*{name}"):
        Policy.from_json(raw, "it")


def test_a_bundle_starts_from_its_own_policy_which_is_no_part_of_its_identity(
    tiny_bundle: Callable[..., Path], tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    for file in tiny_bundle("fp32").iterdir():
        (bundle / file.name).symlink_to(file)
    identity = read_manifest(bundle).identity
    for policy in (None, OTHER):
        if policy is not None:
            written(policy, bundle / POLICY)
        with Engine.load(bundle, threads=1, calibrate=False) as engine:
            made = engine.new_controller("adaptive")
            generic = engine.new_controller("adaptive:generic")
            assert isinstance(made, Adaptive)
            assert isinstance(generic, Adaptive)
            assert made.policy == (policy or GENERIC_POLICY)
            assert generic.policy == GENERIC_POLICY
    assert read_manifest(bundle).identity == identity
    (bundle / POLICY).write_text("{")
    with pytest.raises(PolicyError, match="is not JSON"):
        Engine.load(bundle, threads=1, calibrate=False)


@pytest.mark.parametrize(
    ("accepted", "blocks", "useless"),
    [(0, 500, 0.98), (5, 250, 0.76), (100, 400, None), (1, 3, None), (0, 0, None)],
)
def test_a_check_that_found_next_to_nothing_accepted_is_believed(
    accepted: float, blocks: int, useless: float | None
) -> None:
    for policy in (GENERIC_POLICY, OTHER):
        priors = policy.after_check("dflash", accepted, blocks).priors
        for name, prior in priors.items():
            if useless is None or name.startswith("ngram"):
                assert prior == policy.priors[name]
            else:
                assert prior.useless == pytest.approx(useless, abs=0.03)
                assert replace(prior, useless=policy.priors[name].useless) == policy.priors[name]
    believed = OTHER.after_check("dflash", accepted, blocks)
    assert Policy.from_json(believed.as_json(), "it") == believed


def test_a_drafter_that_failed_its_check_is_not_asked_at_first(
    tiny_bundle: Callable[..., Path], tmp_path: Path
) -> None:
    """Nothing is verified of it in an answer that is too short for a try; without the check, its blocks are."""
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    for file in tiny_bundle("fp32").iterdir():
        if file.name != MANIFEST:
            (bundle / file.name).symlink_to(file)
    manifest = read_manifest(tiny_bundle("fp32"))
    found = DrafterCheck(acceptance_length=1.0, survival=(0.0,) * 4, verify_rounds=400)
    check = SelfCheck(rows_independent=True, cpu="any", onnxruntime="any", drafter=found)
    verified = []
    for checked in (replace(manifest, self_check=None), replace(manifest, self_check=check)):
        (bundle / MANIFEST).write_text(checked.to_json())
        with Engine.load(bundle, threads=1, calibrate=False, drafter="dflash") as engine:
            answer = engine.generate("one two three", SamplingParams(max_new_tokens=8, ignore_eos=True))
            verified.append(answer.statistics.drafted)
    assert verified[0] > 0
    assert verified[1] == 0


def test_a_drafters_policy_goes_into_the_bundle(home: Home, tmp_path: Path) -> None:
    written(OTHER, home.drafter / POLICY)
    output = tmp_path / "bundle"
    assert call("export", "--target", home.target, "--drafter", home.drafter, "--output", output).code == 0
    assert load_policy(output / POLICY) == OTHER
    assert POLICY not in read_manifest(output).files


def test_no_policy_changes_a_token(home: Home, tmp_path: Path) -> None:
    path = written(OTHER, tmp_path / "p.json")
    run = ("run", "abcabcabc", "--json", "--max-new-tokens", 16, "--seed", 1, "--threads", 1, "--no-calibrate")
    texts = {json_of(call(*run, "--controller", name))["text"] for name in ("off", "adaptive", path)}
    assert len(texts) == 1
    assert "cannot be read: No such file" in call(*run, "--controller", tmp_path / "no.json").error
