"""Which face a chat has, and what is refused before it has any."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from chatkv.cli import full_screen
from chatkv.cli.main import run
from program import command, environment


class _Stream:
    def __init__(self, is_terminal: bool) -> None:
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.mark.parametrize(
    ("terminals", "variables", "possible"),
    [
        ((True, True, True), {"TERM": "xterm-256color"}, True),
        ((False, True, True), {"TERM": "xterm"}, False),
        ((True, False, True), {"TERM": "xterm"}, False),
        ((True, True, False), {"TERM": "xterm"}, False),  # Textual paints on stderr
        ((True, True, True), {"TERM": "dumb"}, False),
        ((True, True, True), {"TERM": ""}, False),
        ((True, True, True), {"TERM": "xterm", "CHATKV_A11Y": "1"}, False),
        ((True, True, True), {"TERM": "xterm", "CHATKV_A11Y": "0"}, True),
    ],
)
def test_full_screen_needs_a_terminal_that_can_and_somebody_who_sees_it(
    terminals: tuple[bool, bool, bool],
    variables: dict[str, str],
    possible: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CHATKV_A11Y", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for name, is_terminal in zip(("stdin", "stdout", "stderr"), terminals, strict=True):
        monkeypatch.setattr(sys, name, _Stream(is_terminal))
    assert full_screen.is_possible() is possible


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["resume", "01zzzzzz"], 1, "01zzzzzz"),
        (["chat", "-c"], 2, "no session to continue"),
        (["chat", "-c", "-r", "abcd"], 2, "not both"),
        (["chat", "--model", "/no/such/model"], 1, "no model at"),
        (["chat", "--temperature", "-3"], 2, "makes no sense"),
    ],
)
def test_a_mistake_is_said_before_the_screen_is_taken(
    words: list[str],
    code: int,
    says: str,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(full_screen, "is_possible", lambda: True)
    monkeypatch.setattr(full_screen, "show", lambda *_: pytest.fail("it was shown"))
    assert run(words) == code
    assert says in capsys.readouterr().err


def test_a_session_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("-c", "--resume"):
        assert run(["resume", "abcd", option]) == 2


@pytest.mark.slow
def test_a_screen_reader_hears_who_speaks_and_no_control_characters(
    home: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    model = str(tiny_checkpoint("llama3"))
    words = ["chat", "--model", model, "--dtype", "float32", "--temperature", "0"]
    leader, follower = pty.openpty()
    child = subprocess.Popen(
        command(*words, "--max-tokens", "4"),
        stdin=follower,
        stdout=subprocess.PIPE,
        stderr=follower,
        text=True,
        env=environment(TERM="xterm-256color", CHATKV_A11Y="1"),
    )
    os.close(follower)
    os.write(leader, b"hello\n\x04")
    out, _ = child.communicate(timeout=120)
    os.close(leader)
    assert child.returncode == 0
    assert "Assistant: " in out and "\x1b" not in out and "\r" not in out
