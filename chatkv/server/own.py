"""chatkv's own API: sessions, turns as streams of events, drafts, status.

GET    /status                          what is loaded, open and running
POST   /stop                            end the process, once all is saved
POST   /sessions                        open a session, or begin one      -> stream
POST   /sessions/ID/turns               say something, hear the answer    -> stream
POST   /sessions/ID/continue            go on with the last answer        -> stream
POST   /sessions/ID/draft               restore, prefill what is being typed -> stream
POST   /sessions/ID/cancel              stop what is running
POST   /sessions/ID/rewind              take turns back (they stay as a branch)
POST   /sessions/ID/switch              go on from another turn of the session's tree
POST   /sessions/ID/release             close it, so that others may write

What needs no model is in `library`, and who else may ask in `sessions`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from chatkv import __version__
from chatkv.engine.scheduler import Cancelled
from chatkv.errors import ChatkvError, UsageError
from chatkv.process import resident_bytes
from chatkv.server.body import body_as
from chatkv.server.hub import Held, Hub
from chatkv.server.library import Library
from chatkv.server.stream import Emit, events
from chatkv.server.wire import (
    DraftRequest,
    Event,
    OptionsRequest,
    RewindRequest,
    SendRequest,
    StopRequest,
    SwitchRequest,
    encode,
    error_event,
)
from chatkv.session.ahead import make_ready
from chatkv.session.conversation import Conversation
from chatkv.session.ready import Ready
from chatkv.session.request import ChatRequest
from chatkv.session.turn import Listener, TurnResult
from chatkv_store.errors import SessionAmbiguous, SessionNotFound, StoreError


class OwnApi:
    """The routes over one hub. on_stop() is asked to end the process; `urls` is where others than
    chatkv's own programs are served."""

    def __init__(self, hub: Hub, on_stop: Callable[[], None], urls: Sequence[str] = ()) -> None:
        self.hub, self._on_stop, self._urls = hub, on_stop, list(urls)
        self._drafts: dict[str, threading.Event] = {}

    def routes(self) -> list[Route]:
        """All of them, for the engine's own socket."""
        return [
            Route("/status", self.status),
            _post("/stop", self.stop),
            _post("/sessions", self.open),
            *self.session_routes(),
        ]

    def session_routes(self) -> list[Route]:
        """What is asked of sessions that are there."""
        return [
            *Library(self.hub).routes(),
            _post("/sessions/{id}/turns", self.send),
            _post("/sessions/{id}/continue", self.go_on),
            _post("/sessions/{id}/draft", self.draft),
            _post("/sessions/{id}/cancel", self.cancel),
            _post("/sessions/{id}/rewind", self.rewind),
            _post("/sessions/{id}/switch", self.switch),
            _post("/sessions/{id}/release", self.release),
        ]

    async def status(self, request: Request) -> Response:
        about = {"version": __version__, "pid": os.getpid(), "memory_bytes": resident_bytes()}
        about |= {"urls": self._urls}
        return JSONResponse(about | await run_in_threadpool(self.hub.status))

    async def stop(self, request: Request) -> Response:
        wanted = await body_as(request, StopRequest)
        num_unsaved = 0 if wanted.force else await run_in_threadpool(self.hub.save)
        if num_unsaved:
            raise UsageError(
                f"{num_unsaved} of the turns that were said could not be saved yet: free some "
                "space on the disk, or lose them with `chatkv stop --force`"
            )
        self._on_stop()
        return JSONResponse({"stopping": True})

    async def open(self, request: Request) -> Response:
        wanted = await body_as(request, ChatRequest)

        def work(emit: Emit, cancel: threading.Event) -> None:
            held = self.hub.open(wanted, progress_to(emit))
            emit(Event("session", data=describe(held)))

        return event_stream(work)

    async def send(self, request: Request) -> Response:
        """Say something and hear the answer, as a stream of events."""
        wanted, session_id = await body_as(request, SendRequest), request.path_params["id"]
        self._end_draft(session_id)

        def work(emit: Emit, cancel: threading.Event) -> None:
            with self.hub.use(session_id, cancel) as held:
                listener = _listener(emit, cancel)
                with _going_back(held.conversation, wanted.num_turns):
                    result = held.conversation.send(
                        wanted.text, wanted.options, listener, wanted.system
                    )
                answered = _result(held, result)
            emit(answered)  # who hears it may go on at once

        return event_stream(work)

    async def go_on(self, request: Request) -> Response:
        """Go on with the last answer, as a stream of events."""
        wanted, session_id = await body_as(request, OptionsRequest), request.path_params["id"]
        self._end_draft(session_id)

        def work(emit: Emit, cancel: threading.Event) -> None:
            with self.hub.use(session_id, cancel) as held:
                result = held.conversation.resume_reply(wanted.options, _listener(emit, cancel))
                answered = _result(held, result)
            emit(answered)  # who hears it may go on at once

        return event_stream(work)

    async def draft(self, request: Request) -> Response:
        """Prefill what is being typed. The newest draft counts: one that is still running ends."""
        wanted, session_id = await body_as(request, DraftRequest), request.path_params["id"]
        self._end_draft(session_id)
        mine = self._drafts[session_id] = threading.Event()

        def work(emit: Emit, cancel: threading.Event) -> None:
            def is_over() -> bool:
                if cancel.is_set():  # whoever typed it is gone
                    mine.set()
                return mine.is_set()

            ready = Ready(0)
            with suppress(Cancelled), self.hub.use(session_id, mine, is_draft=True) as held:
                ready = make_ready(
                    held.conversation, wanted.text, is_over, wanted.system, progress_to(emit)
                )
            if self._drafts.get(session_id) is mine:
                self._drafts.pop(session_id, None)
            emit(Event("result", data=asdict(ready)))

        return event_stream(work)

    async def cancel(self, request: Request) -> Response:
        """Stop what is running in a session."""
        return JSONResponse({"cancelled": self.hub.cancel(request.path_params["id"])})

    async def rewind(self, request: Request) -> Response:
        """Take turns back; they stay as a branch."""
        wanted = await body_as(request, RewindRequest)
        return await self._change(request, lambda talk: talk.rewind(wanted.num_turns))

    async def switch(self, request: Request) -> Response:
        """Go on from another turn of the session's tree."""
        wanted = await body_as(request, SwitchRequest)
        return await self._change(request, lambda talk: talk.switch(wanted.turn))

    async def _change(self, request: Request, change: Callable[[Conversation], None]) -> Response:
        session_id = request.path_params["id"]
        self._end_draft(session_id)

        def work() -> dict[str, Any]:
            with self.hub.use(session_id, threading.Event()) as held:
                change(held.conversation)
                return describe(held)

        return await _answer(work)

    async def release(self, request: Request) -> Response:
        """Close a session, so that others may write."""
        self._end_draft(request.path_params["id"])
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
        "weights": runtime.prepared.stored,
        "weights_why": runtime.weights.why,
        "num_tokens": len(conversation.log),
        "max_tokens": runtime.engine.max_tokens,
        "notices": list(runtime.notices),
        "turns": [turn.to_json() for turn in conversation.turns],
    }


