"""The table of cells by itself; what the cells hold is tested with the engine."""

from __future__ import annotations

import pytest
import torch

from postil.errors import ContextOverflow
from postil.kv.pool import LayerShape, Pool

LAYERS = [LayerShape(2, 4, 4), LayerShape(1, 8, 6)]


def make_pool(capacity: int = 1000, boundary: int = 400) -> Pool:
    return Pool(LAYERS, capacity, boundary=boundary)


def storage(pool: Pool) -> list[int]:
    return [tensor.data_ptr() for tensor in (*pool.keys, *pool.values)]


@pytest.mark.parametrize("length", [100, 100_000])
def test_fork_truncate_and_drop_touch_the_table_only(length: int) -> None:
    pool = make_pool(length + 1000, 900)
    main = pool.new(room=length)
    pool.append(main, range(length))
    before, at = storage(pool), [tensor.clone() for tensor in (pool.token, pool.position)]
    forks = [pool.fork(main, length - i) for i in range(9)]
    for fork in forks:
        assert len(pool.spans(fork)) == 1  # one run, however long
        pool.truncate(fork, length // 2)
    for fork in forks:
        pool.drop(fork)
    assert storage(pool) == before
    assert torch.equal(pool.token, at[0])
    assert torch.equal(pool.position, at[1])
    assert pool.tokens(main) == list(range(length))


def test_shapes_and_bytes() -> None:
    pool = Pool(LAYERS, 10, dtype=torch.bfloat16)
    assert [tuple(k.shape) for k in pool.keys] == [(2, 10, 4), (1, 10, 8)]
    assert [tuple(v.shape) for v in pool.values] == [(2, 10, 4), (1, 10, 6)]
    total = sum(t.numel() * t.element_size() for t in (*pool.keys, *pool.values))
    assert pool.capacity * pool.bytes_per_cell == total
    assert not any(t.any() for t in (*pool.keys, *pool.values))


def test_documents_go_up_from_the_boundary_and_branches_down() -> None:
    pool = make_pool()
    main = pool.new(room=100)
    assert pool.append(main, range(50)).tolist() == list(range(400, 450))
    one, two = pool.fork(main, 50, room=10), pool.fork(main, 20, room=10)
    assert pool.append(one, range(10)).tolist() == list(range(390, 400))
    assert pool.append(two, range(10)).tolist() == list(range(380, 390))
    assert pool.append(main, range(50)).tolist() == list(range(450, 500))
    assert pool.cells(two).tolist() == [*range(400, 420), *range(380, 390)]


def test_a_fork_never_writes_over_what_another_sees() -> None:
    pool = make_pool()
    main = pool.new(room=20)
    pool.append(main, [1, 2, 3, 4])
    fork = pool.fork(main, 2)
    pool.append(fork, [9, 9])
    pool.truncate(main, 2)
    pool.append(main, [5])
    assert pool.tokens(fork) == [1, 2, 9, 9]
    assert pool.tokens(main) == [1, 2, 5]
    second = pool.fork(fork)
    pool.drop(main)
    pool.drop(fork)
    assert pool.tokens(second) == [1, 2, 9, 9]


def test_seen_by() -> None:
    pool = make_pool()
    main = pool.new(room=4)
    cells = pool.append(main, [1, 2, 3]).tolist()
    fork = pool.fork(main, 2)
    assert [pool.seen_by(cell) for cell in cells] == [{main, fork}, {main, fork}, {main}]
    assert pool.seen_by(cells[-1] + 1) == set()


def test_cells_come_back() -> None:
    pool = make_pool()
    for _ in range(50):
        main = pool.new(room=300)
        pool.append(main, range(200))
        forks = [pool.fork(main, 10 * i, room=30) for i in range(1, 9)]
        for fork in forks:
            pool.append(fork, range(25))
        for sequence in (*forks[::2], main, *forks[1::2]):
            pool.drop(sequence)
    assert (pool.used, pool.free) == (0, 1000)
    assert pool.peak_used == 200 + 8 * 25


def test_what_does_not_fit_changes_nothing() -> None:
    pool = make_pool(100, 50)
    main = pool.new(room=60)
    pool.append(main, range(60))
    with pytest.raises(ContextOverflow):
        pool.append(main, range(41))
    with pytest.raises(ContextOverflow):
        pool.fork(main, room=41)
    with pytest.raises(ContextOverflow):
        pool.new(room=41)
    assert pool.sequences() == [main]
    assert (pool.length(main), pool.free) == (60, 40)


def test_a_sequence_goes_on_in_scattered_cells() -> None:
    pool = make_pool(60, 30)
    holes = [pool.new(room=10) for _ in range(6)]
    for hole in holes[::2]:
        pool.drop(hole)
    scattered = pool.new()
    pool.append(scattered, range(30))
    assert pool.tokens(scattered) == list(range(30))
    assert pool.position[pool.cells(scattered)].tolist() == list(range(30))


def test_growing_keeps_what_is_cached() -> None:
    pool = make_pool(10, 4)
    main = pool.new(room=6)
    cells = pool.append(main, range(6))
    for tensor in (*pool.keys, *pool.values):
        tensor.normal_()
    before = [tensor[:, cells].clone() for tensor in (*pool.keys, *pool.values)]
    pool.grow(20)
    assert (pool.capacity, pool.free) == (30, 24)
    after = [tensor[:, cells] for tensor in (*pool.keys, *pool.values)]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert pool.tokens(main) == list(range(6))
    pool.append(pool.new(), range(24))
    assert pool.free == 0


def test_a_growth_that_fails_leaves_the_pool_as_large_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = make_pool(10, 4)
    main = pool.new(room=6)
    pool.append(main, range(6))
    real = pool._storage
    calls = iter(range(9))

    def fail(heads: int, width: int, cells: int) -> torch.Tensor:
        if next(calls) == 2:
            raise MemoryError
        return real(heads, width, cells)

    monkeypatch.setattr(pool, "_storage", fail)
    with pytest.raises(MemoryError):
        pool.grow(20)
    assert (pool.capacity, pool.free, pool.tokens(main)) == (10, 4, list(range(6)))


@pytest.mark.parametrize("length", [-1, 5])
def test_lengths_that_are_not_there(length: int) -> None:
    pool = make_pool()
    main = pool.new()
    pool.append(main, range(4))
    with pytest.raises(ValueError, match=str(length)):
        pool.fork(main, length)
    with pytest.raises(ValueError, match=str(length)):
        pool.truncate(main, length)
