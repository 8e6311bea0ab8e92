"""Where things live on the user's machine: the cache directory and the default bundle. Nothing is created here."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """``$DFLASH_ORT_CACHE``, else ``$XDG_CACHE_HOME/dflash-ort``, else ``~/.cache/dflash-ort``."""
    own = os.environ.get("DFLASH_ORT_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "dflash-ort"


def default_bundle() -> Path:
    """Where ``export`` without ``--output`` writes and ``run`` without a bundle looks."""
    return cache_dir() / "bundles" / "default"
