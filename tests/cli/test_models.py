"""`chatkv models`: what is here, what it needs, getting one from a hub that is not there, removing.

The hub's client is replaced at its edge alone: what it would fetch lies in a folder.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import safe_open

from chatkv.errors import ModelError
from chatkv.model.catalog import downloads, find_model
from chatkv.model.config import ModelConfig
from chatkv.model.inventory import inventory
from chatkv.model.linear import has_half_product
from chatkv.model.prepared import prepare
from program import Ran
from tiny_gguf import write_gguf

Program = Callable[..., Ran]
COMMIT = "0" * 40


@pytest.fixture
def cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home / "hf"))
    return home / "cache"


def _put(cache: Path, source: Path, repository: str = "org/tiny") -> Path:
    """Files as the hub's client lays them down."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "main").write_text(COMMIT)
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir() if source.is_dir() else [source]:
        blob = folder / "blobs" / file.name
        blob.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, blob)
        if not (snapshot / file.name).exists():
            (snapshot / file.name).symlink_to(blob)
    return snapshot


def _own(path: Path, checkpoint: Path) -> Path:
    """A user's own .gguf file, not written just now: such a file's digest is not remembered."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_gguf(path, checkpoint)
    os.utime(path, (1e9, 1e9))
    return path


class Hub:
    """A hub that holds folders, behind the functions that chatkv calls of its client."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        import huggingface_hub

        self.repositories: dict[str, Path] = {}
        self.fetched: list[str] = []
        self.breaks = False
        self._local = huggingface_hub.snapshot_download
        self._local_file = huggingface_hub.hf_hub_download
        patch.setattr("huggingface_hub.snapshot_download", self.snapshot_download)
        patch.setattr("huggingface_hub.hf_hub_download", self.hf_hub_download)
        patch.setattr("huggingface_hub.HfApi.model_info", lambda _, name, **__: self.info(name))

    def info(self, name: str) -> Any:
        if name not in self.repositories:
            from huggingface_hub.errors import RepositoryNotFoundError

            raise RepositoryNotFoundError("404", response=SimpleNamespace(headers={}, request=None))
        files = sorted(self.repositories[name].iterdir())
        return SimpleNamespace(
            siblings=[SimpleNamespace(rfilename=f.name, size=f.stat().st_size) for f in files]
        )

    def snapshot_download(self, repo_id: str, allow_patterns: list[str], **options: Any) -> str:
        if options.get("local_files_only"):
            return str(self._local(repo_id=repo_id, allow_patterns=allow_patterns, **options))
        for file in sorted(self.repositories[repo_id].iterdir()):
            if any(file.match(pattern) for pattern in allow_patterns):
                if self.breaks and file.suffix == ".safetensors":
                    raise OSError("connection lost")
                self.fetched.append(file.name)
                snapshot = _put(options["cache_dir"], file, repo_id)
        return str(snapshot)

    def hf_hub_download(self, repo_id: str, filename: str, **options: Any) -> str:
        if options.get("local_files_only"):
            return str(self._local_file(repo_id, filename, **options))
        self.fetched.append(filename)
        _put(options["cache_dir"], self.repositories[repo_id] / filename, repo_id)
        return str(options["cache_dir"] / "models--org--tiny" / "snapshots" / COMMIT / filename)


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    return Hub(monkeypatch)


def _listed(program: Program, *arguments: str) -> dict[str, dict[str, Any]]:
    return {
        row["model"]: row for row in json.loads(program("models", "ls", "--json", *arguments).out)
    }


