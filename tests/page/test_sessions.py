"""The sessions over TCP, and the page's files: what is answered, and who is not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chatkv.server.listen import Access
from chatkv.server.page import FILES
from served import Answer, ask, served

ANNA, BERT = {"Authorization": "Bearer anna"}, {"Authorization": "Bearer bert"}
GREEDY = {"sampling": {"temperature": 0}, "max_tokens": 6}


@pytest.fixture(scope="module")
def url(own_home: Path, model: str) -> Iterator[str]:
    access = Access(("anna", "bert"), origins=("https://named.example",))
    with served(model, access=access) as url:
        yield url


def events(answer: Answer) -> list[Any]:
    return [json.loads(line) for line in answer.body.splitlines()]


def last(answer: Answer) -> Any:
    return events(answer)[-1]


def begun(url: str, **headers: str) -> str:
    """A new session's id."""
    opened = last(ask(url, "/sessions", {}, **headers))
    assert opened["event"] == "session"
    return str(opened["data"]["session"])


def say(url: str, session: str, text: str, **more: Any) -> Any:
    headers = more.pop("headers", ANNA)
    body = {"text": text, "options": GREEDY} | more
    return last(ask(url, f"/sessions/{session}/turns", body, **headers))


def test_a_conversation_from_its_beginning_to_its_end(url: str) -> None:
    session = begun(url, **ANNA)
    assert ask(url, f"/sessions/{session}", **ANNA).json["tree"] == []  # nothing was said in it
    assert say(url, session, "One.", system="Be brief.")["data"]["turn"] == 1
    say(url, session, "Two.")
    say(url, session, "Zwei.", num_turns=1)
    found = ask(url, f"/sessions/{session}", **ANNA).json
    assert [turn["user"] for turn in found["tree"]] == ["One.", "Zwei.", "Two."]
    one, other, left = found["tree"]
    assert (one["parent"], other["parent"], left["parent"]) == (None, one["id"], one["id"])
    assert found["head"] == other["id"] and found["max_tokens"] == 1024
    assert one["system"] == "Be brief." and one["stats"]["tokens"]["generated"] > 0
    ask(url, f"/sessions/{session}/switch", {"turn": left["id"]}, **ANNA)
    assert ask(url, f"/sessions/{session}", **ANNA).json["head"] == left["id"]
    assert ask(url, f"/sessions/{session}/rename", {"title": "Number"}, **ANNA).status == 200
    fork = ask(url, f"/sessions/{session}/fork", {"at": 1}, **ANNA).json
    assert (fork["title"], fork["turns"]) == ("Number (fork)", 1)
    listed = ask(url, "/sessions?limit=2", **ANNA).json["sessions"]
    assert [row["session"] for row in listed] == [fork["session"], session]
    (hit,) = ask(url, "/sessions?search=zwei", **ANNA).json["sessions"]
    assert (hit["session"], hit["turn"], hit["snippet"]) == (session, 2, "Zwei.")
    for one_id in (session, fork["session"]):
        assert ask(url, f"/sessions/{one_id}", method="DELETE", **ANNA).status == 200
        assert ask(url, f"/sessions/{one_id}", **ANNA).status == 404


def test_where_an_edit_is_refused_nothing_has_changed(url: str) -> None:
    session = begun(url, **ANNA)
    say(url, session, "One.")
    say(url, session, "Two.")
    before = ask(url, f"/sessions/{session}", **ANNA).json
    refused = say(url, session, "far too long " * 2000, num_turns=1)
    assert (refused["event"], refused["data"]["kind"]) == ("error", "ContextFull")
    assert say(url, session, "x", num_turns=7)["data"]["kind"] == "UsageError"
    after = ask(url, f"/sessions/{session}", **ANNA).json
    assert (after["head"], after["tree"]) == (before["head"], before["tree"])


