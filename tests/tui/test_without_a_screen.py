"""What the full-screen chat knows without a screen: commands, history, folds, bars, branches."""

from __future__ import annotations

import base64
import os
from array import array
from dataclasses import replace
from pathlib import Path

import pytest

from chatkv.client import Ready, TurnText
from chatkv.commands import answers, saved, slash
from chatkv.commands.branches import alternatives, branches
from chatkv.commands.slash import Call
from chatkv.errors import UsageError
from chatkv.session.turn import TurnOptions
from chatkv.tui import (
    clipboard,
    help_screen,
    keys,
    rendering,
    timeline,
)
from chatkv.tui.folding import Folds
from chatkv.tui.history import History
from chatkv.tui.progress import NONE, bar
from chatkv.tui.status import Status, restored
from chatkv_store.conversations import Turn
from scripted_chat import STATS

# --- commands ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "call"),
    [
        ("hello", None),
        ("//etc", None),
        ("/usr/bin is a folder", None),
        ("/\nnot a command", None),
        ("/quit", Call("quit")),
        ("/q", Call("quit")),
        ("/FORK 3", Call("fork", "3")),
        ("/set temperature 0.5", Call("set", "temperature 0.5")),
        ("/new  You are brief. ", Call("new", "You are brief.")),
    ],
)
def test_what_is_a_command(line: str, call: Call | None) -> None:
    assert slash.parse(line) == call


