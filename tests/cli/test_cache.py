"""`chatkv cache`: what is stored for whom, how much it takes, and whether it is sound."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from chatkv_store.blocks import BlockStore, NewBlock
from chatkv_store.conversations import Conversations, Session
from chatkv_store.keys import block_key
from chatkv_store.layout import KVLayout
from kv_samples import GROUPED, chain, kv_bits
from kv_samples import SPACE as SAMPLE_SPACE
from program import Ran

Program = Callable[..., Ran]

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, dtype="bfloat16", block_tokens=8)
SPACE = b"n" * 32
RAW_BYTES_PER_TOKEN = 2 * 2 * 1 * 4 * 2


@pytest.fixture
def cached(home: Path) -> dict[str, Session]:
    """Three sessions of one model: "main" (21 tokens, all stored), "fork" of its first turn
    (10 tokens, all found in main's blocks), "bare" (nothing stored)."""
    with Conversations(home / "data" / "conversations.sqlite3") as store:
        main = store.create_session(title="main", model="Tiny", namespace=SPACE.hex())
        bare = store.create_session(title="bare", model="Tiny", namespace=SPACE.hex())
        for session, first in ((main, 100), (bare, 900)):
            with store.lease(session.id):
                for length in (10, 11):
                    turn = store.begin_turn(
                        session.id, user_text="q", prompt_ids=range(first, first + length - 2)
                    )
                    store.finish_turn(turn.id, reply_text="a", reply_ids=[1, 2], rng_draws_after=2)
        fork = store.fork(main.id, 1, title="fork")
        keep(home, list(store.token_log(main.id)))
        return {
            session.title: session
            for session in map(store.get_session, (main.id, bare.id, fork.id))
        }


def keep(home: Path, token_ids: list[int]) -> None:
    """Store KV for the tokens, as a runtime would."""
    rng = np.random.default_rng(0)
    blocks, parent = [], SPACE
    for at in range(0, len(token_ids), LAYOUT.block_tokens):
        ids = token_ids[at : at + LAYOUT.block_tokens]
        values = [
            rng.integers(0, 2**16, LAYOUT.value_shape(group, len(ids)), dtype=np.uint16)
            for group in range(LAYOUT.num_values)
        ]
        blocks.append(NewBlock(parent, ids, values))
        parent = block_key(parent, ids)
    with BlockStore(home / "cache" / "kv") as store:
        store.register(SPACE, {"model": "Tiny", "layout": LAYOUT.to_json()})
        store.put(SPACE, LAYOUT, blocks)


def damage(home: Path) -> None:
    """Flip bits in the stored values, the way a disk does."""
    env = lmdb.open(str(home / "cache" / "kv"), max_dbs=8)
    values = env.open_db(b"values")
    with env.begin(write=True, db=values) as txn:
        key, payload = next(iter(txn.cursor()))
        txn.put(bytes(key), bytes(byte ^ 1 for byte in payload))
    env.close()


def by_title(program: Program, *arguments: str) -> dict[str, dict[str, Any]]:
    return {row["title"]: row for row in json.loads(program(*arguments, "--json").out)}


@pytest.mark.parametrize("verb", ["ls", "du", "verify"])
def test_an_empty_cache_is_sound_and_said(program: Program, verb: str) -> None:
    done = program("cache", verb)
    assert done.code == 0 and not done.err.startswith("chatkv:")
    assert json.loads(program("cache", verb, "--json").out) is not None


def test_ls_counts_tokens_blocks_and_bytes_per_session(
    program: Program, cached: dict[str, Session]
) -> None:
    rows = by_title(program, "cache", "ls")
    main, fork, bare = rows["main"], rows["fork"], rows["bare"]
    assert (main["tokens"], main["stored_tokens"], main["blocks"]) == (21, 21, 3)
    assert (fork["tokens"], fork["stored_tokens"], fork["blocks"]) == (10, 10, 2)
    assert (bare["tokens"], bare["stored_tokens"], bare["blocks"]) == (21, 0, 0)
    assert fork["unique_bytes"] == 0 < fork["shared_bytes"] == main["shared_bytes"]
    assert main["unique_bytes"] > 0 == bare["unique_bytes"]
    assert main["session"] == cached["main"].id and main["model"] == "Tiny"


def test_ls_for_people_groups_by_model(program: Program, cached: dict[str, Session]) -> None:
    done = program("cache", "ls")
    header, model, *rows = done.out.splitlines()
    assert header.split() == [
        "ID",
        "TITLE",
        "TOKENS",
        "STORED",
        "BLOCKS",
        "UNIQUE",
        "SHARED",
        "USED",
    ]
    assert model == "Tiny"
    assert [row.split()[1:5] for row in rows] == [
        ["fork", "10", "10", "2"],
        ["main", "21", "21", "3"],
    ]
    assert "3 blocks of 2 sessions" in done.err
    assert program("cache", "ls", "-q").out.split() == [cached["fork"].id, cached["main"].id]


def test_what_no_session_uses_is_counted(program: Program, cached: dict[str, Session]) -> None:
    program("sessions", "rm", "-y", "main")
    assert "2 blocks of 1 session, 1 of none" in program("cache", "ls").err
    (model,) = json.loads(program("cache", "du", "--json").out)["models"]
    assert 0 < model["unused_bytes"] < model["bytes"]


def test_show_tells_what_a_session_has(program: Program, cached: dict[str, Session]) -> None:
    shown = json.loads(program("cache", "show", "main", "--json").out)
    assert (shown["stored_tokens"], shown["miss"], shown["namespace"]) == (21, None, SPACE.hex())
    assert KVLayout(**shown["layout"]) == LAYOUT
    assert shown["raw_bytes"] == 21 * RAW_BYTES_PER_TOKEN
    bare = program("cache", "show", cached["bare"].id[:26])
    assert bare.code == 0 and "stored     0" in bare.out and "not stored" in bare.out
    assert program("cache", "show", "nobody").code == 1


def test_du_adds_up(program: Program, cached: dict[str, Session], home: Path) -> None:
    (home / "cache" / "models").mkdir()
    (home / "cache" / "models" / "weights").write_bytes(bytes(5000))
    values = json.loads(program("cache", "du", "--json").out)
    (model,) = values["models"]
    assert (model["model"], model["dtype"], model["sessions"]) == ("Tiny", "bfloat16", 3)
    assert (model["blocks"], model["tokens"], model["unused_bytes"]) == (3, 21, 0)
    assert model["raw_bytes"] == 21 * RAW_BYTES_PER_TOKEN
    assert values["kv_file_bytes"] == (home / "cache" / "kv" / "data.mdb").stat().st_size
    assert values["prepared_models_bytes"] == 5000 and values["disk_free_bytes"] > 0
    assert values["folder"] == str(home / "cache")
    table = program("cache", "du").out
    assert "4.88 KiB" in table and str(home / "cache") in table


def test_verify_finds_damage_and_repairs_it(
    program: Program, cached: dict[str, Session], home: Path
) -> None:
    sound = program("cache", "verify")
    assert (sound.code, sound.out) == (0, "3 blocks, all sound\n")
    damage(home)
    found = program("cache", "verify")
    assert found.code == 1 and "digest differs" in found.out and "--repair" in found.err
    report = json.loads(program("cache", "verify", "--json").out)
    assert (report["sound"], report["blocks"], report["findings"][0]["kind"]) == (False, 3, "value")
    assert program("cache", "verify", "--repair").code == 1
    assert program("cache", "verify").code == 0
    stored = by_title(program, "cache", "ls")["main"]["stored_tokens"]
    assert stored < 21, "the damaged block must be gone"


def test_a_file_that_is_no_cache_is_reported_and_replaced_by_repair(
    program: Program, cached: dict[str, Session], home: Path
) -> None:
    (home / "cache" / "kv" / "data.mdb").write_bytes(b"no lmdb at all" * 1000)
    for verb in ("ls", "verify"):
        done = program("cache", verb)
        assert done.code == 1 and done.err.startswith("chatkv: ") and done.err.count("\n") == 1
    repaired = program("cache", "verify", "--repair")
    assert repaired.code == 1 and "file" in repaired.out
    assert program("cache", "verify").code == 0
    assert len(by_title(program, "cache", "ls")) == 3, "conversations are not the cache's to lose"


def test_verify_looks_where_no_open_looks(program: Program, home: Path) -> None:
    """The head of a value that fills pages of its own: a deletion believes it."""
    ids = list(range(64))
    with BlockStore(home / "cache" / "kv") as store:
        store.put(SAMPLE_SPACE, GROUPED, chain(GROUPED, ids, kv_bits(GROUPED, len(ids))), "raw")
    data = home / "cache" / "kv" / "data.mdb"
    content = bytearray(data.read_bytes())
    head = next(
        page
        for page in range(8192, len(content), 4096)
        if content[page : page + 12] == struct.pack("<QHH", page // 4096, 0, 4)
    )
    content[head + 10] = 0
    data.write_bytes(content)
    found = program("cache", "verify")
    assert found.code == 1 and "does not begin a value" in found.err and found.err.count("\n") == 1
    repaired = json.loads(program("cache", "verify", "--repair", "--json").out)
    assert [one["kind"] for one in repaired["findings"]] == ["file"]
    assert program("cache", "verify").out == "0 blocks, all sound\n"


@pytest.mark.parametrize("place", ["cache", "cache/kv", "cache/kv/data.mdb"])
def test_something_else_in_the_place_of_the_cache_is_said_and_left(
    program: Program, cached: dict[str, Session], home: Path, place: str
) -> None:
    wrong = home / place
    shutil.rmtree(home / "cache")
    wrong.parent.mkdir(parents=True, exist_ok=True)
    if place.endswith(".mdb"):
        wrong.mkdir()
    else:
        wrong.write_text("a letter")
    for verb in (
        ["ls"],
        ["du"],
        ["stats"],
        ["verify"],
        ["verify", "--repair"],
        ["explain", "main"],
        ["clear", "-y"],
        ["compact"],
        ["readers"],
    ):
        done = program("cache", *verb)
        assert done.code == 1 and done.out == "", verb
        assert done.err.startswith(f"chatkv: {wrong} is no ") and done.err.count("\n") == 1
    assert wrong.is_dir() or wrong.read_text() == "a letter"


def test_dir_prints_the_folder(program: Program, home: Path) -> None:
    assert program("cache", "dir").out == f"{home / 'cache'}\n"


def test_it_works_while_a_writer_has_the_cache_open(
    process: Program, cached: dict[str, Session], home: Path
) -> None:
    with BlockStore(home / "cache" / "kv"):
        for verb in ("ls", "du", "verify"):
            assert process("cache", verb).code == 0
