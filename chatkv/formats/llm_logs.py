"""Logs of the `llm` program (https://llm.datasette.io): its `logs.db`, and what `llm logs --json`
prints.

One row is one call of a model: what it was asked, the system prompt, the answer. Versions up to
0.31 keep rows in `responses`; later ones keep chains of messages, each with its parts, and in
`turns` the two messages between which a call lies. Both may be in one file.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from chatkv.formats.told import NotUnderstood, Told, ToldTurn, digest_of, epoch_s, fenced

Row = dict[str, Any]


def is_row(value: Any) -> bool:
    """Whether this is a row of `llm logs --json`."""
    return isinstance(value, dict) and {"prompt", "response", "conversation_id"} <= value.keys()


def of_rows(rows: Iterable[Row]) -> Iterator[Told]:
    """The conversations of rows in any order, each where its first row stood in time."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if not is_row(row):
            raise NotUnderstood("a row of these logs has no prompt, response or conversation_id")
        groups.setdefault(str(row["conversation_id"] or row.get("id")), []).append(row)
    for name, group in groups.items():
        # Ids are ULIDs: they order what has the same time.
        group.sort(key=lambda row: (str(row.get("datetime_utc") or ""), str(row.get("id") or "")))
        yield _told(name, group)


def of_database(path: Path) -> Iterator[Told]:
    """The conversations of a `logs.db`. Raises NotUnderstood where it is none."""
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as conn:
            conn.row_factory = sqlite3.Row
            yield from of_rows(_rows(conn))
    except sqlite3.Error as error:
        raise NotUnderstood(f"its database cannot be read: {error}") from None


