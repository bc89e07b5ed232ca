"""Running the program: in this process, in one of its own, at a terminal of 80 columns."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import termios
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from chatkv_store.conversations import Conversations, Session
from forked import Forked, chatkv
from program import Ran, environment, run


@pytest.fixture
def process(home: Path) -> Callable[..., Ran]:
    """`process("sessions", "ls")` runs that in a process of its own."""
    return run


@pytest.fixture
def terminal(home: Path) -> Callable[..., Ran]:
    """`terminal("sessions", "ls", keys="y\\n")` runs that at a terminal of 80 columns.

    `answers` are typed each after its question has been shown: what is typed ahead of a hidden
    question is thrown away.
    """

    def call(
        *arguments: str,
        keys: str = "",
        answers: Sequence[tuple[str, str]] = (),
        **variables: str,
    ) -> Ran:
        leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        wanted = environment(**{"TERM": "xterm-256color"} | variables)
        child = Forked(chatkv, *arguments, env=wanted, terminal=follower)
        os.close(follower)
        os.write(leader, keys.encode())
        shown, seen = b"", 0
        for question, answer in answers:
            while (at := shown.find(question.encode(), seen)) < 0:
                if not (more := _read(leader)):
                    pytest.fail(f"it ended without asking {question!r}: {shown.decode()}")
                shown += more
            seen = at + len(question)
            os.write(leader, answer.encode() + b"\n")
        shown += b"".join(iter(lambda: _read(leader), b""))
        os.close(leader)
        return Ran(child.wait(), shown.decode().replace("\r\n", "\n"), "")

    return call


def _read(leader: int) -> bytes:
    if not select.select([leader], [], [], 60)[0]:
        pytest.fail("nothing was shown for a minute")
    try:
        return os.read(leader, 65536)
    except OSError:  # the last process that had the terminal open is gone
        return b""


@pytest.fixture
def talk(home: Path) -> Callable[..., Session]:
    """`talk(title, turns)` saves a conversation of (user, reply) pairs and returns its session."""

    def call(title: str, turns: Sequence[tuple[str, str]] = (), model: str = "Tiny") -> Session:
        with Conversations(home / "data" / "conversations.sqlite3") as store:
            session = store.create_session(title=title, model=model)
            with store.lease(session.id):
                for user, reply in turns:
                    turn = store.begin_turn(session.id, user_text=user, prompt_ids=[1, 2, 3])
                    store.finish_turn(
                        turn.id, reply_text=reply, reply_ids=[4, 5], rng_draws_after=2
                    )
            return store.get_session(session.id)

    return call
