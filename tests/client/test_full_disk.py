"""The engine on a disk that fills up: the chat goes on, and nothing is lost silently."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chatkv.client import engine
from chatkv.errors import UsageError
from chatkv.paths import folders
from chatkv.session.turn import Listener
from chatkv_store.conversations import Conversations
from engines import Forked, chat_with, end, eventually, greedy, running_engine
from small_disk import SmallDisk, small_disk


@pytest.fixture
def disk(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallDisk]:
    monkeypatch.delenv("CHATKV_ENGINE")
    monkeypatch.setattr(engine, "_spawn", Forked)
    with small_disk(home / "data", "2m") as disk:
        yield disk
        end(folders())


@pytest.mark.slow
def test_an_engine_that_cannot_save_says_so_and_does_not_end(
    disk: SmallDisk, model: str, program: Callable[..., Any]
) -> None:
    with running_engine() as link, chat_with(model) as chat:
        first = chat.send("hi", greedy(4), Listener())
        disk.fill()
        second = chat.send("And?", greedy(4), Listener())
        assert chat.num_unsaved == 1
        assert any("nothing is being saved" in line for line in second.notices)
        refused = program("stop")
        assert refused.code != 0 and "could not be saved yet" in refused.err
        assert refused.err.count("\n") == 1
        with pytest.raises(UsageError, match="--force"):
            engine.stop(folders())
        disk.empty()
        eventually(lambda: not link.call("GET", "/status")["open_sessions"])  # saved, and closed
        with Conversations(folders().conversations) as conversations:
            said = [turn.reply_text for turn in conversations.chain(first.session)]
        assert said == [first.text, second.text]
        assert program("stop").code == 0
