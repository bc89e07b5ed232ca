"""How one value's KV becomes bytes and comes back, on the CPU.

A payload starts with four bytes: format version, codec id, bytes per element, zero.

raw         the bits as they are.

lossless    16-bit elements are rotated left by one bit, which moves the sign behind the mantissa:
            the high byte of a bfloat16 is then its exponent, the low byte is noise. High bytes are
            compressed, low bytes are kept. float32 adds a plane of its lower 16 bits, kept.

            Interleaving bytes with numpy is slow (a strided copy moves one byte at a time), so
            bytes are stored in pairs that whole-word operations can take apart: word i of a plane
            holds element i of the first half of a head's slab [tokens * head_dim] in one byte and
            element i of its second half in the other.

                low plane    u16 = low byte of first  | low byte of second << 8
                high plane   u16 = high byte of first | high byte of second << 8

            K and V differ in their exponents and get a zstd frame each. The frames are Huffman
            codes with next to no matches: on KV of SmolLM2 any search for matches made them both
            larger (1.43x at level 1, 1.48x without) and half as fast to decode.

Planes are ordered [2 (K, V), layers, heads, slab].
"""

from __future__ import annotations

import struct
import threading
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import zstandard

FORMAT_VERSION: Final = 1

Bits = npt.NDArray[Any]  # uint16 or uint32, [layers, 2, heads, tokens, head_dim]
Bytes = npt.NDArray[np.uint8]

_HEAD = struct.Struct("<BBBx")
_FRAMES = struct.Struct("<II")  # bytes of the K frame and of the V frame
_PLANES_AT = 16  # a multiple of 4, so that planes can be read in place


class PayloadDamaged(ValueError):
    """The payload does not decode to the shape that was asked for."""


class Codec(Protocol):
    """Turns the bits of one value into bytes and back. Safe to use from several threads."""

    id: int
    name: str

    def encode(self, bits: Bits) -> bytes:
        """The payload of `bits`, [layers, 2, heads, tokens, head_dim], any strides."""

    def decode(self, payload: Bytes, out: Bits) -> None:
        """Write the whole value into `out`, any strides; raises PayloadDamaged."""


class Raw:
    """The bits as they are."""

    id = 0
    name = "raw"

    def encode(self, bits: Bits) -> bytes:
        return _head(self, bits.itemsize) + np.ascontiguousarray(bits).tobytes()

    def decode(self, payload: Bytes, out: Bits) -> None:
        _check_head(self, payload, out)
        if payload.nbytes != _HEAD.size + out.nbytes:
            raise PayloadDamaged(f"{payload.nbytes} bytes do not fill {out.shape}")
        np.copyto(out, payload[_HEAD.size :].view(out.dtype).reshape(out.shape))


