"""Where the conversations cannot be written, the chat goes on, says so once, and saves later."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from chatkv.client import ChatRequest, OpenChat, open_chat
from chatkv.engine.options import SamplingOptions
from chatkv.paths import folders
from chatkv.session.turn import Listener, TurnOptions, TurnResult
from chatkv_store import BlockStore, database
from chatkv_store.conversations import Conversations
from chatkv_store.errors import StoreBusy, StoreDamaged, StoreReadOnly, StoreVersionError
from small_disk import SmallDisk, small_disk

GREEDY = SamplingOptions(temperature=0)


@pytest.fixture
def model(home: Path, tiny_checkpoint: Callable[..., Path]) -> str:
    return str(tiny_checkpoint("llama3"))


@pytest.fixture
def disk(home: Path) -> Iterator[SmallDisk]:
    """A small disk that holds the conversations alone: the cache is another matter."""
    with small_disk(home / "data", "2m") as disk:
        yield disk


@contextmanager
def opened(model: str, session: str | None = None) -> Iterator[OpenChat]:
    with open_chat(folders(), ChatRequest(model, "float32", resume=session, seed=1)) as chat:
        yield chat


def say(chat: OpenChat, text: str, listener: Listener | None = None) -> TurnResult:
    return chat.conversation.send(text, TurnOptions(GREEDY, max_tokens=12), listener)


def stored(session: str) -> list[tuple[str, str, str]]:
    with Conversations(folders().conversations) as conversations:
        return [
            (turn.user_text, turn.reply_text, turn.state) for turn in conversations.chain(session)
        ]


def unsaved(result: TurnResult) -> list[str]:
    return [line for line in result.notices if "nothing is being saved" in line]


def saved_again(result: TurnResult) -> list[str]:
    return [line for line in result.notices if "is saved again" in line]


def test_a_disk_without_room_for_the_file(model: str, disk: SmallDisk) -> None:
    """The very first start, on a full disk: answered, said once, written when there is room."""
    disk.fill()
    with opened(model) as chat:
        first = say(chat, "one")
        assert first.text and len(unsaved(first)) == 1 and "disk is full" in unsaved(first)[0]
        second = say(chat, "two")
        assert second.turn == 2 and unsaved(second) == []
        disk.empty()
        third = say(chat, "three")
        assert len(saved_again(third)) == 1
        results = [first, second, third]
    assert stored(first.session) == [
        (text, result.text, "done")
        for text, result in zip(["one", "two", "three"], results, strict=True)
    ]
    with opened(model, first.session) as chat:
        assert say(chat, "four").turn == 4


def test_a_disk_that_fills_up_in_the_middle(model: str, disk: SmallDisk) -> None:
    with opened(model) as chat:
        before = say(chat, "before")
        disk.fill()
        results = [before]
        while not unsaved(results[-1]):  # what the log has room for is still saved
            results.append(say(chat, "more"))
        assert "disk is full" in unsaved(results[-1])[0]
        results.append(say(chat, "and more"))
        assert unsaved(results[-1]) == []
        disk.empty()
        results.append(say(chat, "after"))
        assert len(saved_again(results[-1])) == 1
    turns = stored(before.session)
    assert [reply for _, reply, _ in turns] == [result.text for result in results]
    assert {state for _, _, state in turns} == {"done"}


def test_what_is_still_unsaved_at_the_end_is_written_on_leaving(
    model: str, disk: SmallDisk
) -> None:
    disk.fill()
    with opened(model) as chat:
        result = say(chat, "one")
        assert unsaved(result)
        disk.empty()
    assert stored(result.session) == [("one", result.text, "done")]


def test_a_read_only_disk(model: str, disk: SmallDisk) -> None:
    with opened(model) as chat:
        session = say(chat, "one").session
    disk.remount("ro")
    with opened(model) as chat:
        assert len(unsaved(say(chat, "a new one"))) == 1
    with opened(model, session) as chat:
        assert [turn.user_text for turn in chat.conversation.turns] == ["one"]
        second = say(chat, "two")
        assert second.turn == 2 and len(unsaved(second)) == 1
        disk.remount("rw")
        assert len(saved_again(say(chat, "three"))) == 1
    assert [turn[0] for turn in stored(session)] == ["one", "two", "three"]
    with Conversations(folders().conversations) as conversations:
        assert len(conversations.list_sessions()) == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("failing", range(1, 6))
def test_each_commit_of_two_turns_fails_in_its_turn(
    model: str, monkeypatch: pytest.MonkeyPatch, failing: int, code: int
) -> None:
    """1: the session, 2 and 4: a turn begins, 3 and 5: it ends. Only that one fails."""
    passes = 0

    def fail(place: str) -> None:
        nonlocal passes
        if place == "conversations.written":
            passes += 1
            if passes == failing:
                raise OSError(code, os.strerror(code))

    monkeypatch.setattr(database, "failpoint", fail)
    with opened(model) as chat:
        results = [say(chat, "one"), say(chat, "two")]
        said = [line for result in results for line in unsaved(result)]
        assert len(said) == 1
    expected = [
        (text, result.text, "done") for text, result in zip(["one", "two"], results, strict=True)
    ]
    assert stored(results[0].session) == expected


def test_a_disk_that_never_recovers_costs_no_answer(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(place: str) -> None:
        if place == "conversations.begun":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(database, "failpoint", fail)
    with opened(model) as chat:
        results = [say(chat, text) for text in ("one", "two", "three")]
        assert [len(unsaved(result)) for result in results] == [1, 0, 0]
        assert "Input/output error" in unsaved(results[0])[0]
        assert chat.conversation.journal.num_unsaved == 3
    with opened(model) as chat:
        assert say(chat, "one").text == results[0].text, "what is in memory changes no answer"


def test_a_session_that_went_on_elsewhere_is_not_overwritten(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no lease can be had, somebody else may go on; their words stay, these are said."""
    with opened(model) as chat:
        session = say(chat, "one").session

    def refuse(_: object, session_id: str) -> object:
        raise StoreReadOnly("the folder cannot be written")

    with monkeypatch.context() as patch:
        patch.setattr(Conversations, "lease", refuse)
        with opened(model, session) as chat:
            mine = say(chat, "mine")
            assert mine.text and unsaved(mine)
            patch.undo()
            with Conversations(folders().conversations) as other, other.lease(session):
                turn = other.begin_turn(session, user_text="theirs", prompt_ids=[1])
                other.finish_turn(turn.id, reply_text="ok", reply_ids=[2], rng_draws_after=1)
            again = say(chat, "mine too")
            assert again.text and saved_again(again) == []
            assert chat.conversation.journal.num_unsaved == 2
    assert [turn[0] for turn in stored(session)] == ["one", "theirs"]