def test_sessions_of_another_token_do_not_exist(url: str) -> None:
    session = begun(url, **ANNA)
    unsaid = begun(url, **ANNA)
    say(url, session, "Anna's secret.")
    assert ask(url, "/sessions", **BERT).json == {"sessions": []}
    assert ask(url, "/sessions?search=secret", **BERT).json == {"sessions": []}
    for name in (session, unsaid, session[:12], "Anna's%20secret."):
        for path, body in (
            ("", None),
            ("/turns", {"text": "x"}),
            ("/continue", {}),
            ("/draft", {"text": "x"}),
            ("/cancel", {}),
            ("/rewind", {"num_turns": 0}),
            ("/switch", {"turn": "x"}),
            ("/release", {}),
            ("/rename", {"title": "x"}),
            ("/fork", {}),
        ):
            answer = ask(url, f"/sessions/{name}{path}", body, **BERT)
            assert (answer.status, answer.json["data"]["kind"]) == (404, "SessionNotFound"), path
        assert ask(url, f"/sessions/{name}", method="DELETE", **BERT).status == 404
        assert ask(url, "/sessions", {"session": name}, **BERT).status == 404
    assert ask(url, f"/sessions/{session}", **ANNA).json["turns"] == 1
    assert ask(url, "/sessions").status == 401


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/sessions", b"{", "truncated"),
        ("/sessions", {"model": "/etc/passwd"}, "there is no model"),
        ("/sessions", {"owner": "anna"}, "owner"),
        ("/sessions", {"resume": "x"}, "resume"),
        ("/sessions?limit=0", None, "limit"),
        ("/sessions?limit=x", None, "limit"),
        ("/sessions/ID/turns", {}, "text"),
        ("/sessions/ID/turns", {"text": "x", "options": {"sampling": {"top_p": 7}}}, "top-p"),
        ("/sessions/ID/rename", {"title": "  "}, "title"),
        ("/sessions/ID/rename", {"title": "x" * 501}, "title"),
        ("/sessions/ID/fork", {"at": 9}, "no turn 9"),
        ("/sessions/ID/nothing", {}, "Not Found"),
    ],
)
def test_nonsense_is_one_line(url: str, path: str, body: Any, said: str) -> None:
    session = begun(url, **ANNA)
    say(url, session, "x")
    answer = ask(url, path.replace("ID", session), body, **ANNA)
    assert answer.status in (400, 404, 409)
    assert answer.json["event"] == "error" and said in answer.json["text"]


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:3000", 403),
        ("tauri://localhost", 403),
        ("https://evil.example", 403),
        ("null", 403),
        ("https://named.example", 200),
        ("own", 200),
    ],
)
def test_conversations_are_for_the_servers_own_page(url: str, origin: str, status: int) -> None:
    given = url if origin == "own" else origin
    assert ask(url, "/sessions", Origin=given, **ANNA).status == status
    assert ask(url, "/sessions", {}, Origin=given, **ANNA).status == status
    assert ask(url, "/sessions", method="OPTIONS", Origin=given).status in (status, 204)


def test_the_page_is_shown_to_browsers_and_its_files_alone(url: str) -> None:
    shown = ask(url, "/", Accept="text/html,*/*")
    assert shown.status == 200 and shown.headers["content-type"] == "text/html; charset=utf-8"
    assert ask(url, "/", Accept="*/*").status == 401
    assert ask(url, "/", Accept="*/*", **ANNA).body == b"chatkv is running"
    policy = shown.headers["content-security-policy"]
    assert "script-src 'self';" in policy and "unsafe" not in policy and "http" not in policy
    for path in (
        "/page/../api.py",
        "/page/..%2fapi.py",
        "/page/%2e%2e/api.py",
        "/page//etc/passwd",
    ):
        answer = ask(url, path, **ANNA)
        assert answer.status == 404 and b"import" not in answer.body
    again = ask(url, "/page/main.js", If_None_Match=ask(url, "/page/main.js").headers["etag"])
    assert (again.status, again.body) == (304, b"")


def test_the_page_holds_no_script_and_names_no_other_place(url: str) -> None:
    files = [path for path in FILES.rglob("*") if path.suffix in (".html", ".css", ".js", ".svg")]
    assert len(files) > 20
    for path in files:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".html":
            assert "<script>" not in text and "style=" not in text and " on" + "click" not in text
        if "vendor" not in path.parts:
            text = text.replace("http://www.w3.org/2000/svg", "")
            assert "http://" not in text and "https://" not in text, path.name
            assert "innerHTML" not in text and "eval(" not in text, path.name
            lines = text.splitlines()
            assert len(lines) <= 620 if path.suffix == ".css" else len(lines) <= 330, path.name
    assert len(list((FILES / "vendor").glob("*.js"))) == 3
    licences = (FILES / "vendor" / "LICENSES.txt").read_text(encoding="utf-8")
    for path in (FILES / "vendor").glob("*.js"):
        assert path.name in licences
