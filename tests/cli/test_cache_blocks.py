"""`chatkv cache` block by block: explain, warm, ls --blocks, and verify of one conversation."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chatkv_store.blocks import BlockStore
from chatkv_store.conversations import Conversations, Session
from chatkv_store.keys import chain_keys
from chatkv_store.sharing import NEWEST
from chatkv_store.tables import value_key
from kv_samples import SMALL, SPACE
from program import PYTHONPATH, Ran
from sessions import talk

Program = Callable[..., Ran]
B = SMALL.block_tokens


@pytest.fixture
def cached(home: Path) -> dict[str, Session]:
    """ "old" (2 turns of 2 blocks), its fork "branch" (shares the first turn, 3 blocks of its own)
    and "bare" (a block and a half, nothing stored)."""
    with (
        Conversations(home / "data" / "conversations.sqlite3") as conversations,
        BlockStore(home / "cache" / "kv") as store,
    ):
        old = talk(conversations, store, range(2 * B), title="old")
        talk(conversations, store, range(500, 500 + 2 * B), session=old)
        branch = conversations.fork(old.id, 1, title="branch")
        talk(conversations, store, range(700, 700 + 3 * B), session=branch)
        bare = talk(conversations, None, range(900, 900 + B + B // 2), title="bare")
        return {
            one.title: one for one in map(conversations.get_session, (old.id, branch.id, bare.id))
        }


def keys_of(home: Path, session: Session) -> list[bytes]:
    with Conversations(home / "data" / "conversations.sqlite3") as conversations:
        return chain_keys(SPACE, conversations.token_log(session.id), B)


def damage(home: Path, key: bytes, *, header: bool = False) -> None:
    with BlockStore(home / "cache" / "kv") as store:
        name, at = ("blocks", key) if header else ("values", value_key(key, 0))

        def flip(txn: Any) -> None:
            stored = bytearray(txn.get(at, db=store.db[name]))
            stored[-1] ^= 1
            txn.put(at, bytes(stored), db=store.db[name])

        store.env.write(flip)


def explained(program: Program, title: str) -> list[tuple[int, int, str | list[str]]]:
    """(first token, last token + 1, who shares it or why it is missing) of every stretch."""
    told = json.loads(program("cache", "explain", title, "--json").out)
    assert sum(row["tokens"] for row in told["stretches"]) == told["tokens"]
    assert told["stored_tokens"] + told["missing_tokens"] == told["tokens"]
    assert all(row["stored"] == (row["why"] is None) for row in told["stretches"])
    return [
        (row["start"], row["end"], row["why"] or row["shared_with"]) for row in told["stretches"]
    ]


def test_explain_tells_who_shares_what(program: Program, cached: dict[str, Session]) -> None:
    old, branch = cached["old"].id, cached["branch"].id
    assert explained(program, "old") == [(0, 2 * B, [branch]), (2 * B, 4 * B, [])]
    assert explained(program, "branch") == [(0, 2 * B, [old]), (2 * B, 5 * B, [])]
    assert explained(program, "bare") == [(0, B + B // 2, "not stored")]
    told = json.loads(program("cache", "explain", "branch", "--json").out)
    assert [row["turns"] for row in told["stretches"]] == [[1, 1], [2, 2]]
    shares = json.loads(program("cache", "ls", "branch", "--json").out)[0]
    assert told["bytes"] == shares["bytes"]
    shown = program("cache", "explain", "branch").out.splitlines()
    assert shown[:2] == ["branch", f"80 of 80 tokens stored, {shown[1].split(', ')[1]}"]
    assert shown[4].split()[-3:] == ["shared", "with", '"old"']


def test_explain_tells_why_something_is_missing(
    program: Program, cached: dict[str, Session], home: Path
) -> None:
    keys = keys_of(home, cached["branch"])
    with (
        Conversations(home / "data" / "conversations.sqlite3") as conversations,
        BlockStore(home / "cache" / "kv") as store,
    ):
        store.remove([keys[2]])
        store.count(evicted_blocks=1)
        other = talk(conversations, None, [*range(B), B, B + 1, 5, 5], title="other")
        newest = talk(conversations, None, [*range(2 * B), 7], title="newest")
        nobody = conversations.create_session(title="nobody", namespace="ab" * 32)
        with conversations.lease(nobody.id):
            conversations.begin_turn(nobody.id, user_text="q", prompt_ids=[1, 2])
        conversations.create_session(title="empty", namespace=SPACE.hex())
    damage(home, keys[4], header=True)
    (start, end, sharers), *told = explained(program, "branch")
    assert (start, end, set(sharers)) == (0, 2 * B, {cached["old"].id, other.id, newest.id})
    assert told == [
        (2 * B, 3 * B, "not stored"),
        (3 * B, 4 * B, []),
        (4 * B, 5 * B, "damaged: header digest differs"),
    ]
    assert "1 block evicted to make room" in program("cache", "explain", "branch").err
    assert explained(program, "other")[-1] == (
        B + 2,
        B + 4,
        "not stored: other tokens follow there",
    )
    assert explained(program, "newest")[-1][2] == NEWEST
    assert json.loads(program("cache", "show", "newest", "--json").out)["miss"] == NEWEST
    assert explained(program, "nobody") == [(0, 2, "not stored: no model has kept KV for it")]
    assert explained(program, "empty") == []
    assert "nothing has been said" in program("cache", "explain", "empty").err
    assert program("cache", "explain", "who?").code == 1


def test_blocks_are_listed_with_who_shares_them(
    program: Program, cached: dict[str, Session], home: Path
) -> None:
    keys = [key.hex() for key in keys_of(home, cached["branch"])]
    rows = json.loads(program("cache", "ls", "branch", "--blocks", "--json").out)
    assert [row["block"] for row in rows] == keys
    assert [row["start"] for row in rows] == [B * index for index in range(5)]
    assert [row["shared_with"] for row in rows] == [[cached["old"].id]] * 2 + [[]] * 3
    assert {(row["tokens"], row["block_tokens"], row["codec"]) for row in rows} == {(B, B, "raw")}
    whole = json.loads(program("cache", "ls", "branch", "--json").out)[0]
    assert sum(row["bytes"] for row in rows) == whole["bytes"]
    assert program("cache", "ls", "branch", "--chunks", "-q").out.split() == keys
    every = program("cache", "ls", "--blocks", "-q").out.split()
    assert len(every) == len(set(every)) == 7, "a shared block is one block"
    header, group, *lines = program("cache", "ls", "branch", "--blocks").out.splitlines()
    assert header.split() == ["FROM", "TOKENS", "SIZE", "CODEC", "BLOCK", "SHARED", "WITH"]
    assert group.endswith(" branch") and [len(line.split()) for line in lines] == [7, 7, 6, 6, 6]
    only = json.loads(program("cache", "ls", "old", "bare", "--json").out)
    assert {row["title"] for row in only} == {"old", "bare"}
    nothing = program("cache", "ls", "bare")
    assert nothing.out == "" and nothing.err == "nothing is stored of these\n"
    assert program("cache", "ls", "who?").code == 1


def test_one_conversation_is_verified_and_repaired_alone(
    program: Program, cached: dict[str, Session], home: Path
) -> None:
    damage(home, keys_of(home, cached["old"])[3])
    damage(home, keys_of(home, cached["branch"])[4], header=True)
    whole = json.loads(program("cache", "verify", "--json").out)
    assert (whole["blocks"], len(whole["findings"])) == (7, 2)
    for title, kind, num_blocks in (("old", "value", 4), ("branch", "header", 5)):
        done = program("cache", "verify", title, "--json")
        report = json.loads(done.out)
        assert done.code == 1 and report["blocks"] == num_blocks and report["shared_blocks"] == 2
        assert [one["kind"] for one in report["findings"]] == [kind]
    sound = program("cache", "verify", "bare")
    assert (sound.code, sound.out) == (0, "0 blocks, all sound\n")
    assert program("cache", "verify", "old", "--repair").code == 1
    assert program("cache", "verify", "old").code == 0
    left = json.loads(program("cache", "verify", "--json").out)
    assert [one["kind"] for one in left["findings"]] == ["header"], "the other one's is left alone"
    assert program("cache", "verify", "branch", "old", "--repair").code == 1
    assert program("cache", "verify").code == 0
    assert program("cache", "verify", "who?").code == 1


def test_warm_reads_every_value(program: Program, cached: dict[str, Session], home: Path) -> None:
    done = json.loads(program("cache", "warm", "branch", "old", "--json").out)
    assert done["blocks"] == 7 and done["damaged"] == []
    rows = json.loads(program("cache", "ls", "--blocks", "--json").out)
    assert done["bytes"] == sum({row["block"]: row["bytes"] for row in rows}.values())
    assert program("cache", "warm", "branch").err.startswith("5 blocks, ")
    nothing = program("cache", "warm", "bare")
    assert (nothing.code, nothing.err) == (0, "nothing is stored of this\n")
    damage(home, keys_of(home, cached["branch"])[4])
    damaged = program("cache", "warm", "branch")
    assert damaged.code == 1 and "1 block damaged (value 0 is damaged" in damaged.err
    assert program("cache", "warm", "old").code == 0
    assert program("cache", "warm", "who?").code == 1


@pytest.mark.parametrize("verb", ["explain", "warm", "show", "verify", "ls"])
def test_an_empty_cache_is_said(program: Program, home: Path, verb: str) -> None:
    with Conversations(home / "data" / "conversations.sqlite3") as conversations:
        talk(conversations, None, range(3), title="t")
    done = program("cache", verb, "t")
    assert done.code == (1 if verb == "show" else 0)
    assert "empty" in done.out + done.err or "0 blocks" in done.out


def test_they_need_no_torch_and_work_while_another_process_writes(
    process: Program, cached: dict[str, Session], home: Path, tmp_path: Path
) -> None:
    (tmp_path / "stubs").mkdir()
    (tmp_path / "stubs" / "torch.py").write_text("raise SystemExit('torch was imported')")
    path = os.pathsep.join([str(tmp_path / "stubs"), PYTHONPATH])
    with BlockStore(home / "cache" / "kv") as store:
        for verb in (["explain", "branch"], ["warm", "branch"], ["ls", "--blocks"]):
            done = process("cache", *verb, PYTHONPATH=path)
            assert done.code == 0, (verb, done.err)
        assert process("cache", "verify", "old", "--repair", PYTHONPATH=path).code == 0
        assert store.stats()["blocks"] == 7
