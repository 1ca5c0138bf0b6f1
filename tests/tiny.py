"""Tiny random models of many architectures, made from transformers' own configurations."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from postil.margins import prompts

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
def tiny_network(name: str, vocabulary: int = VOCABULARY, window: int = 512) -> Any:
    """A tiny float32 model in evaluation mode; the same weights every time."""
    sizes = {"vocab_size": vocabulary, "max_position_embeddings": window}
    config = AutoConfig.for_model(name.split("-")[0], **(_COMMON | CONFIGS[name] | sizes))
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in network.parameters():  # larger than the default, so that errors show
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return network


CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def tiny_tokenizer(vocabulary: int = 512) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that knows the words of our own prompts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<pad>", "<s>", "<|im_end|>", "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = prompts.EXTRACT, prompts.CLASSIFY, prompts.ANSWER, prompts.ANSWER_FROM_NOTES
    tokenizer.train_from_iterator(["YES NO user assistant", *words], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        bos_token="<s>",
        pad_token="<pad>",
        extra_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
    )


@torch.inference_mode()
def plain_logits(network: Any, tokens: list[int]) -> torch.Tensor:
    """Logits of an uncached forward with transformers' own attention: (tokens, vocabulary)."""
    before = network.config._attn_implementation
    network.set_attn_implementation("eager")
    try:
        return network(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    finally:
        network.set_attn_implementation(before)
