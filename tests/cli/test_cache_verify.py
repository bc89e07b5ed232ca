"""`chatkv cache verify`, quick and full: what each can find, and what only the other can."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatkv.paths import folders
from chatkv_store.blocks import BlockStore, NewBlock
from chatkv_store.conversations import Conversations
from chatkv_store.sharing import stored_blocks
from chatkv_store.tables import value_key
from program import Ran

Program = Callable[..., Ran]
QUESTION = "Tell me a long story about the sea, a ship, its captain and the captain's cat. " * 3
QUICK = ["--temperature", "0", "--max-tokens", "8"]


@pytest.fixture
def verified(
    program: Program, tiny_checkpoint: Callable[..., Path]
) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Has a conversation stored, with a codec; then `verified("--full")` is (code, report)."""
    model = str(tiny_checkpoint("llama3"))

    def look(*options: str, codec: str | None = None, dtype: str = "float32") -> Any:
        if codec is not None:
            asked = ["ask", QUESTION, "-m", model, "--dtype", dtype, "--kv-codec", codec, *QUICK]
            assert program(*asked).code == 0
        done = program("cache", "verify", "--json", *options)
        return done.code, json.loads(done.out)

    return look


def change(what: Callable[[BlockStore, Any, list[Any]], None]) -> bytes:
    """`what(store, txn or None, blocks)` to the second block of the only conversation; its key."""
    with (
        Conversations(folders().conversations) as conversations,
        BlockStore(folders().kv) as store,
    ):
        (session,) = conversations.list_sessions()
        blocks = stored_blocks(store, conversations, session)
        what(store, bytes.fromhex(session.namespace or ""), blocks)
        return blocks[1].key


def lose_a_value(store: BlockStore, space: bytes, blocks: list[Any]) -> None:
    key = value_key(blocks[1].key, 0)
    store.env.write(lambda txn: txn.delete(key, db=store.db["values"]))


def flip_a_bit(store: BlockStore, space: bytes, blocks: list[Any]) -> None:
    key = value_key(blocks[1].key, 0)

    def work(txn: Any) -> None:
        value = bytearray(txn.get(key, db=store.db["values"]))
        value[100] ^= 1
        txn.put(key, bytes(value), db=store.db["values"])

    store.env.write(work)


def store_other_kv(store: BlockStore, space: bytes, blocks: list[Any]) -> None:
    """As a fault would that comes before the digest: the block before it under this one's name."""
    layout, (before, block) = blocks[1].header.layout, blocks[:2]
    ids = np.frombuffer(block.header.ids, "<u4").tolist()
    values = []
    for group in range(layout.num_values):
        values.append(np.empty(layout.value_shape(group, len(ids)), np.uint32))
        store.read(before, group, values[-1])
    store.remove([block.key])
    store.put(space, layout, [NewBlock(before.key, ids, values, block.start)], "raw")


def test_each_looks_as_far_as_it_says(verified: Callable[..., Any]) -> None:
    code, report = verified("--full", codec="lossless")
    assert (code, report["sound"], report["recomputed_blocks"]) == (0, True, report["blocks"])
    assert verified("--full", "--sample", "2")[1]["recomputed_blocks"] == 2
    assert "recomputed_blocks" not in verified("--quick")[1]

    key = change(store_other_kv)
    assert verified()[0] == verified("--quick")[0] == 0  # to its digest it is as it was written
    code, report = verified("--full")
    (found,) = report["findings"]
    assert (code, found["kind"], found["key"]) == (1, "content", key.hex())
    assert "are not those of token" in found["detail"]

    change(flip_a_bit)
    assert verified("--quick")[0] == 0 and verified()[0] == 1
    change(lose_a_value)
    assert verified("--quick")[1]["findings"][0]["detail"] == "value 0 is missing"
    assert verified("--quick", "--repair")[0] == 1
    assert verified("--full")[0] == 0


def test_wrong_kv_is_dropped(verified: Callable[..., Any]) -> None:
    num_blocks = verified(codec="lossless")[1]["blocks"]
    change(store_other_kv)
    assert verified("--full", "--repair")[0] == 1
    code, report = verified("--full")
    assert (code, report["blocks"]) == (0, num_blocks - 1)


@pytest.mark.parametrize(("codec", "dtype"), [("int4", "float32"), ("lossless", "bfloat16")])
def test_what_a_codec_and_rounding_change_is_no_finding(
    codec: str, dtype: str, verified: Callable[..., Any]
) -> None:
    code, report = verified("--full", codec=codec, dtype=dtype)
    assert (code, report["findings"]) == (0, []) and report["recomputed_blocks"] > 2


def test_what_cannot_be_computed_again_is_said(
    program: Program, verified: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    verified(codec="lossless")
    with Conversations(folders().conversations) as store:
        (session,) = store.list_sessions()
        store.update_session(session.id, settings=session.settings | {"model": "/no/such/model"})
    done = program("cache", "verify", "--full")
    assert done.code == 0 and "0 computed again" in done.out
    assert "is left out: " in done.err and "/no/such/model" in done.err
    both = program("cache", "verify", "--full", "--quick")
    assert both.code == 2 and "not both" in both.err
