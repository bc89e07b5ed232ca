"""Train modules or heads on what `mtp_generate` has kept, and measure how often they are right.

The model itself is not run: what it says at a position is its head times what came out there. That
whole distribution is what is learnt, of questions as of answers. The vocabulary is reduced to the
tokens that are likely somewhere.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from mtp_networks import Network
from safetensors.torch import load_file
from torch import Tensor

STEPS = 3  # tokens that drafts are measured by
WEIGHTS = (1.0, 0.5)  # what each drafted token counts in training
FIRST_ALONE = 0.5  # of the updates train the first token alone, which is half the work
BATCH_TOKENS = 600
HELD_OUT = 12  # one conversation of so many is not trained on
TEMPERATURE = 0.7  # of the sampled conversations, as `mtp_generate` draws


@dataclass
class Talk:
    """One conversation: ids [length], hidden [length, hidden_size] float16, is_answer [length]."""

    ids: Tensor
    hidden: Tensor
    is_answer: Tensor
    is_greedy: bool


def read_talks(folder: Path) -> tuple[list[Talk], list[Talk]]:
    """Those to train on, and those held out."""
    kept: tuple[list[Talk], list[Talk]] = ([], [])
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        lengths = tensors["lengths"].tolist()
        parts = zip(
            *(tensors[name].split(lengths) for name in ("ids", "hidden", "is_answer")),
            tensors["is_greedy"].tolist(),
            strict=True,
        )
        for number, (ids, hidden, is_answer, is_greedy) in enumerate(parts):
            kept[number % HELD_OUT == 0].append(Talk(ids.long(), hidden, is_answer, is_greedy))
    return kept


def choose_vocabulary(talks: Sequence[Talk], head: Tensor, size: int) -> tuple[Tensor, float]:
    """The tokens that are likeliest in answers, in the order of their ids, and their share."""
    total = torch.zeros(len(head))
    for talk in talks:
        # Some positions will do: the head is large.
        hidden = talk.hidden[:-1][talk.is_answer[1:]][::16].float()
        total += (hidden @ head.T).softmax(-1).sum(0)
        total += torch.bincount(talk.ids[talk.is_answer], minlength=len(head))
    # Tokens that were never said count too: the earlier a tokenizer has merged one, the more often
    # it is said.
    total = total / total.sum() + 0.015 / (torch.arange(len(head)) + 50)
    chosen = total.topk(min(size, len(head))).indices.sort().values
    return chosen, float(total[chosen].sum() / total.sum())


@dataclass
class Trainer:
    """updates: how many in all; what is done is kept in `checkpoint` and gone on from."""

    network: Network
    embedding: Tensor
    head: Tensor  # rows of the vocabulary
    talks: Sequence[Talk]
    updates: int
    rate: float
    checkpoint: Path

    def __post_init__(self) -> None:
        parameters = list(self.network.parameters())
        self._optimizer = torch.optim.AdamW(
            parameters, lr=self.rate, betas=(0.9, 0.95), weight_decay=0.01
        )
        self.done = 0
        if self.checkpoint.exists():
            state = torch.load(self.checkpoint, weights_only=True)
            self.network.load_state_dict(state["network"])
            self._optimizer.load_state_dict(state["optimizer"])
            self.done = state["done"]

    def train(self) -> None:
        began, first, mean = time.monotonic(), self.done, 0.0
        while self.done < self.updates:
            loss = self._update()
            mean = loss if self.done == first + 1 else 0.95 * mean + 0.05 * loss
            if self.done % 10 == 0:
                left = (time.monotonic() - began) / (self.done - first) * (self.updates - self.done)
                text = f"update {self.done} of {self.updates}: {mean:.3f}, {left / 60:.0f} min left"
                print(text, file=sys.stderr, flush=True)
                self.save()
        self.save()

    def save(self) -> None:
        part = self.checkpoint.with_suffix(".part")
        state = {"network": self.network.state_dict(), "optimizer": self._optimizer.state_dict()}
        torch.save({**state, "done": self.done}, part)
        os.replace(part, self.checkpoint)

    def _update(self) -> float:
        share = self.done / self.updates
        warm = min(1.0, (self.done + 1) / 20)
        for group in self._optimizer.param_groups:
            group["lr"] = self.rate * warm * max(0.03, 1 - share)
        loss = self._loss(self._batch())
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self._optimizer.step()
        self.done += 1
        return float(loss.detach())

    def _batch(self) -> list[Talk]:
        rng = random.Random(self.done)
        picked: list[Talk] = []
        while sum(len(talk.ids) for talk in picked) < BATCH_TOKENS:
            picked.append(rng.choice(self.talks))
        return picked

    def _loss(self, talks: Sequence[Talk]) -> Tensor:
        """Cross entropy with the model's distributions, over all steps."""
        hidden, embedded, is_there = padded(talks, self.embedding)
        total = torch.zeros(())
        weights = WEIGHTS[:1] if self.done < FIRST_ALONE * self.updates else WEIGHTS
        for step, out in enumerate(self.network.steps(hidden, embedded, len(weights))):
            # Row i guesses the token behind i + step + 1, as the model does at that position.
            wanted = is_there[:, step + 1 :]
            with torch.no_grad():
                theirs = (hidden[:, step + 1 :][wanted] @ self.head.T).softmax(-1)
            mine = (out[wanted] @ self.head.T).log_softmax(-1)
            total = total - weights[step] * (theirs * mine).sum(-1).mean()
        return total / sum(weights)


