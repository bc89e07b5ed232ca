"""One request for KV, carried out: the tokens are prefilled, and values leave as they are computed.

Two threads: the request's own prefills; another one writes frames of what is there, straight from
the pool where that lies in memory. On a CPU the layers of a piece leave while its next ones are
computed; on a GPU a piece leaves when it is whole.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue

import msgspec
import numpy as np

from chatkv.apart.wire import End, Frame, Head, Kind, Request, digest_of
from chatkv.engine.arriving import Gap
from chatkv.engine.budget import CHUNK_TOKENS
from chatkv.engine.engine import Engine, Preempted
from chatkv.engine.pool import BLOCK_TOKENS, BlockPool
from chatkv.engine.scheduler import Cancelled
from chatkv.engine.sequence import TokenSequence
from chatkv.errors import ChatkvError
from chatkv.restore.restorer import Restorer
from chatkv.restore.taking import Bits
from chatkv.server.direct import Sink
from chatkv.server.prefill_queue import Ticket
from chatkv_store.blocks import BlockStore
from chatkv_store.chain import NewBlock
from chatkv_store.errors import StoreError
from chatkv_store.keys import chain_keys

log = logging.getLogger("chatkv.server")

# So often a frame goes out, also where there is nothing to say.
ALIVE_S = 0.5


class Pieces:
    """What prefill asks where the next gap is (`Arriving`): hears of each layer that is done.

    on_layers(num_layers, stop): so many layers have the KV of all tokens before `stop`.
    """

    def __init__(self, on_layers: Callable[[int, int], None], is_by_layer: bool) -> None:
        self._on_layers, self._stop = on_layers, 0
        # It is called in front of a layer, when those before it are done.
        self._in_front = (lambda layer: on_layers(layer, self._stop)) if is_by_layer else None

    def next_gap(self, position: int, total: int, limit: int) -> Gap:
        self._stop = min(total, position + limit)
        return Gap(position, self._stop, wait_layer=self._in_front)

    def computed(self, position: int) -> None: ...


class PrefillWork:
    """KV of `ids` for a decode worker. `namespace`: which its blocks' keys begin with; `shared`:
    the store that both have open, None where they have none."""

    def __init__(
        self,
        restorer: Restorer,
        namespace: bytes,
        request: Request,
        ids: Sequence[int],
        sink: Sink,
        cancelled: threading.Event,
        shared: BlockStore | None = None,
    ) -> None:
        self._restorer, self._layout = restorer, restorer.layout
        self._namespace, self._request, self._ids = namespace, request, list(ids)
        self._sink, self._cancelled, self._shared = sink, cancelled, shared
        self._keys = chain_keys(namespace, ids, BLOCK_TOKENS)
        self._todo: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        first = request.start // BLOCK_TOKENS
        self._queued = [first] * self._layout.num_values  # blocks that the writer knows of
        self._number = 0
        self._sequence = TokenSequence()
        self.num_bytes = self.num_stored = self.num_computed = self.num_cached = 0
        self.queue_s = self.prefill_s = self.store_s = 0.0
        self.failure: str | None = None

    def run(self, ticket: Ticket) -> None:
        """Until the last frame has gone, or nobody wants any more. Never raises."""
        writer = threading.Thread(target=self._write, name="kv-out", daemon=True)
        writer.start()
        try:
            with ExitStack() as held, ticket.turn(self._cancelled):
                sequence = held.enter_context(self._sequence_in_use())
                # Frames are views of the sequence's blocks: it is kept until the last has gone,
                # while the next request has its turn.
                held.callback(self._end, writer)
                self.queue_s = ticket.waited_s
                self._prefill(sequence)
        except (Cancelled, Preempted) as error:
            self.failure = "others need its memory" if isinstance(error, Preempted) else "cancelled"
        except (ChatkvError, StoreError) as error:
            self.failure = str(error)
        except Exception as error:
            self.failure = f"its engine failed ({type(error).__name__})"
        finally:
            self._end(writer)
        if self.failure is not None:
            with suppress(OSError):
                self._send(Frame(Kind.ERROR, 0), self.failure.encode()[:1000])

    @contextmanager
    def _sequence_in_use(self) -> Iterator[TokenSequence]:
        """What is in memory of the conversation; a fresh one while somebody still sends of it."""
        memory = self._restorer.engine.memory
        sequence = self._restorer.sequence(f"prefill/{self._request.name}")
        if sequence in memory.room:
            sequence = self._restorer.scratch_sequence()
        with memory.use(sequence):
            yield sequence

    def _end(self, writer: threading.Thread) -> None:
        """Wait until all that is queued has gone."""
        self._todo.put(None)
        writer.join()

    # --- computing ------------------------------------------------------------------------------

    def _prefill(self, sequence: TokenSequence) -> None:
        restorer, engine, ids = self._restorer, self._restorer.engine, self._ids
        restored = restorer.restore(
            sequence, restorer.plan(sequence, ids, history=0), cancelled=self._cancelled.is_set
        )
        if restored.arriving is not None:
            restored.arriving.close()
            gap = restored.arriving.next_gap(sequence.num_cached, len(ids), 1)
            sequence.num_cached = gap.start
        self._sequence, self.num_cached = sequence, sequence.num_cached
        self._say(Kind.HEAD, Head(self.num_cached))
        for stop in range(0, self.num_cached, CHUNK_TOKENS):  # as if it were just computed
            self._ready(self._layout.num_layers, stop)
        self._ready(self._layout.num_layers, self.num_cached)
        began = time.perf_counter()
        self._compute(engine, sequence)
        self.prefill_s = time.perf_counter() - began
        self.num_computed = len(ids) - self.num_cached
        restorer.learn(restored, self.num_computed, self.prefill_s)
        self._todo.put(self._last)

    def _compute(self, engine: Engine, sequence: TokenSequence) -> None:
        by_layer = isinstance(engine.pool, BlockPool) and self._shared is None
        pieces = Pieces(self._ready, by_layer)
        engine.prefill(
            sequence,
            lambda done, total: self._ready(self._layout.num_layers, done),
            self._cancelled.is_set,
            pieces,
        )

    def _ready(self, num_layers: int, stop: int) -> None:
        """The first layers have the KV of all tokens before `stop`: have it sent. Called by the
        thread that computes, so it only queues."""
        full = len(self._keys) if stop == len(self._ids) else stop // BLOCK_TOKENS
        first = self._queued[-1]  # the last layers come last
        if self._shared is not None and full > first:
            self._queued[-1] = full
            self._todo.put(partial(self._out_through, self._shared, range(first, full)))
        elif self._shared is None:
            for group in range(self._layout.num_values):
                if self._layout.value_layers(group).stop <= num_layers:
                    blocks = range(self._queued[group], full)
                    self._queued[group] = max(self._queued[group], full)
                    self._todo.put(partial(self._out, blocks, group))

    # --- sending --------------------------------------------------------------------------------

    def _write(self) -> None:
        """Send what is queued, until the end of it. When nobody listens, all of it is over."""
        while True:
            try:
                work = self._todo.get(timeout=ALIVE_S)
                if work is None:
                    return
            except Empty:
                work = self._alive
            if self._cancelled.is_set():
                continue
            try:
                work()
            except Exception as error:  # nobody may wait for a thread that has ended
                if not isinstance(error, OSError):
                    log.warning("sending KV: %r", error)
                self._cancelled.set()

    def _alive(self) -> None:
        self._send(Frame(Kind.ALIVE, 0))

    def _say(self, kind: Kind, what: msgspec.Struct) -> None:
        text = msgspec.json.encode(what)
        self._todo.put(lambda: self._send(Frame(kind, 0), text))

    def _last(self) -> None:
        end = End(self.queue_s, self.prefill_s, self.num_computed, self.store_s)
        self._send(Frame(Kind.END, 0), msgspec.json.encode(end))

    def _out(self, blocks: range, group: int) -> None:
        for block in blocks:
            self._value(block, group)

    def _out_through(self, store: BlockStore, blocks: range) -> None:
        """Put blocks into the shared store and say so; send what cannot be put there: a part of a
        block, and what the store refuses."""
        whole = [block for block in blocks if self._is_whole(block)]
        is_stored = bool(whole) and self._store(store, whole)
        for block in blocks:
            if is_stored and block in whole:
                start, _ = self._tokens(block)
                frame = Frame(Kind.STORED, 0, 0, start, BLOCK_TOKENS, key=self._keys[block])
                self._send(frame)
            else:
                for group in range(self._layout.num_values):
                    self._value(block, group)
        self._alive()  # behind which it is read

    def _tokens(self, block: int) -> tuple[int, int]:
        start = block * BLOCK_TOKENS
        return start, min(start + BLOCK_TOKENS, len(self._ids))

    def _is_whole(self, block: int) -> bool:
        start, stop = self._tokens(block)
        return stop - start == BLOCK_TOKENS and start >= self._request.start

    def _value(self, block: int, group: int) -> None:
        start, stop = self._tokens(block)
        reach, run = self._restorer.reach, self._sequence.run
        parts = stretches(reach.look(run, start, stop).value(group))
        frame = Frame(
            Kind.VALUE,
            self._number,
            group,
            start,
            stop - start,
            sum(part.nbytes for part in parts),
            self._keys[block],
            digest_of(parts),
        )
        self._number += 1
        self._sink.send([frame.pack(), *parts])
        self.num_bytes += frame.num_bytes

    def _store(self, store: BlockStore, blocks: Sequence[int]) -> bool:
        """Put blocks into the shared store; False where that refuses them."""
        new, began = [], time.perf_counter()
        for block in blocks:
            start, stop = self._tokens(block)
            parent = self._keys[block - 1] if block else self._namespace
            kv = self._restorer.reach.look(self._sequence.run, start, stop)
            new.append(NewBlock(parent, self._ids[start:stop], kv.value, start))
        try:
            store.put(self._namespace, self._layout, new)
        except StoreError:
            return False
        finally:
            self.store_s += time.perf_counter() - began
        self.num_stored += len(blocks) * BLOCK_TOKENS
        return True

    def _send(self, frame: Frame, payload: bytes = b"") -> None:
        whole = Frame(
            frame.kind, self._number, frame.group, frame.start, frame.num_tokens, key=frame.key
        ).with_payload(payload)
        self._number += 1
        self._sink.send([whole.pack(), payload])


def stretches(bits: Bits) -> list[memoryview]:
    """The bytes of a value [layers, 2, heads, tokens, head_dim] in their order, as the stretches of
    memory that they lie in: in the pool the tokens of a head lie together, so nothing is copied."""
    if bits.flags.c_contiguous:
        return [bits.data.cast("B")]
    heads = (bits[index] for index in np.ndindex(bits.shape[:3]))
    return [np.ascontiguousarray(head).data.cast("B") for head in heads]
