"""The house stands as the design says: who may import whom, what is shipped, and what a file must have."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
CORE = "dflash_ort"
ROOMS = ("models", "exporter", "runtime", "controller", "distill", "cli")
BESIDE = ("tests", "benchmarks", "docs")

# The table. Everyone may import the core and themselves.
MAY_IMPORT = {
    CORE: set(),
    "models": set(),
    "controller": set(),
    "exporter": {"models"},
    "runtime": {"models", "controller"},
    "distill": {"models", "exporter", "runtime"},
    "cli": {"models", "exporter", "runtime", "controller", "distill"},
}
THIRD_PARTIES = {
    CORE: {"zstandard"},
    "models": set(),
    "controller": {"numpy", "sklearn"},
    "exporter": {"numpy", "onnx", "onnx_ir", "safetensors", "gguf", "ml_dtypes", "tokenizers"},
    "runtime": {"numpy", "onnxruntime", "onnxruntime_ep_openvino", "tokenizers", "jinja2"},
    "distill": {"numpy", "torch"},
    "cli": {"click", "rich"},
}
ONLY_TESTS = {"torch", "transformers"}
"""But for distill, which trains with torch; the table above says so."""
MOST_LINES = 400


@dataclass(frozen=True)
class Module:
    """A Python file, and what stands in it."""

    path: Path
    tree: ast.Module

    @property
    def folder(self) -> str:
        return self.path.relative_to(ROOT).parts[0]

    @property
    def name(self) -> str:
        """As it is imported."""
        parts = list(self.path.relative_to(ROOT).with_suffix("").parts)
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        return ".".join([CORE, *parts] if parts[0] in ROOMS else parts)

    def imports(self) -> Iterator[tuple[int, str]]:
        """Line and dotted name of all that is imported, in functions too; "." for what is relative."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                yield from ((node.lineno, "." if node.level else f"{base}.{alias.name}") for alias in node.names)
            elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
                argument = node.args[0] if node.args else None
                if isinstance(argument, ast.Constant):
                    yield node.lineno, str(argument.value)


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


@cache
def modules(*folders: str) -> tuple[Module, ...]:
    """All Python files of these folders; the core's links to the rooms are not followed."""
    found = []
    for folder in folders:
        for path in sorted((ROOT / folder).glob("*.py" if folder == CORE else "**/*.py")):
            found.append(Module(path, ast.parse(path.read_text("utf-8"), str(path))))
    assert found
    return tuple(found)


def _pyproject() -> dict[str, Any]:
    content: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    return content


def _for_the_reader_of_types_only(module: Module) -> set[int]:
    """Lines under `if TYPE_CHECKING`."""
    lines = set()
    for block in ast.walk(module.tree):
        if isinstance(block, ast.If) and getattr(block.test, "id", "") == "TYPE_CHECKING":
            lines |= {
                node.lineno for statement in block.body for node in ast.walk(statement) if hasattr(node, "lineno")
            }
    return lines


