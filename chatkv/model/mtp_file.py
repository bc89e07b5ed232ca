"""Files of modules and heads: what is in them, for which weights they were made, how to read them.

A file is safetensors. Its metadata tell the kind, the digest of the model's weight files that it
was trained on, and what was measured then. Modules have the names of DeepSeek-V3's checkpoints,
`model.layers.{num_layers + n}.…`; so they are found in a checkpoint that has them itself, too.
Matrices may be in 8 bits, as `.codes` and `.scales` (quantise.py).
Others are read from a file whose digest is the model's: any other weights would make poor guesses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from chatkv.errors import ModelError
from chatkv.model.config import ModelConfig
from chatkv.model.decoder import Decoder
from chatkv.model.mtp import Foresight, Module, ParallelHead, Predictor, SharedHead, module_config
from chatkv.model.one_line import one_line
from chatkv.model.quantise import from_parts, is_quantised, part_names, quantise, tensors_of
from chatkv.model.quantised_linear import dequantised
from chatkv.model.weights import Weight, dense_weight, expected_shapes

if TYPE_CHECKING:
    from chatkv.model.prepared import PreparedModel

Kind = Literal["modules", "heads"]
FORMAT = "chatkv-mtp-1"
VOCABULARY = "vocabulary"


@dataclass(frozen=True)
class About:
    """What a file tells of itself. acceptance: how often the first, second, ... drafted token was
    right on conversations that were held out, where those before it were; by how they were drawn.
    """

    kind: Kind
    weights: str  # digest of the model's weight files, in hex
    window: int = 256
    acceptance: dict[str, list[float]] = field(default_factory=dict)
    trained_on: str = ""

    def to_metadata(self) -> dict[str, str]:
        fields = {name: value for name, value in vars(self).items() if name != "kind"}
        return {"format": FORMAT, "kind": self.kind, "about": json.dumps(fields, sort_keys=True)}


def module_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name → shape of the tensors of one module, without its prefix."""
    prefix, hidden = "model.layers.0.", config.hidden_size
    layer = expected_shapes(module_config(config)).items()
    return {
        "enorm.weight": (hidden,),
        "hnorm.weight": (hidden,),
        "eh_proj.weight": (hidden, 2 * hidden),
        **{name.removeprefix(prefix): shape for name, shape in layer if name.startswith(prefix)},
        "shared_head.norm.weight": (hidden,),
    }


def head_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of one parallel head."""
    return {
        "linear.weight": (config.hidden_size, config.hidden_size),
        "linear.bias": (config.hidden_size,),
    }


def module_prefix(config: ModelConfig, number: int) -> str:
    return f"model.layers.{config.num_layers + number}."


def head_prefix(number: int) -> str:
    return f"heads.{number}."


def shipped_file() -> Path:
    """The modules of the embedded default model, which come with this package."""
    return Path(str(resources.files("chatkv.model"))) / "smollm2-135m-instruct.mtp.safetensors"


def read_about(file: Path) -> About:
    """What a file tells of itself. Raises ModelError for one that is no such file."""
    with _reading(file) as opened:
        metadata = opened.metadata() or {}
    if metadata.get("format") != FORMAT:
        raise ModelError(f"{file} is no file of scripts/train_mtp.py")
    try:
        return About(kind=metadata["kind"], **json.loads(metadata["about"]))
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{file} says nothing sound of itself: {one_line(error)}") from error


def small_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as they are written: matrices in 8 bits, others in bfloat16."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if is_quantised(name):
            parts = tensors_of(quantise(tensor.float(), "int8"))
            found |= dict(zip(part_names(name), parts, strict=False))
        else:
            found[name] = tensor.bfloat16()
    return found


def dense_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `small_tensors`, in float32."""
    found = {n: t for n, t in tensors.items() if not n.endswith((".codes", ".scales"))}
    for name in tensors:
        if name.endswith(".codes"):
            whole = name.removesuffix(".codes")
            coded = from_parts(tensors, whole, tuple(tensors[name].shape))
            assert coded is not None, f"{whole} is not what small_tensors has made"
            found[whole] = dequantised(coded, torch.float32)
    return found


def predictor_from(
    file: Path,
    decoder: Decoder,
    weights: Mapping[str, Weight],
    files_digest: bytes,
    is_small: bool = True,
) -> Predictor:
    """What is in `file`, behind `decoder`, whose tensors are `weights`. is_small: matrices are kept
    in 8 bits. They only guess, which changes no answer, and between two steps of the model none of
    them is left in the CPU's caches: what a guess takes is reading them.

    Raises ModelError for a file that cannot be read, or was made for other weights.
    """
    about, tensors = _open(file)
    if about.weights != files_digest.hex():
        raise ModelError(
            f"{file} was made for other weights: {about.weights[:16]}, and the model's are "
            f"{files_digest.hex()[:16]}; train it again with scripts/train_mtp.py"
        )
    config = decoder.config
    vocabulary = tensors.get(VOCABULARY)
    if vocabulary is not None:
        vocabulary = _sound_vocabulary(file, vocabulary.long(), config)
    head = SharedHead(decoder, _head_rows(decoder, weights), vocabulary, is_small)
    found = Predictor(head, decoder.embedding, window=about.window)
    if about.kind == "modules":
        return replace(found, modules=_modules(file, tensors, decoder, is_small))
    parts = _parts(file, tensors, head_prefix, head_shapes(config), decoder.dtype, False)
    dense = [
        [dense_weight(part[f"linear.{name}"]) for name in ("weight", "bias")] for part in parts
    ]
    heads = [ParallelHead(weight, bias) for weight, bias in dense]
    return replace(found, heads=heads)


