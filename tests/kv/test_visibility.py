"""Masks against the first invariant, cell by cell."""

from __future__ import annotations

import random

import pytest
import torch

from postil.kv.pool import LayerShape, Pool
from postil.kv.visibility import WIDE, visibility


@pytest.mark.parametrize("window", [None, 1, 7, 60])
@pytest.mark.parametrize("seed", range(4))
def test_a_row_sees_what_its_sequence_sees_up_to_its_position(
    window: int | None, seed: int
) -> None:
    chance = random.Random(seed)
    pool = Pool([LayerShape(1, 2, 2)], 600, boundary=250)
    main = pool.new(room=300)
    pool.append(main, range(120))
    sequences = [main, pool.new(branch=True)]
    sequences += [pool.fork(main, chance.randrange(121), room=20) for _ in range(4)]
    batch = []
    for sequence in sequences:
        rows = chance.choice([1, 2, 9, WIDE, WIDE + 5])
        pool.append(sequence, range(rows))
        batch.append((sequence, rows))
    groups = visibility(pool, batch)
    seen = torch.zeros(sum(rows for _, rows in batch), pool.capacity, dtype=torch.bool)
    for group in groups:
        mask = group.mask(window)
        assert torch.equal(group.mask(window, 3), mask.repeat(3, 1))
        assert set(mask.unique().tolist()) <= {0.0, float("-inf")}
        seen[group.rows, group.cells] = mask == 0
    row = 0
    for sequence, rows in batch:
        for position in range(pool.length(sequence) - rows, pool.length(sequence)):
            allowed = {
                cell
                for cell in pool.cells(sequence).tolist()
                if pool.position[cell] <= position
                and (window is None or position - pool.position[cell] < window)
            }
            assert set(seen[row].nonzero().flatten().tolist()) == allowed
            row += 1


def test_long_slices_stand_alone_and_short_ones_together() -> None:
    pool = Pool([LayerShape(1, 2, 2)], 600, boundary=200)
    batch = []
    for rows in (1, 3, WIDE, 2, 1):
        sequence = pool.new()
        pool.append(sequence, range(rows))
        batch.append((sequence, rows))
    spans = [(group.rows.start, group.rows.stop) for group in visibility(pool, batch)]
    assert spans == [(0, 4), (4, 4 + WIDE), (4 + WIDE, 7 + WIDE)]
