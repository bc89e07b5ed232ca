"""/health, /metrics and /openapi.json: for whoever runs the server, or is to talk to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chatkv.server.answer import Answers
from chatkv.server.cache import disk_figures
from chatkv.server.http import in_thread
from chatkv.server.metrics import Metrics
from chatkv.server.openapi import document
from chatkv_store.errors import StoreError


class Watch:
    """The routes. `described`: all others."""

    def __init__(self, answers: Answers, described: Sequence[BaseRoute]) -> None:
        self._answers, self._described = answers, list(described)

    def routes(self) -> list[Route]:
        return [
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/openapi.json", self.schema),
        ]

    async def health(self, request: Request) -> Response:
        """That requests are answered."""
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """Counters and gauges, as Prometheus reads them."""

        def look() -> str:
            try:
                disk = disk_figures(self._answers.hub)
            except (StoreError, OSError):  # the rest is worth knowing all the more
                disk = {}
            return self._answers.metrics.text(self._answers.hub.status(), disk)

        text = await in_thread(look)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def schema(self, request: Request) -> Response:
        """What can be asked, in OpenAPI's form."""
        found = document([*self._described, *self.routes()], list(self._answers.offered.models))
        return JSONResponse(found)


class Counted:
    """Counts requests by their route and status; unknown paths are one."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        status = 499

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._metrics.num_open += 1
        try:
            await self._app(scope, receive, watched)
        finally:
            self._metrics.num_open -= 1
            route: Any = scope.get("route")
            path = route.path if isinstance(route, Route) else "other"
            self._metrics.requests[path, status] += 1