def test_a_session_in_use_is_still_refused(model: str) -> None:
    with opened(model) as chat:
        session = say(chat, "one").session
        with pytest.raises(StoreBusy), opened(model, session):
            pass


def test_a_damaged_file_ends_no_chat_and_is_left_alone(model: str) -> None:
    path = folders().make().conversations
    path.write_bytes(b"not a database, but long enough to be one" * 50)
    before = path.read_bytes()
    with opened(model) as chat:
        result = say(chat, "one")
        assert result.text and "damaged" in unsaved(result)[0]
    assert path.read_bytes() == before
    with pytest.raises(StoreDamaged), opened(model, "last week"):
        pass


def test_a_cache_without_room_costs_time_only(model: str, home: Path) -> None:
    """The other disk: words are kept, KV is not, and that is said once."""
    with small_disk(home / "cache", "2m") as disk:
        with opened(model) as chat:
            results = [say(chat, "one")]
            disk.fill()
            for text in ("two", "three", "four", "five"):
                results.append(say(chat, text))
                assert chat.runtime.restorer.disk is not None
                chat.runtime.restorer.disk.writer.flush(20)
            lost = [line for one in results for line in one.notices if "KV is not being" in line]
            assert len(lost) == 1 and "\n" not in lost[0], lost
        with opened(model, results[0].session) as chat:
            assert [turn.reply_text for turn in chat.conversation.turns] == [
                one.text for one in results
            ]
            six = say(chat, "six")
        disk.empty()
        disk.remount("size=8m")
        with opened(model, results[0].session) as chat:
            assert say(chat, "seven").text
    assert [one[1] for one in stored(results[0].session)][:6] == [
        one.text for one in [*results, six]
    ]


def test_a_cache_that_never_had_room(model: str, home: Path) -> None:
    with small_disk(home / "cache", "1m") as disk:
        disk.fill()
        with opened(model) as chat:
            result = say(chat, "one")
            assert result.text and unsaved(result) == []
            (notice,) = [line for line in chat.runtime.notices if "KV is not kept" in line]
            assert "\n" not in notice
    assert stored(result.session) == [("one", result.text, "done")]


def test_sqlite_itself_says_full(model: str) -> None:
    """SQLITE_FULL from the engine, not from the file system."""
    with opened(model) as chat:
        conn = chat.runtime.conversations._database._conn
        results = [say(chat, "one")]
        (pages,) = conn.execute("PRAGMA page_count").fetchone()
        conn.execute(f"PRAGMA max_page_count = {pages}")
        while not unsaved(results[-1]):
            results.append(say(chat, "long words " * 10))
        assert "disk is full" in unsaved(results[-1])[0]
        conn.execute("PRAGMA max_page_count = 100000")
    assert [turn[1] for turn in stored(results[0].session)] == [one.text for one in results]


def test_files_of_a_newer_version_end_no_chat_and_are_left_alone(model: str) -> None:
    with opened(model) as chat:
        session = say(chat, "one").session
    with BlockStore(folders().kv) as blocks:
        blocks.env.write(lambda txn: txn.put(b"format", b"99", db=blocks.db["meta"]))
    conn = sqlite3.connect(folders().conversations)
    conn.execute("PRAGMA user_version = 99")
    conn.close()
    files = (folders().conversations, folders().kv / "data.mdb")
    before = [path.read_bytes() for path in files]
    with opened(model) as chat:
        result = say(chat, "two")
        assert result.text and "newer chatkv" in unsaved(result)[0]
        assert any("format 99" in line for line in chat.runtime.notices)
    with pytest.raises(StoreVersionError), opened(model, session):
        pass
    assert [path.read_bytes() for path in files] == before
