"""Restoring from both ends: whatever the two ends do, every token gets its KV once, and right."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatkv.client import ChatRequest, OpenChat, open_chat
from chatkv.engine.arriving import Gap, LayerMissing
from chatkv.engine.options import SamplingOptions
from chatkv.engine.pool import BLOCK_TOKENS
from chatkv.paths import folders
from chatkv.restore import end_loader
from chatkv.restore.both_ends import BothEnds
from chatkv.restore.end_loader import OnLayers
from chatkv.restore.last_step import Layers
from chatkv.restore.measured import Range
from chatkv.restore.pace import Pace
from chatkv.session.turn import Listener, TurnOptions
from chatkv_store.chain import StoredBlock
from turns import run_turns

Checkpoint = Callable[..., Path]
LAYERS = 4


def single(count: int) -> list[range]:
    """So many layers, each arriving by itself."""
    return [range(layer, layer + 1) for layer in range(count)]


class Walk:
    """A prefill that computes nothing but notes who brought which token, in which layer."""

    def __init__(
        self,
        stored: Sequence[int | None],
        first: int,
        behaviour: random.Random,
        can_leave: bool,
    ) -> None:
        self.tokens: dict[tuple[int, int], str] = {}
        self.num_waits = self.num_left = self.num_missing = 0
        self.left_half: set[int] = set()  # blocks of which some layers were loaded for nothing
        self.brought = 0.0  # tokens
        self.behaviour, self.lock = behaviour, threading.Lock()
        header: Any = None
        self.blocks = [
            None if count is None else StoredBlock(b"", index * BLOCK_TOKENS, count, header)
            for index, count in enumerate(stored)
        ]
        # From a disk that is much faster than prefill to one that is not worth waiting for.
        groups = behaviour.choice((single(LAYERS), [range(2), range(2, LAYERS)]))
        self.groups = groups
        load_block_s = 0.001 * 10 ** behaviour.uniform(-1.5, 1.5)
        self.both = BothEnds(
            self.blocks,
            first,
            self.load,
            load_block_s,
            lambda ranges: 1e-4 + sum(1e-5 * (stop - start) for start, stop in ranges),
            is_alone=lambda: behaviour.random() < 0.8,
            groups=groups,
            can_leave=can_leave,
        )

    def load(
        self,
        blocks: Sequence[StoredBlock],
        layers: Layers,
        on_layers: OnLayers,
        stop: Callable[[], bool],
    ) -> tuple[int, int, str | None]:
        sound = (
            len(blocks) if self.behaviour.random() < 0.8 else self.behaviour.randrange(len(blocks))
        )
        if self.behaviour.random() < 0.05:
            raise OSError("the disk is gone")
        # All layers of the sound ones come; of the others, perhaps some.
        come = range(layers.first, self.groups[layers.groups[-1]].stop)
        of_others = come if sound == len(blocks) else come[: self.behaviour.randrange(LAYERS)]
        self.left_half |= {block.start for block in blocks[sound:]}
        for layer in come:
            time.sleep(self.behaviour.random() * 0.002 / LAYERS)
            if stop():
                self.left_half |= {block.start for block in blocks}
                return 0, 0, None
            for block in blocks[: None if layer in of_others else sound]:
                self.note(block.start, block.start + block.num_tokens, layer, "loaded")
            if sound == len(blocks):
                on_layers(layer + 1)
        if sound == len(blocks):
            share = len(layers.groups) / len(self.groups)
            self.brought += share * sum(block.num_tokens for block in blocks)
        return sound, sound, None if sound == len(blocks) else "damaged"

    def prefill(self, start: int, total: int) -> None:
        position = start
        while position < total:
            gap = self.both.next_gap(position, total, 128)
            parts = [gap[:2]] if gap.behind is None else [gap[:2], gap.behind]
            assert position <= gap.start
            assert sum(stop - start for start, stop in parts) <= 128
            assert all(start < stop <= total for start, stop in parts)
            try:
                self.compute(position, parts, gap)
            except LayerMissing:
                self.num_missing += 1
                position = position if gap.behind is None else gap.start
                continue
            position = parts[-1][1]
            self.both.computed(position)

    def compute(self, start: int, parts: Sequence[Range], gap: Gap) -> None:
        """Layer by layer; whatever the last part attends to has to be there."""
        ask_at, is_asked = 0, gap.goes_on is not None
        self.num_waits += gap.wait_layer is not None
        for layer in range(LAYERS):
            if gap.goes_on is not None and is_asked and layer == ask_at:
                ask_at = gap.goes_on(layer)
                is_asked = ask_at > layer
                if not is_asked:
                    self.num_left += 1
                    parts = parts[1:]
            if gap.wait_layer is not None:
                gap.wait_layer(layer)
            time.sleep(self.behaviour.random() * 0.001 / LAYERS)
            for begin, stop in parts:
                self.note(begin, stop, layer, "computed")
            for token in range(start, parts[-1][0]):
                assert (token, layer) in self.tokens, f"token {token} was skipped"

    def note(self, start: int, stop: int, layer: int, how: str) -> None:
        with self.lock:
            for token in range(start, stop):
                before = self.tokens.get((token, layer))
                assert how == "computed" or before != "computed", "it is prefill's"
                is_half = token // BLOCK_TOKENS * BLOCK_TOKENS in self.left_half
                is_fine = before is None or is_half or self.num_missing
                assert is_fine, f"token {token} came twice"
                self.tokens[token, layer] = how


@given(
    seed=st.integers(0, 10_000),
    holes=st.lists(st.integers(0, 14), max_size=4),
    length=st.integers(1, 15),
    tail=st.integers(1, BLOCK_TOKENS),
    first=st.integers(0, 5),
    prompt=st.integers(1, 300),
    can_leave=st.booleans(),
)
def test_every_token_is_brought_once(
    seed: int,
    holes: list[int],
    length: int,
    tail: int,
    first: int,
    prompt: int,
    can_leave: bool,
) -> None:
    stored: list[int | None] = [*[BLOCK_TOKENS] * (length - 1), tail]
    for hole in holes:
        if hole < length:
            stored[hole] = None
    while stored and stored[-1] is None:
        stored.pop()
    walk = Walk(stored, first, random.Random(seed), can_leave)
    in_pool = min(first * BLOCK_TOKENS, max(0, (length - 1) * BLOCK_TOKENS))
    total = (length - 1) * BLOCK_TOKENS + tail + prompt
    walk.prefill(in_pool, total)
    walk.both.close()
    loaded = sum(how == "loaded" for (token, _), how in walk.tokens.items() if token >= in_pool)
    assert abs(walk.both.num_loaded - loaded / LAYERS) < 1, "of a token in part, its share"
    expected = {(token, layer) for token in range(in_pool, total) for layer in range(LAYERS)}
    assert expected <= set(walk.tokens)
    measured = walk.both.measured
    timed = [token for step in measured.steps for one in step for token in range(*one)]
    assert len(timed) == len(set(timed))
    assert {walk.tokens[token, 0] for token in timed} <= {"computed"}
    assert measured.loaded <= walk.brought + 1e-9
    notices = [line for line in walk.both.notices if "damaged" not in line]
    assert all("the disk is gone" in line for line in notices)


def test_a_pace_is_known_after_one_piece_and_follows_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr("chatkv.restore.pace.time.perf_counter", lambda: now[0])
    pace = Pace()
    assert (pace.factor, pace.left_s) == (1.0, 0.0)
    pace.begin(expected_s=1.0)
    now[0] += 0.25
    assert pace.left_s == 0.75
    now[0] += 9.75
    assert (pace.factor, pace.left_s) == (10.0, 9.0)  # overdue: it shows, and goes on showing
    assert pace.end() == 10.0
    assert (pace.factor, pace.left_s) == (10.0, 0.0)
    pace.begin(expected_s=1.0)
    now[0] += 2.0
    assert pace.left_s == 8.0
    pace.end()
    assert pace.factor == 6.0
    pace.begin(expected_s=1.0)
    now[0] += 2.0
    pace.end(expected_s=0.25)  # only a part of it was done
    assert pace.factor == 7.0


def seconds(ranges: Sequence[Range]) -> float:
    """Of a step: a second for each block, and half a second beside that."""
    return 0.5 + sum((stop - start) / BLOCK_TOKENS for start, stop in ranges)


def hours(ranges: Sequence[Range]) -> float:
    """So long that no test is: nothing is given up for having taken too much of it."""
    return 3600 * seconds(ranges)


def block(index: int) -> StoredBlock:
    header: Any = None
    return StoredBlock(b"", index * BLOCK_TOKENS, BLOCK_TOKENS, header)


@pytest.mark.parametrize("is_sound", [True, False])
def test_what_follows_begins_with_the_layers_of_the_last_block_that_have_come(
    is_sound: bool,
) -> None:
    came, go_on = threading.Event(), threading.Event()

    def load(
        blocks: Sequence[StoredBlock], layers: Layers, on_layers: OnLayers, stop: Callable[[], bool]
    ) -> tuple[int, int, str | None]:
        on_layers(1)
        came.set()
        go_on.wait()
        return (1, 10, None) if is_sound else (0, 10, "damaged")

    both = BothEnds([block(0)], 0, load, 1e-6, hours, groups=single(2))
    came.wait()
    gap = both.next_gap(0, 80, 512)
    assert gap[:3] == (64, 80, None) and gap.wait_layer is not None
    gap.wait_layer(0)  # it is there, and the block is still on its way
    go_on.set()
    if is_sound:
        gap.wait_layer(1)
        assert both.num_loaded == 64
    else:
        with pytest.raises(LayerMissing):
            gap.wait_layer(1)
        assert both.num_loaded == 0
        assert both.next_gap(0, 80, 512)[:3] == (0, 80, None)
    both.close()


def test_beside_others_what_follows_waits_for_the_whole_block() -> None:
    came, go_on = threading.Event(), threading.Event()

    def load(
        blocks: Sequence[StoredBlock], layers: Layers, on_layers: OnLayers, stop: Callable[[], bool]
    ) -> tuple[int, int, str | None]:
        came.set()
        go_on.wait()
        return 1, 10, None

    both = BothEnds([block(0)], 0, load, 1e-6, seconds, is_alone=lambda: False)
    came.wait()
    threading.Timer(0.05, go_on.set).start()
    assert both.next_gap(0, 80, 512)[:] == (64, 80, None, None, None)
    assert go_on.is_set()
    both.close()


def test_the_last_step_takes_what_follows_while_the_others_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One step computes the front and the prompt, the loader brings the rest in one go."""
    monkeypatch.setattr(end_loader, "START_S", 60.0)
    asked, go_on = [], threading.Event()

    def load(
        blocks: Sequence[StoredBlock], layers: Layers, on_layers: OnLayers, stop: Callable[[], bool]
    ) -> tuple[int, int, str | None]:
        asked.append([one.start // BLOCK_TOKENS for one in blocks])
        on_layers(1)
        go_on.wait()
        return len(blocks), 10, None

    both = BothEnds([block(i) for i in range(6)], 0, load, 3600.0, hours, groups=single(10))
    gap = both.next_gap(0, 400, 512)
    assert gap[:3] == (0, 192, (384, 400)) and gap.wait_layer is not None
    assert both.num_loaded == 192
    gap.wait_layer(0)
    go_on.set()
    gap.wait_layer(1)
    both.computed(400)
    both.close()
    assert asked == [[3, 4, 5]]
    assert both.measured.loaded == 192 and both.measured.steps == [((0, 192), (384, 400))]


def test_a_step_that_waits_for_too_much_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Loading was believed to be fast: what the last step left to it goes back to both ends."""
    monkeypatch.setattr(end_loader, "START_S", 60.0)
    stopped = threading.Event()

    def load(
        blocks: Sequence[StoredBlock], layers: Layers, on_layers: OnLayers, stop: Callable[[], bool]
    ) -> tuple[int, int, str | None]:
        while not stop():
            time.sleep(0.001)
        stopped.set()
        return 0, 0, None

    def step_s(ranges: Sequence[Range]) -> float:
        return 0.02 * seconds(ranges)

    both = BothEnds([block(i) for i in range(6)], 0, load, 1e-6, step_s, groups=single(10))
    gap = both.next_gap(0, 400, 512)
    assert gap[:3] == (384, 400, None) and gap.wait_layer is not None
    with pytest.raises(LayerMissing):
        gap.wait_layer(0)
    assert stopped.wait(10)
    assert both.num_loaded == 0
    assert both.next_gap(0, 400, 512).start == 0, "prefill takes some of it"
    both.close()


# --- with a real model ----------------------------------------------------------------------------

TEXT = "Tell me a long story about the sea, a ship, its captain and the captain's cat. " * 9
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_tokens": 6}


@pytest.fixture
def model(home: Path, tiny_checkpoint: Checkpoint) -> str:
    return str(tiny_checkpoint("llama3"))


def fork(session: str) -> str:
    from chatkv_store.conversations import Conversations

    with Conversations(folders().conversations) as conversations:
        return conversations.fork(session).id


def store_blocks(session: str, model: str) -> list[bytes]:
    """Keys of the session's stored blocks, in order."""
    with open_chat(folders(), ChatRequest(model, "float32", resume=session)) as chat:
        found = chat.runtime.restorer.plan(
            chat.conversation.sequence, [*chat.conversation.log, 5], len(chat.conversation.log) - 1
        ).stored
        return [block.key for block in found if block is not None]


@pytest.mark.parametrize("drop", [(), (0,), (2,), (0, 1), (1, 4), (5,), (0, 3, 5)])
def test_the_answer_is_that_of_a_re_prefill(drop: tuple[int, ...], model: str) -> None:
    """Also with blocks missing in front, in the middle and at the end."""
    session = run_turns([TEXT], model=model, **OPTIONS)[0]["session"]
    twins = [fork(session) for _ in range(2)]
    keys = store_blocks(session, model)
    assert len(keys) > 6
    with open_chat(folders(), ChatRequest(model, "float32", resume=session)) as chat:
        assert chat.runtime.restorer.disk is not None
        chat.runtime.restorer.disk.store.remove([keys[index] for index in drop])
    options: dict[str, Any] = OPTIONS | {"model": model}
    both = run_turns(["And then?"], session=twins[0], restore="both", **options)[0]
    again = run_turns(["And then?"], session=twins[1], restore="re-prefill", **options)[0]
    assert both["plan"]["chosen"] == "both"
    assert both["reply_ids"] == again["reply_ids"]
    tokens = both["tokens"]
    assert tokens["prompt"] == tokens["reused"] + tokens["loaded"] + tokens["computed"]
    assert tokens["loaded"] > 0
    assert again["tokens"]["loaded"] == 0


def answered(chat: OpenChat, **options: Any) -> Any:
    return chat.conversation.send(
        "And then?",
        TurnOptions(SamplingOptions(temperature=0), max_tokens=6, restore="both", **options),
    )


def test_a_loader_that_fails_midway_leaves_the_rest_to_prefill(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from chatkv.restore import pool_loads
    from chatkv_store.errors import StoreError

    session = run_turns([TEXT], model=model, **OPTIONS)[0]["session"]
    twin = fork(session)
    original = pool_loads.load_blocks

    def failing(store: Any, blocks: Any, layout: Any, into: Any, *options: Any, **more: Any) -> Any:
        original(store, blocks[:1], layout, into, 1)
        raise StoreError("the disk is gone")

    with (
        monkeypatch.context() as patch,
        open_chat(folders(), ChatRequest(model, "float32", resume=session)) as chat,
    ):
        patch.setattr(pool_loads, "load_blocks", failing)
        result = answered(chat)
    clean = run_turns(["And then?"], session=twin, model=model, restore="re-prefill", **OPTIONS)
    assert result.text == clean[0]["text"]
    assert any("the disk is gone" in notice for notice in result.notices)


def test_cancelling_stops_both_ends(model: str) -> None:
    session = run_turns([TEXT], model=model, **OPTIONS)[0]["session"]
    with open_chat(folders(), ChatRequest(model, "float32", resume=session)) as chat:
        cancelled = chat.conversation.send(
            "And then?", TurnOptions(restore="both"), Listener(cancelled=lambda: True)
        )
        assert cancelled.finish_reason == "interrupted"
        assert not any(thread.name == "kv-from-the-end" for thread in threading.enumerate())
        assert chat.conversation.send("Still there?", TurnOptions(max_tokens=4)).turn == 3
