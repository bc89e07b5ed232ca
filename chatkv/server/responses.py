"""OpenAI's /v1/responses: a client sends what is new, and names the answer that it follows.

A response's id names its turn. What follows it is that turn's conversation, up to it; the
instructions are those of the request, as its documentation has it. With `store` false nothing is
kept, and there is nothing to follow. Deleting a response deletes its words, where nothing follows
it.
"""

from __future__ import annotations

import os
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from chatkv.errors import UsageError
from chatkv.server.answer import Answers
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
from chatkv.server.carriers import carriers_of, is_scratch, owner_of
from chatkv.server.http import (
    Handler,
    body_of,
    in_thread,
    respond,
)
from chatkv.server.named import name_digest
from chatkv.server.openai import form_of
from chatkv.server.openai_writer import error_body
from chatkv.server.parts import said_in
from chatkv.server.responses_writer import Writer, output_of, response_of
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
            "DELETE /v1/responses/{id}": self.delete,
        }

    async def create(self, request: Request) -> Response:
        """The next answer of a conversation."""
        body = await body_of(request)
        asked = await in_thread(self._asked, request, body)
        return await respond(
            request, self._answers, asked, Writer(body, asked.names[0][1]), error_body
        )

    async def get(self, request: Request) -> Response:
        """An answer that was kept."""
        turn = await in_thread(self._turn, request.path_params["id"], owner_of(request))
        said = said_in(turn.reply_text, has_tools=True)
        body = response_of({}, request.path_params["id"], int(turn.created_at))
        output = output_of(said.content, said.reasoning, list(said.calls), turn.id)
        status = "completed" if turn.state == "done" else "incomplete"
        return JSONResponse(body | {"status": status, "output": output})

    async def delete(self, request: Request) -> Response:
        """Forget an answer that was kept."""
        response_id, owner = request.path_params["id"], owner_of(request)
        hub = self._answers.hub

        def change() -> None:
            turn = self._turn(response_id, owner)
            for session_id in hub.conversations.sessions_at(turn.id):
                hub.release(session_id)
            # The words of one that others follow are theirs too: then its name goes alone.
            if not hub.conversations.delete_turn(turn.id):
                hub.conversations.forget_messages(name_digest("response", response_id))

        await in_thread(change)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    def _asked(self, request: Request, body: dict[str, Any]) -> Asked:
        about = body.get("text")
        owner, previous = owner_of(request), body.get("previous_response_id")
        carriers = carriers_of(request, body)
        conversation = body.get("conversation")
        if isinstance(conversation, dict):
            conversation = conversation.get("id")
        if previous and conversation:
            raise UsageError("give either previous_response_id or conversation, not both")
        names: list[tuple[str, ...]] = [("response", f"resp_{os.urandom(16).hex()}")]
        last = self._turn(previous, owner) if previous else None
        if conversation:
            names.append(("conversation", owner, str(conversation)))
            found = self._answers.hub.conversations.turn_of_messages(name_digest(*names[1]))
            last = found if found is not None and self._is_owned(found, owner) else None
        history: list[Message] = []
        if last is not None:
            history, carriers = self._history(last), Carriers(last.session_id)
        instructions = body.get("instructions")
        system = [{"role": "system", "content": text(body, "instructions")}] if instructions else []
        messages = (*system, *history, *_input(body.get("input")))
        scratch = is_scratch(request, body, messages)
        functions = [
            {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
            for tool in listed(body.get("tools") or [], "tools")
            if isinstance(tool, dict) and tool.get("type") == "function"
        ]
        tools = tools_of(functions) if body.get("tool_choice") != "none" else ()
        limit = whole(body, "max_output_tokens", None)
        return Asked(
            text(body, "model", ""),
            messages,
            options=options_of(body, limit, is_background=scratch and not history),
            tools=tools,
            form=form_of(body, about.get("format") if isinstance(about, dict) else None, tools),
            carriers=carriers,
            is_scratch=scratch,
            is_streamed=flag(body, "stream"),
            owner=owner,
            names=tuple(names),
        )

    def _turn(self, response_id: Any, owner: str) -> Turn:
        """The turn behind a response's id, where it is the owner's."""
        store = self._answers.hub.conversations
        turn = store.turn_of_messages(name_digest("response", str(response_id)))
        if turn is not None and self._is_owned(turn, owner):
            return turn
        raise SessionNotFound(f"there is no response {str(response_id)[:100]!r}")

    def _is_owned(self, turn: Turn, owner: str) -> bool:
        session = self._answers.hub.conversations.get_session(turn.session_id)
        return bool(session.settings.get("owner", "") == owner)

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
