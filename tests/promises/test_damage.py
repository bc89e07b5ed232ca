"""Whatever happens to stored KV, the answer is right and the damage is said.

Right: what the same conversation answers when its history is computed again from its token log.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chatkv.paths import folders
from chatkv_store.blocks import BlockStore
from chatkv_store.keys import KEY_BYTES
from turns import run_turns

QUESTION = "Tell me a long story about the sea, a ship, its captain and the captain's cat. " * 4
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_tokens": 8}
# Where it strikes is drawn: a few places always, more of them at length.
MANY = [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 8))]


@pytest.fixture
def model(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A model of our own, which a test may change."""
    return shutil.copytree(tiny_checkpoint("llama3"), tmp_path / "model")


@pytest.fixture
def session(home: Path, model: Path) -> str:
    """A conversation of one turn, closed, with several stored blocks."""
    turn = run_turns([QUESTION], model=str(model), **OPTIONS)[0]
    assert len(turn["log"]) > 200
    return str(turn["session"])


def next_turns(session: str, model: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The next turn as it is answered now, and from the token log alone."""
    from chatkv_store.conversations import Conversations

    with Conversations(folders().conversations) as conversations:
        twin = conversations.fork(session).id
    damaged = run_turns(
        ["And then?"], session=session, model=str(model), restore="reload", **OPTIONS
    )[0]
    clean = run_turns(
        ["And then?"], session=twin, model=str(model), restore="re-prefill", **OPTIONS
    )[0]
    return damaged, clean


def right_and_reported(damaged: dict[str, Any], clean: dict[str, Any]) -> None:
    assert damaged["reply_ids"] == clean["reply_ids"]
    assert damaged["notices"] or damaged["runtime_notices"], "the miss must be reported"


def stored_values() -> dict[bytes, bytes]:
    with (
        BlockStore(folders().kv) as store,
        store.env.read() as txn,
        txn.cursor(store.db["values"]) as cursor,
    ):
        return {bytes(key): bytes(value) for key, value in cursor}


def overwrite(key: bytes, value: bytes | None, database: str = "values") -> None:
    with BlockStore(folders().kv) as store:

        def work(txn: Any) -> None:
            if value is None:
                txn.delete(key, db=store.db[database])
            else:
                txn.put(key, value, db=store.db[database])

        store.env.write(work)


def flip(rng: random.Random, value: bytes) -> bytes:
    at = rng.randrange(len(value))
    return value[:at] + bytes([value[at] ^ 1 << rng.randrange(8)]) + value[at + 1 :]


def test_undamaged_is_reloaded_and_says_nothing(session: str, model: Path) -> None:
    answered, clean = next_turns(session, model)
    assert answered["plan"]["chosen"] == "reload"
    assert answered["reply_ids"] == clean["reply_ids"]
    assert answered["notices"] == answered["runtime_notices"] == []


@pytest.mark.parametrize("seed", MANY)
@pytest.mark.parametrize("kind", ["flip", "truncate", "lengthen", "delete", "zero"])
def test_a_damaged_value(kind: str, seed: int, session: str, model: Path) -> None:
    rng = random.Random(seed)
    values = stored_values()
    key = rng.choice(sorted(values))
    value = values[key]
    changed = {
        "flip": flip(rng, value),
        "truncate": value[: rng.randrange(len(value))],
        "lengthen": value + bytes(rng.randrange(1, 100)),
        "delete": None,
        "zero": bytes(len(value)),
    }[kind]
    overwrite(key, changed)
    damaged, clean = next_turns(session, model)
    right_and_reported(damaged, clean)
    # The block was stored anew: nothing is left to be reported.
    with BlockStore(folders().kv) as store:
        assert store.verify() == []


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_header(seed: int, session: str, model: Path) -> None:
    rng = random.Random(seed)
    key = rng.choice(sorted({key[:KEY_BYTES] for key in stored_values()}))
    with BlockStore(folders().kv) as store, store.env.read() as txn:
        header = bytes(txn.get(key, db=store.db["blocks"]))
    overwrite(key, flip(rng, header), "blocks")
    right_and_reported(*next_turns(session, model))


def test_a_value_of_another_block(session: str, model: Path) -> None:
    first, *_, last = sorted(stored_values())
    overwrite(first, stored_values()[last])
    right_and_reported(*next_turns(session, model))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_a_file_cut_short(share: float, session: str, model: Path) -> None:
    path = folders().kv / "data.mdb"
    with path.open("r+b") as file:
        file.truncate(int(path.stat().st_size * share))
    right_and_reported(*next_turns(session, model))


@pytest.mark.parametrize("seed", MANY)
def test_bytes_flipped_in_the_file(seed: int, session: str, model: Path) -> None:
    """Anywhere in the file: pages of the index, free pages, values. Right, reported or unharmed."""
    rng = random.Random(seed)
    path = folders().kv / "data.mdb"
    data = bytearray(path.read_bytes())
    for _ in range(40):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    damaged, clean = next_turns(session, model)
    assert damaged["reply_ids"] == clean["reply_ids"]


def test_noise_instead_of_a_file(session: str, model: Path) -> None:
    (folders().kv / "data.mdb").write_bytes(random.Random(1).randbytes(1 << 20))
    right_and_reported(*next_turns(session, model))


def test_the_cache_is_gone(session: str, model: Path) -> None:
    shutil.rmtree(folders().cache)
    right_and_reported(*next_turns(session, model))


def test_another_model_under_the_same_name(
    session: str, model: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    other = tiny_checkpoint("llama3", seed=1)
    shutil.copy(other / "model.safetensors", model / "model.safetensors")
    damaged, clean = next_turns(session, model)
    right_and_reported(damaged, clean)
    assert damaged["tokens"]["loaded"] == 0


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"rope_theta": 10000.0}, id="theta"),
        pytest.param({"rope_scaling": None}, id="scaling"),
        pytest.param({"rms_norm_eps": 1e-3}, id="norm"),
    ],
)
def test_another_config_for_the_same_weights(
    change: dict[str, Any], session: str, model: Path
) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    damaged, clean = next_turns(session, model)
    right_and_reported(damaged, clean)
    assert damaged["tokens"]["loaded"] == 0
