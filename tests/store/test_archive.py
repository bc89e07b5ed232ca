"""A conversation as one file: out, in again, and refused where a byte of it is wrong."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from chatkv_store import BlockStore, Conversations, Session, StoreDamaged, StoreVersionError
from chatkv_store.budget import Budget
from chatkv_store.compaction import compact
from chatkv_store.room import LOCK_BYTES
from chatkv_store.transfer import export_session, import_session
from kv_samples import SMALL, SPACE, kv_of, restore
from sessions import talk

B = SMALL.block_tokens


class Place:
    """One user's stores."""

    def __init__(self, folder: Path) -> None:
        self.conversations = Conversations(folder / "c.sqlite3")
        self.store = BlockStore(folder / "kv")

    def close(self) -> None:
        self.store.close()
        self.conversations.close()


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path / "here")
    yield place
    place.close()


@pytest.fixture
def there(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path / "there")
    yield place
    place.close()


def said(place: Place, session: Session) -> dict[str, object]:
    values = place.conversations.export_text(session.id)
    return {key: value for key, value in values.items() if key != "updated_at"}


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_round_trip(here: Place, there: Place, tmp_path: Path, codec: str) -> None:
    session = talk(here.conversations, here.store, range(5 * B + 3), title="日本", codec=codec)
    talk(here.conversations, here.store, range(70, 70 + B), session=session, codec=codec)
    file = tmp_path / "one.chatkv"
    done = export_session(here.conversations, here.store, session, file)
    assert done.num_tokens == 6 * B + 3 and done.file_bytes == file.stat().st_size
    assert file.stat().st_mode & 0o077 == 0
    taken = import_session(there.conversations, there.store, file)
    assert not taken.is_renamed and taken.refusal is None
    assert taken.written_blocks == taken.num_blocks == done.num_blocks
    assert said(there, taken.session) == said(here, session)
    log = list(there.conversations.token_log(session.id))
    np.testing.assert_array_equal(restore(there.store, SMALL, log), kv_of(SMALL, log))
    assert there.store.verify() == []
    assert there.store.namespaces() == here.store.namespaces()


def test_ids_that_are_taken_are_renewed_and_kv_is_shared(here: Place, tmp_path: Path) -> None:
    session = talk(here.conversations, here.store, range(3 * B))
    file = tmp_path / "one.chatkv"
    export_session(here.conversations, here.store, session, file)
    again = import_session(here.conversations, here.store, file)
    assert again.is_renamed and again.session.id > session.id and again.written_blocks == 0
    theirs, ours = said(here, again.session), said(here, session)
    assert theirs["turns"][0]["id"] != ours["turns"][0]["id"]
    assert here.conversations.token_log(again.session.id) == here.conversations.token_log(
        session.id
    )
    here.conversations.delete_session(session.id)
    assert len(here.conversations.chain(again.session.id)) == 1


def test_the_text_alone(here: Place, there: Place, tmp_path: Path) -> None:
    session = talk(here.conversations, here.store, range(3 * B))
    file = tmp_path / "one.chatkv"
    export_session(here.conversations, here.store, session, file)
    taken = import_session(there.conversations, None, file)
    assert said(there, taken.session) == said(here, session)
    assert there.store.stats()["blocks"] == 0
    export_session(here.conversations, None, session, file)
    assert "kv.bin" not in zipfile.ZipFile(file).namelist()
    assert import_session(there.conversations, there.store, file).num_blocks == 0


def test_a_fork_takes_no_word_of_the_other_conversation_along(
    here: Place, there: Place, tmp_path: Path
) -> None:
    """The block in which they part holds tokens of the other one, which must not leave."""
    secret = 123456789
    main = talk(here.conversations, here.store, range(B + 4))
    talk(here.conversations, here.store, [secret] * 3, session=main)
    fork = here.conversations.fork(main.id, 1)
    file = tmp_path / "one.chatkv"
    done = export_session(here.conversations, here.store, fork, file)
    assert done.num_tokens == B + 4
    assert secret.to_bytes(4, "little") not in file.read_bytes()
    import_session(there.conversations, there.store, file)
    log = list(range(B + 4))
    np.testing.assert_array_equal(restore(there.store, SMALL, log), kv_of(SMALL, log))


def test_what_is_missing_is_left_out(here: Place, there: Place, tmp_path: Path) -> None:
    session = talk(here.conversations, here.store, range(5 * B))
    blocks = here.store.match(SPACE, range(5 * B), SMALL).blocks
    here.store.remove([blocks[0].key, blocks[3].key])
    file = tmp_path / "one.chatkv"
    assert export_session(here.conversations, here.store, session, file).num_blocks == 3
    import_session(there.conversations, there.store, file)
    located = there.store.locate(SPACE, range(5 * B), SMALL)
    assert [block is not None for block in located] == [False, True, True, False, True]


