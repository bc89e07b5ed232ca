"""Random modules and heads for the small engine, and what they compute, in plain torch: whole
sequences, nothing kept from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from chatkv.engine.engine import Engine
from chatkv.model.config import ModelConfig
from chatkv.model.mtp import Foresight, Predictor
from chatkv.model.mtp_file import (
    About,
    Kind,
    head_prefix,
    head_shapes,
    module_prefix,
    module_shapes,
    predictor_from,
)

DIGEST = bytes(range(32))


def write_mtp(
    file: Path,
    config: ModelConfig,
    kind: Kind = "modules",
    number: int = 1,
    vocabulary: Sequence[int] | None = None,
    seed: int = 5,
    digest: bytes = DIGEST,
    window: int = 256,
) -> dict[str, Tensor]:
    """A file of random ones; its tensors."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for index in range(number):
        shapes = module_shapes(config) if kind == "modules" else head_shapes(config)
        prefix = module_prefix(config, index) if kind == "modules" else head_prefix(index)
        for name, shape in shapes.items():
            noise = torch.randn(shape, generator=generator)
            noise = 1 + 0.2 * noise if name.endswith("norm.weight") else noise * shape[-1] ** -0.5
            tensors[prefix + name] = noise
    if vocabulary is not None:
        tensors["vocabulary"] = torch.tensor(vocabulary, dtype=torch.int32)
    save_file(tensors, file, About(kind, digest.hex(), window).to_metadata())
    return tensors


def small_predictor(
    file: Path, engine: Engine, weights: dict[str, Tensor], **wanted: object
) -> tuple[Predictor, dict[str, Tensor]]:
    """Random ones behind a small engine, which drafts by them from now on, and their tensors, which
    are kept as they are."""
    tensors = write_mtp(file, engine.decoder.config, **wanted)  # type: ignore[arg-type]
    predictor = predictor_from(file, engine.decoder, weights, DIGEST, is_small=False)
    engine.predict_with(Foresight(lambda: predictor))
    assert engine.predictor is predictor  # from now on steps keep what it goes on from
    return predictor, tensors


class Reference:
    """Logits of the next tokens, by modules or heads."""

    def __init__(
        self, config: ModelConfig, weights: dict[str, Tensor], tensors: dict[str, Tensor]
    ) -> None:
        self.config, self._weights, self._tensors = config, weights, tensors
        self._head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
        self._num_modules = sum(name.endswith("eh_proj.weight") for name in tensors)

    def logits(self, hidden: Tensor, ids: Sequence[int], drafted: Sequence[int]) -> Tensor:
        """Of the token behind ids and drafted ones, [vocab_size]; where there is a vocabulary, what
        is neither in that nor was said cannot be. hidden: [len(ids) - 1, hidden_size], what came
        out of the decoder for all but the last of ids."""
        if not self._num_modules:
            part = {
                name: self._tensors[f"heads.{len(drafted)}.{name}"]
                for name in head_shapes(self.config)
            }
            last = hidden[-1]
            out = last + F.silu(part["linear.weight"] @ last + part["linear.bias"])
            return self._logits(out, ids)
        said, ids = ids, [*ids, *drafted]
        for number in range(min(len(drafted) + 1, self._num_modules)):
            known = ids[number + 1 : number + 1 + len(hidden)]
            out = self._module(number, hidden[: len(known)], known)
            hidden, module = out, number
        for token in drafted[self._num_modules - 1 :]:
            rows = torch.cat([self._last_inputs, out[-1:]])
            out = self._module(module, rows, [*self._last_tokens, token])
        norm = self._tensors[self._name(module, "shared_head.norm.weight")]
        return self._logits(self._norm(out[-1], norm), said)

    def _logits(self, out: Tensor, said: Sequence[int]) -> Tensor:
        logits = self._head @ out
        if "vocabulary" in self._tensors:
            known = {*self._tensors["vocabulary"].tolist(), *said}
            logits[[id for id in range(len(logits)) if id not in known]] = -torch.inf
        return logits

    def _name(self, number: int, name: str) -> str:
        return module_prefix(self.config, number) + name

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + self.config.norm_eps).rsqrt() * weight

    def _module(self, number: int, hidden: Tensor, tokens: Sequence[int]) -> Tensor:
        """One module over a whole sequence, [len(tokens), hidden_size]."""
        self._last_inputs, self._last_tokens = hidden, list(tokens)
        config = self.config

        def named(name: str) -> Tensor:
            return self._tensors[self._name(number, name)]

        embedded = self._weights["model.embed_tokens.weight"][torch.tensor(tokens)]
        joined = torch.cat(
            [
                self._norm(embedded, named("enorm.weight")),
                self._norm(hidden, named("hnorm.weight")),
            ],
            -1,
        )
        x = joined @ named("eh_proj.weight").T
        normed = self._norm(x, named("input_layernorm.weight"))
        length, size = len(tokens), config.head_dim

        def heads(part: str, count: int) -> Tensor:
            out = normed @ named(f"self_attn.{part}_proj.weight").T
            return out.view(length, count, size).transpose(0, 1)

        queries = self._rotated(heads("q", config.num_heads))
        keys = self._rotated(heads("k", config.num_kv_heads))
        values = heads("v", config.num_kv_heads)
        shared = config.num_heads // config.num_kv_heads
        keys, values = keys.repeat_interleave(shared, 0), values.repeat_interleave(shared, 0)
        scores = queries @ keys.transpose(1, 2) * size**-0.5
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        seen = scores.masked_fill(later, -torch.inf).softmax(-1) @ values
        seen = seen.transpose(0, 1).reshape(length, -1)
        x = x + seen @ named("self_attn.o_proj.weight").T
        normed = self._norm(x, named("post_attention_layernorm.weight"))
        gate = F.silu(normed @ named("mlp.gate_proj.weight").T)
        return (
            x + (gate * (normed @ named("mlp.up_proj.weight").T)) @ named("mlp.down_proj.weight").T
        )

    def _rotated(self, heads: Tensor) -> Tensor:
        size = self.config.head_dim
        inverse = self.config.rope_theta ** (-torch.arange(0, size, 2).float() / size)
        angles = torch.outer(torch.arange(heads.shape[1]).float(), inverse)
        one, other = heads[..., : size // 2], heads[..., size // 2 :]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)
