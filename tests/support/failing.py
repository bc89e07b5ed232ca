"""Commits that a process is to die in, for `forked.Forked`: each is said before the next begins, so
the last line tells how far it came."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from chatkv_store import BlockStore, Conversations, database, environment, failpoints, saving
from kv_samples import SMALL, kv_of, save

TINY_MAP = 32 * 4096


def talk(path: Path) -> None:
    with Conversations(path) as store:
        print("open", flush=True)
        session = store.create_session()
        print("session", session.id, flush=True)
        with store.lease(session.id):
            turn = store.begin_turn(session.id, user_text="u0", prompt_ids=[0])
            print("begun", flush=True)
            store.checkpoint_turn(turn.id, reply_text="a", reply_ids=[1], rng_draws_after=1)
            print("checkpoint", flush=True)
            store.finish_turn(turn.id, reply_text="ab", reply_ids=[1, 2], rng_draws_after=2)
            print("done", flush=True)
        store.delete_session(store.fork(session.id).id)


def save_turns(path: Path) -> None:
    with BlockStore(path, start_map_bytes=TINY_MAP) as store:
        print("open", flush=True)
        for turn in range(4):
            ids = list(range(turn * 1000, turn * 1000 + 100))
            save(store, SMALL, ids[:90], kv_of(SMALL, ids[:90]))
            save(store, SMALL, ids, kv_of(SMALL, ids))
            print(turn, flush=True)


def armed(setting: str, work: Callable[[Path], None], path: Path) -> None:
    """`work` in a process that was started with CHATKV_FAILPOINT=setting."""
    for module in (database, environment, saving):
        module.failpoint = failpoints._Armed(setting)
    work(path)