def test_every_flipped_byte_is_refused_and_nothing_is_stored(
    here: Place, there: Place, tmp_path: Path
) -> None:
    session = talk(here.conversations, here.store, range(2 * B + 5))
    good = tmp_path / "one.chatkv"
    export_session(here.conversations, here.store, session, good)
    whole = good.read_bytes()
    bad = tmp_path / "bad.chatkv"
    random = np.random.default_rng(0)
    for at in [*random.integers(0, len(whole), 150), *range(0, 60, 7)]:
        damaged = bytearray(whole)
        damaged[at] ^= 1 << int(random.integers(8))
        bad.write_bytes(damaged)
        try:
            import_session(there.conversations, there.store, bad)
        except (StoreDamaged, StoreVersionError) as error:
            assert "\n" not in str(error) and str(bad) in str(error)
            assert there.conversations.list_sessions() == []
            assert there.store.stats()["blocks"] == 0
        else:  # a byte that says nothing: a date or a flag of the zip's own
            (taken,) = there.conversations.list_sessions()
            assert said(there, taken) == said(here, session)
            there.conversations.delete_session(taken.id)
            there.store.remove([header.key for header in there.store.headers()])
    for cut in (0, 1, len(whole) // 2, len(whole) - 1):
        bad.write_bytes(whole[:cut])
        with pytest.raises(StoreDamaged):
            import_session(there.conversations, there.store, bad)


def rewritten(file: Path, name: str, change: object) -> None:
    """`file` with one of its parts changed, as somebody would who makes the digests fit."""
    import hashlib

    with zipfile.ZipFile(file) as archive:
        parts = {one: archive.read(one) for one in archive.namelist()}
    values = json.loads(parts[name])
    change(values)  # type: ignore[operator]
    parts[name] = json.dumps(values).encode()
    manifest = json.loads(parts["manifest.json"])
    for one, entry in manifest["files"].items():
        entry["sha256"] = hashlib.sha256(parts[one]).hexdigest()
    parts["manifest.json"] = json.dumps(manifest).encode()
    with zipfile.ZipFile(file, "w") as archive:
        for one, content in parts.items():
            archive.writestr(one, content)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("manifest.json", lambda v: v.update(version=2), "update chatkv"),
        ("manifest.json", lambda v: v.update(format="zip"), "no archive"),
        ("manifest.json", lambda v: v.update(namespace="00" * 32), "another model"),
        ("manifest.json", lambda v: v["layout"].update(num_layers=9), "another model"),
        ("manifest.json", lambda v: v["kv"].update(blocks=9), "9"),
        ("conversation.json", lambda v: v.update(version=99), "update chatkv"),
        ("conversation.json", lambda v: v.update(title=5), "title"),
        ("conversation.json", lambda v: v["turns"][0].update(user=None), "user of turn 1"),
        ("conversation.json", lambda v: v["turns"][0]["reply_ids"].append(-1), "token ids"),
        ("conversation.json", lambda v: v["turns"][0]["prompt_ids"].pop(0), "tokens"),
        ("conversation.json", lambda v: v.update(turns=[[]]), "no turn"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(
    here: Place, there: Place, tmp_path: Path, name: str, change: object, reason: str
) -> None:
    session = talk(here.conversations, here.store, range(2 * B + 5))
    file = tmp_path / "one.chatkv"
    export_session(here.conversations, here.store, session, file)
    rewritten(file, name, change)
    with pytest.raises((StoreDamaged, StoreVersionError), match=reason):
        import_session(there.conversations, there.store, file)
    assert there.conversations.list_sessions() == []
    assert there.store.stats()["blocks"] == 0


def test_kv_without_room_is_left_out_and_said(here: Place, tmp_path: Path) -> None:
    session = talk(here.conversations, here.store, range(300 * B))
    file = tmp_path / "one.chatkv"
    export_session(here.conversations, here.store, session, file)
    with (
        Conversations(tmp_path / "small.sqlite3") as conversations,
        BlockStore(
            tmp_path / "small", budget=Budget(LOCK_BYTES + (1 << 19)), conversations=conversations
        ) as store,
    ):
        taken = import_session(conversations, store, file)
        assert taken.refusal is not None and taken.written_blocks < taken.num_blocks
        assert len(conversations.token_log(session.id)) == 300 * B
        assert (tmp_path / "small" / "data.mdb").stat().st_size <= 1 << 19


def test_an_encrypted_store_gives_and_takes_the_same_file(
    here: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    from chatkv_store import encryption

    session = talk(here.conversations, here.store, range(3 * B))
    file, other = tmp_path / "one.chatkv", tmp_path / "other.chatkv"
    export_session(here.conversations, here.store, session, file)
    key = tmp_path / "key"
    key.write_text("a secret")
    monkeypatch.setenv(encryption.KEY_FILE_VARIABLE, str(key))
    folder = tmp_path / "sealed"
    BlockStore(folder).close()
    encryption.start_empty(folder, b"a secret")
    with (
        Conversations(tmp_path / "sealed.sqlite3") as conversations,
        BlockStore(folder, budget=Budget(64 << 20), conversations=conversations) as store,
    ):
        taken = import_session(conversations, store, file)
        assert taken.written_blocks == 3
        export_session(conversations, store, taken.session, other)
        with zipfile.ZipFile(file) as plain, zipfile.ZipFile(other) as again:
            assert plain.read("kv.bin") == again.read("kv.bin")
    compact(folder)
    with BlockStore(folder) as store:
        ids = list(range(3 * B))
        np.testing.assert_array_equal(restore(store, SMALL, ids), kv_of(SMALL, ids))


def test_a_failed_export_leaves_no_file(here: Place, tmp_path: Path) -> None:
    session = talk(here.conversations, here.store, range(2 * B))
    with pytest.raises(OSError):
        export_session(here.conversations, here.store, session, tmp_path / "no" / "folder")
    here.store.close()
    with pytest.raises(Exception):  # noqa: B017  # a closed store, whatever it raises
        export_session(here.conversations, here.store, session, tmp_path / "one.chatkv")
    assert not list(tmp_path.glob("one.chatkv*"))
