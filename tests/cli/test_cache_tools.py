"""The `cache` verbs that change or count something: prune, rm, pin, export, compact, stats, ..."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chatkv_store.blocks import BlockStore
from chatkv_store.conversations import Conversations, Session
from kv_samples import SMALL
from program import Ran, command, environment
from sessions import talk

Program = Callable[..., Ran]
B = SMALL.block_tokens


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def cached(home: Path) -> dict[str, Session]:
    """ "old" (40 days, 4 blocks), its fork "branch" (new, shares the first 2, 3 of its own) and
    "new" (5 blocks)."""
    import time

    clock = Clock()
    clock.now_s = time.time() - 40 * 86_400
    with (
        Conversations(home / "data" / "conversations.sqlite3", clock=clock) as conversations,
        BlockStore(home / "cache" / "kv") as store,
    ):
        old = talk(conversations, store, range(2 * B), title="old")
        talk(conversations, store, range(500, 500 + 2 * B), session=old)
        clock.now_s = time.time()
        branch = conversations.fork(old.id, 1, title="branch")
        talk(conversations, store, range(700, 700 + 3 * B), session=branch)
        new = talk(conversations, store, range(1000, 1000 + 5 * B), title="new")
        return {
            one.title: one for one in map(conversations.get_session, (old.id, branch.id, new.id))
        }


def asked(program: Program, *arguments: str) -> Any:
    done = program("cache", *arguments, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)


def blocks_of(program: Program) -> dict[str, int]:
    return {row["title"]: row["blocks"] for row in asked(program, "ls")}


def num_turns(program: Program) -> int:
    return sum(row["turns"] for row in json.loads(program("sessions", "ls", "--json").out))


EVERYTHING = {"old": 4, "branch": 5, "new": 5}


def test_prune_by_age_leaves_what_a_younger_conversation_shares(
    program: Program, cached: dict[str, Session]
) -> None:
    assert blocks_of(program) == EVERYTHING
    would = asked(program, "prune", "--older-than", "30d", "--dry-run")
    assert would["blocks"] == 2 and would["dry_run"] and would["bytes"] > 0
    assert blocks_of(program) == EVERYTHING, "a dry run deletes nothing"
    turns = num_turns(program)
    assert asked(program, "prune", "--older-than", "30d", "-y")["blocks"] == 2
    assert blocks_of(program) == {"old": 2, "branch": 5, "new": 5}
    assert num_turns(program) == turns, "no word is lost"
    assert asked(program, "prune", "--older-than", "30d", "-y")["blocks"] == 0


def test_prune_to_a_size_takes_the_least_worthy_first(
    program: Program, cached: dict[str, Session]
) -> None:
    used = asked(program, "du")["kv_used_bytes"]
    done = asked(program, "prune", "--max-size", str(used - 2 * 4096), "-y")
    assert done["blocks"] == 2
    assert blocks_of(program) == {"old": 2, "branch": 5, "new": 5}
    assert asked(program, "du")["kv_used_bytes"] <= used - 2 * 4096
    asked(program, "prune", "--max-size", "0", "-y")
    assert set(blocks_of(program).values()) == {0}


def test_prune_orphans_and_models(program: Program, cached: dict[str, Session]) -> None:
    program("sessions", "rm", "-y", "new")
    before = asked(program, "du")
    assert before["models"][0]["unused_bytes"] > 0
    assert before["reclaimable_bytes"] >= before["models"][0]["unused_bytes"]
    assert asked(program, "prune", "--orphans", "-y")["blocks"] == 5
    assert asked(program, "du")["models"][0]["unused_bytes"] == 0
    refused = program("cache", "prune", "--model", "Other", "-y")
    assert refused.code == 2 and "there is: Tiny" in refused.err
    assert asked(program, "prune", "--model", "Tiny", "-y")["blocks"] == 7
    assert set(blocks_of(program).values()) == {0}


def test_nothing_goes_without_being_asked(
    program: Program, terminal: Program, cached: dict[str, Session]
) -> None:
    for verb in (["prune", "--max-size", "0"], ["rm", "new"], ["clear"]):
        refused = program("cache", *verb)
        assert refused.code == 2 and "add -y" in refused.err and "block" in refused.err
    assert program("cache", "prune").code == 2
    assert program("cache", "prune", "--older-than", "soon").code == 2
    assert program("cache", "prune", "--max-size", "much").code == 2
    no = terminal("cache", "clear", keys="n\n")
    assert no.code == 1 and "Delete 12 blocks" in no.out
    assert blocks_of(program) == EVERYTHING
    assert terminal("cache", "clear", keys="y\n").code == 0
    assert set(blocks_of(program).values()) == {0}


def test_rm_takes_what_nobody_else_uses(program: Program, cached: dict[str, Session]) -> None:
    assert asked(program, "rm", "old", "--dry-run")["blocks"] == 2
    assert "left 2 blocks that others use too" in program("cache", "rm", "old", "-y").err
    assert blocks_of(program) == {"old": 2, "branch": 5, "new": 5}
    asked(program, "rm", "old", "branch", "-y")
    assert blocks_of(program) == {"old": 0, "branch": 0, "new": 5}
    assert program("cache", "rm", "nobody", "-y").code == 1


def test_pinned_conversations_keep_their_kv(program: Program, cached: dict[str, Session]) -> None:
    assert asked(program, "pin", "old")["pinned"]
    assert asked(program, "prune", "--older-than", "1d", "--max-size", "0", "-y")["blocks"] == 8
    assert blocks_of(program) == {"old": 4, "branch": 2, "new": 0}
    refused = program("cache", "rm", "old", "-y")
    assert refused.code == 2 and "unpin it first" in refused.err
    assert [row["title"] for row in asked(program, "ls", "--filter", "pinned=yes")] == ["old"]
    assert "* old" in program("cache", "ls").out
    asked(program, "unpin", "old")
    asked(program, "rm", "old", "branch", "-y")
    assert set(blocks_of(program).values()) == {0}


def test_ls_filters_sorts_and_limits(program: Program, cached: dict[str, Session]) -> None:
    def titles(*arguments: str) -> list[str]:
        return [row["title"] for row in asked(program, "ls", *arguments)]

    assert titles("--filter", "used>30d") == ["old"]
    assert titles("--filter", "used<30d", "--sort", "title") == ["branch", "new"]
    assert titles("--sort", "unique") == ["new", "branch", "old"]
    assert titles("--sort", "unique:asc", "--limit", "1") == ["old"]
    assert titles("--filter", "shared>1KiB", "--sort", "title:desc") == ["old", "branch"]
    assert titles("--filter", "title=NEW") == ["new"]
    assert titles("--filter", "stored>=80", "--filter", "model!=Other", "--limit", "9") == [
        "new",
        "branch",
    ]
    for wrong in (["--filter", "colour=red"], ["--filter", "size>big"], ["--sort", "size:up"]):
        done = program("cache", "ls", *wrong)
        assert done.code == 2 and done.err.startswith("chatkv: ") and done.err.count("\n") == 1


def test_du_shows_unique_shared_and_reclaimable_apart(
    program: Program, cached: dict[str, Session]
) -> None:
    values = asked(program, "du")
    (model,) = values["models"]
    assert model["unique_bytes"] + model["shared_bytes"] == model["bytes"]
    assert model["unique_bytes"] == 5 * model["shared_bytes"] > 0  # 10 blocks to 2
    assert values["kv_max_bytes"] > 0 and values["min_free_bytes"] >= 0
    assert "UNIQUE" in program("cache", "du").out


def test_a_fork_costs_no_kv_bytes(program: Program, cached: dict[str, Session], home: Path) -> None:
    data = home / "cache" / "kv" / "data.mdb"
    before = data.read_bytes()
    made = json.loads(program("sessions", "fork", "new", "--json").out)
    assert data.read_bytes() == before
    rows = {row["session"]: row for row in asked(program, "ls")}
    assert rows[made["session"]]["stored_tokens"] == 5 * B
    assert rows[made["session"]]["unique_bytes"] == 0
    references = asked(program, "verify")
    assert (references["unique_blocks"], references["shared_blocks"]) == (5, 7)


def test_compact_gives_room_back_and_refuses_while_a_chat_is_open(
    program: Program, cached: dict[str, Session], home: Path
) -> None:
    data = home / "cache" / "kv" / "data.mdb"
    asked(program, "clear", "-y")
    with BlockStore(home / "cache" / "kv"):
        refused = program("cache", "compact")
        assert refused.code == 1 and refused.err.count("\n") == 1 and "open" in refused.err
    before = data.stat().st_size
    done = asked(program, "compact")
    assert done["before_bytes"] == before > data.stat().st_size == done["after_bytes"]
    assert asked(program, "verify")["sound"]


def test_export_and_import_through_the_program(
    program: Program, cached: dict[str, Session], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "branch.chatkv"
    done = asked(program, "export", "branch", "-o", str(file))
    assert (done["blocks"], done["stored_tokens"]) == (5, 5 * B)
    again = program("cache", "export", "branch", "-o", str(file))
    assert again.code == 2 and "exists" in again.err
    renamed = asked(program, "import", str(file))
    assert renamed["renamed"] and renamed["written_blocks"] == 0
    monkeypatch.setenv("CHATKV_HOME", str(tmp_path / "elsewhere"))
    taken = asked(program, "import", str(file))
    assert taken["session"] == cached["branch"].id and taken["written_blocks"] == 5
    assert blocks_of(program) == {"branch": 5}
    assert asked(program, "verify")["sound"]
    assert asked(program, "import", "--text-only", str(file))["blocks"] == 0
    file.write_bytes(file.read_bytes()[:-100])
    refused = program("cache", "import", str(file))
    assert refused.code == 1 and refused.err.startswith("chatkv: ") and str(file) in refused.err


def test_stats_add_up_what_turns_measured(program: Program, home: Path) -> None:
    turns = [
        {"tokens": _tokens(0, 0, 50), "plan": {"chosen": "none", "alternatives_ms": {}}},
        {
            "tokens": _tokens(0, 900, 20),
            "plan": {
                "chosen": "reload",
                "actual_ms": 30.0,
                "alternatives_ms": {"reload": 25.0, "re-prefill": 2030.0},
            },
        },
        {"tokens": _tokens(990, 0, 10), "plan": {"chosen": "none", "alternatives_ms": {}}},
        {
            "tokens": _tokens(0, 0, 1000),
            "plan": {"chosen": "re-prefill", "alternatives_ms": {"re-prefill": 2000.0}},
            "notices": ["computed again"],
        },
        {"strange": True},
    ]
    with Conversations(home / "data" / "conversations.sqlite3") as store:
        session = store.create_session(title="t")
        with store.lease(session.id):
            for measured in turns:
                turn = store.begin_turn(session.id, user_text="q", prompt_ids=[1])
                store.finish_turn(
                    turn.id, reply_text="a", reply_ids=[2], rng_draws_after=1, stats=measured
                )
    values = asked(program, "stats")
    assert (values["turns"], values["lookups"]) == (4, 3)
    assert (values["from_pool"], values["from_disk"], values["not_found"]) == (1, 1, 1)
    assert (values["tokens_reused"], values["tokens_loaded"]) == (990, 900)
    assert values["tokens_computed"] == 1080 and values["saved_ms"] == 2000.0
    assert values["turns_with_notices"] == 1 and values["written_bytes"] == 0
    assert "2 of 3 (67%)" in program("cache", "stats").out
    assert asked(program, "stats", "--since", "1h")["turns"] == 4


def _tokens(reused: int, loaded: int, computed: int) -> dict[str, int]:
    return {"reused": reused, "loaded": loaded, "computed": computed, "generated": 5}


def test_stats_count_what_was_written(program: Program, cached: dict[str, Session]) -> None:
    assert asked(program, "stats")["written_blocks"] == 12


def test_counting_begins_anew(program: Program, cached: dict[str, Session], home: Path) -> None:
    measured = {"tokens": _tokens(0, 900, 20), "plan": {"alternatives_ms": {"re-prefill": 9.0}}}

    def measure() -> None:
        new = cached["new"].id
        with Conversations(home / "data" / "conversations.sqlite3") as store, store.lease(new):
            turn = store.begin_turn(new, user_text="q", prompt_ids=[1])
            store.finish_turn(
                turn.id, reply_text="a", reply_ids=[2], rng_draws_after=1, stats=measured
            )

    measure()
    before = asked(program, "stats")
    assert (before["turns"], before["written_blocks"], before["reset_at"]) == (1, 12, None)
    since = asked(program, "stats", "--reset")["since"]
    after = asked(program, "stats")
    assert after["reset_at"] == since
    assert not any(value for name, value in after.items() if name != "reset_at")
    measure()
    with BlockStore(home / "cache" / "kv") as store:
        store.count(dropped_blocks=3)
    after = asked(program, "stats")
    assert (after["turns"], after["tokens_loaded"], after["dropped_blocks"]) == (1, 900, 3)
    assert "blocks dropped      3\n" in program("cache", "stats").out
    assert blocks_of(program) == EVERYTHING and num_turns(program) == 7
    for wrong in ("--watch", "--since=1d"):
        assert program("cache", "stats", "--reset", wrong).code == 2


def test_counting_can_begin_before_anything_is_stored(program: Program, home: Path) -> None:
    assert program("cache", "stats", "--reset").err == "counting from now on\n"
    assert asked(program, "stats")["reset_at"] > 0


def test_stats_are_watched_until_ctrl_c(cached: dict[str, Session], home: Path) -> None:
    watching = subprocess.Popen(
        command("cache", "stats", "--format", "jsonl", "--watch", "0.1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert watching.stdout is not None
    assert json.loads(watching.stdout.readline())["dropped_blocks"] == 0
    with BlockStore(home / "cache" / "kv") as store:
        store.count(dropped_blocks=3)
        while json.loads(watching.stdout.readline())["dropped_blocks"] != 3:
            pass
    watching.send_signal(signal.SIGINT)
    _, said = watching.communicate(timeout=60)
    assert watching.returncode == 130 and "Traceback" not in said


READ_AND_WAIT = """
import sys, time
from chatkv_store import BlockStore
store = BlockStore(sys.argv[1])
with store.env.read():
    print("reading", flush=True)
    time.sleep(600)
