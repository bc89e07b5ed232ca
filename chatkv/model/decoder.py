"""The decoder of the Llama family: embeddings, layers of attention and MLP, the head.

Knows the arithmetic; does not know where KV lives (a `Batch` writes and reads it), what a
conversation is, or how tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from chatkv.model.batch import Attention, Batch, PagedBatch, Span, SpanBatch
from chatkv.model.config import ModelConfig
from chatkv.model.linear import HalfLinear, Linear, has_half_product
from chatkv.model.norm import RmsNorm
from chatkv.model.quantise import can_join, join, to_device
from chatkv.model.quantised_linear import (
    AnyLinear,
    Beside,
    FewRows,
    QuantisedLinear,
    always_few,
)
from chatkv.model.rope import RopeTable
from chatkv.model.weights import LoadedWeights, Weight, dense_weight
from chatkv_kernels.rms_norm import add_rms_norm
from chatkv_kernels.silu_mul import silu_mul


@dataclass(eq=False)
class Pass:
    """New tokens of one sequence on their way through the layers.

    hidden: [span.length, hidden_size], what the first `layer` layers have made of them.
    """

    span: Span
    hidden: Tensor
    layer: int = 0


class Decoder:
    """One model on one device, ready to compute.

    weights: tensors under their HF checkpoint names, all of one dtype or quantised; max_position:
    how many positions the rotary tables cover; fused: norms and gates are those of
    `chatkv_kernels`, by default everywhere but on a CPU, where the library's own are faster.
    few_rows: of quantised ones, see `QuantisedLinear`. on_progress(done, total) is told of each
    layer whose weights are on the device.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Weight],
        max_position: int | None = None,
        device: torch.device | str = "cpu",
        fused: bool | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        few_rows: FewRows = always_few,
    ) -> None:
        self.config = config
        self.device = torch.device(device)
        fused = self.device.type != "cpu" if fused is None else fused
        made = LayerWeights(weights, self.device, few_rows)
        embedding = made.tensor("model.embed_tokens.weight")
        self.dtype = embedding.dtype
        self.embedding = embedding
        self.norm = RmsNorm(made.tensor("model.norm.weight"), config.norm_eps, fused)
        self.max_position = max_position or config.max_position
        self.rope = RopeTable(config, self.max_position, self.dtype, self.device)
        self.layers: list[Layer] = []
        for index in range(config.num_layers):
            self.layers.append(Layer(config, made, index, self.rope, fused))
            if on_progress is not None:
                on_progress(index + 1, config.num_layers)
        self.head = made.head("model.embed_tokens" if config.tie_embeddings else "lm_head")

    @torch.inference_mode()
    def forward(
        self,
        ids: Tensor,
        attended: Sequence[Span] | PagedBatch,
        every_position: bool = False,
        rows: Tensor | None = None,
        keep: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """Logits after each sequence's last new token: [num_seqs, vocab_size] float32.

        ids: [num_new] integers, the new tokens of one sequence after the other; attended: what
        they attend to. With every_position, the logits after every new token instead: [num_new,
        vocab_size]; with rows [num_rows] of int64, after these of the new tokens. keep: gets what
        comes out of the last norm for every new token, [num_new, hidden_size].
        """
        batch: Batch = (
            attended if isinstance(attended, PagedBatch) else SpanBatch(attended, self.rope)
        )
        hidden = self.through_layers(ids, batch)
        ends = None if every_position else batch.ends if rows is None else rows
        if keep is not None:
            normed = self.norm(hidden)
            keep(normed)
            return self.head(normed if ends is None else normed[ends]).float()
        return self.head(self.norm(hidden if ends is None else hidden[ends])).float()

    @torch.inference_mode()
    def through_layers(self, ids: Tensor, batch: Batch) -> Tensor:
        """What comes out of the last layer, [num_new, hidden_size], before the last norm."""
        return self._through(F.embedding(ids, self.embedding), batch, 0, len(self.layers))

    @torch.inference_mode()
    def begin(self, ids: Tensor, span: Span) -> Pass:
        """The new tokens of one sequence, in front of the first layer. ids: [span.length]."""
        return Pass(span, F.embedding(ids, self.embedding))

    @torch.inference_mode()
    def advance(self, passes: Sequence[Pass], stops: Sequence[int]) -> None:
        """Take each pass through the layers in front of its stop. Those that go through a layer at
        once read its weights together."""
        for first, last in pairwise(sorted({one.layer for one in passes} | set(stops))):
            there = [
                one
                for one, stop in zip(passes, stops, strict=True)
                if one.layer == first and first < stop
            ]
            if there:
                batch = SpanBatch([one.span for one in there], self.rope)
                hidden = torch.cat([one.hidden for one in there])
                hidden = self._through(hidden, batch, first, last)
                lengths = [one.span.length for one in there]
                for one, part in zip(there, torch.split(hidden, lengths), strict=True):
                    one.hidden, one.layer = part, last

    @torch.inference_mode()
    def normed(self, hidden: Sequence[Tensor]) -> Tensor:
        """What the last norm makes of rows, [rows, hidden_size] each, that went through all layers:
        [all rows, hidden_size]."""
        return self.norm(torch.cat(list(hidden)))

    @torch.inference_mode()
    def logits(self, normed: Sequence[Tensor]) -> Tensor:
        """After each of such rows: [all rows, vocab_size] float32."""
        return self.head(torch.cat(list(normed))).float()

    def _through(self, hidden: Tensor, batch: Batch, first: int, last: int) -> Tensor:
        for layer in self.layers[first:last]:
            hidden = layer.forward(hidden, batch)
        return hidden


class LayerWeights:
    """Weights by name, on their device, as what computes with them."""

    def __init__(
        self, weights: Mapping[str, Weight], device: torch.device, few_rows: FewRows
    ) -> None:
        self._weights, self._device, self._few_rows = weights, device, few_rows
        self._dtype = self.tensor("model.norm.weight").dtype
        self._has_fewer_bits = False  # a matrix that was made already
        self._has_halves = device.type == "cpu" and has_half_product()

    def tensor(self, name: str) -> Tensor:
        return dense_weight(self._weights[name]).to(self._device)

    def linear(self, names: Sequence[str], has_bias: bool) -> AnyLinear:
        """Matrices that read the same input, as one, where they are stored alike."""
        matrices = [self._weights[f"{name}.weight"] for name in names]
        quantised = [one for one in matrices if not isinstance(one, Tensor)]
        stored = dense_weight(matrices[0]).dtype if not quantised else None
        are_halves = stored == torch.float16 != self._dtype
        self._has_fewer_bits |= bool(quantised) or are_halves
        if quantised and (len(quantised) < len(names) or not can_join(quantised)):
            return Beside([self.linear([name], has_bias) for name in names])
        bias = torch.cat([self.tensor(f"{name}.bias") for name in names]) if has_bias else None
        if quantised:
            joined = to_device(join(quantised), self._device)
            made: AnyLinear = QuantisedLinear(joined, bias, self._dtype, self._few_rows)
        else:
            dense = torch.cat([self.tensor(f"{name}.weight") for name in names])
            made = self._dense(dense, bias, are_halves)
        self._drop(names)
        return made

    def head(self, name: str) -> Linear | HalfLinear:
        """Made after the layers: in float16 where these have no more bits and it would be wider."""
        weight = self.tensor(f"{name}.weight")
        made = self._dense(weight, None, weight.itemsize > 2 and self._has_fewer_bits)
        if isinstance(made, HalfLinear) or made.packed:
            self._drop([name])  # an embedding's rows come again one by one
        return made

    def _dense(self, weight: Tensor, bias: Tensor | None, is_half: bool) -> Linear | HalfLinear:
        if is_half and self._has_halves:
            return HalfLinear(weight, bias)
        return Linear(weight.to(self._dtype), bias)

    def _drop(self, names: Sequence[str]) -> None:
        """What was copied out of a file need not stay in memory."""
        if isinstance(self._weights, LoadedWeights):
            for name in names:
                self._weights.drop(f"{name}.weight")


class Layer:
    """Attention and MLP of one layer, each behind its norm and added to the residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        weights: LayerWeights,
        index: int,
        rope: RopeTable,
        fused: bool,
    ) -> None:
        prefix = f"model.layers.{index}."

        def joined(names: Sequence[str], has_bias: bool) -> AnyLinear:
            return weights.linear([prefix + name for name in names], has_bias)

        def norm(name: str) -> RmsNorm:
            return RmsNorm(weights.tensor(f"{prefix}{name}.weight"), config.norm_eps, fused)

        self._heads = config.num_heads + 2 * config.num_kv_heads, config.head_dim
        self._fused = fused
        self.attention_norm = norm("input_layernorm")
        self.mlp_norm = norm("post_attention_layernorm")
        self.qkv = joined([f"self_attn.{part}_proj" for part in "qkv"], config.qkv_bias)
        self.output = joined(["self_attn.o_proj"], config.o_bias)
        self.gate_up = joined(["mlp.gate_proj", "mlp.up_proj"], config.mlp_bias)
        self.down = joined(["mlp.down_proj"], config.mlp_bias)
        self.attention = Attention(
            config,
            index,
            rope,
            norm("self_attn.q_norm") if config.qk_norm else None,
            norm("self_attn.k_norm") if config.qk_norm else None,
        )

    def forward(self, hidden: Tensor, batch: Batch) -> Tensor:
        """hidden: [num_new, hidden_size] → the same shape."""
        heads = self.qkv(self.attention_norm(hidden)).view(-1, *self._heads)
        seen = batch.attend(self.attention, heads)
        if self._fused:
            norm = self.mlp_norm
            normed, hidden = add_rms_norm(self.output(seen), hidden, norm.weight, norm.eps)
            return self.down.add(silu_mul(self.gate_up(normed)), hidden)
        hidden = self.output.add(seen, hidden)
        gate, up = self.gate_up(self.mlp_norm(hidden)).chunk(2, -1)
        return self.down.add(F.silu(gate).mul_(up), hidden)
