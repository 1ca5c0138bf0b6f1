"""Who sees what in one packed forward.

A packed forward is one row of tokens from several sequences. Each token attends to exactly the
cells that its sequence sees, at positions up to its own (and within the window on sliding-window
layers). The rows are taken in groups: a long slice of one sequence is a group of its own, short
ones stand together, so that branches of one document read its keys and values once for all. Each
group reads one range of cells; a mask hides those in the range that a row must not see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from postil.kv.pool import Pool

WIDE = (
    64  # from this many rows on, sharing the reading of keys saves less than a longer range costs
)


@dataclass(eq=False)
class Group:
    """Neighbouring rows of the batch and the one range of cells that they read.

    Attributes:
        rows: of the batch.
        cells: of the pool.
        seen: (rows, cells) bool, what each row sees where there is no window.
        distance: (rows, cells) int32, how far before the row's position each cell's is.
    """

    rows: slice
    cells: slice
    seen: torch.Tensor
    distance: torch.Tensor
    dtype: torch.dtype
    device: torch.device
    _masks: dict[tuple[int | None, int], torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, repeat: int = 1) -> torch.Tensor:
        """What is added to the scores: 0 where a row sees a cell, else -inf.

        Args:
            window: a row sees only cells less than this many positions back.
            repeat: how many times the rows are stacked (once per query head of a KV head).

        Returns:
            (repeat * rows, cells), made once per forward and kept.
        """
        key = (window, repeat)
        if key not in self._masks:
            if repeat > 1:
                self._masks[key] = self.mask(window).repeat(repeat, 1)
            else:
                seen = self.seen if window is None else self.seen & (self.distance < window)
                mask = torch.zeros(seen.shape, dtype=self.dtype)
                self._masks[key] = mask.masked_fill_(~seen, float("-inf")).to(self.device)
        return self._masks[key]


def visibility(pool: Pool, batch: Sequence[tuple[int, int]]) -> list[Group]:
    """The groups of a batch in which each (sequence, rows) feeds the last tokens of a sequence."""
    groups: list[Group] = []
    members: list[tuple[int, int]] = []
    start = 0
    for at, (sequence, rows) in enumerate(batch):
        members.append((sequence, rows))
        alone = rows >= WIDE
        last = at + 1 == len(batch) or alone or batch[at + 1][1] >= WIDE
        if last:
            groups.append(_group(pool, start, members))
            start, members = groups[-1].rows.stop, []
    return groups


def _group(pool: Pool, start: int, members: list[tuple[int, int]]) -> Group:
    spans = {sequence: pool.spans(sequence) for sequence, _ in members}
    low = min(s for every in spans.values() for s, e in every if s < e)
    high = max(e for every in spans.values() for s, e in every if s < e)
    position = pool.position[low:high]  # (cells,)
    seen, distance = [], []
    for sequence, rows in members:
        visible = torch.zeros(high - low, dtype=torch.bool)
        for first, end in spans[sequence]:
            visible[first - low : end - low] = True
        length = pool.length(sequence)
        at = torch.arange(length - rows, length, dtype=torch.int32)  # (rows,)
        distance.append(at[:, None] - position)  # (rows, cells)
        seen.append(visible & (distance[-1] >= 0))
    return Group(
        rows=slice(start, start + sum(rows for _, rows in members)),
        cells=slice(low, high),
        seen=torch.cat(seen),
        distance=torch.cat(distance),
        dtype=pool.dtype,
        device=pool.device,
    )
