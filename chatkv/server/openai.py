"""OpenAI's dialect: /v1/chat/completions, /v1/completions and /v1/models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from chatkv.errors import UsageError
from chatkv.server.answer import Answers
from chatkv.server.asked import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    Asked,
    flag,
    messages_of,
    options_of,
    text,
    tools_of,
    whole,
)
from chatkv.server.carriers import carriers_of, is_scratch, owner_of
from chatkv.server.form import Form, calls_in, schema_in
from chatkv.server.http import (
    Handler,
    body_of,
    in_thread,
    respond,
)
from chatkv.server.openai_writer import ChatWriter, CompletionWriter, error_body


class OpenAI:
    """The handlers over one hub's answers."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def handlers(self) -> dict[str, Handler]:
        return {
            "POST /v1/chat/completions": self.chat,
            "POST /v1/completions": self.complete,
            "GET /v1/models": self.models,
            "GET /v1/models/{name:path}": self.model,
        }

    async def chat(self, request: Request) -> Response:
        """The next message of a conversation."""
        body = await body_of(request)
        asked = chat_asked(request, body)
        wants = body.get("stream_options")
        with_usage = isinstance(wants, dict) and bool(wants.get("include_usage"))
        writer = ChatWriter(with_usage, flag(body, "return_progress"))
        return await respond(request, self._answers, asked, writer, error_body)

    async def complete(self, request: Request) -> Response:
        """What the model writes behind a text."""
        body = await body_of(request)
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1:
            prompt = prompt[0]
        if not isinstance(prompt, str):
            raise UsageError("prompt must be a text")
        limit = whole(body, "max_tokens", 16)
        asked = Asked(
            text(body, "model", ""),
            prompt=prompt,
            options=options_of(body, limit, body.get("stop"), is_background=True),
            form=Form(schema_in(body.get("response_format"))),
            is_scratch=True,
            is_streamed=flag(body, "stream"),
            num_choices=num_choices(body),
            num_logprobs=_logprobs(whole(body, "logprobs", None), "logprobs"),
            owner=owner_of(request),
        )
        wants = body.get("stream_options")
        with_usage = isinstance(wants, dict) and bool(wants.get("include_usage"))
        return await respond(
            request, self._answers, asked, CompletionWriter(with_usage), error_body
        )

    async def models(self, request: Request) -> Response:
        """The models that may be asked for."""
        names = list(self._answers.offered.models)
        data = await in_thread(lambda: [self._model(name) for name in names])
        return JSONResponse({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        """One model."""
        return JSONResponse(await in_thread(self._model, request.path_params["name"]))

    def _model(self, name: str) -> dict[str, Any]:
        found = self._answers.offered.find(name)
        about: dict[str, Any] = {
            "id": found.name,
            "object": "model",
            "created": int(found.changed_at),
            "owned_by": "chatkv",
            "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        }
        for loaded in self._answers.hub.status()["models"]:
            if loaded["model"] == found.name:
                about["context_length"] = loaded["context"]
        return about


def chat_asked(request: Request, body: dict[str, Any]) -> Asked:
    """A chat completion's request."""
    messages = messages_of(body.get("messages"))
    tools = tools_of(body.get("tools")) if body.get("tool_choice") != "none" else ()
    scratch = is_scratch(request, body, messages)
    limit = whole(body, "max_completion_tokens", None) or whole(body, "max_tokens", None)
    num_logprobs = None
    if flag(body, "logprobs"):
        num_logprobs = _logprobs(whole(body, "top_logprobs", 0), "top_logprobs")
    return Asked(
        text(body, "model", ""),
        messages,
        options=options_of(body, limit, body.get("stop"), is_background=scratch),
        tools=tools,
        form=form_of(body, body.get("response_format"), tools),
        carriers=carriers_of(request, body),
        is_scratch=scratch,
        is_streamed=flag(body, "stream"),
        num_choices=num_choices(body),
        num_logprobs=num_logprobs,
        owner=owner_of(request),
    )


def form_of(body: dict[str, Any], wanted: Any, tools: Sequence[dict[str, Any]]) -> Form:
    """The form of an answer: `wanted` of its text, `tool_choice` and strict tools of its calls."""
    choice = body.get("tool_choice")
    must: str | bool = choice == "required"
    if isinstance(choice, dict) and choice.get("type") == "function":
        must = text(choice.get("function", choice), "name")
    is_one = not flag(body, "parallel_tool_calls", True)
    return Form(schema_in(wanted), calls_in(tools, must, is_one))


def _logprobs(wanted: int | None, name: str) -> int | None:
    if wanted is not None and not 0 <= wanted <= MAX_LOGPROBS:
        raise UsageError(f"{name} must be from 0 to {MAX_LOGPROBS}")
    return wanted


def num_choices(body: dict[str, Any]) -> int:
    n: int = whole(body, "n", 1)
    if not 1 <= n <= MAX_CHOICES:
        raise UsageError(f"n must be from 1 to {MAX_CHOICES}")
    return n
