"""The arithmetic of a block's shape."""

from __future__ import annotations

import pytest

from chatkv_store import KVLayout


def test_a_small_model_groups_layers_until_a_value_is_large() -> None:
    smollm2 = KVLayout(30, 3, 64, "bfloat16")
    assert smollm2.bytes_per_layer_block == 48 * 1024
    assert smollm2.layers_per_value == 6  # 5 layers are 240 KiB, below 256
    assert smollm2.num_values == 5
    assert smollm2.value_shape(4, 10) == (6, 2, 3, 10, 64)


def test_a_large_model_has_one_value_per_layer() -> None:
    llama = KVLayout(32, 8, 128, "bfloat16")
    assert llama.bytes_per_layer_block == 256 * 1024
    assert (llama.layers_per_value, llama.num_values) == (1, 32)
    assert llama.bytes_per_token == 128 * 1024


@pytest.mark.parametrize("num_layers", [1, 5, 6, 7, 29, 30, 31])
def test_values_cover_every_layer_once(num_layers: int) -> None:
    layout = KVLayout(num_layers, 3, 64, "bfloat16")
    layers = [layer for group in range(layout.num_values) for layer in layout.value_layers(group)]
    assert layers == list(range(num_layers))
    with pytest.raises(IndexError):
        layout.value_layers(layout.num_values)


def test_json_round_trip() -> None:
    layout = KVLayout(2, 3, 64, "float32", block_tokens=32)
    assert KVLayout.from_json(layout.to_json()) == layout


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dtype": "int8"}, "int8"),
        ({"head_dim": 7}, "even"),
        ({"num_layers": 0}, "num_layers"),
        ({"block_tokens": 70000}, "block_tokens"),
    ],
)
def test_a_senseless_layout_is_refused_by_name(change: dict[str, object], named: str) -> None:
    sound: dict[str, object] = {
        "num_layers": 2,
        "num_kv_heads": 2,
        "head_dim": 8,
        "dtype": "bfloat16",
    }
    with pytest.raises(ValueError, match=named):
        KVLayout(**{**sound, **change})  # type: ignore[arg-type]
