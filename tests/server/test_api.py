"""The engine's own API over its socket: what is refused, and how a turn streams."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any

import pytest

from chatkv.client import ChatRequest
from chatkv.client.link import Link, _Connection
from chatkv.errors import UsageError
from chatkv.paths import folders
from chatkv.server.wire import EngineError, OptionsRequest, RewindRequest, SendRequest
from chatkv_store.conversations import Conversations
from engines import chat_with, eventually, greedy


def post(link: Link, url: str, body: bytes, method: str = "POST") -> tuple[int, dict[str, Any]]:
    """One request as it is; its status, and the one object that comes back."""
    connection = _Connection(link.path, 30.0)
    connection.request(method, url, body)
    response = connection.getresponse()
    data = response.read()
    connection.close()
    assert data.count(b"\n") <= 1
    return response.status, json.loads(data)


def last_event(link: Link, url: str, body: Any) -> Any:
    *_, last = link.stream(url, body)
    return last


@pytest.mark.parametrize(
    ("url", "body", "said"),
    [
        ("/sessions", b"{", "truncated"),
        ("/sessions", b"\xff\xfe", "malformed"),
        ("/sessions", b"[]", "object"),
        ("/sessions", b'{"modell": "x"}', "no field modell"),
        ("/sessions", b'{"seed": "seven"}', "seed"),
        ("/sessions/x/turns", b"{}", "text"),
        ("/sessions/x/turns", b'{"text": "hi", "more": 1}', "more"),
        ("/sessions/x/turns", b'{"text": "hi", "options": {"max_token": 1}}', "options.max_token"),
        (
            "/sessions/x/turns",
            b'{"text": "hi", "options": {"sampling": {"temperature": -1}}}',
            "temperature",
        ),
        ("/sessions/x/draft", b'{"text": 5}', "text"),
        ("/sessions/x/rewind", b"{}", "num_turns"),
    ],
)
def test_nonsense_is_one_line(link: Link, url: str, body: bytes, said: str) -> None:
    status, error = post(link, url, body)
    assert (status, error["event"]) == (400, "error")
    assert said in error["text"] and "\n" not in error["text"]


def test_an_address_that_does_not_exist(link: Link) -> None:
    assert post(link, "/nowhere", b"")[0] == 404
    assert post(link, "/status", b"")[0] == 405
    with pytest.raises(UsageError, match="Not Found"):
        link.call("GET", "/nowhere")


def test_what_cannot_be_done_is_the_last_event(link: Link, model: str) -> None:
    gone = last_event(link, "/sessions/nobody/turns", SendRequest("hi"))
    assert gone.event == "error" and "nobody" in gone.text
    nowhere = last_event(link, "/sessions", ChatRequest("/no/such/model"))
    assert nowhere.event == "error" and "/no/such/model" in nowhere.text
    with chat_with(model) as chat:
        empty = last_event(link, f"/sessions/{chat.session}/continue", OptionsRequest())
        assert empty.event == "error" and "no answer to go on with" in empty.text
        with pytest.raises(UsageError, match="turn 5 does not exist"):
            link.call("POST", f"/sessions/{chat.session}/rewind", RewindRequest(5))
    assert link.call("GET", "/status")["answering"] == []


def test_a_broken_request_does_not_end_the_engine(link: Link) -> None:
    for garbage in (b"\x00" * 100, b"GET /status HTTP/9.9\r\n\r\n", b"POST /sessions HTTP/1.1\r\n"):
        raw = socket.socket(socket.AF_UNIX)
        raw.connect(str(link.path))
        raw.sendall(garbage)
        raw.close()
    assert link.call("GET", "/status")["version"]


def test_a_face_that_dies_ends_its_turn_and_frees_the_session(link: Link, slow_model: str) -> None:
    with chat_with(slow_model) as chat:
        stream = link.stream(
            f"/sessions/{chat.session}/turns", SendRequest("Go.", None, greedy(3000))
        )
        while next(stream).event != "text":
            pass
        assert link.call("GET", "/status")["answering"] == [chat.session]
        stream.close()  # as the kernel does for a process that is gone
        eventually(lambda: not link.call("GET", "/status")["answering"])
        with Conversations(folders().conversations) as conversations:
            turn = conversations.chain(chat.session)[-1]
        assert (turn.state, turn.finish_reason) == ("interrupted", "interrupted")
        assert 0 < len(turn.reply_ids) < 3000
        assert chat.send("And?", greedy(4), _silent()).turn == 2


def test_a_second_face_hears_that_the_session_is_answering(link: Link, slow_model: str) -> None:
    with chat_with(slow_model) as chat:
        stream = link.stream(
            f"/sessions/{chat.session}/turns", SendRequest("Go.", None, greedy(3000))
        )
        while next(stream).event != "text":
            pass
        for action, body in (("turns", SendRequest("Me too.")), ("continue", OptionsRequest())):
            refused = last_event(link, f"/sessions/{chat.session}/{action}", body)
            assert refused.event == "error" and "is answering already" in refused.text
        with pytest.raises(EngineError, match="is answering already"):
            link.call("POST", f"/sessions/{chat.session}/release")
        assert link.call("POST", f"/sessions/{chat.session}/cancel") == {"cancelled": True}
        *_, result = stream
        assert result.data["finish_reason"] == "interrupted"
        assert link.call("POST", f"/sessions/{chat.session}/cancel") == {"cancelled": False}
        assert link.call("POST", f"/sessions/{chat.session}/release") == {"released": True}


def test_the_connection_is_plain_http(link: Link) -> None:
    connection = _Connection(link.path, 30.0)
    connection.request("GET", "/status")
    assert isinstance(connection.getresponse(), http.client.HTTPResponse)
    connection.close()


def _silent() -> Any:
    from chatkv.session.turn import Listener

    return Listener()
