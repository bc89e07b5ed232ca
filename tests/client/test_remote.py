"""A conversation in the engine's process, which may end at any time."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chatkv.client import ChatRequest, connect, engine
from chatkv.client.chat import LocalChat
from chatkv.client.link import EngineGone
from chatkv.client.remote import RemoteChat
from chatkv.errors import ModelError
from chatkv.paths import folders
from chatkv.session.turn import Listener
from chatkv_store.conversations import Conversations
from engines import Forked, chat_with, end, greedy, kill, running_engine
from program import command, environment
from turns import run_turns

QUIET = Listener()
REAL_SPAWN = engine._spawn


@pytest.fixture(autouse=True)
def _engine_allowed(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines that are started are forked, which is quicker, but where a test says otherwise."""
    monkeypatch.delenv("CHATKV_ENGINE")
    monkeypatch.setattr(engine, "_spawn", Forked)
    yield
    end(folders())


def alone(*arguments: Any, **options: Any) -> Any:
    """What an embedded runtime that has stored nothing yet would say."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as home:
        patch.setenv("CHATKV_ENGINE", "off")
        patch.setenv("CHATKV_HOME", home)
        return run_turns(*arguments, dtype="float32", **options)


def chain(session: str) -> Any:
    with Conversations(folders().conversations) as conversations:
        conversations.recover()
        return conversations.chain(session)


class KillAfter:
    """kill -9 the engine once so many characters were heard."""

    def __init__(self, count: int) -> None:
        self.text, self._count = "", count

    def __call__(self, text: str) -> None:
        self.text += text
        if len(self.text) >= self._count:
            kill(folders())


def test_a_conversation_is_what_it_is_in_one_process(model: str) -> None:
    texts = ["Tell me of the sea. " * 8, "And then?", "Why?"]
    with running_engine(), chat_with(model) as chat:
        assert isinstance(chat, RemoteChat) and not chat.is_resumed
        results = [chat.send(text, greedy(16), QUIET, None) for text in texts]
        assert [turn.reply for turn in chat.turns] == [result.text for result in results]
        assert chat.num_tokens == len(_log(chat.session))
        with chat_with(None, resume=chat.session) as again:
            assert again.is_resumed and again.turns == chat.turns
            assert again.num_tokens == chat.num_tokens
    expected = alone(texts, model=model, max_tokens=16)
    assert [result.text for result in results] == [turn["text"] for turn in expected]


def _log(session: str) -> Any:
    with Conversations(folders().conversations) as conversations:
        return conversations.token_log(session)


def test_drafts_and_restores_are_made_use_of(model: str) -> None:
    draft = "Tell me a story about the sea, a ship and its captain. " * 6
    with running_engine():
        with chat_with(model) as chat:
            cached = chat.draft(draft, None)
            assert chat.draft(draft + "And of the cat", None) > cached > 100
            result = chat.send(draft + "And of the cat?", greedy(4), QUIET)
            assert result.tokens.reused > cached
        kill(folders())
    with running_engine(), chat_with(None, resume=result.session) as chat:
        ready = chat.restore()
        assert ready.cached == chat.num_tokens and ready.loaded + ready.computed > 100
        assert chat.restore().reused == chat.num_tokens


def test_a_newer_draft_ends_the_older_one_and_a_turn_both(slow_model: str) -> None:
    text = "Tell me a story about the sea, a ship and its captain. " * 100
    with running_engine(), chat_with(slow_model) as chat:
        made: dict[str, int] = {}
        started = threading.Barrier(2)

        def draft(name: str, text: str) -> None:
            with chat_with(None, resume=chat.session) as other:
                started.wait()
                made[name] = other.draft(text, None)

        older = threading.Thread(target=draft, args=("older", text))
        older.start()
        started.wait()
        newer = chat.draft("hi there, how are you doing today, my friend", None)
        result = chat.send("hi there, how are you", greedy(2), QUIET)
        older.join()
        assert result.turn == 1 and newer < 100
        assert made["older"] < 1500  # of 3000


def test_an_engine_that_dies_in_an_answer_costs_a_line(slow_model: str) -> None:
    """In the first turn, when nobody else knows the session yet; the next one starts another."""
    with running_engine(), chat_with(slow_model) as chat:
        heard = KillAfter(60)
        with pytest.raises(EngineGone) as caught:
            chat.send("Go.", greedy(2000), Listener(on_text=heard))
        assert "go on" in str(caught.value) and "\n" not in str(caught.value)
        (turn,) = chain(chat.session)
        assert turn.state == "interrupted" and turn.user_text == "Go."
        assert heard.text.startswith(turn.reply_text)
        result = chat.resume_reply(greedy(8), QUIET)  # starts another engine
        assert result.session == chat.session and result.turn == 1
        assert result.text.startswith(turn.reply_text)
        ids = list(chain(chat.session)[0].reply_ids)
    expected = alone(["Go."], model=slow_model, max_tokens=len(ids))
    assert expected[0]["reply_ids"] == ids


def test_a_system_prompt_is_said_once_also_where_the_engine_dies(slow_model: str) -> None:
    with running_engine(), chat_with(slow_model) as chat:
        with pytest.raises(EngineGone):
            chat.send("Go.", greedy(2000), Listener(on_text=KillAfter(10)), "Be brief.")
        assert chat.send("Go on.", greedy(2), QUIET, "Be brief.").turn == 2
        assert [turn.system for turn in chat.turns] == ["Be brief.", None]


def test_an_engine_that_dies_between_turns_is_not_noticed(model: str) -> None:
    with running_engine(), chat_with(model) as chat:
        unsaid = chat.session
        kill(folders())
        first = chat.send("hi", greedy(4), QUIET)  # a new engine, and a session of the same kind
        assert first.session == chat.session != unsaid
        engine.stop(folders())
        assert chat.send("And?", greedy(4), QUIET).turn == 2
        engine.stop(folders())
        assert chat.draft("And so", None) > 0
        engine.stop(folders())
        chat.rewind(1)
        assert [turn.user for turn in chat.turns] == ["hi"]


@pytest.mark.slow
def test_two_faces_at_the_same_instant_start_one() -> None:
    code = (
        "from chatkv.client import engine; from chatkv.paths import folders;"
        "print(engine.start(folders()).call('GET', '/status')['pid'])"
    )
    faces = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment(), text=True
        )
        for _ in range(3)
    ]
    pids = {face.communicate(timeout=120)[0] for face in faces}
    assert len(pids) == 1 and int(pids.pop()) == engine._holder(folders())


def test_paths_of_the_face_are_found_by_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    shutil.copytree(model, tmp_path / "here")
    monkeypatch.chdir(tmp_path)
    with running_engine(), chat_with("here") as chat:
        assert chat.send("hi", greedy(2), QUIET).model == "here"


def test_a_model_that_cannot_be_loaded_is_an_error_of_the_face(model: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with running_engine() as link:
        with pytest.raises(ModelError, match="empty"), chat_with(str(empty)):
            pass
        with chat_with(model) as chat:
            assert chat.send("hi", greedy(2), QUIET).turn == 1
        assert len(link.call("GET", "/status")["models"]) == 1


def test_a_chat_computes_by_itself_where_no_engine_can_be(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_spawn", REAL_SPAWN)
    folders().make().socket.mkdir()
    with connect(folders(), ChatRequest(model, "float32"), where="start") as chat:
        assert isinstance(chat, LocalChat)
        (notice,) = chat.notices
        assert "computes by itself" in notice and "engine.sock" in notice and "\n" not in notice
        assert chat.send("hi", greedy(2), QUIET).turn == 1


@pytest.mark.slow
def test_ask_uses_the_engine_that_runs_and_starts_none(model: str) -> None:
    def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command("ask", "--dtype", "float32", "--max-tokens", "4", *arguments),
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            env=environment(),
        )

    with running_engine() as link:
        done = ask("-m", model, "hi")
        assert done.returncode == 0 and done.stdout
        assert len(link.call("GET", "/status")["open_sessions"]) == 1
    done = ask("-c", "more")
    assert done.returncode == 0 and engine._holder(folders()) is None


@pytest.mark.parametrize("change", ["rm", "forget", "rename"])
def test_a_session_that_the_engine_holds_can_be_changed(
    model: str, change: str, program: Callable[..., Any]
) -> None:
    with running_engine() as link, chat_with(model) as chat:
        chat.send("Tell me of the sea. " * 20, greedy(4), QUIET)
        arguments = ["new title"] if change == "rename" else ["-y"]
        done = program("sessions", change, chat.session, *arguments)
        assert (done.code, done.err.count("\n")) == (0, 1)
        if change == "rename":
            with chat_with(None, resume="new title") as again:
                assert again.session == chat.session and again.title == "new title"
            return
        assert link.call("GET", "/status")["open_sessions"] == []
        assert link.call("GET", "/status")["models"][0]["kv_tokens"]["idle"] == 0
        assert program("sessions", "ls", "-q").out == ""
        used = program("cache", "verify", "--json").out
        assert ('"blocks": 0' in used) is (change == "forget")


@pytest.mark.parametrize("arguments", [("cache", "compact"), ("encrypt", "on", "-y")])
def test_what_needs_the_store_alone_ends_an_idle_engine(
    model: str,
    arguments: tuple[str, ...],
    program: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = tmp_path / "key"
    key.write_text("a passphrase of some length")
    key.chmod(0o600)
    monkeypatch.setenv("CHATKV_KEY_FILE", str(key))
    with running_engine(), chat_with(model) as chat:
        chat.send("hi", greedy(2), QUIET)
        done = program(*arguments)
        assert done.code == 0, done.err
        assert engine._holder(folders()) is None
        assert chat.send("And?", greedy(2), QUIET).turn == 2  # by another one


@pytest.mark.slow
def test_the_cache_can_be_cleared_under_an_engine(model: str, program: Callable[..., Any]) -> None:
    with running_engine(), chat_with(model) as chat:
        for text in ("Tell me of the sea. " * 20, "And then?"):
            chat.send(text, greedy(4), QUIET)
            assert program("cache", "rm", chat.session, "-y").code == 0
            assert program("cache", "clear", "-y").code == 0
        expected = chat.send("Why?", greedy(8), QUIET).text
        engine.stop(folders())
        assert program("cache", "verify").code == 0
        chat.rewind(2)  # by an engine that finds what is left of the KV
        assert chat.send("Why?", greedy(8), QUIET).text == expected


@pytest.mark.slow
def test_a_real_model_goes_on_where_the_engine_was_killed(
    smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first face to start an engine on: all of it is as users have it."""
    monkeypatch.setattr(engine, "_spawn", REAL_SPAWN)
    model, request = str(smollm2_gguf), ChatRequest(str(smollm2_gguf), "float32", seed=7)
    with connect(folders(), request, where="start") as chat:
        assert isinstance(chat, RemoteChat)
        with pytest.raises(EngineGone):
            chat.send("Tell me of the sea.", greedy(48), Listener(on_text=KillAfter(60)))
        made = len(chain(chat.session)[0].reply_ids)
        result = chat.resume_reply(greedy(48 - made), QUIET)
        assert result.turn == 1
        ids = list(chain(chat.session)[0].reply_ids)
    (expected,) = alone(["Tell me of the sea."], model=model, max_tokens=48)
    assert (expected["reply_ids"], expected["text"]) == (ids, result.text)
