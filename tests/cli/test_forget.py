"""`sessions forget`: afterwards nothing of it is in any file, and nothing else is missing."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatkv_store import BlockStore, Conversations, erasing, namespace
from chatkv_store.keys import pack_ids
from chatkv_store.tables import DATABASES
from kv_samples import GROUPED, chain, kv_of
from program import Ran

SPACE = namespace(b"weights", b"config", GROUPED, "lossless")
SECRET = "xyzzyplugh"
SYSTEM = list(range(1000, 1064))  # one block that every conversation begins with


@pytest.fixture
def conversations(home: Path) -> Conversations:
    return Conversations(home / "data" / "conversations.sqlite3")


def talk(
    conversations: Conversations, home: Path, title: str, turns: Sequence[Sequence[int]]
) -> str:
    """A saved conversation, its KV stored as a chat stores it."""
    session = conversations.create_session(title=title, namespace=SPACE.hex(), model="Tiny")
    go_on(conversations, home, session.id, title, turns)
    return session.id


def go_on(
    conversations: Conversations,
    home: Path,
    session: str,
    word: str,
    turns: Sequence[Sequence[int]],
) -> None:
    with conversations.lease(session), BlockStore(home / "cache" / "kv") as blocks:
        blocks.register(SPACE, {"model": "Tiny", "layout": GROUPED.to_json()})
        for number, ids in enumerate(turns):
            turn = conversations.begin_turn(
                session, user_text=f"{word} asks {number}", prompt_ids=ids[:-8]
            )
            conversations.finish_turn(
                turn.id, reply_text=f"{word} hears", reply_ids=ids[-8:], rng_draws_after=1
            )
            log = list(conversations.token_log(session))
            blocks.put(SPACE, GROUPED, chain(GROUPED, log, kv_of(GROUPED, log), SPACE))


def traces(home: Path) -> tuple[bytes, list[Path]]:
    """Every byte below `home`, and the files that they are in."""
    files = [path for path in home.rglob("*") if path.is_file()]
    return b"\n".join(path.read_bytes() for path in files), files


def stored(home: Path) -> dict[bytes, tuple[bytes, list[bytes]]]:
    """Block's key -> its ids as they lie in the file, and a piece of each of its values."""
    with BlockStore(home / "cache" / "kv", read_only=True) as blocks:
        values = dict(blocks.scan("values"))
        return {
            header.key: (
                header.ids,
                [v[len(v) // 2 :][:48] for k, v in values.items() if k.startswith(header.key)],
            )
            for header in blocks.headers()
        }


def test_nothing_is_left_in_any_file(
    home: Path, conversations: Conversations, program: Callable[..., Ran]
) -> None:
    mine = [*SYSTEM, *range(2000, 2150)]
    secret = talk(conversations, home, SECRET, [mine, list(range(3000, 3040))])
    theirs = [*SYSTEM, *range(5000, 5100)]
    other = talk(conversations, home, "harmless", [theirs])
    before = stored(home)
    content, _ = traces(home)
    assert SECRET.encode() in content
    assert all(ids in content and all(p in content for p in v) for ids, v in before.values())
    conversations.close()

    done = program("sessions", "forget", secret, "-y", "--json")

    assert done.code == 0, done.err
    answer: dict[str, Any] = json.loads(done.out)
    assert answer["num_turns"] == 2 and answer["num_kept_bytes"] == 0
    assert answer["num_shared_blocks"] == 1, "the system prompt is the other's too"
    content, files = traces(home)
    assert SECRET.encode() not in content.lower(), [
        path for path in files if SECRET.encode() in path.read_bytes().lower()
    ]
    after = stored(home)
    gone = before.keys() - after.keys()
    assert len(gone) == answer["num_blocks"] >= 3
    for key in gone:
        ids, values = before[key]
        assert ids not in content, "token ids are left"
        assert not any(value in content for value in values), "KV is left"
    assert pack_ids(mine[70:90]) not in content
    with BlockStore(home / "cache" / "kv") as blocks:
        assert blocks.verify() == []
        match = blocks.match(SPACE, theirs, GROUPED)
        assert match.num_tokens == len(theirs)
        out = np.zeros_like(kv_of(GROUPED, theirs)[:2])
        for block in match.blocks:
            blocks.read(block, 0, out[:, :, :, block.start : block.start + block.num_tokens])
        np.testing.assert_array_equal(out, kv_of(GROUPED, theirs)[:2])
    with Conversations(home / "data" / "conversations.sqlite3") as again:
        assert [one.id for one in again.list_sessions()] == [other]


def test_what_a_fork_shares_stays_and_is_said(
    home: Path, conversations: Conversations, program: Callable[..., Ran]
) -> None:
    session = talk(conversations, home, "origin", [[*range(64)], [*range(100, 180)]])
    fork = conversations.fork(session, 1, title="the fork").id
    go_on(conversations, home, fork, "forked", [[*range(300, 390)]])
    conversations.close()
    done = program("sessions", "forget", session, "-y")
    assert done.code == 0
    assert "forgot 1 turn" in done.err and "1 turn and" in done.err and "share them" in done.err
    with (
        Conversations(home / "data" / "conversations.sqlite3") as again,
        BlockStore(home / "cache" / "kv", read_only=True) as blocks,
    ):
        log = list(again.token_log(fork))
        assert blocks.match(SPACE, log, GROUPED).num_tokens == len(log)
        assert blocks.match(SPACE, [*range(64), *range(100, 180)], GROUPED).num_tokens == 64
        assert [turn.user_text for turn in again.chain(fork)] == ["origin asks 0", "forked asks 0"]


def test_a_branch_left_behind_is_forgotten_too(
    home: Path, conversations: Conversations, program: Callable[..., Ran]
) -> None:
    """Undo moves the head; what was undone is still the session's."""
    session = talk(conversations, home, "first", [[*range(64)]])
    with conversations.lease(session):
        head = conversations.get_session(session).head
    go_on(conversations, home, session, "undone", [[*range(700, 790)]])
    with conversations.lease(session):
        conversations.move_head(session, head)
    go_on(conversations, home, session, "redone", [[*range(800, 890)]])
    conversations.close()
    assert program("sessions", "forget", session, "-y").code == 0
    assert stored(home) == {}
    content, _ = traces(home)
    assert pack_ids(list(range(700, 720))) not in content and b"undone" not in content


def test_without_a_cache_the_words_go(
    home: Path, conversations: Conversations, program: Callable[..., Ran]
) -> None:
    session = conversations.create_session(title=SECRET)
    conversations.close()
    assert program("sessions", "forget", SECRET).code == 2, "never without being asked"
    assert program("sessions", "forget", SECRET, "-y").code == 0
    assert SECRET.encode() not in traces(home)[0]
    missing = program("sessions", "forget", session.id, "-y")
    assert missing.code == 1 and missing.err.count("\n") == 1


def test_a_session_in_use_is_not_forgotten(
    home: Path, conversations: Conversations, program: Callable[..., Ran]
) -> None:
    session = talk(conversations, home, "busy", [[*range(80)]])
    with conversations.lease(session):
        done = program("sessions", "forget", session, "-y")
    assert done.code == 1 and "already open in this process" in done.err
    assert len(stored(home)) == 2 and len(conversations.chain(session)) == 1


def test_pages_that_somebody_may_be_reading_wait(
    home: Path, conversations: Conversations, program: Callable[..., Ran]
) -> None:
    """A snapshot in use is not touched: zeros under a reader would be wrong KV, or a crash."""
    session = talk(conversations, home, "read", [[*range(200)]])
    log = list(conversations.token_log(session))
    with BlockStore(home / "cache" / "kv") as blocks:
        right = restore_all(blocks, log)
        with blocks.env.read() as txn:
            keys = [header.key for header in blocks.headers()]
            values = [bytes(v) for _, v in txn.cursor(blocks.db["values"])]
            done: list[erasing.Erased] = []

            def other_thread() -> None:
                blocks.remove(keys)
                done.append(erasing.erase(blocks.env, DATABASES))

            thread = threading.Thread(target=other_thread)
            thread.start()
            thread.join()
            assert done[0].num_kept_bytes > sum(map(len, values)) // 2
            assert [bytes(v) for _, v in txn.cursor(blocks.db["values"])] == values
        assert erasing.erase(blocks.env, DATABASES).num_kept_bytes == 0
    content, _ = traces(home)
    assert not any(value[:48] in content for value in values)
    assert right.shape[3] == 200


def restore_all(blocks: BlockStore, log: list[int]) -> Any:
    match = blocks.match(SPACE, log, GROUPED)
    out = np.zeros_like(kv_of(GROUPED, log)[:2])
    for block in match.blocks:
        blocks.read(block, 0, out[:, :, :, block.start : block.start + block.num_tokens])
    return out


@pytest.mark.parametrize("at", ["blocks.committed:1", "conversations.committed:1"])
def test_killed_in_the_middle_it_can_be_told_again(
    home: Path, conversations: Conversations, process: Callable[..., Ran], at: str
) -> None:
    """KV goes first, so what a kill leaves is a conversation, or words that are not found."""
    session = talk(conversations, home, SECRET, [[*range(200)], [*range(300, 350)]])
    conversations.close()
    killed = process("sessions", "forget", session, "-y", CHATKV_FAILPOINT=at)
    assert killed.code == -signal.SIGKILL
    with Conversations(home / "data" / "conversations.sqlite3") as again:
        left = again.list_sessions()
        assert len(left) == (at.startswith("blocks")), "the words go in one commit"
    if left:
        assert process("sessions", "forget", session, "-y").code == 0
        content, _ = traces(home)
        assert SECRET.encode() not in content and pack_ids(list(range(70, 90))) not in content
    assert stored(home) == {}


def test_an_encrypted_cache_is_forgotten_alike(
    home: Path,
    tmp_path: Path,
    conversations: Conversations,
    program: Callable[..., Ran],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("cryptography")
    (tmp_path / "key").write_text("secret")
    monkeypatch.setenv("CHATKV_KEY_FILE", str(tmp_path / "key"))
    assert program("encrypt", "on", "-y").code == 0
    session = talk(conversations, home, "private", [[*SYSTEM, *range(200)]])
    other = talk(conversations, home, "other", [[*SYSTEM, *range(900, 980)]])
    with BlockStore(home / "cache" / "kv") as blocks, blocks.env._env.begin() as txn:
        sealed = [bytes(value[-48:]) for _, value in txn.cursor(blocks.db["values"])]
    done = program("sessions", "forget", session, "-y", "--json")
    answer = json.loads(done.out)
    assert answer["num_shared_blocks"] == 1 and answer["num_blocks"] == 4
    content, _ = traces(home)
    assert sum(value in content for value in sealed) < len(sealed) - 4
    with BlockStore(home / "cache" / "kv") as blocks:
        log = conversations.token_log(other)
        assert blocks.match(SPACE, log, GROUPED).num_tokens == len(log)
        assert blocks.verify() == []
