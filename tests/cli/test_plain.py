"""The chat line by line: commands through a pipe and at a terminal, and what it must not write."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chatkv.commands.slash import COMMANDS
from chatkv_store.conversations import Conversations
from program import Ran

Program = Callable[..., Ran]
QUICK = ["--dtype", "float32", "--temperature", "0", "--max-tokens", "8"]
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@pytest.fixture
def model(home: Path, tiny_checkpoint: Callable[..., Path]) -> str:
    return str(tiny_checkpoint("llama3"))


@pytest.fixture
def store(home: Path) -> Any:
    with Conversations(home / "data" / "conversations.sqlite3") as opened:
        yield opened


@pytest.fixture
def chat(program: Program, model: str) -> Callable[..., Ran]:
    """`chat("one", "/undo", ...)` says these lines, one after the other."""

    def call(*lines: str, options: tuple[str, ...] = ()) -> Ran:
        stdin = "".join(f"{line}\n" for line in lines)
        done = program("chat", "--plain", "-m", model, *QUICK, *options, stdin=stdin)
        assert not CONTROL.search(done.err)  # a pipe gets every byte of an answer
        return done

    return call


def said(store: Conversations, session: str | None = None) -> list[str]:
    found = store.last_session() if session is None else store.get_session(session)
    assert found is not None
    return [turn.user_text for turn in store.chain(found.id)]


def test_commands_change_a_conversation(
    chat: Callable[..., Ran], store: Conversations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = chat(
        "/help",
        "/system Be brief.",
        "first",
        "//second",
        "/undo",
        "third",
        "/edit 2",
        "fourth",
        "/regen",
        "/set temperature 0.5",
        "/set",
        "/save talk.md",
        "/save",
        "/why 1",
        "/cache",
        "/status",
        "/model",
        "/branch",
        "/branch 2",
        "/continue",
        "/quit",
        "never said",
    )
    assert done.code == 0, done.err
    for name, command in COMMANDS.items():
        assert (f"\n/{name} " in f"\n{done.err}") is not command.needs_screen
    for line in (
        "system prompt: Be brief.\n",
        "turn 2 was taken back: /second\n",
        "turn 2 was: third\n",
        "temperature 0.5 · ",
        "saved to talk.md\n",
        "first.md\n",
        "1  the current one: fourth",
        "parts at turn 2",
        "are on the disk",
        "computing in this process, ",
        " tokens in memory",
    ):
        assert line in done.err, line
    assert "computed" in done.err.partition("first.md\n")[2]
    assert (tmp_path / "talk.md").read_text().startswith("# first\n\n## System\n\nBe brief.\n")
    assert done.out.count("\n") >= 6
    turns = store.chain(store.list_sessions()[0].id)
    assert turns[0].system_text == "Be brief." and len(turns) == 2
    session = store.list_sessions()[0].id
    assert sorted(turn.user_text for turn in store.tree(session)) == sorted(
        ["first", "/second", "third", "fourth", "fourth", *([turns[1].user_text])]
    )


def test_commands_go_from_one_conversation_to_another(
    chat: Callable[..., Ran], store: Conversations, model: str
) -> None:
    done = chat("one", "/fork", "two", "/new Be kind.", "three", "/resume one", "/resume", "/quit")
    assert done.code == 0, done.err
    titles = {one.title: said(store, one.id) for one in store.list_sessions()}
    assert titles == {"one": ["one"], "one (fork)": ["one", "two"], "three": ["three"]}
    assert "this is a fork: it shares the turns up to 1" in done.err
    (three,) = [one for one in store.list_sessions() if one.title == "three"]
    assert store.chain(three.id)[0].system_text == "Be kind."
    listed = done.err.partition("/resume ID")[0].splitlines()[-3:]
    assert [
        one.id.startswith(line.split()[0])
        for one, line in zip(store.list_sessions(), listed, strict=True)
    ] == [True] * 3
    moved = chat(f"/model {model}", "four", options=("-r", "three"))
    assert moved.code == 0 and said(store, three.id) == ["three", "four"]


@pytest.mark.parametrize(
    ("line", "says", "code"),
    [
        ("/nonsense", "no command /nonsense", 2),
        ("/theme dark", "no command /theme", 2),
        ("/undo", "/undo: nothing was said yet", 2),
        ("/set temperature hot", "is no number", 2),
        ("/model no/such/model", "no model at", 1),
        ("/resume 01zzzzzz", "there is no session", 1),
        ("/continue", "nothing to go on with|no answer to go on with", 2),
        ("/branch", "nothing was left behind|there is no session", None),
    ],
)
def test_in_a_pipe_a_mistake_ends_it_with_one_line(
    line: str, says: str, code: int | None, chat: Callable[..., Ran]
) -> None:
    done = chat(line, "not said any more")
    assert re.search(says, done.err) and done.out == ""
    assert done.code == code if code is not None else done.code in (1, 2)
    assert "Traceback" not in done.err


def test_a_path_is_a_message(chat: Callable[..., Ran], store: Conversations) -> None:
    assert chat("/etc/hosts: what is that?").code == 0
    assert said(store) == ["/etc/hosts: what is that?"]


def test_at_a_terminal_a_mistake_is_said_and_the_chat_goes_on(
    terminal: Program, model: str, program: Program
) -> None:
    done = terminal(
        "chat",
        "-m",
        model,
        *QUICK,
        answers=[
            ("> ", "/nonsense"),
            ("> ", "hello"),
            ("> ", "/edit"),
            ("> ", " you"),
            ("> ", "/quit"),
        ],
        TERM="dumb",
        CHATKV_A11Y="",
    )
    assert done.code == 0 and "no command /nonsense" in done.out
    shown = json.loads(program("sessions", "ls", "--json").out)
    assert shown[0]["turns"] == 1
    turns = json.loads(program("sessions", "show", shown[0]["session"], "--json").out)["turns"]
    assert turns[0]["user"] == "hello you"  # what was said stood in the line, to be changed
