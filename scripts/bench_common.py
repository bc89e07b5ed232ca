#!/usr/bin/env python
"""What all benchmarks share: figures beside their baselines, as JSON, a table or a picture.

    def measure(options: Options) -> Iterator[Figure]: ...

    if __name__ == "__main__":
        run("what this measures", measure)

gives a script the arguments --quick, --json FILE|- and --plot FILE.png. Ctrl-C or SIGTERM ends it,
and what is measured by then is printed or written as if that were all. Run by itself, this prints
the machine and the versions alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

PACKAGES = ("chatkv", "torch", "numpy", "lmdb", "zstandard", "xxhash", "transformers")


@dataclass(frozen=True)
class Options:
    quick: bool  # under a minute on two cores: smaller sizes, the same figures


@dataclass(frozen=True)
class Figure:
    """One measured value beside its baseline from the same run.

    `goal` is for `goal_of`: the value itself, or its ratio to the baseline. A `value` of None says
    that it could not be measured here, and `note` says why. `bound` is the value that this machine
    could reach at best, measured in the same run: a goal that lies beyond it is neither met nor
    missed here.
    """

    name: str
    value: float | None
    unit: str
    baseline: float | None = None
    baseline_name: str | None = None
    goal: float | None = None
    goal_of: Literal["value", "ratio"] = "ratio"
    goal_is: Literal[">=", "<="] = ">="
    note: str | None = None
    less_is_better: bool = False  # a time or a size: the ratio says how many times less it is
    bound: float | None = None

    @property
    def ratio(self) -> float | None:
        """The value in units of the baseline, or the other way round where less is better."""
        return self._ratio_of(self.value)

    @property
    def meets(self) -> bool | None:
        """Whether the goal is met; None where there is no goal, nothing could be measured, or no
        program could have met it here."""
        met = self._met_by(self.value)
        out_of_reach = self.bound is not None and not self._met_by(self.bound)
        return None if met is False and out_of_reach else met

    def _met_by(self, value: float | None) -> bool | None:
        reached = value if self.goal_of == "value" else self._ratio_of(value)
        if reached is None or self.goal is None:
            return None
        return reached >= self.goal if self.goal_is == ">=" else reached <= self.goal

    def _ratio_of(self, value: float | None) -> float | None:
        if not value or not self.baseline:
            return None
        return self.baseline / value if self.less_is_better else value / self.baseline

    def to_dict(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "name": self.name,
            "value": _rounded(self.value),
            "unit": self.unit,
            "baseline": _rounded(self.baseline),
            "baseline_name": self.baseline_name,
            "ratio": _rounded(self.ratio),
            "goal": self.goal,
            "goal_of": self.goal_of,
            "goal_is": self.goal_is,
            "meets": self.meets,
        }
        if self.bound is not None:
            fields["bound"] = _rounded(self.bound)
        if self.note is not None:
            fields["note"] = self.note
        return fields


def run(
    description: str,
    measure: Callable[[Options], Iterable[Figure]],
    draw: Callable[[Path], None] | None = None,
) -> None:
    """Read the arguments, measure, and print or write what came out.

    `draw` makes a picture of the script's own for --plot, after measuring. Stopped by a signal,
    this exits as a program does that such a signal has ended.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="smaller sizes, under a minute")
    parser.add_argument("--json", metavar="FILE", help="write JSON to FILE, or to stdout for -")
    parser.add_argument("--plot", metavar="FILE.png", type=Path, help="draw the ratios")
    arguments = parser.parse_args()

    figures: list[Figure] = []
    stopped_by = _collect(measure, Options(quick=arguments.quick), figures)
    where = machine()
    report = {
        "machine": where,
        "versions": versions(),
        "figures": [figure.to_dict() for figure in figures],
    }
    if stopped_by is not None:
        report["stopped"] = True
        say("stopped: what is measured by now follows")
    if arguments.json == "-":
        json.dump(report, sys.stdout, indent=2)
        print()
    elif arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    else:
        print(table(where, figures))
    if arguments.plot and figures:
        draw(arguments.plot) if draw is not None else plot(arguments.plot, description, figures)
    if stopped_by is not None:
        sys.exit(128 + stopped_by)


