"""The common form of every benchmark: figures beside their baselines, as a table or as JSON.

A figure is measured in the same run as its baseline. `goal` is a comparison with the value or the
ratio, such as ">= 20x" or "<= 1.5 GB"; `meets` is null where it could not be measured, and the
note says why.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import platform
import re
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_COMPARE = {">=": operator.ge, "<=": operator.le}
_GOAL = re.compile(r"(>=|<=)\s*([\d.]+)\s*(.*)")


@dataclass(frozen=True)
class Figure:
    """One measured number. A goal whose unit is "x" speaks of the ratio to the baseline."""

    name: str
    value: float | None
    unit: str
    baseline: float | None = None
    baseline_name: str | None = None
    goal: str | None = None
    note: str | None = None
    inverse: bool = False  # a time: the ratio is baseline / value, so that more is better

    @property
    def ratio(self) -> float | None:
        if not self.value or not self.baseline:
            return None
        return self.baseline / self.value if self.inverse else self.value / self.baseline

    @property
    def meets(self) -> bool | None:
        if self.goal is None:
            return None
        parsed = _GOAL.fullmatch(self.goal)
        assert parsed, f"a goal reads like '>= 20x', not {self.goal!r}"
        measured = self.ratio if parsed[3] == "x" else self.value
        return None if measured is None else _COMPARE[parsed[1]](measured, float(parsed[2]))

    def to_json(self) -> dict[str, Any]:
        fields = ("name", "value", "unit", "baseline", "baseline_name", "ratio", "goal", "meets")
        entry = {name: getattr(self, name) for name in fields}
        return entry | ({"note": self.note} if self.note else {})


@dataclass
class Report:
    """The figures of one run, printed as they were asked for."""

    title: str
    arguments: argparse.Namespace
    figures: list[Figure] = field(default_factory=list)

    def add(self, figure: Figure) -> None:
        """Add a figure; on a terminal it is seen at once."""
        self.figures.append(figure)
        print(f"  {_line(figure)}", file=sys.stderr, flush=True)

    def finish(self) -> None:
        """Print the table, or write the JSON."""
        if self.arguments.json is None:
            _print_table(self)
            return
        text = json.dumps(
            {
                "title": self.title,
                "machine": machine(),
                "versions": versions(),
                "figures": [figure.to_json() for figure in self.figures],
            },
            indent=2,
        )
        if self.arguments.json == "-":
            print(text)
        else:
            with open(self.arguments.json, "w") as file:
                file.write(text + "\n")


def arguments(description: str, **extra: dict[str, Any]) -> argparse.Namespace:
    """The command line of a benchmark: --quick, --json, and what it needs itself."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under a minute, smaller sizes")
    parser.add_argument("--json", metavar="FILE", help="write JSON to FILE, or - for stdout")
    for name, options in extra.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **options)
    return parser.parse_args()


def median_s(run: Callable[[], object], repeat: int = 5) -> float:
    """Median seconds of `repeat` runs, after one that warms up."""
    import time

    run()
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def machine() -> dict[str, Any]:
    """Where this was measured."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as lines:
            name = next(line.split(":")[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        pass
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": name,
        "threads": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "load_average": os.getloadavg()[0],
    }


def versions() -> dict[str, str]:
    """What it was measured with."""
    found = {"python": platform.python_version()}
    for name in ("chatkv", "torch", "transformers", "lmdb", "zstandard", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _line(figure: Figure) -> str:
    value = "not measured" if figure.value is None else f"{_round(figure.value)} {figure.unit}"
    ratio = f", {figure.ratio:.2f}x" if figure.ratio is not None else ""
    return f"{figure.name}: {value}{ratio}"


def _print_table(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=report.title, title_justify="left", box=None, pad_edge=False)
    for column in ("FIGURE", "VALUE", "BASELINE", "RATIO", "GOAL", ""):
        table.add_column(column, justify="right" if column in ("VALUE", "RATIO") else "left")
    words = {True: "met", False: "MISSED", None: ""}
    for figure in report.figures:
        baseline = ""
        if figure.baseline is not None:
            baseline = f"{_round(figure.baseline)} {figure.unit} ({figure.baseline_name})"
        table.add_row(
            figure.name,
            "-" if figure.value is None else f"{_round(figure.value)} {figure.unit}",
            baseline,
            "" if figure.ratio is None else f"{figure.ratio:.2f}x",
            figure.goal or "",
            words[figure.meets],
        )
    # A pipe has no width of its own; 120 keeps every row on one line.
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for figure in report.figures:
        if figure.note:
            console.print(f"{figure.name}: {figure.note}", style="dim")
    where = machine()
    console.print(f"{where['cpu']}, {where['threads']} threads, {where['system']}", style="dim")


def _round(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
