"""Packed weights multiply as plain ones do."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from postil.engine import loading, packing
from postil.engine.packing import PackedLinear
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
