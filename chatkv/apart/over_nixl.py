"""Frames by nixl, for fabrics that write memory from afar: the prefill worker writes them into
memory of the decode worker, over what UCX finds between the two (InfiniBand, shared memory, TCP).

Everything else stays with HTTP: the state, the request with its token, and the response, which
lasts as long as the stream does, so that either end notices when the other is gone. The request
names a ring of memory; the worker writes the stream's bytes into it, one after the other, and tells
of each write by a notification; what has been read out of it is told back, and may be written over.
Bytes go from the ring into the buffer that the caller gives, and are verified there, as any
transport's are.

UCX neither asks for a token nor encrypts: it belongs on a network that nobody else is on. Needs the
extra `nixl`.
"""

from __future__ import annotations

import base64
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec
import numpy as np

from chatkv.apart.over_http import LANDING_HEADER, HttpStream, HttpTransport
from chatkv.apart.transport import RemoteGone, RemoteRefused, State
from chatkv.errors import UsageError

RING_BYTES = 8 << 20
SEND_BYTES = 1 << 20  # that one write takes at most
_POLL_S, _LAST_S = 50e-6, 0.5
_MEMORY = "DRAM"


class Landing(msgspec.Struct, frozen=True):
    """Where a stream is to be written: the ring's address and size, and whose memory that is."""

    stream: str
    agent: str  # nixl's metadata, in base64
    address: int
    num_bytes: int


class Agent:
    """nixl's agent of this process. Any thread may use it."""

    def __init__(self) -> None:
        try:
            from nixl_cu12._api import nixl_agent, nixl_agent_config
        except ImportError:
            raise UsageError("nixl is not installed: pip install 'chatkv[nixl]'") from None
        self._agent = nixl_agent(secrets.token_hex(8), nixl_agent_config(backends=["UCX"]))
        self._lock = threading.Lock()
        self._heard: dict[str, list[str]] = defaultdict(list)  # by stream
        self._free: list[Memory] = []

    @property
    def metadata(self) -> bytes:
        """By which others reach it, and the memory that it has registered."""
        with self._lock:
            return bytes(self._agent.get_agent_metadata())

    def meet(self, metadata: bytes) -> str:
        """Another agent's name, from its metadata."""
        with self._lock:
            name: Any = self._agent.add_remote_agent(metadata)  # bytes, whatever it declares
            return name.decode() if isinstance(name, bytes) else str(name)

    def tell(self, other: str, stream: str, text: str) -> None:
        with self._lock:
            self._agent.send_notif(other, f"{stream}:{text}".encode())

    def heard(self, stream: str) -> list[str]:
        """What the other end of a stream has told since the last time."""
        with self._lock:
            for texts in self._agent.get_new_notifs().values():
                for text in texts:
                    name, _, rest = text.decode().partition(":")
                    self._heard[name].append(rest)
            return self._heard.pop(stream, [])

    def write(self, mine: int, num_bytes: int, other: str, address: int, told: str) -> Any:
        """Begin to write from one of our addresses to another's; `told` arrives behind the bytes.
        For `is_written`."""
        with self._lock:
            source = self._agent.get_xfer_descs([(mine, num_bytes, 0)], _MEMORY)
            target = self._agent.get_xfer_descs([(address, num_bytes, 0)], _MEMORY)
            handle = self._agent.initialize_xfer("WRITE", source, target, other, told.encode())
            self._agent.transfer(handle)
            return handle

    def is_written(self, handle: Any) -> bool:
        """Raises OSError where it never will be."""
        with self._lock:
            state = self._agent.check_xfer_state(handle)
            if state == "PROC":
                return False
            handle.release()
        if state != "DONE":
            raise BrokenPipeError(f"nixl: {state}")
        return True

    def memory(self, num_bytes: int) -> Memory:
        """Registered memory of at least that size."""
        with self._lock:
            for one in self._free:
                if len(one.bytes) >= num_bytes:
                    self._free.remove(one)
                    return one
            return Memory(self._agent, num_bytes)

    def give_back(self, memory: Memory) -> None:
        """For the next one. Memory into which somebody may still be writing is never given back:
        it is kept, and nobody's."""
        with self._lock:
            self._free.append(memory)


class Memory:
    """Registered as long as the process lasts."""

    def __init__(self, agent: Any, num_bytes: int) -> None:
        self.bytes = np.zeros(num_bytes, np.uint8)
        self.address = self.bytes.ctypes.data
        self._registered = agent.register_memory([(self.address, num_bytes, 0, "")], _MEMORY)


_lock = threading.Lock()
_agents: list[Agent] = []


def agent() -> Agent:
    """The process's own, made when it is first needed. Raises UsageError without nixl."""
    with _lock:
        if not _agents:
            _agents.append(Agent())
        return _agents[0]


