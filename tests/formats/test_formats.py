"""What readers make of files, and writers of conversations: no store, no model."""

from __future__ import annotations

import io
import json
import sqlite3
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from chatkv.formats import chatgpt, json_stream, llm_logs, markdown, messages, own_json
from chatkv.formats.files import conversations
from chatkv.formats.told import NotUnderstood, Told, messages_of, turns_of

ROLES = st.sampled_from(["user", "assistant", "tool"])
# Lines that look like our own headings, escaped or not, must come back like any other.
LINES = st.one_of(
    st.text(st.characters(exclude_categories=("Cs",)), max_size=20),
    st.sampled_from(
        ["## You", "\\## Assistant", "# user:", "## Assistant (interrupted)", "", "\r"]
    ),
)
TEXTS = st.lists(LINES, max_size=6).map("\n".join)


def said(told: Told) -> list[tuple[str, str, bool]]:
    return list(messages_of(told.as_values(0.0)))


@hypothesis.given(st.lists(st.tuples(ROLES, TEXTS), min_size=1, max_size=6), TEXTS)
def test_markdown_keeps_text_and_roles(spoken: list[tuple[str, str]], title: str) -> None:
    """What a conversation here can hold comes back to the character."""
    turns = turns_of([("system", "Be brief.\n", True), *[(*pair, True) for pair in spoken]])
    first = Told("x", turns, " ".join(title.split()))
    written = markdown.write(first.title, said(first))
    read = markdown.read(written)
    assert said(read) == said(first)
    assert read.title == first.title or first.title == "untitled"


def test_markdown_is_readable() -> None:
    told = Told("x", turns_of([("user", "Hi\n## You", True), ("assistant", "Hel", False)]), "T")
    text = markdown.write(told.title, said(told), "SmolLM2", 1.7e9)
    assert text == (
        "# T\n\n<!-- chatkv: model SmolLM2; 2023-11-14 22:13 UTC -->\n\n"
        "## You\n\nHi\n\\## You\n\n## Assistant (interrupted)\n\nHel\n"
    )
    assert said(markdown.read(text)) == [("user", "Hi\n## You", True), ("assistant", "Hel", False)]


def test_markdown_of_others_and_of_windows() -> None:
    text = "# Trip\n\n### User:\nWhen?\n### ChatGPT\nSoon.\n\nReally.".replace("\n", "\r\n")
    told = markdown.read("\ufeff" + text)
    assert (told.title, said(told)) == (
        "Trip",
        [("user", "When?", True), ("assistant", "Soon.\n\nReally.", True)],
    )
    with pytest.raises(NotUnderstood, match="nobody says"):
        markdown.read("Some notes\n\n## You\n\nHi")


def test_messages_become_turns_and_none_is_lost() -> None:
    given: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be kind."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "What is this?"}, {"type": "image_url"}],
        },
        {"role": "user", "content": "Are you there?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "look", "arguments": '{"at": "sky"}'}}],
        },
        {"role": "tool", "content": "blue"},
        {"role": "assistant", "content": "Blue."},
        {"role": "assistant", "content": "Very."},
        {"role": "user", "content": "Thanks 🌊"},
    ]
    told = messages.read(given)
    assert told.left_out == {"image": 1}
    assert [(turn.user, turn.reply, turn.is_whole) for turn in told.turns] == [
        ("What is this?\n[image]", "", False),
        ("Are you there?", '[to look]\n```\n{"at": "sky"}\n```', True),
        ("blue", "Blue.\n\nVery.", True),
        ("Thanks 🌊", "", False),
    ]
    assert told.turns[0].system == "Be kind." and told.turns[2].said[0]["role"] == "tool"
    assert [turn.parent for turn in told.turns] == [None, 0, 1, 2]
    assert messages.read(json.loads(messages.write(said(told)))).turns[3].user == "Thanks 🌊"


# --- ChatGPT --------------------------------------------------------------------------------------


def node(
    name: str, parent: str | None, role: str = "", text: Any = "", **more: Any
) -> dict[str, Any]:
    """A node of `mapping`; its children are found by `tree`."""
    message: dict[str, Any] | None = None
    if role:
        content = text if isinstance(text, dict) else {"content_type": "text", "parts": [text]}
        message = {"author": {"role": role}, "content": content, "status": "finished_successfully"}
        message |= more
    return {"id": name, "parent": parent, "message": message, "children": []}


def tree(*nodes: dict[str, Any], current: str, **more: Any) -> dict[str, Any]:
    mapping = {one["id"]: one for one in nodes}
    for one in nodes:
        if one["parent"] is not None:
            mapping[one["parent"]]["children"].append(one["id"])
    return {
        "conversation_id": "c-1",
        "title": "Sea",
        "mapping": mapping,
        "current_node": current,
    } | more


