#!/usr/bin/env python
"""KV codecs: how small they make real KV, how fast they are, and what they cost in quality.

Speed is that of one thread on values as the disk tier cuts them, beside plain zstd and a raw copy.
Ratio and quality are what `chatkv codec measure` reports, for SmolLM2-135M over English text: the
first half of the text is stored, the second half predicted on top of it.
"""

from __future__ import annotations

import pydoc_data.topics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import zstandard
from bench_common import Figure, Options, median_seconds, run, say

from chatkv.model.catalog import find_model
from chatkv.model.decoder import Decoder
from chatkv.model.prepared import prepare
from chatkv.model.rope import inverse_frequencies
from chatkv.model.tokenizer import Tokenizer
from chatkv.model.weights import load_weights
from chatkv.session.codec_quality import CODECS, measure_codecs
from chatkv.session.codec_record import CodecQuality
from chatkv_store import KVLayout
from chatkv_store import codec as codecs

SPEED_TOKENS = 256
REPEATS = 5
RATIO_GOALS = {"lossless": 1.45, "packed": 1.4, "int4": 3.5}
Bits = npt.NDArray[Any]


def measure(options: Options) -> Iterator[Figure]:
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare(find_model(None, Path(folder)), "bfloat16", Path(folder))
        config = prepared.config
        decoder = Decoder(config, load_weights(prepared))
        tokenizer = Tokenizer.from_prepared(prepared)
    layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, "bfloat16")
    frequencies = inverse_frequencies(config)[0].numpy()
    num_tokens = 768 if options.quick else 4096
    text = "\n".join(pydoc_data.topics.topics.values())[: 16 * num_tokens]

    say(f"quality over {num_tokens} tokens")
    measured = measure_codecs(decoder, layout, tokenizer.encode(text)[:num_tokens])
    yield from quality_figures(measured)
    yield from speed_figures(layout, frequencies)


def speed_figures(layout: KVLayout, frequencies: Bits) -> list[Figure]:
    """Every value of some real blocks through every codec, GB of KV per second."""
    from real_kv import smollm2_kv

    say("speed")
    _, bits = smollm2_kv(SPEED_TOKENS)
    values = [
        (start, np.ascontiguousarray(bits[layers.start : layers.stop, :, :, start : start + 64]))
        for start in range(0, SPEED_TOKENS, layout.block_tokens)
        for layers in map(layout.value_layers, range(layout.num_values))
    ]
    size = sum(value.nbytes for _, value in values)
    out = np.empty_like(values[0][1])

    def rate(work: Callable[[], object]) -> float:
        return size / median_seconds(work, REPEATS) / 1e9

    def copy_all() -> None:
        for _, value in values:
            np.copyto(out, value)

    copy = rate(copy_all)
    compressor, decompressor = zstandard.ZstdCompressor(level=3), zstandard.ZstdDecompressor()
    frames = [compressor.compress(value.data) for _, value in values]
    zstd = "plain zstd, level 3"
    zstd_encode = rate(lambda: [compressor.compress(value.data) for _, value in values])
    zstd_decode = rate(lambda: [decompressor.decompress(frame) for frame in frames])
    figures = [
        Figure("copy, 1 thread", copy, "GB/s"),
        Figure("plain zstd size", size / sum(map(len, frames)), "x smaller"),
    ]
    for name in CODECS:
        coder = codecs.by_name(name)
        contexts = [codecs.Context("bfloat16", start, frequencies) for start, _ in values]

        def encode(coder: codecs.Codec = coder, contexts: list[Any] = contexts) -> list[bytes]:
            pairs = zip(values, contexts, strict=True)
            return [coder.encode(value, context) for (_, value), context in pairs]

        staged = [codecs.staged([payload]) for payload in encode()]

        def decode(coder: codecs.Codec = coder, staged: list[Any] = staged) -> None:
            for payloads in staged:
                coder.decode(payloads, out)

        figures += [
            Figure(f"{name} encode, 1 thread", rate(encode), "GB/s", zstd_encode, zstd),
            Figure(f"{name} decode, 1 thread", rate(decode), "GB/s", zstd_decode, zstd),
        ]
    return figures


def quality_figures(measured: list[CodecQuality]) -> list[Figure]:
    figures = []
    for quality in measured:
        name = quality.codec
        figures.append(
            Figure(
                f"{name} size",
                quality.ratio,
                "x smaller",
                goal=RATIO_GOALS.get(name),
                goal_of="value",
                note=f"of the first {quality.num_tokens} tokens; the 4 that are kept whole weigh "
                "less in longer ones"
                if name == "int4"
                else None,
            )
        )
        if quality.is_bit_exact:
            continue
        goals = (0.3, 0.01) if name == "int4" else (None, None)
        figures += [
            Figure(
                f"{name} perplexity change",
                100 * quality.perplexity_change,
                "%",
                goal=goals[0],
                goal_of="value",
                goal_is="<=",
                note=f"{quality.exact_perplexity:.3f} with exact KV, {quality.num_tokens} tokens",
            ),
            Figure(f"{name} KL", quality.kl, "nats", goal=goals[1], goal_of="value", goal_is="<="),
            Figure(f"{name} top-1 agreement", 100 * quality.top1_agreement, "%"),
        ]
    return figures


if __name__ == "__main__":
    assert __doc__ is not None
    run(__doc__.splitlines()[0], measure)
