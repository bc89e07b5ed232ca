"""A text as a model predicts it, and how far another way of computing predicts it differently."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

import torch
from torch import Tensor

from chatkv.model.decoder import Decoder

CHUNK_TOKENS = 128  # logits of this many tokens are held at once


@dataclass
class Difference:
    """Sums over predictions."""

    exact_nll: float = 0.0  # negative log likelihood of the text, nats
    nll: float = 0.0
    kl: float = 0.0
    agreed: int = 0

    def add(self, wanted: Tensor, found: Tensor, targets: Tensor) -> None:
        """wanted, found: log probabilities [tokens, vocab_size]; targets: [tokens]."""
        self.exact_nll -= float(wanted.gather(1, targets[:, None]).sum())
        self.nll -= float(found.gather(1, targets[:, None]).sum())
        self.kl += float((wanted.exp() * (wanted - found)).sum())
        self.agreed += int((wanted.argmax(-1) == found.argmax(-1)).sum())

    def perplexity(self, num_tokens: int) -> float:
        return exp(self.nll / num_tokens)

    def exact_perplexity(self, num_tokens: int) -> float:
        return exp(self.exact_nll / num_tokens)


class TextOnModel:
    """One text and its KV, in memory of its own (a `decoder.Span`)."""

    draft = place = None

    def __init__(self, decoder: Decoder, ids: Sequence[int]) -> None:
        self.decoder, self._ids = decoder, ids
        config = decoder.config
        shape = (config.num_layers, 2, config.num_kv_heads, len(ids), config.head_dim)
        self.kv = torch.zeros(shape, dtype=decoder.dtype, device=decoder.device)
        self.start = self.length = 0

    def compute(self, start: int, stop: int) -> Tensor:
        """Logits after each of the tokens [start, stop), [tokens, vocab_size] float32."""
        self.start, self.length = start, stop - start
        new = torch.tensor(self._ids[start:stop], device=self.decoder.device)
        return self.decoder.forward(new, [self], every_position=True)

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        end = self.start + self.length
        self.kv[layer, 0, :, self.start : end] = keys.transpose(0, 1)
        self.kv[layer, 1, :, self.start : end] = values.transpose(0, 1)
        return self.kv[layer, 0, :, :end], self.kv[layer, 1, :, :end]
