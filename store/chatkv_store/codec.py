"""How one value's KV becomes bytes and comes back, on the CPU.

A payload starts with four bytes: format version, codec id, bytes per element, zero.

raw         the bits as they are.

lossless    The high byte of a 16-bit element (sign and most of the exponent) repeats a lot, the low
            byte is noise. High bytes are compressed, low bytes are kept. float32 adds a plane of
            its lower 16 bits, kept.

            Interleaving bytes with numpy is slow (a strided copy moves one byte at a time), so
            bytes are stored in pairs that five whole-word operations take apart: word i of a plane
            stands for element i of the first half of a head's slab [tokens * head_dim] and element
            i of its second half.

                high = high byte of first | high byte of second << 8
                low  = low byte of first  | (low byte of second ^ high byte of first) << 8

                first  = (high << 8) | (low & 0xff)
                second = high ^ (low >> 8)

            The high plane is one zstd frame with a block border between K and V, whose exponents
            differ, so that each has its own Huffman code. There are next to no matches: on KV of
            SmolLM2 any search for them made the frame larger and half as fast to decode. The sign
            stays in the high byte though it is noise there: moving it would gain 0.7% of the
            bytes and cost three more passes.

Planes are ordered [2 (K, V), layers, heads, slab].

The others: `packed` in codec_packed.py; `int8`, `fp8` and `int4` in codec_quantised.py.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import zstandard

from chatkv_store.codec_packed import Packed
from chatkv_store.codec_quantised import FP8, INT4, INT8
from chatkv_store.payloads import FORMAT_VERSION, HEAD, Bytes, check_head, per_block
from chatkv_store.payloads import Bits as Bits
from chatkv_store.payloads import Codec as Codec
from chatkv_store.payloads import Context as Context
from chatkv_store.payloads import PayloadDamaged as PayloadDamaged
from chatkv_store.payloads import Payloads as Payloads

KEPT: Final = "kept"


class Raw:
    """The bits as they are."""

    id = 0
    name = "raw"
    family = "lossless"

    def encode(self, bits: Bits, context: Context | None = None) -> bytes:
        return _head(self, bits.itemsize) + np.ascontiguousarray(bits).tobytes()

    def decode(self, payloads: Payloads, out: Bits) -> None:
        value_bytes = out.nbytes // len(payloads)
        for index, payload in enumerate(payloads):
            check_head(payloads, index, _head(self, out.itemsize))
            if payload.size != HEAD.size + value_bytes:
                raise PayloadDamaged(index, f"{payload.size} bytes do not fill the block")
        for block, payload in zip(per_block(out, len(payloads)), payloads, strict=True):
            np.copyto(block, payload[HEAD.size :].view(out.dtype).reshape(block.shape))


class Lossless:
    """Exponents through a Huffman code, everything else as it is."""

    id = 1
    name = "lossless"
    family = "lossless"

    def encode(self, bits: Bits, context: Context | None = None) -> bytes:
        words, rest = _split_float32(bits) if bits.itemsize == 4 else (bits, b"")
        first, second = (half[0] for half in _halves(np.ascontiguousarray(words), 1))
        high = np.ascontiguousarray((first >> 8) | (second & 0xFF00))
        low = np.ascontiguousarray((first & 0xFF) | ((second << 8) ^ (first & 0xFF00)))
        frame = _compress(high[0].data, high[1].data)
        return b"".join((_head(self, bits.itemsize), low.tobytes(), rest, frame))

    def decode(self, payloads: Payloads, out: Bits) -> None:
        num_elements = out.size // len(payloads)  # of one value
        rest_at = HEAD.size + num_elements
        frame_at = rest_at + (2 * num_elements if out.itemsize == 4 else 0)
        high = _thread.words("high", out.size // 2).reshape(len(payloads), -1)
        for index in range(len(payloads)):
            check_head(payloads, index, _head(self, out.itemsize))
            _decompress(payloads, index, frame_at, high[index].view(np.uint8))
        if out.itemsize == 2 and _slabs_are_whole(out):
            _join_planes(high, payloads, out)
            return
        words = _thread.words("joined", out.size).reshape(out.shape)
        _join_planes(high, payloads, words)
        if out.itemsize == 2:
            np.copyto(out, words)
            return
        np.left_shift(words, 16, out=out, dtype=out.dtype)
        for block, payload in zip(per_block(out, len(payloads)), payloads, strict=True):
            block |= payload[rest_at:frame_at].view("<u2").reshape(block.shape)


class Kept(Lossless):
    """`lossless`, for KV that has been through a lossy codec once and must not be again.

    Where a session forks, or a damaged block is computed anew, the front of a new block comes from
    an older, quantised one. Its id is how later processes know.
    """

    id = 6
    name = KEPT


def _halves(words: Bits, num_blocks: int) -> tuple[Bits, Bits]:
    """The first and second half of every head's slab: views [blocks, 2, layers, heads, half]."""
    layers, _, heads, tokens, head_dim = words.shape
    half = tokens // num_blocks * head_dim // 2
    slabs = words.reshape(layers, 2, heads, num_blocks, 2, half).transpose(4, 3, 1, 0, 2, 5)
    return slabs[0], slabs[1]


