"""/openapi.json: what can be asked of the APIs, and what comes back, in OpenAPI's form.

Only what is honoured is described. Fields that are not known are let through, since clients send
many; chatkv's own requests are the exception, and their schemas come from their types.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from starlette.routing import BaseRoute, Route

from chatkv import __version__
from chatkv.server import wire
from chatkv.server.asked import MAX_CHOICES, MAX_LOGPROBS, ROLES

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
COUNT: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
LIMIT: Schema = {"type": "integer", "minimum": 1}
ANY: Schema = {"type": "object"}


def _object(required: Sequence[str] = (), /, **properties: Schema) -> Schema:
    return {"type": "object", "required": list(required), "properties": properties}


def _list(items: Schema, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least}


def _or_null(*schemas: Schema) -> Schema:
    return {"anyOf": [*schemas, {"type": "null"}]}


PART = _object(["type", "text"], type={"const": "text"}, text=TEXT)
CONTENT = {"anyOf": [TEXT, _list(PART)]}
STOP = _or_null(TEXT, {**_list({"type": "string", "maxLength": 1000}), "maxItems": 64})
FORMAT = _object(
    ["type"],
    type={"enum": ["text", "json_object", "json_schema"]},
    json_schema=_object(["schema"], schema=ANY),
)
FUNCTION = _object(["name"], name=TEXT, description=TEXT, parameters=ANY, strict=FLAG)
SAMPLING: dict[str, Schema] = {
    "temperature": {"type": "number", "minimum": 0, "maximum": 100},
    "top_p": {"type": "number", "minimum": 0, "maximum": 1},
    "top_k": {"type": "integer"},
    "min_p": {"type": "number", "minimum": 0, "maximum": 1},
    "seed": {"type": "integer"},
}
MESSAGE = _object(
    ["role", "content"],
    role={"enum": list(ROLES)},
    content=_or_null(CONTENT),
    tool_call_id=TEXT,
    tool_calls=_list(
        _object(["function"], id=TEXT, function=_object(["name"], name=TEXT, arguments=TEXT))
    ),
)
SAID = _object(
    ["role", "content"],
    role={"enum": ["user", "assistant"]},
    content={"anyOf": [TEXT, _list(PART)]},
)
OLLAMA_OPTIONS = _object((), num_predict={"type": "integer"}, stop=STOP, **SAMPLING)
USAGE = _object(
    ["prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"],
    prompt_tokens=COUNT,
    completion_tokens=COUNT,
    total_tokens=COUNT,
    prompt_tokens_details=_object(["cached_tokens"], cached_tokens=COUNT),
)
TIMINGS = _object(
    ["cache_n", "prompt_n", "predicted_n", "hit"],
    cache_n=COUNT,
    prompt_n=COUNT,
    predicted_n=COUNT,
    hit={"enum": ["chain", "bytes", "blocks", "adopted", "none"]},
    diverged_at={"type": ["integer", "null"]},
)
OLLAMA_END: dict[str, Schema] = {
    "model": TEXT,
    "created_at": {"type": "string", "format": "date-time"},
    "done": FLAG,
    "done_reason": {"enum": ["stop", "length", "load"]},
    "prompt_eval_count": COUNT,
    "prompt_eval_cached_count": COUNT,
    "eval_count": COUNT,
}

# What a request's body holds beside `model`, by path.
REQUESTS: dict[str, Schema] = {
    "/v1/chat/completions": _object(
        ["messages"],
        messages=_list(MESSAGE, 1),
        max_tokens=LIMIT,
        max_completion_tokens=LIMIT,
        stop=STOP,
        stream=FLAG,
        stream_options=_object(include_usage=FLAG),
        return_progress=FLAG,
        n={"type": "integer", "minimum": 1, "maximum": MAX_CHOICES},
        logprobs=FLAG,
        top_logprobs={"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS},
        response_format=FORMAT,
        tools=_list(_object(["function"], type={"const": "function"}, function=FUNCTION)),
        tool_choice={"anyOf": [{"enum": ["none", "auto", "required"]}, ANY]},
        parallel_tool_calls=FLAG,
        store=FLAG,
        prompt_cache_key=TEXT,
        user=TEXT,
        **SAMPLING,
    ),
    "/v1/completions": _object(
        ["prompt"],
        prompt={"type": "string", "minLength": 1},
        max_tokens=LIMIT,
        stop=STOP,
        stream=FLAG,
        n={"type": "integer", "minimum": 1, "maximum": MAX_CHOICES},
        response_format=FORMAT,
        **SAMPLING,
    ),
    "/v1/responses": _object(
        ["input"],
        input={"anyOf": [TEXT, _list(MESSAGE, 1)]},
        instructions=_or_null(TEXT),
        previous_response_id=_or_null(TEXT),
        conversation=_or_null(TEXT, _object(["id"], id=TEXT)),
        max_output_tokens=_or_null(LIMIT),
        stream=FLAG,
        store=FLAG,
        text=_object(format=_object(["type"], type=FORMAT["properties"]["type"], schema=ANY)),
        **SAMPLING,
    ),
    "/v1/messages": _object(
        ["messages", "max_tokens"],
        messages=_list(SAID, 1),
        system=CONTENT,
        max_tokens=LIMIT,
        stop_sequences=_list(TEXT),
        stream=FLAG,
        tools=_list(_object(["name"], name=TEXT, description=TEXT, input_schema=ANY)),
        **SAMPLING,
    ),
    "/v1/messages/count_tokens": _object(["messages"], messages=_list(SAID, 1), system=CONTENT),
    "/api/chat": _object(
        ["messages"], messages=_list(MESSAGE), options=OLLAMA_OPTIONS, stream=FLAG
    ),
    "/api/generate": _object(
        ["prompt"], prompt=TEXT, system=TEXT, raw=FLAG, options=OLLAMA_OPTIONS, stream=FLAG
    ),
    "/api/show": _object(),
}

# What an answer holds where it is whole.
ANSWERS: dict[str, Schema] = {
    "/v1/chat/completions": _object(
        ["id", "object", "created", "model", "choices", "usage", "timings"],
        object={"const": "chat.completion"},
        choices=_list(
            _object(
                ["index", "message", "finish_reason"],
                message=_object(["role", "content"], role={"const": "assistant"}),
                finish_reason={"enum": ["stop", "length", "tool_calls"]},
            ),
            1,
        ),
        usage=USAGE,
        timings=TIMINGS,
    ),
    "/v1/completions": _object(
        ["id", "object", "choices", "usage"],
        object={"const": "text_completion"},
        choices=_list(_object(["index", "text", "finish_reason"], text=TEXT), 1),
        usage=USAGE,
    ),
    "/v1/models": _object(["object", "data"], data=_list(_object(["id", "object", "created"]), 1)),
    "/v1/models/{name}": _object(["id", "object", "created"]),
    "/v1/responses": _object(["id", "object", "status", "output", "usage"], output=_list(ANY)),
    "/v1/responses/{id}": _object(["id", "object", "status", "output"], output=_list(ANY)),
    "/v1/messages": _object(
        ["id", "type", "role", "content", "stop_reason", "usage"],
        content=_list(_object(["type"]), 1),
        stop_reason={"enum": ["end_turn", "max_tokens", "tool_use"]},
        usage=_object(["input_tokens", "output_tokens", "cache_read_input_tokens"]),
    ),
    "/v1/messages/count_tokens": _object(["input_tokens"], input_tokens=COUNT),
    "/api/chat": _object(["model", "message", "done"], message=_object(["role"]), **OLLAMA_END),
    "/api/generate": _object(["model", "response", "done"], response=TEXT, **OLLAMA_END),
    "/api/tags": _object(["models"], models=_list(_object(["name", "size", "digest"]), 1)),
    "/api/ps": _object(["models"], models=_list(_object(["name", "context_length"]))),
    "/api/show": _object(["details", "model_info", "capabilities"], template=TEXT),
    "/api/version": _object(["version"], version=TEXT),
    "/status": _object(["version", "models", "open_sessions", "answering"]),
    "/cache": _object(["sessions", "stored_tokens", "unique_bytes"], stored_tokens=COUNT),
    "/cache/sessions": _object(["sessions"], sessions=_list(_object(["session", "bytes"]))),
    "/cache/stats": _object(["turns", "lookups", "tokens_reused"], turns=COUNT),
    "/health": _object(["status"], status={"const": "ok"}),
    "/openapi.json": _object(["openapi", "info", "paths"]),
}
SSE, NDJSON = "text/event-stream", "application/x-ndjson"
STREAMS = {
    **dict.fromkeys(("/v1/chat/completions", "/v1/completions"), SSE),
    **dict.fromkeys(("/v1/responses", "/v1/messages"), SSE),
    **dict.fromkeys(("/api/chat", "/api/generate"), NDJSON),
}
PIECE = {SSE: _object(["data"], event=TEXT, data=TEXT), NDJSON: ANY}  # of each event, or line
TEXTS = {"/", "/metrics"}
OWN_REQUESTS: dict[str, type] = {
    "/sessions": wire.OpenRequest,
    "/sessions/{id}/turns": wire.SendRequest,
    "/sessions/{id}/continue": wire.OptionsRequest,
    "/sessions/{id}/draft": wire.DraftRequest,
    "/sessions/{id}/rewind": wire.RewindRequest,
    "/sessions/{id}/switch": wire.SwitchRequest,
    "/sessions/{id}/rename": wire.RenameRequest,
    "/sessions/{id}/fork": wire.ForkRequest,
}
_OWN_STREAMS = {"/sessions"} | {f"/sessions/{{id}}/{one}" for one in ("turns", "continue", "draft")}
QUERIES: dict[str, dict[str, Schema]] = {
    "/sessions": {"search": TEXT, "limit": {"type": "integer", "minimum": 1, "maximum": 1000}},
    "/cache/sessions": {"limit": {"type": "integer", "minimum": 1, "maximum": 1000}},
}


def document(routes: Iterable[BaseRoute], models: Sequence[str]) -> dict[str, Any]:
    """The whole. `models`: what may be asked for by name."""
    _, own = msgspec.json.schema_components(
        list(OWN_REQUESTS.values()), ref_template="#/components/schemas/{name}"
    )
    model: Schema = {"enum": ["default", *models]}
    paths: dict[str, Any] = {}
    for route in routes:
        if not isinstance(route, Route) or route.path.startswith("/page/"):
            continue
        path = route.path.replace(":path}", "}")
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = _operation(route, path, method, model)
    return {
        "openapi": "3.1.0",
        "info": {"title": "chatkv", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": own,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def _operation(route: Route, path: str, method: str, model: Schema) -> dict[str, Any]:
    names = [part.strip("{}") for part in path.split("/") if part.startswith("{")]
    placed = [{"name": one, "in": "path", "required": True, "schema": TEXT} for one in names]
    queries = QUERIES.get(path, {}) if method == "GET" else {}
    asked = [{"name": name, "in": "query", "schema": queries[name]} for name in queries]
    operation: dict[str, Any] = {
        "summary": (route.endpoint.__doc__ or "").strip().partition("\n")[0],
        "parameters": [*placed, *asked],
        "responses": {
            "200": {"description": "The answer.", "content": _answers(path, method)},
            "4XX": {
                "description": "What is wrong with the request.",
                "content": {"application/json": {"schema": ANY}},
            },
        },
    }
    if method == "POST" and (body := _body(path, model)) is not None:
        content = {"application/json": {"schema": body}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _body(path: str, model: Schema) -> Schema | None:
    if path in OWN_REQUESTS:
        return {"$ref": f"#/components/schemas/{OWN_REQUESTS[path].__name__}"}
    found = REQUESTS.get(path)
    if found is None:
        return None
    return {**found, "properties": {"model": model, **found["properties"]}}


def _answers(path: str, method: str) -> dict[str, Any]:
    """By media type."""
    if path in TEXTS:
        return {"text/plain": {"schema": TEXT}} | (
            {"text/html": {"schema": TEXT}} if path == "/" else {}
        )
    if method == "POST" and path in _OWN_STREAMS:
        return {NDJSON: {"schema": PIECE[NDJSON]}}
    found = {"application/json": {"schema": ANSWERS.get(path, ANY)}}
    return found | ({STREAMS[path]: {"schema": PIECE[STREAMS[path]]}} if path in STREAMS else {})
