"""The body of a request to chatkv's own API: JSON of a known form, and nothing beside it."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from chatkv.errors import UsageError

Body = TypeVar("Body")


async def body_as(request: Request, kind: type[Body]) -> Body:
    """Raises UsageError for what is no JSON, of another form, or holds an unknown field."""
    try:
        given = msgspec.json.decode(await request.body() or b"{}")
        found = msgspec.convert(given, kind)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise UsageError(f"{request.url.path}: {error}") from None
    if (unknown := _unknown_field(given, msgspec.to_builtins(found))) is not None:
        raise UsageError(f"{request.url.path}: there is no field {unknown}")
    return found


def _unknown_field(given: Any, known: Any, inside: str = "") -> str | None:
    """A name in `given` that `known`, which was made of it, lacks."""
    if not isinstance(given, dict) or not isinstance(known, dict):
        return None
    for name, value in given.items():
        if name not in known:
            return f"{inside}{name}"
        if (deeper := _unknown_field(value, known[name], f"{inside}{name}.")) is not None:
            return deeper
    return None
