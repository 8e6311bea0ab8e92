"""Exports the default target without the two-row attention floor: the fastest plain decoding, not exact. For
benchmarks only.

python -m benchmarks.unpadded OUTPUT [fp32|int8]
"""

from __future__ import annotations

import sys
from pathlib import Path

from dflash_ort.exporter.export import ExportOptions, export_bundle, read_target
from dflash_ort.models.presets import PRESETS, fetch_target


def main() -> None:
    output, precision = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "fp32"
    if precision not in ("fp32", "int8"):
        sys.exit(f"unknown precision '{precision}'; expected fp32 or int8")
    target = read_target(fetch_target(PRESETS["smollm2-135m"]))
    export_bundle(target, "none", output, ExportOptions(precision=precision, pad_attention=False), force=True)


if __name__ == "__main__":
    main()