def _join_planes(high: Bits, payloads: Payloads, out: Bits) -> None:
    """Undo the pairing; `high`, [blocks, words], is used up.

    A run of blocks in few numpy calls, since each has to get the interpreter lock back.
    """
    low_of_first = _thread.words("first", high.size).reshape(high.shape)
    low_of_second = _thread.words("second", high.size).reshape(high.shape)
    for index, payload in enumerate(payloads):
        low = payload[HEAD.size : HEAD.size + high[index].nbytes].view("<u2")
        np.bitwise_and(low, 0xFF, out=low_of_first[index])
        np.right_shift(low, 8, out=low_of_second[index])
    first, second = _halves(out, len(payloads))
    high = high.reshape(first.shape)
    np.bitwise_xor(high, low_of_second.reshape(first.shape), out=second)
    np.multiply(high, 256, out=high)  # numpy shifts left at half of this speed
    np.bitwise_or(high, low_of_first.reshape(first.shape), out=first)


def _slabs_are_whole(out: Bits) -> bool:
    """Whether the tokens of a head lie one after another, as `_halves` needs to make views."""
    return out.strides[4] == out.itemsize and out.strides[3] == out.itemsize * out.shape[4]


def _split_float32(bits: Bits) -> tuple[Bits, bytes]:
    """The upper halves (a bfloat16 each), and the lower halves as bytes."""
    return (bits >> 16).astype("<u2"), bits.astype("<u2").tobytes()


def _head(codec: Codec, itemsize: int) -> bytes:
    return HEAD.pack(FORMAT_VERSION, codec.id, itemsize, 0)


def _compress(*blocks: memoryview) -> bytes:
    """One zstd frame with a block border after each of `blocks`."""
    compressor = _thread.compressor().compressobj(size=sum(block.nbytes for block in blocks))
    parts: list[bytes] = []
    for block in blocks:
        parts += compressor.compress(block), compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    return b"".join((*parts, compressor.flush(zstandard.COMPRESSOBJ_FLUSH_FINISH)))


def _decompress(payloads: Payloads, index: int, at: int, out: Bytes) -> None:
    """Exactly `out.nbytes` bytes from the zstd frame at byte `at`, with no array in between."""
    frame = payloads[index][at:]
    try:
        read = _thread.decompressor.stream_reader(frame.data).readinto(out) if frame.size else 0
    except zstandard.ZstdError as error:
        raise PayloadDamaged(index, f"zstd: {error}") from None
    if read != out.nbytes:
        raise PayloadDamaged(index, f"its zstd frame holds {read} bytes, not {out.nbytes}")


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
_CODECS: tuple[Codec, ...] = (Raw(), Lossless(), Packed(), INT8, FP8, INT4, Kept())


def by_name(name: str) -> Codec:
    for codec in _CODECS:
        if codec.name == name:
            return codec
    raise ValueError(f"no codec {name!r}; known: {', '.join(codec.name for codec in _CODECS)}")


def for_block(name: str, is_full: bool) -> Codec:
    """The codec for one block where `name` is wished. Tokens of a block that still grows are
    quantised when it is full, all at once and from their originals; until then they stay whole."""
    wished = by_name(name)
    return wished if is_full or not is_lossy(wished) else by_name("lossless")


def is_lossy(coder: Codec) -> bool:
    return coder.family != "lossless"


def is_quantised(number: int) -> bool:
    """Whether a block of this codec holds KV that has been through a lossy one."""
    coder = by_id(number)
    return coder is not None and (is_lossy(coder) or coder.name == KEPT)


def by_id(number: int) -> Codec | None:
    """The codec of a stored block; None for one that a newer version brought."""
    return next((codec for codec in _CODECS if codec.id == number), None)


def staged(payloads: Sequence[bytes]) -> Payloads:
    """Payloads of equally long neighbouring blocks, as `Codec.decode` takes them."""
    return [np.frombuffer(payload, np.uint8) for payload in payloads]
