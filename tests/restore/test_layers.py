"""Layers that load while the first ones compute: the same bits as a load that is waited for."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chatkv.client import ChatRequest, open_chat
from chatkv.engine.arriving import LayerMissing
from chatkv.engine.options import SamplingOptions
from chatkv.paths import folders
from chatkv.restore import restorer
from chatkv.restore.layers import Arrived, LayerLoad, OnGroup
from chatkv.restore.plan import Plan
from chatkv.restore.restored import Restored
from chatkv.session.record import TurnRecord
from chatkv.session.turn import Listener, TurnOptions
from chatkv_store import layout as layouts
from chatkv_store.blocks import BlockStore
from chatkv_store.conversations import Conversations
from chatkv_store.errors import StoreError
from chatkv_store.layout import KVLayout
from chatkv_store.tables import value_key
from small_engine import Turn
from turns import run_turns

LAYOUT = KVLayout(6, 2, 64, "float32")  # a layer is 64 KiB: two values, of four layers and of two


class Loading:
    """A load that goes on when it is told to."""

    def __init__(self, start: int, expected: int, is_alone: Callable[[], bool] = lambda: True):
        self.start, self.expected = start, expected
        self._tell = threading.Semaphore(0)
        self._todo: list[Callable[[OnGroup], Arrived | None]] = []
        self.load = LayerLoad(start, expected, LAYOUT, self._load, is_alone)

    def group(self, group: int, num_cached: int) -> None:
        self._next(lambda on_group: on_group(group, num_cached))

    def end(self, num_cached: int, damage: str | None = None) -> None:
        self._next(lambda _: Arrived(num_cached, 1000, 0.1, 0.1, damage))

    def fail(self, error: Exception) -> None:
        def work(_: OnGroup) -> None:
            raise error

        self._next(work)

    def _next(self, work: Callable[[OnGroup], Arrived | None]) -> None:
        self._todo.append(work)
        self._tell.release()

    def _load(self, on_group: OnGroup) -> Arrived:
        while True:
            self._tell.acquire()
            arrived = self._todo.pop(0)(on_group)
            if arrived is not None:
                return arrived

    def wait(self, layer: int) -> Turn:
        wait_layer = self.gap.wait_layer
        assert wait_layer is not None
        return Turn(lambda: wait_layer(layer))

    def next_gap(self, position: int, total: int, limit: int) -> tuple[int, int]:
        self.gap = self.load.next_gap(position, total, limit)
        return self.gap[:2]


def test_a_layer_is_waited_for_and_no_further() -> None:
    loading = Loading(64, 300)
    assert loading.next_gap(64, 400, 512) == (300, 400)
    third, fifth = loading.wait(3), loading.wait(4)
    third.join(0.05)
    assert third.is_alive() and fifth.is_alive()
    loading.group(0, 300)
    third.result()
    fifth.join(0.05)
    assert fifth.is_alive()
    loading.group(1, 300)
    fifth.result()
    loading.end(300)
    loading.load.close()
    assert loading.next_gap(400, 500, 50) == (400, 450)
    assert loading.gap.wait_layer is None, "all is there"
    assert (loading.load.num_loaded, loading.load.notices) == (236, ())


@pytest.mark.parametrize("sound", [0, 64, 128, 299])
@pytest.mark.parametrize("bad_group", [0, 1])
def test_behind_what_is_missing_prefill_begins_where_the_sound_part_ends(
    bad_group: int, sound: int
) -> None:
    loading = Loading(0, 300)
    assert loading.next_gap(0, 400, 512) == (300, 400)
    for group in range(bad_group):
        loading.group(group, 300)
    loading.group(bad_group, sound)
    with pytest.raises(LayerMissing):
        loading.wait(5).result()
    loading.end(sound, "block 3 is damaged")
    assert loading.next_gap(0, 400, 32) == (sound, min(400, sound + 32))
    assert loading.gap.wait_layer is None
    assert "block 3 is damaged" in loading.load.notices[0]
    assert loading.next_gap(350, 400, 512) == (350, 400), "it never goes back"


def test_a_load_that_fails_brings_nothing() -> None:
    loading = Loading(64, 300)
    loading.next_gap(64, 400, 512)
    loading.group(0, 300)
    loading.fail(StoreError("the disk is gone"))
    with pytest.raises(LayerMissing):
        loading.wait(5).result()
    assert loading.next_gap(64, 400, 512) == (64, 400)
    assert loading.load.num_loaded == 0 and "the disk is gone" in loading.load.notices[0]


def test_where_others_would_wait_too_the_end_of_the_load_is_waited_for() -> None:
    loading = Loading(0, 300, is_alone=lambda: False)
    gap = Turn(lambda: loading.next_gap(0, 400, 512))
    loading.group(0, 300)
    gap.join(0.05)
    assert gap.is_alive()
    loading.end(300)
    assert gap.result() == (300, 400)
    assert loading.gap.wait_layer is None


def test_a_load_that_says_last_what_it_brought_is_counted_once() -> None:
    """Its last layer has come, and prefill is done, before its thread gets to say so."""
    loading, record = Loading(0, 300), TurnRecord(0.0)
    record.restore_done(Restored(Plan("reload", 0.0), 0, arriving=loading.load))
    loading.next_gap(0, 400, 512)
    for group in range(2):
        loading.group(group, 300)
    loading.wait(5).result()
    record.chunk_done(400)
    loading.end(300)
    loading.load.close()
    counts = record.tokens(0)
    assert (counts.prompt, counts.loaded, counts.computed) == (400, 300, 100)


# --- with a real model and a real store -----------------------------------------------------------

TEXT = "Tell me a long story about the sea, a ship, its captain and the captain's cat. " * 9
OPTIONS: dict[str, Any] = {"max_tokens": 6}


@pytest.fixture
def model(
    home: Path, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    monkeypatch.setattr(layouts, "MIN_VALUE_BYTES", 1)  # a value for each of the three layers
    yield str(tiny_checkpoint("llama3"))


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[LayerLoad]:
    """Every load of a history overlaps; the loads that did."""
    made: list[LayerLoad] = []

    class Noted(LayerLoad):
        def __init__(self, *arguments: Any) -> None:
            made.append(self)
            super().__init__(*arguments)

    monkeypatch.setattr(restorer, "OVERLAP_S", float("-inf"))
    monkeypatch.setattr(restorer, "LayerLoad", Noted)
    return made


def answers(
    session: str, model: str, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The next turn with layers that overlap, and as a copy of all files gives it without. (A fork
    would find what the first turn has just stored.)"""
    options = OPTIONS | {"model": model, "dtype": "float32", "restore": "reload"} | options
    home = os.environ["CHATKV_HOME"]
    with monkeypatch.context() as patch:
        patch.setenv("CHATKV_HOME", shutil.copytree(home, f"{home}-copy"))
        patch.setattr(restorer, "OVERLAP_S", float("inf"))
        plain = run_turns(["And then?"], session=session, **options)[0]
    return run_turns(["And then?"], session=session, **options)[0], plain


