"""`chatkv serve` as a process: where it listens, what it refuses, and who else is the engine."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chatkv.client import engine
from chatkv.client.link import Link
from chatkv.paths import folders
from engines import chat_with, end, greedy, running_engine
from forked import Forked, chatkv
from program import command, environment
from served import ask, chat, user


@pytest.fixture(autouse=True)
def _engine_allowed(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CHATKV_ENGINE")
    yield
    end(folders())


def start(*arguments: str) -> Forked:
    return Forked(chatkv, "serve", "--port", "0", *arguments)


def refused(*arguments: str) -> str:
    process = start(*arguments)
    out, err = process.communicate()
    assert process.returncode != 0 and not out and err.count("\n") == 1, err
    return err


def test_it_serves_until_it_is_interrupted(home: Path, model: str) -> None:
    process = subprocess.Popen(
        command("serve", "--port", "0", "--model", model),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(CHATKV_TOKEN="one two"),
    )
    assert process.stderr is not None
    line = process.stderr.readline()
    assert line.startswith("chatkv: serving at http://127.0.0.1:")
    url = line.split()[3].rstrip(",")
    assert ask(url, "/health").status == 200
    assert ask(url, "/v1/models").status == 401
    got = chat(url, [user("hello")], headers={"Authorization": "Bearer two"})
    assert got.status == 200
    # It is the engine of this home, too.
    status: Any = Link(folders().socket).call("GET", "/status")
    assert status["urls"][0] == url and status["pid"] == process.pid
    with chat_with(model, dtype=None) as talk:
        assert talk.send("hi", greedy(4), _silent()).turn == 1
    # A second one says where the first one is, and leaves it alone.
    assert f"serves at {url} already" in refused("--model", model)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    assert not process.stderr.read().strip()


def test_an_idle_engine_makes_way(home: Path, model: str) -> None:
    with running_engine() as link:
        first = link.call("GET", "/status")["pid"]
        process = start("--model", model)
        assert "serving at" in process.stderr.readline()
        assert link.call("GET", "/status")["pid"] == process.pid != first
        assert engine.stop(folders())
        assert process.wait(30) == 0, process.stderr.read()


def test_what_it_refuses(home: Path, model: str, tmp_path: Path) -> None:
    assert "CHATKV_TOKEN" in refused("--model", model, "--host", "0.0.0.0")
    assert "no such address" in refused("--model", model, "--host", "no.such.host")
    assert str(tmp_path) in refused("--model", str(tmp_path))
    assert engine.find(folders()) is None


def _silent() -> Any:
    from chatkv.session.turn import Listener

    return Listener()
