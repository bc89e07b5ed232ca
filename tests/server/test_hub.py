"""What an engine holds: models, open conversations and their leases, who may use them when."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chatkv.errors import ModelError, UsageError
from chatkv.paths import folders
from chatkv.server.hub import LINGER_S, Hub
from chatkv.session.ahead import make_ready
from chatkv.session.request import ChatRequest
from chatkv.session.scratch import answer_once
from chatkv.session.turn import Listener
from chatkv_store.conversations import Conversations
from chatkv_store.errors import SessionNotFound, StoreBusy
from engines import greedy

LONG = "Tell me a story about the sea, a ship and its captain. " * 6


class Clock:
    """Seconds that pass when the test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_soon(self, seconds: float) -> None:
        """Later, when somebody waits."""
        threading.Timer(0.1, lambda: setattr(self, "now", self.now + seconds)).start()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def hub(home: Path, clock: Clock) -> Iterator[Hub]:
    hub = Hub(folders().make(), clock)
    yield hub
    hub.close()


def opened(hub: Hub, model: str, **request: Any) -> Any:
    return hub.open(ChatRequest(model, **{"dtype": "float32", "seed": 7} | request))


def say(hub: Hub, session: str, text: str = "hi", max_tokens: int = 4) -> Any:
    with hub.use(session, threading.Event()) as held:
        return held.conversation.send(text, greedy(max_tokens))


def is_free(session: str) -> bool:
    """Whether another program could write to the session now."""
    with Conversations(folders().conversations) as conversations:
        try:
            with conversations.lease(session):
                return True
        except StoreBusy:
            return False


class Slow:
    """A turn in a thread, which stops in the middle until it is told to go on."""

    def __init__(self, hub: Hub, session: str) -> None:
        self.started, self.go_on = threading.Event(), threading.Event()
        self.cancel = threading.Event()
        self._hub, self._session = hub, session
        self.result: Any = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self.started.wait(60)

    def end(self) -> Any:
        self.go_on.set()
        self._thread.join(60)
        return self.result

    def _run(self) -> None:
        def wait(text: str) -> None:
            self.started.set()
            self.go_on.wait(60)

        listener = Listener(on_text=wait, cancelled=self.cancel.is_set)
        with self._hub.use(self._session, self.cancel) as held:
            self.result = held.conversation.send("Go.", greedy(20), listener)


def test_a_lease_is_free_a_while_after_the_last_use(hub: Hub, clock: Clock, model: str) -> None:
    session = opened(hub, model).session_id
    say(hub, session)
    hub.tidy()
    assert not is_free(session)
    clock.now += LINGER_S + 0.1
    hub.tidy()
    assert is_free(session)
    assert say(hub, session).tokens.reused > 0  # its KV has stayed, and its model


def test_nothing_is_closed_under_a_turn(hub: Hub, clock: Clock, model: str) -> None:
    session = opened(hub, model).session_id
    turn = Slow(hub, session)
    clock.now += LINGER_S + 0.1
    hub.tidy()
    assert hub.num_running == 1 and hub.status()["answering"] == [session]
    assert turn.end().tokens.generated == 20
    assert say(hub, session).turn == 2


def test_a_session_in_which_nothing_was_said_stays_known(
    hub: Hub, clock: Clock, model: str
) -> None:
    session = opened(hub, model, seed=5).session_id
    clock.now += 1e6
    hub.tidy()
    assert hub.status()["open_sessions"] == []
    with Conversations(folders().conversations) as conversations:
        assert conversations.list_sessions() == []
    held = hub.open(ChatRequest(resume=session))
    assert not held.is_resumed
    assert say(hub, session).session == session
    with Conversations(folders().conversations) as conversations:
        assert conversations.get_session(session).settings["seed"] == 5


def test_one_turn_at_a_time(hub: Hub, clock: Clock, model: str) -> None:
    session = opened(hub, model).session_id
    say(hub, session)
    turn = Slow(hub, session)
    clock.pass_soon(10)
    with pytest.raises(StoreBusy, match="answering already"):
        say(hub, session)
    with pytest.raises(StoreBusy, match="answering already"):
        hub.open(ChatRequest(model, "bfloat16", resume=session))
    assert turn.end().finish_reason == "length"
    assert opened(hub, model, dtype="bfloat16", resume=session).runtime.prepared.dtype == "bfloat16"


def test_cancelling_keeps_what_was_said(hub: Hub, model: str) -> None:
    session = opened(hub, model).session_id
    turn = Slow(hub, session)
    assert hub.cancel(session)
    assert turn.end().finish_reason == "interrupted"
    assert not hub.cancel(session)
    with Conversations(folders().conversations) as conversations:
        (said,) = conversations.chain(session)
    assert said.state == "interrupted" and said.reply_text == turn.result.text


