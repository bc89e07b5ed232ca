"""Anthropic's dialect: /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from chatkv.errors import UsageError
from chatkv.server.answer import Answers
from chatkv.server.anthropic_writer import Writer, error_body
from chatkv.server.asked import Asked, content_of, flag, listed, options_of, text, whole
from chatkv.server.carriers import carriers_of, is_scratch, owner_of
from chatkv.server.form import Form, calls_in, schema_in
from chatkv.server.http import (
    Handler,
    body_of,
    in_thread,
    respond,
)
from chatkv.session.messages import Message

# Blocks of the system prompt that change with each request and say nothing to the model.
_VOLATILE = re.compile(r"\A\s*x-anthropic-billing-header\b")


class Anthropic:
    """The handlers over one hub's answers."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def handlers(self) -> dict[str, Handler]:
        return {
            "POST /v1/messages": self.messages,
            "POST /v1/messages/count_tokens": self.count,
        }

    async def messages(self, request: Request) -> Response:
        """The next message of a conversation."""
        body = await body_of(request)
        asked = _asked(request, body)
        return await respond(request, self._answers, asked, Writer(), error_body)

    async def count(self, request: Request) -> Response:
        """How many tokens a request's prompt has."""
        body = await body_of(request)
        asked = _asked(request, body | {"max_tokens": 1})

        def work() -> int:
            parts = self._answers.runtime(asked.model).scratch_parts()
            rendered = parts.template.with_tools(asked.tools).render(asked.messages)
            return len(parts.tokenizer.encode_rendered(rendered.text, rendered.content_spans))

        return JSONResponse({"input_tokens": await in_thread(work)})


def _asked(request: Request, body: dict[str, Any]) -> Asked:
    limit = whole(body, "max_tokens", None)
    if limit is None:
        raise UsageError("max_tokens is missing")
    messages = (*_system(body.get("system")), *_messages(body.get("messages")))
    scratch = is_scratch(request, body, messages)
    choice = body.get("tool_choice")
    choice = choice if isinstance(choice, dict) else {}
    tools = _tools(body.get("tools")) if choice.get("type") != "none" else ()
    return Asked(
        text(body, "model", ""),
        messages,
        options=options_of(body, limit, body.get("stop_sequences"), is_background=scratch),
        tools=tools,
        form=_form(body, choice, tools),
        carriers=carriers_of(request, body),
        is_scratch=scratch,
        is_streamed=flag(body, "stream"),
        owner=owner_of(request),
    )


def _form(body: dict[str, Any], choice: dict[str, Any], tools: Sequence[dict[str, Any]]) -> Form:
    config = body.get("output_config")
    wanted = config.get("format") if isinstance(config, dict) else body.get("output_format")
    must: str | bool = choice.get("type") == "any"
    if choice.get("type") == "tool":
        must = text(choice, "name")
    is_one = flag(choice, "disable_parallel_tool_use")
    return Form(schema_in(wanted, "output_config.format"), calls_in(tools, must, is_one))


def _system(system: Any) -> list[Message]:
    if isinstance(system, list):
        blocks = [content_of([block], "system") for block in system]
        system = "\n".join(block for block in blocks if not _VOLATILE.match(block))
    found = content_of(system, "system")
    return [{"role": "system", "content": found}] if found else []


def _messages(value: Any) -> list[Message]:
    """In OpenAI's form: results of tools become messages of their own."""
    if not isinstance(value, list) or not value:
        raise UsageError("messages must be a list of at least one message")
    found: list[Message] = []
    for index, given in enumerate(value):
        where = f"messages[{index}]"
        role = given.get("role") if isinstance(given, dict) else None
        if role not in ("user", "assistant", "system"):
            raise UsageError(f"{where}: role must be user or assistant")
        content = given.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        found += _of_blocks(role, listed(blocks, where), where)
    return found


def _of_blocks(role: str, blocks: Any, where: str) -> list[Message]:
    texts, calls, results = [], [], []
    for block in blocks:
        match block.get("type") if isinstance(block, dict) else None:
            case "text":
                texts.append(content_of([block], where))
            case "thinking" | "redacted_thinking":
                pass
            case "tool_use":
                function = {"name": str(block.get("name")), "arguments": block.get("input", {})}
                calls.append({"type": "function", "id": str(block.get("id")), "function": function})
            case "tool_result":
                said = content_of(block.get("content"), where)
                about = {"tool_call_id": str(block.get("tool_use_id"))}
                results.append({"role": "tool", "content": said, **about})
            case kind:
                raise UsageError(f"{where}: this model reads text only, and no {kind}")
    message: Message = {"role": role, "content": "".join(texts)}
    if calls:
        message["tool_calls"] = calls
    return [*results, *([message] if texts or calls or not results else [])]


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
    found = []
    for tool in listed(value or [], "tools"):
        if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
            raise UsageError("tools: each needs a name")
        function = {
            "name": tool["name"],
            "description": str(tool.get("description", "")),
            "parameters": tool.get("input_schema", {}),
        }
        if tool.get("strict") is True:
            function["strict"] = True
        found.append({"type": "function", "function": function})
    return tuple(found)
