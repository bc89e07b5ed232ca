"""Keys tell apart all that KV depends on, and never change between versions."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from chatkv_store import KVLayout, block_key, namespace
from chatkv_store.keys import pack_ids, unpack_ids

LAYOUT = KVLayout(30, 3, 64, "bfloat16")
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=70)


def test_a_namespace_depends_on_each_part() -> None:
    parts = [
        namespace(b"w", b"c", LAYOUT, "lossless"),
        namespace(b"x", b"c", LAYOUT, "lossless"),
        namespace(b"w", b"d", LAYOUT, "lossless"),
        namespace(b"w", b"c", dataclasses.replace(LAYOUT, block_tokens=32), "lossless"),
        namespace(b"w", b"c", dataclasses.replace(LAYOUT, dtype="float16"), "lossless"),
        namespace(b"w", b"c", LAYOUT, "int8"),
        namespace(b"wc", b"", LAYOUT, "lossless"),  # not the same bytes shifted
        namespace(b"", b"wc", LAYOUT, "lossless"),
    ]
    assert len(set(parts)) == len(parts)


@settings(derandomize=True)
@given(IDS, IDS)
def test_equal_ids_equal_keys_and_only_then(one: list[int], other: list[int]) -> None:
    parent = b"p" * 32
    assert (block_key(parent, one) == block_key(parent, other)) == (one == other)
    assert block_key(parent, one) == block_key(parent, pack_ids(one))


def test_a_key_depends_on_everything_before() -> None:
    one = block_key(block_key(b"a" * 32, [1, 2]), [3])
    assert one != block_key(block_key(b"a" * 32, [2, 1]), [3])
    assert one != block_key(block_key(b"b" * 32, [1, 2]), [3])
    assert one != block_key(b"a" * 32, [1, 2, 3])


@settings(derandomize=True)
@given(IDS)
def test_packing_round_trip(ids: list[int]) -> None:
    assert list(unpack_ids(pack_ids(ids))) == ids
    assert len(pack_ids(ids)) == 4 * len(ids)


def test_keys_of_this_format_are_forever() -> None:
    """A change here orphans every stored block: bump the format and say so in the changelog."""
    space = namespace(b"w" * 32, b"c" * 32, LAYOUT, "lossless")
    assert space.hex() == "c5c94736788287c3a16e57736bb17db580f1e47d1188cebab895cfe3f895333e"
    assert (
        block_key(space, [1, 2, 3]).hex()
        == "0156ae30494ce9dd3234d4e640f221f4ae085e6016fdcafc041c0c0a43d0c4e3"
    )