def test_a_turn_waits_for_the_draft_that_it_has_ended(hub: Hub, clock: Clock, model: str) -> None:
    session = opened(hub, model).session_id
    ended, inside = threading.Event(), threading.Event()

    def draft() -> None:
        with hub.use(session, ended, is_draft=True) as held:
            inside.set()
            ended.wait(60)
            clock.now += 100  # a chunk of a large model takes longer than a turn's patience
            make_ready(held.conversation, LONG, ended.is_set)

    thread = threading.Thread(target=draft)
    thread.start()
    assert inside.wait(60)
    assert hub.status()["answering"] == []
    threading.Timer(0.1, ended.set).start()
    clock.now += 100
    assert say(hub, session).turn == 1
    thread.join()


def test_a_draft_prefills_and_leaves_nothing_behind(hub: Hub, model: str) -> None:
    session = opened(hub, model).session_id
    with hub.use(session, threading.Event(), is_draft=True) as held:
        ready = make_ready(held.conversation, LONG)
    assert ready.computed > 64
    with Conversations(folders().conversations) as conversations:
        assert conversations.list_sessions() == []
    assert num_blocks(hub) == 0
    assert say(hub, session, LONG).tokens.reused > ready.cached - 8


def test_release_closes_flushes_and_forgets(hub: Hub, clock: Clock, model: str) -> None:
    session = opened(hub, model).session_id
    say(hub, session, LONG)
    hub.release(session)
    assert is_free(session)
    assert hub.status()["open_sessions"] == []
    assert hub.status()["models"][0]["kv_tokens"]["idle"] == 0
    again = say(hub, session)
    assert again.tokens.reused == 0 and again.tokens.loaded > 0  # all of it was written
    turn = Slow(hub, session)
    clock.pass_soon(10)
    with pytest.raises(StoreBusy, match="answering already"):
        hub.release(session)
    turn.end()
    hub.release("no-such-session")


def test_two_models_share_a_store_and_a_third_takes_an_idle_ones_place(
    hub: Hub, model: str, tiny_checkpoint: Callable[..., Path]
) -> None:
    qwen, smol = str(tiny_checkpoint("qwen3")), str(tiny_checkpoint("smollm"))
    first = opened(hub, model).session_id
    second = opened(hub, qwen).session_id
    for session in (first, second):
        assert not say(hub, session, LONG).notices
    assert all(not runtime.notices for runtime in hub._models.loaded)
    turn = Slow(hub, first)
    third = opened(hub, smol)  # the second one is idle, though used last
    assert [m["model"] for m in hub.status()["models"]] == [
        Path(model).name,
        third.runtime.prepared.name,
    ]
    fourth = Slow(hub, third.session_id)
    with pytest.raises(UsageError, match="2 models are answering"):
        opened(hub, qwen)
    turn.end(), fourth.end()
    again = say(hub, second)  # reopened, with the model that it was held with
    assert again.model == Path(qwen).name and again.tokens.loaded > 0


def test_a_model_is_loaded_once_whatever_its_dtype_is_called(hub: Hub, model: str) -> None:
    by_itself = hub.open(ChatRequest(model))
    dtype = by_itself.runtime.prepared.dtype
    assert hub.open(ChatRequest(model, dtype)).runtime is by_itself.runtime
    say(hub, by_itself.session_id)
    assert hub.open(ChatRequest(resume=by_itself.session_id)).runtime is by_itself.runtime
    assert len(hub.status()["models"]) == 1


def test_a_model_that_cannot_be_loaded_is_one_line_and_the_rest_goes_on(
    hub: Hub, model: str, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in Path(model).iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError) as caught:
        opened(hub, str(broken))
    assert "\n" not in str(caught.value)
    with pytest.raises(SessionNotFound):
        hub.open(ChatRequest(resume="nobody"))
    assert say(hub, opened(hub, model).session_id).turn == 1


def test_what_comes_while_the_process_ends_is_refused(hub: Hub, model: str) -> None:
    session = opened(hub, model).session_id
    turn = Slow(hub, session)
    hub.cancel_all()
    turn.go_on.set()
    for late in (lambda: say(hub, session), lambda: opened(hub, model)):
        with pytest.raises(UsageError, match="the engine is ending"):
            late()
    assert turn.end().finish_reason == "interrupted"


def test_scratch_answers_leave_nothing_behind(hub: Hub, model: str) -> None:
    runtime = opened(hub, model).runtime
    messages = [{"role": "user", "content": LONG}]
    first = answer_once(runtime.scratch_parts(), messages, greedy(8))
    assert first.tokens.generated == 8 and first.session == ""
    assert answer_once(runtime.scratch_parts(), messages, greedy(8)).text == first.text
    with Conversations(folders().conversations) as conversations:
        assert conversations.list_sessions() == []
    assert num_blocks(hub) == 0
    status = runtime.status()["kv_tokens"]
    assert status["free"] == status["total"]


def num_blocks(hub: Hub) -> int:
    """Blocks on the disk, once all is written."""
    hub._models.flush(10)
    assert hub._models._disk is not None and hub._models._disk.store is not None
    return hub._models._disk.store.stats()["blocks"]