@pytest.mark.parametrize(
    ("line", "says"),
    [("/nonsense", "no command"), ("/re", "/resume or /regen"), ("/quit now", "nothing behind")],
)
def test_what_is_no_command_is_said(line: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        slash.parse(line)


def test_a_text_may_begin_with_a_slash() -> None:
    assert slash.message("//etc/passwd is a file") == "/etc/passwd is a file"
    assert slash.message("a//b") == "a//b"


def test_a_turn_is_the_last_or_a_number_that_exists() -> None:
    assert slash.turn_number(Call("edit"), 3) == 3
    assert slash.turn_number(Call("edit", "2"), 3) == 2
    for call, turns in ((Call("edit", "4"), 3), (Call("edit", "x"), 3), (Call("edit"), 0)):
        with pytest.raises(UsageError):
            slash.turn_number(call, turns)


def test_completion() -> None:
    assert slash.matches("/f") == ["/fork"]
    assert slash.matches("/re") == ["/resume", "/regen"]
    assert slash.matches("/set t", answers.NAMES) == [
        "/set temperature",
        "/set top-p",
        "/set top-k",
    ]
    assert slash.matches("hello") == slash.matches("//") == []
    assert slash.common_start(["/resume", "/regen"]) == "/re"
    assert slash.common_start(["/set top-p", "/set top-k"]) == "/set top-"
    assert slash.common_start([]) == ""


def test_settings() -> None:
    options = TurnOptions()
    for name, value in (
        ("temperature", "0"),
        ("top-k", "40"),
        ("max_tokens", "12"),
        ("seed", "7"),
        ("restore", "reload"),
        ("exact", "yes"),
        ("overflow", "shift"),
    ):
        options = answers.changed(options, name, value)
    assert (options.sampling.temperature, options.sampling.top_k) == (0, 40)
    assert (options.max_tokens, options.seed, options.restore) == (12, 7, "reload")
    assert (options.exact, options.overflow) == (True, "shift")
    assert "temperature 0.0 · " in answers.shown(options)
    for name, value in (
        ("temperature", "hot"),
        ("temperature", "-1"),
        ("max-tokens", "0"),
        ("restore", "maybe"),
        ("colour", "red"),
    ):
        with pytest.raises(UsageError):
            answers.changed(options, name, value)


def test_help_names_every_key_and_command_at_any_width() -> None:
    for width in (30, 90):
        text = help_screen.text({"send": "ctrl+s"}, width)
        assert all(f"/{name}" in text for name in slash.COMMANDS)
        assert all(key.help in text for group in keys.GROUPS.values() for key in group)
        assert "Ctrl+S" in text and "Alt+Up, Ctrl+Up" in text and "Up, k" in text


def test_a_key_that_is_not_there_cannot_be_changed() -> None:
    assert keys.check({"send": "ctrl+s"}) == {"send": "ctrl+s"}
    with pytest.raises(UsageError, match="fire"):
        keys.check({"fire": "f1"})


def test_alt_enter_is_a_key_in_terminals_that_send_escape_and_a_line_end() -> None:
    from textual._xterm_parser import XTermParser

    keys.know_alt_enter()
    sent = XTermParser().feed("a\x1b\rb\r")
    assert [getattr(event, "key", None) for event in sent] == ["a", "alt+enter", "b", "enter"]


# --- the input --------------------------------------------------------------------------------


def test_history_is_walked_and_gives_the_draft_back() -> None:
    history = History(["one", "two"])
    assert history.newer() is None
    assert [history.older("draft"), history.older(""), history.older("")] == ["two", "one", None]
    assert [history.newer(), history.newer(), history.newer()] == ["two", "draft", None]
    history.add("two")  # twice in a row counts once
    history.add(" ")
    assert [history.older(""), history.older("")] == ["two", "one"]


def test_large_pastes_are_folded_and_come_back_whole() -> None:
    folds = Folds()
    assert folds.fold("short\ntext") == "short\ntext"
    long, tall = "x" * 1_000_000, "a\n" * 30
    marks = [folds.fold(long), folds.fold(tall)]
    assert marks[0] == "[paste 1: 977 KiB, 1 line]"
    assert marks[1] == "[paste 2: 60 B, 31 lines]"
    assert folds.unfold(f"read {marks[0]} and {marks[1]}") == f"read {long} and {tall}"
    assert folds.mark_before(f"ab{marks[1]}", 2 + len(marks[1])) == marks[1]
    assert folds.mark_before(f"ab{marks[1]}", 2) is None
    folds.clear()
    assert folds.unfold(marks[0]) == marks[0]


# --- figures ----------------------------------------------------------------------------------


def test_a_bar_shows_what_the_cache_saved_before_anything_is_computed() -> None:
    progress = NONE.follow("restore", 1, 2)
    assert "loading" in progress.line(60) and "50%" in progress.line(60)
    progress = progress.follow("prefill", 1000, 4000)
    assert progress.saved == 1000 and "25% · 1,000/4,000 tokens, 1,000 kept" in progress.line(80)
    progress = progress.follow("prefill", 3000, 4000)
    assert progress.saved == 1000
    assert "▓▓▓▓▓▓▓▓▓▓" in progress.line(100) and not progress.is_over
    assert progress.follow("prefill", 4000, 4000).is_over
    for width in range(1, 100):
        assert len(progress.line(width)) <= width


def test_a_bar_is_full_only_at_the_end_and_never_hides_a_beginning() -> None:
    assert bar(0, 0, 10, 5) == "░░░░░"
    assert bar(1, 0, 1000, 5) == "█░░░░"
    assert bar(999, 400, 1000, 5) == "▓▓██░"
    assert bar(1000, 1000, 1000, 5) == "▓▓▓▓▓"
    assert bar(1, 0, 0, 5) == "░░░░░"


def test_the_status_line_keeps_what_matters_most() -> None:
    status = Status("Scripted-1B", "ready", 1246, 8192, STATS)
    whole = status.line(400)
    for part in ("ready", "1,246/8k", "Scripted-1B", "200 reused + 1,000 loaded + 34 computed"):
        assert part in whole
    for part in ("plan reload", "first token 80 ms", "25 tokens/s", "from disk"):
        assert part in whole
    for width in range(5, 200):
        line = status.line(width)
        assert len(line) <= width and line.startswith("ready")
    assert "1,246/8k" in status.line(38)


def test_what_was_restored_says_from_where_and_how_long() -> None:
    line = restored(Ready(1200, 200, 1000, 0, 45.2), 1200)
    assert line == ("restored 1,200 of 1,200 tokens in 45 ms: 200 still in memory, 1,000 from disk")
    assert "computed again" in restored(Ready(50, 0, 0, 50, 2100.0), 50)
    assert "2.1 s" in restored(Ready(50, 0, 0, 50, 2100.0), 50)
    assert "nothing could be restored" in restored(Ready(0), 50)


def test_the_timeline_has_every_phase_with_its_rate() -> None:
    for width in (24, 38, 60, 100):
        lines = timeline.lines(STATS, width)
        text = "\n".join(lines)
        assert max(map(len, lines)) <= width
        for part in ("memory", "disk", "prefill", "other", "decode", "1,000 tokens", "11.0 MiB"):
            assert part in text, (width, part)
    text = "\n".join(timeline.lines(STATS, 100))
    assert "262 MiB/s" in text and "1,097 tokens/s" in text and "25 tokens/s" in text
    plan = [line for line in text.splitlines() if "▬" in line]
    assert [line.split()[0] for line in plan] == ["→", "took", "both", "re-prefill"]
    assert "40 ms" in plan[0] and "48 ms" in plan[1] and "910 ms" in plan[3]
    assert timeline.lines({}, 40) == [timeline.NO_TURN]


def test_a_turn_that_restored_nothing_says_so() -> None:
    plan = {"chosen": "none", "predicted_ms": 0.0, "actual_ms": 3.0, "alternatives_ms": {}}
    tokens = {"prompt": 9, "reused": 0, "loaded": 0, "computed": 9, "generated": 0}
    timing = STATS["timing"] | {"restore_ms": 0.0, "decode_tokens_per_s": None}
    text = "\n".join(timeline.lines({"plan": plan, "tokens": tokens, "timing": timing}, 60))
    assert "nothing had to be restored" in text and "disk" not in text and "decode" not in text


# --- branches ---------------------------------------------------------------------------------


def _turn(name: str, parent: str | None, index: int) -> Turn:
    return Turn(
        id=name,
        session_id="s",
        parent_id=parent,
        index=index,
        tokens_before=0,
        system_text=None,
        user_text=f"ask {name}",
        reply_text=f"say {name}",
        prompt_ids=array("I"),
        reply_ids=array("I"),
        state="done",
        finish_reason="stop",
        seed=0,
        rng_draws_before=0,
        rng_draws_after=0,
        stats={},
        created_at=0.0,
    )


TREE = [_turn("a", None, 1), _turn("b", "a", 2), _turn("c", "b", 3), _turn("d", "a", 2)]


def test_branches_are_the_ends_of_the_tree() -> None:
    found = branches(TREE, "d")
    assert [(one.turn_id, one.num_turns, one.parts_at) for one in found] == [
        ("d", 2, None),
        ("c", 3, 2),
    ]
    assert found[0].is_current and found[1].user == "ask b"
    assert [one.turn_id for one in branches(TREE, "b")] == ["b", "d", "c"]
    assert branches([], None) == []


def test_turns_know_what_lies_beside_them() -> None:
    assert alternatives(TREE, "c") == {2: (1, 2)}
    assert alternatives(TREE, "d") == {2: (2, 2)}
    assert alternatives(TREE, None) == {}


# --- copying and saving -----------------------------------------------------------------------


def test_copying_goes_to_the_terminal_and_to_a_file(tmp_path: Path) -> None:
    written: list[str] = []
    file = tmp_path / "run" / "copied.txt"
    said = clipboard.copy("schön", written.append, file, {})
    data = base64.b64encode("schön".encode()).decode()
    assert written == [f"\x1b]52;c;{data}\a"]
    assert file.read_text(encoding="utf-8") == "schön" and str(file) in said
    clipboard.copy("x", written.append, file, {"TMUX": "/tmp/tmux"})
    assert written[1].startswith("\x1bPtmux;\x1b\x1b]52;") and written[1].endswith("\a\x1b\\")


def test_what_no_terminal_takes_goes_to_the_file(tmp_path: Path) -> None:
    written: list[str] = []
    file = tmp_path / "copied.txt"
    assert "too long" in clipboard.copy("x" * 100_000, written.append, file, {})
    assert written == [] and file.stat().st_size == 100_000
    (tmp_path / "blocked").write_text("")
    said = clipboard.copy("x", written.append, tmp_path / "blocked" / "f", {})
    assert "only" in said and len(written) == 1


def test_a_desktop_takes_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "xclip"
    program.write_text(f'#!/bin/sh\ncat > "{tmp_path}/taken"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    file = tmp_path / "copied.txt"
    assert clipboard.copy("here", lambda text: None, file, {"DISPLAY": ":0"}) == "copied"
    assert (tmp_path / "taken").read_text() == "here" and not file.exists()


def test_code_is_what_fences_hold() -> None:
    text = "a\n```python\nx = 1\n```\nb\n~~~\ny\n~~~\n````\n```\n````\n```\nopen"
    assert clipboard.code_blocks(text) == ["x = 1\n", "y\n", "```\n"]


def test_a_transcript(tmp_path: Path) -> None:
    first = TurnText(1, "Be brief.", "Hi", "Hello.", "done", "stop")
    turns = [first, replace(first, system=None, state="interrupted")]
    text = saved.save("A\ntitle", turns, str(tmp_path / "b.md")).read_text()
    assert text.startswith("# A title\n\n## System\n\nBe brief.\n\n## You\n\nHi\n")
    assert text.endswith("## Assistant (interrupted)\n\nHello.\n")
    with pytest.raises(UsageError, match="exists"):
        saved.save("A", turns, str(tmp_path / "b.md"))
    assert saved.file_name("../../etc/ Pass wd?") == "etc-pass-wd.md"
    assert saved.file_name("日本") == "日本.md" and saved.file_name("?!") == "conversation.md"
    (tmp_path / "a.md").write_text("")
    assert saved.free_name(tmp_path, "a.md") == tmp_path / "a-2.md"


# --- Markdown ---------------------------------------------------------------------------------

LONG = "".join(
    f"## Part {number}\n\nSome *prose*.\n\n- a\n- b\n\n```\ncode {number}\n\nmore\n```\n\n"
    for number in range(30)
)


def _painted(text: str, width: int = 60) -> str:
    from rich.console import Console

    console = Console(width=width, color_system=None, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(rendering.Piece(text))
    return console.export_text()


def test_pieces_are_the_text_cut_between_blocks() -> None:
    found = rendering.pieces(LONG)
    assert "".join(found) == LONG and len(found) > 3
    for piece in found:
        assert piece.count("\n") < 2 * rendering.PIECE_LINES and piece.count("```") % 2 == 0
    assert rendering.pieces("") == [""]
    assert rendering.pieces("  one\n") == ["  one\n"]


def test_what_is_settled_stays_as_more_text_comes() -> None:
    before: list[str] = []
    for end in range(1, len(LONG), 37):
        found = rendering.pieces(LONG[:end])
        assert found[: len(before)] == before or end < 37
        before = found[:-1]


def test_markdown_is_shown_and_html_and_addresses_are_not_hidden() -> None:
    shown = _painted("# Title\n\n<b>bold?</b> <script>x</script> [a link](https://example.org)\n")
    assert "Title" in shown and "<b>bold?</b> <script>x</script>" in shown
    assert "a link (https://example.org)" in shown
    assert "code 3" in _painted(LONG) and "Part 29" in _painted(LONG, width=20)
