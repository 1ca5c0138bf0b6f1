"""From a name to a model that can be stepped: weights, tokenizer, and what a cell must hold."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError

from postil.engine import attention, converted, hub, packing
from postil.errors import UnsupportedModel
from postil.kv.pool import LayerShape, Pool, bytes_per_cell
from postil.kv.visibility import visibility

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LAYER_KINDS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class Loaded:
    """A model ready for the engine.

    Attributes:
        name: as the user gave it.
        network: the transformers model, in evaluation mode, with our attention.
        window: tokens; the longest sequence the model was made for.
        layers: what one cell holds in each layer.
        layer_kinds: `full_attention` or `sliding_attention`, one a layer.
        stop_tokens: ids that end a generation.
        cache_argument: what `network` calls its cache (transformers 5.24 renamed it).
        quantize: what the weights of linear layers are kept in, if not in the model's dtype.
    """

    name: str
    network: Any
    tokenizer: Any
    window: int
    layers: tuple[LayerShape, ...]
    layer_kinds: tuple[str, ...]
    stop_tokens: frozenset[int]
    cache_argument: str
    quantize: str | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.network.dtype

    @property
    def device(self) -> torch.device:
        return self.network.device

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, shared ones counted once."""
        weights = [*self.network.parameters(), *packing.packed(self.network)]
        return sum(weight.numel() * weight.element_size() for weight in weights)

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in all layers."""
        return bytes_per_cell(self.layers, self.dtype)


def load(
    name: str | os.PathLike[str] | None = None,
    *,
    dtype: str = "auto",
    device: str = "auto",
    threads: int | None = None,
    quantize: str | None = None,
    pack: bool = True,
) -> Loaded:
    """Load a hub id, a local folder or a `.gguf` file (dequantised).

    Args:
        name: `None` is the embedded default, SmolLM2-135M-Instruct.
        dtype: `float32`, `bfloat16`, `float16`, or `auto`: bfloat16 where the hardware multiplies
            it natively, float32 where it would only be emulated.
        device: a torch device, or `auto`: CUDA if there is one, else the CPU.
        threads: CPU threads of torch, for the whole process.
        quantize: `int8` keeps the weights of linear layers in 8 bits, on a CPU: less memory, and
            faster where few tokens are fed at once.
        pack: keep linear layers in the layout that the CPU multiplies fastest. Without it the
            network is as transformers made it.

    Raises:
        ModelNotFound: there is no such model, or its files cannot be read.
        UnsupportedModel: the model cannot be read over a pool, or not on this device or dtype.
    """
    where = _device(device)
    number = _dtype(dtype, where)
    if quantize is not None and (quantize not in packing.QUANTIZATIONS or where.type != "cpu"):
        raise UnsupportedModel(
            f"weights cannot be quantized to {quantize!r} on {where}: the CPU takes int8"
        )
    if threads is not None:
        torch.set_num_threads(threads)
    source = hub.pull(None if name is None else str(name))

    def read(folder: str | Path, options: dict[str, str]) -> Loaded:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
        # Releases that know `GgufConfig` keep a GGUF's quantization unless they are told not to.
        if options and hasattr(transformers, "GgufConfig"):
            unpacked = {"quantization_config": transformers.GgufConfig(dequantize=True)}
        else:
            unpacked = {}
        network = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=number, attn_implementation=attention.NAME, **options, **unpacked
        )
        return prepare(source.name, network.eval().to(where), tokenizer)

    try:
        with _without_bars():
            if source.gguf_file is None:
                loaded = read(source.path_or_id, {})
            else:
                file = Path(source.path_or_id, source.gguf_file)
                loaded = converted.load(file, number, read)
            if pack:
                packing.pack(loaded.network, quantize)
            return replace(loaded, quantize=quantize)
    except torch.OutOfMemoryError as error:
        raise UnsupportedModel(
            f"{source.name} does not fit into the memory of {where}: choose a smaller model, "
            "--dtype bfloat16 or --device cpu"
        ) from error
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise hub.explain_hub_error(source.name, error) from error


@contextmanager
def _without_bars() -> Iterator[None]:
    """Without transformers' progress bars, which would cut into a display of ours."""
    shown = transformers.logging.is_progress_bar_enabled()
    unpacking: Any = None
    with suppress(ImportError):
        unpacking = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    bar = getattr(unpacking, "tqdm", None)  # of unpacking a GGUF; it obeys no switch
    transformers.logging.disable_progress_bar()
    if bar is not None:
        unpacking.tqdm = lambda tensors, **_: tensors
    try:
        yield
    finally:
        if bar is not None:
            unpacking.tqdm = bar
        if shown:
            transformers.logging.enable_progress_bar()


