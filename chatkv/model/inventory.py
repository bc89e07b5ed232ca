"""Which models are on this machine, and which copies of them are prepared.

Knows: the embedded model; what was downloaded, by us or into the hub's own cache; files and folders
that were used before, whose digests are remembered. Looks at names, sizes and JSON, never at
weights, unless nothing else tells whose a prepared copy is.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from chatkv.errors import ModelError
from chatkv.model.catalog import ModelFiles, downloads, find_model, is_complete, read_json
from chatkv.model.hf_checkpoint import read_checkpoint, read_scheme
from chatkv.model.identity import remembered_digest, remembered_files, weights_digest
from chatkv.model.one_line import one_line

# embedded: comes with the program; downloaded: by chatkv, below its cache; shared: in the hub's own
# cache, which other programs use too; files: a user's own.
Origin = Literal["embedded", "downloaded", "shared", "files"]

_COPY = re.compile(r"([0-9a-f]{32})-([a-z0-9-]+)")
_QUANTISED = re.compile(r"[-._]((?:I?Q\d\w*|BF16|F16|F32))$", re.IGNORECASE)


@dataclass(frozen=True)
class PreparedCopy:
    """A model as a start maps it. `stored`: its dtype, and how it is quantised."""

    folder: Path
    digest: str  # of the files it was made from, the first half in hex
    stored: str
    num_bytes: int


@dataclass(frozen=True)
class KnownModel:
    """`name` is what --model takes; `problem` says why it cannot be used."""

    name: str
    origin: Origin
    path: Path
    files: tuple[Path, ...]
    kind: Literal["gguf", "hf"]
    dtype: str  # of the files: what they say, "" where they say nothing
    num_bytes: int  # of the weights' files
    problem: str | None = None
    copies: tuple[PreparedCopy, ...] = ()

    @property
    def spec(self) -> str | None:
        """What `find_model` takes."""
        return None if self.origin == "embedded" else self.name


@dataclass(frozen=True)
class Inventory:
    """`orphans` are prepared copies of files that are gone."""

    models: list[KnownModel] = field(default_factory=list)
    orphans: list[PreparedCopy] = field(default_factory=list)


def inventory(cache: Path, models_dir: Path) -> Inventory:
    """Everything there is; `cache` and `models_dir` as for `find_model` and `prepare`."""
    found = [*_embedded(cache), *_in_hub_caches(cache)]
    found += _own_files(models_dir, {file for model in found for file in model.files})
    copies = list(_copies(models_dir))
    known: list[KnownModel] = []
    for model in found:
        digest = _digest(model.files, models_dir, bool(copies) and model.kind == "gguf")
        mine = tuple(copy for copy in copies if copy.digest == digest)
        known.append(replace(model, copies=mine))
    used = {copy.folder for model in known for copy in model.copies}
    orphans = [copy for copy in copies if copy.folder not in used]
    return Inventory(known, orphans)


def names(cache: Path, models_dir: Path) -> list[str]:
    """What --model could be given, by names alone: quick, and for a shell to offer."""
    found = []
    for folder in (hub_cache(), downloads(cache)):
        for repository in sorted(folder.glob("models--*--*")):
            name = repository.name.removeprefix("models--").replace("--", "/", 1)
            ggufs = sorted({path.name for path in repository.glob("snapshots/*/*.gguf")})
            found += [f"{name}/{gguf}" for gguf in ggufs] or [name]
    found += [str(path) for path in _user_files(cache, models_dir) if path.suffix == ".gguf"]
    return list(dict.fromkeys(found))


def hub_cache() -> Path:
    """The hub's own cache, which its variables move, as its documentation describes them."""
    if library := sys.modules.get("huggingface_hub.constants"):
        return Path(library.HF_HUB_CACHE)
    if named := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(named).expanduser()
    above = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or Path(above) / "huggingface").expanduser() / "hub"


def _embedded(cache: Path) -> Iterator[KnownModel]:
    with suppress(ModelError):
        yield _known(find_model(None, cache), "embedded")


def _in_hub_caches(cache: Path) -> Iterator[KnownModel]:
    """What lies in both caches and is of a kind that chatkv runs."""
    try:
        from huggingface_hub import scan_cache_dir
        from huggingface_hub.errors import CacheNotFound
    except ImportError:  # without it they cannot be used either
        return
    places: tuple[tuple[Path, Origin], ...] = (
        (hub_cache(), "shared"),
        (downloads(cache), "downloaded"),
    )
    for place, origin in places:
        try:
            repositories = scan_cache_dir(place).repos
        except (CacheNotFound, OSError, ValueError):
            continue
        for repository in sorted(repositories, key=lambda one: one.repo_id):
            if repository.repo_type == "model" and repository.revisions:
                yield from _in_repository(repository, origin)


