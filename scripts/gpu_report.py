#!/usr/bin/env python
"""docs/benchmarks/gpu.md from a run of bench_gpu: scripts/gpu_report.py RUN.json [TARGET.md]"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bench_report import HEAD, goal, row, where

TARGET = Path(__file__).resolve().parents[1] / "docs" / "benchmarks" / "gpu.md"
ABOUT = """# The GPU path

Written by `scripts/gpu_report.py` from the JSON of `scripts/bench_gpu.py`.
"""
COMPILED = """
## What is compiled

Every kernel, for compute capability 8.0 and 9.0, without a device: registers are those of a thread,
shared memory that of a program. A thread with a stack has spilled registers. A kernel that stands
here more than once is launched with other arguments.

| kernel | target | warps | registers | stack, bytes | shared, bytes |
|---|---|---|---|---|---|
"""
MEASURED = "\n## What is measured\n\n" + HEAD


def page(report: dict[str, Any]) -> str:
    """The whole document."""
    kernels = [figure for figure in report["figures"] if figure["unit"] == "registers"]
    others = [figure for figure in report["figures"] if figure["unit"] != "registers"]
    measured = [figure for figure in others if figure["value"] is not None]
    missing = [figure for figure in others if figure["value"] is None]
    parts = [ABOUT, where(report)]
    if measured:
        parts += [MEASURED, *map(row, measured)]
    if missing:
        parts += [
            "\n## What is not measured\n\nThe code is there, and runs on a CPU in the tests; "
            "how fast it is on a GPU is not known.\n\n| figure | goal | why |\n|---|---|---|\n",
            *(f"| {one['name']} | {goal(one)} | {one['note']} |\n" for one in missing),
        ]
    if kernels:
        parts += [COMPILED, *dict.fromkeys(map(_kernel, kernels))]
    return "".join(parts)


def _kernel(figure: dict[str, Any]) -> str:
    name, _, target = figure["name"].rpartition(" ")
    warps, stack, shared = (part.split()[0] for part in figure["note"].split(", "))
    return f"| {name} | {target} | {warps} | {figure['value']:g} | {stack} | {shared} |\n"


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    target = Path(sys.argv[2]) if len(sys.argv) == 3 else TARGET
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page(json.loads(Path(sys.argv[1]).read_text())), encoding="utf-8")
