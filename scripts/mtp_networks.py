"""Modules and heads as they are trained: the arithmetic of `chatkv.model.mtp` over whole
conversations, in operations that have gradients.

A module is trained on what it will meet: behind tokens that were computed by the model it drafts
the next one from the model's own output, and the ones behind that from its own. So a pass goes as
far as it is to draft; what drafts a token attends to the rows of the tokens before it as they are
when the model has computed them, and to those of the draft that it belongs to.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chatkv.model.config import ModelConfig
from chatkv.model.decoder import Decoder
from chatkv.model.mtp_file import head_prefix, head_shapes, module_prefix, module_shapes
from chatkv_kernels.rope import rope


class ModuleNetwork(nn.Module):
    """One module. It begins as the last layer of the model, fed with what came out of that."""

    def __init__(self, decoder: Decoder, last_layer: dict[str, Tensor]) -> None:
        super().__init__()
        self.config = decoder.config
        self._cos, self._sin = decoder.rope.cos.float(), decoder.rope.signed_sin.float()
        hidden = self.config.hidden_size
        start = {
            name: last_layer[name] for name in module_shapes(self.config) if name in last_layer
        }
        start["enorm.weight"] = start["hnorm.weight"] = torch.ones(hidden)
        start["shared_head.norm.weight"] = decoder.norm.weight
        generator = torch.Generator().manual_seed(0)
        of_embedding = 0.3 * hidden**-0.5 * torch.randn(hidden, hidden, generator=generator)
        start["eh_proj.weight"] = torch.cat([of_embedding, torch.eye(hidden)], 1)
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
            parts = [
                self._norm(embedded[:, step + 1 : step + 1 + length], "enorm.weight"),
                self._norm(inputs, "hnorm.weight"),
            ]
            x = torch.cat(parts, -1) @ self._of("eh_proj.weight").T
            out = self._layer(x, step, keys, values)
            outs.append(self._norm(out, "shared_head.norm.weight"))
            inputs = out[:, :-1]
        return outs

    def tensors(self) -> dict[str, Tensor]:
        prefix = module_prefix(self.config, 0)
        return {prefix + name.replace("/", "."): w.detach() for name, w in self.weights.items()}

    def _of(self, name: str) -> Tensor:
        return self.weights[name.replace(".", "/")]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self._of(name), self.config.norm_eps)

    def _layer(self, x: Tensor, step: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
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
        x = x + seen.transpose(1, 2).flatten(2) @ self._of("self_attn.o_proj.weight").T
        normed = self._norm(x, "post_attention_layernorm.weight")
        gate = F.silu(normed @ self._of("mlp.gate_proj.weight").T)
        up = normed @ self._of("mlp.up_proj.weight").T
        return x + (gate * up) @ self._of("mlp.down_proj.weight").T

    @staticmethod
    def _sees(step: int, length: int, lengths: list[int]) -> Tensor:
        """[length, sum(lengths)]: row i of a step belongs to the draft that began at row i; it
        sees its rows of all steps and, of the tokens before, those of the first step."""
        row = torch.arange(length)[:, None]
        first = torch.arange(lengths[0]) <= row
        own = [torch.arange(other) == row for other in lengths[1:]]
        return torch.cat([first, *own], 1)


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
