"""The sessions of chatkv's own API for its page, which comes over TCP: whoever asks may name only
what is theirs, by its whole id, and only models that are offered.
"""

from __future__ import annotations

import threading
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chatkv.server.body import body_as
from chatkv.server.carriers import owner_of
from chatkv.server.library import find
from chatkv.server.offered import Offered
from chatkv.server.own import OwnApi, describe, event_stream, on_error, progress_to
from chatkv.server.stream import Emit
from chatkv.server.wire import Event, OpenRequest
from chatkv.session.request import ChatRequest


class Sessions:
    """The routes over the engine's own API."""

    def __init__(self, own: OwnApi, offered: Offered) -> None:
        self._own, self._offered = own, offered

    def routes(self) -> list[Route]:
        opening = Route("/sessions", self.open, methods=["POST"])
        return [self._guarded(route) for route in (*self._own.session_routes(), opening)]

    async def open(self, request: Request) -> Response:
        """Open a session, or begin one: a stream of events that ends with what was said in it."""
        wanted = await body_as(request, OpenRequest)
        is_named = wanted.model or wanted.session is None
        model = self._offered.spec_of(wanted.model) if is_named else None
        if wanted.session is not None:
            await run_in_threadpool(find, self._own.hub, request, wanted.session)
        chat = ChatRequest(model, resume=wanted.session, seed=wanted.seed, owner=owner_of(request))

        def work(emit: Emit, cancel: threading.Event) -> None:
            emit(Event("session", data=describe(self._own.hub.open(chat, progress_to(emit)))))

        return event_stream(work)

    def _guarded(self, route: Route) -> Route:
        """`route` for those whose session it is, with errors in the form of its events."""
        inside: Any = route.endpoint

        async def endpoint(request: Request) -> Response:
            session_id = request.path_params.get("id")
            try:
                if session_id is not None:
                    await run_in_threadpool(find, self._own.hub, request, session_id)
                response: Response = await inside(request)
                return response
            except Exception as error:
                return on_error(request, error)

        endpoint.__doc__ = inside.__doc__
        return Route(route.path, endpoint, methods=sorted((route.methods or set()) - {"HEAD"}))
