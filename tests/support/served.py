"""Servers for tests: an engine's process that also listens on a free TCP port."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import engines
from chatkv.client import engine
from chatkv.paths import folders
from chatkv.server.listen import Access, Listen
from forked import CONTEXT


@contextmanager
def served(
    *models: str,
    access: Access = Access(),  # noqa: B008
    port: int = 0,
    prefill_url: str | None = None,
) -> Iterator[str]:
    """The address of a server in the home that is in force."""
    listen = Listen(port=port, access=access, models=models, prefill_url=prefill_url)
    process = CONTEXT.Process(target=_serve, args=(dict(os.environ), listen), daemon=True)
    process.start()
    try:
        engines.eventually(lambda: engine.find(folders()) is not None or not process.is_alive())
        found = engine.find(folders())
        assert found is not None, "the server did not start"
        yield found.status["urls"][0]
    finally:
        engines.end(folders())
        process.join(10)


def _serve(environment: dict[str, str], listen: Listen) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.umask(0o077)
    os.setsid()
    from chatkv.restore import prefill_worker
    from chatkv.server import asked, models
    from chatkv.server.process import serve
    from chatkv.session.turn import TurnOptions

    # What a tiny random model finds likeliest is a near tie: in bfloat16 other pieces or other
    # company pick another token, and tests compare whole answers.
    for name in ("STATE_S", "SILENT_S"):  # a prefill worker that is busy is not away
        setattr(prefill_worker, name, 60.0)
    models.choose_dtype = lambda cache, device: "float32"
    # And it computes as fast as a disk reads: how much is reused would depend on the moment.
    if listen.prefill_url is None:
        asked.TurnOptions = partial(TurnOptions, restore="reload")  # type: ignore[misc, assignment]
    serve(folders(), listen=listen)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of a stream of server-sent events, [DONE] left out."""
        lines = self.body.decode().split("\n")
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [json.loads(one) for one in data if one != "[DONE]"]


def ask(url: str, path: str, body: Any = None, method: str | None = None, **headers: str) -> Answer:
    """One request as it is; underscores of header names stand for hyphens."""
    connection = open_to(url)
    data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method or ("GET" if body is None else "POST"), path, data, named)
    response = connection.getresponse()
    answer = Answer(
        response.status,
        {name.lower(): value for name, value in response.getheaders()},
        response.read(),
    )
    connection.close()
    return answer


def open_to(url: str) -> http.client.HTTPConnection:
    place = urlsplit(url)
    assert place.hostname is not None
    return http.client.HTTPConnection(place.hostname, place.port, timeout=60)


def chat(url: str, messages: list[dict[str, Any]], **more: Any) -> Answer:
    """A chat completion, greedy and short."""
    headers = more.pop("headers", {})
    body = {"messages": messages, "max_tokens": 8, "temperature": 0} | more
    return ask(url, "/v1/chat/completions", body, **headers)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}
