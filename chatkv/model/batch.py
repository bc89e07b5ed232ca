"""What the new tokens of a pass attend to: where their KV goes, and where that of the others lies.

The decoder gives a layer's projections to a batch and gets back what its tokens saw. On a CPU each
sequence is contiguous in memory, and one follows the other (`SpanBatch`); on a GPU all lie in
blocks of one pool, and one kernel takes them together (`PagedBatch`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from chatkv.model.config import ModelConfig
from chatkv.model.norm import RmsNorm
from chatkv.model.rope import RopeTable
from chatkv_kernels.attention import (
    decode_attention,
    draft_mask,
    draft_places,
    prefill_attention,
    short_attention,
)
from chatkv_kernels.paged_decode import paged_decode
from chatkv_kernels.paged_prefill import paged_prefill
from chatkv_kernels.rope import rope
from chatkv_kernels.rope_write import rope_write

# Up to so many tokens of each, copying the KV of answers that are about as long costs less than a
# call for each does (bf16, two cores, a step of 16 answers of SmolLM2: of 60 tokens 41 ms one by
# one, 35 together; of 200 49 and 43; of 400 61 and 55). Copies want the shared cache: where other
# machines on the same host had that, 200 tokens took 58 ms and 69, 400 tokens 72 and 98.
_ALIKE_TOKENS = 256
_FEW_TOKENS = 64  # so short that padding to it costs nothing


@dataclass(frozen=True)
class Attention:
    """What attention of one layer is, whatever it attends to. Norms are those of each head."""

    config: ModelConfig
    layer: int
    rope: RopeTable
    query_norm: RmsNorm | None = None
    key_norm: RmsNorm | None = None

    @property
    def scale(self) -> float:
        return float(self.config.head_dim**-0.5)

    @property
    def window(self) -> int | None:
        return self.config.window(self.layer)


class Batch(Protocol):
    """The new tokens of some sequences, one after the other, and the KV of all their tokens."""

    @property
    def ends(self) -> Tensor | None:
        """Each sequence's last new token, as a row of the pass; None: they have one each."""

    def attend(self, attention: Attention, heads: Tensor) -> Tensor:
        """Write the new tokens' KV, and return what each of them sees.

        heads: [num_new, num_heads + 2 num_kv_heads, head_dim], queries, keys and values as they
        were projected. Returns [num_new, num_heads * head_dim].
        """


@dataclass(frozen=True)
class Memory:
    """The KV of many sequences, by layer: [num_kv_heads, num_slots, head_dim] each."""

    keys: Sequence[Tensor]
    values: Sequence[Tensor]


class Span(Protocol):
    """The new tokens of one sequence in a forward pass, and the KV of all its tokens."""

    @property
    def start(self) -> int:
        """Tokens whose KV is already there: the position of the first new token."""

    @property
    def length(self) -> int:
        """New tokens of this pass."""

    @property
    def draft(self) -> Sequence[int] | None:
        """Whether the new tokens are few, such as one of an answer and what is drafted behind it,
        and attend by `short_attention`: then `instead` of `draft_places`, else None."""

    @property
    def place(self) -> tuple[Memory, int] | None:
        """Where all its KV is, and from which slot on; None: only `extend` knows."""

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens' KV ([length, num_kv_heads, head_dim] each) and return views of
        everything up to them ([num_kv_heads, start + length, head_dim] each)."""


class SpanBatch:
    """Sequences one by one, each over views of its own KV (a `Batch`)."""

    def __init__(self, spans: Sequence[Span], table: RopeTable) -> None:
        self._spans = spans
        self._masks: dict[tuple[int, int | None], Tensor] = {}  # by span and window
        self._tokens = _Tokens.among(spans)
        ranges = [_positions(span) for span in spans]
        # cos and signed sin of every new token, [num_new, 1, head_dim] each.
        if len(ranges) == 1:
            self._cos, self._sin = table.cos[ranges[0]], table.signed_sin[ranges[0]]
        else:
            self._cos = torch.cat([table.cos[r] for r in ranges])
            self._sin = torch.cat([table.signed_sin[r] for r in ranges])

    @property
    def ends(self) -> Tensor | None:
        if len(self._spans) == self._cos.shape[0]:
            return None
        ends = torch.tensor([span.length for span in self._spans]).cumsum(0) - 1
        return ends.to(self._cos.device)

    def attend(self, attention: Attention, heads: Tensor) -> Tensor:
        config = attention.config
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        rotated = heads[:, : num_heads + num_kv_heads]
        if attention.query_norm is not None and attention.key_norm is not None:
            rotated = torch.cat(
                [
                    attention.query_norm(rotated[:, :num_heads]),
                    attention.key_norm(rotated[:, num_heads:]),
                ],
                1,
            )
        rotated = rope(rotated, self._cos, self._sin)
        queries, keys = rotated[:, :num_heads], rotated[:, num_heads:]
        values = heads[:, num_heads + num_kv_heads :]
        seen = self._tokens.attend(attention, queries, keys, values) if self._tokens else {}
        out, start = [], 0
        for index, span in enumerate(self._spans):
            if index not in seen:
                part = slice(start, start + span.length)
                seen[index] = self._attend_span(
                    attention, index, queries[part], keys[part], values[part]
                )
            out.append(seen[index])
            start += span.length
        return torch.cat(out) if len(out) > 1 else out[0]

    def _attend_span(
        self, attention: Attention, index: int, queries: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        span, scale, window = self._spans[index], attention.scale, attention.window
        all_keys, all_values = span.extend(attention.layer, keys, values)
        if span.length == 1:
            out = decode_attention(queries[0], all_keys, all_values, scale, window)
        elif span.draft is not None:
            mask = self._mask(index, all_keys, queries, window)
            out = short_attention(queries, all_keys, all_values, scale, mask)
        else:
            out = prefill_attention(queries, all_keys, all_values, scale, window)
        return out.reshape(span.length, -1)

    def _mask(self, index: int, keys: Tensor, queries: Tensor, window: int | None) -> Tensor:
        """Of a span's new tokens, made in the first layer that attends so."""
        if (mask := self._masks.get((index, window))) is None:
            span, group = self._spans[index], queries.shape[1] // keys.shape[0]
            instead = span.draft or ()
            mask = draft_mask(span.length, keys.shape[1], instead, group, window, queries)
            self._masks[index, window] = mask
        return mask


