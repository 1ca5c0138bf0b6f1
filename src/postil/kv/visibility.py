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

# From this many rows on, sharing the reading of keys saves less than a longer range costs.
WIDE = 64


@dataclass(eq=False)
class Group:
    """Neighbouring rows of the batch and the one range of cells that they read.

    Attributes:
        rows: of the batch.
        cells: of the pool.
        members: for each sequence its rows and the spans of the range that it sees. The rows are
            the last tokens of the sequence.
        position: (cells,) int32, of each cell's token.
    """

    rows: slice
    cells: slice
    members: list[tuple[int, list[tuple[int, int]]]]
    position: torch.Tensor
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
            mask = self._build(window)
            self._masks[key] = (mask if repeat == 1 else mask.repeat(repeat, 1)).to(self.device)
        return self._masks[key]

    def _build(self, window: int | None) -> torch.Tensor:
        """(rows, cells). Long slices make this the largest tensor of a forward: no copies of it."""
        rows = self.rows.stop - self.rows.start
        mask = torch.full((rows, len(self.position)), float("-inf"), dtype=self.dtype)
        at = 0
        for count, spans in self.members:
            mine = mask[at : at + count]
            length = sum(end - start for start, end in spans)
            own = torch.arange(length - count, length, dtype=torch.int32)[:, None]  # positions
            for start, end in spans:
                position = self.position[start:end]
                seen = mine[:, start:end]
                seen.zero_()
                # Only a sequence's last cells can come after one of its rows.
                late = int((position < length - count).sum())
                seen[:, late:].masked_fill_(position[late:] > own, float("-inf"))
                if window is not None:
                    seen.masked_fill_(own - position >= window, float("-inf"))
            at += count
        return mask


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


def _group(pool: Pool, start: int, batch: list[tuple[int, int]]) -> Group:
    seen = [(rows, [s for s in pool.spans(sequence) if s[0] < s[1]]) for sequence, rows in batch]
    low = min(s for _, spans in seen for s, _ in spans)
    high = max(e for _, spans in seen for _, e in spans)
    return Group(
        rows=slice(start, start + sum(rows for _, rows in batch)),
        cells=slice(low, high),
        members=[(rows, [(s - low, e - low) for s, e in spans]) for rows, spans in seen],
        position=pool.position[low:high],
        dtype=pool.dtype,
        device=pool.device,
    )