def _in_repository(repository: Any, origin: Origin) -> Iterator[KnownModel]:
    newest = max(repository.revisions, key=lambda one: ("main" in one.refs, one.last_modified))
    snapshot, name = Path(newest.snapshot_path), str(repository.repo_id)
    for path in sorted(snapshot.glob("**/*.gguf")):
        inside = path.relative_to(snapshot)
        yield _known(ModelFiles(f"{name}/{inside}", "gguf", path, (path,)), origin)
    if not _is_ours(snapshot):
        return
    part = f"only a part is here: `chatkv models pull {name}` goes on"
    try:
        files = find_model(str(snapshot), snapshot)
    except ModelError:
        if origin == "downloaded":  # of another program's cache that is nothing to tell
            yield KnownModel(name, origin, snapshot, (), "hf", "", _bytes(snapshot), part)
        return
    found = _known(ModelFiles(name, "hf", snapshot, files.files), origin)
    is_part = origin == "downloaded" and not is_complete(snapshot)
    yield replace(found, problem=part) if is_part else found


def _is_ours(snapshot: Path) -> bool:
    """Whether it is a checkpoint of a kind that chatkv runs."""
    from chatkv.model.hf_config import config_from_hf

    try:
        config_from_hf(read_json(snapshot / "config.json"), "")
    except ModelError:
        return False
    return True


def _own_files(models_dir: Path, known: set[Path]) -> Iterator[KnownModel]:
    """A user's own files and folders, as far as they were ever used."""
    seen: set[Path] = set()
    for file in _user_files(models_dir.parent, models_dir):
        path = file if file.suffix == ".gguf" else file.parent
        if file in known or path in seen:
            continue
        seen.add(path)
        with suppress(ModelError):
            files = find_model(str(path), models_dir)
            yield _known(ModelFiles(str(path), files.kind, path, files.files), "files")


def _user_files(cache: Path, models_dir: Path) -> Iterator[Path]:
    for file in remembered_files(models_dir):
        in_a_cache = any(file.is_relative_to(one) for one in (hub_cache(), downloads(cache)))
        if not in_a_cache and file.is_file() and not _is_embedded(file, cache):
            yield file


def _is_embedded(file: Path, cache: Path) -> bool:
    try:
        return file == find_model(None, cache).path
    except ModelError:
        return False


def _known(files: ModelFiles, origin: Origin) -> KnownModel:
    problem, dtype = None, ""
    if files.kind == "hf":
        try:
            config = read_json(files.path / "config.json")
            dtype = str(config.get("torch_dtype") or config.get("dtype") or "")
            read_checkpoint(files.path)
            if (scheme := read_scheme(files.path)) is not None:
                dtype = scheme.method
        except ModelError as error:
            problem = one_line(error)
    elif named := _QUANTISED.search(files.path.stem):
        dtype = named[1].upper()
    num_bytes = sum(file.stat().st_size for file in files.files)
    return KnownModel(
        files.name, origin, files.path, files.files, files.kind, dtype, num_bytes, problem
    )


def _digest(files: tuple[Path, ...], models_dir: Path, must_know: bool) -> str:
    """As the names of prepared copies begin; "" where a checkpoint's was never needed."""
    digest = remembered_digest(files, models_dir) if files else None
    if digest is None and must_know:
        with suppress(ModelError):
            digest = weights_digest(files, models_dir)
    return digest.hex()[:32] if digest else ""


def _copies(models_dir: Path) -> Iterator[PreparedCopy]:
    for folder in sorted(models_dir.glob("*-*")):
        if (named := _COPY.fullmatch(folder.name)) and folder.is_dir():
            yield PreparedCopy(folder, named[1], named[2], _bytes(folder))


def _bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def prepared_record(copy: PreparedCopy) -> dict[str, Any]:
    """What a prepared copy says of itself; empty where it says nothing."""
    try:
        fields = json.loads((copy.folder / "prepared.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return fields if isinstance(fields, dict) else {}


def remove_copy(copy: PreparedCopy) -> None:
    """Delete a prepared copy; a process that runs on it keeps its mapping. Raises OSError."""
    with copy.folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as who makes one does
        shutil.rmtree(copy.folder, ignore_errors=False)
