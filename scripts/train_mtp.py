#!/usr/bin/env python3
"""Train a module or heads that draft for a model (`--speculate mtp`), from what the model itself
says to made-up questions.

    scripts/train_mtp.py generate --out DIR --tokens 400000
    scripts/train_mtp.py train --data DIR --updates 400 -o FILE.safetensors
    CHATKV_MTP=FILE.safetensors chatkv chat --speculate mtp

Both may be interrupted, and go on where they were; several `generate` with seeds of their own may
run at a time. `train` prints how often drafts were right on conversations that it has not seen, and
writes that into the file, with the digest of the weights that the file is for.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "store"), str(ROOT / "scripts")]

import torch  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", help="as chatkv takes it; by default the embedded one")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, help="of the CPU; by default all")
    commands = parser.add_subparsers(required=True)
    generate = commands.add_parser("generate", help="have the model answer made-up questions")
    generate.add_argument("--out", type=Path, required=True, metavar="DIR")
    generate.add_argument("--tokens", type=int, default=400_000)
    generate.add_argument("--seed", type=int, default=1)
    generate.add_argument("--side-by-side", type=int, default=32, metavar="N")
    generate.set_defaults(run=run_generate)
    train = commands.add_parser("train", help="train on what was generated")
    train.add_argument("--data", type=Path, required=True, metavar="DIR")
    train.add_argument("-o", "--out", type=Path, required=True, metavar="FILE")
    train.add_argument("--kind", choices=("modules", "heads"), default="modules")
    train.add_argument("--updates", type=int, default=400)
    train.add_argument("--rate", type=float, default=1e-3, help="of learning, at its highest")
    train.add_argument("--vocabulary", type=int, default=4096, help="tokens that are drafted")
    train.add_argument(
        "--go-on-from", type=Path, metavar="FILE", help="what was trained before, on other data"
    )
    train.set_defaults(run=run_train)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    arguments.run(arguments)


def run_generate(arguments: argparse.Namespace) -> None:
    from mtp_generate import Generator, generate, own_files

    from chatkv.model.template import ChatTemplate
    from chatkv.model.tokenizer import Tokenizer

    prepared, decoder, _ = load(arguments.model, arguments.device)
    tokenizer = Tokenizer.from_prepared(prepared)
    template = ChatTemplate.from_prepared(prepared, tokenizer)
    slots, seed = arguments.side_by_side, arguments.seed
    num_files = len(own_files(arguments.out, seed))
    generator = Generator(decoder, tokenizer, template, slots, seed, num_files)
    generate(generator, arguments.out, arguments.tokens)


def run_train(arguments: argparse.Namespace) -> None:
    from mtp_networks import HeadsNetwork, ModuleNetwork
    from mtp_training import STEPS, Trainer, acceptance, choose_vocabulary, padded, read_talks
    from safetensors.torch import save_file

    from chatkv.model.mtp_file import VOCABULARY, About, small_tensors

    prepared, decoder, weights = load(arguments.model, arguments.device)
    config = decoder.config
    talks, held_out = read_talks(arguments.data)
    if not held_out:
        sys.exit(f"{arguments.data} holds no conversations: run `generate` first")
    num_tokens = sum(len(talk.ids) for talk in talks)
    embedding = decoder.embedding.float()
    head = embedding if config.tie_embeddings else weights["lm_head.weight"].float()
    checkpoint = arguments.out.with_suffix(".checkpoint")
    chosen = checkpoint.with_suffix(".vocabulary")
    before = read_before(arguments.go_on_from, arguments.kind) if arguments.go_on_from else None
    if before is not None:
        vocabulary = before[1].pop(VOCABULARY).long()
    elif chosen.exists():
        vocabulary = torch.load(chosen, weights_only=True)
    else:
        vocabulary, share = choose_vocabulary(talks, head, arguments.vocabulary)
        torch.save(vocabulary, chosen)
        print(f"{len(vocabulary)} tokens are {share:.1%} of what is said", file=sys.stderr)
    if arguments.kind == "heads":
        network: Any = HeadsNetwork(config, STEPS)
    else:
        prefix = f"model.layers.{config.num_layers - 1}."
        last = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
        network = ModuleNetwork(decoder, last)
        if not checkpoint.exists():
            if before is not None:
                network.go_on_from(before[1])
            else:
                network.fit([padded([talk], embedding)[:2] for talk in talks])
            measured = acceptance(network, held_out, embedding, head, vocabulary)
            print(f"right before training: {measured}", file=sys.stderr)
    trainer = Trainer(
        network, embedding, head[vocabulary], talks, arguments.updates, arguments.rate, checkpoint
    )
    print(f"{len(talks)} conversations, {num_tokens:,} tokens", file=sys.stderr)
    trainer.save()  # what was solved for need not be solved again
    trainer.train()
    measured = acceptance(network, held_out, embedding, head, vocabulary)
    print(f"right on {len(held_out)} other conversations: {measured}")
    trained_on = f"{num_tokens} tokens of answers to made-up questions"
    if before is not None:
        trained_on = f"{before[0].trained_on}; then {trained_on}"
    digest = prepared.files_digest.hex()
    about = About(arguments.kind, digest, acceptance=measured, trained_on=trained_on)
    tensors = small_tensors(network.tensors())
    tensors[VOCABULARY] = vocabulary.to(torch.int32)
    part = arguments.out.with_suffix(".part")
    save_file(tensors, part, about.to_metadata())
    os.replace(part, arguments.out)


def read_before(file: Path, kind: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """What was trained before: what it tells of itself, and its tensors."""
    from safetensors.torch import load_file

    from chatkv.errors import ModelError
    from chatkv.model.mtp_file import VOCABULARY, dense_tensors, read_about

    try:
        about = read_about(file)
    except ModelError as error:
        sys.exit(str(error))
    tensors = dense_tensors(load_file(file))
    if kind != "modules" or about.kind != kind or VOCABULARY not in tensors:
        sys.exit(f"--go-on-from {file}: only a module that this script has trained goes on")
    return about, tensors


def load(model: str | None, device: str) -> tuple[Any, Any, Any]:
    """The model, prepared in float32 on a CPU; its decoder; its tensors."""
    from chatkv.model.catalog import find_model
    from chatkv.model.decoder import Decoder
    from chatkv.model.prepared import prepare
    from chatkv.model.weights import load_weights
    from chatkv.paths import folders

    place = folders()
    dtype = "float32" if device == "cpu" else "bfloat16"
    prepared = prepare(find_model(model, place.cache), dtype, place.models)  # type: ignore[arg-type]
    weights = load_weights(prepared)
    return prepared, Decoder(prepared.config, weights, device=device), weights


if __name__ == "__main__":
    main()
