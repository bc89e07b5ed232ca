"""The header of a block: what is packed comes back, and any changed byte is noticed."""

from __future__ import annotations

import pytest

from chatkv_store import KVLayout, header
from chatkv_store.header import BlockHeader, HeaderDamaged, ValueEntry
from chatkv_store.keys import pack_ids

HEADER = BlockHeader(
    codec=1,
    layout=KVLayout(4, 8, 64, "float16"),
    created=1234567.5,
    namespace=b"n" * 32,
    parent=b"p" * 32,
    ids=pack_ids([1, 2, 2**32 - 1]),
    values=(ValueEntry(10, b"d" * 16), ValueEntry(2**32 - 1, b"e" * 16)),
)


def test_round_trip() -> None:
    assert header.unpack(HEADER.pack()) == HEADER
    assert HEADER.num_tokens == 3
    assert HEADER.num_payload_bytes == 10 + 2**32 - 1
    assert HEADER.num_raw_bytes == 3 * 4 * 2 * 8 * 64 * 2


def test_any_changed_byte_is_noticed() -> None:
    packed = HEADER.pack()
    for at in range(len(packed)):
        changed = bytearray(packed)
        changed[at] ^= 0x10
        with pytest.raises(HeaderDamaged):
            header.unpack(bytes(changed))


@pytest.mark.parametrize("keep", [0, 1, 15, 100, -1])
def test_a_cut_header_is_noticed(keep: int) -> None:
    with pytest.raises(HeaderDamaged):
        header.unpack(HEADER.pack()[:keep])


def test_a_newer_format_is_named() -> None:
    packed = bytearray(HEADER.pack())
    packed[0] = 9
    with pytest.raises(HeaderDamaged, match="block format 9"):
        header.unpack(bytes(packed))
