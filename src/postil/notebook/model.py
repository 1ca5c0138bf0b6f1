"""A loaded model, as the library's users hold it."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import torch

from postil.documents import Document, read_document
from postil.engine import loading
from postil.engine.loading import Loaded
from postil.engine.selftest import largest_error
from postil.margins.prompts import Prompts
from postil.notebook.notebook import Notebook


@dataclass(frozen=True)
class Description:
    """What a model is and what can be done with it.

    Attributes:
        layer_kinds: how many layers of each kind: full_attention, sliding_attention.
        window: tokens.
        weight_bytes: bytes of all weights, shared ones once.
        cache_bytes_per_token: bytes of keys and values of one token in all layers.
        quantize: what the weights of linear layers are kept in, if not in `dtype`.
        chat_template: whether prompts are built from a chat template of the model's.
        largest_error: the largest difference of a logit between packed forwards over a pool and
            one plain forward of transformers, relative to the largest logit.
    """

    name: str
    architecture: str
    layers: int
    layer_kinds: dict[str, int]
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    window: int
    dtype: str
    quantize: str | None
    device: str
    threads: int
    weight_bytes: int
    cache_bytes_per_token: int
    chat_template: bool
    largest_error: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Model:
    """A model that reads. Made by `postil.load`."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded
        self._prompts = Prompts(loaded.tokenizer)

    def __repr__(self) -> str:
        return f"<Model {self.name}, {self.dtype} on {self.device}>"

    @property
    def name(self) -> str:
        return self.loaded.name

    @property
    def window(self) -> int:
        """Tokens; the longest sequence the model was made for."""
        return self.loaded.window

    @property
    def dtype(self) -> str:
        return str(self.loaded.dtype).removeprefix("torch.")

    @property
    def device(self) -> str:
        return str(self.loaded.device)

    def open(
        self,
        *documents: str | os.PathLike[str] | bytes | Document,
        segment_tokens: int | None = None,
    ) -> Notebook:
        """A notebook over one or more documents. Nothing is computed yet.

        Args:
            documents: paths, texts, or the bytes of files; see `postil.read_document`.
            segment_tokens: the most tokens of a segment; 4,096 if that is not said, fewer for a
                short document or a small window.

        Raises:
            DocumentError: a document cannot be read, or has nothing in it to read.
            ValueError: no document, or a segment size that no window can hold.
        """
        if not documents:
            raise ValueError("open() needs a document: give a path, a text or bytes")
        read = [read_document(document) for document in documents]
        return Notebook(self.loaded, self._prompts, read, segment_tokens)

    def describe(self) -> Description:
        """What the model is, and how exact packed forwards are on it (runs a self-test)."""
        loaded, config = self.loaded, self.loaded.network.config.get_text_config()
        return Description(
            name=loaded.name,
            architecture=type(loaded.network).__name__,
            layers=len(loaded.layers),
            layer_kinds=dict(Counter(loaded.layer_kinds)),
            heads=config.num_attention_heads,
            kv_heads=loaded.layers[0].kv_heads,
            head_dim=loaded.layers[0].key_dim,
            vocabulary=config.vocab_size,
            window=loaded.window,
            dtype=self.dtype,
            quantize=loaded.quantize,
            device=self.device,
            threads=torch.get_num_threads(),
            weight_bytes=loaded.weight_bytes,
            cache_bytes_per_token=loaded.cache_bytes_per_token,
            chat_template=bool(loaded.tokenizer.chat_template),
            largest_error=largest_error(loaded),
        )


def load(
    name: str | os.PathLike[str] | None = None,
    *,
    dtype: str = "auto",
    device: str = "auto",
    threads: int | None = None,
    quantize: str | None = None,
) -> Model:
    """Load a model: a hub id, a local folder or a `.gguf` file (dequantised).

    Args:
        name: without one the embedded default, SmolLM2-135M-Instruct, which is fetched once.
        dtype: `float32`, `bfloat16`, `float16`, or `auto`: bfloat16 where the hardware multiplies
            it natively, float32 where it would only be emulated.
        device: a torch device such as `cpu` or `cuda:0`, or `auto`: CUDA if there is one.
        threads: CPU threads of torch, for the whole process.
        quantize: `int8` keeps the weights of linear layers in 8 bits, on a CPU: less memory, and
            faster where few tokens are fed at once, for slightly different logits.

    Raises:
        ModelNotFound: there is no such model, or its files cannot be read.
        UnsupportedModel: the model cannot be read over a pool, or not on this device or dtype.
    """
    return Model(loading.load(name, dtype=dtype, device=device, threads=threads, quantize=quantize))