class NixlTransport:
    """A prefill worker that is asked over HTTP and answers by nixl."""

    def __init__(self, http: HttpTransport) -> None:
        self._http = http
        agent()

    @property
    def name(self) -> str:
        return self._http.name

    def state(self, timeout_s: float) -> State:
        return self._http.state(timeout_s)

    def sample(self, num_bytes: int, timeout_s: float) -> float:
        return self._http.sample(num_bytes, timeout_s)

    def ask(self, request: bytes, timeout_s: float) -> NixlStream:
        ring, stream = agent().memory(RING_BYTES), secrets.token_hex(8)
        mine = base64.b64encode(agent().metadata).decode()
        landing = Landing(stream, mine, ring.address, len(ring.bytes))
        headers = {LANDING_HEADER: msgspec.json.encode(landing).decode()}
        try:
            answer = self._http.ask(request, timeout_s, headers)
        except RemoteRefused:
            agent().give_back(ring)  # nobody writes into it
            raise
        try:
            return NixlStream(answer, ring, stream, timeout_s)
        except BaseException:
            answer.close()
            raise


class NixlStream:
    """One answer. silent_s: after so long without a byte the worker is gone."""

    def __init__(self, answer: HttpStream, ring: Memory, stream: str, silent_s: float) -> None:
        self._answer, self._ring, self._stream, self._silent_s = answer, ring, stream, silent_s
        size = memoryview(bytearray(4))
        answer.read_into(size)
        theirs = memoryview(bytearray(int.from_bytes(size, "little")))
        answer.read_into(theirs)
        self._worker = agent().meet(bytes(theirs))
        self._written = self._read = self._told = 0
        self._is_stopped = False

    def read_into(self, buffer: memoryview) -> None:
        done, size = 0, len(self._ring.bytes)
        while done < len(buffer):
            if self._read == self._written:
                self._wait()
            at = self._read % size
            count = min(len(buffer) - done, self._written - self._read, size - at)
            buffer[done : done + count] = self._ring.bytes[at : at + count].data
            done, self._read = done + count, self._read + count
            if self._read - self._told >= size // 4:
                agent().tell(self._worker, self._stream, str(self._read))
                self._told = self._read

    def _wait(self) -> None:
        """Until more has come. Raises RemoteGone."""
        deadline, has_ended = time.monotonic() + self._silent_s, False
        while True:
            for text in agent().heard(self._stream):
                self._written = max(self._written, int(text))
            if self._written > self._read:
                return
            if self._is_stopped:
                raise RemoteGone("ended before it was done")
            if not has_ended and self._answer.has_ended():
                has_ended = True  # what was told last may still be on its way
                deadline = min(deadline, time.monotonic() + _LAST_S)
            if time.monotonic() > deadline:
                raise RemoteGone(
                    "ended before it was done" if has_ended else "does not answer in time"
                )
            time.sleep(_POLL_S)

    def stop(self) -> None:
        self._is_stopped = True
        self._answer.stop()

    def close(self) -> None:
        if self._answer.has_ended() and self._read == self._written:
            agent().give_back(self._ring)
        self._answer.close()


class Plain(Protocol):
    """The response's own body."""

    def send(self, parts: Sequence[memoryview | bytes]) -> None: ...

    def close(self) -> None: ...


class NixlSink:
    """Frames written into a decode worker's ring. is_over() is asked while that is full."""

    def __init__(
        self, landing: Landing, body: Plain, is_over: Callable[[], bool], unread_s: float
    ) -> None:
        self._landing, self._body, self._is_over, self._unread_s = landing, body, is_over, unread_s
        self._other = agent().meet(base64.b64decode(landing.agent))
        self._memory = agent().memory(SEND_BYTES)
        mine = agent().metadata
        body.send([len(mine).to_bytes(4, "little"), mine])
        self._written = self._read = 0

    def send(self, parts: Sequence[memoryview | bytes]) -> None:
        """Raises OSError where nobody reads any more."""
        filled = 0
        for part in parts:
            left = memoryview(part)
            while len(left):
                room = min(len(left), SEND_BYTES - filled)
                self._memory.bytes[filled : filled + room] = np.frombuffer(left[:room], np.uint8)
                left, filled = left[room:], filled + room
                if filled == SEND_BYTES:
                    self._write(filled)
                    filled = 0
        if filled:
            self._write(filled)

    def _write(self, num_bytes: int) -> None:
        """All that is in the send buffer, which may wrap around the ring's end."""
        landing, done = self._landing, 0
        while done < num_bytes:
            at = self._written % landing.num_bytes
            self._until(lambda: self._free() > 0)
            count = min(num_bytes - done, landing.num_bytes - at, self._free())
            told = f"{landing.stream}:{self._written + count}"
            mine, theirs = self._memory.address + done, landing.address + at
            handle = agent().write(mine, count, self._other, theirs, told)
            self._until(partial(agent().is_written, handle))
            done, self._written = done + count, self._written + count

    def _free(self) -> int:
        for text in agent().heard(self._landing.stream):
            self._read = max(self._read, int(text))
        return self._landing.num_bytes - (self._written - self._read)

    def _until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._unread_s
        while not is_so():
            if self._is_over() or time.monotonic() > deadline:
                raise BrokenPipeError
            time.sleep(_POLL_S)

    def close(self) -> None:
        agent().give_back(self._memory)
        self._body.close()
