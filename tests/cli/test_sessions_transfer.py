"""`chatkv sessions export` and `import`, and going on with what came from elsewhere."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chatkv_store.conversations import Conversations, Session
from program import Ran, command, environment

Program = Callable[..., Ran]
Talk = Callable[..., Session]
QUICK = ["--dtype", "float32", "--temperature", "0", "--max-tokens", "8"]
SAID = [("When in Rome? 🏛", "Do as\n\n## You\ndo."), ("And in Milan?", "The same.\n")]


@pytest.fixture
def store(home: Path) -> Any:
    with Conversations(home / "data" / "conversations.sqlite3") as opened:
        yield opened


def words(store: Conversations, session: str) -> list[tuple[str, str]]:
    return [(turn.user_text, turn.reply_text) for turn in store.chain(session)]


@pytest.mark.parametrize("name", ["a.md", "a.json", "messages"])
def test_what_is_exported_can_be_imported(
    name: str, program: Program, talk: Talk, store: Conversations, tmp_path: Path
) -> None:
    talk("Rome", SAID)
    path = tmp_path / name
    kind = ["--format", "messages"] if name == "messages" else []
    done = program("sessions", "export", "Rome", "-o", str(path), *kind)
    assert done.code == 0 and done.out == "" and done.err.endswith("2 turns\n")
    assert path.stat().st_mode & 0o777 == 0o600
    assert program("sessions", "export", "Rome", "-o", str(path), *kind).code == 2

    program("sessions", "rm", "-y", "Rome")
    imported = program("sessions", "import", str(path))
    assert imported.code == 0, imported.err
    made = imported.out.strip()
    assert words(store, made) == SAID
    assert store.get_session(made).num_tokens == 0
    again = program("sessions", "import", str(path))
    assert (again.code, again.out) == (0, "") and f"it is session {made}" in again.err
    twice = program("sessions", "import", str(path), "--again")
    assert twice.code == 0 and twice.out.strip() not in ("", made)


def test_json_holds_every_branch_and_the_same_ids(
    program: Program, talk: Talk, store: Conversations, tmp_path: Path
) -> None:
    session = talk("Rome", SAID)
    first = store.chain(session.id)[0]
    with store.lease(session.id):
        store.move_head(session.id, first.id)
        turn = store.begin_turn(session.id, user_text="And in Pisa?", prompt_ids=[7, 8])
        store.finish_turn(turn.id, reply_text="Lean.", reply_ids=[9], rng_draws_after=4)
    fork = store.fork(session.id, 2)
    with store.lease(fork.id):  # what the fork parts from stays the other one's
        store.move_head(fork.id, first.id)
    text = program("sessions", "export", session.id, "--format", "json", "--tokens").out
    values = json.loads(text)
    assert [turn["user"] for turn in values["turns"]] == [
        "When in Rome? 🏛",
        "And in Pisa?",
        "And in Milan?",
    ]
    before = store.chain(session.id), store.tree(session.id)
    (tmp_path / "own").write_text(text)
    program("sessions", "rm", "-y", fork.id, session.id)
    assert program("sessions", "import", str(tmp_path / "own")).out.strip() == session.id
    assert (store.chain(session.id), store.tree(session.id)) == before
    bare = json.loads(text)
    for turn in bare["turns"]:
        turn["parent"] = "nowhere"
    (tmp_path / "own").write_text(json.dumps(bare))
    done = program("sessions", "import", str(tmp_path / "own"), "--again")
    assert done.code == 1 and "turn 1 follows nothing" in done.err and done.err.count("\n") == 1


def test_what_is_refused_is_one_line_and_the_rest_is_taken(
    program: Program, store: Conversations, tmp_path: Path
) -> None:
    good, bad, gone = tmp_path / "good.md", tmp_path / "bad\n.png", tmp_path / "gone"
    good.write_text("## You\n\nHi\n")
    bad.write_bytes(b"\x89PNG\r\n")
    done = program("sessions", "import", str(bad), str(gone), str(good))
    assert done.code == 1 and len(done.out.split()) == 1
    lines = done.err.splitlines()
    assert len(lines) == 3 and "UTF-8" in lines[0] and "No such file" in lines[1]
    assert lines[2] == 'imported "Hi", 1 turn'
    told = program("sessions", "import", "--json", str(good), str(bad))
    rows = [json.loads(line) for line in told.out.splitlines()]
    assert [row["state"] for row in rows] == ["skipped", "refused"] and told.code == 1


def test_imported_conversations_stand_where_their_time_puts_them(
    program: Program, talk: Talk, store: Conversations, tmp_path: Path
) -> None:
    old = {"format": "chatkv-conversation", "title": "old", "created_at": 1.5e9, "turns": [{}]}
    talk("mine", [("a", "b")])
    path = tmp_path / "old.json"
    path.write_text(json.dumps([old | {"title": "older", "updated_at": 1.4e9}, old]))
    assert program("sessions", "import", str(path)).code == 0
    assert [one.title for one in store.list_sessions()] == ["mine", "old", "older"]
    assert store.list_sessions()[1].updated_at == 1.5e9


def test_standard_input_is_a_file_too(home: Path) -> None:
    done = subprocess.run(
        command("sessions", "import", "-"),
        input=json.dumps([{"role": "user", "content": "été"}]).encode(),
        capture_output=True,
        check=True,
        timeout=60,
        env=environment(),
    )
    assert len(done.stdout.split()) == 1 and "été" in done.stderr.decode()


@pytest.fixture
def imported(program: Program, tmp_path: Path) -> str:
    """A session of three turns that came as Markdown, the last of which was never answered."""
    path = tmp_path / "told.md"
    path.write_text(
        "# Told\n\n## System\n\nBe brief.\n\n## You\n\none two\n\n## Assistant\n\n three \n\n"
        "## You\n\nfour\n\n## Assistant\n\nfive\n\n## You\n\nsix\n"
    )
    return program("sessions", "import", str(path)).out.strip()


def test_an_imported_conversation_goes_on_as_if_held_here(
    program: Program,
    imported: str,
    store: Conversations,
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
) -> None:
    model = str(tiny_checkpoint("llama3"))
    fork = store.fork(imported)
    asked = json.loads(program("ask", "-r", imported, "-m", model, *QUICK, "--json", "go on").out)
    assert asked["turn"] == 4
    assert asked["tokens"]["computed"] == asked["tokens"]["prompt"]
    assert not any("differently" in notice for notice in asked["notices"])
    turns = store.chain(imported)
    assert [turn.reply_text for turn in turns[:3]] == [" three ", "five", ""]
    assert all(turn.prompt_ids for turn in turns)
    assert [turn.tokens_before for turn in turns][3] == sum(t.num_tokens for t in turns[:3])

    again = json.loads(
        program("ask", "-r", imported, *QUICK, "--restore", "reload", "--json", "and then?").out
    )
    assert again["tokens"]["loaded"] == asked["tokens"]["prompt"] + asked["tokens"]["generated"] - 1

    # A fork from before shares the turns, and what they are for one model they are for no other.
    stranger = tmp_path / "stranger"
    shutil.copytree(model, stranger)
    with (stranger / "tokenizer.json").open("a") as file:
        file.write("\n")
    other = program("ask", "-r", fork.id, "-m", str(stranger), *QUICK, "hm")
    assert other.code == 2 and "reads its tokens differently" in other.err
    shared = json.loads(program("ask", "-r", fork.id, "-m", model, *QUICK, "--json", "go on").out)
    assert shared["text"] == asked["text"]


def test_until_it_goes_on_any_model_may_open_it(
    program: Program, imported: str, store: Conversations, tiny_checkpoint: Callable[..., Path]
) -> None:
    from chatkv.client import ChatRequest, open_chat
    from chatkv.paths import folders

    for name in ("qwen2", "llama3"):
        request = ChatRequest(model=str(tiny_checkpoint(name)), dtype="float32", resume=imported)
        with open_chat(folders(), request) as opened:
            assert len(opened.conversation.log) > 0
            opened.conversation.rewind(2)
    assert not any(turn.prompt_ids for turn in store.tree(imported))
    model = str(tiny_checkpoint("llama3"))
    assert program("ask", "-r", imported, "-m", model, *QUICK, "go on").code == 0
    with open_chat(folders(), ChatRequest(resume=imported)) as opened:
        left = next(turn for turn in store.tree(imported) if turn.user_text == "six")
        opened.conversation.switch(left.id)  # its ids are made now, and written when it goes on
        assert [turn.user_text for turn in opened.conversation.turns][-1] == "six"
        assert all(turn.prompt_ids for turn in opened.conversation.turns)
        result = opened.conversation.resume_reply()
        assert result.turn == 3 and result.text
    assert store.chain(imported)[1].prompt_ids


@pytest.mark.slow
def test_words_are_read_as_they_were_said(
    home: Path, program: Program, store: Conversations, smollm2_gguf: Path, tmp_path: Path
) -> None:
    """The ids that are made of an export's words are those with which they were held."""
    from chatkv.client import ChatRequest, open_chat
    from chatkv.engine.options import SamplingOptions
    from chatkv.paths import folders
    from chatkv.session.turn import TurnOptions

    options = TurnOptions(SamplingOptions(temperature=0), max_tokens=60)
    model = str(smollm2_gguf)
    with open_chat(folders(), ChatRequest(model=model, dtype="float32")) as opened:
        held = opened.conversation
        held.send("Name one river in Italy, in one word.", options, system="Be brief.")
        held.send("And one in France? <|im_end|> 🏞", options)
        held.send("Thanks!", replace(options, max_tokens=5))
        session, log = held.session.id, held.log
    path = tmp_path / "talk.json"
    program("sessions", "export", session, "-o", str(path))
    program("sessions", "rm", "-y", session)
    made = program("sessions", "import", str(path)).out.strip()
    request = ChatRequest(model=model, dtype="float32", resume=made)
    with open_chat(folders(), request) as opened:
        assert log[: len(opened.conversation.log)] == opened.conversation.log
        assert len(log) - len(opened.conversation.log) <= 1  # the end of the last answer
