"""Ollama's dialect: /api/chat, /api/generate, /api/tags, /api/show, /api/ps, /api/version."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from chatkv import __version__
from chatkv.errors import UsageError
from chatkv.server.answer import Answers, dumps
from chatkv.server.asked import Asked, flag, messages_of, options_of, text, tools_of, whole
from chatkv.server.carriers import carriers_of, is_scratch, owner_of
from chatkv.server.form import Form, Schema, calls_in, schema_in
from chatkv.server.http import (
    Handler,
    Problem,
    body_of,
    in_thread,
    respond,
)
from chatkv.server.offered import OfferedModel
from chatkv.server.wire import Event


def error_body(problem: Problem) -> dict[str, Any]:
    """Ollama's form of an error: a text."""
    return {"error": problem.message}


class Ollama:
    """The handlers over one hub's answers. `keep_alive` is taken and ignored: a model stays."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def handlers(self) -> dict[str, Handler]:
        return {
            "POST /api/chat": self.chat,
            "POST /api/generate": self.generate,
            "GET /api/tags": self.tags,
            "GET /api/ps": self.ps,
            "POST /api/show": self.show,
            "GET /api/version": self.version,
        }

    async def version(self, request: Request) -> Response:
        """The version of this program."""
        return JSONResponse({"version": __version__})

    async def chat(self, request: Request) -> Response:
        """The next message of a conversation; without messages, the model is loaded."""
        body = await body_of(request)
        name = text(body, "model", "")
        if not body.get("messages"):
            return await self._load(name, {"message": {"role": "assistant", "content": ""}})
        messages = messages_of(body["messages"])
        scratch = is_scratch(request, body, messages)
        tools = tools_of(body.get("tools"))
        asked = Asked(
            name,
            messages,
            options=_options(body, scratch),
            tools=tools,
            form=Form(_format(body), calls_in(tools)),
            carriers=carriers_of(request, body),
            is_scratch=scratch,
            is_streamed=flag(body, "stream", True),
            owner=owner_of(request),
        )
        return await respond(request, self._answers, asked, Writer(name, is_chat=True), error_body)

    async def generate(self, request: Request) -> Response:
        """One answer that belongs to no conversation."""
        body = await body_of(request)
        name, prompt = text(body, "model", ""), text(body, "prompt", "")
        if not prompt:
            return await self._load(name, {"response": ""})
        is_raw = flag(body, "raw")
        said = [{"role": "user", "content": prompt}]
        if body.get("system"):
            said.insert(0, {"role": "system", "content": text(body, "system")})
        asked = Asked(
            name,
            () if is_raw else tuple(said),
            prompt if is_raw else None,
            _options(body, is_background=True),
            form=Form(_format(body)),
            is_scratch=True,
            is_streamed=flag(body, "stream", True),
            owner=owner_of(request),
        )
        return await respond(request, self._answers, asked, Writer(name, is_chat=False), error_body)

    async def tags(self, request: Request) -> Response:
        """The models that may be asked for."""
        loaded = await in_thread(self._loaded)
        offered = self._answers.offered.models.values()
        return JSONResponse({"models": [_tag(one, loaded.get(one.name)) for one in offered]})

    async def ps(self, request: Request) -> Response:
        """The models that are in memory."""
        loaded, models = await in_thread(self._loaded), self._answers.offered.models
        running = [
            _tag(models[name], status)
            | {
                "size_vram": 0,
                "context_length": status["context"],
                "expires_at": "9999-12-31T23:59:59Z",
            }
            for name, status in loaded.items()
            if name in models
        ]
        return JSONResponse({"models": running})

    async def show(self, request: Request) -> Response:
        """What is known of one model; it is loaded for that."""
        body = await body_of(request)
        name = text(body, "model", body.get("name") or "")
        runtime = await in_thread(self._answers.runtime, name)
        template = runtime.prepared.template or ""
        config = runtime.prepared.config
        capabilities = ["completion"]
        capabilities += ["tools"] * ("tools" in template)
        capabilities += ["thinking"] * ("<think>" in template)
        found = self._answers.offered.find(name)
        family = "chatkv"
        return JSONResponse(
            {
                "license": "",
                "modelfile": "",
                "parameters": "",
                "template": template,
                "modified_at": _time(found.changed_at),
                "details": _details(runtime.status()),
                "model_info": {
                    "general.architecture": family,
                    f"{family}.context_length": runtime.engine.max_tokens,
                    f"{family}.embedding_length": config.hidden_size,
                    f"{family}.block_count": config.num_layers,
                },
                "capabilities": capabilities,
            }
        )

    def _loaded(self) -> dict[str, dict[str, Any]]:
        return {one["model"]: one for one in self._answers.hub.status()["models"]}

    async def _load(self, name: str, more: dict[str, Any]) -> Response:
        await in_thread(self._answers.runtime, name)
        about = {"model": name, "created_at": _now(), "done": True, "done_reason": "load"}
        return JSONResponse({**about, **more})


def _options(body: dict[str, Any], is_background: bool) -> Any:
    given = body.get("options") or {}
    if not isinstance(given, dict):
        raise UsageError("options must be an object")
    limit = whole(given, "num_predict", None)
    limit = None if limit is not None and limit < 0 else limit
    return options_of(given, limit, given.get("stop"), is_background)


class Writer:
    """Lines of JSON; the last one says `done`."""

    media_type = "application/x-ndjson"

    def __init__(self, name: str, is_chat: bool) -> None:
        self._name, self._is_chat = name, is_chat
        self._began = time.perf_counter()

    @property
    def alive(self) -> bytes:
        """Clients read every line as an answer's piece: this one adds nothing."""
        return self._line(self._said("", "", []), done=False)

    def write(self, event: Event) -> bytes:
        if event.event == "text":
            kind = event.data["kind"]
            calls = [_call(event.data["call"])] if kind == "call" else []
            said = event.text if kind == "content" else ""
            thought = event.text if kind == "reasoning" else ""
            return self._line(self._said(said, thought, calls), done=False)
        if event.event == "result":
            return self._line(self._said("", "", []) | self._end(event.data), done=True)
        return b""

    def error(self, problem: Problem) -> bytes:
        return dumps(error_body(problem)).encode() + b"\n"

    def whole(self, result: dict[str, Any]) -> dict[str, Any]:
        (choice,) = result["choices"]
        calls = [_call(call) for call in choice["calls"]]
        said = self._said(choice["content"], choice["reasoning"], calls)
        return {**self._same(), **said, "done": True, **self._end(result)}

    def _same(self) -> dict[str, Any]:
        return {"model": self._name, "created_at": _now()}

    def _said(self, text: str, thought: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        thoughts = {"thinking": thought} if thought else {}
        if not self._is_chat:
            return {"response": text, **thoughts}
        message = {"role": "assistant", "content": text, **thoughts}
        return {"message": message | ({"tool_calls": calls} if calls else {})}

    def _end(self, result: dict[str, Any]) -> dict[str, Any]:
        """Counts, and times in nanoseconds."""
        timings, (choice,) = result["timings"], result["choices"]
        return {
            "done_reason": "length" if choice["finish_reason"] == "length" else "stop",
            "total_duration": round((time.perf_counter() - self._began) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": result["prompt_tokens"],
            "prompt_eval_cached_count": result["cached_tokens"],
            "prompt_eval_duration": round((timings["prompt_ms"] + timings["restore_ms"]) * 1e6),
            "eval_count": result["generated_tokens"],
            "eval_duration": round(timings["predicted_ms"] * 1e6),
            "timings": timings,
        }

    def _line(self, what: dict[str, Any], done: bool) -> bytes:
        return dumps({**self._same(), **what, "done": done}).encode() + b"\n"


def _format(body: dict[str, Any]) -> Schema | None:
    """`format`: "json", or a JSON schema itself."""
    wanted = body.get("format")
    return (wanted or None) if isinstance(wanted, dict) else schema_in(wanted, "format")


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call, with its arguments as an object where they are one."""
    function = call["function"]
    arguments: Any = function["arguments"]
    with suppress(ValueError, RecursionError):
        arguments = json.loads(arguments)
    return {"function": {"name": function["name"], "arguments": arguments}}


def _tag(found: OfferedModel, loaded: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "name": found.name,
        "model": found.name,
        "modified_at": _time(found.changed_at),
        "size": found.num_bytes,
        "digest": found.digest,
        "details": _details(loaded),
    }


def _details(loaded: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "gguf",
        "family": "chatkv",
        "families": ["chatkv"],
        "parameter_size": "",
        "quantization_level": loaded["dtype"] if loaded else "",
    }


def _now() -> str:
    return _time(time.time())


def _time(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat().replace("+00:00", "Z")