class TestImports:
    def test_rooms_import_only_whom_they_may(self) -> None:
        wrong = []
        for module in modules(CORE, *ROOMS):
            # The public API names classes of other rooms, and loads them when they are asked for.
            exempt = _for_the_reader_of_types_only(module) if module.name == CORE else set()
            allowed = MAY_IMPORT[module.folder] | {module.folder}
            for line, name in module.imports():
                parts = name.split(".")
                room = parts[1] if parts[0] == CORE and len(parts) > 1 and parts[1] in ROOMS else None
                if room is not None and room not in allowed and line not in exempt:
                    wrong.append(f"{module.path.relative_to(ROOT)}:{line} imports {name}")
        assert not wrong

    def test_third_parties_stay_in_their_rooms(self) -> None:
        wrong = []
        for module in modules(CORE, *ROOMS):
            allowed = THIRD_PARTIES[module.folder] | sys.stdlib_module_names | {CORE}
            wrong += [
                f"{module.path.relative_to(ROOT)}:{line} imports {name}"
                for line, name in module.imports()
                if name.split(".")[0] not in allowed
            ]
        assert not wrong

    def test_torch_is_for_tests(self) -> None:
        wrong = [
            f"{module.path.relative_to(ROOT)}:{line}"
            for module in modules(CORE, *ROOMS, "benchmarks", "docs")
            for line, name in module.imports()
            if name.split(".")[0] in ONLY_TESTS - THIRD_PARTIES.get(module.folder, set())
        ]
        assert not wrong

    def test_no_bare_folder_names_and_nothing_relative(self) -> None:
        """`import runtime` would make a second copy of every class."""
        wrong = [
            f"{module.path.relative_to(ROOT)}:{line} imports {name}"
            for module in modules(CORE, *ROOMS, *BESIDE)
            for line, name in module.imports()
            if name.split(".")[0] in ("", *ROOMS)
        ]
        assert not wrong

    @pytest.mark.parametrize(
        ("line", "found"),
        [
            ("import onnx.checker", ["onnx.checker"]),
            ("def f():\n    from dflash_ort.runtime import engine", ["dflash_ort.runtime.engine"]),
            ("from dflash_ort import exporter", ["dflash_ort.exporter"]),
            ("from . import x", ["."]),
            ("importlib.import_module('torch')", ["torch"]),
        ],
    )
    def test_that_imports_are_seen(self, line: str, found: list[str]) -> None:
        assert [name for _, name in Module(ROOT / "cli" / "x.py", ast.parse(line)).imports()] == found

    def test_importing_the_package_is_free(self) -> None:
        code = "import sys, dflash_ort; print(*sorted({name.split('.')[0] for name in sys.modules}))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert not set(done.stdout.split()) & {"torch", "onnxruntime", "numpy", "onnx", "click", "rich", "tokenizers"}

    def test_running_needs_nothing_of_exporting(self) -> None:
        code = "import sys, dflash_ort.cli.main, dflash_ort.runtime.engine; print(*sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert not set(done.stdout.split()) & {"torch", "onnx", "onnx_ir", "safetensors", "gguf", "ml_dtypes"}


class TestNames:
    def test_what_is_exported_is_all_and_resolves(self) -> None:
        import dflash_ort

        assert dflash_ort.__all__ == sorted(dflash_ort.__all__)
        assert set(dflash_ort.__all__) == set(dflash_ort._HOMES)
        for name in dflash_ort.__all__:
            assert getattr(dflash_ort, name).__module__ == dflash_ort._HOMES[name]
        assert set(dflash_ort.__all__) <= set(dir(dflash_ort))
        with pytest.raises(AttributeError, match="no attribute 'Motor'"):
            dflash_ort.Motor  # noqa: B018

    def test_type_checkers_see_the_same_names(self) -> None:
        import dflash_ort

        module = modules(CORE)[0]
        assert module.name == CORE
        lines = _for_the_reader_of_types_only(module)
        seen = {name.rpartition(".")[2] for line, name in module.imports() if line in lines}
        assert seen == set(dflash_ort.__all__)

    @pytest.mark.parametrize("module", modules(CORE, *ROOMS), ids=lambda module: module.name)
    def test_every_all_resolves(self, module: Module) -> None:
        found = importlib.import_module(module.name)
        assert Path(found.__file__ or "").resolve() == module.path, "installed from somewhere else"
        for name in getattr(found, "__all__", ()):
            assert hasattr(found, name), name

    def test_public_things_say_what_they_are_for(self) -> None:
        wrong = []
        for module in modules(CORE, *ROOMS):
            things = [(module.name, module.tree)] + [
                (f"{module.name}.{node.name}", node)
                for node in module.tree.body
                if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_")
            ]
            wrong += [name for name, node in things if not ast.get_docstring(node)]
        wrong += [m.name for m in modules(*BESIDE) if m.tree.body and not ast.get_docstring(m.tree)]
        assert not wrong, "\n".join(wrong)


