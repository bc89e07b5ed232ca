"""The application that listens on TCP: every dialect, and what watches over it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chatkv import __version__
from chatkv.server import (
    anthropic,
    anthropic_writer,
    ollama,
    openai,
    openai_writer,
    own,
    page,
    responses,
)
from chatkv.server.answer import Answers
from chatkv.server.http import error_response, in_thread, routes
from chatkv.server.hub import Hub
from chatkv.server.listen import Listen
from chatkv.server.metrics import Metrics
from chatkv.server.offered import Offered
from chatkv.server.security import Guard
from chatkv.server.sessions import Sessions


def application(hub: Hub, listen: Listen, own_api: own.OwnApi) -> ASGIApp:
    """Everything behind the TCP port. Raises ModelError for a model that is not there."""
    metrics = Metrics()
    offered = Offered(hub.folders, listen.models)
    answers = Answers(hub, offered, metrics)
    threading.Thread(target=answers.warm_up, name="warm-up", daemon=True).start()
    found: list[BaseRoute] = [
        *routes(openai.OpenAI(answers).handlers(), openai_writer.error_body),
        *routes(responses.Responses(answers).handlers(), openai_writer.error_body),
        *routes(anthropic.Anthropic(answers).handlers(), anthropic_writer.error_body),
        *routes(ollama.Ollama(answers).handlers(), ollama.error_body),
        *Sessions(own_api, offered).routes(),
        *page.routes(),
    ]
    found += Watch(answers, found).routes()
    on_error: dict[Any, Any] = dict.fromkeys((HTTPException, Exception), _on_error)
    app = Starlette(routes=found, exception_handlers=on_error)
    return Guard(Counted(app, metrics), listen.access)


class Watch:
    """/health, /metrics and /openapi.json."""

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
        status = await in_thread(self._answers.hub.status)
        text = self._answers.metrics.text(status)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def schema(self, request: Request) -> Response:
        """What can be asked, in OpenAPI's form."""
        paths: dict[str, Any] = {}
        for route in [*self._described, *self.routes()]:
            assert isinstance(route, Route)
            for method in (route.methods or set()) - {"HEAD"}:
                path = route.path.replace(":path}", "}")
                paths.setdefault(path, {})[method.lower()] = _operation(route, method)
        about = {"title": "chatkv", "version": __version__}
        return JSONResponse({"openapi": "3.1.0", "info": about, "paths": paths})


def _operation(route: Route, method: str) -> dict[str, Any]:
    placed = [part for part in route.path.split("/") if part.startswith("{")]
    names = [part.strip("{}").partition(":")[0] for part in placed]
    operation: dict[str, Any] = {
        "summary": (route.endpoint.__doc__ or "").strip().partition("\n")[0],
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ],
        "responses": {
            "200": {"description": "The answer."},
            "4XX": {"description": "What is wrong with the request."},
        },
    }
    if method == "POST":
        content = {"application/json": {"schema": {"type": "object"}}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


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
            route = scope.get("route")
            path = route.path if isinstance(route, Route) else "other"
            self._metrics.requests[path, status] += 1


async def _on_error(request: Request, error: Exception) -> Response:
    path = request.url.path
    if path.startswith("/sessions"):
        return own.on_error(request, error)
    if path.startswith("/api/"):
        return error_response(error, ollama.error_body)
    is_anthropic = path.startswith("/v1/messages")
    return error_response(
        error, anthropic_writer.error_body if is_anthropic else openai_writer.error_body
    )
