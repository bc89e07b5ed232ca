"""Answers as Anthropic's messages, streamed and whole."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any

from chatkv.server.answer import dumps
from chatkv.server.http import Problem
from chatkv.server.wire import Event

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}


def error_body(problem: Problem) -> dict[str, Any]:
    """Anthropic's form of an error."""
    other = "invalid_request_error" if problem.status < 500 else "api_error"
    kind = _TYPES.get(problem.status, other)
    return {"type": "error", "error": {"type": kind, "message": problem.message}}


class Writer:
    """A message, whole or as its events."""

    media_type = "text/event-stream"
    alive = b'event: ping\ndata: {"type":"ping"}\n\n'

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
