"""From a request to a response, in whatever dialect: what all of them share.

A stream's headers are sent as soon as the request is accepted, before anything is computed; what
cannot be answered is an error with a status of its own until then, and an error inside the stream
from then on. A client that leaves ends its answer within a step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from chatkv.errors import ChatkvError, UsageError
from chatkv.server.answer import Answers
from chatkv.server.asked import Asked
from chatkv.server.carriers import SESSION_HEADER
from chatkv.server.stream import events
from chatkv.server.wire import Event, error_event
from chatkv_store.errors import StoreError

# How long headers wait: for the session's name, which a model that is being loaded delays; and then
# for the request to be accepted, which a memory that is full delays.
NAMED_S, ACCEPT_S = 30.0, 2.0
# Silence in a stream is broken this often, by the wall clock.
KEEPALIVE_S = 5.0
# What is deeper than this no template and no grammar reads.
MAX_DEPTH = 128


@dataclass(frozen=True)
class Problem:
    """Why a request was not answered; `code` is OpenAI's word for it."""

    status: int
    code: str
    message: str

    @classmethod
    def of(cls, kind: str, message: str) -> Problem:
        """`kind`: the name of the error's class."""
        status, code = _PROBLEMS.get(kind, (500, "engine_error"))
        return cls(status, code, message)


_PROBLEMS = {
    "UsageError": (400, "invalid_request"),
    "ContextFull": (400, "context_length_exceeded"),
    "ModelError": (400, "model_error"),
    "NoSuchModel": (404, "model_not_found"),
    "SessionNotFound": (404, "session_not_found"),
    "SessionAmbiguous": (404, "session_not_found"),
    "StoreBusy": (409, "session_busy"),
    "PersistenceError": (409, "kv_unavailable"),
    "StoreError": (503, "store_unavailable"),
    "StoreFull": (507, "store_full"),
}


class Writer(Protocol):
    """Writes one answer in a dialect, as a stream or whole. `write` gives the bytes of an event,
    b"" for none; `alive` those that break a silence."""

    @property
    def media_type(self) -> str: ...

    @property
    def alive(self) -> bytes: ...

    def write(self, event: Event) -> bytes: ...

    def error(self, problem: Problem) -> bytes: ...

    def whole(self, result: dict[str, Any]) -> dict[str, Any]: ...


ErrorBody = Callable[[Problem], dict[str, Any]]
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def routes(handlers: Mapping[str, Handler], error_body: ErrorBody) -> list[Route]:
    """ "POST /path" -> handler, whose errors are written in a dialect's form."""

    def route(place: str, handler: Handler) -> Route:
        method, path = place.split()

        async def endpoint(request: Request) -> Response:
            try:
                return await handler(request)
            except (ChatkvError, StoreError, OSError) as error:
                problem = Problem.of(type(error).__name__, str(error))
                return JSONResponse(error_body(problem), problem.status)

        endpoint.__doc__ = handler.__doc__
        return Route(path, endpoint, methods=[method])

    return [route(place, handler) for place, handler in handlers.items()]


async def body_of(request: Request) -> dict[str, Any]:
    """The request's JSON object; it may say anything about its type."""
    try:
        body = msgspec.json.decode(await request.body() or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"the request's body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise UsageError("the request's body must be a JSON object")
    if not _is_flat(body, MAX_DEPTH):
        raise UsageError(f"the request's JSON is nested more than {MAX_DEPTH} deep")
    return body


def _is_flat(value: Any, levels: int) -> bool:
    """Whether nothing in `value` lies deeper."""
    if not isinstance(value, (dict, list)):
        return True
    inside = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(_is_flat(one, levels - 1) for one in inside)


async def respond(
    request: Request, answers: Answers, asked: Asked, writer: Writer, error_body: ErrorBody
) -> Response:
    """The answer to `asked`, streamed or whole."""
    stream = events(partial(answers.answer, asked))
    if not asked.is_streamed:
        return await _whole(request, answers, stream, writer, error_body)
    seen = await _accepted(stream)
    problem = _problem(seen[-1]) if seen else None
    if problem is not None:
        await stream.aclose()
        return JSONResponse(error_body(problem), problem.status)
    body = _written(seen, stream, writer, answers)
    return StreamingResponse(body, media_type=writer.media_type, headers=_headers(seen))


async def _accepted(stream: AsyncGenerator[Event, None]) -> list[Event]:
    """What happens until the request is accepted or refused, or that takes too long."""
    deadline = time.monotonic() + NAMED_S
    seen = []
    async for event in stream:
        if event.event != "alive":
            seen.append(event)
        if event.event == "session":
            deadline = time.monotonic() + ACCEPT_S
        if event.event in ("text", "result", "error") or event.stage == "begin":
            break
        if time.monotonic() > deadline:
            break
    return seen


async def _written(
    seen: list[Event], stream: AsyncGenerator[Event, None], writer: Writer, answers: Answers
) -> AsyncGenerator[bytes, None]:
    """The stream as it goes over the wire."""
    is_done = False
    last_s = time.monotonic()
    try:
        async with aclosing(_joined(seen, stream)) as joined:
            async for event in joined:
                problem = _problem(event)
                out = writer.write(event) if problem is None else writer.error(problem)
                is_done = is_done or event.event in ("result", "error")
                if not out and time.monotonic() - last_s > KEEPALIVE_S:
                    out = writer.alive
                if out:
                    last_s = time.monotonic()
                    yield out
    finally:
        answers.metrics.num_disconnected += not is_done


async def _joined(
    seen: list[Event], stream: AsyncGenerator[Event, None]
) -> AsyncGenerator[Event, None]:
    async with aclosing(stream) as rest:
        for event in seen:
            yield event
        async for event in rest:
            yield event


async def _whole(
    request: Request,
    answers: Answers,
    stream: AsyncGenerator[Event, None],
    writer: Writer,
    error_body: ErrorBody,
) -> Response:
    """The answer when it is complete; a client that leaves ends it."""

    async def collect() -> list[Event]:
        kept = ("session", "result", "error")
        async with aclosing(stream) as every:
            return [event async for event in every if event.event in kept]

    work = asyncio.create_task(collect())
    gone = asyncio.create_task(_left(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            answers.metrics.num_disconnected += 1
            return Response(status_code=499)
        seen = work.result()
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)
    if not seen or seen[-1].event == "session":  # it was cancelled before it began
        return Response(status_code=499)
    problem = _problem(seen[-1])
    if problem is not None:
        return JSONResponse(error_body(problem), problem.status)
    return JSONResponse(writer.whole(seen[-1].data), headers=_headers(seen))


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _problem(event: Event) -> Problem | None:
    if event.event != "error":
        return None
    return Problem.of(str(event.data.get("kind")), event.text)


def _headers(seen: list[Event]) -> dict[str, str]:
    session = next((event.data["session"] for event in seen if event.event == "session"), "")
    return {"Cache-Control": "no-store", **({SESSION_HEADER: session} if session else {})}


async def in_thread(work: Callable[..., Any], *arguments: Any) -> Any:
    return await run_in_threadpool(work, *arguments)


def error_response(error: Exception, error_body: ErrorBody) -> Response:
    """What no handler has caught."""
    if isinstance(error, HTTPException):
        problem = Problem(error.status_code, "not_found", str(error.detail))
    else:
        event = error_event(error)
        problem = Problem.of(str(event.data["kind"]), "the engine failed; its log has more")
    return JSONResponse(error_body(problem), problem.status)
