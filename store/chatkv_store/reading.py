"""Reading the values of stored blocks: each is verified before its first byte is believed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from chatkv_store import header as headers
from chatkv_store.chain import RunResult, StoredBlock
from chatkv_store.environment import DATA_FILE, Environment
from chatkv_store.errors import BlockMiss, StoreError
from chatkv_store.header import BlockHeader
from chatkv_store.residency import ValuePages
from chatkv_store.tables import value_key, wrong_length

if TYPE_CHECKING:
    from chatkv_store.payloads import Bits, Bytes

# So many tell for all values of a history whether they are in memory; each look may read a page of
# the tree.
SAMPLED_VALUES = 16


class StoredValues:
    """What a block store reads its blocks by. A block that a read finds damaged is remembered."""

    env: Environment
    db: dict[str, Any]
    _bad: set[bytes]  # keys of blocks that a read found damaged

    def read(self, block: StoredBlock, group: int, out: Bits) -> int:
        """Decode value `group` of `block` into `out`; returns the payload bytes read.

        `out` is [layers, 2, heads, >= block.num_tokens, head_dim] of the layout's bits, any
        strides; its first `block.num_tokens` tokens are written. Raises BlockMiss on anything
        wrong, before the first byte of `out` changes.
        """
        target = out[:, :, :, : block.num_tokens]
        if block.num_tokens == block.header.num_tokens:
            done = self.read_run([block], group, target)
        else:
            whole = _empty_value(block.header, group)
            done = self.read_run([block], group, whole)
            if done.miss is None:
                target[...] = whole[:, :, :, : block.num_tokens]
        if done.miss is not None:
            raise BlockMiss(done.miss)
        return done.num_bytes

    def read_run(self, blocks: Sequence[StoredBlock], group: int, out: Bits) -> RunResult:
        """Decode value `group` of equally long blocks side by side, up to the first bad one.

        `out` is [layers, 2, heads, len(blocks) * tokens, head_dim], any strides. The blocks are
        read whole, whatever their `num_tokens`.

        A run exists for speed. Each call that releases the interpreter lock must get it back, and
        with two threads that took half of the time; a run makes fewer calls for the same bytes.
        """
        from chatkv_store import codec

        first = blocks[0].header
        tokens = first.num_tokens
        if out.shape != first.layout.value_shape(group, len(blocks) * tokens):
            raise ValueError(f"cannot read value {group} of {len(blocks)} blocks into {out.shape}")
        assert all((b.header.num_tokens, b.header.codec) == (tokens, first.codec) for b in blocks)
        decoder = codec.by_id(first.codec)
        if decoder is None:
            return RunResult(0, 0, f"codec {first.codec} is unknown to this version")
        num_read = num_bytes = 0
        try:
            with self.env.read() as txn:
                payloads, miss = self._verified(txn, blocks, group)
                while payloads:
                    try:
                        decoder.decode(payloads, out[:, :, :, : len(payloads) * tokens])
                        break
                    except codec.PayloadDamaged as error:
                        miss = f"value {group} is damaged: {error}"
                        payloads = payloads[: error.index]
                num_read, num_bytes = len(payloads), sum(payload.nbytes for payload in payloads)
        except StoreError as error:
            miss = f"value {group} is {error}"
        if miss is not None:
            self._bad.add(blocks[num_read].key)
        return RunResult(num_read, num_bytes, miss)

    def fetch(
        self, blocks: Sequence[StoredBlock], group: int, out: Bytes
    ) -> tuple[RunResult, list[int]]:
        """Value `group` of blocks up to the first bad one as it is stored, verified, for somebody
        else to decode: copied into `out`, and where each payload begins, at multiples of 8.

        `out` is uint8, with room for all of them.
        """
        num_bytes, miss = 0, None
        starts: list[int] = []
        try:
            with self.env.read() as txn:
                payloads, miss = self._verified(txn, blocks, group)
                at = 0
                for payload in payloads:
                    out[at : at + payload.size] = payload
                    starts.append(at)
                    num_bytes += payload.size
                    at += -(-payload.size // 8) * 8
        except StoreError as error:
            miss = f"value {group} is {error}"
        if miss is not None:
            self._bad.add(blocks[len(starts)].key)
        return RunResult(len(starts), num_bytes, miss), starts

    def cold_share(self, blocks: Sequence[StoredBlock]) -> float | None:
        """Of the bytes of these blocks' values, the share that has to come from the disk, by a
        sample of them; None where nobody can tell. Reads no value."""
        if not blocks or self.env.sealer is not None or not self.env.snapshots_hold:
            return None  # what is read is a copy: where that came from does not show
        in_memory = pages = 0
        try:
            with self.env.read() as txn, (self.env.path / DATA_FILE).open("rb") as file:
                values = ValuePages(file.fileno(), txn.id(), self.env.page_bytes, b"values")
                for number in range(SAMPLED_VALUES):
                    block = blocks[number * len(blocks) // SAMPLED_VALUES]
                    group = number % len(block.header.values)
                    seen = values.in_memory(value_key(block.key, group))
                    if seen is not None:
                        in_memory, pages = in_memory + seen[0], pages + seen[1]
        except (StoreError, OSError):
            return None
        return 1 - in_memory / pages if pages else None

    def payloads(self, block: StoredBlock) -> list[bytes]:
        """The encoded values of a stored block, each verified. Raises BlockMiss."""
        found = []
        for group in range(len(block.header.values)):
            with self.env.read() as txn:
                payloads, miss = self._verified(txn, [block], group)
                if miss is not None:
                    raise BlockMiss(miss)
                found.append(payloads[0].tobytes())
        return found

    def _verified(
        self, txn: Any, blocks: Sequence[StoredBlock], group: int
    ) -> tuple[list[Bytes], str | None]:
        """Value `group` of the blocks before the first bad one, and what is wrong with that.

        They lie in the map, and are good until the transaction ends. Until then nobody writes to
        their pages, so what is digested is what will be decoded; a copy would only take time. Pages
        that are not in memory yet are waited for here, without the interpreter's lock, which the
        digest releases.
        """
        import numpy as np

        payloads: list[Bytes] = []
        for block in blocks:
            entry = block.header.values[group]
            stored = txn.get(value_key(block.key, group), db=self.db["values"])
            miss = wrong_length(stored, entry)
            if miss is not None:
                return payloads, f"value {group} is {miss}"
            if not self.env.snapshots_hold:
                stored = bytes(stored)
            if headers.digest(stored) != entry.digest:
                return payloads, f"value {group} is damaged: its digest differs"
            payloads.append(np.frombuffer(stored, np.uint8))
        return payloads, None


def _empty_value(header: BlockHeader, group: int) -> Bits:
    import numpy as np

    layout = header.layout
    return np.empty(layout.value_shape(group, header.num_tokens), layout.bits_dtype)
