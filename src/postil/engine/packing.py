"""Weights in the form in which a CPU multiplies them fastest.

torch's linear layers keep weights row by row. For a few input rows at a time, and writing margins
is made of such forwards, that costs up to four times what oneDNN's own blocked layout does, which
is made once, when the model is loaded.

Such forwards wait for memory more than they compute: with weights of 8 bits they take a fraction of
the time. torch has the kernel. torchao's weight-only layers were measured as well: without
compilation they are slower than the plain ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

QUANTIZATIONS = ("int8",)
# Up to so many rows the 8-bit kernel is faster than multiplying with weights made wide again.
FEW_ROWS = 32


class PackedLinear(nn.Module):
    """A linear layer over a packed weight; the same sums, in another order."""

    packed: torch.Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer(
            "packed", torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach()), False
        )
        self.bias = linear.bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """(..., in_features) to (..., out_features)."""
        return torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")


class Int8Linear(nn.Module):
    """A linear layer whose weights are 8-bit integers, each output's with a scale of its own.

    A weight is off by at most half a scale, 1/254 of the largest weight of its output.
    """

    packed: torch.Tensor
    scale: torch.Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        scale = weight.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / 127
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("packed", (weight / scale[:, None]).round().to(torch.int8), False)
        self.register_buffer("scale", scale, False)
        self.bias = linear.bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """(..., in_features) to (..., out_features)."""
        flat = rows.reshape(-1, self.in_features)
        if len(flat) <= FEW_ROWS:
            narrow = flat.to(torch.bfloat16)  # what the kernel is fast with
            out = torch._weight_int8pack_mm(narrow, self.packed, self.scale.to(narrow.dtype))
            out = out.to(rows.dtype)
        else:
            out = functional.linear(flat, self.packed.to(rows.dtype)) * self.scale.to(rows.dtype)
        if self.bias is not None:
            out = out + self.bias
        return out.unflatten(0, rows.shape[:-1])


def packed(network: Any) -> list[torch.Tensor]:
    """The packed weights of a network."""
    kinds = PackedLinear, Int8Linear
    return [module.packed for module in network.modules() if isinstance(module, kinds)]


def pack(network: Any, quantize: str | None = None) -> None:
    """Pack every linear layer of a network that runs on a CPU.

    Args:
        quantize: `int8` for weights of 8 bits; otherwise nothing changes but the layout, and
            only where oneDNN knows the dtype.
    """
    native = {
        torch.float32: True,
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    if network.device.type != "cpu":
        return
    for module in list(network.modules()):
        for name, child in list(module.named_children()):
            if type(child) is not nn.Linear:
                continue
            if quantize is not None:
                setattr(module, name, Int8Linear(child))
            elif torch.backends.mkldnn.is_available() and native.get(child.weight.dtype, False):
                setattr(module, name, PackedLinear(child))
