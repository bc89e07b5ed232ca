"""The form that an answer is to have (JSON, JSON by a schema, calls of tools), as a grammar.

A model that begins with thoughts may think first. Calls are written as `parts` reads them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from chatkv.errors import UsageError
from chatkv.server.parts import CALL, END_CALL, END_THINK

MAX_SCHEMA_CHARS = 256 << 10
MAX_CALLS = 16
# Between JSON's marks. Bounded, since small models may never stop writing white space.
_GAP = r"[ \n\t]{0,16}"
_ANY_TEXT = r"(.|\n)*"

Schema = dict[str, Any]


@dataclass(frozen=True)
class Calls:
    """Functions that are to be called in their exact form: (name, schema of the arguments).

    is_must: nothing but calls is an answer. is_one: no more than one.
    """

    functions: tuple[tuple[str, Schema], ...]
    is_must: bool = False
    is_one: bool = False


@dataclass(frozen=True)
class Form:
    """`schema` None: text. Both: either JSON or calls."""

    schema: Schema | None = None
    calls: Calls | None = None

    def grammar(self, is_thinking: bool) -> str | None:
        """In Lark; None for what has no form. is_thinking: the prompt opens the model's thoughts.

        Raises UsageError for a schema that is too large.
        """
        rules: list[str] = []
        if self.calls is not None:
            rules = _call_rules(self.calls)
        if self.schema is not None:
            rules.append(f"json: {_json(self.schema)}")
        if not rules:
            return None
        body = self._body()
        if is_thinking:
            body = f"thoughts gap ({body})"
            rules.append(f"thoughts[lazy]: {_regex(_ANY_TEXT + END_THINK)}")
        rules.append(f"gap: /{_GAP}/")
        return "\n".join(["%llguidance {}", f"start: {body}", *rules])

    def _body(self) -> str:
        if self.calls is None:
            return "json"
        if self.calls.is_must or self.schema is not None:
            only = "called" if self.calls.is_one else f"called (gap called){{0,{MAX_CALLS - 1}}}"
            return only if self.calls.is_must else f"({only}) | json"
        return "(begun call)? text" if self.calls.is_one else "(begun call)* text"


TEXT = Form()


def schema_in(wanted: Any, name: str = "response_format") -> Schema | None:
    """The JSON schema in one of the forms that clients ask with; None where text is wanted.

    OpenAI's {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema"}}, with the
    schema also beside the type; and Ollama's "json".
    """
    if wanted in (None, "", "text"):
        return None
    if wanted == "json":
        return {"type": "object"}
    if not isinstance(wanted, dict):
        raise UsageError(f"{name} must be an object")
    match wanted.get("type"):
        case None | "text" if "schema" not in wanted and "json_schema" not in wanted:
            return None
        case "json_object":
            return _schema(wanted.get("schema") or {"type": "object"}, name)
        case "json_schema":
            inside = wanted.get("json_schema", wanted)
            return _schema(inside.get("schema") if isinstance(inside, dict) else None, name)
        case kind:
            raise UsageError(
                f"{name} {str(kind)[:100]!r} is not known: json_object and json_schema are"
            )


def calls_in(
    tools: Sequence[dict[str, Any]], must: str | bool = False, is_one: bool = False
) -> Calls | None:
    """How `tools`, in OpenAI's form, are to be called. must: True where one has to be called, or
    the name of the one. None where the model is free: nothing must be, and no tool is strict."""
    functions = [tool["function"] for tool in tools]
    if isinstance(must, str):
        functions = [one for one in functions if one["name"] == must]
    if must and not functions:
        raise UsageError(f"tool_choice: there is no such tool: {str(must)[:100]!r}")
    if not must and not any(function.get("strict") is True for function in functions):
        return None
    forms = []
    for function in functions:
        parameters = function.get("parameters") or {}
        is_exact = bool(must) or function.get("strict") is True
        given = _schema(parameters, f"tool {function['name']}") if is_exact else {}
        forms.append((function["name"], given or {"type": "object"}))
    return Calls(tuple(forms), bool(must), is_one)


def _schema(value: Any, name: str) -> Schema:
    if not isinstance(value, dict):
        raise UsageError(f"{name}: a JSON schema must be an object")
    return value


def _call_rules(calls: Calls) -> list[str]:
    """called: a whole call; begun: text up to its mark, and call: what follows that."""
    names = " | ".join(f"call_{index}" for index in range(len(calls.functions)))
    rules = [f"called: {_text(CALL)} call", f"call: {names}"]
    rules += [f"begun[lazy]: {_regex(_ANY_TEXT + CALL)}", f"text: {_regex(_ANY_TEXT)}"]
    for index, (name, schema) in enumerate(calls.functions):
        opened = f'\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
        closed = f"}}\n{END_CALL}"
        rules.append(f"call_{index}: {_text(opened)} arguments_{index} {_text(closed)}")
        rules.append(f"arguments_{index}: {_json(schema)}")
    return rules


def _json(schema: Schema) -> str:
    written = json.dumps({**schema, "x-guidance": {"whitespace_pattern": _GAP}})
    if len(written) > MAX_SCHEMA_CHARS:
        raise UsageError(f"a JSON schema may have at most {MAX_SCHEMA_CHARS >> 10} KiB")
    return f"%json {written}"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _regex(pattern: str) -> str:
    return "/" + pattern.replace("/", r"\/") + "/"
