"""The pool of cells: storage for keys and values, and the table that says who sees what.

A *cell* holds the keys and values of one token in every layer. A *sequence* is an ordered list of
cells. Sequences share cells: a fork sees what its parent saw and copies nothing.

The table is kept by *runs*, not by cells. A run is a stretch of neighbouring cells; for every
sequence that sees it, the run knows how many of its cells, from the first on, that sequence sees.
So fork, truncate and drop cost the number of runs (a handful), not the number of tokens.

Two rules keep the runs few and what a forward must read short:

* only the sequence that took a run may grow it, and only while nobody sees more of it than that
  sequence does; anyone else who appends takes a new run. Nothing that is seen is ever overwritten.
* roots (documents) take cells upward from `boundary`, branches downward below it, so that the
  cells of a branch and those of the document it reads stand side by side.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from postil.errors import ContextOverflow


@dataclass(frozen=True)
class LayerShape:
    """What one cell holds in one layer: `kv_heads` keys of `key_dim` and values of `value_dim`."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def elements(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim)


def bytes_per_cell(layers: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Bytes of keys and values that one token takes in all layers."""
    return sum(shape.elements for shape in layers) * dtype.itemsize


@dataclass(eq=False)
class Run:
    """Cells `start` to `start + room`; `seen` says how many of them each sequence sees."""

    start: int
    room: int
    owner: int
    seen: dict[int, int] = field(default_factory=dict)

    @property
    def used(self) -> int:
        return max(self.seen.values(), default=0)


@dataclass(eq=False)
class _Sequence:
    branch: bool  # takes its cells below the boundary
    runs: list[Run] = field(default_factory=list)
    length: int = 0


class Pool:
    """Keys and values of `capacity` cells, reserved at once, and the table of who sees which.

    Args:
        layers: what a cell holds in each layer.
        capacity: the number of cells.
        boundary: branches take cells below it, roots from it on; either spills over when its
            part is full.
        dtype: of the keys and values.
        device: of the keys and values; the table itself stays on the CPU.

    Attributes:
        keys, values: one tensor a layer, (kv_heads, cells, head_dim).
        position: (cells,) int32, the position of each cell's token in its sequence.
        token: (cells,) int64, its token id.
        peak_used: the most cells that were in use at once.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        capacity: int,
        *,
        boundary: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layers = tuple(layers)
        self.capacity = capacity
        self.boundary = min(boundary, capacity)
        self.dtype = dtype
        self.device = torch.device(device)
        self.keys = [self._storage(s.kv_heads, s.key_dim, capacity) for s in self.layers]
        self.values = [self._storage(s.kv_heads, s.value_dim, capacity) for s in self.layers]
        self.position = torch.zeros(capacity, dtype=torch.int32)
        self.token = torch.zeros(capacity, dtype=torch.int64)
        self.peak_used = 0
        self._sequences: dict[int, _Sequence] = {}
        self._runs: list[Run] = []
        self._free: list[tuple[int, int]] = [(0, capacity)]  # stretches (start, end), in order
        self._last_id = 0

    def _storage(self, heads: int, width: int, cells: int) -> torch.Tensor:
        """Zeros, since a forward also reads the unseen cells of its range: they must be finite."""
        shape = (heads, cells, width)
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        # The system promises anonymous memory at once, as zeros, and gives it page by page as
        # cells are written; it has all of it back as soon as the pool is gone.
        memory = mmap.mmap(-1, math.prod(shape) * self.dtype.itemsize)
        return torch.frombuffer(memory, dtype=self.dtype).view(shape)

    def grow(self, cells: int) -> None:
        """Add free cells at the end. Copies the pool, a layer at a time: not for hot paths."""
        capacity = self.capacity + cells
        for storage in (self.keys, self.values):
            for layer, old in enumerate(storage):
                storage[layer] = self._storage(old.shape[0], old.shape[2], capacity)
                storage[layer][:, : self.capacity] = old[:, : self.capacity]
        # Last, so that an interrupted copy leaves a pool that is as large as it was.
        self.position = torch.cat([self.position, self.position.new_zeros(cells)])
        self.token = torch.cat([self.token, self.token.new_zeros(cells)])
        self._free = _merged([*self._free, (self.capacity, capacity)])
        self.capacity = capacity

    # What there is

    @property
    def bytes_per_cell(self) -> int:
        """Bytes of keys and values that one token takes in all layers."""
        return bytes_per_cell(self.layers, self.dtype)

    @property
    def used(self) -> int:
        """Cells that some sequence sees."""
        return sum(run.used for run in self._runs)

    @property
    def free(self) -> int:
        """Cells that nobody holds."""
        return sum(end - start for start, end in self._free)

    def sequences(self) -> list[int]:
        return list(self._sequences)

    def length(self, sequence: int) -> int:
        """The number of tokens in a sequence, which is also the position of its next token."""
        return self._sequences[sequence].length

    def spans(self, sequence: int) -> list[tuple[int, int]]:
        """The cells that a sequence sees, in order, as ranges (start, end)."""
        return [(r.start, r.start + r.seen[sequence]) for r in self._sequences[sequence].runs]

    def cells(self, sequence: int) -> torch.Tensor:
        """The cells that a sequence sees, in order: (length,) int64."""
        return _cells(self.spans(sequence))

    def tokens(self, sequence: int) -> list[int]:
        return self.token[self.cells(sequence)].tolist()

    def seen_by(self, cell: int) -> set[int]:
        """The sequences that see a cell."""
        for run in self._runs:
            if run.start <= cell < run.start + run.room:
                return {s for s, length in run.seen.items() if cell < run.start + length}
        return set()

    # Sequences

    def new(self, *, room: int = 0, branch: bool = False) -> int:
        """An empty sequence. `room` cells are set aside for it, side by side if they can be had.

        Raises:
            ContextOverflow: there are not that many free cells.
        """
        sequence = self._new_id(_Sequence(branch=branch))
        return self._reserved(sequence, room)

    def fork(self, parent: int, length: int | None = None, *, room: int = 0) -> int:
        """A sequence that sees the first `length` tokens of `parent` (all of them by default).

        Nothing is copied. `room` cells are set aside for what the fork will append.

        Raises:
            ContextOverflow: there are not that many free cells.
        """
        source = self._sequences[parent]
        length = source.length if length is None else length
        if not 0 <= length <= source.length:
            raise ValueError(f"cannot fork at {length}: the sequence has {source.length} tokens")
        child = _Sequence(branch=True, length=length)
        sequence = self._new_id(child)
        left = length
        for run in source.runs:
            if left <= 0:
                break
            run.seen[sequence] = min(run.seen[parent], left)
            child.runs.append(run)
            left -= run.seen[sequence]
        return self._reserved(sequence, room)

    def truncate(self, sequence: int, length: int) -> None:
        """Forget all but the first `length` tokens of a sequence; others go on seeing theirs."""
        seq = self._sequences[sequence]
        if not 0 <= length <= seq.length:
            raise ValueError(f"cannot truncate to {length}: the sequence has {seq.length} tokens")
        while seq.length > length:
            run = seq.runs[-1]
            seen, excess = run.seen[sequence], seq.length - length
            if excess < seen:
                run.seen[sequence] = seen - excess
                seq.length = length
            else:
                seq.length -= seen
                self._leave(seq.runs.pop(), sequence)

    def drop(self, sequence: int) -> None:
        """Forget a sequence. Cells that nobody sees any more are free again."""
        for run in self._sequences.pop(sequence).runs:
            self._leave(run, sequence)

    def append(self, sequence: int, tokens: Sequence[int]) -> torch.Tensor:
        """Take a cell for each token and enter it in the table; the forward writes the rest.

        Returns:
            The cells, (tokens,) int64.

        Raises:
            ContextOverflow: there are not that many free cells; nothing was changed.
        """
        seq, count = self._sequences[sequence], len(tokens)
        at = seq.length
        spans: list[tuple[int, int]] = []
        if (room := self._growable(sequence)) < count:
            self._take(sequence, count - room)  # first, since it can fail
        while (taken := seq.length - at) < count:
            run = self._tip(sequence)
            seen = run.seen[sequence]
            step = min(run.room - seen, count - taken)
            spans.append((run.start + seen, run.start + seen + step))
            run.seen[sequence] = seen + step
            seq.length += step
        cells = _cells(spans)
        self.token[cells] = torch.tensor(tokens, dtype=torch.int64)
        self.position[cells] = torch.arange(at, at + count, dtype=torch.int32)
        self.peak_used = max(self.peak_used, self.used)
        return cells

    # Runs and free cells

    def _new_id(self, seq: _Sequence) -> int:
        self._last_id += 1
        self._sequences[self._last_id] = seq
        return self._last_id

    def _reserved(self, sequence: int, room: int) -> int:
        try:
            self._take(sequence, room)
        except ContextOverflow:
            self.drop(sequence)
            raise
        return sequence

    def _growable(self, sequence: int) -> int:
        """How many tokens a sequence can append without taking cells."""
        room = 0
        for run in reversed(self._sequences[sequence].runs):
            if run.owner != sequence or run.seen[sequence] != run.used:
                break
            room += run.room - run.used
            if run.used:
                break
        return room

    def _tip(self, sequence: int) -> Run:
        """The run that the next token goes into: the first with room of those at the end."""
        runs = self._sequences[sequence].runs
        tip = runs[-1]
        for run in reversed(runs):
            if run.owner != sequence or run.seen[sequence] != run.used or run.used == run.room:
                break
            tip = run
            if run.used:
                break
        return tip

    def _take(self, sequence: int, count: int) -> None:
        """Add empty runs of `count` cells in all to the end of a sequence."""
        if count > self.free:
            raise ContextOverflow(
                f"{count:,} more cells are needed, but {self.free:,} of the pool's "
                f"{self.capacity:,} are free: ask for fewer or shorter margins or a shorter answer"
            )
        seq = self._sequences[sequence]
        while count:
            start, end = self._choose(count, seq.branch)
            self._free = [
                piece
                for s, e in self._free
                for piece in ([(s, start), (end, e)] if s <= start < e else [(s, e)])
                if piece[0] < piece[1]
            ]
            run = Run(start, end - start, owner=sequence, seen={sequence: 0})
            self._runs.append(run)
            seq.runs.append(run)
            count -= run.room

    def _choose(self, count: int, branch: bool) -> tuple[int, int]:
        """Free neighbouring cells: `count` of them, or the most there are side by side."""
        below = [(s, min(e, self.boundary)) for s, e in self._free if s < self.boundary]
        above = [(max(s, self.boundary), e) for s, e in self._free if e > self.boundary]
        # From the boundary outward, so that what belongs together stands close together.
        order = [*below[::-1], *above] if branch else [*above, *below[::-1]]
        longest = max(order, key=lambda stretch: stretch[1] - stretch[0])
        start, end = next((s for s in order if s[1] - s[0] >= count), longest)
        count = min(count, end - start)
        return (end - count, end) if end <= self.boundary else (start, start + count)

    def _leave(self, run: Run, sequence: int) -> None:
        """A sequence no longer sees a run; the last one to leave frees its cells."""
        del run.seen[sequence]
        if run.seen:
            return
        self._runs.remove(run)
        self._free = _merged([*self._free, (run.start, run.start + run.room)])


def _merged(stretches: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The stretches in order, neighbours joined."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(stretches):
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def _cells(spans: list[tuple[int, int]]) -> torch.Tensor:
    return torch.cat([torch.zeros(0, dtype=torch.int64), *(torch.arange(*s) for s in spans)])
