"""What a prefill worker answers: KV for decode workers.

GET  /prefill           which models, how fast, how long one would wait
GET  /prefill/sample    bytes, by which a link is measured
POST /prefill/kv        KV of token ids (`apart.wire`), as a stream of frames
GET  /health, /metrics
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from chatkv.apart.over_http import KV_PATH, LANDING_HEADER, SAMPLE_PATH, STATE_PATH
from chatkv.apart.transport import Offered, Rates, State
from chatkv.apart.wire import VERSION, WireDamaged, unpack_request
from chatkv.errors import UsageError
from chatkv.process import resident_bytes
from chatkv.server.carriers import owner_of
from chatkv.server.direct import sink_for
from chatkv.server.metrics import counter, gauge
from chatkv.server.prefill_queue import PrefillQueue, Ticket
from chatkv.server.prefill_work import PrefillWork
from chatkv_store.same_store import identity

if TYPE_CHECKING:
    from chatkv.apart.wire import Request as KVRequest
    from chatkv.runtime import Runtime

# Requests that wait or are carried out; each has a thread.
MAX_REQUESTS = 64
MAX_SAMPLE_BYTES = 4 << 20


@dataclass
class Sums:
    """What was done since the process began."""

    requests: Counter[str] = field(default_factory=Counter)  # by how they ended
    tokens: Counter[str] = field(default_factory=Counter)  # computed, cached
    num_bytes: int = 0  # sent
    stored_tokens: int = 0  # that went through a shared store
    queue_s: float = 0.0
    prefill_s: float = 0.0

    def add(self, work: PrefillWork) -> None:
        self.requests["failed" if work.failure is not None else "done"] += 1
        self.tokens["computed"] += work.num_computed
        self.tokens["cached"] += work.num_cached
        self.num_bytes += work.num_bytes
        self.stored_tokens += work.num_stored
        self.queue_s += work.queue_s
        self.prefill_s += work.prefill_s

    def lines(self) -> Iterator[str]:
        ended = [(f'ended="{how}"', number) for how, number in self.requests.items()]
        yield from counter("prefill_requests_total", "Requests for KV, by how they ended.", ended)
        tokens = [(f'source="{source}"', number) for source, number in self.tokens.items()]
        yield from counter("prefill_tokens_total", "Tokens whose KV was asked for.", tokens)
        for name, says, value in (
            ("prefill_sent_bytes_total", "Bytes of KV that were sent.", self.num_bytes),
            ("prefill_stored_tokens_total", "Tokens put into a shared store.", self.stored_tokens),
            ("prefill_queue_seconds_total", "What requests have waited.", self.queue_s),
            ("prefill_seconds_total", "What computing has taken.", self.prefill_s),
        ):
            yield from counter(name, says, [("", value)])


class Prefill:
    """The routes. runtimes(): the models that are loaded."""

    def __init__(self, runtimes: Callable[[], Sequence[Runtime]]) -> None:
        self._runtimes = runtimes
        self.queue, self.sums = PrefillQueue(), Sums()
        self._threads = ThreadPoolExecutor(MAX_REQUESTS, thread_name_prefix="prefill")
        self._running: set[threading.Event] = set()

    def routes(self) -> list[Route]:
        return [
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route(STATE_PATH, self.state),
            Route(SAMPLE_PATH, self.sample),
            Route(KV_PATH, self.kv, methods=["POST"]),
        ]

    def cancel(self) -> None:
        """End what is running, soon."""
        for cancelled in list(self._running):
            cancelled.set()

    def close(self) -> None:
        """End what is running, and wait for it."""
        self.cancel()
        self._threads.shutdown()

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def state(self, request: Request) -> Response:
        models = [_offered(runtime) for runtime in self._runtimes()]
        state = State(VERSION, models, round(self.queue.expected_s, 4))
        return Response(msgspec.json.encode(state), media_type="application/json")

    async def sample(self, request: Request) -> Response:
        given = request.query_params.get("bytes", "")
        if not (given.isascii() and given.isdigit() and int(given[:9]) <= MAX_SAMPLE_BYTES):
            return refused(400, f"bytes must be a whole number up to {MAX_SAMPLE_BYTES}")
        return Response(bytes(int(given)), media_type="application/octet-stream")

    async def metrics(self, request: Request) -> Response:
        lines = [
            *self.sums.lines(),
            *gauge("prefill_waiting", "Requests for KV, not done.", [("", len(self.queue))]),
            *gauge("prefill_queue_seconds", "A new one's wait.", [("", self.queue.expected_s)]),
            *gauge("models_loaded", "Models in memory.", [("", len(self._runtimes()))]),
            *gauge("memory_bytes", "Memory that it takes.", [("", resident_bytes())]),
        ]
        text = "\n".join(lines) + "\n"
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def kv(self, request: Request) -> Response:
        try:
            wanted, ids = unpack_request(await request.body())
        except WireDamaged as error:
            return refused(400, str(error))
        runtimes = self._runtimes()
        runtime = next((one for one in runtimes if one.model == wanted.model), None)
        if runtime is None:
            others = [one.model.difference(wanted.model) for one in runtimes]
            return refused(409, f"it has {others[0]}" if others else "it has no model yet")
        if len(ids) > runtime.engine.max_tokens:
            room = runtime.engine.max_tokens
            return refused(413, f"it has room for {room} tokens, not {len(ids)}")
        if max(ids) >= runtime.prepared.config.vocab_size:
            return refused(400, "there is no such token in its vocabulary")
        if len(self.queue) >= MAX_REQUESTS:
            return refused(503, "too many wait already")
        if LANDING_HEADER in request.headers and (missing := _no_nixl()) is not None:
            return refused(501, missing)
        owner = owner_of(request)
        return _KVResponse(self, runtime, wanted, ids, owner)

    async def carry_out(
        self, work: PrefillWork, ticket: Ticket, cancelled: threading.Event, receive: Receive
    ) -> None:
        """Until it is done; a client that leaves ends it."""
        loop = asyncio.get_running_loop()
        self._running.add(cancelled)
        gone = asyncio.create_task(_when_left(receive, cancelled))
        try:
            await loop.run_in_executor(self._threads, work.run, ticket)
        finally:
            self._running.discard(cancelled)
            self.sums.add(work)
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)


class _KVResponse(Response):
    """The frames of one request."""

    def __init__(
        self, prefill: Prefill, runtime: Runtime, wanted: KVRequest, ids: list[int], owner: str
    ) -> None:
        super().__init__(media_type="application/octet-stream")
        self._prefill, self._runtime, self._wanted = prefill, runtime, wanted
        self._ids, self._owner = ids, owner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        runtime, wanted, prefill = self._runtime, self._wanted, self._prefill
        expected_s = runtime.restorer.cost.prefill_s(wanted.start, len(self._ids))
        ticket, cancelled = prefill.queue.ticket(expected_s), threading.Event()
        headers = [(b"content-type", b"application/octet-stream"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        sink = sink_for(scope, send, cancelled)
        try:
            store = runtime.store if wanted.store is not None else None
            shared = store if store is not None and identity(store) == wanted.store else None
            # Through a store of its own user's; else nobody shares KV with whoever has another
            # token, or is another one's owner there.
            owner = wanted.owner if shared is not None else _realm(self._owner, wanted.owner)
            namespace = runtime.namespace_of("lossless", wanted.owner)
            restorer = runtime.restorer_for("lossless", owner)
            work = PrefillWork(restorer, namespace, wanted, self._ids, sink, cancelled, shared)
            restorer.cost = runtime.restorer.cost  # the machine's, whoever asks
            await prefill.carry_out(work, ticket, cancelled, receive)
            runtime.restorer.cost = restorer.cost
        finally:
            prefill.queue.leave(ticket)
            sink.close()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def refused(status: int, message: str) -> Response:
    """Why a request is not answered, in the form of all errors here."""
    return JSONResponse({"error": {"message": message}}, status)


def _no_nixl() -> str | None:
    """Why nothing can be sent by nixl, None where it can."""
    from chatkv.apart.over_nixl import agent

    try:
        agent()
    except UsageError as error:
        return str(error)
    return None


def _offered(runtime: Runtime) -> Offered:
    rates = {name: value for name, value in asdict(runtime.restorer.cost).items() if name in _RATES}
    model, context = runtime.model, runtime.engine.max_tokens
    store = identity(runtime.store) if runtime.store is not None else None
    return Offered(runtime.prepared.name, model, context, Rates(**rates), store)


_RATES = Rates.__struct_fields__


def _realm(token_owner: str, owner: str) -> str:
    """Whose KV in memory a request may meet: those of the same token and the same owner."""
    if not token_owner and not owner:
        return ""
    return hashlib.sha256(f"{token_owner}/{owner}".encode()).hexdigest()


async def _when_left(receive: Receive, cancelled: threading.Event) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    cancelled.set()
