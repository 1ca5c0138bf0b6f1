"""The engine against a plain uncached forward of transformers, over many architectures."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from postil.engine.loading import prepare
from postil.engine.step import Engine, Feed
from postil.errors import ContextOverflow
from postil.kv.pool import Pool
from tests.tiny import CONFIGS, VOCABULARY, plain_logits, tiny_network

TOLERANCE = 1e-4


def make_engine(name: str = "llama", capacity: int = 400, boundary: int = 150) -> Engine:
    loaded = prepare(name, tiny_network(name), tokenizer=_NoTokenizer())
    return Engine(loaded, Pool(loaded.layers, capacity, boundary=boundary))


class _NoTokenizer:
    eos_token_id = 2


def some_tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, VOCABULARY), k=count)


def check(engine: Engine, tokens: list[int], logits: torch.Tensor) -> None:
    """`logits` must be those of the last rows of a plain forward over `tokens`."""
    want = plain_logits(engine.loaded.network, tokens)[-len(logits) :]
    assert (logits - want).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("sizes", [[90], [1] * 12, [5, 70, 1, 20]])
def test_any_chunking_gives_the_plain_logits(name: str, sizes: list[int]) -> None:
    engine, tokens = make_engine(name), some_tokens(sum(sizes))
    sequence = engine.pool.new()
    at, got = 0, []
    for size in sizes:
        (logits,) = engine.step([Feed(sequence, tokens[at : at + size], size)])
        got.append(logits)
        at += size
    check(engine, tokens, torch.cat(got))


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_branches_and_document_give_the_plain_logits(name: str) -> None:
    engine = make_engine(name)
    pool, document = engine.pool, some_tokens(100)
    main = pool.new(room=200)
    engine.step([Feed(main, document[:60], 0)])
    branches = {pool.fork(main, at, room=12): at for at in (60, 33, 1)}
    alone = pool.new(branch=True)
    said: dict[int, list[int]] = {b: document[:at] for b, at in branches.items()} | {alone: []}
    for step in range(4):
        more = {s: some_tokens(7 if step == 0 else 2, seed=10 * step + s) for s in said}
        feeds = [Feed(main, document[60 + 10 * step : 70 + 10 * step], 10)]
        feeds += [Feed(s, tokens, len(tokens)) for s, tokens in more.items()]
        logits = engine.step(feeds)
        check(engine, document[: 70 + 10 * step], logits[0])
        for (sequence, tokens), rows in zip(more.items(), logits[1:], strict=True):
            said[sequence] = said[sequence] + tokens
            check(engine, said[sequence], rows)
            assert pool.tokens(sequence) == said[sequence]
    assert engine.forwards == 5


def test_only_the_wanted_logits_come_back() -> None:
    engine = make_engine()
    one, two = engine.pool.new(), engine.pool.new()
    tokens = some_tokens(8)
    none, last = engine.step([Feed(one, tokens, 0), Feed(two, tokens, 1)])
    assert none.shape == (0, VOCABULARY)
    assert last.shape == (1, VOCABULARY)
    check(engine, tokens, last)


def test_a_full_pool_changes_nothing() -> None:
    engine = make_engine(capacity=20, boundary=0)
    pool, tokens = engine.pool, some_tokens(20)
    one, two = pool.new(), pool.new()
    engine.step([Feed(one, tokens[:10], 0), Feed(two, tokens[:4], 0)])
    with pytest.raises(ContextOverflow):
        engine.step([Feed(one, tokens[10:13]), Feed(two, tokens[4:8])])
    assert (pool.tokens(one), pool.tokens(two)) == (tokens[:10], tokens[:4])
    (logits,) = engine.step([Feed(one, tokens[10:13])])
    check(engine, tokens[:13], logits)


def test_an_interrupted_forward_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    tokens = some_tokens(30)
    sequence = engine.pool.new()
    engine.step([Feed(sequence, tokens[:10], 0)])

    layer = engine.loaded.network.model.layers[1]
    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step([Feed(sequence, tokens[10:20])])
    assert engine.pool.tokens(sequence) == tokens[:10]
    (logits,) = engine.step([Feed(sequence, tokens[10:])])
    check(engine, tokens, logits)


def _interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


operation = st.tuples(
    st.sampled_from(["new", "fork", "truncate", "drop", "step", "step", "step"]),
    st.integers(0, 2**16),
    st.integers(0, 2**16),
)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["llama", "gemma3_text"]),
    boundary=st.integers(0, 120),
    operations=st.lists(operation, min_size=3, max_size=25),
)
def test_any_order_of_operations_gives_the_plain_logits(
    name: str, boundary: int, operations: list[tuple[str, int, int]]
) -> None:
    """Random forks, truncations, drops and packed steps against lists of tokens."""
    engine = make_engine(name, capacity=240, boundary=boundary)
    pool = engine.pool
    said: dict[int, list[int]] = {}
    for kind, one, two in operations:
        known = sorted(said)
        if kind == "new" or not known:
            said[pool.new(branch=one % 2 == 0, room=two % 9)] = []
            continue
        chosen = known[one % len(known)]
        length = two % (len(said[chosen]) + 1)
        match kind:
            case "fork":
                said[pool.fork(chosen, length, room=one % 7)] = said[chosen][:length]
            case "truncate":
                pool.truncate(chosen, length)
                said[chosen] = said[chosen][:length]
            case "drop":
                pool.drop(chosen)
                del said[chosen]
            case "step":
                fed = {s: some_tokens(1 + (two + s) % 9, two + s) for s in known[one % 3 :][:4]}
                if not fed or sum(map(len, fed.values())) > pool.free:
                    continue
                logits = engine.step([Feed(s, t, len(t)) for s, t in fed.items()])
                for (sequence, tokens), rows in zip(fed.items(), logits, strict=True):
                    said[sequence] = said[sequence] + tokens
                    check(engine, said[sequence], rows)
        for sequence, tokens in said.items():
            assert pool.tokens(sequence) == tokens
            assert pool.position[pool.cells(sequence)].tolist() == list(range(len(tokens)))
    for sequence in list(said):
        pool.drop(sequence)
    assert (pool.used, pool.free) == (0, pool.capacity)
