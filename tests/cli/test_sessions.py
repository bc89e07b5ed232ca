"""`chatkv sessions`, every verb, for people and for programs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chatkv_store.conversations import Conversations, Session
from program import Ran

Program = Callable[..., Ran]
Talk = Callable[..., Session]


def stored(home: Path) -> dict[str, list[str]]:
    """Titles and what the user said in them."""
    with Conversations(home / "data" / "conversations.sqlite3") as store:
        return {
            session.title: [turn.user_text for turn in store.chain(session.id)]
            for session in store.list_sessions()
        }


def test_a_fresh_home_lists_nothing_and_says_how_to_start(program: Program) -> None:
    done = program("sessions", "ls")
    assert (done.code, done.out) == (0, "") and "chatkv chat" in done.err
    assert program("sessions", "ls", "--json").out == "[]\n"


def test_ls_lists_the_last_used_first(program: Program, talk: Talk) -> None:
    talk("first", [("a", "b")])
    second = talk("second", [("a", "b"), ("c", "d")], model="Big")
    table = program("sessions", "ls").out.splitlines()
    assert table[0].split() == ["ID", "TITLE", "TURNS", "TOKENS", "MODEL", "USED"]
    assert table[1].split()[1:] == ["second", "2", "10", "Big", "just", "now"]
    assert second.id.startswith(table[1].split()[0])
    assert table[2].split()[1] == "first"
    (row,) = json.loads(program("sessions", "ls", "--json", "--limit", "1").out)
    assert row == {
        "session": second.id,
        "title": "second",
        "turns": 2,
        "tokens": 10,
        "model": "Big",
        "created_at": second.created_at,
        "updated_at": second.updated_at,
        "pinned": False,
    }
    limited = program("sessions", "ls", "--limit", "1")
    assert len(limited.out.splitlines()) == 2 and "1 of 2 sessions" in limited.err
    assert len(program("sessions", "ls", "-q", "--limit", "0").out.split()) == 2


def test_a_session_is_named_by_id_prefix_or_title(program: Program, talk: Talk) -> None:
    session = talk("Trip to Rome", [("when?", "soon")])
    talk("another")
    listed = program("sessions", "ls").out.splitlines()[2].split()[0]
    for name in (session.id, listed, "Trip to Rome"):
        done = program("sessions", "show", name, "--json")
        assert json.loads(done.out)["session"] == session.id


@pytest.mark.parametrize("verb", [["show"], ["rename", "-"], ["rm", "-y"], ["fork"]])
def test_an_unknown_session_is_one_line(program: Program, talk: Talk, verb: list[str]) -> None:
    talk("Trip to Rome")
    arguments = ["nobody" if word == "-" else word for word in verb]
    done = program("sessions", *arguments, "nobody")
    assert done.code == 1 and done.out == ""
    assert done.err.startswith('chatkv: there is no session "nobody"')
    assert '"Trip to Rome"' in done.err and done.err.count("\n") == 1


def test_show_prints_the_conversation(program: Program, talk: Talk) -> None:
    talk("Rome", [("When in Rome?", "Do as\nthey do."), ("And in Milan?", "The same.")])
    done = program("sessions", "show", "Rome")
    assert done.out.startswith("Rome\n") and "2 turns, 10 tokens" in done.out
    assert done.out.endswith(
        "\n\n1> When in Rome?\nDo as\nthey do.\n\n2> And in Milan?\nThe same.\n"
    )
    exported = json.loads(program("sessions", "show", "Rome", "--json").out)
    assert [turn["reply"] for turn in exported["turns"]] == ["Do as\nthey do.", "The same."]
    assert exported["turns"][0]["prompt_ids"] == [1, 2, 3]


def test_show_says_what_a_crash_left(program: Program, talk: Talk, home: Path) -> None:
    session = talk("cut")
    with (
        Conversations(home / "data" / "conversations.sqlite3") as store,
        store.lease(session.id),
    ):
        turn = store.begin_turn(session.id, user_text="q", prompt_ids=[1])
        store.checkpoint_turn(turn.id, reply_text="half an", reply_ids=[2], rng_draws_after=1)
    assert program("sessions", "show", "cut").out.endswith("1> q\nhalf an\n[interrupted]\n")


def test_search_finds_words_and_shows_where(program: Program, talk: Talk) -> None:
    talk("Rome", [("When in Rome?", "Do as they do."), ("And the café in Milan?", "Closed.")])
    talk("other")
    done = program("sessions", "search", "CAFE", "milan")
    assert done.out.splitlines()[1].split()[1:] == [
        "2",
        "1",
        "And",
        "the",
        "café",
        "in",
        "Milan?",
        "just",
        "now",
    ]
    (hit,) = json.loads(program("sessions", "search", "rome", "--json").out)
    assert (hit["title"], hit["turn"], hit["hits"]) == ("Rome", 1, 2)
    nothing = program("sessions", "search", '"NEAR(')
    assert (nothing.code, nothing.out) == (0, "") and "nothing found" in nothing.err


def test_rename(program: Program, talk: Talk, home: Path) -> None:
    talk("old", [("a", "b")])
    done = program("sessions", "rename", "old", "new title 🎉")
    assert done.code == 0 and "new title 🎉" in done.err
    assert stored(home) == {"new title 🎉": ["a"]}
    assert program("sessions", "rename", "new title 🎉", "  ").code == 2


def test_rm_does_not_delete_unasked(program: Program, talk: Talk, home: Path) -> None:
    talk("keep me", [("a", "b")])
    done = program("sessions", "rm", "keep me", stdin="y\n")
    assert done.code == 2 and "add -y" in done.err and "1 turn" in done.err
    assert stored(home) == {"keep me": ["a"]}


def test_rm_with_yes_deletes_all_or_nothing(program: Program, talk: Talk, home: Path) -> None:
    talk("one", [("a", "b")])
    talk("two", [("a", "b"), ("c", "d")])
    talk("three")
    assert program("sessions", "rm", "-y", "one", "nobody").code == 1
    assert len(stored(home)) == 3, "a wrong name must be found before anything is deleted"
    done = program("sessions", "rm", "-y", "one", "two", "one", "--json")
    assert done.code == 0 and json.loads(done.out)["turns"] == 3
    assert stored(home) == {"three": []}


@pytest.mark.parametrize(("keys", "code", "left"), [("y\n", 0, 0), ("n\n", 1, 1), ("\n", 1, 1)])
def test_rm_asks_at_a_terminal(
    terminal: Program, talk: Talk, home: Path, keys: str, code: int, left: int
) -> None:
    talk("Rome", [("a", "b")])
    done = terminal("sessions", "rm", "Rome", keys=keys)
    assert done.code == code and "Delete 1 session for good?" in done.out and "Rome" in done.out
    assert len(stored(home)) == left


def test_fork_prints_the_new_id_alone(program: Program, talk: Talk, home: Path) -> None:
    talk("Rome", [("a", "b"), ("c", "d")])
    done = program("sessions", "fork", "Rome", "--at", "1")
    assert len(done.out.strip()) == 26 and "shares 1 turn" in done.err
    assert stored(home) == {"Rome": ["a", "c"], "Rome (fork)": ["a"]}
    made: dict[str, Any] = json.loads(program("sessions", "fork", "Rome", "--json").out)
    assert made["turns"] == 2
    wrong = program("sessions", "fork", "Rome", "--at", "7")
    assert wrong.code == 1 and "there is no turn 7" in wrong.err


def test_a_session_in_use_is_not_deleted(process: Program, talk: Talk, home: Path) -> None:
    session = talk("busy")
    with (
        Conversations(home / "data" / "conversations.sqlite3") as store,
        store.lease(session.id),
    ):
        done = process("sessions", "rm", "-y", "busy")
    assert done.code == 1 and f"in use by process {os.getpid()}" in done.err
    assert "busy" in stored(home)
