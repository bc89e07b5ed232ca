"""Multi-token prediction: small parts behind a decoder that guess the tokens after the next one.

Two kinds. *Modules* (DeepSeek-V3, arXiv 2412.19437 section 2.2) follow one another: each takes
what came out before it at a position and the embedding of a token further on, and is a layer with
KV of its own. *Heads* (Medusa, arXiv 2401.10774) all read what comes out of the decoder, and know
nothing of the tokens in between; they have no KV.

Both share the decoder's embedding and head. Of the head, they may use the rows of a few thousand
tokens only, `vocabulary`: a draft does not need rare ones, and the head of a small model is a
large part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from chatkv.model.batch import Batch, Span, SpanBatch
from chatkv.model.config import ModelConfig
from chatkv.model.decoder import Decoder, Layer, LayerWeights
from chatkv.model.linear import Linear
from chatkv.model.norm import RmsNorm
from chatkv.model.quantised_linear import QuantisedLinear, always_few
from chatkv.model.rope import RopeTable
from chatkv.model.weights import Weight

ModuleBatch = Callable[[Sequence[Span]], Batch]


def module_config(config: ModelConfig) -> ModelConfig:
    """What the layer of a module looks like, behind a decoder of that config."""
    return replace(config, num_layers=1, sliding_window=None)


class SharedHead:
    """Logits over `vocabulary` [num_ids] int64, None: over all of the decoder's."""

    def __init__(self, decoder: Decoder, head: Tensor, vocabulary: Tensor | None) -> None:
        self.vocabulary = vocabulary
        self._linear = decoder.head if vocabulary is None else Linear(head[vocabulary])

    def __call__(self, normed: Tensor) -> Tensor:
        """[num_rows, hidden_size] → [num_rows, num_ids] float32."""
        return self._linear(normed).float()


class Module:
    """One sequential module; weights: as `expected_shapes` of `mtp_file` names them, without the
    prefix of the module."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Weight], rope: RopeTable) -> None:
        self.config = module_config(config)
        named = {name: weight for name, weight in weights.items() if not _is_layer(name)}
        named |= {f"model.layers.0.{n}": w for n, w in weights.items() if _is_layer(n)}
        # The dtype is that of the norms.
        named["model.norm.weight"] = weights["shared_head.norm.weight"]
        made = LayerWeights(named, torch.device("cpu"), few_rows=always_few)

        def norm(name: str) -> RmsNorm:
            return RmsNorm(made.tensor(f"{name}.weight"), config.norm_eps)

        self._rope = rope
        self._embedded_norm, self._hidden_norm = norm("enorm"), norm("hnorm")
        self._projection: Linear | QuantisedLinear = made.linear(["eh_proj"], has_bias=False)
        self._layer = Layer(self.config, made, 0, rope, fused=False)
        self.out_norm = norm("shared_head.norm")

    @torch.inference_mode()
    def forward(self, hidden: Tensor, embedded: Tensor, span: Span) -> Tensor:
        """What comes out at new positions of one sequence, before `out_norm`.

        hidden: [num_new, hidden_size], what came out of the decoder's last norm, or of the module
        before; embedded: the same shape, the embeddings of the tokens further on; span: their KV.
        """
        parts = [self._embedded_norm(embedded), self._hidden_norm(hidden)]
        joined = self._projection(torch.cat(parts, -1))
        return self._layer.forward(joined, SpanBatch([span], self._rope))


class ParallelHead:
    """One head: h + SiLU(W h + b), to be read by the shared head."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self._linear = Linear(weight, bias)

    @torch.inference_mode()
    def forward(self, hidden: Tensor) -> Tensor:
        """[num_rows, hidden_size], out of the decoder's last norm → the same shape."""
        return hidden + F.silu(self._linear(hidden))


@dataclass(frozen=True)
class Predictor:
    """All that guesses behind one decoder: modules or heads, one of both is empty.

    origin: where they came from, as people are told; window: positions that a module looks back
    on, as it was trained.
    """

    head: SharedHead
    embedding: Tensor
    modules: Sequence[Module] = ()
    heads: Sequence[ParallelHead] = ()
    origin: str = ""
    window: int = 256

    @property
    def num_bytes(self) -> int:
        """Of memory, roughly: what its own head takes, which the decoder has already."""
        vocabulary = self.head.vocabulary
        if vocabulary is None:
            return 0
        return len(vocabulary) * self.embedding.shape[1] * self.embedding.element_size()


def _is_layer(name: str) -> bool:
    return name.startswith(("self_attn.", "mlp.", "input_layernorm.", "post_attention_layernorm."))
