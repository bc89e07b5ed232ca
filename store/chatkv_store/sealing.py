"""Encryption at rest: what LMDB is given is sealed, and what it gives back is opened.

- Values, headers (token ids included) and the namespaces' records: AES-256-GCM with a fresh random
  nonce each, bound by the associated data to their table and to the key under which they stand. A
  block moved under another block's key, or changed, does not open and is a miss.
- Keys: a block's key is a hash of its tokens, so whoever can guess a text could look for it. They
  are encrypted too (AES-256, deterministic, since they must be found again; they are hashes, so no
  two are alike). The first token ids in `children` go through a small permutation keyed by the
  parent; it hides ids, not that two siblings begin with the same one.
- The `meta` table stays readable: format, counters, and the salt that the key is made with.

Everything above sees the plain transactions' interface and knows nothing of this.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from chatkv_store.errors import StoreError
from chatkv_store.keys import ID_BYTES, KEY_BYTES

NONCE_BYTES, TAG_BYTES = 12, 16
_FIRST = b"\0" * KEY_BYTES  # what a search from the beginning asks for


class Sealer:
    """The keys, derived from one secret of 32 bytes. Needs the package `cryptography`."""

    def __init__(self, secret: bytes) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            raise StoreError(
                "encryption needs the package cryptography: "
                f"{sys.executable} -m pip install cryptography"
            ) from None
        self._data = AESGCM(_derived(secret, b"data"))
        self._names = Cipher(algorithms.AES(_derived(secret, b"names")), modes.ECB())
        self._ids_key = _derived(secret, b"ids")

    def seal(self, context: bytes, data: bytes | memoryview) -> bytes:
        nonce = os.urandom(NONCE_BYTES)
        return nonce + bytes(self._data.encrypt(nonce, bytes(data), context))

    def open(self, context: bytes, sealed: bytes | memoryview) -> bytes:
        """The data, b"" where it was changed or sealed for another context."""
        from cryptography.exceptions import InvalidTag

        sealed = bytes(sealed)
        try:
            opened = self._data.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], context)
        except (InvalidTag, ValueError):
            return b""
        return bytes(opened)

    def hide(self, key: bytes) -> bytes:
        """A key as it stands in the file; what follows its first 32 bytes stays as it is."""
        if key[:KEY_BYTES] == _FIRST:
            return key
        return bytes(self._names.encryptor().update(key[:KEY_BYTES])) + key[KEY_BYTES:]

    def show(self, hidden: bytes) -> bytes:
        """The inverse of `hide`."""
        return bytes(self._names.decryptor().update(hidden[:KEY_BYTES])) + hidden[KEY_BYTES:]

    def hide_entry(self, parent: bytes, entry: bytes) -> bytes:
        """An entry of `children` (first id, then the child's key), or its first id alone."""
        hidden = self._permuted(parent, entry[:ID_BYTES], range(4))
        return hidden + self.hide(entry[ID_BYTES:]) if len(entry) > ID_BYTES else hidden

    def show_entry(self, parent: bytes, hidden: bytes) -> bytes:
        """The inverse of `hide_entry` for a whole entry."""
        first_id = self._permuted(parent, hidden[:ID_BYTES], range(3, -1, -1))
        return first_id + self.show(hidden[ID_BYTES:])

    def _permuted(self, parent: bytes, word: bytes, rounds: range) -> bytes:
        """Four Feistel rounds over two halves of 16 bits; backwards with the rounds reversed."""
        halves = [int.from_bytes(word[:2], "little"), int.from_bytes(word[2:], "little")]
        for number in rounds:
            target = number % 2
            digest = hashlib.blake2b(
                parent + bytes([number]) + halves[1 - target].to_bytes(2, "little"),
                digest_size=2,
                key=self._ids_key,
            )
            halves[target] ^= int.from_bytes(digest.digest(), "little")
        return b"".join(half.to_bytes(2, "little") for half in halves)


class SealedTransaction:
    """An LMDB transaction with the interface that the store uses; `names` are tables by handle."""

    def __init__(self, txn: Any, sealer: Sealer, names: dict[int, str]) -> None:
        self._txn = txn
        self._sealer = sealer
        self._names = names

    def __getattr__(self, name: str) -> Any:
        return getattr(self._txn, name)  # abort, commit, id, stat, drop

    def get(self, key: bytes, db: Any) -> bytes | memoryview | None:
        table = self._names[id(db)]
        found = self._txn.get(self.key_in(table, key), db=db)
        return None if found is None else self.value_out(table, key, found)

    def put(self, key: bytes, value: bytes, db: Any, **options: Any) -> bool:
        table = self._names[id(db)]
        return bool(
            self._txn.put(
                self.key_in(table, key), self.value_in(table, key, value), db=db, **options
            )
        )

    def delete(self, key: bytes, value: bytes = b"", db: Any = None) -> bool:
        table = self._names[id(db)]
        if value:
            value = self.value_in(table, key, value)
        return bool(self._txn.delete(self.key_in(table, key), value, db=db))

    def cursor(self, db: Any) -> _SealedCursor:
        return _SealedCursor(self._txn.cursor(db), self, self._names[id(db)])

    def key_in(self, table: str, key: bytes) -> bytes:
        return key if table == "meta" else self._sealer.hide(key)

    def key_out(self, table: str, key: bytes | memoryview) -> bytes:
        return bytes(key) if table == "meta" else self._sealer.show(bytes(key))

    def value_in(self, table: str, key: bytes, value: bytes) -> bytes:
        if table == "meta":
            return value
        if table == "children":
            return self._sealer.hide_entry(key, value)
        return self._sealer.seal(table.encode() + b"/" + key, value)

    def value_out(self, table: str, key: bytes, value: bytes | memoryview) -> bytes:
        if table == "meta":
            return bytes(value)
        if table == "children":
            return self._sealer.show_entry(key, bytes(value))
        return self._sealer.open(table.encode() + b"/" + key, value)


class _SealedCursor:
    def __init__(self, cursor: Any, txn: SealedTransaction, table: str) -> None:
        self._cursor = cursor
        self._txn = txn
        self._table = table

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)  # first, next, next_dup, next_nodup, delete, count

    def __enter__(self) -> _SealedCursor:
        self._cursor.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._cursor.__exit__(*error)

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        found = self._cursor.first()
        while found:
            yield self.key(), self.value()
            found = self._cursor.next()

    def key(self) -> bytes:
        found = self._cursor.key()
        return self._txn.key_out(self._table, found) if len(found) else b""

    def value(self) -> bytes:
        return self._txn.value_out(self._table, self.key(), self._cursor.value())

    def set_range(self, key: bytes) -> bool:
        return bool(self._cursor.set_range(self._txn.key_in(self._table, key)))

    def set_range_dup(self, key: bytes, value: bytes) -> bool:
        hidden = self._txn.value_in(self._table, key, value)
        return bool(self._cursor.set_range_dup(self._txn.key_in(self._table, key), hidden))

    def set_key_dup(self, key: bytes, value: bytes) -> bool:
        hidden = self._txn.value_in(self._table, key, value)
        return bool(self._cursor.set_key_dup(self._txn.key_in(self._table, key), hidden))


def _derived(secret: bytes, purpose: bytes) -> bytes:
    return hashlib.blake2b(digest_size=32, key=secret, person=purpose).digest()
