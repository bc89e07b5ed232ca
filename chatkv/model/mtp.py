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

from chatkv.model.batch import Span, SpanBatch
from chatkv.model.config import ModelConfig
from chatkv.model.decoder import Decoder, Layer, LayerWeights
from chatkv.model.linear import Linear
from chatkv.model.norm import RmsNorm
from chatkv.model.quantise import KernelWeight, quantise
from chatkv.model.quantised_linear import AnyLinear, Product, QuantisedLinear
from chatkv.model.rope import RopeTable
from chatkv.model.weights import Weight

# Of what a conversation says beside the vocabulary, so much may be drafted; rows of the head for it
# come in such steps, since oneDNN makes a product anew for each number of rows (0.7 ms).
MAX_SAID, SAID_STEP = 1024, 128


def module_config(config: ModelConfig) -> ModelConfig:
    """What the layer of a module looks like, behind a decoder of that config."""
    return replace(config, num_layers=1, sliding_window=None)


class SharedHead:
    """The decoder's head; or, where `vocabulary` [num_ids] of int64 is given, its rows of these, in
    8 bits where they are to be small."""

    def __init__(
        self, decoder: Decoder, rows: Tensor, vocabulary: Tensor | None, is_small: bool = False
    ) -> None:
        self.rows, self.vocabulary = rows, vocabulary
        self._linear: AnyLinear = decoder.head
        if vocabulary is not None:
            chosen = rows[vocabulary]
            can_be_small = is_small and chosen.shape[1] % 16 == 0
            self._linear = _small(chosen) if can_be_small else Linear(chosen)

    def __call__(self, normed: Tensor) -> Tensor:
        """[num_rows, hidden_size] → [num_rows, num_ids]."""
        return self._linear(normed)


def some_rows(weight: KernelWeight, packed: Product, many: Product) -> int:
    """`FewRows`: up to what a step may have accepted. Not measured: that would change no answer."""
    return 8


def _small(weight: Tensor) -> AnyLinear:
    return QuantisedLinear(quantise(weight.float(), "int8"), None, weight.dtype, some_rows)


class DraftHead:
    """The shared head of one conversation: over its vocabulary, and what was said besides. A text
    says its own rare words again, so hardly any is missed.

    Attributes: vocabulary: the ids that logits are of, None: all of them.
    """

    def __init__(self, shared: SharedHead) -> None:
        self._shared, self.vocabulary = shared, shared.vocabulary
        if shared.vocabulary is not None:
            self._is_known = torch.zeros(len(shared.rows), dtype=torch.bool)
            self._is_known[shared.vocabulary] = True
            self._said = shared.rows[:0]  # and zeros behind them, up to a whole step
            self._num_said = 0

    def hear(self, ids: Sequence[int]) -> None:
        """Tokens were said: from now on they are among those that may be drafted."""
        if self.vocabulary is None:
            return
        said = torch.tensor(sorted(set(ids)), dtype=torch.int64)
        new = said[~self._is_known[said]][: MAX_SAID - self._num_said]
        if not len(new):
            return
        self._is_known[new] = True
        self.vocabulary = torch.cat([self.vocabulary, new])
        first, self._num_said = self._num_said, self._num_said + len(new)
        if self._num_said > len(self._said):
            size = -(-self._num_said // SAID_STEP) * SAID_STEP
            more = self._said.new_zeros(size - len(self._said), self._said.shape[1])
            self._said = torch.cat([self._said, more])
        self._said[first : self._num_said] = self._shared.rows[new]

    def __call__(self, normed: Tensor) -> Tensor:
        """[num_rows, hidden_size] → [num_rows, len(vocabulary)] float32."""
        logits = self._shared(normed)
        if self.vocabulary is not None and self._num_said:
            said = F.linear(normed, self._said)[..., : self._num_said]
            logits = torch.cat([logits, said], -1)
        return logits.float()


class Module:
    """One sequential module; weights: as `expected_shapes` of `mtp_file` names them, without the
    prefix of the module."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Weight], rope: RopeTable) -> None:
        self.config = module_config(config)
        named = {name: weight for name, weight in weights.items() if not _is_layer(name)}
        named |= {f"model.layers.0.{n}": w for n, w in weights.items() if _is_layer(n)}
        # The dtype is that of the norms.
        named["model.norm.weight"] = weights["shared_head.norm.weight"]
        made = LayerWeights(named, torch.device("cpu"), few_rows=some_rows)

        def norm(name: str) -> RmsNorm:
            return RmsNorm(made.tensor(f"{name}.weight"), config.norm_eps)

        self._rope = rope
        self._embedded_norm, self._hidden_norm = norm("enorm"), norm("hnorm")
        self._projection = made.linear(["eh_proj"], has_bias=False)
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

    window: positions that a module looks back on, as it was trained.
    """

    head: SharedHead
    embedding: Tensor
    modules: Sequence[Module] = ()
    heads: Sequence[ParallelHead] = ()
    window: int = 256


@dataclass(frozen=True)
class Foresight:
    """That something can guess behind a decoder; `make` reads it, which takes a tenth of a second.

    acceptance: how often its first guess is right in greedy answers, as was measured, or None.
    """

    make: Callable[[], Predictor]
    acceptance: float | None = None


def _is_layer(name: str) -> bool:
    return name.startswith(("self_attn.", "mlp.", "input_layernorm.", "post_attention_layernorm."))