"""


def test_slots_of_dead_readers_are_freed_and_counted(
    process: Program, cached: dict[str, Session], home: Path
) -> None:
    path = home / "cache" / "kv"
    with BlockStore(path):  # else the next to open it begins with an empty reader table anyway
        reader = subprocess.Popen(
            [sys.executable, "-c", READ_AND_WAIT, str(path)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        assert reader.stdout is not None and reader.stdout.readline() == "reading\n"
        listed = json.loads(process("cache", "readers", "--json").out)
        assert {row["pid"] for row in listed} == {os.getpid(), reader.pid}
        assert [row["transaction"] is not None for row in listed if row["pid"] == reader.pid] == [
            True
        ]
        reader.kill()
        reader.communicate(timeout=60)
        first = json.loads(process("cache", "readers", "--clear-stale", "--json").out)
        assert first == {"freed_slots": 1}
        again = process("cache", "readers", "--clear-stale")
        assert (again.code, again.err) == (0, "freed 0 slots of dead processes\n")


@pytest.mark.parametrize(
    "verb", [["prune", "--orphans", "-y"], ["clear", "-y"], ["stats"], ["readers"], ["compact"]]
)
def test_an_empty_cache_is_no_error(program: Program, verb: list[str]) -> None:
    done = program("cache", *verb)
    assert done.code == 0 and not done.err.startswith("chatkv:")


def test_they_work_while_another_process_has_the_cache_open(
    process: Program, cached: dict[str, Session], home: Path, tmp_path: Path
) -> None:
    with BlockStore(home / "cache" / "kv") as store:
        for verb in (
            ["stats"],
            ["readers"],
            ["pin", "new"],
            ["export", "new", "-o", str(tmp_path / "new")],
            ["rm", "branch", "-y"],
            ["import", str(tmp_path / "new")],
        ):
            done = process("cache", *verb)
            assert done.code == 0, (verb, done.err)
        assert store.stats()["blocks"] == 9 and store.verify() == []
