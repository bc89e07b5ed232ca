"""Hours of a household's traffic in a minute: several faces send, draft, cancel, fork, take back
and go on, while the engine is killed and started again. Every answer is what the model says alone,
and nothing leaks."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chatkv.client import ChatRequest, connect, engine
from chatkv.client.link import EngineGone, Link
from chatkv.engine.engine import Engine
from chatkv.engine.pool import BlockPool
from chatkv.engine.sequence import TokenSequence
from chatkv.errors import ChatkvError, ContextFull, UsageError
from chatkv.model.catalog import find_model
from chatkv.model.decoder import Decoder
from chatkv.model.prepared import prepare
from chatkv.model.weights import load_weights
from chatkv.paths import folders
from chatkv.session.turn import Listener
from chatkv_store.blocks import BlockStore
from chatkv_store.conversations import Conversations
from chatkv_store.errors import StoreError
from engines import Forked, end, eventually, greedy, kill, running_engine

NUM_FACES = 4
# Of traffic on one engine. With pytest -s and some twenty of them, for minutes, flat lines show.
NUM_PHASES = int(os.environ.get("CHATKV_SOAK_PHASES", "2"))
TEXTS = (
    "Hello.",
    "Tell me of the sea, a ship and its captain. " * 4,
    "And then?",
    "What became of the cat that was left at home? " * 10,
    "Why?",
)


@pytest.fixture(autouse=True)
def _engine_allowed(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CHATKV_ENGINE")
    monkeypatch.setattr(engine, "_spawn", Forked)
    # Its cache of kernels holds a thousand shapes; with traffic that mixed it grows for an hour.
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")
    yield
    end(folders())


class Face(threading.Thread):
    """Somebody who does `count` things, one after the other, whatever happens to the engine."""

    def __init__(self, model: str, seed: int, count: int) -> None:
        super().__init__(daemon=True)
        self._model, self._rng, self._count = model, random.Random(seed), count
        self.num_lost, self.done = 0, {name: 0 for name, _ in ACTIONS}
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while self._count:
                self._hold_a_conversation()
        except BaseException as error:
            self.error = error

    def _hold_a_conversation(self) -> None:
        try:
            request = ChatRequest(self._model, "float32", resume=self._some_session(), seed=1)
            with connect(folders(), request, where="start") as chat:
                for _ in range(self._rng.randint(3, 8)):
                    self._do_something(chat)
        except ContextFull:
            pass  # long enough: another one
        except EngineGone:
            self.num_lost += 1
        except (ChatkvError, StoreError) as error:
            if "answering already" not in str(error) and "no session" not in str(error):
                raise  # another face has it

    def _do_something(self, chat: Any) -> None:
        if not self._count:
            return
        self._count -= 1
        names, weights = zip(*ACTIONS, strict=True)
        name = self._rng.choices(names, weights)[0]
        getattr(self, name)(chat)
        self.done[name] += 1

    # --- what people do -------------------------------------------------------------------------

    def send(self, chat: Any) -> None:
        chat.send(self._rng.choice(TEXTS), greedy(self._rng.randint(2, 24)), Listener())

    def draft(self, chat: Any) -> None:
        text = self._rng.choice(TEXTS)
        chat.draft(text[: self._rng.randint(1, len(text))])

    def cancel(self, chat: Any) -> None:
        heard: list[str] = []
        after = self._rng.randint(0, 6)
        listener = Listener(on_text=heard.append, cancelled=lambda: len(heard) >= after)
        chat.send(self._rng.choice(TEXTS), greedy(200), listener)

    def go_on(self, chat: Any) -> None:
        if chat.turns and chat.turns[-1].finish_reason != "stop":
            try:
                chat.resume_reply(greedy(self._rng.randint(2, 12)), Listener())
            except UsageError:  # another face went on with it first, which this one has not seen
                with Conversations(folders().conversations) as conversations:
                    last = conversations.chain(chat.session)[-1:]
                if last and last[0].finish_reason not in ("stop", None):
                    raise

    def rewind(self, chat: Any) -> None:
        chat.rewind(self._rng.randint(0, len(chat.turns)))

    def fork(self, chat: Any) -> None:
        if chat.turns:
            with Conversations(folders().conversations) as conversations:
                conversations.fork(chat.session)

    def _some_session(self) -> str | None:
        if self._rng.random() < 0.4:
            return None
        with Conversations(folders().conversations) as conversations:
            known = [session.id for session in conversations.list_sessions()]
        return self._rng.choice(known) if known else None


ACTIONS = (("send", 8), ("draft", 4), ("cancel", 3), ("go_on", 2), ("rewind", 1), ("fork", 1))


def traffic(
    model: str, seed: int, count: int, meanwhile: Callable[[], None] = lambda: None
) -> None:
    """All faces at once, `count` things each."""
    faces = [Face(model, seed + index, count) for index in range(NUM_FACES)]
    for face in faces:
        face.start()
    while any(face.is_alive() for face in faces):
        meanwhile()
        faces[0].join(0.1)
    assert [face.error for face in faces if face.error is not None] == []
    done = {name: sum(face.done[name] for face in faces) for name, _ in ACTIONS}
    assert min(done.values()) > 0, done


class Alone:
    """The model without company and without a cache."""

    def __init__(self, model: str) -> None:
        prepared = prepare(find_model(model, folders().cache), "float32", folders().models)
        decoder = Decoder(prepared.config, load_weights(prepared))
        self.engine = Engine(decoder, BlockPool(prepared.config, 32, decoder.dtype, decoder.device))

    def says(self, prompt: list[int], reply: list[int]) -> bool:
        """Whether each token is the likeliest one, within float32's rounding."""
        sequence = TokenSequence(list(prompt))
        with self.engine.memory.use(sequence):
            for token in reply:
                logits = self.engine.prefill(sequence)
                if logits.max() - logits[token] > 1e-3:
                    return False
                sequence.ids.append(token)
        return True