def test_what_is_here_and_what_is_prepared_of_it(
    program: Program, cache: Path, tiny_checkpoint: Callable[..., Path], home: Path
) -> None:
    checkpoint = tiny_checkpoint("llama2")
    mine = _own(home / "mine" / "Tiny-Q8_0.gguf", checkpoint)
    shared = _put(home / "hf", checkpoint)
    (shared.parents[3] / "models--org--voice" / "snapshots" / COMMIT).mkdir(parents=True)
    assert str(mine) not in _listed(program)  # nobody has used it yet
    prepare(find_model(str(mine), cache), "float32", cache / "models")
    found = _listed(program)
    row = found.pop(str(mine))
    assert (row["origin"], row["dtype"], row["bytes"]) == ("files", "Q8_0", mine.stat().st_size)
    (copy,) = row["prepared"]
    assert copy["stored"] == "float32" and Path(copy["path"]).is_dir() and copy["bytes"] > 0
    row = found.pop("org/tiny")
    assert (row["origin"], row["kind"], row["dtype"]) == ("shared", "hf", "float32")
    assert [row["origin"] for row in found.values()] in ([], ["embedded"])
    assert program("models", "ls", "-q").out.split()[-2:] == ["org/tiny", str(mine)]
    shown = program("models", "ls").out
    assert "float32" in shown and "the hub's cache" in shown

    mine.unlink()  # its copy is nobody's now
    assert str(mine) not in _listed(program)
    assert "1 prepared copy of files that are gone" in program("models", "ls").err
    done = program("models", "rm", "--orphans", "--dry-run", "--json")
    assert json.loads(done.out)["prepared"] == [copy["path"]] and Path(copy["path"]).exists()
    assert program("models", "rm", "--orphans", "-y").code == 0
    assert not Path(copy["path"]).exists()


def test_a_copy_is_known_again_when_nothing_but_the_bytes_tell_whose_it_is(
    cache: Path, tiny_checkpoint: Callable[..., Path], home: Path
) -> None:
    mine = _own(home / "Tiny.gguf", tiny_checkpoint("llama2"))
    prepare(find_model(str(mine), cache), "float32", cache / "models")
    os.utime(mine, (2e9, 2e9))  # its digest has to be found out again
    found = inventory(cache, cache / "models")
    assert [len(model.copies) for model in found.models if model.path == mine] == [1]
    assert found.orphans == []


def test_pull_fetches_what_is_wanted(
    program: Program, hub: Hub, cache: Path, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint("llama2"), tmp_path / "repository"))
    for name in ("pytorch_model.bin", "README.md", "consolidated.safetensors"):
        (folder / name).write_bytes(b"not wanted")
    hub.repositories["org/tiny"] = folder
    done = program("models", "pull", "org/tiny")
    assert done.code == 0, done.err
    assert Path(done.out.strip()).is_dir() and "downloading org/tiny: " in done.err
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= set(hub.fetched)
    assert not {"pytorch_model.bin", "README.md", "consolidated.safetensors"} & set(hub.fetched)
    row = _listed(program)["org/tiny"]
    assert (row["origin"], row["problem"]) == ("downloaded", None)
    hub.fetched.clear()
    again = program("models", "pull", "org/tiny")
    assert again.code == 0 and "is here already" in again.err and hub.fetched == []


def test_a_download_that_broke_off_is_a_part_and_goes_on(
    program: Program, hub: Hub, tiny_checkpoint: Callable[..., Path]
) -> None:
    hub.repositories["org/tiny"] = tiny_checkpoint("llama2")
    hub.breaks = True
    done = program("models", "pull", "org/tiny")
    assert done.code == 1 and done.err.splitlines()[-1] == (
        "chatkv: cannot get org/tiny from the hub: connection lost"
    )
    assert "org/tiny" not in _listed(program)
    assert "only a part" in _listed(program, "--all")["org/tiny"]["problem"]
    assert "not on this machine" in program("models", "show", "org/tiny").err
    hub.breaks = False
    assert program("models", "pull", "org/tiny").code == 0
    assert _listed(program)["org/tiny"]["problem"] is None


def test_pull_of_one_gguf(
    program: Program, hub: Hub, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "repository"
    folder.mkdir()
    for name in ("Tiny-Q8.gguf", "Tiny-Q4.gguf"):
        write_gguf(folder / name, tiny_checkpoint("llama2"))
    hub.repositories["org/tiny"] = folder
    done = program("models", "pull", "org/tiny")
    assert done.code == 1 and "several models, name one, as org/tiny/Tiny-Q4.gguf" in done.err
    assert done.err.count("\n") == 1 and hub.fetched == []
    done = program("models", "pull", "org/tiny/Other.gguf")
    assert done.code == 1 and "has no file Other.gguf: there are Tiny-Q4.gguf (" in done.err
    for name in ("Tiny-Q8.gguf", "Tiny-Q4.gguf"):
        assert program("models", "pull", f"org/tiny/{name}").code == 0
    assert hub.fetched == ["Tiny-Q8.gguf", "Tiny-Q4.gguf"]

    first, second = "org/tiny/Tiny-Q4.gguf", "org/tiny/Tiny-Q8.gguf"
    assert {first, second} <= set(_listed(program))
    assert program("models", "rm", first, "--downloads", "-y").code == 0
    assert first not in _listed(program) and second in _listed(program)
    assert program("models", "rm", second, "--downloads", "-y").code == 0
    assert second not in _listed(program)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("org/none", None, "the hub has no model org/none"),
        ("org/tiny", {"model_type": "gemma"}, "is not supported"),
        ("nonsense", None, "write ORG/NAME or ORG/NAME/FILE.gguf"),
    ],
)
def test_what_cannot_be_had_is_one_line_and_fetches_no_weights(
    program: Program,
    hub: Hub,
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    name: str,
    change: dict[str, str] | None,
    said: str,
) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint("llama2"), tmp_path / "repository"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | (change or {})))
    hub.repositories["org/tiny"] = folder
    done = program("models", "pull", name)
    assert done.code in (1, 2) and done.out == "" and said in done.err
    assert done.err.count("\n") == 1 and "model.safetensors" not in hub.fetched


