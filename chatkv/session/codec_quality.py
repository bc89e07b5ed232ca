"""What a KV codec costs a model: ratio, perplexity, KL and agreement, measured on a text.

The first half of the text is what a session would have on disk: its KV goes block by block through
the codec and back. The second half is computed on top of that, as the next turn would be, and its
predictions are held against those on top of the KV as it was. The KV of the second half is the
computation's own in each case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from chatkv.errors import UsageError
from chatkv.model.decoder import Decoder
from chatkv.model.rope import inverse_frequencies
from chatkv.session.codec_record import CodecQuality
from chatkv.session.predictions import CHUNK_TOKENS, Difference, TextOnModel
from chatkv_store import codec as codecs
from chatkv_store.layout import KVLayout

CODECS = ("raw", "lossless", "packed", "int8", "fp8", "int4")


def measure_codecs(
    decoder: Decoder,
    layout: KVLayout,
    ids: Sequence[int],
    names: Sequence[str] = CODECS,
    on_progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> list[CodecQuality]:
    """The quality of each codec of `names` on the text `ids`.

    Raises UsageError where the text has fewer than two blocks or does not fit the model's context.
    """
    half = len(ids) // 2 // layout.block_tokens * layout.block_tokens
    if not half:
        raise UsageError(
            f"the text has {len(ids)} tokens, and at least {2 * layout.block_tokens} are needed "
            "to measure codecs: give a longer one with --text"
        )
    if len(ids) > decoder.max_position:
        raise UsageError(f"the text has {len(ids)} tokens, the model reads {decoder.max_position}")
    exact = TextOnModel(decoder, ids)
    for start in range(0, half, CHUNK_TOKENS):
        exact.compute(start, min(start + CHUNK_TOKENS, half))
        on_progress("reading the text", min(start + CHUNK_TOKENS, half), half)

    coded: dict[str, _Coded] = {}
    for name in names:
        sequence = TextOnModel(decoder, ids)
        ratio, is_exact = _through_codec(name, layout, exact, sequence, half)
        # Equal bits give equal predictions; they need not be computed twice.
        coded[name] = _Coded(ratio, is_exact, None if is_exact else sequence, Difference())

    scored = len(ids) - 1 - half  # the last token has nothing to predict
    for start in range(half, len(ids) - 1, CHUNK_TOKENS):
        stop = min(start + CHUNK_TOKENS, len(ids) - 1)
        targets = torch.tensor(ids[start + 1 : stop + 1], device=decoder.device)
        wanted = exact.compute(start, stop).log_softmax(-1)
        for one in coded.values():
            found = one.sequence.compute(start, stop).log_softmax(-1) if one.sequence else wanted
            one.difference.add(wanted, found, targets)
        on_progress("measuring", stop - half, scored)
    return [one.quality(name, scored) for name, one in coded.items()]


@dataclass
class _Coded:
    """A codec, and the sequence whose first half has been through it."""

    ratio: float
    is_exact: bool
    sequence: TextOnModel | None
    difference: Difference

    def quality(self, name: str, num_tokens: int) -> CodecQuality:
        sums = self.difference
        return CodecQuality(
            codec=name,
            ratio=self.ratio,
            perplexity=sums.perplexity(num_tokens),
            exact_perplexity=sums.exact_perplexity(num_tokens),
            kl=max(0.0, sums.kl / num_tokens),  # a rounding below zero means zero
            top1_agreement=sums.agreed / num_tokens,
            num_tokens=num_tokens,
            is_bit_exact=self.is_exact,
        )


def _through_codec(
    name: str, layout: KVLayout, source: TextOnModel, target: TextOnModel, num_tokens: int
) -> tuple[float, bool]:
    """Fill the first num_tokens tokens of `target` with what the codec makes of `source`'s.

    Cut into blocks and values as the disk tier does. Returns the ratio, and whether every bit is
    as it was.
    """
    coder = codecs.by_name(name)
    frequencies = inverse_frequencies(source.decoder.config)[0].numpy()
    kind = torch.uint32 if source.kv.dtype == torch.float32 else torch.uint16
    bits = source.kv[:, :, :, :num_tokens].cpu().contiguous().view(kind).numpy()
    decoded = np.empty_like(bits)
    num_bytes = 0
    for start in range(0, num_tokens, layout.block_tokens):
        context = codecs.Context(layout.dtype, start, frequencies)
        tokens = slice(start, start + layout.block_tokens)
        for group in range(layout.num_values):
            layers = layout.value_layers(group)
            part = np.s_[layers.start : layers.stop, :, :, tokens]
            payload = coder.encode(bits[part], context)
            num_bytes += len(payload)
            coder.decode(codecs.staged([payload]), decoded[part])
    target.kv[:, :, :, :num_tokens] = torch.from_numpy(decoded).view(source.kv.dtype)
    return bits.nbytes / num_bytes, bool(np.array_equal(bits, decoded))
