"""Who may ask: in front of every request that comes over TCP.

First the Host, so that a page whose name was rebound to this machine reaches nothing; then the
Origin, so that a foreign page does not either; then the token. What a client sends is bounded in
size and time. Other programs that are pages on this machine may ask a model, but not for what was
said elsewhere: conversations are for chatkv's own page, and for those that were named.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chatkv.server.carriers import SESSION_HEADER
from chatkv.server.listen import Access

MAX_BODY_BYTES = 32 << 20
BODY_S = 30.0

# What answers whoever comes, so that it can be watched.
_OPEN_PATHS = ("/health",)
# The page itself is no secret; it asks for the token.
_PAGE_PATHS = "/page/"
_CONVERSATIONS = ("/sessions", "/cache", "/status")


class Guard:
    """The ASGI middleware. Sets "chatkv.owner" in the scope of what it lets in."""

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        max_body_bytes: int = MAX_BODY_BYTES,
        body_s: float = BODY_S,
    ) -> None:
        self._app, self._access = app, access
        self._max_body_bytes, self._body_s = max_body_bytes, body_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = _headers(scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._access.allows_host(host):
            return await _refuse(send, 403, f"host {host[:100]!r} is not allowed", [])
        if origin is not None and not self._may_ask(scope["path"], origin, host):
            return await _refuse(send, 403, f"origin {origin[:100]!r} is not allowed", [])
        cors = [] if origin is None else _cors(origin, headers)
        if origin is not None and scope["method"] == "OPTIONS":
            return await _reply(send, 204, b"", cors)
        owner = self._access.owner_of(headers)
        if owner is None and not _is_open(scope["path"], headers):
            challenge = [(b"www-authenticate", b"Bearer")]
            return await _refuse(send, 401, "a valid token is needed", cors + challenge)
        scope["chatkv.owner"] = owner or ""
        try:
            body = await self._body(receive, headers)
        except TimeoutError:
            return await _refuse(send, 408, "the request's body takes too long", cors)
        except BodyTooLarge:
            limit = f"at most {self._max_body_bytes >> 20} MiB"
            return await _refuse(send, 413, f"the request is too large: {limit}", cors)
        if body is None:
            return
        rest = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return rest.pop() if rest else await receive()

        async def with_cors(message: Message) -> None:
            if message["type"] == "http.response.start":
                safe = [(b"x-content-type-options", b"nosniff")]
                message = {**message, "headers": [*message["headers"], *cors, *safe]}
            await send(message)

        await self._app(scope, replay, with_cors)

    def _may_ask(self, path: str, origin: str, host: str) -> bool:
        if path.startswith(_CONVERSATIONS):
            return self._access.trusts_origin(origin, host)
        return self._access.allows_origin(origin, host)

    async def _body(self, receive: Receive, headers: Mapping[str, str]) -> bytes | None:
        """The whole body; None where the client left. Raises BodyTooLarge and TimeoutError."""
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._max_body_bytes:
            raise BodyTooLarge
        body = bytearray()
        async with asyncio.timeout(self._body_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                body += message.get("body", b"")
                if len(body) > self._max_body_bytes:
                    raise BodyTooLarge
                if not message.get("more_body", False):
                    return bytes(body)


def _is_open(path: str, headers: Mapping[str, str]) -> bool:
    if path == "/":
        return "text/html" in headers.get("accept", "")
    return path in _OPEN_PATHS or path.startswith(_PAGE_PATHS)


class BodyTooLarge(Exception):
    """More than a request may hold."""


Headers = Sequence[tuple[bytes, bytes]]


def _headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def _cors(origin: str, headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """What a page that may ask needs to hear. Clients send many headers of their own."""
    wanted = headers.get("access-control-request-headers", "authorization, content-type, x-api-key")
    return [
        (b"access-control-allow-origin", origin.encode("latin-1")),
        (b"vary", b"Origin"),
        (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
        (b"access-control-allow-headers", wanted.encode("latin-1")),
        (b"access-control-expose-headers", SESSION_HEADER.encode()),
        (b"access-control-max-age", b"600"),
    ]


async def _refuse(send: Send, status: int, message: str, headers: Headers) -> None:
    """In a form that the clients of all dialects show."""
    said = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    body = json.dumps({"type": "error", "error": said}).encode()
    await _reply(send, status, body, [*headers, (b"content-type", b"application/json")])


async def _reply(send: Send, status: int, body: bytes, headers: Headers) -> None:
    size = [(b"content-length", str(len(body)).encode())]
    start = {"type": "http.response.start", "status": status, "headers": [*headers, *size]}
    await send(start)
    await send({"type": "http.response.body", "body": body})
