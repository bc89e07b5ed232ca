"""What people and programs are shown: tables that fit, units that are right, no stray control."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from rich.cells import cell_len

from chatkv.cli.output import Output, ago, plural, printable, size
from chatkv.cli.table import Column, lines
from program import Ran

Program = Callable[..., Ran]
Talk = Callable[..., Any]

ROWS = [
    {"id": "a1", "title": "short", "n": 5},
    {"id": "b2", "title": "東京タワー " * 10, "n": 12345},
    {"id": "c3", "title": "[bold]x[/bold] :smile:", "n": 0},
]
COLUMNS = [
    Column("ID", lambda row: row["id"], colour="cyan"),
    Column("TITLE", lambda row: row["title"], is_flexible=True),
    Column("N", lambda row: str(row["n"]), is_number=True),
    Column("LAST", lambda row: "end"),
]


@pytest.mark.parametrize("width", [30, 40, 79, 80, 200])
def test_tables_fit_their_width_in_cells(width: int) -> None:
    shown = lines(ROWS, COLUMNS, width, colour=False)
    assert max(map(cell_len, shown)) <= width
    ends = {cell_len(line[: line.rindex("  ")]) for line in shown}
    assert len(ends) == 1, "columns are not aligned"
    assert all(line == line.rstrip() for line in shown)
    assert "[bold]" in shown[3]


def test_extra_columns_are_left_out_from_the_last_on_where_a_terminal_is_narrow() -> None:
    columns = [
        Column("ID", lambda row: row["id"]),
        Column("NUMBER", lambda row: str(row["n"]), is_number=True, is_extra=True),
        Column("TITLE", lambda row: row["title"], is_flexible=True),
        Column("LAST", lambda row: "end", is_extra=True),
    ]
    headers = {
        width: lines(ROWS, columns, width, colour=False)[0].split() for width in (40, 28, 18, 5)
    }
    assert headers == {
        40: ["ID", "NUMBER", "TITLE", "LAST"],
        28: ["ID", "NUMBER", "TITLE"],
        18: ["ID", "TITLE"],
        5: ["ID", "TITLE"],
    }
    assert max(map(cell_len, lines(ROWS, columns, 28, colour=False))) <= 28


def test_the_last_column_is_cut_too() -> None:
    columns = [Column("ID", lambda row: row["id"]), COLUMNS[1]]
    shown = lines(ROWS, columns, 20, colour=False)
    assert max(map(cell_len, shown)) <= 20 and shown[2].endswith("…")
    assert all(line == line.rstrip() for line in shown)


def test_a_pipe_gets_every_character() -> None:
    shown = lines(ROWS, COLUMNS, None, colour=False)
    assert ROWS[1]["title"].strip() in shown[2]  # type: ignore[attr-defined]


def test_a_table_wider_than_the_terminal_keeps_what_identifies_a_row() -> None:
    shown = lines(ROWS, COLUMNS, 10, colour=False)
    assert [line.split()[0] for line in shown] == ["ID", "a1", "b2", "c3"]


def test_words_are_emphasised_in_colour_only() -> None:
    column = Column("TEXT", lambda row: "one Two (three", highlight=("two", "("))
    assert lines([{}], [column], 80, colour=False)[1] == "one Two (three"
    assert "\x1b[1mTwo\x1b[0m" in lines([{}], [column], 80, colour=True)[1]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (1536, "1.50 KiB"),
        (10 * 1024, "10.0 KiB"),
        (1024**2 - 1, "1.00 MiB"),
        (98 * 1024**2, "98.0 MiB"),
        (512 * 1024**3, "512 GiB"),
        (3 * 1024**5, "3072 TiB"),
    ],
)
def test_sizes_have_three_digits_and_binary_units(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "just now"),
        (-5, "just now"),
        (59, "just now"),
        (60, "1 min ago"),
        (3599, "59 min ago"),
        (3600, "1 h ago"),
        (86_400 * 2, "2 d ago"),
        (86_400 * 70, "2 mo ago"),
        (86_400 * 800, "2 y ago"),
    ],
)
def test_relative_times(seconds: float, text: str) -> None:
    assert ago(1_800_000_000 - seconds, now_s=1_800_000_000) == text


def test_a_time_that_lies_ahead_is_shown_as_a_date() -> None:
    assert ago(1_800_000_000, now_s=1_700_000_000).startswith("2027-01-")


def test_plural() -> None:
    assert [plural(n, "turn") for n in (0, 1, 1200)] == ["0 turns", "1 turn", "1,200 turns"]


def test_control_characters_never_reach_the_terminal() -> None:
    assert printable("a\x1b[31mb\x07\x9bc\n\td") == "a�[31mb��c\n\td"


def test_formats_for_programs_carry_the_same_rows(capsys: pytest.CaptureFixture[str]) -> None:
    shown: dict[str, str] = {}
    for format in ("json", "jsonl", "csv"):
        Output(format).rows(ROWS, COLUMNS)  # type: ignore[arg-type]
        shown[format] = capsys.readouterr().out
    assert json.loads(shown["json"]) == ROWS
    assert [json.loads(line) for line in shown["jsonl"].splitlines()] == ROWS
    table = list(csv.DictReader(io.StringIO(shown["csv"])))
    assert [{**row, "n": int(row["n"])} for row in table] == ROWS


def test_nothing_to_show_is_said_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    Output().rows([], COLUMNS, empty="nothing yet")
    Output("json").rows([], COLUMNS, empty="nothing yet")
    assert capsys.readouterr() == ("[]\n", "nothing yet\n")


# --- at a real terminal -------------------------------------------------------------------------


def test_a_terminal_gets_colours_and_80_columns(terminal: Program, talk: Talk) -> None:
    talk(
        "a title that is far too long for any terminal of eighty columns, and goes on",
        model="M" * 40,
    )
    done = terminal("sessions", "ls")
    assert done.code == 0 and "\x1b[1m" in done.out and "…" in done.out


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_color_means_no_escape_codes(
    terminal: Program, talk: Talk, variables: dict[str, str]
) -> None:
    talk("東京タワー " * 20)
    done = terminal("sessions", "ls", **variables)
    assert done.code == 0 and "\x1b" not in done.out
    assert all(cell_len(line) <= 80 for line in done.out.splitlines())


def test_a_pipe_gets_no_escape_codes(process: Program, talk: Talk) -> None:
    talk("title \x1b[31m", [("hi \x1b[31m", "\x1b]0;owned\x07")])
    for arguments in (["sessions", "ls"], ["sessions", "show", talk("other").id]):
        assert "\x1b" not in process(*arguments).out
    assert "\x1b" not in process("sessions", "search", "hi").out
