"""Weights in the order in which oneDNN multiplies them.

torch's linear layers keep weights row by row. For a few input rows at a time, and writing margins
is made of such forwards, that costs up to four times what oneDNN's own blocked layout does, which
is made once, when the model is loaded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


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


def packed(network: Any) -> list[torch.Tensor]:
    """The packed weights of a network."""
    return [module.packed for module in network.modules() if isinstance(module, PackedLinear)]


def pack(network: Any) -> None:
    """Pack every linear layer of a network that runs on a CPU, where oneDNN knows its dtype."""
    native = {
        torch.float32: True,
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    if network.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return
    for module in list(network.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and native.get(child.weight.dtype, False):
                setattr(module, name, PackedLinear(child))
