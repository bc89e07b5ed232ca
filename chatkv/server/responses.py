"""OpenAI's /v1/responses: a client sends what is new, and names the answer that it follows.

A response's id names its turn. What follows it is that turn's conversation, up to it; the
instructions are those of the request, as its documentation has it. With `store` false nothing is
kept, and there is nothing to follow.
"""

from __future__ import annotations

import os
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from chatkv.errors import UsageError
from chatkv.server.answer import Answers, dumps
from chatkv.server.asked import (
    Asked,
    Carriers,
    flag,
    listed,
    messages_of,
    options_of,
    text,
    tools_of,
    whole,
)
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
from chatkv.server.matching import name_digest
from chatkv.server.openai import ALIVE, error_body, refuse_formats
from chatkv.server.parts import said_in
from chatkv.server.wire import Event
from chatkv.session.messages import Message
from chatkv_store.conversations import Turn
from chatkv_store.errors import SessionNotFound


class Responses:
    """The handlers over one hub's answers."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def handlers(self) -> dict[str, Handler]:
        return {
            "POST /v1/responses": self.create,
            "GET /v1/responses/{id}": self.get,
        }

    async def create(self, request: Request) -> Response:
        """The next answer of a conversation."""
        body = await body_of(request)
        asked = await in_thread(self._asked, request, body)
        return await respond(request, self._answers, asked, Writer(body, asked.names[0][1]))

    async def get(self, request: Request) -> Response:
        """An answer that was kept."""
        turn = await in_thread(self._turn, request.path_params["id"], owner_of(request))
        said = said_in(turn.reply_text, has_tools=True)
        body = _response({}, request.path_params["id"], int(turn.created_at))
        output = _output(said.content, said.reasoning, list(said.calls), turn.id)
        status = "completed" if turn.state == "done" else "incomplete"
        return JSONResponse(body | {"status": status, "output": output})

    def _asked(self, request: Request, body: dict[str, Any]) -> Asked:
        form = body.get("text")
        refuse_formats(form.get("format") if isinstance(form, dict) else None)
        owner, previous = owner_of(request), body.get("previous_response_id")
        carriers = carriers_of(request, body)
        conversation = body.get("conversation")
        if isinstance(conversation, dict):
            conversation = conversation.get("id")
        if previous and conversation:
            raise UsageError("give either previous_response_id or conversation, not both")
        history: list[Message] = []
        if previous:
            turn = self._turn(previous, owner)
            history = self._history(turn)
            carriers = Carriers(turn.session_id, ())
        elif conversation:
            carriers = Carriers(None, (("conversation", str(conversation)), *carriers.keys))
        instructions = body.get("instructions")
        system = [{"role": "system", "content": text(body, "instructions")}] if instructions else []
        messages = (*system, *history, *_input(body.get("input")))
        scratch = is_scratch(request, body, messages)
        functions = [
            {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
            for tool in listed(body.get("tools") or [], "tools")
            if isinstance(tool, dict) and tool.get("type") == "function"
        ]
        limit = whole(body, "max_output_tokens", None)
        return Asked(
            text(body, "model", ""),
            messages,
            options=options_of(body, limit, is_background=scratch and not history),
            tools=tools_of(functions) if body.get("tool_choice") != "none" else (),
            carriers=carriers,
            is_scratch=scratch,
            is_streamed=flag(body, "stream"),
            owner=owner,
            names=(("response", f"resp_{os.urandom(16).hex()}"),),
        )

    def _turn(self, response_id: Any, owner: str) -> Turn:
        """The turn behind a response's id, where it is the owner's."""
        store = self._answers.hub.conversations
        turn = store.turn_of_messages(name_digest("response", str(response_id)))
        if turn is not None:
            session = store.get_session(turn.session_id)
            if session.settings.get("owner", "") == owner:
                return turn
        raise SessionNotFound(f"there is no response {str(response_id)[:100]!r}")

    def _history(self, last: Turn) -> list[Message]:
        """What was said up to a turn, the instructions left out."""
        path = [last]
        while (parent := path[0].parent_id) is not None:
            path.insert(0, self._answers.hub.conversations.get_turn(parent))
        messages: list[Message] = []
        for turn in path:
            messages += turn.stats.get("said") or [{"role": "user", "content": turn.user_text}]
            messages.append(said_in(turn.reply_text, has_tools=True).message())
        return messages


def _input(value: Any) -> tuple[Message, ...]:
    """A text, or items: messages, calls and their results."""
    if isinstance(value, str):
        return ({"role": "user", "content": value},)
    found: list[Any] = []
    for item in listed(value, "input"):
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            found.append(item)
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "function": function}
            found.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif kind == "function_call_output":
            about = {"tool_call_id": item.get("call_id")}
            found.append({"role": "tool", "content": item.get("output"), **about})
        elif kind != "reasoning":
            raise UsageError(f"input: items of type {kind!r} are not supported")
    return messages_of(found)


class Writer:
    """A response, whole or as its numbered events."""

    media_type, alive = "text/event-stream", ALIVE
    error_body = staticmethod(error_body)

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
        output = _output(choice["content"], choice["reasoning"], calls, self._item)
        prompt, generated = result["prompt_tokens"], result["generated_tokens"]
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
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + generated,
            },
            "timings": result["timings"],
        }

    def _response(self, status: str) -> dict[str, Any]:
        return _response(self._body, self._id, self._created) | {"status": status}

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


def _response(body: dict[str, Any], response_id: str, created: int) -> dict[str, Any]:
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


def _output(
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