class Lossless:
    """Exponents through a Huffman code, everything else as it is."""

    id = 1
    name = "lossless"

    def encode(self, bits: Bits) -> bytes:
        words, rest = _split_float32(bits) if bits.itemsize == 4 else (bits, b"")
        rotated = (words << 1) | (words >> 15)
        first, second = _halves(rotated)
        low = np.ascontiguousarray((first & 0xFF) | (second << 8))
        high = np.ascontiguousarray((first >> 8) | (second & 0xFF00))
        compressor = _thread.compressor()
        frames = [compressor.compress(plane.data) for plane in high]
        head = _head(self, bits.itemsize) + _FRAMES.pack(*map(len, frames))
        return b"".join((head.ljust(_PLANES_AT, b"\0"), low.tobytes(), rest, *frames))

    def decode(self, payload: Bytes, out: Bits) -> None:
        _check_head(self, payload, out)
        layers, _, heads, tokens, head_dim = out.shape
        shape = (2, layers, heads, tokens * head_dim // 2)
        num_words = out.size // 2
        rest_bytes = 2 * out.size if out.itemsize == 4 else 0
        frames_at = _PLANES_AT + 2 * num_words + rest_bytes
        sizes = (
            _FRAMES.unpack_from(payload.data, _HEAD.size) if payload.nbytes >= frames_at else (0, 0)
        )
        if payload.nbytes != frames_at + sum(sizes) or not all(sizes):
            raise PayloadDamaged(f"{payload.nbytes} bytes do not fill {out.shape}")
        high = _thread.words("high", num_words)
        frames = payload[frames_at : frames_at + sizes[0]], payload[frames_at + sizes[0] :]
        for frame, plane in zip(frames, high.reshape(2, -1), strict=True):
            _decompress(frame, plane.view(np.uint8))
        low = payload[_PLANES_AT : _PLANES_AT + 2 * num_words].view("<u2")
        if out.itemsize == 2 and _slabs_are_whole(out):
            _join_planes(low.reshape(shape), high.reshape(shape), out)
            return
        words = _thread.words("joined", out.size).reshape(out.shape)
        _join_planes(low.reshape(shape), high.reshape(shape), words)
        if out.itemsize == 2:
            np.copyto(out, words)
            return
        np.left_shift(words, 16, out=out, dtype=out.dtype)
        out |= payload[frames_at - rest_bytes : frames_at].view("<u2").reshape(out.shape)


def _halves(words: Bits) -> tuple[Bits, Bits]:
    """The first and second half of every head's slab: two views [2, layers, heads, half]."""
    layers, _, heads, tokens, head_dim = words.shape
    slabs = words.reshape(layers, 2, heads, 2, tokens * head_dim // 2).transpose(1, 3, 0, 2, 4)
    return slabs[:, 0], slabs[:, 1]


def _join_planes(low: Bits, high: Bits, out: Bits) -> None:
    """Undo the pairing and the rotation. The steps are chosen so that all stay in the L2 cache."""
    first, second = _halves(out)
    word = _thread.words("word", low.size).reshape(low.shape)
    part = _thread.words("part", low.size).reshape(low.shape)
    np.left_shift(high, 8, out=word)
    np.bitwise_and(low, 0xFF, out=part)
    _rotate_right(word, part, first)
    np.bitwise_and(high, 0xFF00, out=word)
    np.right_shift(low, 8, out=part)
    _rotate_right(word, part, second)


def _rotate_right(high: Bits, low: Bits, out: Bits) -> None:
    """out = (high | low) rotated right by one bit; `high` and `low` are scratch."""
    np.bitwise_or(high, low, out=high)
    np.left_shift(high, 15, out=low)
    np.right_shift(high, 1, out=high)
    np.bitwise_or(high, low, out=out)


def _slabs_are_whole(out: Bits) -> bool:
    """Whether the tokens of a head lie one after another, as `_halves` needs to make views."""
    return out.strides[4] == out.itemsize and out.strides[3] == out.itemsize * out.shape[4]


def _split_float32(bits: Bits) -> tuple[Bits, bytes]:
    """The upper halves (a bfloat16 each), and the lower halves as bytes."""
    return (bits >> 16).astype("<u2"), bits.astype("<u2").tobytes()


def _head(codec: Codec, itemsize: int) -> bytes:
    return _HEAD.pack(FORMAT_VERSION, codec.id, itemsize)


def _check_head(codec: Codec, payload: Bytes, out: Bits) -> None:
    wanted = _head(codec, out.itemsize)
    if payload[: _HEAD.size].tobytes() != wanted:
        raise PayloadDamaged(
            f"payload starts with {payload[:4].tobytes().hex()}, not {wanted.hex()}"
        )


def _decompress(frame: Bytes, out: Bytes) -> None:
    """Exactly `out.nbytes` bytes from one zstd frame, without an array in between."""
    try:
        read = _thread.decompressor.stream_reader(frame.data).readinto(out)
    except zstandard.ZstdError as error:
        raise PayloadDamaged(f"zstd: {error}") from None
    if read != out.nbytes:
        raise PayloadDamaged(f"zstd frame holds {read} bytes, not {out.nbytes}")


class _PerThread(threading.local):
    """Contexts and scratch memory that one thread reuses: fresh pages cost more than the work."""

    def __init__(self) -> None:
        self.decompressor = zstandard.ZstdDecompressor()
        self._compressor: zstandard.ZstdCompressor | None = None
        self._scratch: dict[str, npt.NDArray[Any]] = {}

    def compressor(self) -> zstandard.ZstdCompressor:
        if self._compressor is None:
            self._compressor = zstandard.ZstdCompressor(compression_params=_HUFFMAN_ONLY)
        return self._compressor

    def words(self, name: str, count: int) -> npt.NDArray[np.uint16]:
        """`count` uint16 of scratch; the contents are whatever was there."""
        held = self._scratch.get(name)
        if held is None or held.size < count:
            held = self._scratch[name] = np.empty(count, np.uint16)
        return held[:count]

    def bytes(self, name: str, count: int) -> Bytes:
        """`count` bytes of scratch, aligned for 16-bit words."""
        return self.words(name, (count + 1) // 2).view(np.uint8)[:count]


# The fast strategy looks for matches through a table; with 64 entries it finds next to none, and
# gives up looking. (Level -1 and below would find few too, but also turn the Huffman code off.)
_HUFFMAN_ONLY = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    window_log=18,
    hash_log=6,
    chain_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
    write_content_size=True,
)

_thread = _PerThread()
_CODECS: tuple[Codec, ...] = (Raw(), Lossless())


def by_name(name: str) -> Codec:
    for codec in _CODECS:
        if codec.name == name:
            return codec
    raise ValueError(f"no codec {name!r}; known: {', '.join(codec.name for codec in _CODECS)}")


def by_id(number: int) -> Codec:
    for codec in _CODECS:
        if codec.id == number:
            return codec
    raise PayloadDamaged(f"codec {number} is unknown to this version")


def thread_scratch(name: str, num_bytes: int) -> Bytes:
    """Scratch memory of the calling thread, for callers that stage a payload."""
    return _thread.bytes(name, num_bytes)