def test_chatgpt_keeps_branches_and_where_one_was() -> None:
    export = tree(
        node("root", None),
        node("sys", "root", "system", ""),
        node("q", "sys", "user", "Why is it salty?", create_time=1.7e9),
        node("a1", "q", "assistant", "Rivers.", metadata={"model_slug": "gpt-4o"}),
        node("a2", "q", "assistant", "Salt from rocks."),
        node("q2", "a1", "user", "Which?"),
        node("b", "q2", "assistant", "All."),
        node("q3", "a1", "user", "Since when?"),
        current="b",
        create_time=1.6e9,
    )
    told = chatgpt.read(export)
    found = [(turn.user, turn.reply, turn.parent) for turn in told.turns]
    assert found == [
        ("Why is it salty?", "Rivers.", None),
        ("Which?", "All.", 0),
        ("Since when?", "", 0),
        ("Why is it salty?", "Salt from rocks.", None),
    ]
    assert (told.source, told.title, told.model, told.head) == ("chatgpt:c-1", "Sea", "gpt-4o", 1)
    values = told.as_values(0.0)
    assert [turn["created_at"] for turn in values["turns"]] == [1.7e9, 1.6e9, 1.6e9, 1.7e9]
    assert [text for _, text, _ in messages_of(values)] == [
        "Why is it salty?",
        "Rivers.",
        "Which?",
        "All.",
    ]


def test_chatgpt_tools_pictures_and_strangers_are_kept_or_told() -> None:
    about_me = {
        "content_type": "user_editable_context",
        "user_profile": "I sail.",
        "user_instructions": "Be brief.",
    }
    picture = {
        "content_type": "multimodal_text",
        "parts": [
            {"content_type": "image_asset_pointer", "asset_pointer": "file-service://file-7"},
            "What is this?",
        ],
    }
    files = {"attachments": [{"id": "file-7", "name": "a.png"}, {"id": "f8", "name": "b.pdf"}]}
    export = tree(
        node("me", None, "user", about_me, metadata={"is_visually_hidden_from_conversation": True}),
        node("q", "me", "user", picture, metadata=files),
        node("t", "q", "assistant", {"content_type": "thoughts", "thoughts": [{"content": "Hm"}]}),
        node("c", "t", "assistant", {"content_type": "code", "text": "1+1"}, recipient="python"),
        node("r", "c", "tool", {"content_type": "execution_output", "text": "2 ```"}),
        node("n", "r", "assistant", {"content_type": "hologram", "data": 1}),
        node("a", "n", "assistant", "A boat."),
        current="a",
    )
    export["mapping"]["r"]["message"]["author"]["name"] = "python"
    told = chatgpt.read(export)
    (turn,) = told.turns
    assert turn.system == "I sail.\n\nBe brief."
    assert turn.user == "[image file-7]\nWhat is this?\n[file b.pdf]"
    assert turn.reply == (
        "[to python]\n```\n1+1\n```\n\n[result of python]\n````\n2 ```\n````\n\n"
        "[hologram]\n\nA boat."
    )
    assert told.left_out == {"image": 1, "file": 1, "reasoning": 1, "hologram": 1}


@pytest.mark.slow
def test_a_long_chatgpt_conversation_takes_time_in_proportion(tmp_path: Path) -> None:
    nodes = [node("0", None)]
    for number in range(1, 20_001):
        role = "user" if number % 2 else "assistant"
        nodes.append(node(str(number), str(number - 1), role, f"message {number} 🌊"))
    path = tmp_path / "conversations.json"
    path.write_text(json.dumps([tree(*nodes, current="20000")]))
    (found,) = conversations(path)
    turns = found.values(0.0)["turns"]
    assert len(turns) == 10_000 and turns[-1]["reply"] == "message 20000 🌊"


# --- llm ------------------------------------------------------------------------------------------


