"""Bad input, bad luck and impatience: one line that says what and what to do, and nothing half-written."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_ort.models.manifest import CHAT_TEMPLATE, MANIFEST, TOKENIZER
from tests.shell import BLOCK, SHAPE, Home, Terminal, at_home, call, finish, start
from tests.tiny import TinyShape, edit_config, edit_tensors, write_drafter, write_target


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    with at_home(tmp_path_factory.mktemp("home")) as made:
        yield made


RUN_MISTAKES: list[tuple[str, list[str], str]] = [
    ("unquoted prompt", ["Why", "is", "it"], "put the prompt in quotes"),
    ("two words, or no such bundle", ["Why", "not"], "'Why' is not a bundle"),
    ("empty prompt", [""], "the prompt is empty"),
    ("blank prompt", [" \n\t "], "the prompt is empty"),
    ("surrogates", ["caf\udce9"], "lone surrogates"),
    ("unknown option", ["--tempreature", "1", "Hello"], "--tempreature"),
    ("unknown drafter", ["--drafter", "eagle", "Hello"], "'eagle' is not one of"),
    ("unknown controller", ["--controller", "best", "Hello"], "unknown controller"),
    ("controller without a number", ["--controller", "fixed:", "Hello"], "unknown controller"),
    ("controller with a sign", ["--controller", "fixed:-1", "Hello"], "unknown controller"),
    ("controller, other digits", ["--controller", "fixed:²", "Hello"], "unknown controller"),
    ("session option", ["--session-option", "session.nonsense=1", "Hello"], "unknown session option"),
    ("inexact session option", ["--session-option", "session.disable_prepacking=1", "Hello"], "is refused"),
    ("session option without a value", ["--session-option", "x", "Hello"], "'x' is not NAME=VALUE"),
    ("template argument without a value", ["--template-arg", "x", "Hello"], "'x' is not NAME=VALUE"),
    ("threads", ["--threads", "0", "Hello"], "threads is 0"),
    ("a context too large", ["--max-context", "1000000", "Hello"], "this bundle was exported for 2 to"),
    ("a context too small", ["--max-context", "1", "Hello"], "max_context is 1"),
    ("a prompt longer than the context", ["--max-context", "8", "Hello"], "the context holds 8"),
    ("a system message without a template", ["--raw", "--system", "x", "Hello"], "--raw takes no chat template"),
    ("no tokens", ["--max-new-tokens", "0", "Hello"], "max_new_tokens is 0"),
    ("fewer tokens than none", ["--max-new-tokens", "-1", "Hello"], "max_new_tokens is -1"),
    ("not a number of tokens", ["--max-new-tokens", "many", "Hello"], "'many' is not a valid integer"),
    ("too many tokens wanted", ["--min-tokens", "9", "--max-new-tokens", "8", "Hello"], "min_tokens is 9"),
    ("temperature below 0", ["--temperature", "-0.1", "Hello"], "temperature is -0.1"),
    ("temperature not a number", ["--temperature", "nan", "Hello"], "temperature is nan"),
    ("temperature infinite", ["--temperature", "inf", "Hello"], "temperature is inf"),
    ("top_p 0", ["--top-p", "0", "Hello"], "top_p is 0"),
    ("top_p 2", ["--top-p", "2", "Hello"], "top_p is 2"),
    ("min_p 2", ["--min-p", "2", "Hello"], "min_p is 2"),
    ("top_k -1", ["--top-k", "-1", "Hello"], "top_k is -1"),
    ("seed -1", ["--seed", "-1", "Hello"], "seed is -1"),
    ("seed too large", ["--seed", str(2**64), "Hello"], "seed is"),
    ("empty stop", ["--stop", "", "Hello"], "stop holds an empty"),
    ("stop token too large", ["--stop-token-ids", "99999", "Hello"], "stop_token_ids names token 99999"),
    ("bias without a token", ["--logit-bias", "=1", "Hello"], "'=1' is not ID=BIAS"),
    ("bias without a value", ["--logit-bias", "7", "Hello"], "'7' is not ID=BIAS"),
    ("bias not a number", ["--logit-bias", "7=nan", "Hello"], "logit_bias[7] is nan"),
    ("bias for no token", ["--logit-bias", "99999=1", "Hello"], "logit_bias names token 99999"),
]


class TestRun:
    @pytest.mark.parametrize(("arguments", "expected"), [m[1:] for m in RUN_MISTAKES], ids=[m[0] for m in RUN_MISTAKES])
    def test_mistakes(self, arguments: list[str], expected: str) -> None:
        assert expected in call("run", *arguments).error

    @pytest.mark.parametrize(
        ("arguments", "code"),
        [(["run", "--top-p", "2", "Hello"], 1), (["run", "--tempreature", "2", "Hello"], 2), (["rum"], 2)],
    )
    def test_exit_status(self, arguments: list[str], code: int) -> None:
        done = finish(start(*arguments))
        assert done.code == code
        assert done.error
        assert len(done.err.splitlines()) == 1

    def test_wrong_usage_says_where_to_look(self) -> None:
        assert call("run", "--tempreature", "2", "Hello").error.endswith(" (see 'dflash-ort run --help')")
        assert call("rum").error.startswith("No such command 'rum'")
        assert call("rum").error.endswith(" (see 'dflash-ort --help')")

    @pytest.mark.parametrize("empty", [b"", b"\n", b"  \n\n"])
    def test_nothing_on_standard_input(self, empty: bytes) -> None:
        assert "the prompt is empty" in call("run", stdin=empty).error

    def test_standard_input_that_is_not_utf8(self) -> None:
        assert "standard input is not UTF-8 (byte 3)" in call("run", stdin=b"caf\xe9").error
        assert "standard input is not UTF-8 (byte 0)" in finish(start("run"), b"\xff\xfe").error

    def test_no_default_bundle_yet(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DFLASH_ORT_CACHE", str(tmp_path / "none"))
        for command in (["run", "Hello"], ["inspect"]):
            assert call(*command).error == "there is no default bundle yet; make it with 'dflash-ort export'"
        assert not (tmp_path / "none").exists()

    @pytest.mark.parametrize("flag", ["--json", "--raw", "--compare"])
    def test_what_a_chat_cannot_do(self, flag: str) -> None:
        with Terminal("run", flag) as terminal:
            assert terminal.end() == 2
            assert terminal.seen.startswith(f"error: {flag} needs a prompt")
            assert terminal.seen.count("\n") == 1

    def test_a_failure_of_our_own_is_one_line_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*_: Any, **__: Any) -> None:
            raise ValueError("two\nlines")

        monkeypatch.setattr("dflash_ort.runtime.engine.Engine.load", broken)
        done = call("run", "Hello")
        assert done.code == 1
        assert len(done.err.splitlines()) == 1
        assert done.err.startswith("error: ValueError: two lines (at ")
        assert "test_cli_errors.py:" in done.err
        assert done.err.endswith("this is a bug in dflash-ort, please report it\n")


def _edit_manifest(bundle: Path, **changes: Any) -> None:
    path = bundle / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _list_a_file_outside(bundle: Path) -> None:
    files = json.loads((bundle / MANIFEST).read_text())["files"]
    _edit_manifest(bundle, files=files | {"../x": {"size": 1, "sha256": ""}})


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def _fill(path: Path, byte: bytes) -> None:
    """Other bytes, as many as before."""
    path.write_bytes(byte * path.stat().st_size)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "unknown key": (lambda b: _edit_manifest(b, extra=1), "unknown key 'extra'"),
    "unknown key inside": (lambda b: _edit_manifest(b, drafter={"kind": "none", "size": 3}), "unknown key 'size'"),
    "wrong kind": (lambda b: _edit_manifest(b, precision=8), "precision is 8"),
    "newer": (lambda b: _edit_manifest(b, format_version=99), "upgrade dflash-ort"),
    "files not listed": (lambda b: _edit_manifest(b, files={}), "export the bundle again"),
    "file outside": (_list_a_file_outside, "not inside the bundle"),
    "not JSON": (lambda b: (b / MANIFEST).write_text("{"), MANIFEST),
    "not an object": (lambda b: (b / MANIFEST).write_text("[]"), "expected a JSON object"),
    "not text": (lambda b: (b / MANIFEST).write_bytes(b"\xff\xfe"), MANIFEST),
    "missing file": (lambda b: (b / TOKENIZER).unlink(), f"no file '{TOKENIZER}'"),
    "truncated weights": (lambda b: _cut(b / "target.onnx.data"), "export the bundle again"),
    "truncated graph": (lambda b: _cut(b / "drafter.onnx"), "export the bundle again"),
}

SAME_SIZE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "unreadable template": (lambda b: _fill(b / CHAT_TEMPLATE, b"\xff"), CHAT_TEMPLATE),
    "tokenizer that is none": (lambda b: _fill(b / TOKENIZER, b"{"), TOKENIZER),
    "graph that is none": (lambda b: _fill(b / "target.onnx", b"\x00"), "target.onnx"),
    "vocabulary that is none": (lambda b: _fill(b / "draft_vocabulary.npy", b"\x00"), "draft_vocabulary.npy"),
}


class TestDamagedBundles:
    @pytest.fixture
    def bundle(self, home: Home, tmp_path: Path) -> Path:
        return Path(shutil.copytree(home.bundle, tmp_path / "bundle"))

    @pytest.mark.parametrize("damage", DAMAGES)
    def test_what_everyone_notices(self, damage: str, bundle: Path) -> None:
        break_it, expected = DAMAGES[damage]
        break_it(bundle)
        assert expected in call("run", bundle, "Hello").error
        assert expected in call("inspect", bundle).error

    @pytest.mark.parametrize("damage", SAME_SIZE)
    def test_what_sizes_do_not_show(self, damage: str, bundle: Path) -> None:
        break_it, expected = SAME_SIZE[damage]
        break_it(bundle)
        assert expected in call("run", bundle, "Hello").error
        assert "SHA-256" in call("inspect", bundle).error

    def test_a_template_with_a_mistake_in_it(self, bundle: Path) -> None:
        template = bundle / CHAT_TEMPLATE
        template.write_text("{% for".ljust(template.stat().st_size))
        assert "the chat template cannot be read" in call("run", bundle, "Hello").error

    def test_not_a_bundle(self, home: Home) -> None:
        for path in (home.target, home.root / "nowhere", home.target / "config.json"):
            assert f"'{path}' is not a bundle" in call("run", path, "Hello").error
            assert f"'{path}' is not a bundle" in call("inspect", path).error

    def test_no_drafter_in_it(self, home: Home, tmp_path: Path) -> None:
        made = call("export", "--target", home.target, "--output", tmp_path / "b", "--max-context", 40)
        assert made.code == 0
        assert "no DFlash drafter" in call("run", tmp_path / "b", "--drafter", "dflash", "Hello").error

    def test_no_template_in_it(self, tmp_path: Path) -> None:
        target = write_target(tmp_path / "t", TinyShape(context=40))
        (target / CHAT_TEMPLATE).unlink()
        assert call("export", "--target", target, "--output", tmp_path / "b").code == 0
        assert call("run", tmp_path / "b", "Hello", "--max-new-tokens", 2).code == 0
        assert "no chat template" in call("run", tmp_path / "b", "--system", "Be brief.", "Hello").error
        with Terminal("run", tmp_path / "b") as terminal:
            assert terminal.end() == 1
            assert terminal.seen.startswith("error: this bundle has no chat template, so it cannot chat")


class TestExport:
    def refused(self, output: Path, *arguments: object) -> str:
        """The error, once it is certain that nothing was left behind."""
        error = call("export", "--output", output, *arguments).error
        assert not output.parent.exists() or not list(output.parent.iterdir())
        return error

    @pytest.fixture
    def output(self, tmp_path: Path) -> Path:
        return tmp_path / "outputs" / "bundle"

    @pytest.fixture
    def target(self, tmp_path: Path) -> Path:
        return write_target(tmp_path / "target", SHAPE)

    def test_not_a_checkpoint(self, output: Path, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "text.txt").write_text("hello")
        (tmp_path / "junk.gguf").write_bytes(b"GGUF\x03\x00\x00\x00junk")
        (tmp_path / "zero.gguf").touch()
        for name in ("nowhere", "empty", "text.txt", "junk.gguf", "zero.gguf"):
            assert str(tmp_path / name) in self.refused(output, "--target", tmp_path / name), name

    def test_another_architecture(self, output: Path, target: Path) -> None:
        edit_config(target, architectures=["GPT2LMHeadModel"], model_type="gpt2")
        assert "GPT2LMHeadModel" in self.refused(output, "--target", target)

    def test_a_truncated_checkpoint(self, output: Path, target: Path) -> None:
        _cut(target / "model.safetensors")
        assert "model.safetensors" in self.refused(output, "--target", target)

    @pytest.mark.parametrize("name", ["config.json", TOKENIZER, CHAT_TEMPLATE])
    def test_unreadable_parts(self, name: str, output: Path, target: Path) -> None:
        (target / name).write_bytes(b"\xff{%")
        assert name in self.refused(output, "--target", target)

    def test_weights_that_are_not_finite(self, output: Path, target: Path) -> None:
        edit_tensors(target, {"model.norm.weight": np.full(SHAPE.hidden, np.nan, np.float32)})
        assert "not finite" in self.refused(output, "--target", target)

    @pytest.mark.parametrize("other", [{"hidden": 48}, {"vocab": 300}])
    def test_a_drafter_for_another_target(
        self, other: dict[str, int], output: Path, target: Path, tmp_path: Path
    ) -> None:
        shape = TinyShape(**{**{name: getattr(SHAPE, name) for name in SHAPE.__dataclass_fields__}, **other})
        drafter = write_drafter(tmp_path / "drafter", shape, block_size=BLOCK, taps=(0, 1))
        error = self.refused(output, "--target", target, "--drafter", drafter)
        assert next(iter(other)) in error or "vocabulary" in error
        assert str(next(iter(other.values()))) in error

    def test_a_drafter_that_is_none(self, output: Path, target: Path, tmp_path: Path) -> None:
        for drafter in ("", "nowhere", target, tmp_path):
            assert self.refused(output, "--target", target, "--drafter", drafter)
        assert "drafter" in self.refused(output, "--target", target, "--drafter", "n-gram")

    def test_options_that_make_no_sense(self, output: Path, target: Path) -> None:
        assert "exclude each other" in self.refused(output, "--preset", "smollm2-135m", "--target", target)
        assert "is not one of" in self.refused(output, "--precision", "int3", "--target", target)
        assert "'gpt5' is not" in self.refused(output, "--preset", "gpt5")
        assert "1 is not in the range" in self.refused(output, "--max-context", 1, "--target", target)
        assert "max_context is 1000000" in self.refused(output, "--max-context", 10**6, "--target", target)

    def test_an_output_that_is_something_else(self, target: Path, tmp_path: Path) -> None:
        place = tmp_path / "photographs"
        place.mkdir()
        (place / "1.jpg").touch()
        for output in (place, place / "1.jpg"):
            for force in ([], ["--force"]):
                assert "is not a bundle" in call("export", "--target", target, "--output", output, *force).error
        inside = call("export", "--target", target, "--output", place / "1.jpg" / "bundle").error
        assert "choose another --output" in inside
        assert [path.name for path in place.iterdir()] == ["1.jpg"]

    def test_without_the_packages_it_needs(self, target: Path) -> None:
        code = "import sys; sys.modules['onnx'] = None; from dflash_ort.cli.main import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code, "export", "--target", str(target)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert done.stderr == "error: exporting needs more packages (onnx): pip install 'dflash-ort[export]'\n"


class TestExportCutShort:
    """Nothing is left where the bundle would have come, nor beside it."""

    @pytest.mark.parametrize(
        ("numbers", "code"),
        [((signal.SIGINT,), 130), ((signal.SIGINT,) * 3, 130), ((signal.SIGTERM,), 143), ((signal.SIGHUP,), 129)],
        ids=["Ctrl-C", "Ctrl-C three times", "kill", "terminal closed"],
    )
    @pytest.mark.parametrize("step", ["writing the target", "self-check: quality"])
    def test_by_a_signal(self, step: str, numbers: tuple[int, ...], code: int, home: Home, tmp_path: Path) -> None:
        # A signal between a file's opening and its `with` leaves the file to the process's end: no leak of ours.
        process = start(
            *("export", "--target", home.target, "--drafter", home.drafter, "--output", tmp_path / "bundle"),
            env={"PYTHONWARNINGS": "default,ignore::ResourceWarning"},
        )
        said = b""
        for line in process.stderr:
            said += line
            if line.startswith(step.encode()):
                break
        for number in numbers:
            process.send_signal(number)
        done = finish(process)
        assert done.code == code, done
        assert not list(tmp_path.iterdir())
        after = [line for line in done.err.splitlines() if not line.startswith(("writing", "hashing", "self-check"))]
        assert after == (["stopped"] if code == 130 else [])

    def test_the_old_bundle_stays(self, home: Home) -> None:
        before = {path.name: path.read_bytes() for path in home.bundle.iterdir()}
        process = start("export", "--target", home.target, "--force", "--precision", "int8")
        assert process.stderr.readline() == b"reading the checkpoint\n"
        process.send_signal(signal.SIGINT)
        assert finish(process).code == 130
        assert {path.name: path.read_bytes() for path in home.bundle.iterdir()} == before
        assert [path.name for path in home.bundle.parent.iterdir()] == ["default"]

    @pytest.mark.parametrize("limit", [1000, 20_000, 60_000])
    def test_by_a_full_disk(self, limit: int, home: Home, tmp_path: Path) -> None:
        first = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit},) * 2)"
        command = ("export", "--target", home.target, "--drafter", home.drafter, "--output", tmp_path / "bundle")
        error = finish(start(*command, first=first)).error
        assert error.startswith(f"cannot write the bundle '{tmp_path / 'bundle'}': ")
        assert "free some space" in error
        assert os.strerror(27) in error or "not all was written" in error
        assert not list(tmp_path.iterdir())
