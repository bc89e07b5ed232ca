"""A decode worker in this process, and what it would answer alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from chatkv.paths import folders
from chatkv.restore import prefill_worker, remote
from chatkv.restore.prefill_worker import PrefillWorker
from chatkv.runtime import Runtime
from chatkv_store import layout as layouts
from chatkv_store.conversations import Conversations
from decoders import LONG, Decoder
from prefillers import Prefiller, prefiller


@pytest.fixture(scope="session")
def model(tiny_checkpoint: Callable[..., Path]) -> str:
    return str(tiny_checkpoint("llama3", max_position_embeddings=4096))


@pytest.fixture
def decoder(
    home: Path, tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Decoder]]:
    """decoder(worker): in the home in force, or in `home`."""
    monkeypatch.setattr(layouts, "MIN_VALUE_BYTES", 1)  # a value for each of the three layers
    # What can go through a shared store does.
    monkeypatch.setattr(remote, "faster", lambda wire, store: store)
    # Nothing is too slow on a busy machine, but where a test says so.
    monkeypatch.setattr(remote, "PATIENCE_S", 600.0)
    for name in ("FRESH_S", "STATE_S", "SILENT_S"):
        monkeypatch.setattr(prefill_worker, name, 60.0)
    with ExitStack() as open:

        def made(
            worker: PrefillWorker | None = None,
            place: Any = None,
            kv_codec: str = "lossless",
            owner: str = "",
            of: str = model,
        ) -> Decoder:
            where = place or folders()
            where.make()
            conversations = Conversations(where.conversations)
            open.callback(conversations.close)
            runtime = Runtime(where, conversations, of, "float32", prefill=worker)
            open.callback(runtime.close)
            session = runtime.new_session(seed=7, kv_codec=kv_codec, owner=owner)
            conversation = open.enter_context(runtime.open(session, kv_codec))
            return Decoder(runtime, conversation)

        yield made


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory, model: str) -> Iterator[Prefiller]:
    """One for all tests of a file that do not end it."""
    with prefiller(tmp_path_factory.mktemp("prefill-home"), model, min_value_bytes=1) as found:
        yield found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, model: str) -> list[str]:
    """What a worker that does both answers to LONG, and then to "And why?"."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHATKV_HOME", str(tmp_path_factory.mktemp("alone")))
        where = folders()
        where.make()
        with (
            Conversations(where.conversations) as conversations,
            Runtime(where, conversations, model, "float32") as runtime,
            runtime.open(runtime.new_session(seed=7)) as conversation,
        ):
            talk = Decoder(runtime, conversation)
            return [talk.say(LONG).text, talk.say("And why?").text]