def same(overlapped: dict[str, Any], plain: dict[str, Any]) -> None:
    assert overlapped["plan"]["chosen"] == plain["plan"]["chosen"] == "reload"
    for field in ("tokens", "reply_ids", "logits", "notices"):
        assert overlapped[field] == plain[field]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_answer_is_the_same_to_the_bit(
    dtype: str, model: str, loads: list[LayerLoad], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = run_turns([TEXT], model=model, dtype=dtype, **OPTIONS)[0]["session"]
    overlapped, plain = answers(session, model, monkeypatch, dtype=dtype)
    assert len(loads) == 1 and loads[0].arrived is not None
    same(overlapped, plain)
    assert overlapped["tokens"]["loaded"] > 300
    assert overlapped["notices"] == plain["notices"] == []


@pytest.mark.parametrize("kv_codec", ["int8", "int4"])
def test_so_it_is_with_kv_that_was_quantised(
    kv_codec: Any, model: str, loads: list[LayerLoad], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_chat(folders(), ChatRequest(model, "bfloat16", seed=7, kv_codec=kv_codec)) as chat:
        session = chat.conversation.send(TEXT, TurnOptions(max_tokens=6)).session
    overlapped, plain = answers(session, model, monkeypatch, dtype="bfloat16")
    assert len(loads) == 1
    same(overlapped, plain)


@pytest.mark.parametrize(
    ("kind", "group", "block"),
    [
        ("damaged", 0, 0),
        ("damaged", 1, 3),
        ("damaged", 2, -2),
        ("missing", 0, -2),
        ("missing", 1, 0),
        ("missing", 2, 3),
    ],
)
def test_a_value_that_is_not_sound_costs_time_alone(
    kind: str,
    group: int,
    block: int,
    model: str,
    loads: list[LayerLoad],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = run_turns([TEXT], model=model, dtype="float32", **OPTIONS)[0]["session"]
    with open_chat(folders(), ChatRequest(model, "float32", resume=session)) as chat:
        ids = chat.conversation.log
        stored = chat.runtime.restorer.plan(chat.conversation.sequence, [*ids, 5], len(ids) - 1)
    key = value_key([b.key for b in stored.stored if b is not None][block], group)

    with BlockStore(folders().kv) as store:

        def spoil(txn: Any) -> None:
            value = bytearray(txn.get(key, db=store.db["values"]))
            value[len(value) // 2] ^= 16
            if kind == "missing":
                txn.delete(key, db=store.db["values"])
            else:
                txn.put(key, bytes(value), db=store.db["values"])

        store.env.write(spoil)
    overlapped, plain = answers(session, model, monkeypatch)
    assert len(loads) == 1
    assert overlapped["notices"], "it is said"
    same(overlapped, plain)
    with BlockStore(folders().kv) as store:
        assert store.verify() == [], "it was stored anew"


def test_a_store_that_fails_midway_leaves_all_to_prefill(
    model: str, loads: list[LayerLoad], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = run_turns([TEXT], model=model, dtype="float32", **OPTIONS)[0]["session"]
    read_run, calls = BlockStore.read_run, []

    def failing(self: BlockStore, *arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) > 3:
            raise StoreError("the disk is gone")
        return read_run(self, *arguments)

    with Conversations(folders().conversations) as conversations:
        twin = conversations.fork(session).id
    options = OPTIONS | {"model": model, "dtype": "float32"}
    with monkeypatch.context() as patch:
        patch.setattr(BlockStore, "read_run", failing)
        failed = run_turns(["And then?"], session=session, restore="reload", **options)[0]
    assert len(loads) == 1 and len(calls) > 3
    assert failed["tokens"]["loaded"] == 0
    clean = run_turns(["And then?"], session=twin, restore="re-prefill", **options)[0]
    assert failed["logits"] == clean["logits"] and failed["reply_ids"] == clean["reply_ids"]
    assert any("the disk is gone" in notice for notice in failed["notices"])


def test_a_cancel_leaves_no_load_behind(model: str, loads: list[LayerLoad]) -> None:
    session = run_turns([TEXT], model=model, dtype="float32", **OPTIONS)[0]["session"]
    with open_chat(folders(), ChatRequest(model, "float32", resume=session)) as chat:
        cancelled = chat.conversation.send(
            "And then?", TurnOptions(restore="reload"), Listener(cancelled=lambda: True)
        )
        assert cancelled.finish_reason == "interrupted" and len(loads) == 1
        assert not any(thread.name == "kv-by-layer" for thread in threading.enumerate())
        greedy = TurnOptions(SamplingOptions(temperature=0), max_tokens=4)
        assert chat.conversation.send("Still there?", greedy).turn == 3
