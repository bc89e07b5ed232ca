"""What `--weights auto` means for a model on this machine.

Where a file stores its weights in few bits itself, they are kept so if that answers sooner: nothing
is lost by it. Others stay in the dtype. Only a model that would not fit is quantised, and that is
said. Which one it is decides whose KV it is; so it is found out once and remembered.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import torch

from chatkv.engine.needs import Asked, needs_on_cpu, needs_on_gpu
from chatkv.model.catalog import ModelFiles
from chatkv.model.config import ModelConfig
from chatkv.model.dtype import cpu_key, read_note
from chatkv.model.identity import weights_digest
from chatkv.model.own_codes import own_layouts
from chatkv.model.prepared import Dtype, Quantised, Stored
from chatkv.model.quantise import Layout
from chatkv.model.weights_speed import measure
from chatkv.paths import Folders, write_note
from chatkv.process import physical_bytes
from chatkv.words import size

if TYPE_CHECKING:
    from chatkv.model.weights_speed import Speeds

Progress = Callable[[str, int, int], None]

FILE_NAME = "weights_choice.json"
# Weights and work may take this share of a machine's memory; the rest is KV's, and others'.
SHARE_OF_MEMORY = 0.75
# A reply of so many tokens to a prompt of so many is what has to take less time, by so much.
REPLY_TOKENS, PROMPT_TOKENS, WORTH = 128, 256, 1.1
# From the least loss on.
_SMALLER: tuple[Quantised, ...] = ("own", "fp16", "int8", "int4")


@dataclass(frozen=True)
class ChosenWeights:
    """`why` is a line for people. is_lossy: quantised although the file is not. The ratios say how
    many times as fast as full weights the file's own are here; None where that was not measured."""

    weights: Stored
    why: str
    is_lossy: bool = False
    decode_ratio: float | None = None
    prefill_ratio: float | None = None


def choose_weights(
    files: ModelFiles,
    dtype: Dtype,
    device: torch.device,
    folders: Folders,
    measures: bool = True,
    on_progress: Progress | None = None,
) -> ChosenWeights:
    """What is remembered for this model, dtype and machine; else found out, in a few seconds where
    it has to be measured. measures False: full weights where they fit, and nothing remembered."""
    note = _Note(files, dtype, device, folders.models, on_progress)
    if (known := note.read()) is not None:
        return known
    config = _config(files)
    own = own_layouts(files, config)
    if (small := _too_large(config, dtype, device, own)) is not None:
        chosen = small
    elif not own:
        chosen = ChosenWeights("full", "without loss, since the file has no smaller ones itself")
    elif device.type != "cpu":
        return ChosenWeights("full", "nothing is known of its own weights' speed on a GPU")
    elif not measures:
        return ChosenWeights("full", "how fast its own weights are here is not measured")
    else:
        speeds = measure(config, own, dtype, folders.cache, on_progress)
        chosen = _sooner(speeds)
        if not speeds.is_steady:
            return chosen
    note.write(chosen)
    return chosen


def remembered_weights(
    files: ModelFiles, dtype: Dtype, device: torch.device, folders: Folders
) -> ChosenWeights | None:
    """What `choose_weights` has found out before."""
    return _Note(files, dtype, device, folders.models, None).read()


def _sooner(speeds: Speeds) -> ChosenWeights:
    decode, prefill = speeds.decode_ratio, speeds.prefill_ratio
    full_s = REPLY_TOKENS * speeds.full.decode_s + PROMPT_TOKENS * speeds.full.prefill_s
    own_s = REPLY_TOKENS * speeds.few.decode_s + PROMPT_TOKENS * speeds.few.prefill_s
    told = f"replies {decode:.1f} times as fast as full ones here, prompts {prefill:.1f} times"
    if not speeds.is_steady:
        why = "others computed while its own were measured: that is done again at the next start"
        return ChosenWeights("full", why)
    if WORTH * own_s < full_s:
        return ChosenWeights("own", f"as the file has them: {told}", False, decode, prefill)
    why = f"the file's own gain nothing: {told}"
    return ChosenWeights("full", why, False, decode, prefill)


def _too_large(
    config: ModelConfig, dtype: Dtype, device: torch.device, own: Mapping[str, Layout]
) -> ChosenWeights | None:
    """What is taken where full weights do not fit; None where they do."""
    memory = _memory(device)
    takes = {kind: _takes(config, dtype, device, kind, own) for kind in ("full", *_SMALLER)}
    fitting = [kind for kind, taken in takes.items() if taken <= SHARE_OF_MEMORY * memory]
    if "full" in fitting:
        return None
    why = f"full ones take {size(takes['full'])} and this machine has {size(memory)}"
    smaller = [kind for kind in _SMALLER if own or kind != "own"]
    kind = next((kind for kind in smaller if kind in fitting), smaller[-1])
    if kind == "own":
        return ChosenWeights(kind, f"as the file has them: {why}")
    lost = "not without loss: `chatkv models measure` tells how much"
    return ChosenWeights(kind, f"{why}; {lost}", is_lossy=True)


def _takes(
    config: ModelConfig,
    dtype: Dtype,
    device: torch.device,
    kind: str,
    own: Mapping[str, Layout],
) -> int:
    itemsize = 4 if dtype == "float32" else 2
    layouts = own if kind == "own" else {}
    asked = Asked(config.max_position, 1, config.max_position, kind, layouts)
    if device.type == "cpu":
        needs = needs_on_cpu(config, itemsize, asked, 0, 0.0)
    else:
        needs = needs_on_gpu(config, itemsize, asked, 0, 0)
    return needs.weights + needs.work


def _memory(device: torch.device) -> int:
    """Of the machine or the GPU; what is free of it changes from start to start."""
    if device.type == "cpu":
        return physical_bytes()
    return int(torch.cuda.get_device_properties(device).total_memory)


def _config(files: ModelFiles) -> ModelConfig:
    from chatkv.model.facts import facts

    return facts(files).config


class _Note:
    """What is remembered of one model, dtype and machine."""

    def __init__(
        self,
        files: ModelFiles,
        dtype: Dtype,
        device: torch.device,
        models: Path,
        on_progress: Progress | None,
    ) -> None:
        self._path = models / FILE_NAME
        digest = weights_digest(files.files, models, on_progress).hex()[:32]
        memory = f"{_memory(device) / 2**30:.0f} GiB"
        computes = cpu_key() if device.type == "cpu" else torch.cuda.get_device_name(device)
        self._key = f"{digest}/{dtype}/{device.type}/{computes}/{memory}"

    def read(self) -> ChosenWeights | None:
        try:
            known = ChosenWeights(**read_note(self._path)[self._key])
        except (KeyError, TypeError):
            return None
        return known if known.weights in get_args(Stored) else None

    def write(self, chosen: ChosenWeights) -> None:
        with suppress(OSError):  # then the note is not written either
            self._path.parent.mkdir(parents=True, exist_ok=True)
        known = read_note(self._path) | {self._key: asdict(chosen)}
        write_note(self._path, json.dumps(known, indent=1))