@dataclass(frozen=True)
class _Alike:
    """Spans of one token, about as long, that attend by one call over copies side by side.

    numbers: which of the tokens; slots: [len(numbers) * longest], of all their KV, each padded to
    the longest with its own first; mask: [len(numbers), 1, 1, longest], additive; copies: room for
    keys and values, [num_kv_heads, len(numbers) * longest, head_dim] each, the same in all layers.
    """

    numbers: Sequence[int]
    slots: Tensor
    mask: Tensor
    copies: tuple[Tensor, Tensor]

    @staticmethod
    def among(places: Sequence[tuple[int, int]], kept: Tensor) -> list[_Alike]:
        """In groups where that is faster. In float32 nowhere: there a row's bits do not depend on
        its company, and so it stays. kept: the keys of a layer."""
        if kept.dtype == torch.float32:
            return []
        by_length = sorted(range(len(places)), key=lambda number: -places[number][1])
        short = [number for number in by_length if places[number][1] <= _ALIKE_TOKENS]
        groups: list[_Alike] = []
        while short:
            longest = places[short[0]][1]
            group = [n for n in short if 2 * places[n][1] >= longest or longest <= _FEW_TOKENS]
            short = short[len(group) :]
            if len(group) > 1:
                groups.append(_Alike.of(group, places, kept))
        return groups

    @staticmethod
    def of(numbers: Sequence[int], places: Sequence[tuple[int, int]], kept: Tensor) -> _Alike:
        firsts, lengths = torch.tensor([places[number] for number in numbers]).T[..., None]
        longest = -(-int(lengths.max()) // 16) * 16
        place = torch.arange(longest)
        is_padding = place >= lengths
        mask = kept.new_zeros(is_padding.shape).masked_fill_(is_padding, float("-inf"))
        slots = (firsts + torch.where(is_padding, 0, place)).flatten()
        num_kv_heads, _, head_dim = kept.shape
        keys, values = kept.new_empty(2, num_kv_heads, len(slots), head_dim)
        return _Alike(numbers, slots, mask[:, None, None], (keys, values))

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """[len(numbers), num_heads * head_dim]; queries: of all tokens."""
        count, num_kv_heads, head_dim = len(self.numbers), *keys.shape[::2]

        def side_by_side(kept: Tensor, copy: Tensor) -> Tensor:
            torch.index_select(kept, 1, self.slots, out=copy)
            return copy.view(num_kv_heads, count, -1, head_dim).transpose(0, 1)

        mine = queries[self.numbers].view(count, num_kv_heads, -1, head_dim)
        history = [side_by_side(*pair) for pair in zip((keys, values), self.copies, strict=True)]
        out = F.scaled_dot_product_attention(mine, history[0], history[1], self.mask, scale=scale)
        return out.reshape(count, -1)


@dataclass(frozen=True)
class _Tokens:
    """Spans of one token that lie in one memory: their KV is written at once, and those that are
    about as long attend by one call, others by two views and a call each, where a span alone takes
    a dozen small operations.

    indices: of these spans; rows: of their tokens, None where there are no others; slots: where
    the new KV goes; places: each one's first slot, and how many it has.
    """

    memory: Memory
    indices: Sequence[int]
    rows: Tensor | None
    slots: Tensor
    places: Sequence[tuple[int, int]]
    alike: Sequence[_Alike]

    @staticmethod
    def among(spans: Sequence[Span]) -> _Tokens | None:
        indices, rows, places, start = [], [], [], 0
        memory: Memory | None = None
        for index, span in enumerate(spans):
            place = span.place if span.length == 1 and span.draft is None else None
            if place is not None and (memory is None or memory is place[0]):
                memory, first = place
                indices.append(index)
                rows.append(start)
                places.append((first, span.start + 1))
            start += span.length
        if memory is None:
            return None
        slots = torch.tensor([first + length - 1 for first, length in places])
        are_all = len(rows) == start
        rows_of_them = None if are_all else torch.tensor(rows)
        alike = _Alike.among(places, memory.keys[0])
        return _Tokens(memory, indices, rows_of_them, slots, places, alike)

    def attend(
        self, attention: Attention, queries: Tensor, keys: Tensor, values: Tensor
    ) -> dict[int, Tensor]:
        """What each sees, [1, num_heads * head_dim], by index."""
        if self.rows is not None:
            queries, keys, values = queries[self.rows], keys[self.rows], values[self.rows]
        all_keys = self.memory.keys[attention.layer]
        all_values = self.memory.values[attention.layer]
        all_keys.index_copy_(1, self.slots, keys.transpose(0, 1))
        all_values.index_copy_(1, self.slots, values.transpose(0, 1))
        scale, window = attention.scale, attention.window
        seen: dict[int, Tensor] = {}
        for group in self.alike if window is None or window >= _ALIKE_TOKENS else ():
            out = group.attend(queries, all_keys, all_values, scale)
            for number, row in zip(group.numbers, torch.split(out, 1), strict=True):
                seen[self.indices[number]] = row
        for number, (first, length) in enumerate(self.places):
            if self.indices[number] not in seen:
                history = all_keys.narrow(1, first, length), all_values.narrow(1, first, length)
                row = decode_attention(queries[number], *history, scale, window)
                seen[self.indices[number]] = row.view(1, -1)
        return seen


def _positions(span: Span) -> slice | list[int]:
    if not span.draft:
        return slice(span.start, span.start + span.length)
    return [span.start + place for place in draft_places(span.length, span.draft)]


@dataclass(frozen=True)
class PagedBatch:
    """Sequences whose KV lies in blocks of one pool, in any order (a `Batch`).

    Where each has one new token, nothing here reads a value from the device: such a pass can be
    captured in a CUDA graph, and replayed over other values in the same tensors.

    blocks: [num_blocks, num_layers, 2 (keys, values), num_kv_heads, block_tokens, head_dim];
    positions: [num_new] int32; slots: [num_new] int64, where each new token's KV goes, below 0 for
    a row that stands for nothing; block_table: [num_seqs, max_blocks] int32; lengths: [num_seqs]
    int32, tokens of each sequence, the new ones included, 0 for one that stands for nothing;
    starts: [num_seqs + 1] int32, the rows of sequence i are [starts[i], starts[i + 1]), None where
    each has one; max_new: the most that one has. wait_layer: for KV that is still arriving.
    """

    blocks: Tensor
    positions: Tensor
    slots: Tensor
    block_table: Tensor
    lengths: Tensor
    starts: Tensor | None = None
    max_new: int = 1
    wait_layer: Callable[[int], None] | None = None

    @property
    def ends(self) -> Tensor | None:
        return None if self.starts is None else self.starts[1:].long() - 1

    def attend(self, attention: Attention, heads: Tensor) -> Tensor:
        if self.wait_layer is not None:
            self.wait_layer(attention.layer)
        keys, values = self.blocks[:, attention.layer, 0], self.blocks[:, attention.layer, 1]
        query_norm, key_norm = attention.query_norm, attention.key_norm
        queries = rope_write(
            heads,
            self.positions,
            attention.rope.cos,
            attention.rope.signed_sin,
            keys,
            values,
            self.slots,
            query_norm.weight if query_norm is not None else None,
            key_norm.weight if key_norm is not None else None,
            attention.config.norm_eps,
        )
        history = keys, values, self.block_table
        scale, window = attention.scale, attention.window
        if self.starts is None:
            out = paged_decode(queries, *history, self.lengths, scale, window)
        else:
            out = paged_prefill(
                queries, *history, self.starts, self.lengths, self.max_new, scale, window
            )
        return out.flatten(1)
