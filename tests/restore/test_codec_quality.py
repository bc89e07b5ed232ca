"""Measuring codecs on a model: exact ones cost nothing, coarser ones more, and it is remembered."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from chatkv.cli.main import cli
from chatkv.engine.pool import BLOCK_TOKENS
from chatkv.errors import UsageError
from chatkv.model.catalog import find_model
from chatkv.model.decoder import Decoder
from chatkv.model.prepared import Dtype, PreparedModel, prepare
from chatkv.model.tokenizer import Tokenizer
from chatkv.model.weights import load_weights
from chatkv.paths import folders
from chatkv.session import codec_record
from chatkv.session.codec_quality import CODECS, measure_codecs
from chatkv.session.codec_record import CodecQuality
from chatkv_store import KVLayout, codec

TEXT = "the keys and values of sixty four tokens are held in a block, and a session holds many. "


def loaded(
    spec: Path, tmp_path: Path, dtype: Dtype = "float32"
) -> tuple[PreparedModel, Decoder, KVLayout]:
    prepared = prepare(find_model(str(spec), tmp_path), dtype, tmp_path)
    config = prepared.config
    layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, dtype, BLOCK_TOKENS)
    return prepared, Decoder(config, load_weights(prepared)), layout


@pytest.fixture
def tiny(
    tmp_path: Path, tiny_checkpoint: Callable[..., Path]
) -> tuple[Decoder, KVLayout, list[int]]:
    prepared, decoder, layout = loaded(tiny_checkpoint("qwen3"), tmp_path)
    return decoder, layout, Tokenizer.from_prepared(prepared).encode(TEXT * 20)[:400]


def test_exact_codecs_cost_nothing_and_coarser_ones_more(
    tiny: tuple[Decoder, KVLayout, list[int]],
) -> None:
    measured = {quality.codec: quality for quality in measure_codecs(*tiny)}
    assert list(measured) == list(CODECS)
    for name in ("raw", "lossless", "packed"):
        quality = measured[name]
        assert quality.is_bit_exact and quality.kl == 0 and quality.top1_agreement == 1
        assert quality.perplexity == quality.exact_perplexity
    for name in ("int8", "fp8", "int4"):
        assert not measured[name].is_bit_exact and measured[name].kl > 0
    assert measured["int8"].kl < measured["fp8"].kl < measured["int4"].kl
    ratios = [measured[name].ratio for name in ("raw", "packed", "int8", "int4")]
    assert ratios == sorted(ratios)
    assert measured["raw"].num_tokens == 400 - 192 - 1


def test_exact_perplexity_is_that_of_one_pass(tiny: tuple[Decoder, KVLayout, list[int]]) -> None:
    """Against logits computed without blocks, halves and chunks."""
    decoder, layout, ids = tiny
    (measured,) = measure_codecs(decoder, layout, ids, ["raw"])

    class Whole:
        start, length, draft = 0, len(ids), None

        def extend(
            self, layer: int, keys: torch.Tensor, values: torch.Tensor
        ) -> Sequence[torch.Tensor]:
            return keys.transpose(0, 1), values.transpose(0, 1)

    logits = decoder.forward(torch.tensor(ids), [Whole()], every_position=True)  # type: ignore[list-item]
    loss = torch.nn.functional.cross_entropy(logits[192:-1], torch.tensor(ids[193:]))
    assert measured.exact_perplexity == pytest.approx(loss.exp().item(), rel=1e-4)


def test_a_codec_that_ruins_kv_is_found_out(
    tiny: tuple[Decoder, KVLayout, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (before,) = measure_codecs(*tiny, ["int8"])
    broken = codec.by_name("int8")
    honest = broken.encode
    monkeypatch.setattr(broken, "encode", lambda bits, context: honest(bits[:, ::-1], context))
    (after,) = measure_codecs(*tiny, ["int8"])
    assert after.kl > 100 * before.kl
    assert after.top1_agreement < before.top1_agreement


@pytest.mark.parametrize("num_tokens", [0, 127, 1025])
def test_texts_of_a_wrong_length_are_refused(
    num_tokens: int, tiny: tuple[Decoder, KVLayout, list[int]]
) -> None:
    decoder, layout, ids = tiny
    with pytest.raises(UsageError, match=f"the text has {num_tokens} tokens"):
        measure_codecs(decoder, layout, (ids * 3)[:num_tokens])


def test_the_command_measures_and_remembers(
    home: Path, tmp_path: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 20)
    model = str(tiny_checkpoint("smollm"))
    arguments = ["codec", "measure", "--model", model, "--text", str(text), "--dtype", "bfloat16"]
    done = CliRunner().invoke(cli, [*arguments, "--tokens", "256", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["dtype"] == "bfloat16" and found["tokens"] == 256
    assert [row["codec"] for row in found["codecs"]] == list(CODECS)
    known = codec_record.known_qualities(folders().models)
    assert len(known) == 4  # one namespace for what is lossless, one for each that is not
    rows = {name: row for codecs in known.values() for name, row in codecs.items()}
    assert rows == {row["codec"]: row for row in found["codecs"]}

    usage = CliRunner().invoke(cli, ["cache", "du"]).stdout
    assert "bfloat16: int4 " in usage and "packed 1." in usage

    shown = CliRunner().invoke(cli, [*arguments, "--tokens", "128"])
    assert shown.exit_code == 0 and "int4" in shown.stdout and "KL" in shown.stdout


def test_a_binary_file_is_no_text(home: Path, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xff\xfe\x00")
    done = CliRunner().invoke(cli, ["codec", "measure", "--text", str(tmp_path / "x")])
    assert isinstance(done.exception, UsageError)


def quality_of(name: str, **changes: object) -> CodecQuality:
    fields = {
        "codec": name,
        "ratio": 3.5,
        "perplexity": 10.1,
        "exact_perplexity": 10.0,
        "kl": 0.006,
        "top1_agreement": 0.97,
        "num_tokens": 100,
        "is_bit_exact": False,
    }
    return CodecQuality(**fields | changes)  # type: ignore[arg-type]


def test_the_record_keeps_what_other_models_have(tmp_path: Path) -> None:
    def space(name: str) -> bytes:
        return name.encode()

    codec_record.remember(tmp_path, "a", "bfloat16", [quality_of("int4")], space)
    codec_record.remember(tmp_path, "b", "bfloat16", [quality_of("fp8")], space)
    codec_record.remember(tmp_path, "a", "bfloat16", [quality_of("int4", kl=0.5)], space)
    known = codec_record.known_qualities(tmp_path)
    assert set(known) == {b"int4".hex(), b"fp8".hex()}
    assert known[b"int4".hex()]["int4"]["kl"] == 0.5
    assert ("codecs", "b, bfloat16: fp8 3.50x, perplexity +1.00%, KL 0.006") in (
        codec_record.summary(tmp_path)
    )


@pytest.mark.parametrize("content", ["", "[]", "{", '{"00": 1}', '{"00": {"codecs": []}}'])
def test_a_damaged_record_is_an_empty_one(tmp_path: Path, content: str) -> None:
    (tmp_path / codec_record.FILE_NAME).write_text(content)
    assert codec_record.known_qualities(tmp_path) == {}


@pytest.mark.slow
def test_goals_on_smollm2(smollm2_gguf: Path, tmp_path: Path, native_dtype: Dtype) -> None:
    """Over 4096 tokens, as `scripts/bench_codec.py` measures them: a shorter text tells perplexity
    to a few tenths of a percent only."""
    from pydoc_data.topics import topics

    prepared, decoder, layout = loaded(smollm2_gguf, tmp_path, native_dtype)
    text = "\n".join(topics.values())[:65_536]
    ids = Tokenizer.from_prepared(prepared).encode(text)[:4096]
    (measured,) = measure_codecs(decoder, layout, ids, ["int4"])
    assert abs(measured.perplexity_change) <= 0.003
    assert measured.kl <= 0.01
    assert measured.ratio * 2 / decoder.dtype.itemsize >= 3.5  # against bfloat16
