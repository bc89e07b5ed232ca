"""The program as a whole: it starts quickly, and every failure is one line and an exit code."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import click
import pytest

import chatkv
from chatkv.cli import main as main_module
from chatkv.errors import ChatkvError, ContextFull, UsageError
from chatkv_store.errors import StoreBusy, StoreError
from program import Ran, command, environment

Program = Callable[..., Ran]


def test_help_names_every_command_without_importing_any(process: Program) -> None:
    done = process("--help")
    assert done.code == 0 and done.err == ""
    for name in ("ask", "chat", "sessions", "cache"):
        assert f"\n  {name} " in done.out
    assert process("-h").out == done.out


def test_version(process: Program) -> None:
    assert process("--version").out == f"chatkv {chatkv.__version__}\n"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ContextFull("too\nlong"), 1, "chatkv: too long\n"),
        (UsageError("what?"), 2, "chatkv: what?\n"),
        (StoreBusy("session x is in use by process 7"), 1, "chatkv: session x is in use by"),
        (StoreError("s"), 1, "chatkv: s\n"),
        (OSError(28, "No space left on device", "/x"), 1, "chatkv: /x: No space left on device\n"),
        (KeyboardInterrupt(), 130, "\n"),
        (click.UsageError("bad"), 2, "bad"),
    ],
)
def test_expected_failures_are_one_line_and_an_exit_code(
    program: Program,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    line: str,
) -> None:
    @click.command()
    def failing() -> None:
        raise error

    monkeypatch.setattr(main_module.LazyGroup, "get_command", lambda *_: failing)
    done = program("chat")
    assert (done.code, done.out) == (code, "")
    assert line in done.err
    if isinstance(error, (ChatkvError, StoreError, OSError)):
        assert done.err.count("\n") == 1


def test_a_bug_is_not_dressed_up_as_a_users_mistake(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    @click.command()
    def broken() -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(main_module.LazyGroup, "get_command", lambda *_: broken)
    with pytest.raises(ZeroDivisionError):
        program("chat")


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["sessions", "ls", "--nonsense"], ["sessions", "show"]]
)
def test_wrong_usage_exits_with_2(program: Program, arguments: list[str]) -> None:
    done = program(*arguments)
    assert done.code == 2 and done.out == "" and "Usage: chatkv" in done.err


@pytest.mark.parametrize("arguments", [["show", "long"], ["ls", "--format", "csv"]])
def test_a_reader_that_has_seen_enough_is_no_error(
    talk: Callable[..., object], arguments: list[str]
) -> None:
    """Long output breaks off while it is written, a short one when it is flushed."""
    talk("long", [("q", "word " * 200_000)])
    child = subprocess.Popen(
        command("sessions", *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert child.stdout is not None and child.stderr is not None
    child.stdout.close()
    assert child.stderr.read() == b""
    child.stderr.close()
    assert child.wait(timeout=60) == 1


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_no_error(home: Path, closed: str) -> None:
    """As a service manager or a shell's `>&-` leaves it; no store may get the stream's number."""
    opened_files = (
        "import os, sys\n"
        "from chatkv.cli import main\n"
        "code = main.run\n"
        "def run(arguments):\n"
        "    done = code(arguments)\n"
        "    print('any text', file=sys.stdout)\n"
        "    return done or (os.open(os.devnull, os.O_RDONLY) <= 2) * 99\n"
        "main.run = run\n"
        "main.main(['sessions', 'ls'])\n"
    )
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", command()[0], "-c", opened_files],
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_is_quiet(home: Path) -> None:
    waiting = (
        "import click, sys, time\n"
        "from chatkv.cli import main\n"
        "@click.command()\n"
        "def wait():\n"
        "    print('waiting', flush=True)\n"
        "    time.sleep(60)\n"
        "main.LazyGroup.get_command = lambda *_: wait\n"
        "main.main(['chat'])\n"
    )
    child = subprocess.Popen(
        [command()[0], "-c", waiting],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert child.stdout is not None
    child.stdout.readline()
    os.kill(child.pid, signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert (child.returncode, errors) == (130, "\n")


def test_a_terminal_that_cannot_show_a_character_gets_a_question_mark(
    talk: Callable[..., object],
) -> None:
    talk("東京 café")
    variables = environment(PYTHONIOENCODING="latin-1")
    assert b"?? caf\xe9" in subprocess.check_output(command("sessions", "ls"), env=variables)


def test_a_store_that_cannot_be_opened_is_one_line(process: Program, home: Path) -> None:
    (home / "data").mkdir()
    (home / "data" / "conversations.sqlite3").write_bytes(b"no database at all" * 100)
    done = process("sessions", "ls")
    assert done.code == 1 and done.out == ""
    assert done.err.startswith("chatkv: ") and "is damaged" in done.err
    assert done.err.count("\n") == 1


def test_shell_completion_knows_commands_and_sessions(
    process: Program, talk: Callable[..., object]
) -> None:
    talk("A hobby for Ada")
    done = process(_CHATKV_COMPLETE="bash_complete", COMP_WORDS="chatkv se", COMP_CWORD="1")
    assert done.out == "plain,serve\nplain,sessions\n"
    words = "chatkv sessions show "
    done = process(_CHATKV_COMPLETE="zsh_complete", COMP_WORDS=words, COMP_CWORD="3")
    assert "A hobby for Ada" in done.out
