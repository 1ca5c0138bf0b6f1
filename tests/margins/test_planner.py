"""The plan of every forward, played through without a model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from postil.margins.planner import Policy, State, plan


@given(
    lengths=st.lists(st.integers(1, 900), min_size=1, max_size=20),
    margin_tokens=st.lists(st.integers(1, 40), min_size=20, max_size=20),
    prompt=st.integers(1, 300),
    policy=st.builds(
        Policy,
        slice_tokens=st.integers(1, 600),
        beside=st.integers(0, 600),
        together=st.integers(1, 9),
    ),
)
def test_every_segment_is_read_and_gets_one_margin(
    lengths: list[int], margin_tokens: list[int], prompt: int, policy: Policy
) -> None:
    total = sum(lengths)
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    read = started = done = 0
    writing: dict[int, int] = {}  # segment: tokens still to be written
    for _ in range(20_000):
        waiting = sum(end <= read for end in ends) - started
        state = State(total - read, waiting, len(writing), len(writing), prompt)
        work = plan(state, policy)
        if not work.start and not work.read and not writing:
            break
        assert 0 <= work.start <= waiting
        assert len(writing) + work.start <= policy.together
        assert work.read <= max(policy.slice_tokens, policy.beside)
        if writing or work.start:
            assert not work.read or work.read + len(writing) <= policy.beside
        for _ in range(work.start):
            writing[started] = margin_tokens[started]
            started += 1
        read = min(total, read + work.read)
        writing = {segment: left - 1 for segment, left in writing.items() if left > 1}
        done = started - len(writing)
    assert (read, started, done) == (total, len(lengths), len(lengths))


def test_a_margin_starts_as_soon_as_its_segment_is_read() -> None:
    assert plan(State(1000, 1, 0, 0, 40), Policy()).start == 1


def test_nothing_is_left_to_do_at_the_end() -> None:
    work = plan(State(0, 0, 0, 0, 40), Policy())
    assert (work.start, work.read) == (0, 0)