def _post(path: str, handler: Callable[..., Any]) -> Route:
    return Route(path, handler, methods=["POST"])


@contextmanager
def _going_back(conversation: Conversation, num_turns: int | None) -> Iterator[None]:
    """Say something from behind the first num_turns turns, None: from behind the last one. Where it
    is refused, the conversation ends where it did."""
    head = conversation.turns[-1].id if conversation.turns else None
    if num_turns is not None:
        conversation.rewind(num_turns)
    try:
        yield
    except Exception:
        if head is not None and len(conversation.turns) == num_turns:
            with suppress(StoreError):
                conversation.switch(head)
        raise


def _result(held: Held, result: TurnResult) -> Event:
    conversation = held.conversation
    beside = {
        "num_unsaved": conversation.journal.num_unsaved,
        "title": conversation.session.title,
        "stats": conversation.turns[-1].stats,
    }
    return Event("result", data=result.to_json() | beside)


def progress_to(emit: Emit) -> Callable[[str, int, int], None]:
    return lambda stage, done, total: emit(Event("progress", stage, done, total))


def _listener(emit: Emit, cancel: threading.Event) -> Listener:
    return Listener(
        lambda text: emit(Event("text", text=text)),
        progress_to(emit),
        cancel.is_set,
    )


def event_stream(work: Callable[[Emit, threading.Event], None]) -> Response:
    """What `work` emits, one object a line."""

    async def lines() -> Any:
        async for event in events(work):
            yield encode(event)

    headers = {"Cache-Control": "no-store"}
    return StreamingResponse(lines(), media_type="application/x-ndjson", headers=headers)


async def _answer(work: Callable[[], dict[str, Any]]) -> Response:
    return JSONResponse(await run_in_threadpool(work))


def on_error(request: Request, error: Exception) -> Response:
    """Errors before a stream: the same object as inside one."""
    status = 400
    if isinstance(error, (SessionNotFound, SessionAmbiguous)):
        status = 404
    elif isinstance(error, StoreError):
        status = 409
    elif isinstance(error, HTTPException):
        status, error = error.status_code, UsageError(f"{request.url.path}: {error.detail}")
    elif not isinstance(error, ChatkvError):
        status, error = 500, RuntimeError(f"the engine failed: {error!r}; its log has more")
    return Response(encode(error_event(error)), status, media_type="application/json")


EXCEPTION_HANDLERS: dict[Any, Any] = dict.fromkeys(
    (ChatkvError, StoreError, HTTPException, Exception), on_error
)