class TestPackaging:
    def test_the_table_knows_every_room(self) -> None:
        packages = set(_pyproject()["tool"]["setuptools"]["packages"])
        assert packages == {CORE, *(f"{CORE}.{room}" for room in ROOMS)}, "add the new room to the tables above"
        assert set(MAY_IMPORT) == set(THIRD_PARTIES) == {CORE, *ROOMS}

    def test_every_folder_with_modules_is_listed(self) -> None:
        setuptools = _pyproject()["tool"]["setuptools"]
        folders = {
            path.parent.relative_to(ROOT).as_posix()
            for path in ROOT.glob("*/__init__.py")
            if not path.parent.name.startswith(".") and path.parent.name not in (*BESIDE, "build")
        }
        folders |= {path.parent.relative_to(ROOT).as_posix() for room in ROOMS for path in (ROOT / room).rglob("*.py")}
        assert folders == set(setuptools["package-dir"].values())
        assert list(setuptools["package-dir"]) == setuptools["packages"]

    @pytest.mark.parametrize("room", ROOMS)
    def test_the_core_links_to_the_rooms(self, room: str) -> None:
        link = ROOT / CORE / room
        assert link.is_symlink()
        assert os.readlink(link) == f"../{room}"

    def test_a_wheel_holds_every_file(self, tmp_path: Path) -> None:
        if importlib.util.find_spec("setuptools") is None:
            pytest.skip("needs setuptools")
        expected = self._copy(tmp_path / "source")
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
        built = subprocess.run(
            [*command, "--disable-pip-version-check", "--wheel-dir", str(tmp_path), "."],
            cwd=tmp_path / "source", capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert built.returncode == 0, built.stderr
        (wheel,) = tmp_path.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
        shipped = [name for name in names if ".dist-info/" not in name]
        assert sorted(shipped) == sorted(expected)
        assert any(name.endswith("dist-info/licenses/LICENSE") for name in names)

    @staticmethod
    def _copy(source: Path) -> list[str]:
        """Copy what a wheel is made of, large files as stubs; returns what ought to be in the wheel."""
        source.mkdir()
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, source)
        expected = []
        for folder in (CORE, *ROOMS):
            for path in sorted((ROOT / folder).iterdir() if folder == CORE else (ROOT / folder).rglob("*")):
                place = source / path.relative_to(ROOT)
                if path.is_symlink():
                    place.symlink_to(os.readlink(path))
                elif path.is_file() and "__pycache__" not in path.parts:
                    place.parent.mkdir(parents=True, exist_ok=True)
                    place.write_bytes(b"" if path.stat().st_size > 1_000_000 else path.read_bytes())
                    name = path.relative_to(ROOT).as_posix()
                    expected.append(name if folder == CORE else f"{CORE}/{name}")
        return expected


def project_files() -> list[Path]:
    """The text files that belong to the project."""
    ignored = re.compile(r"(\.(?!ci$|gitignore$).*|__pycache__|build|dist|.*\.egg-info)")
    found, folders = [], [ROOT]
    while folders:
        for path in folders.pop().iterdir():
            if ignored.fullmatch(path.name) or path.is_symlink():
                continue
            if path.is_dir():
                folders.append(path)
            elif path.suffix not in (".safetensors", ".onnx", ".gguf", ".npy"):
                found.append(path)
    return sorted(found)


class TestFiles:
    def test_no_file_is_too_long_to_read(self) -> None:
        lengths = {
            module.path.relative_to(ROOT).as_posix(): len(module.path.read_text("utf-8").splitlines())
            for module in modules(CORE, *ROOMS, *BESIDE)
        }
        assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}

    def test_nothing_names_the_place_where_it_was_written(self) -> None:
        place = "/".join(("", "work", ""))
        hosts = [
            ".".join(parts)
            for parts in (
                ("pypi", "org"),
                ("pythonhosted", "org"),
                ("anaconda", "org"),
                ("npmjs", "org"),
                ("crates", "io"),
            )
        ]
        options = ["-".join(("", "", "index", "url")), "-".join(("extra", "index", "url"))]
        files = project_files()
        assert ROOT / "pyproject.toml" in files
        assert Path(__file__).resolve() in files
        wrong = []
        for path in files:
            text = path.read_text("utf-8")
            wrong += [f"{path.relative_to(ROOT)}: {word}" for word in (place, *hosts, *options) if word in text]
        assert not wrong
