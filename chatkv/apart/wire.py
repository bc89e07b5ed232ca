"""What a decode worker asks of a prefill worker, and the frames in which KV comes back.

A request is JSON (`Request`) and the ids of all tokens up to the last one whose KV is wanted:

    "ckvq"   length of the JSON, u32   JSON   token ids, u32 each

The answer is a stream of frames, numbered from 0, each a head of 88 bytes and its payload:

    "ckvf"  kind u8  codec u8  group u16  number u32  start u32  tokens u32  bytes u32
    key [32]   digest of the payload [16]   digest of all the bytes above [16]

A VALUE is one value of one block as the store cuts them (layout.py): layers of `group`, tokens from
`start` on, which is a multiple of a block; the last block may hold fewer. `key` is the block's in
the store (keys.py), a hash over the model and every token up to it, so equal keys are equal tokens.
The payload is in the store's codec of that number; only `raw` is sent, the bits without a head.
STORED is a block that lies in the store which both workers have open, to be read there. HEAD comes
first and END last, ERROR instead of END; ALIVE says that there is nothing to say yet. Numbers are
little-endian. Digests are xxh3-128, which find damage; who may change bytes on their way on purpose
is kept off by TLS, not by them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

import msgspec
import xxhash

from chatkv_store.header import DIGEST_BYTES, digest
from chatkv_store.keys import ID_BYTES, KEY_BYTES, pack_ids, unpack_ids

VERSION: Final = 1
RAW: Final = 0  # the store's number of that codec
# No value of any layout is larger, so nobody makes us take more memory than that.
MAX_PAYLOAD_BYTES: Final = 64 << 20
MAX_TEXT_BYTES: Final = 64 << 10

_REQUEST = struct.Struct("<4sI")
_HEAD = struct.Struct(f"<4sBBHIIII{KEY_BYTES}s{DIGEST_BYTES}s")
HEAD_BYTES: Final = _HEAD.size + DIGEST_BYTES
_NO_KEY: Final = bytes(KEY_BYTES)
_NO_DIGEST: Final = digest(b"")

ReadInto = Callable[[memoryview], None]


class Kind(IntEnum):
    """What a frame is."""

    HEAD = 1
    VALUE = 2
    STORED = 3
    ALIVE = 4
    END = 5
    ERROR = 6


class WireDamaged(ValueError):
    """Bytes that are no sound request or frame, or not the one whose turn it is."""


class Model(msgspec.Struct, frozen=True):
    """What KV depends on beside its tokens: digests in hex, and the layout's JSON."""

    weights: str
    config: str
    layout: str

    def difference(self, other: Model) -> str | None:
        """In words what sets the two apart, None where nothing does."""
        for name, words in (
            ("weights", "other weights"),
            ("config", "another configuration"),
            ("layout", "another KV layout or dtype"),
        ):
            if getattr(self, name) != getattr(other, name):
                return words
        return None


class Request(msgspec.Struct, frozen=True):
    """`start`: tokens before it the decode worker has. `name`: by which the prefill worker finds
    what it still has of this conversation, unknown to others. `owner`: whose it is, since KV of two
    owners never meets. `store`: the decode worker's open store (`same_store`), None: send all."""

    model: Model
    start: int
    name: str
    owner: str = ""
    store: str | None = None
    version: int = VERSION


class Head(msgspec.Struct, frozen=True):
    """The first frame: `cached` leading tokens need not be computed any more."""

    cached: int


class End(msgspec.Struct, frozen=True):
    """The last frame: what it took, in seconds, and how many tokens were computed. store_s: of
    that, putting blocks into the shared store."""

    queue_s: float
    prefill_s: float
    computed: int
    store_s: float = 0.0


def pack_request(request: Request, ids: Sequence[int]) -> bytes:
    text = msgspec.json.encode(request)
    return _REQUEST.pack(b"ckvq", len(text)) + text + pack_ids(ids)


def unpack_request(body: bytes) -> tuple[Request, list[int]]:
    """Raises WireDamaged."""
    if len(body) < _REQUEST.size or not body.startswith(b"ckvq"):
        raise WireDamaged("this is no request for KV")
    _, length = _REQUEST.unpack_from(body)
    ids = body[_REQUEST.size + length :]
    try:
        request = msgspec.json.decode(body[_REQUEST.size : _REQUEST.size + length], type=Request)
    except msgspec.MsgspecError as error:
        raise WireDamaged(f"the request cannot be read: {error}") from None
    if request.version != VERSION:
        raise WireDamaged(f"the request is of version {request.version}, not {VERSION}")
    if len(ids) % ID_BYTES or not ids:
        raise WireDamaged("the request's token ids are cut short")
    if not 0 <= request.start < len(ids) // ID_BYTES:
        raise WireDamaged(f"no token lies behind token {request.start}")
    return request, list(unpack_ids(ids))


def digest_of(parts: Sequence[memoryview]) -> bytes:
    """The digest of a payload that lies in several places."""
    whole = xxhash.xxh3_128()
    for part in parts:
        whole.update(part)
    return bytes(whole.digest())


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame's head; see above."""

    kind: Kind
    number: int
    group: int = 0
    start: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    key: bytes = _NO_KEY
    digest: bytes = _NO_DIGEST
    codec: int = RAW

    def pack(self) -> bytes:
        packed = _HEAD.pack(
            b"ckvf",
            self.kind,
            self.codec,
            self.group,
            self.number,
            self.start,
            self.num_tokens,
            self.num_bytes,
            self.key,
            self.digest,
        )
        return packed + digest(packed)

    def with_payload(self, payload: bytes) -> Frame:
        return replace(self, num_bytes=len(payload), digest=digest(payload))


def unpack_frame(packed: bytes | memoryview, number: int) -> Frame:
    """The head of frame `number`. Raises WireDamaged."""
    packed = bytes(packed)
    if digest(packed[: _HEAD.size]) != packed[_HEAD.size :]:
        raise WireDamaged(f"frame {number} is damaged: its head's digest differs")
    magic, kind, codec, group, found, start, tokens, num_bytes, key, checked = _HEAD.unpack_from(
        packed
    )
    if magic != b"ckvf" or kind not in Kind.__members__.values():
        raise WireDamaged(f"frame {number} is none that this version knows")
    if found != number:
        raise WireDamaged(f"frame {found} came where frame {number} was due")
    most = MAX_PAYLOAD_BYTES if kind == Kind.VALUE else MAX_TEXT_BYTES
    if num_bytes > most:
        raise WireDamaged(f"frame {number} claims {num_bytes} bytes")
    return Frame(Kind(kind), number, group, start, tokens, num_bytes, key, checked, codec)


class FrameReader:
    """Takes frames one by one from `read_into`, which fills a buffer or raises.

    A payload is valid until the next frame is read, and has been checked against its digest.
    """

    def __init__(self, read_into: ReadInto) -> None:
        self._read_into = read_into
        self._head = memoryview(bytearray(HEAD_BYTES))
        self._payload = bytearray()
        self._number = 0

    def head(self) -> Frame:
        """The next frame's head."""
        self._read_into(self._head)
        frame = unpack_frame(self._head, self._number)
        self._number += 1
        return frame

    def payload(self, frame: Frame) -> memoryview:
        """The payload behind that head. Raises WireDamaged."""
        if len(self._payload) < frame.num_bytes:
            self._payload = bytearray(frame.num_bytes)
        payload = memoryview(self._payload)[: frame.num_bytes]
        if frame.num_bytes:
            self._read_into(payload)
        if digest(payload) != frame.digest:
            raise WireDamaged(f"frame {frame.number} is damaged: its payload's digest differs")
        return payload
