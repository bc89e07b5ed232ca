"""The schema of the conversations file, as numbered steps that are never edited once released.

`PRAGMA user_version` says how many steps a file has seen; `application_id` says it is ours.
A new step goes to the end of `MIGRATIONS`, with a test on a file that the step before it made.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

APPLICATION_ID = 0x63686B76  # "chkv"

Migration = Callable[[sqlite3.Connection], None]


def conversations_tree(conn: sqlite3.Connection) -> None:
    """1: sessions name a path through a tree of turns, and words can be searched.

    Every turn is owned by one living session; a session may reach turns of another one, which is
    how a fork copies nothing. `touched` orders sessions by last use without trusting the clock.
    The columns that listings need come first, the blobs last: SQLite stores a long row as a chain
    of pages and would have to walk it.
    """
    for statement in (
        """CREATE TABLE sessions (
            seq INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL UNIQUE,
            title TEXT NOT NULL,
            created_at REAL NOT NULL,
            updated_at REAL NOT NULL,
            touched INTEGER NOT NULL,
            head TEXT REFERENCES turns(id) DEFERRABLE INITIALLY DEFERRED,
            model TEXT NOT NULL,
            namespace TEXT,
            settings TEXT NOT NULL,
            pinned INTEGER NOT NULL)""",
        "CREATE INDEX sessions_by_use ON sessions(touched)",
        "CREATE INDEX sessions_by_head ON sessions(head)",
        """CREATE TABLE turns (
            seq INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL UNIQUE,
            session_id TEXT NOT NULL REFERENCES sessions(id) DEFERRABLE INITIALLY DEFERRED,
            parent_id TEXT REFERENCES turns(id) DEFERRABLE INITIALLY DEFERRED,
            position INTEGER NOT NULL,
            tokens_before INTEGER NOT NULL,
            state TEXT NOT NULL CHECK (state IN ('pending', 'streaming', 'done', 'interrupted')),
            finish_reason TEXT,
            seed TEXT NOT NULL,
            rng_draws_before INTEGER NOT NULL,
            rng_draws_after INTEGER NOT NULL,
            created_at REAL NOT NULL,
            stats TEXT NOT NULL,
            system_text TEXT,
            user_text TEXT NOT NULL,
            reply_text TEXT NOT NULL,
            prompt_ids BLOB NOT NULL,
            reply_ids BLOB NOT NULL)""",
        "CREATE INDEX turns_by_session ON turns(session_id)",
        "CREATE INDEX turns_by_parent ON turns(parent_id)",
        "CREATE INDEX turns_unfinished ON turns(state) WHERE state IN ('pending', 'streaming')",
        # The index holds no text of its own (content=turns): triggers keep it true to the rows.
        """CREATE VIRTUAL TABLE turns_words USING fts5(
            user_text, reply_text, content='turns', content_rowid='seq',
            tokenize='unicode61 remove_diacritics 2')""",
        """CREATE TRIGGER turns_words_insert AFTER INSERT ON turns BEGIN
            INSERT INTO turns_words(rowid, user_text, reply_text)
            VALUES (new.seq, new.user_text, new.reply_text); END""",
        """CREATE TRIGGER turns_words_delete AFTER DELETE ON turns BEGIN
            INSERT INTO turns_words(turns_words, rowid, user_text, reply_text)
            VALUES ('delete', old.seq, old.user_text, old.reply_text); END""",
        """CREATE TRIGGER turns_words_update AFTER UPDATE OF user_text, reply_text ON turns BEGIN
            INSERT INTO turns_words(turns_words, rowid, user_text, reply_text)
            VALUES ('delete', old.seq, old.user_text, old.reply_text);
            INSERT INTO turns_words(rowid, user_text, reply_text)
            VALUES (new.seq, new.user_text, new.reply_text); END""",
    ):
        conn.execute(statement)


def turns_by_messages(conn: sqlite3.Connection) -> None:
    """2: the turn at which a conversation stands can be found by its messages."""
    for statement in (
        """CREATE TABLE turns_messages (
            digest BLOB NOT NULL,
            turn_id TEXT NOT NULL REFERENCES turns(id) ON DELETE CASCADE)""",
        "CREATE INDEX turns_messages_by_digest ON turns_messages(digest)",
        "CREATE INDEX turns_messages_by_turn ON turns_messages(turn_id)",
    ):
        conn.execute(statement)


MIGRATIONS: tuple[Migration, ...] = (conversations_tree, turns_by_messages)


def version(conn: sqlite3.Connection) -> int:
    """How many steps this file has seen."""
    (number,) = conn.execute("PRAGMA user_version").fetchone()
    return int(number)


def is_foreign(conn: sqlite3.Connection) -> bool:
    """Whether this is some other program's database (a new, empty file is nobody's)."""
    (application_id,) = conn.execute("PRAGMA application_id").fetchone()
    if application_id == APPLICATION_ID:
        return False
    return conn.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is not None


def migrate(conn: sqlite3.Connection) -> None:
    """Run the missing steps, inside the caller's write transaction: all of them or none."""
    for number, step in enumerate(MIGRATIONS[version(conn) :], start=version(conn) + 1):
        step(conn)
        conn.execute(f"PRAGMA user_version = {number}")
    conn.execute(f"PRAGMA application_id = {APPLICATION_ID}")