def _rows(conn: sqlite3.Connection) -> Iterator[Row]:
    tables = {row[0] for row in conn.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    has_old = {"responses", "conversations"} <= tables
    has_new = {"turns", "threads", "messages", "parts"} <= tables
    if not has_old and not has_new:
        raise NotUnderstood("this database holds no logs of llm")
    known: set[str] = set()
    if has_new:
        for row in _new_rows(conn, tables):
            known.add(row["id"])
            yield row
    if has_old:
        for row in _old_rows(conn, tables):
            if row["id"] not in known:  # for a while both were written
                yield row


def _old_rows(conn: sqlite3.Connection, tables: set[str]) -> Iterator[Row]:
    fragments = {
        name: _fragments(conn, name, tables) for name in ("prompt_fragments", "system_fragments")
    }
    attached = _counted(conn, "prompt_attachments", tables)
    calls = _calls(conn, tables)
    names = dict(conn.execute("SELECT id, name FROM conversations"))
    for found in conn.execute("SELECT * FROM responses ORDER BY rowid"):
        row = dict(found)
        name = row["id"]
        parts = [*fragments["prompt_fragments"].get(name, []), row.get("prompt") or ""]
        row["prompt"] = "\n".join(part for part in parts if part)
        parts = [*fragments["system_fragments"].get(name, []), row.get("system") or ""]
        row["system"] = "\n".join(part for part in parts if part)
        row["conversation_name"] = names.get(row["conversation_id"])
        row["attachments"] = [None] * attached.get(name, 0)
        row["tool_results"], row["tool_calls"] = calls[1].get(name, []), calls[0].get(name, [])
        yield row


def _new_rows(conn: sqlite3.Connection, tables: set[str]) -> Iterator[Row]:
    fragments: dict[Any, str] = {}
    if "fragments" in tables:
        fragments = dict(conn.execute("SELECT id, content FROM fragments"))
    names = dict(conn.execute("SELECT id, name FROM threads"))
    for turn in conn.execute("SELECT * FROM turns ORDER BY rowid").fetchall():
        row = {name: turn[name] for name in ("id", "model", "datetime_utc")}
        asked, system = _before(conn, turn["parent_message_hash"])
        made = _between(conn, turn["tip_message_hash"], turn["parent_message_hash"])
        left_out: Counter[str] = Counter()
        # What went back to the model of its tools stands before what was said besides.
        yield row | {
            "conversation_id": turn["thread_id"],
            "conversation_name": names.get(turn["thread_id"]),
            "prompt": _joined(conn, asked, fragments, left_out),
            "system": _joined(conn, system, fragments, left_out),
            "response": _joined(conn, made, fragments, left_out),
            "left_out": left_out,
        }


def _before(conn: sqlite3.Connection, hash: str | None) -> tuple[list[str], list[str]]:
    """The messages that one call brought, behind the last answer; and the system prompt, which is
    brought by the first call alone."""
    asked: list[str] = []
    while hash is not None:
        found = conn.execute(
            "SELECT role, parent_hash FROM messages WHERE hash = ?", (hash,)
        ).fetchone()
        if found is None or found["role"] == "assistant":
            return asked[::-1], []
        if found["role"] == "system":
            return asked[::-1], [hash]
        asked.append(hash)
        hash = found["parent_hash"]
    return asked[::-1], []


def _between(conn: sqlite3.Connection, tip: str | None, parent: str | None) -> list[str]:
    """The messages that one call made."""
    made: list[str] = []
    while tip is not None and tip != parent:
        made.append(tip)
        found = conn.execute("SELECT parent_hash FROM messages WHERE hash = ?", (tip,)).fetchone()
        tip = found["parent_hash"] if found is not None else None
    return made[::-1]


def _joined(
    conn: sqlite3.Connection, hashes: list[str], fragments: dict[Any, str], left_out: Counter[str]
) -> str:
    """The text of messages, what has no text noted in `left_out`."""
    texts = []
    for hash in hashes:
        query = "SELECT type, text, payload FROM parts WHERE message_hash = ? ORDER BY position"
        for part in conn.execute(query, (hash,)):
            about = json.loads(part["payload"]) if part["payload"] else {}
            text = part["text"]
            if text is None:
                text = about.get("text") or "".join(
                    piece.get("literal") or fragments.get(piece.get("fragment"), "")
                    for piece in about.get("text_ref") or []
                )
            if part["type"] == "text":
                texts.append(text)
            elif part["type"] == "tool_call":
                texts.append(_call(about.get("name"), about.get("arguments")))
            elif part["type"] == "tool_result":
                texts.append(_result(about.get("name"), about.get("output")))
            else:
                left_out["file" if part["type"] == "attachment" else str(part["type"])] += 1
    return "\n\n".join(text for text in texts if text)


def _told(name: str, rows: list[Row]) -> Told:
    first, turns = rows[0], list[ToldTurn]()
    for row in rows:
        left_out = Counter(row.get("left_out") or {})
        left_out["file"] += len(_list(row.get("attachments")))
        left_out["reasoning"] += bool(row.get("reasoning"))
        results = [
            _result(one.get("name"), one.get("output"))
            for one in _list(row.get("tool_results"))
            if isinstance(one, dict)
        ]
        calls = [
            _call(one.get("name"), one.get("arguments"))
            for one in _list(row.get("tool_calls"))
            if isinstance(one, dict)
        ]
        turns.append(
            ToldTurn(
                user="\n\n".join(text for text in (*results, row["prompt"] or "") if text),
                reply="\n\n".join(text for text in (row["response"] or "", *calls) if text),
                parent=len(turns) - 1 if turns else None,
                system=(row.get("system") or None) if not turns else None,
                is_whole=bool(row["response"] or calls),
                created_at=epoch_s(row.get("datetime_utc")),
                model=str(row.get("model") or ""),
                left_out=dict(+left_out),
            )
        )
    return Told(
        source=f"llm:{name}" if name != "None" else digest_of("llm", [r["prompt"] for r in rows]),
        turns=turns,
        title=str(first.get("conversation_name") or ""),
        model=turns[-1].model,
    )


def _call(name: Any, arguments: Any) -> str:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f"[to {name or 'a tool'}]\n{fenced(text)}"


def _result(name: Any, output: Any) -> str:
    text = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
    return f"[result of {name or 'a tool'}]\n{fenced(text)}"


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _fragments(conn: sqlite3.Connection, table: str, tables: set[str]) -> dict[str, list[str]]:
    """Response -> the texts that were put in front of what was typed."""
    found: dict[str, list[str]] = {}
    if {table, "fragments"} <= tables:
        for response, content in conn.execute(
            f"SELECT p.response_id, f.content FROM {table} p "
            'JOIN fragments f ON f.id = p.fragment_id ORDER BY p.response_id, p."order"'
        ):
            found.setdefault(response, []).append(content)
    return found


def _counted(conn: sqlite3.Connection, table: str, tables: set[str]) -> dict[str, int]:
    if table not in tables:
        return {}
    return dict(conn.execute(f"SELECT response_id, count(*) FROM {table} GROUP BY response_id"))


def _calls(
    conn: sqlite3.Connection, tables: set[str]
) -> tuple[dict[str, list[Row]], dict[str, list[Row]]]:
    """Response -> the tools that it called, and the results that it was given."""
    calls: dict[str, list[Row]] = {}
    results: dict[str, list[Row]] = {}
    for table, column, into in (
        ("tool_calls", "arguments", calls),
        ("tool_results", "output", results),
    ):
        if table in tables:
            query = f"SELECT response_id, name, {column} FROM {table} ORDER BY id"
            for response, name, value in conn.execute(query):
                into.setdefault(response, []).append({"name": name, column: value})
    return calls, results
