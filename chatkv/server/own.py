"""chatkv's own API: sessions, turns as streams of events, drafts, status.

GET    /status                          what is loaded, open and running
POST   /stop                            end the process, once all is saved
POST   /sessions                        open a session, or begin one      -> stream
POST   /sessions/ID/turns               say something, hear the answer    -> stream
POST   /sessions/ID/continue            go on with the last answer        -> stream
POST   /sessions/ID/draft               restore, and prefill what is being typed
POST   /sessions/ID/cancel              stop what is running
POST   /sessions/ID/rewind              take turns back (they stay as a branch)
POST   /sessions/ID/release             close it, so that others may write
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from chatkv import __version__
from chatkv.errors import ChatkvError, UsageError
from chatkv.server.hub import Held, Hub
from chatkv.server.stream import Emit, events
from chatkv.server.wire import (
    DraftRequest,
    Event,
    OptionsRequest,
    RewindRequest,
    SendRequest,
    encode,
    error_event,
)
from chatkv.session.ahead import prefill_draft
from chatkv.session.request import ChatRequest
from chatkv.session.turn import Listener, TurnResult
from chatkv_store.errors import StoreError

Body = TypeVar("Body")


class OwnApi:
    """The routes over one hub. on_stop() is asked to end the process."""

    def __init__(self, hub: Hub, on_stop: Callable[[], None]) -> None:
        self.hub, self._on_stop = hub, on_stop
        self._drafts: dict[str, threading.Event] = {}

    def routes(self) -> list[Route]:
        def post(path: str, handler: Callable[..., Any]) -> Route:
            return Route(path, handler, methods=["POST"])

        return [
            Route("/status", self.status),
            post("/stop", self.stop),
            post("/sessions", self.open),
            post("/sessions/{id}/turns", self.send),
            post("/sessions/{id}/continue", self.go_on),
            post("/sessions/{id}/draft", self.draft),
            post("/sessions/{id}/cancel", self.cancel),
            post("/sessions/{id}/rewind", self.rewind),
            post("/sessions/{id}/release", self.release),
        ]

    async def status(self, request: Request) -> Response:
        about = {"version": __version__, "pid": os.getpid(), "memory_bytes": _resident_bytes()}
        return JSONResponse(about | await run_in_threadpool(self.hub.status))

    async def stop(self, request: Request) -> Response:
        self._on_stop()
        return JSONResponse({"stopping": True})

    async def open(self, request: Request) -> Response:
        wanted = await _body(request, ChatRequest)

        def work(emit: Emit, cancel: threading.Event) -> None:
            def progress(stage: str, done: int, total: int) -> None:
                emit(Event("progress", stage, done, total))

            held = self.hub.open(wanted, progress)
            emit(Event("session", data=describe(held)))

        return _stream(work)

    async def send(self, request: Request) -> Response:
        wanted, session_id = await _body(request, SendRequest), request.path_params["id"]
        self._end_draft(session_id)

        def work(emit: Emit, cancel: threading.Event) -> None:
            with self.hub.use(session_id, cancel) as held:
                listener = _listener(emit, cancel)
                result = held.conversation.send(
                    wanted.text, wanted.options, listener, wanted.system
                )
                emit(_result(held, result))

        return _stream(work)

    async def go_on(self, request: Request) -> Response:
        wanted, session_id = await _body(request, OptionsRequest), request.path_params["id"]
        self._end_draft(session_id)

        def work(emit: Emit, cancel: threading.Event) -> None:
            with self.hub.use(session_id, cancel) as held:
                result = held.conversation.resume_reply(wanted.options, _listener(emit, cancel))
                emit(_result(held, result))

        return _stream(work)

    async def draft(self, request: Request) -> Response:
        """The newest draft counts: one that is still being prefilled ends."""
        wanted, session_id = await _body(request, DraftRequest), request.path_params["id"]
        self._end_draft(session_id)
        cancel = self._drafts[session_id] = threading.Event()

        def work() -> dict[str, Any]:
            with self.hub.use(session_id, cancel) as held:
                conversation = held.conversation
                cached = prefill_draft(conversation, wanted.text, cancel.is_set, wanted.system)
                return {"cached": cached, "history": len(conversation.log)}

        return await _answer(work)

    async def cancel(self, request: Request) -> Response:
        return JSONResponse({"cancelled": self.hub.cancel(request.path_params["id"])})

    async def rewind(self, request: Request) -> Response:
        wanted, session_id = await _body(request, RewindRequest), request.path_params["id"]
        self._end_draft(session_id)

        def work() -> dict[str, Any]:
            with self.hub.use(session_id, threading.Event()) as held:
                held.conversation.rewind(wanted.num_turns)
                return describe(held)

        return await _answer(work)

    async def release(self, request: Request) -> Response:
        await run_in_threadpool(self.hub.release, request.path_params["id"])
        return JSONResponse({"released": True})

    def _end_draft(self, session_id: str) -> None:
        running = self._drafts.pop(session_id, None)
        if running is not None:
            running.set()


def describe(held: Held) -> dict[str, Any]:
    """A conversation as a face shows it."""
    conversation, runtime = held.conversation, held.runtime
    session = conversation.session
    return {
        "session": session.id,
        "title": session.title,
        "is_resumed": held.is_resumed,
        "model": runtime.prepared.name,
        "dtype": runtime.prepared.dtype,
        "num_tokens": len(conversation.log),
        "max_tokens": runtime.engine.max_tokens,
        "notices": list(runtime.notices),
        "turns": [
            {
                "turn": turn.index,
                "system": turn.system_text,
                "user": turn.user_text,
                "reply": turn.reply_text,
                "state": turn.state,
                "finish_reason": turn.finish_reason,
                "stats": turn.stats,
            }
            for turn in conversation.turns
        ],
    }


def _resident_bytes() -> int:
    """Memory that this process takes."""
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _result(held: Held, result: TurnResult) -> Event:
    unsaved = held.conversation.journal.num_unsaved
    return Event("result", data=result.to_json() | {"num_unsaved": unsaved})


def _listener(emit: Emit, cancel: threading.Event) -> Listener:
    return Listener(
        lambda text: emit(Event("text", text=text)),
        lambda stage, done, total: emit(Event("progress", stage, done, total)),
        cancel.is_set,
    )


def _stream(work: Callable[[Emit, threading.Event], None]) -> Response:
    async def lines() -> Any:
        async for event in events(work):
            yield encode(event)

    return StreamingResponse(lines(), media_type="application/x-ndjson")


async def _body(request: Request, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(await request.body() or b"{}", type=kind)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise UsageError(f"{request.url.path}: {error}") from None


async def _answer(work: Callable[[], dict[str, Any]]) -> Response:
    return JSONResponse(await run_in_threadpool(work))


def on_error(request: Request, error: Exception) -> Response:
    """Errors before a stream: the same object as inside one."""
    status = 400 if isinstance(error, ChatkvError) else 409
    event = error_event(error)
    return Response(encode(event), status, media_type="application/json")


EXCEPTION_HANDLERS = {ChatkvError: on_error, StoreError: on_error}
