"""One conversation as one file that can be taken elsewhere: text, tokens and KV, all with digests.

A zip file, nothing compressed, so that standard tools can look into it:

    conversation.json   what `sessions show --json` prints: text, token ids, seeds, every turn
    kv.bin              block after block: u32 (little-endian) length of its header, the header
                        (header.py), then its values in order, whose lengths the header holds
    manifest.json       {"format", "version", "session", "model", "namespace", "layout",
                         "kv": {"blocks", "tokens", "bytes"},
                         "files": {name: {"bytes", "sha256"}}}

Reading verifies everything before anything is stored: both files by their SHA-256, each block by
its own digests, and that it belongs where the conversation's tokens say. What cannot be verified
is that KV was computed by the model it names: import from people you trust, or the text alone.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from chatkv_store import header as headers
from chatkv_store.errors import StoreDamaged, StoreVersionError
from chatkv_store.header import BlockHeader, HeaderDamaged
from chatkv_store.keys import chain_keys, pack_ids
from chatkv_store.layout import KVLayout

if TYPE_CHECKING:
    from chatkv_store.saving import Encoded

FORMAT, VERSION = "chatkv-archive", 1
MANIFEST, CONVERSATION, KV = "manifest.json", "conversation.json", "kv.bin"
MAX_JSON_BYTES = 1 << 30
_LENGTH = struct.Struct("<I")
_MAX_HEADER_BYTES = 1 << 24
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Manifest:
    """What an archive says of itself; `namespace` and `layout` None where it holds no KV."""

    session: str
    model: str
    namespace: bytes | None
    layout: KVLayout | None
    num_blocks: int
    files: dict[str, dict[str, Any]]


class ArchiveWriter:
    """Writes one archive, piece by piece; `finish` makes it whole."""

    def __init__(self, file: IO[bytes]) -> None:
        self._zip = zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True)
        self._files: dict[str, dict[str, Any]] = {}

    def add_conversation(self, values: dict[str, Any]) -> None:
        text = json.dumps(values, ensure_ascii=False).encode()
        self._zip.writestr(CONVERSATION, text)
        self._files[CONVERSATION] = {
            "bytes": len(text),
            "sha256": hashlib.sha256(text).hexdigest(),
        }

    def add_blocks(self, blocks: Iterator[Encoded]) -> tuple[int, int]:
        """Returns how many blocks came, and their tokens."""
        digest, size, num_blocks, num_tokens = hashlib.sha256(), 0, 0, 0
        with self._zip.open(KV, "w", force_zip64=True) as out:
            for block in blocks:
                packed = block.header.pack()
                for piece in (_LENGTH.pack(len(packed)), packed, *block.payloads):
                    out.write(piece)
                    digest.update(piece)
                    size += len(piece)
                num_blocks, num_tokens = num_blocks + 1, num_tokens + block.header.num_tokens
        self._files[KV] = {"bytes": size, "sha256": digest.hexdigest()}
        return num_blocks, num_tokens

    def finish(self, manifest: dict[str, Any]) -> None:
        whole = {"format": FORMAT, "version": VERSION, **manifest, "files": self._files}
        self._zip.writestr(MANIFEST, json.dumps(whole, ensure_ascii=False, indent=1))
        self._zip.close()


class ArchiveReader:
    """One archive, whose `verify` must have passed before `blocks` is believed.

    Every method raises StoreDamaged or StoreVersionError, in one line that names the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._zip = zipfile.ZipFile(path)
            self.manifest = self._read_manifest()
        except (zipfile.BadZipFile, KeyError, ValueError, TypeError, AttributeError) as error:
            raise StoreDamaged(f"{path} is no archive of chatkv ({error})") from None

    def close(self) -> None:
        self._zip.close()

    def __enter__(self) -> ArchiveReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def conversation(self) -> dict[str, Any]:
        """The conversation's values, their digest verified."""
        text = self._read(CONVERSATION)
        if hashlib.sha256(text).hexdigest() != self.manifest.files[CONVERSATION]["sha256"]:
            raise self._damaged(f"the digest of {CONVERSATION} differs")
        try:
            values = json.loads(text)
        except ValueError as error:
            raise self._damaged(f"{CONVERSATION}: {error}") from None
        if not isinstance(values, dict):
            raise self._damaged(f"{CONVERSATION} is no conversation")
        return values

    def verify_kv(self, token_ids: list[int]) -> int:
        """Check every block against its digests and the conversation's tokens; returns the bytes
        of all values."""
        if self.manifest.layout is None:
            return 0
        digest, num_blocks, num_bytes = hashlib.sha256(), 0, 0
        places = self._places(token_ids)
        for header, payloads, packed in self._records(digest):
            self._check_place(header, places, token_ids)
            for payload, entry in zip(payloads, header.values, strict=True):
                if headers.digest(payload) != entry.digest:
                    raise self._damaged(f"block {num_blocks} of {KV} is damaged: digest differs")
            del packed
            num_blocks, num_bytes = num_blocks + 1, num_bytes + header.num_payload_bytes
        if digest.hexdigest() != self.manifest.files[KV]["sha256"]:
            raise self._damaged(f"the digest of {KV} differs")
        if num_blocks != self.manifest.num_blocks:
            raise self._damaged(f"{num_blocks} blocks, not {self.manifest.num_blocks}")
        return num_bytes

    def blocks(self) -> Iterator[Encoded]:
        """Every block, in the order of the tokens; one at a time is in memory."""
        from chatkv_store.saving import Encoded

        if self.manifest.layout is not None:
            for header, payloads, _ in self._records(hashlib.sha256()):
                yield Encoded(header.key, header, payloads)

    def _records(self, digest: Any) -> Iterator[tuple[BlockHeader, list[bytes], bytes]]:
        try:
            with self._zip.open(KV) as source:
                while length := source.read(_LENGTH.size):
                    digest.update(length)
                    (size,) = _LENGTH.unpack(length)
                    if size > _MAX_HEADER_BYTES:
                        raise self._damaged(f"a header of {size} bytes in {KV}")
                    packed = source.read(size)
                    digest.update(packed)
                    header = headers.unpack(packed)
                    payloads = [self._exactly(source, v.num_bytes) for v in header.values]
                    for payload in payloads:
                        digest.update(payload)
                    yield header, payloads, packed
        except (zipfile.BadZipFile, KeyError, struct.error, HeaderDamaged, EOFError) as error:
            raise self._damaged(f"{KV}: {error}") from None

    def _exactly(self, source: IO[bytes], num_bytes: int) -> bytes:
        pieces, left = [], num_bytes  # in pieces: a header may claim more than the file has
        while left:
            piece = source.read(min(left, _PIECE_BYTES))
            if not piece:
                raise self._damaged(f"{KV} is cut short")
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)

    def _places(self, token_ids: list[int]) -> dict[bytes, int]:
        """Where blocks begin, by the key of what stands before them."""
        assert self.manifest.layout is not None and self.manifest.namespace is not None
        block_tokens = self.manifest.layout.block_tokens
        keys = chain_keys(self.manifest.namespace, token_ids, block_tokens)
        return {
            parent: index * block_tokens
            for index, parent in enumerate([self.manifest.namespace, *keys[:-1]])
        }

    def _check_place(
        self, header: BlockHeader, places: dict[bytes, int], token_ids: list[int]
    ) -> None:
        from chatkv_store.codec import by_id

        manifest = self.manifest
        if header.namespace != manifest.namespace or header.layout != manifest.layout:
            raise self._damaged("a block belongs to another model than the conversation")
        if len(header.values) != header.layout.num_values:
            raise self._damaged("a block has not as many values as its layout")
        if by_id(header.codec) is None:
            raise StoreVersionError(
                f"{self.path}: codec {header.codec} is unknown to this version; update chatkv, or "
                "import with --text-only"
            )
        start = places.get(header.parent)
        own = b""
        if start is not None:
            stop = start + min(header.num_tokens, header.layout.block_tokens)
            own = pack_ids(token_ids[start:stop])
        if not own or header.ids != own:
            raise self._damaged("a block is not of this conversation's tokens")

    def _read(self, name: str) -> bytes:
        try:
            info = self._zip.getinfo(name)
            if info.file_size > MAX_JSON_BYTES:
                raise self._damaged(f"{name} has {info.file_size} bytes")
            return self._zip.read(name)
        except (zipfile.BadZipFile, KeyError, EOFError) as error:
            raise self._damaged(f"{name}: {error}") from None

    def _read_manifest(self) -> Manifest:
        values = json.loads(self._read(MANIFEST))
        if values["format"] != FORMAT:
            raise ValueError(f"format {values['format']!r}")
        if values["version"] > VERSION:
            raise StoreVersionError(
                f"{self.path} has format {values['version']}, this program knows {VERSION}; "
                "update chatkv"
            )
        kv = values.get("kv")
        namespace = bytes.fromhex(values["namespace"]) if kv else None
        layout = KVLayout(**values["layout"]) if kv else None
        files = values["files"]
        for name in (CONVERSATION, *([KV] if kv else [])):
            str(files[name]["sha256"])
        return Manifest(
            str(values["session"]),
            str(values["model"]),
            namespace,
            layout,
            int(kv["blocks"]) if kv else 0,
            files,
        )

    def _damaged(self, reason: str) -> StoreDamaged:
        return StoreDamaged(f"{self.path} does not verify: {reason}")
