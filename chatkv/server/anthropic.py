"""Anthropic's dialect: /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from chatkv.errors import UsageError
from chatkv.server.answer import Answers, dumps
from chatkv.server.asked import Asked, content_of, flag, listed, options_of, text, whole
from chatkv.server.http import (
    Handler,
    Problem,
    body_of,
    carriers_of,
    in_thread,
    is_scratch,
    owner_of,
    respond,
)
from chatkv.server.wire import Event
from chatkv.session.messages import Message

# Blocks of the system prompt that change with each request and say nothing to the model.
_VOLATILE = re.compile(r"\A\s*x-anthropic-billing-header\b")
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}


def error_body(problem: Problem) -> dict[str, Any]:
    """Anthropic's form of an error."""
    other = "invalid_request_error" if problem.status < 500 else "api_error"
    kind = _TYPES.get(problem.status, other)
    return {"type": "error", "error": {"type": kind, "message": problem.message}}


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
        return await respond(request, self._answers, asked, Writer())

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
    wants_tools = not (isinstance(choice, dict) and choice.get("type") == "none")
    return Asked(
        text(body, "model", ""),
        messages,
        options=options_of(body, limit, body.get("stop_sequences"), is_background=scratch),
        tools=_tools(body.get("tools")) if wants_tools else (),
        carriers=carriers_of(request, body),
        is_scratch=scratch,
        is_streamed=flag(body, "stream"),
        owner=owner_of(request),
    )


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
        found.append({"type": "function", "function": function})
    return tuple(found)


class Writer:
    """A message, whole or as its events."""

    media_type = "text/event-stream"
    alive = b'event: ping\ndata: {"type":"ping"}\n\n'
    error_body = staticmethod(error_body)

    def __init__(self) -> None:
        self._id = f"msg_{os.urandom(12).hex()}"
        self._model = ""
        self._has_begun = False
        self._block: str | None = None  # the kind of the open one
        self._num_blocks = 0
        self._cached, self._total = 0, 0

    def write(self, event: Event) -> bytes:
        match event.event:
            case "session":
                self._model = event.data["model"]
            case "progress" if event.stage == "prefill":
                return self._begin(event.done, event.total)
            case "text":
                return self._begin(0, 0) + self._piece(event)
            case "result":
                return self._begin(0, 0) + self._end(event.data)
        return b""

    def error(self, problem: Problem) -> bytes:
        return _sse("error", error_body(problem))

    def whole(self, result: dict[str, Any]) -> dict[str, Any]:
        (choice,) = result["choices"]
        content: list[dict[str, Any]] = []
        if choice["reasoning"]:
            content.append({"type": "thinking", "thinking": choice["reasoning"], "signature": ""})
        if choice["content"] or not choice["calls"]:
            content.append({"type": "text", "text": choice["content"]})
        content += [_tool_use(call) for call in choice["calls"]]
        return self._message(content) | {
            "model": result["model"],
            "stop_reason": _stop_reason(choice),
            "usage": _usage(result),
            "timings": result["timings"],
        }

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _begin(self, cached: int, total: int) -> bytes:
        """Told with the first word of what the cache holds."""
        if self._has_begun:
            return b""
        self._has_begun = True
        usage = {
            "input_tokens": total - cached,
            "output_tokens": 0,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
        }
        message = self._message([]) | {"usage": usage}
        begun = _sse("message_start", {"type": "message_start", "message": message})
        return begun + self.alive

    def _piece(self, event: Event) -> bytes:
        kind = event.data["kind"]
        if kind == "call":
            use = _tool_use(event.data["call"])
            delta = {"type": "input_json_delta", "partial_json": dumps(use["input"])}
            return self._open("call", use | {"input": {}}) + self._delta(delta) + self._close()
        if kind == "reasoning":
            opened = self._open(kind, {"type": "thinking", "thinking": "", "signature": ""})
            return opened + self._delta({"type": "thinking_delta", "thinking": event.text})
        opened = self._open(kind, {"type": "text", "text": ""})
        return opened + self._delta({"type": "text_delta", "text": event.text})

    def _open(self, kind: str, block: dict[str, Any]) -> bytes:
        if self._block == kind:
            return b""
        out = self._close()
        self._block = kind
        start = {"type": "content_block_start", "index": self._num_blocks, "content_block": block}
        return out + _sse("content_block_start", start)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        said = {"type": "content_block_delta", "index": self._num_blocks, "delta": delta}
        return _sse("content_block_delta", said)

    def _close(self) -> bytes:
        if self._block is None:
            return b""
        self._block = None
        stop = {"type": "content_block_stop", "index": self._num_blocks}
        self._num_blocks += 1
        return _sse("content_block_stop", stop)

    def _end(self, result: dict[str, Any]) -> bytes:
        (choice,) = result["choices"]
        out = b""
        if not self._num_blocks and self._block is None:  # nothing was said
            out = self._open("content", {"type": "text", "text": ""})
        out += self._close()
        delta = {"stop_reason": _stop_reason(choice), "stop_sequence": None}
        about = {"usage": _usage(result), "timings": result["timings"]}
        out += _sse("message_delta", {"type": "message_delta", "delta": delta, **about})
        return out + _sse("message_stop", {"type": "message_stop"})


def _usage(result: dict[str, Any]) -> dict[str, Any]:
    cached = result["cached_tokens"]
    return {
        "input_tokens": result["prompt_tokens"] - cached,
        "output_tokens": result["generated_tokens"],
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
    }


def _stop_reason(choice: dict[str, Any]) -> str:
    if choice["calls"]:
        return "tool_use"
    return "max_tokens" if choice["finish_reason"] == "length" else "end_turn"


def _tool_use(call: dict[str, Any]) -> dict[str, Any]:
    arguments: Any = call["function"]["arguments"]
    with suppress(ValueError):
        arguments = json.loads(arguments)
    name = call["function"]["name"]
    return {"type": "tool_use", "id": call["id"], "name": name, "input": arguments}


def _sse(event: str, value: dict[str, Any]) -> bytes:
    return f"event: {event}\ndata: {dumps(value)}\n\n".encode()
