"""Modules and heads as they are trained: the arithmetic of `chatkv.model.mtp` over whole
conversations, in operations that have gradients.

A module is trained on what it will meet: behind tokens that were computed by the model it drafts
the next one from the model's own output, and the ones behind that from its own. So a pass goes as
far as it is to draft; what drafts a token attends to the rows of the tokens before it as they are
when the model has computed them, and to those of the draft that it belongs to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chatkv.model.config import ModelConfig
from chatkv.model.decoder import Decoder
from chatkv.model.mtp_file import head_prefix, head_shapes, module_prefix, module_shapes
from chatkv_kernels.rope import rope


class ModuleNetwork(nn.Module):
    """One module, which begins with what the last layer of the model looks at. `fit` solves for all
    that is linear in what comes out, which takes seconds; training goes on from there."""

    def __init__(self, decoder: Decoder, last_layer: dict[str, Tensor]) -> None:
        super().__init__()
        self.config = decoder.config
        self._cos, self._sin = decoder.rope.cos.float(), decoder.rope.signed_sin.float()
        start = {
            name: last_layer[name] for name in module_shapes(self.config) if name in last_layer
        }
        hidden, final = self.config.hidden_size, decoder.norm.weight.float()
        start["enorm.weight"] = start["hnorm.weight"] = torch.ones(hidden)
        start["shared_head.norm.weight"] = torch.ones(hidden)
        start["eh_proj.weight"] = torch.zeros(hidden, 2 * hidden)
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            start[name] = torch.zeros_like(start[name])
        # That layer has read what the last norm has not weighed yet.
        unweighed = torch.where(final.abs() > 0.05, final, 0.05)
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            start[name] = start[name].float() / unweighed * final.pow(2).mean().sqrt()
        self.weights = nn.ParameterDict(
            {name.replace(".", "/"): nn.Parameter(w.float().clone()) for name, w in start.items()}
        )

    def steps(self, hidden: Tensor, embedded: Tensor, count: int) -> list[Tensor]:
        """What comes out for the shared head, of each of `count` drafted tokens in turn.

        hidden, embedded: [num_seqs, length, hidden_size], of the same tokens. Row i of step s is
        what is known once token i + s is: it guesses the token behind that. Rows of later steps
        are fewer by one each.
        """
        outs, keys, values, inputs = [], [], [], hidden[:, :-1]
        for step in range(count):
            length = inputs.shape[1]
            joined = self._joined(inputs, embedded[:, step + 1 : step + 1 + length])
            out = self._layer(joined @ self._of("eh_proj.weight").T, step, keys, values)
            outs.append(self._norm(out, "shared_head.norm.weight"))
            inputs = out[:, :-1]
        return outs

    @torch.no_grad()
    def fit(self, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Make what comes out the best guess, by least squares, at what comes out of the model at
        the next position: first from its two inputs, then by attention, then by the MLP.

        batches: hidden and embedded as for `steps`, each of one conversation.
        """
        wanted = torch.cat([hidden[0, 1:] for hidden, _ in batches])
        inputs = torch.cat(
            [self._joined(hidden[:, :-1], embedded[:, 1:])[0] for hidden, embedded in batches]
        )
        self._set("eh_proj.weight", least_squares(inputs, wanted))
        lengths = [hidden.shape[1] - 1 for hidden, _ in batches]
        x = inputs @ self._of("eh_proj.weight").T
        seen = torch.cat([self._attended(part[None], 0, [], [])[0] for part in x.split(lengths)])
        self._set("self_attn.o_proj.weight", least_squares(seen, wanted - x))
        x = x + seen @ self._of("self_attn.o_proj.weight").T
        inner = torch.cat([self._inner(part) for part in x.split(4096)])
        self._set("mlp.down_proj.weight", least_squares(inner, wanted - x))
        scale = wanted.pow(2).mean(-1).sqrt().mean()
        self._set("shared_head.norm.weight", torch.full_like(wanted[0], float(scale)))

    @torch.no_grad()
    def go_on_from(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin with what `tensors` were written for; raises KeyError where one is missing."""
        prefix = module_prefix(self.config, 0)
        for name in self.weights:
            self.weights[name].copy_(tensors[prefix + name.replace("/", ".")].float())

    def _set(self, name: str, value: Tensor) -> None:
        self._of(name).copy_(value)

    def tensors(self) -> dict[str, Tensor]:
        prefix = module_prefix(self.config, 0)
        return {prefix + name.replace("/", "."): w.detach() for name, w in self.weights.items()}

    def _of(self, name: str) -> Tensor:
        return self.weights[name.replace(".", "/")]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self._of(name), self.config.norm_eps)

    def _joined(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        parts = [self._norm(embedded, "enorm.weight"), self._norm(hidden, "hnorm.weight")]
        return torch.cat(parts, -1)

    def _layer(self, x: Tensor, step: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        seen = self._attended(x, step, keys, values)
        x = x + seen @ self._of("self_attn.o_proj.weight").T
        return x + self._inner(x) @ self._of("mlp.down_proj.weight").T

    def _inner(self, x: Tensor) -> Tensor:
        normed = self._norm(x, "post_attention_layernorm.weight")
        gate = F.silu(normed @ self._of("mlp.gate_proj.weight").T)
        return gate * (normed @ self._of("mlp.up_proj.weight").T)

    def _attended(self, x: Tensor, step: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        config, (num_seqs, length, _) = self.config, x.shape
        normed = self._norm(x, "input_layernorm.weight")

        def heads(part: str) -> Tensor:
            out = normed @ self._of(f"self_attn.{part}_proj.weight").T
            return out.view(num_seqs, length, -1, config.head_dim)

        def rotated(part: str) -> Tensor:
            at = slice(step, step + length)
            flat = heads(part).flatten(0, 1)
            cos, sin = (t[at].repeat(num_seqs, 1, 1) for t in (self._cos, self._sin))
            return rope(flat, cos, sin).view(num_seqs, length, -1, config.head_dim).transpose(1, 2)

        keys.append(rotated("k"))
        values.append(heads("v").transpose(1, 2))
        shared = config.num_heads // config.num_kv_heads
        seen = F.scaled_dot_product_attention(
            rotated("q"),
            torch.cat(keys, 2).repeat_interleave(shared, 1),
            torch.cat(values, 2).repeat_interleave(shared, 1),
            self._sees(step, length, [k.shape[2] for k in keys]),
        )
        return seen.transpose(1, 2).flatten(2)

    @staticmethod
    def _sees(step: int, length: int, lengths: list[int]) -> Tensor:
        """[length, sum(lengths)]: row i of a step belongs to the draft that began at row i; it
        sees its rows of all steps and, of the tokens before, those of the first step."""
        row = torch.arange(length)[:, None]
        first = torch.arange(lengths[0]) <= row
        own = [torch.arange(other) == row for other in lengths[1:]]
        return torch.cat([first, *own], 1)


def least_squares(inputs: Tensor, wanted: Tensor, ridge: float = 3e-3) -> Tensor:
    """W [num_wanted, num_inputs] for which inputs Wᵀ is nearest to wanted."""
    square = inputs.T @ inputs
    square += ridge * square.diagonal().mean() * torch.eye(len(square))
    return torch.linalg.solve(square.double(), (inputs.T @ wanted).double()).float().T


class HeadsNetwork(nn.Module):
    """Parallel heads: each begins by changing nothing."""

    def __init__(self, config: ModelConfig, count: int) -> None:
        super().__init__()
        self.count = count
        shapes = head_shapes(config)
        self.linears = nn.ModuleList(nn.Linear(*shapes["linear.weight"]) for _ in range(count))
        for linear in self.linears:
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)

    def steps(self, hidden: Tensor, embedded: Tensor, count: int) -> list[Tensor]:
        """As `ModuleNetwork.steps`, of what is known before any of these tokens is."""
        rows = hidden[:, :-1]
        return [
            (rows + F.silu(linear(rows)))[:, : rows.shape[1] - step]
            for step, linear in enumerate(self.linears[:count])
        ]

    def tensors(self) -> dict[str, Tensor]:
        found = {}
        for number, linear in enumerate(self.linears):
            found[f"{head_prefix(number)}linear.weight"] = linear.weight.detach()
            found[f"{head_prefix(number)}linear.bias"] = linear.bias.detach()
        return found


Network = ModuleNetwork | HeadsNetwork
