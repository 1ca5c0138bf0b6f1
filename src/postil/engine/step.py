"""One packed forward: tokens of many sequences through the model at once, over a pool of cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache

from postil.engine.loading import Loaded
from postil.kv.pool import Pool
from postil.kv.visibility import visibility


@dataclass(frozen=True)
class Feed:
    """Tokens that a sequence takes in this forward.

    `logits` is how many of the last rows are wanted: 1 for sampling, 0 for reading on.
    """

    sequence: int
    tokens: Sequence[int]
    logits: int = 1


class _PoolCache(Cache):
    """What transformers' models write keys and values to: the cells of one packed forward."""

    def __init__(self, pool: Pool, cells: torch.Tensor) -> None:
        super().__init__(layers=[])
        self.pool = pool
        self.cells = cells

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write (1, kv_heads, rows, dim) to the cells; give back the layer's whole pool."""
        keys, values = self.pool.keys[layer_idx], self.pool.values[layer_idx]
        keys.index_copy_(1, self.cells, key_states[0])
        values.index_copy_(1, self.cells, value_states[0])
        return keys[None], values[None]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Only models without `position_ids` would ask; those are refused when they are loaded."""
        return 0


class Engine:
    """A model over a pool. Its whole vocabulary: `step`, and what the pool itself does.

    Attributes:
        forwards: how many packed forwards were run.
    """

    def __init__(self, loaded: Loaded, pool: Pool) -> None:
        self.loaded = loaded
        self.pool = pool
        self.forwards = 0

    @torch.inference_mode()
    def step(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        """Append the tokens of every feed to its sequence, in one forward pass of the model.

        A sequence may stand in only one feed of a step.

        Returns:
            For each feed the logits after its last rows, (feed.logits, vocabulary), float32.

        Raises:
            ContextOverflow: the pool is full. No sequence was changed.
        """
        pool, device = self.pool, self.pool.device
        lengths = {feed.sequence: pool.length(feed.sequence) for feed in feeds}
        try:
            cells = torch.cat([pool.append(feed.sequence, feed.tokens) for feed in feeds])
            groups = visibility(pool, [(feed.sequence, len(feed.tokens)) for feed in feeds])
            wanted = _wanted_rows(feeds)
            output = self.loaded.network(
                input_ids=pool.token[cells][None].to(device),
                position_ids=pool.position[cells].long()[None].to(device),
                use_cache=True,
                logits_to_keep=wanted.to(device),
                visibility=groups,
                **{self.loaded.cache_argument: _PoolCache(pool, cells.to(device))},
            )
        except BaseException:  # Ctrl-C too: cells that were not written must not stay in the table
            for sequence, length in lengths.items():
                pool.truncate(sequence, length)
            raise
        self.forwards += 1
        return list(output.logits[0].float().split([feed.logits for feed in feeds]))


def _wanted_rows(feeds: Sequence[Feed]) -> torch.Tensor:
    """The rows of the batch whose logits are used: (rows,) int64."""
    rows, end = [], 0
    for feed in feeds:
        end += len(feed.tokens)
        rows.append(torch.arange(end - feed.logits, end))
    return torch.cat(rows)
