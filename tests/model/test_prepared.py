"""Preparing a model: once, whole or not at all, whatever else happens meanwhile."""

from __future__ import annotations

import errno
import json
import multiprocessing
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from chatkv.errors import ModelError
from chatkv.model import prepared as prepared_module
from chatkv.model.catalog import find_model
from chatkv.model.prepared import PreparedModel, prepare
from chatkv.model.tokenizer import Tokenizer
from chatkv.model.weights import load_weights
from tiny import CHAT_TEMPLATE
from tiny_gguf import write_gguf

Checkpoint = Callable[..., Path]


@pytest.fixture
def tiny_gguf(tiny_checkpoint: Checkpoint, tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", tiny_checkpoint("smollm"))


def _prepare(path: Path, models: Path, dtype: Any = "float32", **options: Any) -> PreparedModel:
    return prepare(find_model(str(path), models), dtype, models, **options)


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The temporary folders that were converted into."""
    folders: list[Path] = []
    original = prepared_module._convert_gguf

    def convert(files: Any, dtype: Any, quantised: Any, folder: Path, progress: Any) -> Any:
        folders.append(folder)
        return original(files, dtype, quantised, folder, progress)

    monkeypatch.setattr(prepared_module, "_convert_gguf", convert)
    return folders


def test_gguf_and_checkpoint_are_the_same_model(
    tiny_gguf: Path, tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    from_gguf = _prepare(tiny_gguf, tmp_path / "models")
    from_hf = _prepare(tiny_checkpoint("smollm"), tmp_path / "models")
    assert from_gguf.config == from_hf.config
    assert from_gguf.template == from_hf.template == CHAT_TEMPLATE
    assert from_gguf.eos_ids == from_hf.eos_ids
    assert from_gguf.special_tokens.items() <= from_hf.special_tokens.items()
    assert from_gguf.weights_digest != from_hf.weights_digest
    ours, theirs = load_weights(from_gguf), load_weights(from_hf)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    tokenizers = Tokenizer.from_prepared(from_gguf), Tokenizer.from_prepared(from_hf)
    text = "<|im_start|>user\nthe chat 😀<|im_end|>"
    assert tokenizers[0].encode_rendered(text) == tokenizers[1].encode_rendered(text)
    assert tokenizers[0].stop_ids == tokenizers[1].stop_ids


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtypes(dtype: str, tiny_gguf: Path, tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    wanted = getattr(torch, dtype)
    original = load_file(tiny_checkpoint("smollm") / "model.safetensors")
    digests = set()
    for path in (tiny_gguf, tiny_checkpoint("smollm")):
        model = _prepare(path, tmp_path / "models", dtype)
        digests.add(model.weights_digest)
        for name, tensor in load_weights(model).items():
            assert tensor.dtype == wanted
            assert torch.equal(tensor, original[name].to(wanted)), name
    assert digests.isdisjoint(
        _prepare(tiny_gguf, tmp_path / "models", other).weights_digest
        for other in ("bfloat16", "float16", "float32")
        if other != dtype
    )


def test_the_second_time_reads_what_the_first_wrote(
    tiny_gguf: Path, tmp_path: Path, conversions: list[Path]
) -> None:
    steps: list[tuple[str, int, int]] = []
    models = tmp_path / "models"
    first = _prepare(tiny_gguf, models, progress=lambda *step: steps.append(step))
    assert _prepare(tiny_gguf, models) == first
    copied = shutil.copy(tiny_gguf, tmp_path / "copy.gguf")
    assert _prepare(copied, models).weights == first.weights
    assert len(conversions) == 1
    assert {name for name, _, _ in steps} == {"reading the model", "preparing the model"}
    assert all(0 <= done <= total for _, done, total in steps)
    assert steps[-1][1] == steps[-1][2]
    assert sorted(path.name for path in first.folder.iterdir()) == [
        "model.safetensors",
        "prepared.json",
        "tokenizer.json",
    ]


def _damage_format(folder: Path) -> None:
    record = json.loads((folder / "prepared.json").read_text())
    (folder / "prepared.json").write_text(json.dumps(record | {"format": 0}))


def _damage_record(folder: Path) -> None:
    (folder / "prepared.json").write_text("{")


def _damage_config(folder: Path) -> None:
    record = json.loads((folder / "prepared.json").read_text())
    record["config"]["new_field"] = 1
    (folder / "prepared.json").write_text(json.dumps(record))


def _cut_weights(folder: Path) -> None:
    with (folder / "model.safetensors").open("rb+") as file:
        file.truncate(5000)


def _lose_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    "damage", [_damage_format, _damage_record, _damage_config, _cut_weights, _lose_tokenizer]
)
def test_an_unsound_or_older_folder_is_made_anew(
    damage: Callable[[Path], None], tiny_gguf: Path, tmp_path: Path, conversions: list[Path]
) -> None:
    first = _prepare(tiny_gguf, tmp_path / "models")
    mapped = load_weights(first)
    expected = {name: tensor.clone() for name, tensor in mapped.items()}
    if damage is not _cut_weights:  # cutting a file under its mapping is for the system to judge
        kept = mapped
    damage(first.folder)
    again = _prepare(tiny_gguf, tmp_path / "models")
    assert again == first and len(conversions) == 2
    loaded = load_weights(again)
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    if damage is not _cut_weights:  # a process that runs on the old one keeps it
        assert all(torch.equal(kept[name], expected[name]) for name in expected)
    assert [path.suffix for path in (tmp_path / "models").glob("*tmp*")] == []


def test_a_failure_leaves_nothing_behind(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    models = tmp_path / "models"
    monkeypatch.setattr("chatkv.model.tensor_file.os.fsync", fails)
    with pytest.raises(ModelError, match=r"cannot prepare tiny in .*No space left") as caught:
        _prepare(tiny_gguf, models)
    assert "\n" not in str(caught.value)
    assert {path.name for path in models.iterdir() if path.is_dir()} <= {"digests"}
    monkeypatch.undo()
    load_weights(_prepare(tiny_gguf, models))


def test_what_a_killed_process_left_is_removed(tiny_gguf: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    folder = _prepare(tiny_gguf, models).folder
    shutil.rmtree(folder)
    leftover = models / f"{folder.name}.tmp-abc"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    other = models / "0123456789abcdef0123456789abcdef-float32.tmp-xyz"
    other.mkdir()
    _prepare(tiny_gguf, models)
    assert not leftover.exists() and other.exists()


def test_a_folder_that_cannot_be_written(tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file where the folder should be")
    with pytest.raises(ModelError, match="cannot prepare tiny"):
        _prepare(tiny_gguf, tmp_path / "models")


def _in_a_process(path: Path, models: Path, barrier: Any, results: Any) -> None:
    barrier.wait()
    model = _prepare(path, models)
    total = sum(float(tensor.double().sum()) for tensor in load_weights(model).values())
    results.put((str(model.folder), total))


def test_two_processes_at_once(tiny_gguf: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(3), context.Queue()
    arguments = (tiny_gguf, tmp_path / "models", barrier, results)
    processes = [context.Process(target=_in_a_process, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    found = {results.get(timeout=60) for _ in processes}
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert len(found) == 1
    assert [path.name for path in (tmp_path / "models").glob("*tmp*")] == []


def test_one_bad_gguf_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF" + bytes(range(200)))
    with pytest.raises(ModelError) as caught:
        _prepare(path, tmp_path / "models")
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert [p for p in (tmp_path / "models").iterdir() if p.is_dir() and "tmp" in p.name] == []


# -- Hugging Face folders ------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tiny_checkpoint: Checkpoint, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint("llama2"), tmp_path / "checkpoint"))


def _edit(path: Path, **changes: Any) -> None:
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))


def test_places_of_the_template(checkpoint: Path, tmp_path: Path) -> None:
    settings = checkpoint / "tokenizer_config.json"

    def template() -> str | None:
        return _prepare(checkpoint, tmp_path / "models").template

    assert template() == CHAT_TEMPLATE
    _edit(settings, chat_template=[{"name": "tool_use", "template": "T"}])
    assert template() == "T"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    _edit(settings, chat_template=named)
    assert template() == "D"
    (checkpoint / "chat_template.jinja").write_text("J")
    assert template() == "J"
    (checkpoint / "chat_template.jinja").unlink()
    _edit(settings, chat_template=None)
    assert template() is None
    _edit(settings, chat_template=[{"name": n, "template": "x"} for n in ("rag", "tools")])
    with pytest.raises(ModelError, match=r"none of its chat templates is the default \(rag, tools"):
        template()


def test_special_tokens_are_strings_or_objects(checkpoint: Path, tmp_path: Path) -> None:
    token = {"__type": "AddedToken", "content": "<|im_start|>", "lstrip": False}
    _edit(checkpoint / "tokenizer_config.json", bos_token=token, unk_token=None)
    special = _prepare(checkpoint, tmp_path / "models").special_tokens
    assert special["bos_token"] == "<|im_start|>" and special["eos_token"] == "<|im_end|>"


def test_ends_of_a_reply_from_every_place(checkpoint: Path, tmp_path: Path) -> None:
    def stops() -> frozenset[int]:
        return Tokenizer.from_prepared(_prepare(checkpoint, tmp_path / "models")).stop_ids

    end_of_text, im_end = 0, 2  # by their names, whatever the files say
    generation = checkpoint / "generation_config.json"
    generation.write_text('{"eos_token_id": [7, 8]}')
    assert stops() == {end_of_text, im_end, 7, 8}
    generation.write_text('{"eos_token_id": 9}')
    assert stops() == {end_of_text, im_end, 9}
    generation.unlink()
    _edit(checkpoint / "config.json", eos_token_id=[5, 6])
    assert stops() == {end_of_text, im_end, 5, 6}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "{", "config.json is no valid JSON"),
        ("config.json", '{"model_type": "gpt2"}', "architecture 'gpt2'"),
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer_config.json", "[]", "should hold a JSON object"),
        ("generation_config.json", "\x00", "generation_config.json is no valid JSON"),
    ],
)
def test_a_broken_folder_is_one_line(
    name: str, content: str | None, message: str, checkpoint: Path, tmp_path: Path
) -> None:
    if content is None:
        (checkpoint / name).unlink()
    else:
        (checkpoint / name).write_text(content)
    with pytest.raises(ModelError) as caught:
        _prepare(checkpoint, tmp_path / "models")
    assert message in str(caught.value) and "\n" not in str(caught.value)


# -- starting ------------------------------------------------------------------------------------


START = """
import sys
from pathlib import Path
from chatkv.model.catalog import find_model
from chatkv.model.prepared import prepare
from chatkv.model.template import ChatTemplate
from chatkv.model.tokenizer import Tokenizer
model = prepare(find_model(sys.argv[1], Path(sys.argv[2])), "float32", Path(sys.argv[2]))
tokenizer = Tokenizer.from_prepared(model)
template = ChatTemplate.from_prepared(model, tokenizer)
rendered = template.render([{"role": "user", "content": "Hi"}])
print(len(tokenizer.encode_rendered(rendered.text, rendered.content_spans)))
print(*sorted({name.split(".")[0] for name in sys.modules}))
"""


def test_a_later_start_is_light(smollm2: PreparedModel, smollm2_gguf: Path) -> None:
    """It reads what was prepared: neither the GGUF's reader nor torch is imported for it."""
    done = subprocess.run(
        [sys.executable, "-c", START, str(smollm2_gguf), str(smollm2.folder.parent)],
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    num_tokens, modules = done.stdout.splitlines()
    assert int(num_tokens) == 31
    assert not {"gguf", "transformers", "torch", "numpy", "safetensors"} & set(modules.split())
