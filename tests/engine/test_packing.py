"""Packed weights multiply as plain ones do."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from postil.engine import loading, packing
from postil.engine.packing import FEW_ROWS, Int8Linear, PackedLinear
from postil.errors import UnsupportedModel
from tests.tiny import CONFIGS, plain_logits, tiny_network

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN"
)


@pytest.mark.parametrize("rows", [1, 3, 17, 200])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_layer_gives_the_same_rows(rows: int, *, bias: bool) -> None:
    linear = torch.nn.Linear(40, 70, bias=bias)
    packed = PackedLinear(copy.deepcopy(linear))
    given = torch.randn(1, rows, 40)
    with torch.inference_mode():
        got = packed(given)
        assert got.shape == (1, rows, 70)
        assert (got - linear(given)).abs().max() < 1e-5


@pytest.mark.parametrize("name", CONFIGS)
def test_a_packed_network_gives_the_same_logits(name: str) -> None:
    network = copy.deepcopy(tiny_network(name))
    tokens = [(7 * i + 3) % 97 for i in range(30)]
    want = plain_logits(network, tokens)
    packing.pack(network)
    linear = [m for m in network.modules() if type(m) is torch.nn.Linear]
    assert packing.packed(network)
    assert not linear
    assert (plain_logits(network, tokens) - want).abs().max() < 1e-4


def test_a_loaded_model_is_packed_and_its_weights_are_counted(tiny_model_dir: Path) -> None:
    plain = loading.load(tiny_model_dir, dtype="float32", pack=False)
    packed = loading.load(tiny_model_dir, dtype="float32")
    assert not packing.packed(plain.network)
    assert packing.packed(packed.network)
    assert packed.weight_bytes >= plain.weight_bytes


@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("bias", [False, True])
def test_eight_bit_weights_are_off_by_half_a_scale(rows: int, *, bias: bool) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 48, bias=bias)
    linear.weight.data[3] = 0  # an output that has no scale
    layer = Int8Linear(linear)
    wide = layer.packed.float() * layer.scale[:, None]
    assert ((wide - linear.weight).abs() <= layer.scale[:, None] / 2 + 1e-8).all()
    given = torch.randn(2, rows, 64)[:1]
    with torch.inference_mode():
        got = layer(given)
        want = torch.nn.functional.linear(given, wide, linear.bias)
    assert got.shape == (1, rows, 48)
    # Few rows are multiplied in bfloat16, which has 8 bits of precision.
    assert (got - want).abs().max() < (0.02 if rows <= FEW_ROWS else 1e-4) * want.abs().max()


def test_a_quantized_model_says_nearly_the_same_in_less_memory(tiny_model_dir: Path) -> None:
    plain = loading.load(tiny_model_dir, dtype="float32", pack=False)
    small = loading.load(tiny_model_dir, dtype="float32", quantize="int8")
    assert small.quantize == "int8"
    tokens = [(7 * i + 3) % 97 for i in range(40)]
    want, got = plain_logits(plain.network, tokens), plain_logits(small.network, tokens)
    assert torch.nn.functional.cosine_similarity(got, want).min() > 0.98
    layer = next(m for m in small.network.modules() if isinstance(m, Int8Linear))
    assert layer.packed.element_size() == 1


def test_only_what_can_be_quantized_is(tiny_model_dir: Path) -> None:
    with pytest.raises(UnsupportedModel, match="takes int8"):
        loading.load(tiny_model_dir, quantize="int3")
