"""Taking KV from a stream of frames: each is verified before a byte of it goes to its place.

What a frame may hold follows from the request alone: which block comes next in which layers, under
which key, with how many bytes. Anything else ends the stream; what came before it stays good.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import numpy as np

from chatkv.apart.transport import RemoteGone
from chatkv.apart.wire import RAW, End, Frame, FrameReader, Head, Kind, ReadInto, WireDamaged
from chatkv_store.keys import chain_keys
from chatkv_store.layout import KVLayout
from chatkv_store.payloads import Bits

Fields = TypeVar("Fields", Head, End)

# Payloads of fewer bytes tell nothing of a link's rate.
RATED_BYTES = 4 << 10

# put(group, start, bits): bits [layers, 2, heads, tokens, head_dim] of the layers of `group` go to
# the tokens from `start` on.
Put = Callable[[int, int, Bits], None]
# load(first, stop): blocks [first, stop) lie in the shared store now; how many tokens of theirs,
# from the first one on, are in the pool then.
Load = Callable[[int, int], int]


class RemoteFailed(RemoteGone):
    """The prefill worker says that it could not go on."""


@dataclass
class Received:
    """What has come by now. `num_ready`: leading tokens whose KV is in its place in all layers."""

    num_ready: int
    num_bytes: int = 0  # of payloads, on the wire
    num_stored: int = 0  # tokens that came through the shared store
    rated_bytes: int = 0  # payloads whose way was timed, and
    rated_s: float = 0.0  # how long that took
    loaded_s: float = 0.0  # reading what came through the shared store
    waited_s: float = 0.0  # until the first KV came
    head: Head | None = None
    end: End | None = None
    stored_keys: list[bytes] = field(default_factory=list)


class Receiver:
    """KV of ids[start:] in the blocks of `namespace`, on its way to `put` and `load`.

    Tokens before `start` are somebody's live KV: of the block that they share with the first
    wanted ones, only the wanted ones are put.
    """

    def __init__(
        self,
        layout: KVLayout,
        namespace: bytes,
        ids: Sequence[int],
        start: int,
        put: Put,
        load: Load | None = None,
    ) -> None:
        self._layout, self._put, self._load = layout, put, load
        self._total, self._start = len(ids), start
        self._keys = chain_keys(namespace, ids, layout.block_tokens)
        self._next = [start // layout.block_tokens] * layout.num_values  # block, for each group
        self._unloaded = range(0)  # blocks that are said to lie in the store
        self.received = Received(start)

    def run(self, read_into: ReadInto, on_ready: Callable[[int], None] = lambda n: None) -> None:
        """Take frames until the last one. Raises WireDamaged, RemoteFailed and what `read_into`
        does; `received` tells what has come until then."""
        reader = FrameReader(read_into)
        began = time.perf_counter()
        while self.received.end is None:
            frame = reader.head()
            if frame.kind != Kind.ALIVE and not frame.number:
                is_first = frame.kind in (Kind.HEAD, Kind.ERROR)
                self._must(frame, is_first, "is not the first one")
            if frame.kind != Kind.STORED:
                self._load_stored()
            at = time.perf_counter()
            payload = reader.payload(frame)
            if frame.num_bytes >= RATED_BYTES:
                self.received.rated_bytes += frame.num_bytes
                self.received.rated_s += time.perf_counter() - at
            if frame.kind in (Kind.VALUE, Kind.STORED) and not self.received.waited_s:
                self.received.waited_s = time.perf_counter() - began
            self._take(frame, payload)
            on_ready(self.received.num_ready)

    def _take(self, frame: Frame, payload: memoryview) -> None:
        match frame.kind:
            case Kind.VALUE:
                self._value(frame, payload)
            case Kind.STORED:
                self._stored(frame)
            case Kind.HEAD:
                self.received.head = _decoded(frame, payload, Head)
            case Kind.END:
                self._must(frame, self.received.num_ready == self._total, "comes too early")
                self.received.end = _decoded(frame, payload, End)
            case Kind.ERROR:
                said = bytes(payload).decode("utf-8", "replace")
                raise RemoteFailed(f"could not go on: {said}")
            case Kind.ALIVE:
                pass

    def _value(self, frame: Frame, payload: memoryview) -> None:
        layout = self._layout
        self._must(frame, frame.group < layout.num_values, "is of layers that there are not")
        block = self._next[frame.group]
        first, num_tokens = self._expected(frame, block)
        shape = layout.value_shape(frame.group, num_tokens)
        num_bytes = int(np.prod(shape)) * layout.bytes_per_element
        self._must(frame, frame.codec == RAW, "is in another codec than was asked for")
        self._must(frame, frame.num_bytes == num_bytes, f"has not the {num_bytes} bytes of a value")
        bits = np.frombuffer(payload, layout.bits_dtype).reshape(shape)
        skipped = max(0, self._start - first)
        self._put(frame.group, first + skipped, bits[:, :, :, skipped:])
        self._next[frame.group] = block + 1
        self.received.num_bytes += num_bytes
        self._ready(min(self._next))

    def _stored(self, frame: Frame) -> None:
        block = min(self._next)
        first, num_tokens = self._expected(frame, block)
        self._must(frame, self._load is not None, "is in a store that is not ours")
        self._must(frame, block == max(self._next), "comes among those of other blocks")
        is_whole = num_tokens == self._layout.block_tokens and first >= self._start
        self._must(frame, is_whole, "is of a block that cannot be loaded as a whole")
        self._unloaded = range(self._unloaded.start if self._unloaded else block, block + 1)
        self._next = [block + 1] * self._layout.num_values

    def _expected(self, frame: Frame, block: int) -> tuple[int, int]:
        """Where the tokens of a block begin and how many they are, which is what the frame must
        be of."""
        self._must(frame, block < len(self._keys), "is of tokens that were not asked for")
        first = block * self._layout.block_tokens
        num_tokens = min(self._layout.block_tokens, self._total - first)
        is_it = (frame.start, frame.num_tokens) == (first, num_tokens)
        self._must(frame, is_it, f"is not of the tokens from {first} on, whose turn it is")
        self._must(frame, frame.key == self._keys[block], "is of other tokens or another model")
        return first, num_tokens

    def _load_stored(self) -> None:
        """Read what was said to lie in the store."""
        blocks, self._unloaded = self._unloaded, range(0)
        if not blocks or self._load is None:
            return
        wanted, began = len(blocks) * self._layout.block_tokens, time.perf_counter()
        loaded = self._load(blocks.start, blocks.stop)
        self.received.loaded_s += time.perf_counter() - began
        if loaded < wanted:
            first = blocks.start * self._layout.block_tokens
            raise WireDamaged(
                f"of {wanted} tokens from token {first} on, the shared store has {loaded}"
            )
        self.received.num_stored += wanted
        self.received.stored_keys += self._keys[blocks.start : blocks.stop]
        self._ready(blocks.stop)

    def _ready(self, num_blocks: int) -> None:
        ready = min(num_blocks * self._layout.block_tokens, self._total)
        self.received.num_ready = max(self.received.num_ready, ready)

    def _must(self, frame: Frame, is_so: bool, otherwise: str) -> None:
        if not is_so:
            raise WireDamaged(f"frame {frame.number} {otherwise}")


def _decoded(frame: Frame, payload: memoryview, kind: type[Fields]) -> Fields:
    try:
        return msgspec.json.decode(payload, type=kind)
    except msgspec.MsgspecError:
        raise WireDamaged(f"frame {frame.number} says what cannot be read") from None
