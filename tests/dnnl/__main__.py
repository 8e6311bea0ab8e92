"""`make test-dnnl`: a minimal Debian 13 whose ONNX Runtime (1.21) has oneDNN's provider; our tests and benchmark in it.

Needs Linux, git and root (for debootstrap and chroot), a quarter of an hour and two gigabytes. The root is kept and
used again; delete its directory to make it anew. Mounts are in a namespace of their own and go with it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tomllib
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from dflash_ort.runtime.machine import cpu_features
from tests.dnnl.root import MADE, PROJECT, begin, copy_project, is_made, refusal

SUITE = "trixie"
PACKAGES = "python3,python3-venv,python3-pip,python3-numpy,python3-onnxruntime,libre2-11"
PYTHON = "3.13"
"""Debian 13's."""
PRECISIONS = ("fp32", "int8")
TESTS = ("tests/test_lossless.py", "tests/test_portable.py", "tests/dnnl")
SOME = "(greedy and not penalties and not bias and not min) or once or test_portable or default_pair"
"""Of the lossless matrix, by name, and all of the others."""
_PATIENT = {"OMP_WAIT_POLICY": "passive"}
"""oneDNN's threads wait busily otherwise: beside any other work a pass of a tiny model took 420 ms instead of 0.4."""
_TAIL = 20
"""Lines shown of a quiet command that failed."""
_BUNDLES, _SOURCE, _WHEELS, _CACHE = "bundles", "src", "wheels", "cache"


def main() -> None:
    """Make the root, test in it under each provider, and compare the providers' speed and texts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="where the Debian root is, or will be")
    parser.add_argument("--only", choices=("setup", "tests", "benchmark"), help="one part instead of all")
    arguments = parser.parse_args()
    if sys.platform != "linux" or os.geteuid() != 0:
        sys.exit("error: this makes a Debian root with debootstrap, which needs Linux and the rights of root")
    root: Path = arguments.root.resolve()
    try:
        why_not = refusal(root)
        if why_not is not None:
            sys.exit(f"error: {why_not}")
        if arguments.only in ("tests", "benchmark") and not is_made(root):
            sys.exit(f"error: there is no Debian root in '{root}' yet; make it with --only setup")
        if arguments.only in (None, "setup"):
            _make(root)
            _install(root)
        if arguments.only in (None, "tests"):
            _test(root)
        if arguments.only in (None, "benchmark"):
            _benchmark(root)
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: this failed with {error.returncode}: {' '.join(map(str, error.cmd[-6:]))}")
    except OSError as error:
        sys.exit(f"error: {error}")


def _make(root: Path) -> None:
    """The Debian root; half-made ones are made again."""
    if is_made(root):
        return
    if shutil.which("debootstrap") is None:
        _say("installing debootstrap")
        _run("apt-get", "install", "--yes", "--quiet", "debootstrap")
    begin(root)
    _say(f"making a Debian root in {root}")
    _run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, root, quiet=True)
    (root / MADE).touch()


def _install(root: Path) -> None:
    """This project and what it needs, over Debian's ONNX Runtime; and the default pair's portable bundles."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["export"], "pytest>=8.4", "hypothesis>=6.140", "setuptools>=77"]
    needed = [name for name in wanted if not name.startswith(("onnxruntime", "numpy"))]
    _say("fetching packages for it")
    wheels = root / _WHEELS
    where = ("--python-version", PYTHON, "--only-binary=:all:", "--dest", wheels)
    _run(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", *where, *needed)
    source = root / _SOURCE
    shutil.rmtree(source, ignore_errors=True)
    copy_project(source)
    _say("installing the project in it")
    _inside(root, "python3", "-m", "venv", "--system-site-packages", "/venv")
    offline = ("/venv/bin/pip", "install", "--quiet", "--no-index", "--find-links", f"/{_WHEELS}")
    _inside(root, *offline, "setuptools")
    _inside(root, *offline, "--no-build-isolation", f"/{_SOURCE}[export]", "pytest", "hypothesis")
    for precision in PRECISIONS:
        bundle = root / _BUNDLES / precision
        _say(f"exporting the default pair, portable, {precision}")
        export = ("export", "--portable", "--precision", precision, "--output", bundle, "--force")
        _run(sys.executable, "-m", "dflash_ort.cli.main", *export)


def _test(root: Path) -> None:
    """Promise 1 under the default provider of that build and, some of it, under oneDNN's, which is slow here."""
    exact = "avx512f" in cpu_features()
    if not exact:
        _say("oneDNN's AVX2 kernels do not keep rows independent, and are refused: no lossless tests of them")
    for provider, some, tests in (("cpu", (), TESTS), ("dnnl", ("-k", SOME), TESTS if exact else TESTS[-1:])):
        _say(f"testing with provider {provider}")
        environment = {"DFLASH_ORT_TEST_PROVIDER": provider, "DFLASH_ORT_TEST_BUNDLES": f"/{_BUNDLES}"}
        _inside(
            root, "/venv/bin/python", "-m", "pytest", "-q", "-m", "not pair and not full", *some, *tests, **environment
        )


def _benchmark(root: Path) -> None:
    """Speed of the two providers side by side, and whose texts are the same."""
    _inside(root, "/venv/bin/dflash-ort", "doctor")
    for precision in PRECISIONS:
        bundle = f"/{_BUNDLES}/{precision}"
        _say(f"comparing the providers, {precision}")
        few = ("--suites", "chat,code,maths,extraction", "--max-new-tokens", "24", "--repeats", "3")
        _inside(root, "/venv/bin/python", "-m", "benchmarks.backends", bundle, "provider=cpu", "provider=dnnl", *few)
        _inside(root, "/venv/bin/python", "-m", "benchmarks.choices", bundle)
        _inside(root, "/venv/bin/dflash-ort", "inspect", bundle, "--placement", "--provider", "dnnl")


def _inside(root: Path, *command: str, **environment: str) -> None:
    """Run a command in the root, with /proc and /sys, which tell the processor."""
    script = 'mount -t proc proc "$0/proc" && mount --rbind /sys "$0/sys" && exec chroot "$0" /usr/bin/env "$@"'
    settings = {"DFLASH_ORT_CACHE": f"/{_CACHE}", "LC_ALL": "C.UTF-8", **_PATIENT, **environment}
    inner = ["--chdir", f"/{_SOURCE}", *(f"{name}={value}" for name, value in settings.items()), *command]
    _run("unshare", "--mount", "--propagation", "private", "sh", "-c", script, root, *inner, drop="Schema error")


def _run(*command: str | Path, quiet: bool = False, drop: str | None = None) -> None:
    """Raises CalledProcessError, and OSError for a program that is not there.

    ``quiet``: of what it prints show the end, and only when it fails. ``drop``: lines to leave out of what it prints on
    standard error: Debian's build registers ONNX's operators twice and says so a thousand times.
    """
    words: Sequence[str] = [os.fspath(word) for word in command]
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if quiet else None,
        stderr=subprocess.STDOUT if quiet else subprocess.PIPE if drop else None,
        text=True,
        errors="replace",
    )
    last: deque[str] = deque(maxlen=_TAIL)
    for line in (process.stdout if quiet else process.stderr) or ():
        if quiet:
            last.append(line)
        elif line.strip() and drop and drop not in line:
            sys.stderr.write(line)
    if process.wait():
        sys.stderr.writelines(last)
        raise subprocess.CalledProcessError(process.returncode, words)


def _say(what: str) -> None:
    print(f"== {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
