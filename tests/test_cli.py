"""The commands as a user meets them: what goes where, and that options mean what they say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from dflash_ort import __version__
from dflash_ort.cli.main import cli
from dflash_ort.defaults import PROVIDERS
from dflash_ort.errors import RequestError
from dflash_ort.models.manifest import MANIFEST, read_manifest
from dflash_ort.params import SamplingParams
from dflash_ort.runtime.engine import DEFAULT_CONTROLLER, Engine
from dflash_ort.runtime.providers import how_to_get, installed_providers
from docs.cli_reference import PAGE, reference
from tests.shell import BLOCK, Home, Outcome, Terminal, at_home, call, finish, json_of, start

STATISTICS = (
    *("prompt_tokens", "committed", "rounds", "verify_rounds", "drafted", "verified", "accepted", "acceptance_length"),
    *("tokens_per_round", "ttft_s", "tpot_s", "draft_s", "verify_s", "sample_s", "other_s", "tokens_per_second"),
)


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    with at_home(tmp_path_factory.mktemp("home")) as made:
        yield made


class TestHelp:
    def test_the_page_is_the_commands_own_help(self) -> None:
        assert PAGE.read_text("utf-8") == reference(), "run make docs"

    @pytest.mark.parametrize("command", [[], ["export"], ["run"], ["inspect"], ["doctor"]])
    @pytest.mark.parametrize("flag", ["-h", "--help"])
    def test_help_is_an_answer(self, command: list[str], flag: str) -> None:
        shown = call(*command, flag)
        assert (shown.code, shown.err) == (0, "")
        assert shown.out.startswith("Usage: dflash-ort")
        assert "..." not in shown.out.replace("[ARGS]...", ""), "a summary does not fit its line"

    def test_every_option_says_what_it_does(self) -> None:
        for name, command in cli.commands.items():
            for option in command.params:
                if option.param_type_name == "option":
                    assert option.help, f"{name} {option.name}"  # type: ignore[attr-defined]

    def test_the_version(self) -> None:
        assert call("--version") == Outcome(0, f"dflash-ort {__version__}\n", "")

    def test_no_command_is_wrong_usage_and_shows_the_help(self) -> None:
        shown = call()
        assert shown.code == 2
        assert shown.out == ""
        assert "Commands:" in shown.err


class TestExport:
    def test_without_output_run_finds_it(self, home: Home) -> None:
        manifest = read_manifest(home.bundle)
        assert (manifest.precision, manifest.drafter.kind, manifest.drafter.block_size) == ("fp32", "dflash", BLOCK)
        assert manifest.self_check is not None
        assert manifest.self_check.drafter is not None
        assert manifest.quality is not None
        assert manifest.quality.top1_agreement == 1.0
        assert manifest.provenance["arguments"] == {
            "preset": None,
            "target": "target",
            "drafter": "drafter",
            "precision": "fp32",
            "draft_precision": "int8",
            "max_context": None,
            "portable": False,
        }
        named = call("run", home.bundle, "Hello", "--max-new-tokens", 5)
        assert named.code == 0
        assert call("run", "Hello", "--max-new-tokens", 5) == named

    def test_all_options_and_what_is_said(self, home: Home, tmp_path: Path) -> None:
        output = tmp_path / "deep" / "bundle"
        done = finish(
            start(
                *("export", "--target", home.target, "--drafter", home.drafter, "--output", output),
                *("--precision", "int8", "--draft-precision", "fp32", "--max-context", "500"),
            )
        )
        assert (done.code, done.out) == (0, "")
        lines = done.err.splitlines()
        assert lines[0] == "reading the checkpoint"
        assert lines.count("self-check: quality") == 1
        wrote, quality, drafter, warning = lines[-4:]
        assert wrote.startswith(f"wrote {output}: target, int8, drafter dflash (fp32), ")
        assert quality.startswith("quality against fp32 over ")
        assert drafter.startswith("drafter: acceptance length ")
        assert warning.startswith("warning: only "), "a random drafter is no good and should be said to be"
        manifest = read_manifest(output)
        assert (manifest.precision, manifest.draft_precision, manifest.target.max_context) == ("int8", "fp32", 500)
        assert [path.name for path in output.parent.iterdir()] == ["bundle"]

    @pytest.mark.parametrize("drafter", [None, "ngram", "none"])
    def test_drafters_that_are_no_model_and_replacing(self, drafter: str | None, home: Home, tmp_path: Path) -> None:
        chosen = [] if drafter is None else ["--drafter", drafter]
        command = ["export", "--target", home.target, "--output", tmp_path / "bundle", "--max-context", 40, *chosen]
        assert call(*command).code == 0
        assert read_manifest(tmp_path / "bundle").drafter.kind == (drafter or "ngram")
        assert "pass --force" in call(*command).error
        assert call(*command, "--force").code == 0
        assert [path.name for path in tmp_path.iterdir()] == ["bundle"]

    def test_a_terminal_shows_a_bar(self, home: Home, tmp_path: Path) -> None:
        with Terminal("export", "--target", home.target, "--output", tmp_path / "bundle", term="xterm") as terminal:
            terminal.wait_for("━")
            terminal.wait_for("wrote .*MB")
            assert terminal.end() == 0


class TestRun:
    def test_the_answer_and_nothing_else_is_on_standard_output(self) -> None:
        options = ("--max-new-tokens", "40", "--seed", "3")
        assert finish(start("run", "Hello", *options)).code == 0  # the first one says that it measures the machine
        plain = finish(start("run", "Hello", *options))
        assert (plain.code, plain.err) == (0, "")
        told = finish(start("run", "Hello", *options, "--stats", "--compare"))
        assert told.out == plain.out
        first, last = told.err.splitlines()[0], told.err.splitlines()[-1]
        assert first.endswith("40 answer (length), seed 3")
        assert last.startswith("measured ")
        assert last.endswith("the same tokens")
        answer = json_of(finish(start("run", "Hello", *options, "--json")))
        assert answer["text"] + "\n" == plain.out

    def test_json(self) -> None:
        answer = json_of(call("run", "--json", "--max-new-tokens", 30, "--ignore-eos", "Hello"))
        assert list(answer) == ["text", "token_ids", "finish_reason", "seed", "exact", "statistics"]
        assert tuple(answer["statistics"])[: len(STATISTICS)] == STATISTICS
        assert len(answer["token_ids"]) == answer["statistics"]["committed"] == 30
        assert (answer["finish_reason"], answer["exact"]) == ("length", True)
        assert 0 < answer["statistics"]["rounds"] < 30
        assert answer["statistics"]["tokens_per_second"] > 0

    @pytest.mark.parametrize("sampling", [(), ("--temperature", "0.9", "--top-p", "0.95")])
    def test_speculation_never_changes_the_text(self, sampling: tuple[str, ...]) -> None:
        base = ("run", "--json", "--seed", "11", "--max-new-tokens", "60", *sampling, "abcabcabcabc")
        plain = json_of(call(*base, "--controller", "off"))
        assert plain["statistics"]["drafted"] == 0
        for drafter in ("auto", "dflash", "ngram", "none"):
            for controller in ("fixed:0", "fixed:2", "fixed:max"):
                answer = json_of(call(*base, "--drafter", drafter, "--controller", controller))
                same = {name: answer[name] == plain[name] for name in ("text", "token_ids", "finish_reason", "seed")}
                assert all(same.values()), (drafter, controller, same)
        assert json_of(call(*base, "--threads", 1))["text"] == plain["text"]

    def test_a_seed_that_was_drawn_gives_the_text_again(self) -> None:
        base = ("run", "--json", "--temperature", "1", "--max-new-tokens", "20", "Hello")
        first = json_of(call(*base))
        assert json_of(call(*base, "--seed", first["seed"]))["token_ids"] == first["token_ids"]

    def test_where_the_prompt_comes_from(self, home: Home) -> None:
        base = ("run", "--max-new-tokens", "12")
        expected = call(*base, "two words")
        assert expected.code == 0
        assert call(*base, stdin=b"two words\n") == expected
        assert call(*base, home.bundle, stdin=b"two words") == expected
        assert call(*base, home.bundle, "two words", stdin=b"not read") == expected
        assert call(*base, "--", "two words") == expected
        assert finish(start(*base), b"two words\n") == expected

    def test_a_prompt_is_not_looked_for_on_the_disk_too_hard(self, tmp_path: Path) -> None:
        assert call("run", "--max-new-tokens", 2, "a" * 5000).code == 0
        assert call("run", "--max-new-tokens", 2, "two\0words").code == 0
        taken = call("run", "--max-new-tokens", 2, tmp_path)
        assert taken.code == 0
        assert taken.err == f"warning: there is no bundle at '{tmp_path}', so it is taken as the prompt\n"

    def test_raw_templates_and_system(self) -> None:
        def tokens(*options: str) -> int:
            answer = json_of(call("run", "--json", "--max-new-tokens", 1, *options, "Hello"))
            count: int = answer["statistics"]["prompt_tokens"]
            return count

        assert tokens("--raw") == len("Hello")
        templated = tokens()
        assert templated > len("Hello")
        assert tokens("--system", "Be brief.") > templated
        assert tokens("--template-arg", "add_generation_prompt=false") < templated

    def test_too_many_drafts_are_warned_of_once(self) -> None:
        base = ("run", "--max-new-tokens", "20", "Hello", "--controller")
        expected = call(*base, "fixed:max")
        assert (expected.code, expected.err) == (0, "")
        assert call(*base, f"fixed:{BLOCK - 1}") == expected
        clamped = call(*base, "fixed:99")
        assert clamped.out == expected.out
        assert clamped.err.startswith("warning: fixed:99 asks for more than the drafter proposes; ")
        assert clamped.err.endswith(f"; {BLOCK - 1} at most will be verified\n")
        assert clamped.err.count("\n") == 1
        assert call(*base, "fixed:max", "--drafter", "ngram") == expected
        assert call(*base, "fixed:99", "--drafter", "ngram").err.startswith("warning: fixed:99 asks for more")

    def test_every_sampling_option_arrives(self, monkeypatch: pytest.MonkeyPatch) -> None:
        arrived: list[SamplingParams] = []

        def stream(_engine: Engine, _prompt: object, params: SamplingParams, **_: Any) -> None:
            arrived.append(params)
            raise RequestError("that is enough")

        monkeypatch.setattr(Engine, "stream", stream)
        chosen = SamplingParams(
            max_new_tokens=9,
            temperature=0.5,
            top_k=7,
            top_p=0.8,
            min_p=0.1,
            repetition_penalty=1.2,
            presence_penalty=0.3,
            frequency_penalty=-0.4,
            logit_bias={5: -1.5, 6: 2.0},
            min_tokens=2,
            stop=("a b", "c"),
            stop_token_ids=(8, 9),
            ignore_eos=True,
            seed=2**64 - 1,
        )
        options = []
        for field in fields(SamplingParams):
            value = getattr(chosen, field.name)
            assert value != getattr(SamplingParams(), field.name), f"{field.name} is at its default: tests nothing"
            flag = "--" + field.name.replace("_", "-")
            if field.name == "logit_bias":
                options += [part for token, bias in value.items() for part in (flag, f"{token}={bias}")]
            elif isinstance(value, tuple):
                options += [part for item in value for part in (flag, item)]
            else:
                options += [flag] if value is True else [flag, value]
        assert call("run", *options, "Hello").error == "that is enough"
        assert arrived == [chosen]
        assert call("run", "Hello").error == "that is enough"
        assert arrived[1] == SamplingParams()

    def test_engine_options_arrive(self, monkeypatch: pytest.MonkeyPatch) -> None:
        arrived: dict[str, Any] = {}

        def load(path: Path, **options: Any) -> None:
            arrived.update(options, path=path)
            raise RequestError("that is enough")

        monkeypatch.setattr(Engine, "load", load)
        options = ("--threads=3", "--max-context=99", "--allow-inexact", "--drafter=ngram", "--controller=fixed:2")
        assert call("run", "Hello", *options, "--session-option=a=b=c", "--session-option=d=").error
        del arrived["progress"], arrived["path"]
        expected = {"threads": 3, "max_context": 99, "allow_inexact": True, "drafter": "ngram"}
        expected |= {"controller": "fixed:2", "session_options": {"a": "b=c", "d": ""}}
        backend = {"provider": "auto", "fpmath": None, "cpus": (), "spinning": "stop", "shared_pool": False}
        assert arrived == {**expected, **backend, "calibrate": True, "log": None, "log_text": False}
        assert call("run", "Hello", "--cpus=0-2,5", "--provider=dnnl", "--fpmath=bf16", "--spinning=never").error
        assert (arrived["cpus"], arrived["provider"], arrived["fpmath"]) == ((0, 1, 2, 5), "dnnl", "bf16")
        for wrong in ("a", "1-", "-1", "", "1,,2", "3-0", "0-99999999"):
            assert f"'{wrong}' is not a list of processors" in call("run", "Hello", f"--cpus={wrong}").error


class TestInspect:
    def test_json(self, home: Home) -> None:
        shown = call("inspect", "--json")
        assert shown == call("inspect", home.bundle, "--json")
        bundle = json_of(shown)
        assert (bundle["precision"], bundle["draft_precision"]) == ("fp32", "int8")
        assert bundle["drafter"]["kind"] == "dflash"
        assert bundle["quality"]["top1_agreement"] == 1.0
        assert bundle["size_bytes"] == sum(p.stat().st_size for p in home.bundle.iterdir() if p.name != MANIFEST)
        assert set(bundle["graphs"]) == {"target.onnx", "drafter.onnx"}
        assert bundle["graphs"]["target.onnx"]["inputs"]["input_ids"]["type"] == "int64"

    def test_text(self, home: Home) -> None:
        shown = call("inspect")
        assert (shown.code, shown.err) == (0, "")
        for part in (str(home.bundle), "fp32", "dflash", "quality", "exact ", "input_ids: int64", "logits: float"):
            assert part in shown.out


class TestDoctor:
    def test_with_a_default_bundle(self, home: Home) -> None:
        shown = call("doctor")
        assert shown.code == 0
        installed = installed_providers()
        here = [name if name in installed else f"{name} is not here ({how_to_get(name)})" for name in PROVIDERS]
        why = "(the only one installed)" if len(installed) == 1 else "(measured, "
        for part in (__version__, ", ".join(here), why, str(home.bundle), "exact here", DEFAULT_CONTROLLER):
            assert part in shown.out
        assert json_of(call("doctor", "--json"))["exact here"].startswith("yes")

    def test_without_one(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DFLASH_ORT_CACHE", str(tmp_path / "none"))
        shown = call("doctor")
        assert shown.code == 0
        assert "make it with 'dflash-ort export'" in shown.out
        assert not (tmp_path / "none").exists()

    def test_with_a_damaged_one(self, home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        bundle = tmp_path / "bundles" / "default"
        bundle.mkdir(parents=True)
        (bundle / MANIFEST).write_text("{")
        monkeypatch.setenv("DFLASH_ORT_CACHE", str(tmp_path))
        shown = call("doctor")
        assert shown.code == 0
        assert "cannot be used" in shown.out
