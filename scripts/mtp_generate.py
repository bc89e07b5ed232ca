"""Have a model answer made-up questions, and keep its tokens with what came out of its last layer.

Many conversations are held side by side, each step computing one token of each: of a question, as
it is given, or of an answer, as it is drawn. So a step costs about what it costs for one, and the
model runs once only: what a head is trained on is kept as it goes, in float16, in files of some
ten thousand tokens. What was kept remains when this is interrupted, and is gone on from.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from mtp_prompts import next_question, question

from chatkv.model.batch import Attention
from chatkv.model.decoder import Decoder
from chatkv.model.template import ChatTemplate
from chatkv.model.tokenizer import Tokenizer
from chatkv_kernels.rope import rope

FILE_TOKENS = 10_000
MAX_TOKENS = 384  # of a conversation
MAX_ANSWER = 220
GOES_ON = 0.35  # of the conversations that have room for another turn
GREEDY = 0.5  # of the conversations; the others are drawn as chats are by default
TEMPERATURE, TOP_P, MIN_P = 0.7, 0.95, 0.05


@dataclass
class Slot:
    """One conversation of those held side by side."""

    rng: random.Random
    messages: list[dict[str, str]] = field(default_factory=list)
    forced: list[int] = field(default_factory=list)  # of the question, not computed yet
    ids: list[int] = field(default_factory=list)
    is_answer: list[bool] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    num_answered: int = 0  # tokens of this answer
    is_greedy: bool = False


class SideBySide:
    """The next token of as many conversations as there are slots (a `Batch`)."""

    def __init__(self, decoder: Decoder, num_slots: int) -> None:
        config = decoder.config
        self._rope = decoder.rope
        shape = (config.num_layers, 2, num_slots, config.num_kv_heads, MAX_TOKENS, config.head_dim)
        self._kv = torch.zeros(shape, dtype=decoder.dtype)
        self._rows = torch.arange(num_slots)
        self.at = torch.zeros(num_slots, dtype=torch.int64)  # positions of the new tokens

    @property
    def ends(self) -> Tensor | None:
        return None

    def begin(self) -> None:
        """A pass over the tokens at `self.at`."""
        self._cos, self._sin = self._rope.cos[self.at], self._rope.signed_sin[self.at]
        self._longest = int(self.at.max()) + 1
        seen = torch.arange(self._longest) <= self.at[:, None]
        self._mask = torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)[:, None, None]

    def attend(self, attention: Attention, heads: Tensor) -> Tensor:
        config = attention.config
        num_heads, num_kv = config.num_heads, config.num_kv_heads
        rotated = rope(heads[:, : num_heads + num_kv], self._cos, self._sin)
        keys, values = self._kv[attention.layer]
        keys[self._rows, :, self.at] = rotated[:, num_heads:]
        values[self._rows, :, self.at] = heads[:, num_heads + num_kv :]
        queries = rotated[:, :num_heads].view(len(heads), num_kv, -1, config.head_dim)
        seen = F.scaled_dot_product_attention(
            queries,
            keys[:, :, : self._longest],
            values[:, :, : self._longest],
            self._mask.to(queries.dtype),
            scale=attention.scale,
        )
        return seen.reshape(len(heads), -1)


@dataclass
class Generator:
    decoder: Decoder
    tokenizer: Tokenizer
    template: ChatTemplate
    num_slots: int
    seed: int
    num_rounds: int = 0  # how often it was interrupted: each time it asks other questions

    def __post_init__(self) -> None:
        number = 1_000_000 * self.num_rounds + self.seed
        self._rng = random.Random(number)
        self._batch = SideBySide(self.decoder, self.num_slots)
        self._random = torch.Generator().manual_seed(number)
        self._slots = [self._fresh() for _ in range(self.num_slots)]

    def finished(self) -> Iterator[Slot]:
        """Conversations as they end, for ever."""
        while True:
            self._step()
            for index, slot in enumerate(self._slots):
                if self._is_over(slot):
                    yield slot
                    self._slots[index] = self._fresh()

    def _fresh(self) -> Slot:
        rng = random.Random(self._rng.random())
        slot = Slot(rng, is_greedy=rng.random() < GREEDY)
        slot.messages.append({"role": "user", "content": question(rng)})
        rendered = self.template.render(slot.messages)
        slot.forced = self.tokenizer.encode_rendered(rendered.text, rendered.content_spans)
        del slot.forced[MAX_TOKENS // 2 :]
        return slot

    @torch.inference_mode()
    def _step(self) -> None:
        """One token of each conversation."""
        ids = [slot.forced[0] if slot.forced else self._next[i] for i, slot in self._numbered()]
        self._batch.at[:] = torch.tensor([len(slot.ids) for slot in self._slots])
        self._batch.begin()
        hidden = self.decoder.through_layers(torch.tensor(ids), self._batch)
        hidden = self.decoder.norm(hidden)
        for index, slot in self._numbered():
            slot.ids.append(ids[index])
            slot.is_answer.append(not slot.forced)
            slot.num_answered += not slot.forced
            slot.hidden.append(hidden[index].half())
            del slot.forced[:1]
        self._next = self._drawn(self.decoder.head(hidden).float())

    def _numbered(self) -> list[tuple[int, Slot]]:
        return list(enumerate(self._slots))

    def _drawn(self, logits: Tensor) -> list[int]:
        """The next token of each: the likeliest, or drawn from the 64 likeliest."""
        values, ids = logits.topk(64)
        scaled = ((values - values[:, :1]) / TEMPERATURE).double()
        total = ((logits - values[:, :1]) / TEMPERATURE).exp().sum(-1, keepdim=True)
        mass = scaled.exp() / total
        before = mass.cumsum(-1) - mass
        mass[(before >= TOP_P) | (mass < MIN_P * mass[:, :1])] = 0
        picked = torch.multinomial(mass, 1, generator=self._random)[:, 0]
        greedy = torch.tensor([slot.is_greedy for slot in self._slots])
        picked[greedy] = 0
        return ids.gather(1, picked[:, None])[:, 0].tolist()

    def _is_over(self, slot: Slot) -> bool:
        """Whether this conversation has ended; else it goes on, with another question maybe."""
        if slot.forced:
            return False
        has_stopped = slot.ids[-1] in self.tokenizer.stop_ids and slot.is_answer[-1]
        if len(slot.ids) >= MAX_TOKENS or slot.num_answered >= MAX_ANSWER:
            return True
        if not has_stopped:
            return False
        if len(slot.ids) > MAX_TOKENS - 120 or slot.rng.random() > GOES_ON:
            return True
        said = {"role": "assistant", "content": "It is."}
        asked = {"role": "user", "content": next_question(slot.rng)}
        rendered = self.template.continuation([*slot.messages, said, asked])
        following = self.tokenizer.encode_continuation(
            rendered.text, rendered.content_spans, slot.ids[-2]
        )
        # The log has the token that closes the answer, as the continuation begins with.
        slot.forced = following[1:] if following[0] == slot.ids[-1] else following
        slot.num_answered = 0
        return False


def generate(generator: Generator, folder: Path, num_tokens: int) -> None:
    """Fill `folder` with files until they have so many tokens. What is there counts: interrupted,
    it begins with conversations that it has not held."""
    folder.mkdir(parents=True, exist_ok=True)
    began, done, kept = time.monotonic(), 0, []
    there = sum(_num_tokens(file) for file in own_files(folder, generator.seed))
    for slot in generator.finished():
        kept.append(slot)
        if sum(len(one.ids) for one in kept) < min(FILE_TOKENS, num_tokens - there - done):
            continue
        _write(folder, kept, generator.seed)
        done += sum(len(one.ids) for one in kept)
        kept = []
        rate = done / (time.monotonic() - began)
        text = f"{there + done:,} of {num_tokens:,} tokens, {rate:.0f} a second"
        print(text, file=sys.stderr, flush=True)
        if there + done >= num_tokens:
            return


def own_files(folder: Path, seed: int) -> list[Path]:
    """Those that a generator of that seed has written."""
    return sorted(folder.glob(f"{seed}-*.safetensors"))


def _num_tokens(file: Path) -> int:
    from safetensors import safe_open

    with safe_open(str(file), "pt") as opened:
        return int(opened.get_slice("ids").get_shape()[0])


def _write(folder: Path, slots: list[Slot], seed: int) -> None:
    from safetensors.torch import save_file

    lengths = torch.tensor([len(slot.ids) for slot in slots])
    number = len(own_files(folder, seed))
    path = folder / f"{seed}-{number:04}.safetensors"
    part = path.with_suffix(".part")
    save_file(
        {
            "ids": torch.tensor([id for slot in slots for id in slot.ids], dtype=torch.int32),
            "is_answer": torch.tensor([one for slot in slots for one in slot.is_answer]),
            "hidden": torch.stack([one for slot in slots for one in slot.hidden]),
            "lengths": lengths,
            "is_greedy": torch.tensor([slot.is_greedy for slot in slots]),
        },
        part,
    )
    os.replace(part, path)
