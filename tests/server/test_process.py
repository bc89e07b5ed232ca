"""The engine's process: one of them, private, gone when it is idle, and all that was said saved."""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from chatkv.client import engine
from chatkv.client.link import EngineGone, Link
from chatkv.paths import folders
from chatkv.server.process import _only_one, listening
from chatkv.session.turn import Listener
from chatkv_store.blocks import BlockStore
from chatkv_store.conversations import Conversations
from engines import chat_with, end, eventually, greedy, running_engine, spawn
from program import Ran, run


@pytest.fixture(autouse=True)
def _engine_allowed(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CHATKV_ENGINE")
    yield
    end(folders())


def chain(session: str) -> Any:
    with Conversations(folders().conversations) as conversations:
        return conversations.chain(session)


def test_only_its_owner_reaches_it(home: Path) -> None:
    home.chmod(0o755)
    home.parent.chmod(0o755)
    with running_engine() as link:
        assert stat.S_IMODE(link.path.stat().st_mode) == 0o600
        assert stat.S_IMODE(link.path.parent.stat().st_mode) == 0o700
        link.path.parent.chmod(0o755)  # were it open, the socket itself would still not be
        if os.getuid() == 0:
            assert _as_nobody(lambda: _knock(link.path)) == "PermissionError"
        assert _knock(link.path) == ""
    assert not link.path.exists()


def _knock(path: Path) -> str:
    with socket.socket(socket.AF_UNIX) as caller:
        try:
            caller.connect(str(path))
        except OSError as error:
            return type(error).__name__
    return ""


def _as_nobody(work: Callable[[], str]) -> str:
    """What `work` returns in a process of another user."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        os.write(write, work().encode() or b"-")
        os._exit(0)
    os.waitpid(child, 0)
    return os.read(read, 100).decode()


def test_a_home_deeper_than_an_address_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    home = tmp_path / ("d" * 100) / ("e" * 100)
    home.mkdir(parents=True)
    monkeypatch.setenv("CHATKV_HOME", str(home))
    with running_engine(), chat_with(model) as chat:
        assert chat.send("hi", greedy(4), Listener()).turn == 1


def test_the_lock_lets_one_in_and_survives_a_look(home: Path) -> None:
    path = folders().make().engine_lock
    with _only_one(path) as first, _only_one(path) as second:
        assert (first, second) == (True, False)
        assert engine._holder(folders()) == os.getpid()
    assert engine._holder(folders()) is None

    looked = threading.Event()

    def look_often() -> None:
        while not looked.is_set():
            engine._holder(folders())

    looker = threading.Thread(target=look_often)
    looker.start()
    for _ in range(20):
        with _only_one(path) as is_ours:
            assert is_ours
    looked.set()
    looker.join()


def test_a_second_engine_leaves_the_first_alone(home: Path) -> None:
    with running_engine() as link:
        pid = link.call("GET", "/status")["pid"]
        second = run("serve", "--socket-only")
        assert (second.code, second.err) == (0, "chatkv: the engine is running already\n")
        assert link.call("GET", "/status")["pid"] == pid


def test_a_socket_that_was_left_behind_is_replaced(home: Path) -> None:
    place = folders().make()
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(place.socket))
    left.close()
    assert engine.running(place) is None
    with running_engine() as link:
        assert link.call("GET", "/status")["version"]


def test_a_folder_where_the_socket_should_be(home: Path) -> None:
    place = folders().make()
    place.socket.mkdir()
    assert engine.find(place) is None
    with pytest.raises(OSError, match=r"engine\.sock"), listening(place.socket):
        pass


def test_it_ends_when_it_is_idle_and_has_saved(
    home: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.setenv("CHATKV_IDLE_S", "1")
    process = spawn()
    with chat_with(model) as chat:
        said = chat.send("Tell me of the sea. " * 20, greedy(8), Listener())
    process.join(60)
    assert process.exitcode == 0
    assert engine._holder(folders()) is None and not folders().socket.exists()
    assert chain(said.session)[-1].reply_text == said.text
    with BlockStore(folders().kv, read_only=True) as blocks:
        assert blocks.stats()["blocks"] == -(-said.tokens.prompt // 64)
        assert blocks.verify() == []


def test_stop_ends_an_answer_and_keeps_it(home: Path, slow_model: str) -> None:
    with running_engine(), chat_with(slow_model) as chat:
        stopped: list[Ran] = []
        stopper = threading.Thread(target=lambda: stopped.append(run("stop")))
        heard: list[str] = []

        def listen(text: str) -> None:
            if not heard:
                stopper.start()
            heard.append(text)

        result = chat.send("Go.", greedy(3000), Listener(on_text=listen))
        stopper.join(60)
    assert stopped == [Ran(0, "", "")]
    assert result.finish_reason == "interrupted" and result.text == "".join(heard)
    (turn,) = chain(result.session)
    assert (turn.state, turn.reply_text) == ("interrupted", result.text)
    again = run("stop")
    assert (again.code, again.err) == (0, "chatkv: no engine is running\n")


@pytest.mark.slow
@pytest.mark.parametrize("number", [15, 2])
def test_a_signal_ends_it_as_stop_does(home: Path, slow_model: str, number: int) -> None:
    process = spawn()
    with chat_with(slow_model) as chat:
        stream = chat._link.stream(f"/sessions/{chat.session}/turns", {"text": "Go."})
        while next(stream).event != "text":
            pass
        os.kill(process.pid, number)
        *_, last = stream
    assert last.data["finish_reason"] == "interrupted"
    process.join(60)
    assert process.exitcode == 0
    assert chain(chat.session)[-1].reply_text == last.data["text"]


def test_status_tells_what_is_loaded(home: Path, model: str) -> None:
    assert "no engine is running" in run("status").err
    assert json.loads(run("status", "--json").out) == {"running": False, "prefill_workers": []}
    with running_engine(), chat_with(model):
        shown = run("status").out
        assert "float32 on cpu" in shown and Path(model).name in shown
        assert '"running": true' in run("status", "--json").out


@contextmanager
def of_version(version: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This program is of another version than the engine that runs."""
    with monkeypatch.context() as patch:
        patch.setattr(engine, "__version__", version)
        yield


def test_an_engine_of_another_version(
    home: Path, monkeypatch: pytest.MonkeyPatch, slow_model: str
) -> None:
    """It is not used; it is replaced where it is idle, and left alone while it answers."""
    place = folders()
    with running_engine() as link, chat_with(slow_model) as chat:
        stream = link.stream(f"/sessions/{chat.session}/turns", {"text": "Go."})
        while next(stream).event != "text":
            pass
        with of_version("9.9", monkeypatch):
            assert engine.running(place) is None
            with pytest.raises(engine.EngineBusy, match="of version"):
                engine.start(place)
            with pytest.raises(engine.EngineBusy):
                engine.make_way(place)
            stream.close()
            eventually(lambda: not link.call("GET", "/status")["answering"])
            assert engine.make_way(place)
        assert engine.find(place) is None


def test_a_call_to_nobody(home: Path) -> None:
    with pytest.raises(EngineGone):
        Link(folders().socket).call("GET", "/status")
    assert engine.make_way(folders()) is False
    engine.release(folders(), "x")
