"""The full-screen chat where no engine is to be had: the model computes in its own process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

from asynchronous import asynchronous
from chatkv.cli.told import coverage, state
from chatkv.client import ChatRequest, connect
from chatkv.paths import folders
from chatkv.session.turn import TurnOptions


@asynchronous
async def test_what_is_stored_and_loaded_is_told_of_what_is_open_already(
    tui: Callable[..., AbstractAsyncContextManager[Any]], model: str
) -> None:
    """One process opens the KV cache once: who asks about it has to take the chat's own."""
    given = {"connect": partial(connect, folders(), where="start"), "coverage": coverage}
    request = ChatRequest(model, "float32")
    async with tui(
        request, state=state, options=lambda: TurnOptions(max_tokens=4), **given
    ) as chat:
        await chat.idle()
        await chat.ask("tell me of the sea " * 8)
        await chat.enter("/cache")
        await chat.until(lambda: any("tokens are on the disk" in one for one in chat.notices))
        await chat.enter("/status")
        await chat.until(lambda: "1 conversation open" in chat.notices[-1])
        assert any(one.startswith("computing in this process, ") for one in chat.notices)