def padded(talks: Sequence[Talk], embedding: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """hidden and embedded, [num_seqs, longest, hidden_size], and which of their rows are there."""
    longest = max(len(talk.ids) for talk in talks)
    hidden = torch.zeros(len(talks), longest, embedding.shape[1])
    ids = torch.zeros(len(talks), longest, dtype=torch.int64)
    is_there = torch.zeros(len(talks), longest, dtype=torch.bool)
    for row, talk in enumerate(talks):
        hidden[row, : len(talk.ids)] = talk.hidden.float()
        ids[row, : len(talk.ids)] = talk.ids
        is_there[row, : len(talk.ids)] = True
    return hidden, F.embedding(ids, embedding), is_there


@torch.no_grad()
def acceptance(
    network: Network,
    talks: Sequence[Talk],
    embedding: Tensor,
    whole_head: Tensor,
    vocabulary: Tensor,
    steps: int = STEPS,
) -> dict[str, list[float]]:
    """How often the first, second, ... drafted token of an answer is accepted where those before
    it were: greedy, in greedy conversations; and drawn at `TEMPERATURE`, in the others."""
    rights = {"greedy": torch.zeros(steps), "sampled": torch.zeros(steps)}
    counts = {"greedy": torch.zeros(steps), "sampled": torch.zeros(steps)}
    for talk in talks:
        hidden, embedded, _ = padded([talk], embedding)
        name, before = ("greedy" if talk.is_greedy else "sampled"), None
        more, since = _said_besides(talk, vocabulary)
        ids = torch.cat([vocabulary, more])
        head = whole_head[ids]
        for step, out in enumerate(network.steps(hidden, embedded, steps)):
            mine = out[0] @ head.T
            rows = len(mine) - 1  # the last guesses what nobody knows
            # A token that was said before the draft begins may be drafted, too.
            begins = torch.arange(len(mine))[:, None] + 2
            mine[:, len(vocabulary) :].masked_fill_(since >= begins, -torch.inf)
            is_answer = talk.is_answer[step + 2 :].float()
            if talk.is_greedy:
                is_right = (ids[mine[:rows].argmax(-1)] == talk.ids[step + 2 :]).float()
            else:
                theirs = (hidden[0, step + 1 : step + 1 + rows] @ whole_head.T) / TEMPERATURE
                p = theirs.softmax(-1)[:, ids]
                is_right = torch.minimum(p, (mine[:rows] / TEMPERATURE).softmax(-1)).sum(-1)
            weight = is_answer if before is None else is_answer * before[:rows]
            rights[name][step] += (is_right * weight).sum()
            counts[name][step] += weight.sum()
            before = is_right * (1.0 if before is None else before[:rows])
    return {
        name: [round(float(x), 3) for x in rights[name] / counts[name].clamp(min=1e-9)]
        for name in rights
    }


def _said_besides(talk: Talk, vocabulary: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of a conversation that the vocabulary lacks, and where each was said first."""
    first: dict[int, int] = {}
    for position, id in enumerate(talk.ids.tolist()):
        first.setdefault(id, position)
    known = set(vocabulary.tolist())
    besides = [id for id in first if id not in known]
    return torch.tensor(besides, dtype=torch.int64), torch.tensor([first[id] for id in besides])
