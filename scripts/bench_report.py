#!/usr/bin/env python
"""A benchmark's run as a page: scripts/bench_report.py RUN.json TARGET.md "Title" [PICTURE.png]"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HEAD = "| figure | value | baseline | ratio | goal | met |\n|---|---|---|---|---|---|\n"


def page(title: str, report: dict[str, Any], picture: str | None = None) -> str:
    """The whole document: every figure, and below the table what is to be said of some."""
    figures = report["figures"]
    notes = [f"- {one['name']}: {one['note']}\n" for one in figures if one.get("note")]
    parts = [
        f"# {title}\n\nWritten by `scripts/bench_report.py` from the JSON of a benchmark.\n",
        where(report),
        f"\n![{title}]({picture})\n" if picture else "",
        "\n",
        HEAD,
        *map(row, figures),
        "\n" if notes else "",
        *notes,
    ]
    return "".join(parts)


def where(report: dict[str, Any]) -> str:
    """The machine and what ran on it."""
    machine, versions = report["machine"], report["versions"]
    device = machine.get("gpu") or "no GPU"
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        f"\nMachine: {device}; {machine['cpu']}, {machine['cores']} cores. Versions: {packages}.\n"
    )


def row(figure: dict[str, Any]) -> str:
    baseline = "" if figure["baseline"] is None else f"{figure['baseline']:g}"
    named = f"{baseline} ({figure['baseline_name']})" if baseline else ""
    ratio = "" if figure["ratio"] is None else f"{figure['ratio']:.2f}"
    met = {True: "yes", False: "no", None: ""}[figure["meets"]]
    value = "-" if figure["value"] is None else f"{figure['value']:g} {figure['unit']}"
    return f"| {figure['name']} | {value} | {named} | {ratio} | {goal(figure)} | {met} |\n"


def goal(figure: dict[str, Any]) -> str:
    if figure["goal"] is None:
        return ""
    times = "x" if figure["goal_of"] == "ratio" else f" {figure['unit']}"
    return f"{figure['goal_is']} {figure['goal']:g}{times}"


if __name__ == "__main__":
    if len(sys.argv) not in (4, 5):
        sys.exit(__doc__)
    run, target, title, *picture = sys.argv[1:]
    text = page(title, json.loads(Path(run).read_text()), *picture)
    Path(target).write_text(text, encoding="utf-8")
