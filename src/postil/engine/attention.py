"""Attention over the pool, registered with transformers under the name `postil`.

transformers' models call it with queries, keys and values in their own shapes; which cells each
row may read comes in as `visibility` (see `postil.kv.visibility`), a keyword argument that the
models pass through.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface

from postil.kv.visibility import Group

NAME = "postil"
STACKED_MASK_BYTES = 8 << 20  # above it, query heads share one mask instead of having a copy each


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    visibility: list[Group],
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Grouped-query attention of packed rows over the pool's cells; K and V are never expanded.

    Args:
        query: (1, heads, rows, key_dim).
        key: the whole layer of the pool, (1, kv_heads, cells, key_dim).
        value: likewise, (1, kv_heads, cells, value_dim).
        attention_mask: always `None`, since transformers makes no masks for our name.
        visibility: the groups of this batch; their masks hide what a row must not see.

    Returns:
        (1, rows, heads, value_dim) and, in place of attention weights, `None`.
    """
    if s_aux is not None:
        raise NotImplementedError("attention sinks are learned per head")
    heads, rows, kv_heads = query.shape[1], query.shape[2], key.shape[1]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = query.new_empty(1, rows, heads, value.shape[-1])
    for group in visibility:
        q = query[0, :, group.rows].unflatten(0, (kv_heads, -1))  # (kv_heads, shared, rows, dim)
        k, v = key[0, :, group.cells], value[0, :, group.cells]  # (kv_heads, cells, dim)
        mixed = _mix(q, k, v, group, scale, sliding_window, softcap)
        out[0, group.rows] = mixed.flatten(0, 1).transpose(0, 1)
    return out, None


def _mix(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Group,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """(kv_heads, shared, rows, dim) queries over (kv_heads, cells, dim): the same shape back."""
    shared, rows = q.shape[1:3]
    cells = k.shape[1]
    if softcap is not None:
        scores = torch.matmul(q.flatten(1, 2), k.transpose(1, 2)).float() * scale
        scores = torch.tanh(scores / softcap) * softcap + group.mask(window, shared)
        return torch.matmul(scores.softmax(-1).to(v.dtype), v).unflatten(1, (shared, rows))
    if shared * rows * cells * q.element_size() <= STACKED_MASK_BYTES:
        # The query heads of a KV head become rows: keys are read once for all of them.
        mixed = functional.scaled_dot_product_attention(
            q.flatten(1, 2)[None], k[None], v[None], group.mask(window, shared), scale=scale
        )
        return mixed[0].unflatten(1, (shared, rows))
    # The query heads of a KV head become a batch: `expand` repeats keys without copying them.
    mixed = functional.scaled_dot_product_attention(
        q.transpose(0, 1),
        k.expand(shared, *k.shape),
        v.expand(shared, *v.shape),
        group.mask(window),
        scale=scale,
    )
    return mixed.transpose(0, 1)


AttentionInterface.register(NAME, attend)
