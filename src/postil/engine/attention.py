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
STACKED_MASK_BYTES = 32 << 20  # above it, query heads share one mask instead of having a copy each
SCORES = 6 << 20  # float32 scores that are held at once where they are held at all


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
        if softcap is not None or _multiplies_bfloat16(key):
            mixed = _by_matmul(q * scale, k, v, group, sliding_window, softcap)
        else:
            mixed = _by_kernel(q, k, v, group, scale, sliding_window)
        out[0, group.rows] = mixed.flatten(0, 1).transpose(0, 1)
    return out, None


def _multiplies_bfloat16(x: torch.Tensor) -> bool:
    """Whether this is bfloat16 on a CPU that multiplies it natively."""
    cpu = x.dtype is torch.bfloat16 and x.device.type == "cpu"
    return cpu and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _by_matmul(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Group,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """(kv_heads, shared, rows, dim) queries over (kv_heads, cells, dim): the same shape back.

    Scores and weights are float32. On CPUs that multiply bfloat16 this takes half the time of
    torch's flash kernel (torch 2.13, 512 rows over 4,096 cells: 17 ms against 30).
    """
    kv_heads, shared, rows = q.shape[:3]
    precision = torch.backends.mkldnn.matmul.fp32_precision
    if _multiplies_bfloat16(k):
        # Factors are rounded to bfloat16, which queries, keys and values were before; sums are not.
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        q, k, v = q.float(), k.float(), v.float()
        out = q.new_empty(kv_heads, shared, rows, v.shape[-1])
        mask = group.mask(window)
        hidden = 0 if window is not None else group.hidden_from
        step = max(1, SCORES // (kv_heads * shared * k.shape[1]))
        for start in range(0, rows, step):
            part = q[:, :, start : start + step]
            cells = group.seen_until(start + part.shape[2])
            scores = group.scratch(kv_heads, shared * part.shape[2], cells)
            torch.bmm(part.flatten(1, 2), k[:, :cells].transpose(1, 2), out=scores)
            if softcap is not None:
                scores.div_(softcap).tanh_().mul_(softcap)
            by_head = scores.unflatten(1, (shared, -1))  # (kv_heads, shared, rows, cells)
            by_head[..., hidden:] += mask[start : start + step, hidden:cells]
            torch.softmax(scores, -1, out=scores)
            out[:, :, start : start + step] = torch.bmm(scores, v[:, :cells]).unflatten(
                1, (shared, -1)
            )
        return out
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = precision


def _by_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Group,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """(kv_heads, shared, rows, dim) queries over (kv_heads, cells, dim): the same shape back."""
    shared, rows = q.shape[1:3]
    cells = k.shape[1]
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