def test_offline_and_full_disks_are_one_line(
    program: Program,
    hub: Hub,
    tiny_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub.repositories["org/tiny"] = tiny_checkpoint("llama2")
    usage = SimpleNamespace(total=10, used=3, free=7)
    monkeypatch.setattr("chatkv.model.download.disk_usage", lambda _: usage)
    done = program("models", "pull", "org/tiny")
    assert done.code == 1 and "and 7 B are free in" in done.err

    def offline(*_: object, **__: object) -> None:
        raise ConnectionError("offline\nmode")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", offline)
    done = program("models", "pull", "org/tiny")
    assert done.err == "chatkv: cannot ask the hub for org/tiny: offline mode\n"
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    done = program("models", "pull", "org/other")
    assert done.code == 1 and 'pip install "chatkv[hub]"' in done.err


def test_rm_asks_and_leaves_what_is_not_ours(
    program: Program, cache: Path, hub: Hub, tiny_checkpoint: Callable[..., Path], home: Path
) -> None:
    mine = _own(home / "Tiny.gguf", tiny_checkpoint("llama2"))
    prepare(find_model(str(mine), cache), "float32", cache / "models")
    _put(home / "hf", tiny_checkpoint("qwen2"), "org/shared")
    hub.repositories["org/tiny"] = tiny_checkpoint("llama2")
    assert program("models", "pull", "org/tiny").code == 0
    names = [str(mine), "org/shared", "org/tiny"]
    (copy,) = _listed(program)[str(mine)]["prepared"]

    done = program("models", "rm", *names)
    assert done.code == 2 and "add -y" in done.err and Path(copy["path"]).exists()
    done = program("models", "rm", *names, "-y")
    assert done.code == 0 and "deleted 1 prepared copy, " in done.err
    assert "--downloads deletes it too" in done.err
    assert not Path(copy["path"]).exists() and {"org/shared", "org/tiny"} <= set(_listed(program))
    prepare(find_model(str(mine), cache), "float32", cache / "models")  # is made again

    done = program("models", "rm", *names, "--downloads", "-y")
    assert "hf cache rm model/org/shared" in done.err and "was not downloaded" in done.err
    assert list(downloads(cache).glob("models--*")) == []
    assert mine.exists() and "org/shared" in _listed(program)
    assert program("models", "rm", "org/tiny").code == 1
    assert program("models", "rm").code == 2


def test_show_adds_up_what_a_model_needs(
    program: Program, cache: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    folder = tiny_checkpoint("llama2")
    asked = ("models", "show", str(folder), "--dtype", "float32", "--json")
    length = ("--context", "64", "--sessions", "3")
    shown = json.loads(program(*asked, *length).out)
    config = json.loads((folder / "config.json").read_text())
    assert shown["architecture"] == "llama" and shown["layers"] == config["num_hidden_layers"]
    raw = shown["layers"] * 2 * shown["kv_heads"] * shown["head_dim"] * 4
    kv = shown["kv_bytes_per_token"]
    assert raw <= kv["raw"] < raw + 1 and kv["int4"] < kv["int8"] < raw and kv["lossless"] is None
    memory = shown["memory"]
    assert memory["kv_bytes"] == 3 * 64 * raw and memory["fits"]
    embedding = shown["vocabulary"] * shown["hidden_size"]  # of which only rows are in memory
    assert memory["weights_bytes"] >= 4 * (shown["parameters"] - embedding)
    weights_bytes = (folder / "model.safetensors").stat().st_size
    assert 0.9 * weights_bytes < 4 * shown["parameters"] <= weights_bytes
    assert len(shown["digest"]) == 64
    huge = json.loads(program(*asked, "--sessions", "1000000000").out)["memory"]
    assert not huge["fits"] and huge["sessions_that_fit"] <= 8
    halved = 2 * embedding if has_half_product() else 0  # the head beside smaller weights
    for weights in ("fp16", "int8", "int4"):  # as they are written
        found = json.loads(program(*asked, *length, "--weights", weights).out)["memory"]
        few = found["weights_bytes"]
        files = find_model(str(folder), cache)
        made = prepare(files, "float32", cache / "models", quantised=weights).weights
        saved = _tensor_bytes(files.files) - _tensor_bytes(made) + halved
        twice = weights == "int4"  # in two forms, without the ends of runs
        assert memory["weights_bytes"] - few == saved > 0 or twice
        assert memory["weights_bytes"] - saved <= few < memory["weights_bytes"]
    human = program("models", "show", str(folder), "--dtype", "float32").out
    assert "architecture  llama" in human and "KV may take" in human
    gguf = write_gguf(folder.parent / "model.gguf", folder, quantised="Q8_0")
    asked = ("models", "show", str(gguf), "--dtype", "float32", "--weights", "own")
    shown = json.loads(program(*asked, *length, "--json").out)
    kept = {"count": 21, "in_file": "Q8_0", "stored": "int8 in groups of 32"}
    assert shown["matrices"] == [kept]
    made = prepare(find_model(str(gguf), cache), "float32", cache / "models", quantised="own")
    full = prepare(find_model(str(gguf), cache), "float32", cache / "models")
    saved = _tensor_bytes(full.weights) - _tensor_bytes(made.weights) + halved
    own = shown["memory"]["weights_bytes"]  # codes of groups are held in two forms
    assert memory["weights_bytes"] - saved < own < memory["weights_bytes"]
    assert "21 stored as int8 in groups of 32 (in the file: Q8_0)" in program(*asked).out


def _tensor_bytes(files: Sequence[Path]) -> int:
    total = 0
    for file in files:
        with safe_open(file, "pt") as tensors:
            found = (tensors.get_tensor(name) for name in tensors.keys())  # noqa: SIM118
            total += sum(tensor.nbytes for tensor in found)
    return total


def test_show_knows_a_gguf_before_and_after_it_is_prepared(
    program: Program, cache: Path, tiny_checkpoint: Callable[..., Path], home: Path
) -> None:
    mine = _own(home / "Tiny.gguf", tiny_checkpoint("llama2"))
    shown = []
    for _ in range(2):
        values = json.loads(program("models", "show", str(mine), "--json").out)
        shown.append({k: values[k] for k in ("parameters", "context", "template", "digest")})
        prepare(find_model(str(mine), cache), "float32", cache / "models")
    assert shown[0] == shown[1]


def test_kv_that_does_not_fit_a_gpu_is_said() -> None:
    from chatkv.engine.ledger import ledger
    from chatkv.engine.needs import Asked, needs_on_gpu

    config = ModelConfig("llama", 32000, 4096, 11008, 32, 32, 32, 128, 1e-5, 1e4, 4096)
    fixed = ledger(config, 2, 0, 1 << 20)
    needs = needs_on_gpu(config, 2, Asked(4096, 2, 8 * 4096), 24 << 30, 1 << 20)
    assert needs.weights == fixed.weights and needs.weights + needs.work == fixed.fixed
    assert needs.kv == 2 * 4096 * 32 * 2 * 32 * 128 * 2
    assert needs.fits == (needs.num_sessions >= 2)
    assert needs_on_gpu(config, 2, Asked(4096, 1, 8 * 4096), 1 << 30, 0).num_sessions == 0


def test_nothing_is_downloaded_for_show(program: Program, hub: Hub) -> None:
    done = program("models", "show", "org/tiny")
    assert done.code == 1 and done.err == (
        "chatkv: org/tiny is not on this machine: `chatkv models pull org/tiny` downloads it\n"
    )
    assert hub.fetched == []
    with pytest.raises(ModelError):
        find_model("org/tiny/x.gguf", Path("/nonexistent"), may_download=False)
