"""How commands print: tables for people, JSON, JSON lines or CSV for programs.

Data goes to stdout, everything said about it to stderr. Programs get raw numbers (bytes, epoch
seconds); people get units of 1024 (KiB, MiB, GiB) and relative times. A terminal gets colours and
lines cut to its width; a pipe gets neither. NO_COLOR (https://no-color.org) switches colours off.
"""

from __future__ import annotations

import csv
import functools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import click

from chatkv.cli.table import Column, lines
from chatkv.words import ago, count, plural, printable, size

Format = Literal["human", "json", "jsonl", "csv"]
Row = Mapping[str, Any]
Command = TypeVar("Command", bound=Callable[..., Any])

__all__ = [
    "Output",
    "ago",
    "count",
    "output_options",
    "plural",
    "printable",
    "size",
    "wants_colour",
    "when",
]


class Output:
    """Prints in one of the formats; a command gets it from `output_options`."""

    def __init__(self, format: Format = "human") -> None:
        self.format = format

    @property
    def is_human(self) -> bool:
        return self.format == "human"

    def rows(
        self,
        rows: Sequence[Row],
        columns: Sequence[Column],
        empty: str = "",
        group: Callable[[Row], str] | None = None,
    ) -> None:
        """Many rows: a table, or every row's own keys and values. `empty` goes to stderr."""
        if not self.is_human:
            self._for_programs(rows)
        elif rows:
            self.table(rows, columns, group)
        else:
            self.note(empty)

    def record(self, values: Row) -> None:
        """One row for programs; people are shown something else."""
        if self.format == "csv":
            self._for_programs([values])
        else:
            click.echo(json.dumps(values, ensure_ascii=False))

    def table(
        self,
        rows: Sequence[Row],
        columns: Sequence[Column],
        group: Callable[[Row], str] | None = None,
    ) -> None:
        """A table for people; rows of one `group` stand together below its name."""
        if group is not None:
            rows = sorted(rows, key=group)
        colour = wants_colour(sys.stdout)
        header, *shown = lines(rows, columns, _width(), colour=colour)
        click.echo(header, color=True)
        last: str | None = None
        for row, line in zip(rows, shown, strict=True):
            if group is not None and group(row) != last:
                last = group(row)
                self.line(printable(last), bold=True)
            click.echo(line, color=True)

    def fields(self, values: Sequence[tuple[str, str]]) -> None:
        """Names and values below each other, for people; empty values are left out."""
        shown = [(name, value) for name, value in values if value]
        width = max((len(name) for name, _ in shown), default=0)
        for name, value in shown:
            self.line(f"{name:<{width}}  {printable(value)}", dim_chars=width)

    def line(self, text: str = "", *, bold: bool = False, dim_chars: int = 0) -> None:
        """One line for people, its first characters dimmed."""
        if wants_colour(sys.stdout):
            text = click.style(text[:dim_chars], dim=True) + click.style(
                text[dim_chars:], bold=bold or None
            )
        click.echo(text, color=True)

    def note(self, text: str) -> None:
        """Something about the data, on stderr."""
        if text:
            click.echo(text, err=True)

    def _for_programs(self, rows: Sequence[Row]) -> None:
        if self.format == "json":
            click.echo(json.dumps(list(rows), ensure_ascii=False))
        elif self.format == "jsonl":
            for row in rows:
                click.echo(json.dumps(row, ensure_ascii=False))
        elif rows:
            writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            for row in rows:
                writer.writerow({key: _csv_value(value) for key, value in row.items()})


def output_options(command: Command) -> Command:
    """Add --format and --json, and hand the command an `output`."""

    @functools.wraps(command)
    def with_output(*args: Any, format: Format, as_json: bool, **kwargs: Any) -> Any:
        return command(*args, output=Output("json" if as_json else format), **kwargs)

    choices = click.Choice(["human", "json", "jsonl", "csv"])
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Short for --format json."),
        click.option("--format", type=choices, default="human", help="How to print."),
    ):
        with_output = option(with_output)
    return with_output  # type: ignore[return-value]


def wants_colour(stream: Any) -> bool:
    """Whether `stream` is a terminal whose user has nothing against colours."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(stream.isatty())


def when(epoch_s: float) -> str:
    """A local date and time, and how long ago that was."""
    return f"{time.strftime('%Y-%m-%d %H:%M', time.localtime(epoch_s))} ({ago(epoch_s)})"


def _csv_value(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) else value


def _width() -> int | None:
    """Cells to fill: the terminal's; a pipe's reader wants every character."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS"):
        return shutil.get_terminal_size().columns
    return None
