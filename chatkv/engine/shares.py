"""Whose prefill a step computes: shares of what running answers can bear."""

from __future__ import annotations

from collections.abc import Sequence

from chatkv.engine.piece import Piece

# Background work that so many steps had no room for takes its share of the next one.
MAX_PASSED_OVER = 32
# Prefill that goes through its layers in several steps goes in slices of so many tokens: short
# enough for a step to take some layers, since it takes whole ones and is to be neither longer nor
# shorter than it may be; long enough to fill the processor. (Of a layer's products a token's part
# takes 63 us in slices of 32, 54 of 64, 50 of 128 and 46 of 512; in float32 on two cores.)
LEAST_SLICE, MOST_SLICE = 32, 256
LAYERS_AT_ONCE = 4
# New tokens times all tokens up to which a prefill that is no longer than a slice attends as a
# draft does: the dozen small operations of a tile take longer than what they compute. (All layers
# of SmolLM2, bf16: 12 tokens 1.4 ms instead of 5.7, 12 behind 500 others 5.6 and 9.8, 32 behind
# 500 11.9 and 13.3, 32 behind 2,000 41 and 31.)
SHORT_PAIRS = 20_000


def is_short(num_new: int, num_tokens: int) -> bool:
    """Whether a prefill attends by `short_attention`. What does is never cut between its tokens, so
    that the company which it has changes none of its bits."""
    return 1 < num_new <= LEAST_SLICE and num_new * num_tokens <= SHORT_PAIRS


def divide(prefills: Sequence[Piece], tokens: float, num_layers: int = 1) -> list[Piece]:
    """Share a step's tokens of prefill: half of them go to whoever has waited longest, so that each
    has its turn, the others to the shortest pieces first, so that most need not wait. Background
    work gets what is left then, unless many steps had nothing left.

    Pieces are cut to their parts, or where a pass may stop between `num_layers` layers, go through
    the number of them that comes nearest: a token through all is worth one through each. One gets a
    layer at least, and one that is short may get twice its share (`_finish`).
    """
    shares: dict[Piece, float] = {}

    def give(piece: Piece, most: float) -> None:
        nonlocal tokens
        share = shares.get(piece, 0)
        part = min(piece.left(num_layers) - share, most)
        if part > 0 and share + part >= _least(piece, num_layers):
            shares[piece] = share + part
            tokens -= part

    groups = [
        [
            piece
            for piece in prefills
            if is_last is (piece.is_background and piece.num_passed_over < MAX_PASSED_OVER)
        ]
        for is_last in (False, True)
    ]
    for group in groups:
        if group:
            give(_oldest(group), (tokens + 1) // 2 if num_layers == 1 else tokens / 2)
        for piece in sorted(group, key=lambda piece: piece.left(num_layers)):
            give(piece, tokens)
    if not shares and tokens > 0 and prefills:
        oldest = _oldest(groups[0] or groups[1])
        shares[oldest] = _least(oldest, num_layers)
    if num_layers > 1:
        _finish(shares, num_layers)
    for piece, share in shares.items():
        _take(piece, share, num_layers)
    return list(shares)


def _finish(shares: dict[Piece, float], num_layers: int) -> None:
    """The oldest short prefill that has time for half of what is left of it gets all: one step that
    takes a little longer is better than two that do, and the answer begins with it. (128 short
    turns, 12 at once: 263 tokens/s instead of 229, p99 TPOT 48 ms instead of 52.)"""
    for piece in sorted(shares, key=lambda piece: piece.since):
        left = piece.left(num_layers)
        if piece.is_short and shares[piece] < left <= 2 * shares[piece]:
            shares[piece] = left
            return


def _oldest(pieces: Sequence[Piece]) -> Piece:
    return min(pieces, key=lambda piece: piece.since)


def _least(piece: Piece, num_layers: int) -> float:
    """What the smallest part of a piece is worth: a token, or a layer."""
    if num_layers == 1:
        return 1
    return (piece.length if piece.layer else min(piece.length, LEAST_SLICE)) / num_layers


def _take(piece: Piece, share: float, num_layers: int) -> None:
    if not piece.layer:
        least = _slice_tokens(share, num_layers) if num_layers > 1 else 1
        piece.stop = min(piece.stop, piece.start + max(int(share), least))
    num_more = round(share * num_layers / piece.length)
    piece.until = min(num_layers, piece.layer + max(1, num_more))


def _slice_tokens(share: float, num_layers: int) -> int:
    """Multiples of the shortest: every other length is a shape more for products to be made for."""
    most = share * num_layers / LAYERS_AT_ONCE
    return min(max(int(most) // LEAST_SLICE * LEAST_SLICE, LEAST_SLICE), MOST_SLICE)
