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

# What a group costs, in units of one row over one cell: reading a cell's keys and values takes as
# long as seven rows over it, and starting a group as long as this many cells (measured on a CPU).
READING_ROWS, STARTING_CELLS = 7, 2000


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
    """The groups of a batch in which each (sequence, rows) feeds the last tokens of a sequence.

    Neighbours share a group if reading the keys once for both saves more than it costs that each
    is multiplied with the cells of the other.
    """
    groups: list[Group] = []
    members: list[_Member] = []
    for sequence, rows in batch:
        spans = [span for span in pool.spans(sequence) if span[0] < span[1]]
        mine = _Member(rows, spans)
        if members and _cost([*members, mine]) > _cost(members) + _cost([mine]):
            groups.append(_group(pool, groups, members))
            members = []
        members.append(mine)
    return [*groups, _group(pool, groups, members)]


@dataclass(frozen=True)
class _Member:
    """A sequence's rows, and the spans of the pool that it sees."""

    rows: int
    spans: list[tuple[int, int]]


def _range(members: list[_Member]) -> tuple[int, int]:
    """The cells from the first to the last that any of them sees."""
    starts, ends = zip(*(span for member in members for span in member.spans), strict=True)
    return min(starts), max(ends)


def _cost(members: list[_Member]) -> int:
    low, high = _range(members)
    rows = sum(member.rows for member in members)
    return (rows + READING_ROWS) * (high - low) + STARTING_CELLS


def _group(pool: Pool, before: list[Group], members: list[_Member]) -> Group:
    low, high = _range(members)
    start = before[-1].rows.stop if before else 0
    return Group(
        rows=slice(start, start + sum(member.rows for member in members)),
        cells=slice(low, high),
        members=[(m.rows, [(s - low, e - low) for s, e in m.spans]) for m in members],
        position=pool.position[low:high],
        dtype=pool.dtype,
        device=pool.device,
    )
