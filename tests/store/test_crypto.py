"""Encryption at rest: nothing readable in the file, nothing wrong in the answers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatkv_store import BlockStore, StoreError, block_key, load_blocks
from chatkv_store.encryption import CRYPTO, KEY_FILE_VARIABLE, start_empty
from chatkv_store.errors import StoreBusy, StoreLocked
from chatkv_store.keys import pack_ids
from chatkv_store.sealing import Sealer
from chatkv_store.tables import value_key
from kv_samples import GROUPED, SMALL, SPACE, data_file, kv_bits, kv_of, restore, save

pytest.importorskip("cryptography")

IDS = list(range(500, 600))


@pytest.fixture
def sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty encrypted store; the passphrase is found through the environment."""
    key = tmp_path / "key"
    key.write_text("correct horse\n")
    monkeypatch.setenv(KEY_FILE_VARIABLE, str(key))
    start_empty(tmp_path / "kv", b"correct horse")
    return tmp_path / "kv"


def test_what_is_stored_comes_back_and_cannot_be_read_without_the_key(sealed: Path) -> None:
    ids = list(range(3000, 3150))
    bits = kv_bits(GROUPED, len(ids))
    with BlockStore(sealed) as store:
        store.register(SPACE, {"model": "A secret model", "layout": GROUPED.to_json()})
        save(store, GROUPED, ids, bits)
        plain = [
            *(value[: len(value) // 2][-64:] for _, value in store.scan("values")),
            *(part for h in store.headers() for part in (h.key, h.parent, h.ids[:64])),
        ]
    with BlockStore(sealed, read_only=True) as store:
        np.testing.assert_array_equal(restore(store, GROUPED, ids), bits)
        out = np.zeros_like(bits)
        blocks = store.match(SPACE, ids, GROUPED).blocks
        assert load_blocks(store, blocks, GROUPED, out, threads=2).num_tokens_ok == len(ids)
        np.testing.assert_array_equal(out, bits)
        assert store.namespaces()[SPACE]["model"] == "A secret model"
        assert store.verify() == []
    content = data_file(sealed).read_bytes()
    assert len(plain) > 10 and not [part for part in plain if part in content]
    for part in (SPACE, b"A secret model", pack_ids(ids[64:66]), b"correct horse"):
        assert part not in content


def test_a_sealed_store_behaves_like_a_plain_one(sealed: Path, tmp_path: Path) -> None:
    rng = random.Random(1)
    with BlockStore(sealed) as one, BlockStore(tmp_path / "plain") as other:
        stores = (one, other)
        logs: list[list[int]] = []
        for _ in range(40):
            base = rng.choice(logs)[: rng.randrange(60)] if logs and rng.random() < 0.7 else []
            logs.append([*base, *(rng.randrange(4) for _ in range(rng.randrange(1, 40)))])
            for store in stores:
                save(store, SMALL, logs[-1], kv_of(SMALL, logs[-1]))
            if rng.random() < 0.2:
                keys = sorted(header.key for header in other.headers())
                gone = rng.sample(keys, len(keys) // 4)
                assert one.remove(gone) < other.remove(gone) + 64 * len(gone)
            assert {h.key for h in one.headers()} == {h.key for h in other.headers()}
            for log in logs:
                matches = [store.match(SPACE, log, SMALL) for store in stores]
                assert matches[0].num_tokens == matches[1].num_tokens
                assert matches[0].miss == matches[1].miss
        for log in logs:
            right = restore(other, SMALL, log)
            np.testing.assert_array_equal(restore(one, SMALL, log), right)
        kinds = [sorted((f.kind, f.key) for f in store.verify(repair=True)) for store in stores]
        assert kinds[0] == kinds[1]
        assert one.verify() == other.verify() == []


def raw(store: BlockStore, change: Callable[[Any], None]) -> None:
    """Change the file's own bytes, as somebody without the key can."""
    sealer, store.env.sealer = store.env.sealer, None
    store.env.write(change)
    store.env.sealer = sealer


@pytest.mark.parametrize("how", ["flip", "swap", "cut"])
@pytest.mark.parametrize("table", ["values", "blocks"])
def test_what_somebody_changed_is_a_miss(sealed: Path, how: str, table: str) -> None:
    with BlockStore(sealed) as store:
        assert store.env.sealer is not None
        save(store, SMALL, IDS, kv_of(SMALL, IDS))
        keys = [block.key for block in store.match(SPACE, IDS, SMALL).blocks]
        names = [store.env.sealer.hide(value_key(k, 0) if table == "values" else k) for k in keys]

        def change(txn: Any) -> None:
            found = bytearray(txn.get(names[2], db=store.db[table]))
            if how == "flip":
                found[len(found) // 2] ^= 1
            elif how == "swap":  # sealed by us, for another block of the same size
                found = bytearray(txn.get(names[1], db=store.db[table]))
            else:
                del found[-1:]
            txn.put(names[2], bytes(found), db=store.db[table])

        raw(store, change)
        out = np.zeros_like(kv_bits(SMALL, len(IDS)))
        blocks = store.match(SPACE, IDS, SMALL).blocks
        good = load_blocks(store, blocks, SMALL, out, threads=1).num_tokens_ok
        assert good == 2 * SMALL.block_tokens
        right = kv_of(SMALL, IDS)
        np.testing.assert_array_equal(out[:, :, :, :good], right[:, :, :, :good])
        assert store.verify(repair=True)
        assert store.verify() == []
        save(store, SMALL, IDS, right)
        np.testing.assert_array_equal(restore(store, SMALL, IDS), right)


def test_every_value_has_a_nonce_of_its_own(sealed: Path) -> None:
    with BlockStore(sealed) as store:
        for _ in range(2):
            save(store, SMALL, IDS, kv_of(SMALL, IDS))
            store.remove([block_key(SPACE, IDS[:16])])
        save(store, SMALL, IDS, kv_of(SMALL, IDS))
        with store.env._env.begin() as txn, txn.cursor(store.db["values"]) as cursor:
            nonces = [value[:12] for _, value in cursor]
    assert len({*nonces}) == len(nonces) > 5


@pytest.mark.parametrize(
    ("content", "said"),
    [("wrong", "wrong passphrase"), ("", "empty"), (None, "No such file"), ("-", "is encrypted")],
)
def test_without_the_passphrase_there_is_one_clear_line(
    sealed: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, said: str
) -> None:
    key = sealed.parent / "other"
    if content is not None:
        key.write_text(content)
    monkeypatch.setenv(KEY_FILE_VARIABLE, str(key))
    if content == "-":
        monkeypatch.delenv(KEY_FILE_VARIABLE)
    before = data_file(sealed).read_bytes()
    for options in ({}, {"read_only": True}, {"replace_damaged": True}):
        with pytest.raises(StoreLocked, match=said) as caught:
            BlockStore(sealed, **options)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
    assert data_file(sealed).read_bytes() == before


def test_on_and_off_leave_nothing_of_before(sealed: Path) -> None:
    with BlockStore(sealed) as store, pytest.raises(StoreBusy):
        start_empty(sealed, None)
    start_empty(sealed, None)
    with BlockStore(sealed) as store:
        assert store.env.sealer is None
        save(store, SMALL, IDS, kv_of(SMALL, IDS))
        piece = next(value for _, value in store.scan("values"))[-64:]
    with data_file(sealed).open("rb") as old:  # the file that is replaced, held open to be seen
        assert piece in old.read()
        start_empty(sealed, b"correct horse")
        old.seek(0)
        assert old.read().strip(b"\0") == b"", "what was written before is overwritten"
    with BlockStore(sealed) as store:
        assert store.env.sealer is not None and store.stats()["blocks"] == 0


def test_the_salt_is_new_each_time_and_beside_the_data(sealed: Path) -> None:
    salts = set()
    for _ in range(2):
        start_empty(sealed, b"correct horse")
        with BlockStore(sealed) as store, store.env.read() as txn:
            kdf = json.loads(txn.get(CRYPTO, db=store.db["meta"]))
            assert kdf["kdf"] == "scrypt" and kdf["n"] * kdf["r"] * 128 >= 32 << 20
            salts.add(kdf["salt"])
    assert len(salts) == 2


def test_first_ids_are_permuted_and_come_back() -> None:
    sealer = Sealer(bytes(32))
    parent, key = bytes(range(32)), bytes(range(100, 132))
    hidden = [sealer.hide_entry(parent, pack_ids([n]) + key) for n in range(300)]
    assert len({entry[:4] for entry in hidden}) == 300
    for n, entry in enumerate(hidden):
        assert sealer.show_entry(parent, entry) == pack_ids([n]) + key
        assert sealer.hide_entry(parent, pack_ids([n])) == entry[:4]
    assert issubclass(StoreLocked, StoreError)
