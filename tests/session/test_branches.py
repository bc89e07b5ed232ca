"""Going back leaves branches, and any of them can be gone on with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from chatkv.client import ChatRequest, connect
from chatkv.engine.options import SamplingOptions
from chatkv.errors import ChatkvError
from chatkv.paths import folders
from chatkv.session.turn import Listener, TurnOptions
from chatkv_store.conversations import Conversations
from chatkv_store.errors import StoreError

OPTIONS = TurnOptions(SamplingOptions(temperature=1.0), max_tokens=8)


@pytest.mark.parametrize("where", ["off", pytest.param("start", marks=pytest.mark.slow)])
def test_another_branch_can_be_gone_on_with(
    where: str,
    home: Path,
    tiny_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if where == "start":
        from chatkv.client import engine

        monkeypatch.setenv("CHATKV_ENGINE", "on")
    request = ChatRequest(str(tiny_checkpoint("llama3")), "float32", seed=3)
    try:
        with connect(folders(), request, where=where) as chat:  # type: ignore[arg-type]
            answers = []
            for _ in range(2):
                chat.rewind(0)
                answers.append(chat.send("hello", OPTIONS, Listener()).text)
            assert answers[0] != answers[1]  # another answer, not the same one again
            with Conversations(folders().conversations) as store:
                second, first = store.tree(chat.session)
            chat.switch(first.id)
            assert [turn.reply for turn in chat.turns] == [answers[0]]
            ready = chat.restore()
            assert ready.cached == ready.reused + ready.loaded + ready.computed
            assert ready.cached == chat.num_tokens
            chat.send("more", OPTIONS, Listener())
            assert [turn.user for turn in chat.turns] == ["hello", "more"]
            assert "tokens" in chat.turns[-1].stats and "loaded_bytes" in chat.turns[-1].stats
            assert chat.title == "hello"
            chat.rewind(0)
            assert chat.send("hello", OPTIONS, Listener()).text not in answers
            with pytest.raises((StoreError, ChatkvError), match="no turn"):
                chat.switch("01" + "0" * 24)
            assert second.reply_text == answers[1]
    finally:
        if where == "start":
            engine.stop(folders())
