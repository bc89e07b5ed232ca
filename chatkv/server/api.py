"""The application that listens on TCP: every dialect, and what watches over it."""

from __future__ import annotations

import threading
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

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
from chatkv.server.cache import Cache
from chatkv.server.http import error_response, routes
from chatkv.server.hub import Hub
from chatkv.server.listen import Listen
from chatkv.server.metrics import Metrics
from chatkv.server.offered import Offered
from chatkv.server.security import Guard
from chatkv.server.sessions import Sessions
from chatkv.server.watch import Counted, Watch


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
        *routes(Cache(hub).handlers(), openai_writer.error_body),
        *Sessions(own_api, offered).routes(),
        *page.routes(),
    ]
    found += Watch(answers, found).routes()
    on_error: dict[Any, Any] = dict.fromkeys((HTTPException, Exception), _on_error)
    app = Starlette(routes=found, exception_handlers=on_error)
    return Guard(Counted(app, metrics), listen.access)


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
