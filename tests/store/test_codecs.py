"""`packed` and the quantised codecs: bits, bounds, damage, and bytes that may never change."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatkv_store import KVLayout, codec
from chatkv_store.payloads import DTYPES, Context
from kv_samples import Bits, kv_bits

LOSSY = ["int8", "fp8", "int4"]
CODECS = ["packed", *LOSSY]
# Of the range of a key channel or the largest of a value group: half a step, or for the one value
# of an int4 group that may not be reached, a whole one; e4m3 rounds by 1/16 at most.
BOUNDS = {"int8": (0.5 / 255, 0.5 / 127), "fp8": (1 / 16, 1 / 16), "int4": (0.5 / 15, 1 / 8)}


def frequencies(head_dim: int) -> npt.NDArray[np.float32]:
    return (10000.0 ** (-np.arange(0, head_dim, 2) / head_dim)).astype(np.float32)


def floats(bits: Bits, dtype: str) -> npt.NDArray[np.float64]:
    if dtype == "bfloat16":
        return (bits.astype("<u4") << 16).view(np.float32).astype(np.float64)
    return bits.view("<f2" if dtype == "float16" else "<f4").astype(np.float64)


def round_trip(name: str, bits: Bits, context: Context | None = None, num_blocks: int = 1) -> Bits:
    """Through the codec as `num_blocks` blocks, into memory that is not contiguous."""
    coder, out = codec.by_name(name), np.zeros((*bits.shape[:-1], bits.shape[-1] + 2), bits.dtype)
    payloads = []
    for index, part in enumerate(np.split(bits, num_blocks, axis=3)):
        start = context.start + index * part.shape[3] if context else 0
        here = context and Context(context.dtype, start, context.inverse_frequencies)
        payloads.append(coder.encode(part, here))
    coder.decode(codec.staged(payloads), out[..., :-2])
    assert not out[..., -2:].any(), "wrote outside its place"
    return np.ascontiguousarray(out[..., :-2])


# --- packed -----------------------------------------------------------------------------------


@given(
    dtype=st.sampled_from(DTYPES),
    layers=st.integers(1, 3),
    heads=st.integers(1, 3),
    tokens=st.integers(1, 20),
    half_dim=st.integers(1, 20),
    num_blocks=st.integers(1, 3),
    seed=st.integers(0, 99),
    noise=st.booleans(),
)
def test_packed_gives_every_bit_back(
    dtype: Any,
    layers: int,
    heads: int,
    tokens: int,
    half_dim: int,
    num_blocks: int,
    seed: int,
    noise: bool,
) -> None:
    layout = KVLayout(layers, heads, 2 * half_dim, dtype)
    bits = kv_bits(layout, tokens * num_blocks, seed)
    if noise:
        bits = np.random.default_rng(seed).integers(0, 1 << 8 * bits.itemsize, bits.shape)
        bits = bits.astype(layout.bits_dtype)
    np.testing.assert_array_equal(
        round_trip("packed", bits, Context(dtype), num_blocks=num_blocks), bits
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_gives_every_word_back(dtype: Any) -> None:
    """Infinities, NaN payloads, denormals, both zeros: all 16-bit words, most of them escapes."""
    words = np.arange(1 << 16, dtype="<u4" if dtype == "float32" else "<u2")
    if dtype == "float32":
        words = words * np.uint32(0x10001) ^ np.uint32(0xDEAD)
    bits = words.reshape(4, 2, 8, 16, 64)
    np.testing.assert_array_equal(round_trip("packed", bits, Context(dtype)), bits)
    # As if the other 16-bit format: it costs bytes, never bits.
    np.testing.assert_array_equal(round_trip("packed", bits), bits)


def test_packed_where_every_exponent_escapes_but_the_largest() -> None:
    exponents = np.array([254] + [7 * i for i in range(15)], "<u2").reshape(1, 1, 1, 16, 1)
    bits = np.ascontiguousarray(np.broadcast_to(exponents << 7, (2, 2, 1, 16, 4)))
    np.testing.assert_array_equal(round_trip("packed", bits), bits)
    payload = codec.by_name("packed").encode(bits)
    assert int.from_bytes(payload[4:8], "little") >= bits.size * 14 // 16


@pytest.mark.parametrize(("dtype", "bits_per_element"), [("bfloat16", 11), ("float16", 14)])
def test_packed_has_a_fixed_rate(dtype: Any, bits_per_element: int) -> None:
    layout = KVLayout(2, 3, 64, dtype)
    bits = np.full(layout.value_shape(0, 64), 0x3C12, layout.bits_dtype)
    size = len(codec.by_name("packed").encode(bits, Context(dtype)))
    slabs = 2 * 2 * 3
    head = 8 + slabs * 4 + slabs * 64
    assert size == head + bits.size * bits_per_element // 8


# --- quantised --------------------------------------------------------------------------------


@given(
    name=st.sampled_from(LOSSY),
    dtype=st.sampled_from(DTYPES),
    layers=st.integers(1, 2),
    heads=st.integers(1, 2),
    tokens=st.integers(1, 24),
    head_dim=st.sampled_from([2, 6, 24, 32, 64, 80]),
    num_blocks=st.integers(1, 3),
    start=st.sampled_from([0, 2, 3, 64, 100_000]),
    turned=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_error_is_bounded(
    name: str,
    dtype: Any,
    layers: int,
    heads: int,
    tokens: int,
    head_dim: int,
    num_blocks: int,
    start: int,
    turned: bool,
    seed: int,
) -> None:
    bits = kv_bits(KVLayout(layers, heads, head_dim, dtype), tokens * num_blocks, seed)
    context = Context(dtype, start, frequencies(head_dim) if turned else None)
    found = floats(round_trip(name, bits, context, num_blocks), dtype)
    wanted = floats(bits, dtype)
    whole = max(0, 4 - start)
    np.testing.assert_array_equal(found[:, :, :, :whole], wanted[:, :, :, :whole])

    of_keys, of_values = BOUNDS[name]
    rounding = 2.0**-8 if dtype == "bfloat16" else 2.0**-10  # of the dtype and of f16 scales
    size = np.abs(wanted).max()
    for index in range(num_blocks):
        # The block's own range, as an upper bound for that of any channel of it before rotation.
        tokens_of_block = np.s_[index * tokens : (index + 1) * tokens]
        keys = wanted[:, 0, :, tokens_of_block]
        errors = np.abs(found[:, 0, :, tokens_of_block] - keys)
        if not turned:  # then it holds for each channel by itself
            largest, of = np.abs(keys).max(2), np.ptp(keys, axis=2)
            limit = (largest if name == "fp8" else of) * of_keys * 1.01 + 8 * rounding * largest
            assert (errors.max(2) <= limit + 1e-6 * size).all()
        error = errors.max()
        longest = np.sqrt(2) * np.abs(keys).max() if turned else np.abs(keys).max()
        spread = longest if name == "fp8" else 2 * longest
        assert error <= (np.sqrt(2) if turned else 1) * (
            spread * of_keys * 1.01 + 8 * rounding * longest
        )
    for first in range(0, head_dim, 32):
        values = wanted[:, 1, ..., first : first + 32]
        error = np.abs(found[:, 1, ..., first : first + 32] - values).max(-1)
        largest = np.abs(values).max(-1)
        assert (error <= largest * (of_values + 2 * rounding) + 1e-6 * size).all()


@pytest.mark.parametrize("name", LOSSY)
def test_keys_are_turned_back_before_they_are_quantised(name: str) -> None:
    """Keys that are constant before the rotation: nothing is lost but rounding, and everything
    would be if they were quantised as they are."""
    head_dim, tokens, start = 64, 64, 5000
    inverse = frequencies(head_dim)
    plain = np.random.default_rng(0).standard_normal(head_dim) * 4
    angles = np.float64(np.arange(start, start + tokens, dtype=np.float32)[:, None] * inverse)
    first, second = plain[: head_dim // 2], plain[head_dim // 2 :]
    cos, sin = np.cos(angles), np.sin(angles)
    keys = np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    value = np.zeros((1, 2, 1, tokens, head_dim), np.float32)
    value[:, 0] = 1.3 * keys  # a magnitude, as YaRN's, changes nothing
    found = floats(
        round_trip(name, value.view("<u4"), Context("float32", start, inverse)), "float32"
    )
    lost = floats(round_trip(name, value.view("<u4"), Context("float32", start)), "float32")
    error, error_without = (np.abs(v - value).max() for v in (found, lost))
    assert error < 0.01
    assert error_without > 3 * error


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 1e38])
def test_what_no_scale_can_say_is_kept_whole(name: str, dtype: Any, number: float) -> None:
    bits = kv_bits(KVLayout(2, 2, 32, dtype), 8)
    with np.errstate(over="ignore"):
        one = np.float32(number)
        word = {
            "bfloat16": one.view(np.uint32) >> 16,
            "float16": one.astype(np.float16).view(np.uint16),
            "float32": one.view(np.uint32),
        }[dtype]
    for kv in (0, 1):
        special = bits.copy()
        special[1, kv, 0, 5, 3] = word
        context = Context(dtype, 64, frequencies(32))
        np.testing.assert_array_equal(round_trip(name, special, context), special)


@pytest.mark.parametrize("name", LOSSY)
def test_zeros_and_tiny_numbers(name: str) -> None:
    for word in (0, 0x8000, 0x0001):  # zero, negative zero, the smallest bfloat16
        bits = np.full((1, 2, 1, 8, 32), word, "<u2")
        found = floats(round_trip(name, bits, Context("bfloat16", 64, frequencies(32))), "bfloat16")
        assert np.abs(found).max() < 1e-37


def test_e4m3_is_that_of_torch() -> None:
    import torch

    from chatkv_store.codec_quantised import _FROM_E4M3, _to_e4m3

    codes = torch.arange(256, dtype=torch.uint8)
    theirs = codes.view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(_FROM_E4M3, theirs)
    random = np.random.default_rng(0)
    numbers = (random.standard_normal(20_000) * np.exp2(random.integers(-12, 9, 20_000))).clip(
        -448, 448
    )
    between = (theirs[:126] + theirs[1:127]) / 2  # ties
    numbers = np.concatenate([numbers, between, -between]).astype(np.float32)
    wanted = torch.from_numpy(numbers).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(_to_e4m3(numbers), wanted)


@pytest.mark.parametrize(("name", "ratio"), [("int8", 1.85), ("fp8", 1.87), ("int4", 3.5)])
def test_sizes(name: str, ratio: float) -> None:
    layout = KVLayout(6, 3, 64, "bfloat16")
    bits = kv_bits(layout, 64)
    payload = codec.by_name(name).encode(bits, Context("bfloat16", 64, frequencies(64)))
    assert bits.nbytes / len(payload) > ratio


# --- damage -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_damaged_payload_is_named_and_writes_nothing(name: str, dtype: Any) -> None:
    bits = kv_bits(KVLayout(2, 2, 8, dtype), 16)
    coder = codec.by_name(name)
    good = coder.encode(bits, Context(dtype, 64, frequencies(8)))
    bad = {
        "empty": b"",
        "head only": good[:4],
        "cut in the head": good[:7],
        "cut": good[:-8],
        "longer": good + bytes(8),
        "two": good + good,
        "another version": b"\x7f" + good[1:],
        "another codec": good[:1] + b"\x63" + good[2:],
        "another width": good[:2] + bytes([6 - good[2]]) + good[3:],
        "no dtype": good[:3] + b"\x09" + good[4:],
        "a dtype of another width": good[:3] + bytes([0 if dtype == "float32" else 2]) + good[4:],
    }
    if name == "packed":
        bad["more escapes"] = good[:4] + (5000).to_bytes(4, "little") + good[8:]
    else:
        bad["more whole tokens"] = good[:8] + b"\x01\x00" + good[10:]
        bad["other frequencies"] = good[:12] + b"\x03\x00" + good[14:]
        bad["a frequency that is none"] = good[:16] + b"\xff\xff\xff\x7f" + good[20:]
        bad["a scale that is none"] = good[:32] + b"\xff\x7f" + good[34:]
    for what, payload in bad.items():
        out = np.zeros((2, 2, 2, 48, 8), bits.dtype)
        with pytest.raises(codec.PayloadDamaged) as caught:
            coder.decode(codec.staged([good, payload, good]), out)
        assert caught.value.index == 1, what
        assert not out.any(), what


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", CODECS)
@given(data=st.data())
def test_random_damage_never_crashes(name: str, data: st.DataObject) -> None:
    """Without the digest: whatever the bytes are, decoding ends in an array or PayloadDamaged."""
    bits = kv_bits(KVLayout(1, 2, 8, "bfloat16"), 16)
    coder = codec.by_name(name)
    payload = bytearray(coder.encode(bits, Context("bfloat16", 2, frequencies(8))))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(payload) - 1))
        payload[at] ^= data.draw(st.integers(1, 255))
    out = np.zeros_like(bits)
    try:
        coder.decode(codec.staged([bytes(payload)]), out)
    except codec.PayloadDamaged:
        assert not out.any()


# --- what must never change -------------------------------------------------------------------


def test_numbers_and_names_are_forever() -> None:
    names = ["raw", "lossless", "packed", "int8", "fp8", "int4", "kept"]
    assert [codec.by_name(name).id for name in names] == list(range(7))
    families = {name: codec.by_name(name).family for name in names}
    assert families == dict.fromkeys(names, "lossless") | {name: name for name in LOSSY}


# Turned by no angle: cos and sin of anything else may differ in the last bit between machines.
PLACE = Context("bfloat16", 2, np.zeros(2, np.float32))


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def sample(dtype: str, tokens: int = 6) -> Bits:
    """Exact in every dtype, so that no library's rounding decides what is encoded."""
    shape = (1, 2, 1, tokens, 4)
    numbers = (np.arange(np.prod(shape)) * 37 % 64 - 20).reshape(shape) / np.float32(8)
    if dtype == "float16":
        return numbers.astype("<f2").view("<u2")
    words = numbers.astype("<f4").view("<u4")
    return words if dtype == "float32" else (words >> 16).astype("<u2")


