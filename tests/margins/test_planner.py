"""The plan of every forward, played through without a model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postil.margins.planner import BALANCED, BATCH, EAGER, STRETCH, Policy, State, plan

PROMPT = 40


def state(
    *,
    ahead: int = 0,
    waiting: int = 0,
    first: bool = False,
    texts: list[int] | None = None,
    proposed: list[int] | None = None,
    verdicts: list[int] | None = None,
) -> State:
    texts = texts or []
    return State(ahead, waiting, PROMPT, first, texts, proposed or [0] * len(texts), verdicts or [])


@given(
    lengths=st.lists(st.integers(1, 900), min_size=1, max_size=20),
    margin_tokens=st.lists(st.integers(1, 40), min_size=20, max_size=20),
    prompt=st.integers(1, 300),
    proposed=st.integers(0, 20),
    policy=st.builds(
        Policy,
        slice_tokens=st.integers(1, 600),
        beside_first=st.integers(0, 600),
        beside=st.integers(0, 600),
        gather=st.integers(1, 9),
        together=st.integers(1, 9),
        draft_tokens=st.integers(0, 16),
    ),
)
def test_every_segment_is_read_and_gets_one_margin(
    lengths: list[int], margin_tokens: list[int], prompt: int, proposed: int, policy: Policy
) -> None:
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    read = started = 0
    writing: dict[int, int] = {}  # segment: tokens still to be written
    for _ in range(20_000):
        ahead = next((end for end in (ends[0], ends[-1]) if end > read), read) - read
        waiting = sum(end <= read for end in ends) - started
        first = started == len(writing)
        texts = [1] * len(writing)
        now = State(ahead, waiting, prompt, first, texts, [proposed] * len(writing))
        batch = plan(now, policy)
        if not batch.start and not batch.read and not writing:
            break
        assert 0 <= batch.start <= waiting
        assert len(writing) + batch.start <= policy.together
        assert batch.drafts == (min(proposed, policy.draft_tokens),) * len(writing)
        assert batch.read <= ahead
        if batch.read:
            most = policy.slice_tokens
            if writing or batch.start:
                most = policy.beside_first if first else policy.beside
            others = len(writing) + sum(batch.drafts) + batch.start * prompt
            assert batch.read <= (most - others) * STRETCH
        for _ in range(batch.start):
            writing[started] = margin_tokens[started]
            started += 1
        read += batch.read
        writing = {segment: left - 1 for segment, left in writing.items() if left > 1}
    assert (read, started, len(writing)) == (ends[-1], len(lengths), 0)


def test_nothing_is_left_to_do_at_the_end() -> None:
    batch = plan(state(), BALANCED)
    assert (batch.start, batch.drafts, batch.read) == (0, (), 0)


def test_a_slice_ends_where_it_has_to_and_leaves_no_crumbs() -> None:
    assert plan(state(ahead=30), BALANCED).read == 30
    assert plan(state(ahead=542), BALANCED).read == 542
    assert plan(state(ahead=3000), BALANCED).read == BALANCED.slice_tokens


@pytest.mark.parametrize("policy", [BALANCED, EAGER])
def test_the_first_margin_starts_at_once_and_little_is_read_beside_it(policy: Policy) -> None:
    assert plan(state(ahead=3000, waiting=1, first=True), policy).start == 1
    assert plan(state(ahead=3000, first=True, texts=[1], proposed=[4]), policy).read <= 64


def test_more_is_read_beside_later_margins_unless_all_are_wanted_early() -> None:
    later = state(ahead=3000, texts=[1, 1], proposed=[4, 0])
    assert plan(later, BALANCED).read == BALANCED.beside - 6
    assert plan(later, EAGER).read <= 64


def test_a_batch_waits_until_its_segments_are_read() -> None:
    assert plan(state(ahead=3000, waiting=7, first=True), BATCH).start == 0
    assert plan(state(ahead=3000, waiting=8, first=True), BATCH).start == 8
    assert plan(state(ahead=0, waiting=3, first=True), BATCH).start == 3


def test_verdicts_and_prompts_take_room_from_the_document() -> None:
    batch = plan(state(ahead=3000, waiting=2, texts=[1], verdicts=[70]), BALANCED)
    assert batch.read == BALANCED.beside - 1 - 70 - 2 * PROMPT


@pytest.mark.parametrize("wrong", [{"together": 0}, {"slice_tokens": 0}, {"draft_tokens": -1}])
def test_a_policy_that_would_never_end_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="or more"):
        Policy(**wrong)
