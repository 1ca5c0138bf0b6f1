"""Windows, slices and the room behind them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postil.engine.loading import prepare
from postil.engine.step import Feed
from postil.errors import ContextOverflow
from postil.margins.context import Context
from postil.margins.events import Segment
from tests.tiny import tiny_network, tiny_tokenizer

OPENING = [3, 4, 5]


def make_context(lengths: list[int], window: int = 300) -> Context:
    tokenizer: Any = tiny_tokenizer()
    loaded = prepare("llama", tiny_network("llama", len(tokenizer), window), tokenizer)
    segments = [Segment(i, "text", 0, 0, None, "") for i in range(len(lengths))]
    tokens = [[10 + i] * length for i, length in enumerate(lengths)]
    return Context(loaded, OPENING, segments, tokens)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 120), min_size=1, max_size=25), st.integers(1, 90))
def test_windows_hold_all_segments_in_order(lengths: list[int], behind: int) -> None:
    context = make_context(lengths)
    context.reserve(after_segment=behind, after_document=behind, scratch=50)
    fits = len(OPENING) + sum(lengths) + behind <= 300
    assert (len(context.windows) == 1) or not fits
    assert [i for w in context.windows for i in w.segments] == list(range(len(lengths)))
    for window in context.windows:
        mine = [[10 + i] * lengths[i] for i in window.segments]
        assert window.tokens == [*OPENING, *(token for tokens in mine for token in tokens)]
        assert window.ends[-1] == len(window.tokens)
        assert [b - a for a, b in pairwise([len(OPENING), *window.ends])] == list(map(len, mine))
        assert len(window.tokens) + behind <= 300
    for earlier, later in pairwise(context.windows):  # none could have held one more
        first = lengths[later.segments.start]
        assert len(earlier.tokens) + first > 300 - max(behind, 75)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), st.integers(1, 200))
def test_slices_read_everything_once(lengths: list[int], limit: int) -> None:
    context = make_context(lengths)
    context.reserve(after_segment=20, after_document=20, scratch=50)
    document = 0
    while context.read < context.total:
        count = min(limit, context.ahead)
        before = context.segments_read()
        sequence, tokens, of_document = context.next_slice(count)
        assert len(tokens) == count > 0
        context.engine.step([Feed(sequence, tokens, logits=0)])
        document += of_document
        assert document == context.read
        whole = sum(
            context.pool.length(context.boundary(i)[0]) >= context.boundary(i)[1]
            for i in range(len(lengths))
        )
        assert context.segments_read() == whole
        if before == 0 and whole:  # the first segment's margin is not kept waiting
            assert context.read == lengths[0]
        assert whole <= context.segments_read(partly=True) <= whole + 1
    assert context.ahead == 0


def test_what_does_not_fit_changes_nothing() -> None:
    context = make_context([200, 100])
    with pytest.raises(ContextOverflow, match="shorter"):
        context.reserve(after_segment=150, after_document=150, scratch=10)
    with pytest.raises(ContextOverflow, match="window by window"):
        context.reserve(after_segment=20, after_document=20, scratch=10, whole=True)
    assert context.windows == []


def test_a_cache_larger_than_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    class Full:
        available = 1000

    monkeypatch.setattr(psutil, "virtual_memory", Full)
    context = make_context([100])
    with pytest.raises(ContextOverflow, match="memory are free"):
        context.reserve(after_segment=20, after_document=20, scratch=10)
    assert context.windows == []
