"""Old files open, newer ones are refused in one line, half a migration never stays."""

from __future__ import annotations

import multiprocessing
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from chatkv_store import migrations
from chatkv_store.conversations import Conversations
from chatkv_store.errors import StoreDamaged, StoreVersionError

V1 = Path(__file__).with_name("conversations_v1.sql")


@pytest.fixture
def old_file(tmp_path: Path) -> Path:
    """A file written by format 1, left by a process that died in its second turn."""
    path = tmp_path / "old.sqlite3"
    with sqlite3.connect(path) as conn:
        conn.executescript(V1.read_text())
    conn.close()
    return path


def sql(path: Path, statement: str) -> list[tuple[object, ...]]:
    conn = sqlite3.connect(path)
    with conn:
        rows = conn.execute(statement).fetchall()
    conn.close()
    return rows


def test_a_file_of_format_1_opens_with_everything_in_it(old_file: Path) -> None:
    with Conversations(old_file) as store:
        store.recover()
        session = store.get_session("Rome")
        first, second = store.chain(session.id)
        assert (session.model, session.settings, session.pinned) == ("SmolLM2", {"top_k": 5}, True)
        assert (session.num_turns, session.num_tokens) == (2, 5)
        assert (first.system_text, first.reply_text) == ("be brief", "Do as they do.")
        assert list(first.prompt_ids) == [1, 2] and list(first.reply_ids) == [65791]
        assert (second.state, second.reply_text) == ("interrupted", "The sa")
        assert [hit.turn_index for hit in store.search("milan")] == [2]
    assert sql(old_file, "PRAGMA user_version") == [(len(migrations.MIGRATIONS),)]


def test_the_schema_of_an_old_file_becomes_that_of_a_new_one(
    old_file: Path, tmp_path: Path
) -> None:
    Conversations(old_file).close()
    Conversations(tmp_path / "new.sqlite3").close()

    def schema(path: Path) -> list[tuple[object, ...]]:
        rows = sql(path, "SELECT type, name, sql FROM sqlite_master ORDER BY type, name")
        return [
            (kind, name, " ".join(str(text).split()).replace("( ", "("))
            for kind, name, text in rows
        ]

    assert schema(old_file) == schema(tmp_path / "new.sqlite3")


def add_a_column(conn: sqlite3.Connection) -> None:
    conn.execute("ALTER TABLE sessions ADD COLUMN colour TEXT NOT NULL DEFAULT 'grey'")


def fail_halfway(conn: sqlite3.Connection) -> None:
    add_a_column(conn)
    raise sqlite3.OperationalError("power cut")


def test_missing_steps_run_in_order_once(old_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrations, "MIGRATIONS", (*migrations.MIGRATIONS, add_a_column))
    for _ in range(2):  # the second opening has nothing left to do
        with Conversations(old_file) as store:
            assert store.get_session("Rome").num_turns == 2
    assert sql(old_file, "SELECT colour FROM sessions") == [("grey",)]
    assert sql(old_file, "PRAGMA user_version") == [(len(migrations.MIGRATIONS),)]


def test_a_step_that_fails_leaves_the_old_file(
    old_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(migrations, "MIGRATIONS", (*migrations.MIGRATIONS, fail_halfway))
        with pytest.raises(Exception, match="power cut"):
            Conversations(old_file)
    assert sql(old_file, "PRAGMA user_version") == [(1,)]
    with Conversations(old_file) as store:
        assert store.get_session("Rome").title == "Rome"
    assert "colour" not in {row[1] for row in sql(old_file, "PRAGMA table_info(sessions)")}


def test_a_newer_file_is_refused_in_one_line_and_left_alone(old_file: Path) -> None:
    newer = len(migrations.MIGRATIONS) + 1
    sql(old_file, f"PRAGMA user_version = {newer}")
    before = old_file.read_bytes()
    with pytest.raises(StoreVersionError) as caught:
        Conversations(old_file)
    line = str(caught.value)
    assert str(old_file) in line and f"format {newer}" in line and "update chatkv" in line
    assert "\n" not in line
    assert old_file.read_bytes() == before


def test_another_programs_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "photos.db"
    sql(path, "CREATE TABLE photos (name TEXT)")
    before = path.read_bytes()
    with pytest.raises(StoreDamaged, match="not a conversations file of chatkv"):
        Conversations(path)
    assert path.read_bytes() == before


def create_when_told(paths: list[Path], start: Any, answers: Any) -> None:
    for path in paths:
        start.wait()
        try:
            with Conversations(path) as store:
                answers.put((path, store.create_session().id))
        except BaseException as error:
            answers.put((path, repr(error)))


def test_processes_that_open_a_new_file_at_once_all_succeed(tmp_path: Path) -> None:
    """They race for the schema and for the switch to WAL; twenty rounds find most of it."""
    fork = multiprocessing.get_context("fork")
    paths = [tmp_path / str(round) / "c.sqlite3" for round in range(20)]
    start, answers = fork.Barrier(8), fork.Queue()
    children = [
        fork.Process(target=create_when_told, args=(paths, start, answers)) for _ in range(8)
    ]
    for child in children:
        child.start()
    made = [answers.get(timeout=60) for _ in range(len(children) * len(paths))]
    for child in children:
        child.join()
    for path in paths:
        with Conversations(path) as store:
            created = {session for where, session in made if where == path}
            assert {session.id for session in store.list_sessions()} == created
            assert len(created) == len(children)