def check_every_answer(model: str) -> int:
    """How many turns there are: all but the left branches of deleted ones."""
    alone, seen = Alone(model), set()
    with Conversations(folders().conversations) as conversations:
        conversations.recover()
        for session in conversations.list_sessions():
            log: list[int] = []
            for turn in conversations.chain(session.id):
                log += turn.prompt_ids
                if turn.id not in seen:
                    assert turn.state in ("done", "interrupted")
                    assert alone.says(log, list(turn.reply_ids)), (session.id, turn.index)
                    seen.add(turn.id)
                log += turn.reply_ids
    return len(seen)


def resources(link: Link) -> dict[str, int]:
    """What the engine's process has, once nobody uses it and all is closed."""
    eventually(lambda: not link.call("GET", "/status")["open_sessions"])
    status = link.call("GET", "/status")
    process = Path("/proc") / str(status["pid"])
    (model,) = status["models"]
    kv = model["kv_tokens"]
    assert kv["free"] + kv["idle"] == kv["total"]
    with BlockStore(folders().kv, read_only=True) as blocks:
        readers = blocks.env.readers()
    return {
        "files": len(os.listdir(process / "fd")),
        "threads": len(os.listdir(process / "task")),
        "readers": sum(line.split()[:1] == [str(status["pid"])] for line in readers.splitlines()),
        "bytes": _own_bytes(process),
    }


def _own_bytes(process: Path) -> int:
    """Memory of its own: the mapped file of the KV cache grows with it, and is no leak."""
    for line in (process / "smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no Anonymous in smaps_rollup")


@pytest.mark.slow
def test_a_day_in_a_minute(home: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    model = str(tiny_checkpoint("llama3"))
    rng = random.Random(11)
    until_kill = [20]

    def kill_now_and_then() -> None:
        until_kill[0] -= 1
        if until_kill[0] <= 0:
            kill(folders())
            until_kill[0] = rng.randint(15, 60)

    traffic(model, seed=1, count=35, meanwhile=kill_now_and_then)
    end(folders())

    with running_engine() as link:
        phases = []
        for phase in range(NUM_PHASES):
            traffic(model, seed=2 + phase, count=35)
            phases.append(resources(link))
            print(f"phase {phase}: {phases[-1]}")
    # Half of what the KV of these conversations takes; malloc's arenas fill up meanwhile.
    before = phases[0]
    for after in phases[1:]:
        for name, slack in (("files", 2), ("threads", 4), ("readers", 2), ("bytes", 64 << 20)):
            assert after[name] <= before[name] + slack, (name, phases)

    with BlockStore(folders().kv) as blocks:
        assert blocks.verify() == []
    with Conversations(folders().conversations) as conversations:
        for session in conversations.list_sessions():
            with conversations.lease(session.id):  # nobody holds it any more
                pass
    assert check_every_answer(model) > 50
