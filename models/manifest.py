"""bundle.json: what a bundle directory declares, read strictly.

Every unknown key, missing file, wrong size or hash and newer format is an error of its own: a bundle that is not
exactly what was exported could decode other text without anyone noticing.
"""

from __future__ import annotations

import hashlib
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from dflash_ort.errors import BundleError
from dflash_ort.models.graph_names import DRAFT_VOCABULARY_FILE, EMBEDDING_FILE
from dflash_ort.models.spec import MAY_BE_ABSENT, DrafterSpec, ModelSpec

FORMAT_VERSION = 1
ONNXRUNTIME = "1.32"
"""The oldest version that can load ordinary graphs."""
PORTABLE_ONNXRUNTIME = "1.21"
MANIFEST = "bundle.json"
TARGET_GRAPH = "target.onnx"
DRAFTER_GRAPH = "drafter.onnx"
DRAFT_HEAD_GRAPH = "draft_head.onnx"
"""Of a drafter with a Markov head."""
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
POLICY = "policy.json"
"""What the adaptive controller starts from; no part of the bundle's identity, so that it can be tuned and replaced."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of the bundle."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Quality:
    """What quantising changed against fp32, on text that was not used for calibration.

    ``mean_kl`` is KL(fp32 || this), in nats, per next-token row; ``top1_agreement`` the share of rows with the same
    argmax.
    """

    mean_kl: float
    top1_agreement: float
    perplexity: float
    reference_perplexity: float
    rows: int
    text_sha256: str


@dataclass(frozen=True, slots=True)
class DrafterCheck:
    """How the drafter did at export: greedy, whole blocks, on the self-check's prompts."""

    acceptance_length: float
    survival: tuple[float, ...]
    """Share of verify rounds in which at least i drafts were accepted, i = 1, 2, ..."""
    verify_rounds: int


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """What the end of an export found."""

    rows_independent: bool
    """True when every row's bits were the same alone, in pairs and among many, on the exporting machine."""
    cpu: str
    onnxruntime: str
    drafter: DrafterCheck | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of bundle.json."""

    name: str
    target: ModelSpec
    drafter: DrafterSpec
    precision: str
    draft_precision: str | None
    files: Mapping[str, FileEntry]
    quality: Quality | None = None
    self_check: SelfCheck | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """How the bundle was made: arguments, versions, source hashes."""
    oldest_onnxruntime: str = field(default=ONNXRUNTIME, metadata=MAY_BE_ABSENT)
    """The first version of ONNX Runtime that can load the graphs."""
    portable: bool = field(default=False, metadata=MAY_BE_ABSENT)
    """The graphs are those that other providers compute rightly, oneDNN's and OpenVINO's."""
    format_version: int = FORMAT_VERSION

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @property
    def identity(self) -> str:
        """A hash over the graphs, weights and tokenizer: what a calibration or an exactness probe belongs to."""
        digest = hashlib.sha256()
        for name in sorted(self.files):
            digest.update(f"{name} {self.files[name].sha256}\n".encode())
        return digest.hexdigest()


def read_manifest(directory: Path) -> Manifest:
    """Read and check ``directory/bundle.json``. Raises BundleError, one line for each way of being wrong."""
    path = directory / MANIFEST
    if not path.is_file():
        raise BundleError(f"'{directory}' is not a bundle: it has no {MANIFEST}; make one with 'dflash-ort export'")
    try:
        raw = json.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise BundleError(f"'{path}' cannot be read ({error}); export the bundle again") from error
    if not isinstance(raw, dict):
        raise BundleError(f"'{path}' holds a {type(raw).__name__}, expected a JSON object; export the bundle again")
    version = raw.get("format_version")
    if not isinstance(version, int) or version < 1:
        raise BundleError(f"'{path}' has format_version {version!r}; expected {FORMAT_VERSION}")
    if version > FORMAT_VERSION:
        raise BundleError(
            f"'{directory}' is a bundle of format {version}, this program reads up to {FORMAT_VERSION}; "
            "upgrade dflash-ort"
        )
    return _decode(Manifest, raw, str(path))


def check_files(directory: Path, manifest: Manifest, *, hashes: bool = False) -> None:
    """Raise BundleError for a file that is missing or of another size; with ``hashes``, also of another content."""
    for name in _needed_files(manifest):
        if name not in manifest.files:
            raise BundleError(f"'{directory / MANIFEST}' does not list the file '{name}'; export the bundle again")
    for name, entry in manifest.files.items():
        path = directory / name
        if Path(name).name != name:
            raise BundleError(f"'{directory / MANIFEST}' names the file '{name}', which is not inside the bundle")
        if not path.is_file():
            raise BundleError(f"the bundle '{directory}' has no file '{name}'; export it again")
        size = path.stat().st_size
        if size != entry.size:
            raise BundleError(f"'{path}' has {size:,} bytes, {MANIFEST} says {entry.size:,}; export the bundle again")
        if hashes and file_entry(path).sha256 != entry.sha256:
            raise BundleError(
                f"'{path}' is not the file that was exported (its SHA-256 differs); export the bundle again"
            )


def _needed_files(manifest: Manifest) -> tuple[str, ...]:
    """Files that every bundle of this kind has; what is not listed would be run without being checked."""
    target = (TARGET_GRAPH, f"{TARGET_GRAPH}.data", EMBEDDING_FILE, TOKENIZER)
    drafter = (DRAFTER_GRAPH, f"{DRAFTER_GRAPH}.data", DRAFT_VOCABULARY_FILE)
    head = (DRAFT_HEAD_GRAPH, f"{DRAFT_HEAD_GRAPH}.data") if manifest.drafter.markov_head else ()
    return target + drafter + head if manifest.drafter.kind == "dflash" else target


def file_entry(path: Path) -> FileEntry:
    """Size and SHA-256 of a file."""
    with path.open("rb") as file:
        return FileEntry(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def _decode(cls: type[T], raw: Any, where: str) -> T:
    """A dataclass from JSON: no unknown key, none missing but those that may be, every value of its declared type."""
    if not isinstance(raw, dict):
        raise BundleError(f"{where}: expected an object for {cls.__name__}, found {type(raw).__name__}")
    hints = get_type_hints(cls)
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    for key in raw:
        if key not in known:
            raise BundleError(f"{where}: unknown key '{key}' in {cls.__name__}; the bundle is foreign or damaged")
    values = {}
    for name in known:
        if name not in raw and known[name].metadata.get("may_be_absent"):
            continue
        if name not in raw:
            raise BundleError(f"{where}: no key '{name}' in {cls.__name__}; the bundle is foreign or damaged")
        values[name] = _convert(hints[name], raw[name], f"{where}: {name}")
    return cls(**values)


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        return _convert(next(a for a in args if a is not type(None)), value, where)
    if is_dataclass(hint):
        return _decode(hint, value, where)  # type: ignore[arg-type]
    if origin is tuple and isinstance(value, list):
        return tuple(_convert(args[0], item, where) for item in value)
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, dict):
        return {key: _convert(args[1], item, f"{where}.{key}") for key, item in value.items()}
    if hint is Any:
        return value
    if origin is typing.Literal:
        if value in args:
            return value
    elif hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    elif isinstance(hint, type) and type(value) is hint:
        return value
    raise BundleError(f"{where} is {value!r}, which is not of the expected kind; the bundle is foreign or damaged")
