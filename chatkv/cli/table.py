"""Columns of text under headers, fitted to a width: one line per row, nothing drawn around it.

Widths are terminal cells, not characters: a Chinese character or an emoji takes two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click

GAP = "  "
MIN_FLEXIBLE_CELLS = 12


@dataclass(frozen=True)
class Column:
    """What a column shows of a row, and how."""

    header: str
    show: Callable[[Any], str]
    is_number: bool = False  # right-aligned
    is_flexible: bool = False  # is cut short where the terminal is narrow
    is_extra: bool = False  # ... and left out where that is not enough, the last such one first
    colour: str | None = None
    highlight: tuple[str, ...] = ()  # words to emphasise


def lines(
    rows: Sequence[Any], columns: Sequence[Column], width: int | None, *, colour: bool
) -> list[str]:
    """The headers' line, then one per row. `width` in cells, None: as wide as it needs to be."""
    from rich.cells import cell_len

    texts = [[" ".join(column.show(row).split()) for column in columns] for row in rows]
    widths = [
        max(cell_len(text) for text in (column.header, *(row[at] for row in texts)))
        for at, column in enumerate(columns)
    ]
    if width is not None:
        _shrink(widths, columns, width)
        at = next((at for at in reversed(range(len(columns))) if columns[at].is_extra), None)
        if _excess(widths, width) > 0 and at is not None:
            fewer = [column for index, column in enumerate(columns) if index != at]
            return lines(rows, fewer, width, colour=colour)
    headers = [
        _aligned(column.header, column, cells)
        for column, cells in zip(columns, widths, strict=True)
    ]
    if colour:
        headers = [click.style(header, bold=True) for header in headers]
    shown = [headers]
    for row in texts:
        cells = [_aligned(*cell) for cell in zip(row, columns, widths, strict=True)]
        cells[-1] = cells[-1].rstrip()  # no blanks at the end of lines
        if colour:
            cells = [_coloured(*cell) for cell in zip(cells, columns, strict=True)]
        shown.append(cells)
    return [GAP.join(cells).rstrip() for cells in shown]


def _shrink(widths: list[int], columns: Sequence[Column], width: int) -> None:
    """Take cells from the widest flexible column until the table fits or all are at their least."""
    flexible = [at for at, column in enumerate(columns) if column.is_flexible]
    least = [max(MIN_FLEXIBLE_CELLS, len(column.header)) for column in columns]
    excess = _excess(widths, width)
    while excess > 0:
        widest = max(flexible, key=lambda at: widths[at] - least[at], default=None)
        if widest is None or widths[widest] <= least[widest]:
            return
        widths[widest] -= 1
        excess -= 1


def _excess(widths: Sequence[int], width: int) -> int:
    """By how many cells a line is too long."""
    return sum(widths) + len(GAP) * (len(widths) - 1) - width


def _aligned(text: str, column: Column, cells: int) -> str:
    from rich.cells import cell_len, set_cell_size

    length = cell_len(text)
    if length > cells:
        return set_cell_size(text, cells - 1) + "…"
    padding = " " * (cells - length)
    return padding + text if column.is_number else text + padding


def _coloured(cell: str, column: Column) -> str:
    if column.highlight:
        words = "|".join(re.escape(word) for word in column.highlight)
        cell = re.sub(
            words, lambda found: click.style(found[0], bold=True), cell, flags=re.IGNORECASE
        )
    return click.style(cell, fg=column.colour) if column.colour else cell