def _collect(
    measure: Callable[[Options], Iterable[Figure]], options: Options, figures: list[Figure]
) -> int | None:
    """Add what is measured to `figures` as it comes; the number of the signal that ended it."""
    came: list[int] = []

    def stop(number: int, frame: object) -> None:
        came.append(number)
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for figure in measure(options):
            figures.append(figure)
    except KeyboardInterrupt:
        return came[0]
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return None


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def seconds(work: Callable[[], object], before: Callable[[], object] | None = None) -> float:
    """How long one run of `work` takes; `before` runs first and is not counted."""
    if before is not None:
        before()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def median_seconds(
    work: Callable[[], object], repeats: int = 5, before: Callable[[], object] | None = None
) -> float:
    """The median of `repeats` runs of `work`."""
    return statistics.median(seconds(work, before) for _ in range(repeats))


def machine() -> dict[str, Any]:
    """The processor, its cores, the memory and the system; the GPU where torch sees one."""
    found: dict[str, Any] = {
        "cpu": _line_value("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_gib": None,
        "system": f"{platform.system()} {platform.release()}",
        "gpu": None,
    }
    memory = _line_value("/proc/meminfo", "MemTotal")
    if memory is not None:
        found["memory_gib"] = round(int(memory.split()[0]) / (1 << 20), 1)
    torch = sys.modules.get("torch")  # not imported for this alone
    if torch is not None and torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def versions() -> dict[str, str]:
    """Python and the installed packages that matter to a figure."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def table(where: dict[str, Any], figures: list[Figure]) -> str:
    """Figures as aligned text, their notes below."""
    rows = [("figure", "value", "baseline", "ratio", "goal", "meets")]
    for figure in figures:
        goal = ""
        if figure.goal is not None:
            goal = f"{figure.goal_is} {figure.goal:g}{'x' if figure.goal_of == 'ratio' else ''}"
        baseline = ""
        if figure.baseline_name:
            baseline = f"{_short(figure.baseline)} ({figure.baseline_name})"
        rows.append(
            (
                figure.name,
                f"{_short(figure.value)} {figure.unit}",
                baseline,
                f"{figure.ratio:.2f}x" if figure.ratio is not None else "",
                goal,
                {True: "yes", False: "no", None: ""}[figure.meets],
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [f"{where['cpu']}, {where['cores']} cores, {where['system']}", ""]
    lines += [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    lines += [
        f"{figure.name}: at best {_short(figure.bound)} {figure.unit} here"
        for figure in figures
        if figure.bound is not None
    ]
    lines += [f"{figure.name}: {figure.note}" for figure in figures if figure.note]
    return "\n".join(lines)


def plot(path: Path, title: str, figures: list[Figure]) -> None:
    """Each figure's ratio to its baseline as a bar, its goal as a mark."""
    try:
        from matplotlib.figure import (  # type: ignore[import-not-found,unused-ignore]
            Figure as Picture,
        )
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install matplotlib") from None
    drawn = [figure for figure in figures if figure.ratio is not None]
    picture = Picture(figsize=(8, 1 + 0.5 * len(drawn)), layout="constrained")
    axes = picture.subplots()
    axes.barh([figure.name for figure in drawn], [figure.ratio or 0.0 for figure in drawn])
    for row, figure in enumerate(drawn):
        if figure.goal is not None and figure.goal_of == "ratio":
            axes.plot([figure.goal] * 2, [row - 0.4, row + 0.4], color="black")
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel("times the baseline")
    axes.set_title(title)
    picture.savefig(path)


def _line_value(path: str, name: str) -> str | None:
    """The text after the colon of the line `name` in one of Linux' information files."""
    try:
        with open(path, encoding="utf-8") as lines:
            return next((x.split(":", 1)[1].strip() for x in lines if x.startswith(name)), None)
    except OSError:
        return None


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


if __name__ == "__main__":
    run(__doc__.splitlines()[0], lambda options: [])