def prepare(name: str, network: Any, tokenizer: Any) -> Loaded:
    """Check that a transformers model can be stepped over a pool, and measure its cells.

    Raises:
        UnsupportedModel: with the reason.
    """
    network.set_attn_implementation(attention.NAME)
    config = network.config.get_text_config()
    parameters = inspect.signature(network.forward).parameters
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    reason = None
    if network.config.is_encoder_decoder:
        reason = "it is an encoder-decoder, and only decoder-only models can be read on"
    elif not network._supports_attention_backend or "logits_to_keep" not in parameters:
        reason = "its code in transformers does not take an attention function"
    elif strange := sorted(set(kinds) - LAYER_KINDS):
        reason = f"it has layers of a kind that keeps no cell per token ({', '.join(strange)})"
    if reason is not None:
        raise UnsupportedModel(f"{name} cannot be used, since {reason}: choose another model")
    cache_argument = "cache" if "cache" in parameters else "past_key_values"
    return Loaded(
        name=name,
        network=network,
        tokenizer=tokenizer,
        window=_window(config),
        layers=_measure(name, network, cache_argument),
        layer_kinds=tuple(kinds),
        stop_tokens=_stop_tokens(network, tokenizer),
        cache_argument=cache_argument,
    )


class _Recorder(transformers.Cache):
    """A cache that only notes the shapes of what it is given."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.shapes: dict[int, LayerShape] = {}

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        heads, key_dim, value_dim = key_states.shape[1], key_states.shape[3], value_states.shape[3]
        self.shapes[layer_idx] = LayerShape(heads, key_dim, value_dim)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


@torch.inference_mode()
def _measure(name: str, network: Any, cache_argument: str) -> tuple[LayerShape, ...]:
    """What a cell holds, seen by running one token; this also proves that our hooks are called."""
    recorder, table = _Recorder(), Pool([], 1)
    sequence = table.new()
    table.append(sequence, [0])
    table.dtype, table.device = network.dtype, network.device
    try:
        network(
            input_ids=torch.zeros(1, 1, dtype=torch.int64, device=network.device),
            position_ids=torch.zeros(1, 1, dtype=torch.int64, device=network.device),
            use_cache=True,
            visibility=visibility(table, [(sequence, 1)]),
            **{cache_argument: recorder},
        )
    except (TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError) as error:
        raise UnsupportedModel(
            f"{name} ({type(network).__name__}) cannot be read over a pool of cells "
            f"({error}): choose another model"
        ) from error
    layers = network.config.get_text_config().num_hidden_layers
    if sorted(recorder.shapes) != list(range(layers)):
        raise UnsupportedModel(
            f"{name} ({type(network).__name__}) keeps keys and values in "
            f"{len(recorder.shapes)} of its {layers} layers, so it cannot be read over a pool of "
            "cells: choose another model"
        )
    return tuple(recorder.shapes[layer] for layer in range(layers))


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        where = torch.device(device)
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UnsupportedModel(
            f"torch cannot use the device {device!r} here: choose --device cpu"
        ) from error
    return where


def _dtype(dtype: str, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        if device.type == "cpu":
            # Emulated bfloat16 is several times slower than float32 (CPUs without AVX-512).
            native = torch.ops.mkldnn._is_mkldnn_bf16_supported()
            return torch.bfloat16 if native else torch.float32
        return torch.bfloat16
    if dtype not in DTYPES:
        raise UnsupportedModel(f"there is no dtype {dtype!r}: choose one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _window(config: Any) -> int:
    """Tokens. RoPE scalings that change with the length are used only below that change."""
    window = int(getattr(config, "max_position_embeddings", 0) or 0)
    rope = getattr(config, "rope_parameters", None) or {}
    every = rope.values() if all(isinstance(kind, dict) for kind in rope.values()) else [rope]
    for kind in every:
        if kind.get("rope_type") in ("longrope", "dynamic"):
            original = kind.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            window = min(window, int(original or window))
    if window <= 0:
        raise UnsupportedModel("the model's configuration does not say how long its window is")
    return window


def _stop_tokens(network: Any, tokenizer: Any) -> frozenset[int]:
    ids: set[int] = set()
    for eos in (network.generation_config.eos_token_id, tokenizer.eos_token_id):
        ids.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    return frozenset(ids)