def predictor_in_checkpoint(
    files: Sequence[Path], decoder: Decoder, weights: Mapping[str, Weight]
) -> Predictor | None:
    """The modules that a checkpoint itself holds; None where it has none. Raises ModelError."""
    behind = re.compile(r"model\.layers\.(\d+)\.")
    found: dict[str, Tensor] = {}
    for file in files:
        with _reading(file) as opened:
            for name in opened.keys():  # noqa: SIM118
                layer = behind.match(name)
                if layer and int(layer[1]) >= decoder.config.num_layers:
                    found[name] = opened.get_tensor(name)
    if not found:
        return None
    modules = _modules(files[0], found, decoder, is_small=True)
    head = SharedHead(decoder, _head_rows(decoder, weights), None)
    return Predictor(head, decoder.embedding, modules)


def find_foresight(
    named: str | None, prepared: PreparedModel, decoder: Decoder, weights: Mapping[str, Weight]
) -> Foresight | None:
    """What drafts for a prepared model: of the file that was named, else of its own checkpoint,
    else what comes with this package, which is for the embedded default; None: nothing.

    How the weights are kept does not matter: quantised ones are guessed at a little worse. Raises
    ModelError for a file that was named and cannot be used.
    """
    digest = prepared.files_digest
    if named:
        file = Path(named).expanduser()
        predictor = predictor_from(file, decoder, weights, digest)
        return Foresight(lambda: predictor, _first_rate(read_about(file)))
    own = predictor_in_checkpoint(prepared.weights, decoder, weights)
    if own is not None:
        return Foresight(lambda: own)
    if not is_shipped_for(digest):
        return None
    shipped = shipped_file()
    make = partial(predictor_from, shipped, decoder, weights, digest)
    return Foresight(make, _first_rate(read_about(shipped)))


def _first_rate(about: About) -> float | None:
    return next(iter(about.acceptance.get("greedy", [])), None)


def is_shipped_for(files_digest: bytes) -> bool:
    """Whether what comes with this package was made for these weights."""
    file = shipped_file()
    return file.is_file() and read_about(file).weights == files_digest.hex()


def _modules(
    file: Path, tensors: Mapping[str, Tensor], decoder: Decoder, is_small: bool
) -> list[Module]:
    config = decoder.config
    parts = _parts(
        file,
        tensors,
        lambda number: module_prefix(config, number),
        module_shapes(config),
        decoder.dtype,
        is_small,
    )
    return [Module(config, part, decoder.rope) for part in parts]


def _parts(
    file: Path,
    tensors: Mapping[str, Tensor],
    prefix_of: Callable[[int], str],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    is_small: bool,
) -> list[dict[str, Weight]]:
    """The tensors of each module or head, as long as there are any."""
    found: list[dict[str, Weight]] = []
    while any(name.startswith(prefix_of(len(found))) for name in tensors):
        prefix, part = prefix_of(len(found)), {}
        for name, shape in shapes.items():
            tensor = tensors.get(prefix + name)
            coded = from_parts(tensors, prefix + name, shape) if len(shape) == 2 else None
            if tensor is None and coded is not None:
                part[name] = coded if is_small else dequantised(coded, dtype)
                continue
            if tensor is None:
                raise ModelError(f"{file} lacks the tensor {prefix}{name}")
            if tuple(tensor.shape) != shape:
                raise ModelError(
                    f"{file}: {prefix}{name} has the shape {list(tensor.shape)}, and the model "
                    f"wants {list(shape)}"
                )
            can_be_small = is_small and is_quantised(name) and shape[1] % 16 == 0
            part[name] = quantise(tensor.float(), "int8") if can_be_small else tensor.to(dtype)
        found.append(part)
    if not found:
        raise ModelError(f"{file} holds nothing that this model could guess with")
    return found


def _head_rows(decoder: Decoder, weights: Mapping[str, Weight]) -> Tensor:
    if decoder.config.tie_embeddings:
        return decoder.embedding
    rows = weights["lm_head.weight"]
    assert isinstance(rows, Tensor), "heads are not quantised"
    return rows


def _sound_vocabulary(file: Path, vocabulary: Tensor, config: ModelConfig) -> Tensor:
    in_range = len(vocabulary) and 0 <= int(vocabulary.min()) <= int(vocabulary.max())
    if not in_range or int(vocabulary.max()) >= config.vocab_size:
        raise ModelError(f"{file}: its tokens are not those of the model")
    if len(set(vocabulary.tolist())) < len(vocabulary):
        raise ModelError(f"{file} has a token twice")
    return vocabulary


def _open(file: Path) -> tuple[About, dict[str, Tensor]]:
    about = read_about(file)
    with _reading(file) as opened:
        return about, {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


@contextmanager
def _reading(file: Path) -> Iterator[Any]:
    import safetensors

    try:
        with safetensors.safe_open(str(file), framework="pt", device="cpu") as opened:
            yield opened
    except (OSError, safetensors.SafetensorError, ValueError, RuntimeError) as error:
        raise ModelError(f"{file} is no sound safetensors file: {one_line(error)}") from error
