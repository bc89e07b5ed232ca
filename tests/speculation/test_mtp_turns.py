"""Turns that a model's own modules draft for: where they are found, and what a restart changes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chatkv.client import ChatRequest, open_chat
from chatkv.engine.drafts import Draft
from chatkv.engine.mtp import MtpDrafter
from chatkv.engine.trail import MAX_ROWS, Trail
from chatkv.errors import ModelError, UsageError
from chatkv.model.catalog import find_model
from chatkv.model.hf_checkpoint import read_checkpoint
from chatkv.model.identity import weights_digest
from chatkv.model.mtp_file import read_about
from chatkv.paths import folders
from chatkv.session.turn import TurnOptions
from drafted import held
from small_mtp import write_mtp

Checkpoint = Callable[..., Path]
# Of so hot a temperature, random modules are right now and then.
HOT = 4.0


@pytest.fixture
def model(
    home: Path, tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """One that modules are named for, which are as sure as can be."""
    folder = tiny_checkpoint("llama3")
    write_for(folder, tmp_path / "mtp.safetensors")
    monkeypatch.setenv("CHATKV_MTP", str(tmp_path / "mtp.safetensors"))
    monkeypatch.setattr("chatkv.engine.mtp._KINDS", ((0.0, 0.9),))
    return str(folder)


def write_for(folder: Path, file: Path, number: int = 1) -> None:
    files = find_model(str(folder), folders().cache)
    digest = weights_digest(files.files, folders().make().models)
    write_mtp(file, read_checkpoint(folder)["config"], number=number, digest=digest)


def test_drafts_after_a_restart_are_those_without_one(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the token, since what they go on from is of the turn alone."""
    wanted = {"speculate": "mtp", "temperature": HOT}
    texts = ("hello " * 30, "again", "and once more")
    drafts: list[tuple[int, ...]] = []
    propose = MtpDrafter.propose

    def noted(self: MtpDrafter, *arguments: Any) -> Draft:
        draft = propose(self, *arguments)
        drafts.append(tuple(draft.tokens))
        return draft

    monkeypatch.setattr(MtpDrafter, "propose", noted)
    whole = held(model, texts, **wanted)  # type: ignore[arg-type]
    in_one_go = drafts.copy()
    drafts.clear()
    monkeypatch.setenv("CHATKV_HOME", str(tmp_path / "elsewhere"))  # where none of it is stored
    first = held(model, texts[:2], **wanted)  # type: ignore[arg-type]
    later = held(model, texts[2:], session=first[0][0].session, **wanted)  # type: ignore[arg-type]
    (without, its_ids), (after, ids) = whole[2], later[0]
    assert after.tokens.loaded > 64
    assert without.tokens.loaded == 0
    assert after.speculation == without.speculation
    assert ids == its_ids
    assert without.speculation.source == "mtp"
    assert without.speculation.drafted > 10
    assert drafts == in_one_go


@pytest.mark.parametrize("temperature", [0.0, HOT])
def test_auto_drafts_by_both_and_changes_no_token(model: str, temperature: float) -> None:
    """Not for a seed either, however many were guessed."""
    plain = held(model, speculate="off", temperature=temperature)
    drafted = held(model, speculate="auto", temperature=temperature)
    assert sum(result.speculation.drafted for result, _ in drafted) > 20
    assert [ids for _, ids in drafted] == [ids for _, ids in plain]
    assert {result.speculation.source for result, _ in drafted} == {"ngram+mtp"}


def test_modules_of_a_checkpoint_are_found_in_it(
    home: Path, tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the names that DeepSeek-V3 is published with, with what it repeats beside them."""
    monkeypatch.setattr("chatkv.engine.mtp._KINDS", ((0.0, 0.9),))
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("llama3"), folder)
    plain = held(str(folder), speculate="off")
    config = read_checkpoint(folder)["config"]
    mine = load_file(folder / "model.safetensors")
    tensors = write_mtp(tmp_path / "modules.safetensors", config, number=2)
    for name in ("embed_tokens.weight", "shared_head.head.weight"):
        shared = "model.embed_tokens.weight" if "embed" in name else "lm_head.weight"
        tensors[f"model.layers.{config.num_layers}.{name}"] = mine[shared].clone()
    save_file(mine | tensors, folder / "model.safetensors", {"format": "pt"})
    drafted = held(str(folder), speculate="mtp")
    assert [ids for _, ids in drafted] == [ids for _, ids in plain]
    assert all(result.speculation.drafted for result, _ in drafted)


def test_what_cannot_draft_is_said_in_one_line(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Checkpoint
) -> None:
    def problem() -> str:
        with pytest.raises(ModelError) as raised, open_chat(folders(), ChatRequest(model=model)):
            pass
        return str(raised.value)

    file = tmp_path / "mtp.safetensors"
    tensors = load_file(file)
    about = read_about(file).to_metadata()
    save_file({name: t for name, t in tensors.items() if "enorm" not in name}, file, about)
    assert "lacks the tensor model.layers.3.enorm.weight" in problem()
    save_file({name: t[:1] for name, t in tensors.items()}, file, about)
    assert "model.layers.3.enorm.weight has the shape [1], and the model wants [64]" in problem()
    save_file({**tensors, "vocabulary": torch.tensor([1, 384])}, file, about)
    assert "its tokens are not those of the model" in problem()
    save_file({**tensors, "vocabulary": torch.tensor([1, 1])}, file, about)
    assert "has a token twice" in problem()
    save_file(tensors, file, {**about, "about": "{}"})
    assert "says nothing sound of itself" in problem()
    save_file(tensors, file)
    assert "is no file of scripts/train_mtp.py" in problem()
    file.write_bytes(b"no tensors")
    assert "is no sound safetensors file" in problem()
    write_for(tiny_checkpoint("smollm"), file)
    assert "was made for other weights" in problem()
    monkeypatch.delenv("CHATKV_MTP")
    with open_chat(folders(), ChatRequest(model=model)) as chat:
        with pytest.raises(UsageError, match="train_mtp"):
            chat.conversation.send("hello", TurnOptions(speculate="mtp"))
        assert chat.conversation.turns == []


def test_a_trail_holds_the_last_rows_in_a_row() -> None:
    def rows(start: int, stop: int) -> torch.Tensor:
        return torch.arange(start, stop).float()[:, None].repeat(1, 2)

    trail = Trail()
    trail.extend(10, rows(10, 14))
    trail.extend(14, rows(14, 15))
    assert (trail.start, trail.stop) == (10, 15)
    assert torch.equal(trail.since(12), rows(12, 15))
    trail.cut(13)  # its last two tokens became other ones
    trail.extend(13, rows(13, 20))
    assert torch.equal(trail.since(10), rows(10, 20))
    trail.extend(30, rows(30, 32))  # those between came from elsewhere
    assert (trail.start, trail.stop) == (30, 32)
    trail.begin_at(31)
    trail.extend(25, rows(25, 40))  # computed again, from before the turn
    assert torch.equal(trail.since(31), rows(31, 40))
    for position in range(40, 40 + 3 * MAX_ROWS):
        trail.extend(position, rows(position, position + 1))
    assert MAX_ROWS <= len(trail) <= 2 * MAX_ROWS
    assert torch.equal(trail.since(trail.start), rows(trail.start, 40 + 3 * MAX_ROWS))
    trail.begin_at(10_000)
    assert not len(trail)
