"""Drafts against a search that tries every place."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from postil.engine.drafting import FIRST_DRAFT, LONGEST, SHORTEST, Lookup, Source

# Ids whose bytes look alike, so that a match could also begin in the middle of a token.
TOKENS = st.lists(st.sampled_from([0, 1, 256, 257, 65536, 0x01000100]), max_size=40)


@given(TOKENS, st.lists(st.sampled_from([0, 1, 256, 257, 65536]), min_size=1, max_size=4))
def test_the_last_occurrence_with_something_behind_it_is_found(
    tokens: list[int], ngram: list[int]
) -> None:
    size = len(ngram)
    places = [at for at in range(len(tokens) - size) if tokens[at : at + size] == ngram]
    assert Source(tokens).after(ngram) == (places[-1] + size if places else None)


@given(TOKENS, TOKENS, TOKENS, TOKENS, TOKENS)
def test_the_longest_match_wins_and_the_nearer_of_equals(
    prompt: list[int], text: list[int], sibling: list[int], near: list[int], far: list[int]
) -> None:
    texts = [sibling, text]
    draft = Lookup(prompt, [Source(near), Source(far)], texts).propose(text, 1)
    whole, beside = [*prompt[-LONGEST:], *text], [*prompt[-LONGEST:], *sibling]
    want: list[int] = []
    for size in range(SHORTEST, min(LONGEST, len(whole)) + 1) if text else ():
        found = [
            source[at + size]
            for source in (far, near, beside, whole)
            for at in range(len(source) - size)
            if source[at : at + size] == whole[-size:]
        ]
        want = found[-1:] or want
    assert draft == want


def test_margins_that_begin_alike_are_drafted_from_one_another() -> None:
    prompt, first, second = [5, 6, 7], [20, 21, 22, 23], [20]
    texts = [first, second]
    assert Lookup(prompt, [], texts).propose(second, 9) == [21, 22, 23]
    first.append(24)  # as far as it is written by now
    assert Lookup(prompt, [], texts).propose(second, 9) == [21, 22, 23, 24]
    assert Lookup(prompt, [], [second]).propose(second, 9) == []


def test_a_text_that_repeats_itself_goes_on_repeating() -> None:
    lookup = Lookup([], [])
    lookup.learn(8, 8)
    assert lookup.propose([5, 1, 2, 3, 1, 2, 3], 10) == [1, 2, 3, 1, 2, 3, 1, 2, 3, 1]


def test_a_draft_ends_with_its_source_and_with_what_is_left_to_write() -> None:
    lookup = Lookup([], [Source([9, 1, 2, 7, 8])])
    assert lookup.propose([1, 2], 10) == [7, 8]
    assert lookup.propose([1, 2], 1) == [7]
    assert lookup.propose([1, 2], 0) == []


def test_without_a_match_nothing_is_proposed() -> None:
    lookup = Lookup([], [Source([9, 1, 3, 7, 8])])
    assert lookup.propose([], 10) == lookup.propose([1], 10) == lookup.propose([1, 2], 10) == []


def test_drafts_grow_while_they_hold_and_shrink_when_they_do_not() -> None:
    lookup = Lookup([], [])
    lookup.learn(FIRST_DRAFT, FIRST_DRAFT)
    lookup.learn(0, 0)
    assert lookup.length == 2 * FIRST_DRAFT
    lookup.learn(8, 3)
    assert lookup.length == 5
    lookup.learn(5, 0)
    assert lookup.length == 2