GOLDEN = {
    "packed": "010202000100000000000000010000008181808181808181a008a0580014208820e070402050e0388004"
    "402c00b05080101090188068001c40f030a000202870c048800c0098109055530d5823495402d6880292"
    "0000000010088040000400000000000000000000",
    "int8": "01030200020000000200040002000000000000000000000020c00840a0bf584000009440a03f08c09040"
    "903f10c0184080bf6840803e9c40862586258625862500b880bd00bf00b08b17ff17ff8b008b00ff74ff"
    "7400e8008b254b296928ca2445a97fe3610f7f2dd45bf97f358178c4",
    "fp8": "01040200020000000200040002000000000000000000000020c00840a0bf584000009440a03f08c09040"
    "903f10c0184080bf6840803e9c40b721b7204920252276ec7e607e73f577e37e6b7e73f17cd2491e0022"
    "00216e1d77fa7eed7b657e72f27add7e74fe7df5",
    "int4": "01050200020000000200040002000000000000000000000020c00840a0bf584000009440a03f08c09040"
    "903f10c0184080bf6840803e9c40de35de35de35de3500b880bd00bf00b0f8110f8870ffe70080b540b9"
    "60b8c03404ad02578b02fb40",
}
# The first digits of the SHA-256 of what is encoded, and of what that decodes to.
DIGESTS = {
    ("bfloat16", "packed"): ("75bf3a1eee03f570", "3fda700204a1e7a6"),
    ("bfloat16", "int8"): ("169021f7c8844877", "b2a78170942225b6"),
    ("bfloat16", "fp8"): ("c16fe986c9f86fde", "7bfe0f01d282f741"),
    ("bfloat16", "int4"): ("91a1ff7b2164dc9c", "20e98d21bd779103"),
    ("float16", "packed"): ("5975eaf19e192659", "cb989fab22b3e3f8"),
    ("float16", "int8"): ("c09bf64334263fae", "c9922efd7ef002ec"),
    ("float16", "fp8"): ("9980cb7f50723244", "482fe9f1b4960fc8"),
    ("float16", "int4"): ("9389f84bb9ff588b", "eb8577b5283c3062"),
    ("float32", "packed"): ("9f5161d43e1623e1", "2b27a36155faa063"),
    ("float32", "int8"): ("2169699e87eca30e", "a9b5a1ff8b9fbb1b"),
    ("float32", "fp8"): ("347d79490a4ccb96", "ab81b64d50d7390f"),
    ("float32", "int4"): ("2a55e64d3af17282", "034305e069d2f5d6"),
}


@pytest.mark.parametrize("name", CODECS)
def test_payloads_of_this_format_are_forever(name: str) -> None:
    """Whoever changes these bytes orphans what users have stored, and the GPU's twins."""
    payload = bytes.fromhex(GOLDEN[name])
    out = np.empty_like(sample("bfloat16"))
    codec.by_name(name).decode(codec.staged([payload]), out)
    assert digest(out.tobytes()) == DIGESTS["bfloat16", name][1]
    assert codec.by_name(name).encode(sample("bfloat16"), PLACE) == payload


@pytest.mark.parametrize(("dtype", "name"), DIGESTS)
def test_the_format_has_not_moved(dtype: Any, name: str) -> None:
    bits = sample(dtype)
    context = Context(dtype, PLACE.start, PLACE.inverse_frequencies)
    payload = codec.by_name(name).encode(bits, context)
    out = np.empty_like(bits)
    codec.by_name(name).decode(codec.staged([payload]), out)
    assert (digest(payload), digest(out.tobytes())) == DIGESTS[dtype, name]
