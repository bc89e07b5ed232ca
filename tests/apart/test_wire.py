"""Requests and frames: what is sent arrives, and what is not sound touches nothing."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from chatkv.apart.receive import Receiver, RemoteFailed
from chatkv.apart.transport import RemoteGone
from chatkv.apart.wire import (
    HEAD_BYTES,
    End,
    Frame,
    Head,
    Kind,
    Model,
    Request,
    WireDamaged,
    digest_of,
    pack_request,
    unpack_frame,
    unpack_request,
)
from chatkv_store import layout as layouts
from chatkv_store.keys import chain_keys
from chatkv_store.layout import KVLayout

SPACE = b"n" * 32
IDS = list(range(1000, 1000 + 150))  # two blocks and a part of one
MODEL = Model("w", "c", "l")


@pytest.fixture
def layout(monkeypatch: pytest.MonkeyPatch) -> KVLayout:
    """Of three layers, each a value of its own."""
    monkeypatch.setattr(layouts, "MIN_VALUE_BYTES", 1)
    return KVLayout(3, 2, 4, "float32")


class Wire:
    """The frames of an answer, and the KV that they hold."""

    def __init__(self, layout: KVLayout, start: int = 0) -> None:
        self.layout, self.start = layout, start
        rng = np.random.default_rng(0)
        shape = (layout.num_layers, 2, layout.num_kv_heads, len(IDS), layout.head_dim)
        self.kv = rng.integers(0, 2**32, shape, dtype=np.uint32)
        self.there = np.zeros_like(self.kv)
        self.frames: list[bytes] = []
        self.add(Kind.HEAD, msgspec.json.encode(Head(0)))
        keys = chain_keys(SPACE, IDS, 64)
        for group in range(layout.num_values):
            for block in range(start // 64, len(keys)):
                stop = min(block * 64 + 64, len(IDS))
                bits = self.kv[list(layout.value_layers(group)), :, :, block * 64 : stop]
                about = {"group": group, "start": block * 64, "num_tokens": stop - block * 64}
                self.add(Kind.VALUE, bits.tobytes(), key=keys[block], **about)
        self.add(Kind.END, msgspec.json.encode(End(0, 0.1, len(IDS))))

    def add(self, kind: Kind, payload: bytes, **about: object) -> None:
        frame = Frame(kind, len(self.frames), **about).with_payload(payload)  # type: ignore[arg-type]
        self.frames.append(frame.pack() + payload)

    def receive(self, frames: list[bytes] | None = None) -> Receiver:
        """Take them; the receiver, whatever it raised kept in `error`."""
        stream = b"".join(self.frames if frames is None else frames)
        at = 0

        def read_into(buffer: memoryview) -> None:
            nonlocal at
            if at + len(buffer) > len(stream):
                raise RemoteGone("ended before it was done")
            buffer[:] = stream[at : at + len(buffer)]
            at += len(buffer)

        def put(group: int, start: int, bits: np.ndarray) -> None:
            layers = self.layout.value_layers(group)
            self.there[layers.start : layers.stop, :, :, start : start + bits.shape[3]] = bits

        receiver = Receiver(self.layout, SPACE, IDS, self.start, put)
        self.error: Exception | None = None
        try:
            receiver.run(read_into)
        except (WireDamaged, RemoteGone) as error:
            self.error = error
        return receiver

    def assert_is_sound(self, num_ready: int) -> None:
        """Everything that was put is what was sent, and the first num_ready tokens are there."""
        is_there = (self.there == self.kv) | (self.there == 0)
        assert is_there.all()
        assert (self.there == self.kv)[:, :, :, self.start : num_ready].all()
        assert not self.there[:, :, :, : self.start].any()


def test_a_request_arrives_as_it_was_sent() -> None:
    request = Request(MODEL, 3, "name", "owner", "store")
    assert unpack_request(pack_request(request, IDS)) == (request, IDS)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "no request"),
        (pack_request(Request(MODEL, 0, ""), IDS)[:-1], "cut short"),
        (pack_request(Request(MODEL, 0, ""), []), "cut short"),
        (pack_request(Request(MODEL, len(IDS), ""), IDS), "no token"),
        (pack_request(Request(MODEL, -1, ""), IDS), "no token"),
        (pack_request(Request(MODEL, 0, "", version=9), IDS), "version 9"),
        (b"ckvq\xff\xff\xff\xff{}", "cannot be read"),
    ],
)
def test_what_is_no_request_is_said(body: bytes, says: str) -> None:
    with pytest.raises(WireDamaged, match=says):
        unpack_request(body)


def test_every_byte_of_a_head_is_guarded() -> None:
    packed = Frame(Kind.VALUE, 7, 1, 64, 64, 100, b"k" * 32).pack()
    assert len(packed) == HEAD_BYTES
    assert unpack_frame(packed, 7).start == 64
    for at in range(HEAD_BYTES):
        damaged = bytearray(packed)
        damaged[at] ^= 0x10
        with pytest.raises(WireDamaged):
            unpack_frame(bytes(damaged), 7)


def test_a_digest_is_that_of_the_whole() -> None:
    whole = bytes(range(200))
    parts = [memoryview(whole)[:50], memoryview(whole)[50:]]
    assert digest_of(parts) == Frame(Kind.VALUE, 0).with_payload(whole).digest


@pytest.mark.parametrize("start", [0, 1, 63, 64, 100, 149])
def test_kv_comes_to_its_place_and_to_no_other(layout: KVLayout, start: int) -> None:
    wire = Wire(layout, start)
    received = wire.receive().received
    assert wire.error is None and received.num_ready == len(IDS)
    assert received.end is not None and received.end.computed == len(IDS)
    wire.assert_is_sound(len(IDS))


def _flip(frame: bytes, at: int) -> bytes:
    return frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :]


# What becomes of the frames: HEAD, three blocks in each of three layers, END.
DAMAGE: dict[str, tuple[Callable[[list[bytes]], list[bytes]], str]] = {
    "a payload": (lambda f: [*f[:5], _flip(f[5], HEAD_BYTES + 9), *f[6:]], "payload's digest"),
    "a head": (lambda f: [*f[:5], _flip(f[5], 12), *f[6:]], "head's digest"),
    "two swapped": (lambda f: [*f[:4], f[5], f[4], *f[6:]], "where frame"),
    "one left out": (lambda f: [*f[:4], *f[5:]], "where frame"),
    "one twice": (lambda f: [*f[:4], f[3], *f[4:]], "where frame"),
    "cut in a head": (lambda f: [*f[:4], f[4][:20]], "ended before"),
    "cut in a payload": (lambda f: [*f[:4], f[4][:-1]], "ended before"),
    "no end": (lambda f: f[:-1], "ended before"),
    "no head": (lambda f: f[1:], "where frame"),
    "nothing": (lambda f: [], "ended before"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_ends_it_and_reaches_no_kv(layout: KVLayout, how: str) -> None:
    damage, says = DAMAGE[how]
    wire = Wire(layout)
    received = wire.receive(damage(list(wire.frames))).received
    assert wire.error is not None and says in str(wire.error)
    assert received.end is None
    wire.assert_is_sound(received.num_ready)


def test_what_came_before_the_damage_is_good(layout: KVLayout) -> None:
    """Blocks come layer by layer, so the first one is whole with the first frame of the last."""
    wire = Wire(layout)
    received = wire.receive([*wire.frames[:8], wire.frames[8][:-1]]).received
    assert received.num_ready == 64
    wire.assert_is_sound(64)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"key": b"x" * 32}, "other tokens or another model"),
        ({"start": 64}, "whose turn it is"),
        ({"num_tokens": 63}, "whose turn it is"),
        ({"group": 3}, "layers that there are not"),
        ({"codec": 1}, "another codec"),
        ({"kind": Kind.STORED}, "store that is not ours"),
        ({"kind": Kind.END}, "too early"),
    ],
)
def test_a_sound_frame_must_be_the_one_that_was_asked_for(
    layout: KVLayout, change: dict[str, object], says: str
) -> None:
    """Heads that were made so, digests and all."""
    wire = Wire(layout)
    payload = wire.frames[1][HEAD_BYTES:]
    about: dict[str, object] = {
        "kind": Kind.VALUE,
        "number": 1,
        "num_tokens": 64,
        "key": chain_keys(SPACE, IDS, 64)[0],
    }
    frame = Frame(**(about | change)).with_payload(payload)  # type: ignore[arg-type]
    wire.receive([wire.frames[0], frame.pack() + payload])
    assert wire.error is not None and says in str(wire.error)
    assert not wire.there.any()


def test_a_value_of_another_size_is_refused(layout: KVLayout) -> None:
    wire = Wire(layout)
    payload = wire.frames[1][HEAD_BYTES:-4]
    frame = Frame(Kind.VALUE, 1, 0, 0, 64, key=chain_keys(SPACE, IDS, 64)[0])
    wire.receive([wire.frames[0], frame.with_payload(payload).pack() + payload])
    assert "bytes of a value" in str(wire.error)
    assert not wire.there.any()


def test_a_worker_that_cannot_go_on_says_why(layout: KVLayout) -> None:
    wire = Wire(layout)
    error = Frame(Kind.ERROR, 2).with_payload(b"its engine failed")
    received = wire.receive([*wire.frames[:2], error.pack() + b"its engine failed"]).received
    assert isinstance(wire.error, RemoteFailed) and "its engine failed" in str(wire.error)
    assert received.num_ready == 0
