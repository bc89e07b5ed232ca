"""`chatkv cache` over KV that another engine keeps here: listed, pinned, checked, deleted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from chatkv_store.blocks import BlockStore
from chatkv_store.keys import chain_keys
from chatkv_store.uses import Use, Uses
from kv_samples import SMALL, SPACE, kv_of, save
from program import Ran

Program = Callable[..., Ran]
IDS = list(range(4 * SMALL.block_tokens))


@pytest.fixture
def use(home: Path) -> Use:
    """A request of four blocks, all stored, and one block that nobody uses."""
    with BlockStore(home / "cache" / "kv") as store:
        about = {"model": "tiny (vLLM)", "layout": SMALL.to_json(), "codec": "lossless"}
        store.register(SPACE, about)
        save(store, SMALL, IDS, kv_of(SMALL, IDS))
        lonely = list(range(900, 900 + SMALL.block_tokens))
        save(store, SMALL, lonely, kv_of(SMALL, lonely))
        return Uses(store).note(SPACE, IDS, SMALL, title="vLLM chat-1", model="tiny (vLLM)")


def test_it_is_listed_and_explained(program: Program, use: Use) -> None:
    (row,) = json.loads(program("cache", "ls", "--format", "json").out)
    assert (row["session"], row["title"], row["blocks"]) == (use.id, "vLLM chat-1", 4)
    assert "tiny (vLLM)" in program("cache", "ls").out
    shown = json.loads(program("cache", "show", use.id[:8], "--format", "json").out)
    assert (shown["stored_tokens"], shown["miss"]) == (len(IDS), None)
    told = json.loads(program("cache", "explain", use.id[:8], "--format", "json").out)
    assert (told["stored_tokens"], told["missing_tokens"]) == (len(IDS), 0)
    blocks = json.loads(program("cache", "ls", use.id, "--blocks", "--format", "json").out)
    assert [row["start"] for row in blocks] == [0, 16, 32, 48]
    assert program("cache", "warm", use.id).code == 0
    assert program("cache", "verify", use.id).code == 0


def test_it_can_be_pinned_and_deleted(home: Path, program: Program, use: Use) -> None:
    assert program("cache", "pin", use.id[:8]).code == 0
    refused = program("cache", "rm", use.id[:8], "-y")
    assert (refused.code, "unpin it first" in refused.err) == (2, True)
    left = json.loads(program("cache", "prune", "--max-size", "0", "-y", "--format", "json").out)
    assert left["blocks"] == 1  # what nobody uses
    assert program("cache", "unpin", use.id[:8]).code == 0
    gone = json.loads(program("cache", "rm", use.id[:8], "-y", "--format", "json").out)
    assert gone["blocks"] == 4
    with BlockStore(home / "cache" / "kv") as store:
        assert (Uses(store).every(), list(store.headers())) == ([], [])
    assert program("cache", "pin", use.id[:8]).code == 1


def test_orphans_are_those_that_no_request_has_either(
    home: Path, program: Program, use: Use
) -> None:
    gone = json.loads(program("cache", "prune", "--orphans", "-y", "--format", "json").out)
    assert gone["blocks"] == 1
    with BlockStore(home / "cache" / "kv") as store:
        assert {one.key for one in store.headers()} == set(
            chain_keys(SPACE, IDS, SMALL.block_tokens)
        )
    assert program("cache", "clear", "-y").code == 0
    with BlockStore(home / "cache" / "kv") as store:
        assert Uses(store).every() == []
