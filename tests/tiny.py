"""Tiny random models of many architectures, made from transformers' own configurations."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 97

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    # Sliding windows from the second layer on, next to a full layer.
    "qwen2-sliding": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "qwen3": {"head_dim": 16},
    "gemma2": {
        "head_dim": 16,
        "sliding_window": 8,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
    },
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 7,
        "query_pre_attn_scalar": 16,
        "num_key_value_heads": 1,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "phi3": {},
    "mistral": {"sliding_window": 6},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


@cache
def tiny_network(name: str) -> Any:
    """A tiny float32 model in evaluation mode; the same weights every time."""
    config = AutoConfig.for_model(name.split("-")[0], **(_COMMON | CONFIGS[name]))
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in network.parameters():  # larger than the default, so that errors show
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return network


@torch.inference_mode()
def plain_logits(network: Any, tokens: list[int]) -> torch.Tensor:
    """Logits of an uncached forward with transformers' own attention: (tokens, vocabulary)."""
    before = network.config._attn_implementation
    network.set_attn_implementation("eager")
    try:
        return network(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    finally:
        network.set_attn_implementation(before)
