"""Turning the KV cache's encryption on and off, and finding its secret.

The secret is a passphrase: the content of the file that CHATKV_KEY_FILE names, else what the
system's keyring holds (where the package `keyring` is installed). The key is made from it by scrypt
with a salt of the store's own; a sealed constant beside the salt tells a wrong passphrase at once.

Turning it on or off starts an empty cache: KV can always be computed again, and what was written
before is overwritten first. Conversations are not encrypted by this.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import lmdb

from chatkv_store.environment import DATA_FILE, LOCK_FILE, Environment
from chatkv_store.errors import StoreError, StoreLocked, StoreReadOnly
from chatkv_store.sealing import Sealer
from chatkv_store.tables import DATABASES, STORE_FORMAT
from chatkv_store.users import Users

KEY_FILE_VARIABLE = "CHATKV_KEY_FILE"
KEYRING_SERVICE, KEYRING_USER = "chatkv", "kv-cache"
CRYPTO = b"crypto"  # its entry in the `meta` table
_CHECK = b"chatkv"
# 32 MiB and about 0.1 s for each guess (RFC 7914 calls N=2^14 interactive, in 2009).
_SCRYPT = {"n": 1 << 15, "r": 8, "p": 1}
_PIECE_BYTES = 1 << 20


def find_passphrase() -> bytes | None:
    """From the key file or the keyring; None where neither has one."""
    named = os.environ.get(KEY_FILE_VARIABLE)
    if named:
        try:
            content = Path(named).read_bytes().strip()
        except OSError as error:
            raise StoreLocked(f"{KEY_FILE_VARIABLE}={named}: {error.strerror}") from None
        if not content:
            raise StoreLocked(f"{KEY_FILE_VARIABLE}={named}: the file is empty")
        return content
    try:
        import keyring  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return None
    try:
        found = keyring.get_password(KEYRING_SERVICE, KEYRING_USER)
    except Exception:  # a keyring that is locked or absent has errors of its own kinds
        return None
    return str(found).encode() if found else None


def sealer_of(env: Environment) -> Sealer | None:
    """What opens the store, None for one that is not encrypted. Raises StoreLocked."""
    with env.read() as txn:
        stored = txn.get(CRYPTO, db=env.databases["meta"])
        record = None if stored is None else bytes(stored)
    if record is None:
        return None
    passphrase = find_passphrase()
    if passphrase is None:
        raise StoreLocked(
            f"the KV cache in {env.path} is encrypted: let {KEY_FILE_VARIABLE} name the file with "
            "its passphrase"
        )
    try:
        kdf: dict[str, Any] = json.loads(record)
        sealer = Sealer(_key(passphrase, kdf))
        opened = sealer.open(b"check", bytes.fromhex(kdf["check"]))
    except (ValueError, KeyError, TypeError) as error:
        raise StoreLocked(f"{env.path}: how it is encrypted is unreadable ({error})") from None
    if opened != _CHECK:
        raise StoreLocked(f"wrong passphrase for the KV cache in {env.path}")
    return sealer


def start_empty(path: Path, passphrase: bytes | None) -> None:
    """An empty store, encrypted where there is a passphrase; what was there is overwritten.

    Raises StoreBusy where anybody has it open, and StoreReadOnly.
    """
    record = None if passphrase is None else _new_record(passphrase)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        users = Users(path, alone=True)
    except OSError as error:
        raise StoreReadOnly(f"{path} cannot be written: {error.strerror}") from None
    try:
        _overwrite(path / DATA_FILE)
        for name in (DATA_FILE, LOCK_FILE):
            (path / name).unlink(missing_ok=True)
        with (
            lmdb.open(str(path), max_dbs=len(DATABASES), mode=0o600) as env,
            env.begin(write=True) as txn,
        ):
            tables = {
                name: env.open_db(name.encode(), txn=txn, **options)
                for name, options in DATABASES.items()
            }
            txn.put(b"format", b"%d" % STORE_FORMAT, db=tables["meta"])
            if record is not None:
                txn.put(CRYPTO, record, db=tables["meta"])
    except (OSError, lmdb.Error) as error:
        raise StoreError(f"the KV cache in {path} cannot be written: {error}") from None
    finally:
        users.leave()


def _new_record(passphrase: bytes) -> bytes:
    kdf: dict[str, Any] = {"kdf": "scrypt", **_SCRYPT, "salt": os.urandom(16).hex()}
    kdf["check"] = Sealer(_key(passphrase, kdf)).seal(b"check", _CHECK).hex()
    return json.dumps(kdf).encode()


def _key(passphrase: bytes, kdf: dict[str, Any]) -> bytes:
    n, r, p = int(kdf["n"]), int(kdf["r"]), int(kdf["p"])
    return hashlib.scrypt(
        passphrase,
        salt=bytes.fromhex(kdf["salt"]),
        n=n,
        r=r,
        p=p,
        maxmem=256 * n * r,
        dklen=32,
    )


def _overwrite(path: Path) -> None:
    if not path.is_file():
        return
    with path.open("r+b", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        for start in range(0, size, _PIECE_BYTES):
            os.pwrite(file.fileno(), bytes(min(_PIECE_BYTES, size - start)), start)
        os.fsync(file.fileno())
