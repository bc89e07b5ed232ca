"""Answers as OpenAI's responses, streamed and whole."""

from __future__ import annotations

import os
import time
from typing import Any

from chatkv.server.answer import dumps
from chatkv.server.http import Problem
from chatkv.server.openai_writer import ALIVE
from chatkv.server.wire import Event


class Writer:
    """A response, whole or as its numbered events."""

    media_type, alive = "text/event-stream", ALIVE

    def __init__(self, body: dict[str, Any], response_id: str) -> None:
        self._body = body
        self._id, self._created = response_id, int(time.time())
        self._item = f"msg_{os.urandom(12).hex()}"
        self._number = -1
        self._text = ""
        self._is_open = False

    def write(self, event: Event) -> bytes:
        match event.event:
            case "session":
                self._body = self._body | {"model": event.data["model"]}
            case "progress" if event.stage == "begin":
                begun = self._response("in_progress")
                out = self._event("response.created", response=begun)
                return out + self._event("response.in_progress", response=begun)
            case "progress" if event.stage == "prefill":
                return f": prefill {event.done}/{event.total}\n\n".encode()
            case "text" if event.data["kind"] == "content":
                self._text += event.text
                return self._open() + self._event(
                    "response.output_text.delta", **self._part(), delta=event.text, logprobs=[]
                )
            case "result":
                return self._end(event.data)
        return b""

    def error(self, problem: Problem) -> bytes:
        return self._event("error", code=problem.code, message=problem.message, param=None)

    def whole(self, result: dict[str, Any]) -> dict[str, Any]:
        (choice,) = result["choices"]
        is_whole = choice["finish_reason"] != "length"
        calls = list(choice["calls"])
        output = output_of(choice["content"], choice["reasoning"], calls, self._item)
        prompt, generated = result["prompt_tokens"], result["generated_tokens"]
        reasoning_tokens = choice["reasoning_tokens"]
        return self._response("completed" if is_whole else "incomplete") | {
            "model": result["model"],
            "output": output,
            "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {
                    "cached_tokens": result["cached_tokens"],
                    "cache_write_tokens": result["timings"]["prompt_n"],
                },
                "output_tokens": generated,
                "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
                "total_tokens": prompt + generated,
            },
            "timings": result["timings"],
        }

    def _response(self, status: str) -> dict[str, Any]:
        return response_of(self._body, self._id, self._created) | {"status": status}

    def _part(self) -> dict[str, Any]:
        return {"item_id": self._item, "output_index": 0, "content_index": 0}

    def _open(self) -> bytes:
        if self._is_open:
            return b""
        self._is_open = True
        item = _message("", self._item, "in_progress") | {"content": []}
        out = self._event("response.output_item.added", output_index=0, item=item)
        part = {"type": "output_text", "text": "", "annotations": []}
        return out + self._event("response.content_part.added", **self._part(), part=part)

    def _end(self, result: dict[str, Any]) -> bytes:
        whole = self.whole(result)
        out = b""
        if self._is_open:
            part = {"type": "output_text", "text": self._text, "annotations": []}
            done = {**self._part(), "text": self._text, "logprobs": []}
            out += self._event("response.output_text.done", **done)
            out += self._event("response.content_part.done", **self._part(), part=part)
            item = _message(self._text, self._item, "completed")
            out += self._event("response.output_item.done", output_index=0, item=item)
        for index, item in enumerate(whole["output"]):
            if item["type"] == "function_call":
                out += self._event("response.output_item.added", output_index=index, item=item)
                about = {"item_id": item["id"], "output_index": index}
                out += self._event(
                    "response.function_call_arguments.done", **about, arguments=item["arguments"]
                )
                out += self._event("response.output_item.done", output_index=index, item=item)
        ended = "response.completed" if whole["status"] == "completed" else "response.incomplete"
        return out + self._event(ended, response=whole)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        value = {"type": kind, "sequence_number": self._number, **fields}
        return f"event: {kind}\ndata: {dumps(value)}\n\n".encode()


def response_of(body: dict[str, Any], response_id: str, created: int) -> dict[str, Any]:
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "model": body.get("model") or "",
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        "store": body.get("store") is not False,
        "temperature": body.get("temperature"),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p"),
    }


def output_of(
    content: str, reasoning: str, calls: list[dict[str, Any]], item_id: str
) -> list[dict[str, Any]]:
    """A response's items; the message comes first, as it does in the stream."""
    output: list[dict[str, Any]] = []
    if content or not calls:
        output.append(_message(content, item_id, "completed"))
    for call in calls:
        function = call["function"]
        output.append(
            {
                "type": "function_call",
                "id": f"fc_{call['id']}",
                "call_id": call["id"],
                "name": function["name"],
                "arguments": function["arguments"],
                "status": "completed",
            }
        )
    if reasoning:
        summary = [{"type": "summary_text", "text": reasoning}]
        output.append({"type": "reasoning", "id": f"rs_{item_id}", "summary": summary})
    return output


def _message(content: str, item_id: str, status: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": content, "annotations": []}
    return {
        "type": "message",
        "id": item_id,
        "role": "assistant",
        "status": status,
        "content": [part],
    }
