"""Masks against the first invariant, cell by cell."""

from __future__ import annotations

import random

import pytest
import torch

from postil.kv.pool import LayerShape, Pool
from postil.kv.visibility import visibility


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
        rows = chance.choice([1, 2, 9, 64, 69])
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


def test_branches_of_a_document_share_the_reading_of_it_and_others_stand_apart() -> None:
    pool = Pool([LayerShape(1, 2, 2)], 9000, boundary=1000)
    main = pool.new(room=8000)
    pool.append(main, range(4000))
    forks = [pool.fork(main, 3000 + at, room=20) for at in range(3)]
    verdict = pool.new(room=90, branch=True)
    batch = [(verdict, 80), (forks[0], 1), (forks[1], 3), (forks[2], 5), (main, 512)]
    for sequence, rows in batch:
        pool.append(sequence, range(rows))
    spans = [(group.rows.start, group.rows.stop) for group in visibility(pool, batch)]
    # 80 rows over the document would cost more than one more group, and 512 over the branches too.
    assert spans == [(0, 80), (80, 89), (89, 601)]
