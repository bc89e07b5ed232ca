"""Finding what was said: words through the FTS5 index, everything else by looking at the text.

FTS5's `unicode61` sees words only: it drops emoji and punctuation ("C++", "->") and takes a whole
run of Chinese, Japanese or Thai for one word. So each piece of a query that is an ordinary word
narrows the candidates through the index (as a prefix, accents ignored), and every other piece must
be found inside the candidates' text. A query is always taken literally: it has no syntax, and
nothing in it can be a syntax error.
"""

from __future__ import annotations

import sqlite3
import unicodedata
from dataclasses import dataclass

from chatkv_store.records import SELECT_SESSION, SearchHit, session_from_row

_SNIPPET_CHARS = 80


@dataclass(frozen=True)
class Query:
    """`words` go to the index as they are; `others`, folded, must occur in the text."""

    words: list[str]
    others: list[str]

    @property
    def pieces(self) -> list[str]:
        """Every part, folded."""
        return [*map(fold, self.words), *self.others]

    @property
    def fts(self) -> str:
        """FTS5's expression for the words: each a quoted prefix, all of them required."""
        return " AND ".join(f'"{word}"*' for word in self.words)


def parse(text: str) -> Query:
    words: list[str] = []
    others: list[str] = []
    for piece in text.split():
        (words if _is_word(piece) else others).append(piece)
    return Query(words, [folded for folded in map(fold, others) if folded])


def fold(text: str) -> str:
    """Case, width and accents removed, as far as a reader would not miss them."""
    if text.isascii():
        return text.lower()
    # Surrogates cannot be bound as SQL text; no stored text holds one.
    text = text.encode("utf-8", "replace").decode()
    decomposed = unicodedata.normalize("NFKD", text.casefold())
    return "".join(letter for letter in decomposed if not unicodedata.combining(letter))


def _is_word(piece: str) -> bool:
    """Whether FTS5 sees `piece` as exactly one word of a script that puts spaces between words.

    Latin, Greek and Cyrillic (with their extensions) only. Any other script is searched in the
    text itself, which is slower and always right.
    """
    return all(
        letter.isalnum() and (letter < "\u0530" or "\u1e00" <= letter < "\u2000")
        for letter in piece
    )


def find_sessions(conn: sqlite3.Connection, text: str, limit: int | None) -> list[SearchHit]:
    """At most `limit` sessions whose title or turns hold every piece of `text`, newest first."""
    query = parse(text)
    if not query.pieces:
        return []
    conn.create_function("holds", -1, _holds(query.pieces), deterministic=True)
    conn.create_function("holds_others", -1, _holds(query.others), deterministic=True)
    found: dict[str, tuple[int | None, int]] = {}  # session id -> newest turn's index, hits
    for session_id, position in _matching_turns(conn, query):
        newest, hits = found.get(session_id, (position, 0))
        found[session_id] = (newest, hits + 1)
    for (session_id,) in conn.execute("SELECT id FROM sessions WHERE holds(title)"):
        newest, hits = found.get(session_id, (None, 0))
        found[session_id] = (newest, hits + 1)
    order = "SELECT id FROM sessions ORDER BY touched DESC"
    wanted = [row[0] for row in conn.execute(order) if row[0] in found][:limit]
    return [_hit(conn, query, session_id, *found[session_id]) for session_id in wanted]


def _matching_turns(conn: sqlite3.Connection, query: Query) -> list[tuple[str, int]]:
    """(owning session, position) of the turns that match, newest first."""
    if query.words:
        rows = conn.execute(
            "SELECT t.session_id, t.position FROM turns_words w JOIN turns t ON t.seq = w.rowid "
            "WHERE turns_words MATCH ? AND holds_others(t.user_text, t.reply_text) "
            "ORDER BY t.seq DESC",
            (query.fts,),
        )
    else:
        rows = conn.execute(
            "SELECT session_id, position FROM turns WHERE holds_others(user_text, reply_text) "
            "ORDER BY seq DESC"
        )
    return rows.fetchall()


def _holds(pieces: list[str]):  # type: ignore[no-untyped-def]
    def holds(*texts: str) -> bool:
        if not pieces:
            return True
        folded = fold("\n".join(texts))
        return all(piece in folded for piece in pieces)

    return holds


def _hit(
    conn: sqlite3.Connection, query: Query, session_id: str, index: int | None, hits: int
) -> SearchHit:
    session = session_from_row(
        conn.execute(f"{SELECT_SESSION} WHERE s.id = ?", (session_id,)).fetchone()
    )
    if index is None:
        return SearchHit(session, None, session.title, hits)
    row = conn.execute(
        "SELECT user_text, reply_text FROM turns WHERE session_id = ? AND position = ? "
        "ORDER BY seq DESC",
        (session_id, index),
    )
    texts = [text for pair in row for text in pair]
    best = max(texts, key=lambda text: sum(piece in fold(text) for piece in query.pieces))
    return SearchHit(session, index, snippet(best, query.pieces), hits)


def snippet(text: str, pieces: list[str], max_chars: int = _SNIPPET_CHARS) -> str:
    """One line of `text` around the first place where a piece occurs."""
    text = " ".join(text.split())
    origin: list[int] = []  # of every folded letter, its place in `text`
    folded = ""
    for place, letter in enumerate(text):
        part = fold(letter)
        folded += part
        origin.extend([place] * len(part))
    starts = [at for at in (folded.find(piece) for piece in pieces) if at >= 0]
    middle = origin[min(starts)] if starts else 0
    begin = max(0, min(middle - max_chars // 3, len(text) - max_chars))
    cut = text[begin : begin + max_chars]
    return ("…" if begin else "") + cut + ("…" if begin + max_chars < len(text) else "")
