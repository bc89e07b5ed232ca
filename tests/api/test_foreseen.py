"""`chatkv cache explain --messages` and `warm --messages`: what they say of a request, and what the
server then does with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chatkv.cli.main import run
from engines import eventually
from served import chat, user

LONG = "the history is not read again and the session holds many blocks " * 3


@pytest.fixture
def told(
    url: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Any]:
    """`told("explain", body)` is what the command says of a file with that; `url`: it is served."""

    def call(verb: str, body: Any, *options: str) -> Any:
        file = tmp_path / "request.json"
        file.write_text(body if isinstance(body, str) else json.dumps(body))
        capsys.readouterr()
        asked = ["-m", model, "--dtype", "float32", *options]
        code = run(["cache", verb, "--messages", str(file), *asked])
        out, err = capsys.readouterr()
        if code or not out:
            return code, err
        return json.loads(out) if "--json" in options else out

    return call


def answer(got: Any) -> dict[str, Any]:
    message = got.json["choices"][0]["message"]
    return {"role": "assistant", "content": message["content"]}


def test_a_conversation_is_found_as_the_server_finds_it(url: str, told: Callable[..., Any]) -> None:
    first = [user(f"{LONG} one")]
    said = [*first, answer(chat(url, first)), user("And?")]

    def explained(messages: Any) -> Any:
        return told("explain", messages, "--json")

    eventually(lambda: explained(said)["stored_tokens"] > 64)  # the server writes in a moment
    found = explained({"messages": said, "stream": True})
    assert (found["hit"], found["known_messages"], found["turn"]) == ("chain", 2, 1)
    assert [row["is_known"] for row in found["rows"]] == [True, True, False]
    assert found["said_there_instead"] == []
    got = chat(url, said)
    assert got.json["timings"]["hit"] == "chain"
    assert got.json["usage"]["prompt_tokens"] == found["tokens"]

    again = [*said[:-1], user("Or?")]
    found = explained(again)
    assert (found["known_messages"], found["said_there_instead"]) == (2, ["And?"])
    assert "said there instead of message 3: And?" not in told("explain", again)  # it is a note

    edited = [user("Something else. " + LONG), *said[1:]]
    found = explained(edited)
    assert (found["hit"] in ("none", "blocks"), found["known_messages"]) == (True, 0)
    assert found["session"] is None


def test_a_prompt_is_warmed_and_found(url: str, told: Callable[..., Any]) -> None:
    system = {"role": "system", "content": "You are a very patient teacher of sailing. " * 8}
    warmed = told("warm", {"messages": [system]}, "--json")
    assert warmed["computed_tokens"] > 64 and warmed["tokens"] >= warmed["computed_tokens"]
    assert told("warm", [system], "--json")["computed_tokens"] <= 1
    asked = [system, user("What is a jib?")]
    found = told("explain", asked, "--json")
    assert found["hit"] == "blocks" and found["stored_tokens"] > 64
    assert "others begin with the same tokens" in told("explain", asked)
    got = chat(url, asked).json["timings"]
    assert got["hit"] == "blocks" and got["cache_n"] >= 64


def test_what_cannot_be_read_is_one_line(told: Callable[..., Any]) -> None:
    for body, why in (
        ("nonsense", "is no JSON"),
        ({"messages": []}, "at least one message"),
        ([{"role": "ghost", "content": "boo"}], "role must be one of"),
    ):
        for verb in ("explain", "warm"):
            code, err = told(verb, body)
            assert code == 2 and why in err and err.count("\n") == 1
    for verb in ("explain", "warm"):
        assert run(["cache", verb]) == 2
