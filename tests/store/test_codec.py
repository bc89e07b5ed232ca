"""Codecs: every bit comes back, damage is noticed, and real exponents shrink."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatkv_store import KVLayout, codec
from kv_samples import Bits, kv_bits

CODECS = ["raw", "lossless"]
DTYPES = ["bfloat16", "float16", "float32"]


def place(kind: str, bits: Bits) -> tuple[Bits, Bits]:
    """Where to decode to: the whole memory, and a view of it in the shape of `bits`."""
    layers, two, heads, tokens, head_dim = bits.shape
    if kind == "pool":  # a slab of the tokens of a pool
        memory = np.zeros((layers, two, heads, tokens + 9, head_dim), bits.dtype)
        return memory, memory[:, :, :, 5 : 5 + tokens]
    # tokens before heads, so that a head's tokens are not neighbours
    memory = np.zeros((layers, two, tokens + 9, heads, head_dim), bits.dtype)
    return memory, memory.swapaxes(2, 3)[:, :, :, 5 : 5 + tokens]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(CODECS),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(["pool", "tokens first"]),
    layers=st.integers(1, 3),
    heads=st.integers(1, 3),
    tokens=st.integers(1, 20),
    num_blocks=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_every_bit_comes_back(
    name: str,
    dtype: Any,
    kind: str,
    layers: int,
    heads: int,
    tokens: int,
    num_blocks: int,
    seed: int,
) -> None:
    layout = KVLayout(layers, heads, 6, dtype)
    bits = kv_bits(layout, tokens * num_blocks, seed)
    coder = codec.by_name(name)
    parts = np.split(bits, num_blocks, axis=3)
    memory, out = place(kind, bits)
    coder.decode(codec.staged([coder.encode(part) for part in parts]), out)
    np.testing.assert_array_equal(out, bits)
    out[...] = 0
    assert not memory.any(), "wrote outside its place"


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_any_bits_come_back(name: str, dtype: str) -> None:
    """Also those that are no numbers: infinities, NaN payloads, negative zero, all 16-bit words."""
    words = np.arange(1 << 16, dtype=dtype)
    if dtype == "<u4":
        words = words * np.uint32(0x10001) ^ np.uint32(0xDEAD)
    bits = words.reshape(4, 2, 8, 16, 64)
    coder = codec.by_name(name)
    out = np.empty_like(bits)
    coder.decode(codec.staged([coder.encode(bits)]), out)
    np.testing.assert_array_equal(out, bits)


def test_exponents_shrink() -> None:
    layout = KVLayout(6, 3, 64, "bfloat16")
    bits = kv_bits(layout, 64)
    sizes = {name: len(codec.by_name(name).encode(bits)) for name in CODECS}
    assert sizes["raw"] == bits.nbytes + 4
    # A high byte of this KV has 3.84 bits of entropy: 16 / (8 + 3.84) = 1.35 is the limit.
    assert bits.nbytes / sizes["lossless"] > 1.33


@pytest.mark.parametrize("name", CODECS)
def test_a_damaged_payload_is_named_and_writes_nothing(name: str) -> None:
    bits = kv_bits(KVLayout(2, 2, 8, "bfloat16"), 16)
    coder = codec.by_name(name)
    good = coder.encode(bits)
    bad = {
        "empty": b"",
        "head only": good[:4],
        "cut": good[:-10],
        "cut in the first plane": good[:40],
        "two": good + good,
        "another version": b"\x7f" + good[1:],
        "another codec": good[:1] + b"\x63" + good[2:],
        "another dtype": good[:2] + b"\x04" + good[3:],
    }
    if name == "lossless":
        bad.pop("two")  # what follows the frame is not looked at: lengths are the store's to check
        plane = 4 + bits.size
        bad["no frame"] = good[:plane] + bytes(len(good) - plane)
    for what, payload in bad.items():
        out = np.zeros((2, 2, 2, 48, 8), "<u2")
        with pytest.raises(codec.PayloadDamaged) as caught:
            coder.decode(codec.staged([good, payload, good]), out)
        assert caught.value.index == 1, what
        assert not out.any(), what


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_random_damage_never_crashes(data: st.DataObject) -> None:
    """Without the digest: whatever the bytes are, decoding ends in an array or PayloadDamaged."""
    bits = kv_bits(KVLayout(1, 2, 8, "bfloat16"), 16)
    coder = codec.by_name("lossless")
    payload = bytearray(coder.encode(bits))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(payload) - 1))
        payload[at] ^= data.draw(st.integers(1, 255))
    out = np.zeros_like(bits)
    try:
        coder.decode(codec.staged([bytes(payload)]), out)
    except codec.PayloadDamaged:
        assert not out.any()


def test_payloads_of_this_format_are_forever() -> None:
    """Written by the first release; a codec that cannot read it orphans every stored block."""
    payload = bytes.fromhex(
        "010102000090d266a43d760848cb1ab2ec60be6f20fdf2d3c402967d68983aaf0cf6de0028b52ffd"
        "20208000000026042b09300e351339183e1c4321488000004d735178567d5b826086658b6a906e95010000"
    )
    out = np.zeros((1, 2, 1, 4, 4), "<u2")
    codec.by_name("lossless").decode(codec.staged([payload]), out)
    np.testing.assert_array_equal(out.ravel(), np.arange(32, dtype="<u2") * 1234)


def test_unknown_codecs() -> None:
    assert codec.by_id(99) is None
    with pytest.raises(ValueError, match="lossless"):
        codec.by_name("zip")
