"""What is refused, what a window is, what a cell holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from postil.engine import loading
from postil.errors import UnsupportedModel
from postil.kv.pool import LayerShape
from tests.tiny import CONFIGS, tiny_network


class NoTokenizer:
    eos_token_id = 2


@pytest.mark.parametrize("name", CONFIGS)
def test_a_cell_holds_what_the_model_caches(name: str) -> None:
    network = tiny_network(name)
    loaded = loading.prepare(name, network, NoTokenizer())
    config = network.config
    head_dim = getattr(config, "head_dim", None) or 32 // 4
    shape = LayerShape(config.num_key_value_heads, head_dim, head_dim)
    assert loaded.layers == (shape,) * 3
    assert loaded.weight_bytes == 4 * sum(p.numel() for p in network.parameters())
    assert loaded.window == 512
    sliding = getattr(config, "layer_types", None) or ["full_attention"] * 3
    assert list(loaded.layer_kinds) == sliding


def tiny(kind: str, auto: Any = AutoModelForCausalLM, **options: Any) -> Any:
    return auto.from_config(AutoConfig.for_model(kind, **options)).eval()


def test_an_encoder_decoder_is_refused() -> None:
    sizes = {"d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 50}
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        loading.prepare("t5", tiny("t5", AutoModelForSeq2SeqLM, **sizes), NoTokenizer())


def test_a_state_space_model_is_refused() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 50, "state_size": 4}
    with pytest.raises(UnsupportedModel, match="choose another model"):
        loading.prepare("mamba", tiny("mamba", **sizes), NoTokenizer())


@pytest.mark.parametrize("rope", ["longrope", "dynamic"])
def test_a_window_ends_where_the_rotation_would_change(rope: str) -> None:
    parameters = {"rope_type": rope, "rope_theta": 1e4, "factor": 4.0}
    parameters["original_max_position_embeddings"] = 128
    if rope == "longrope":
        parameters |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = AutoConfig.for_model(
        "llama",
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=512,
        rope_parameters=parameters,
    )
    assert loading._window(config) == 128


@pytest.mark.parametrize(
    ("options", "said"), [({"dtype": "int3"}, "int3"), ({"device": "nonsense"}, "nonsense")]
)
def test_what_torch_does_not_have(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"{said}.*choose"):
        loading.load(None, **options)


def test_bfloat16_only_where_it_is_native() -> None:
    native = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    chosen = loading._dtype("auto", torch.device("cpu"))
    assert chosen == (torch.bfloat16 if native else torch.float32)