def old_logs(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.executescript(
            """CREATE TABLE conversations (id TEXT PRIMARY KEY, name TEXT, model TEXT);
            CREATE TABLE responses (id TEXT PRIMARY KEY, model TEXT, prompt TEXT, system TEXT,
                prompt_json TEXT, options_json TEXT, response TEXT, response_json TEXT,
                conversation_id TEXT, duration_ms INTEGER, datetime_utc TEXT);
            CREATE TABLE fragments (id INTEGER PRIMARY KEY, content TEXT);
            CREATE TABLE prompt_fragments (response_id TEXT, fragment_id INTEGER, "order" INTEGER);
            CREATE TABLE prompt_attachments (response_id TEXT, attachment_id TEXT);
            INSERT INTO conversations VALUES ('c1', 'Rivers', 'm'), ('c2', NULL, 'm');
            INSERT INTO fragments VALUES (1, 'A long text.');
            INSERT INTO prompt_fragments VALUES ('r1', 1, 0);
            INSERT INTO prompt_attachments VALUES ('r2', 'x');"""
        )
        rows = [
            ("r2", "m", "And more?", None, "The Po.", "c1", "2024-05-01T10:00:05+00:00"),
            ("r1", "m", "Name a river.", "Be brief.", "The Elbe 🏞", "c1", "2024-05-01T10:00:00"),
            ("r3", "n", "Hi", None, "", "c2", None),
        ]
        db.executemany(
            "INSERT INTO responses (id, model, prompt, system, response, conversation_id, "
            "datetime_utc) VALUES (?, ?, ?, ?, ?, ?, ?)",
            rows,
        )


def test_llm_logs_of_older_versions(tmp_path: Path) -> None:
    old_logs(tmp_path / "logs.db")
    first, second = llm_logs.of_database(tmp_path / "logs.db")
    assert (first.source, first.title, first.model) == ("llm:c1", "Rivers", "m")
    assert [(turn.user, turn.reply) for turn in first.turns] == [
        ("A long text.\nName a river.", "The Elbe 🏞"),
        ("And more?", "The Po."),
    ]
    assert first.turns[0].system == "Be brief." and first.turns[0].created_at == 1714557600.0
    assert first.left_out == {"file": 1}
    assert not second.turns[0].is_whole and second.turns[0].created_at is None


def test_llm_logs_of_newer_versions(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "logs.db") as db:
        db.executescript(
            """CREATE TABLE messages (hash TEXT PRIMARY KEY, parent_hash TEXT, role TEXT);
            CREATE TABLE parts (id INTEGER PRIMARY KEY, message_hash TEXT, position INTEGER,
                type TEXT, tool_name TEXT, text TEXT, payload TEXT);
            CREATE TABLE threads (id TEXT PRIMARY KEY, name TEXT, tip_message_hash TEXT);
            CREATE TABLE turns (id TEXT PRIMARY KEY, thread_id TEXT, parent_message_hash TEXT,
                tip_message_hash TEXT, model TEXT, datetime_utc TEXT);
            CREATE TABLE fragments (id INTEGER PRIMARY KEY, content TEXT);
            INSERT INTO fragments VALUES (4, 'the whole text');
            INSERT INTO threads VALUES ('t', 'Tides', 'e');
            INSERT INTO messages VALUES ('s', NULL, 'system'), ('a', 's', 'user'),
                ('b', 'a', 'assistant'), ('c', 'b', 'tool'), ('d', 'c', 'user'),
                ('e', 'd', 'assistant');
            INSERT INTO parts (message_hash, position, type, text, payload) VALUES
                ('s', 0, 'text', 'Be brief.', NULL),
                ('a', 0, 'text', NULL, '{"text_ref": [{"literal": "Read "}, {"fragment": 4}]}'),
                ('a', 1, 'attachment', NULL, '{"attachment_id": "x"}'),
                ('b', 0, 'reasoning', 'Hm', NULL),
                ('b', 1, 'tool_call', NULL, '{"name": "moon", "arguments": {"day": 1}}'),
                ('c', 0, 'tool_result', NULL, '{"name": "moon", "output": "full"}'),
                ('d', 0, 'text', 'So?', NULL),
                ('e', 0, 'text', 'High water.', NULL);
            INSERT INTO turns VALUES ('1', 't', 'a', 'b', 'm', '2026-05-01T10:00:00'),
                ('2', 't', 'd', 'e', 'm', '2026-05-01T10:00:09');"""
        )
    (told,) = llm_logs.of_database(tmp_path / "logs.db")
    assert [(turn.user, turn.reply) for turn in told.turns] == [
        ("Read the whole text", '[to moon]\n```\n{"day": 1}\n```'),
        ("[result of moon]\n```\nfull\n```\n\nSo?", "High water."),
    ]
    assert told.turns[0].system == "Be brief." and told.turns[1].system is None
    assert told.left_out == {"file": 1, "reasoning": 1} and told.title == "Tides"


# --- files ----------------------------------------------------------------------------------------


def test_every_kind_of_file_is_known_by_what_is_in_it(tmp_path: Path) -> None:
    chat = tree(node("q", None, "user", "Hi"), current="q")
    own = {"format": "chatkv-conversation", "turns": [{"user": "Hi", "reply": "Hello"}]}
    row = {"id": "1", "conversation_id": "c", "prompt": "Hi", "response": "Hello"}
    listed = [{"role": "user", "content": "Hi"}]
    texts = {
        "a.md": "\n# T\n\n## You\n\nHi\n",
        "chatgpt.json": json.dumps([chat, chat | {"conversation_id": "d"}]),
        "one.json": json.dumps(chat),
        "own.json": "\ufeff" + json.dumps(own, indent=2),
        "own.jsonl": f"{json.dumps(own)}\n{json.dumps(own)}\n",
        "llm.json": json.dumps([row]),
        "listed.json": json.dumps(listed),
        "set.jsonl": json.dumps({"messages": listed}) + "\n" + json.dumps({"messages": listed}),
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    with zipfile.ZipFile(tmp_path / "export.zip", "w") as archive:
        archive.writestr("export/conversations-000.json", json.dumps([chat]))
        archive.writestr("export/conversations-001.json", json.dumps([chat]))
        archive.writestr("export/shared_conversations.json", "[]")
    old_logs(tmp_path / "logs.db")
    counted = {path.name: len(list(conversations(path))) for path in tmp_path.iterdir()}
    assert counted == {
        "a.md": 1,
        "chatgpt.json": 2,
        "one.json": 1,
        "own.json": 1,
        "own.jsonl": 2,
        "llm.json": 1,
        "listed.json": 1,
        "set.jsonl": 2,
        "export.zip": 2,
        "logs.db": 2,
    }
    for path in tmp_path.iterdir():
        for found in conversations(path):
            assert found.values(0.0)["turns"][0]["user"].endswith(("Hi", "Name a river."))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no heading"),
        (b"just some notes", "nobody says"),
        (b"\x89PNG\r\n\x1a\n\0\0", "UTF-8"),
        (b"[]", "no conversation in it"),
        (b'{"some": "thing"}', "none of the files"),
        (b'[{"mapping": {"a": {}}}, ', "cut short"),
        (b'{"mapping": {"a": nonsense}}' + b" " * 99, "damaged near"),
        (b"[" * 100_000, "nested too deeply"),
        (b"PK\x03\x04 no zip at all", "zip"),
        (b"SQLite format 3\0" + b"x" * 99, "cannot be read"),
    ],
)
def test_what_is_not_understood_is_refused_with_a_reason(
    content: bytes, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(NotUnderstood, match=says):
        list(conversations(path))


def test_a_conversation_that_makes_no_sense_is_told_in_its_place(tmp_path: Path) -> None:
    good = tree(node("q", None, "user", "Hi"), current="q")
    bad = [
        {"mapping": {"a": {"parent": []}}, "title": "B"},
        {"mapping": {"a": 3}},
        7,
        {"mapping": {}},
    ]
    path = tmp_path / "conversations.json"
    path.write_text(json.dumps([good, *bad, good]))
    found = list(conversations(path))
    assert [bool(one.refusal) for one in found] == [False, True, True, True, False, False]
    assert found[1].title == "B" and found[4].is_empty


@pytest.mark.parametrize("chunk_chars", [1, 7, 1000])
def test_json_is_read_alike_in_pieces_of_any_size(chunk_chars: int) -> None:
    values = [{"a": 'é\\u00e9\n🌊 "q" ]['}, [1, [2]], "text", -12.5e3, None, True, {}]
    for text in (
        json.dumps(values),
        "\n".join(map(json.dumps, values)),
        json.dumps(values, indent=1),
    ):
        assert list(json_stream.values(io.StringIO(text), chunk_chars)) == values


def test_a_large_file_is_not_held_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "conversations.json"
    one = json.dumps(tree(node("q", None, "user", "word " * 20_000), current="q"))
    path.write_text("[" + ",".join([one] * 300) + "]")  # 30 MB
    tracemalloc.start()
    try:
        num_chars = sum(len(found.values(0.0)["turns"][0]["user"]) for found in conversations(path))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert num_chars == 300 * 100_000 and peak < 15e6


def test_own_json_by_hand_and_without_its_ids() -> None:
    whole = own_json.whole(
        {"turns": [{"user": "Hi"}], "settings": {"tokenizer": "t", "seed": 3}, "namespace": "ab"},
        5.0,
    )
    assert whole["settings"]["seed"] == 3 and "tokenizer" not in whole["settings"]
    assert whole["namespace"] is None and whole["created_at"] == 5.0
    assert whole["settings"]["source"].startswith("json:")
    with_ids = {"session": "s", "settings": {"tokenizer": "t"}, "turns": [{"prompt_ids": [1]}]}
    kept = own_json.whole(with_ids, 5.0)
    assert kept["settings"] == {"tokenizer": "t", "source": "chatkv:s"}
    assert "prompt_ids" not in own_json.without_ids(kept)["turns"][0]
