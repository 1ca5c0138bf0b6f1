"""Choosing tokens, and turning them into text piece by piece."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from postil.engine.sampling import Generation, Sampling, choose
from tests.tiny import tiny_tokenizer

TOKENIZER: Any = tiny_tokenizer()
END = frozenset({TOKENIZER.eos_token_id})


def one_hot(token: int) -> torch.Tensor:
    logits = torch.zeros(len(TOKENIZER))
    logits[token] = 50.0
    return logits


def say(text: str, limit: int = 1000, **options: Any) -> tuple[Generation, list[str]]:
    """Let a model that will write `text` and then end do so; what was told on the way."""
    generation = Generation(TOKENIZER, Sampling(**options), END, limit)
    pieces = []
    tokens = TOKENIZER(text, add_special_tokens=False).input_ids
    for token in [*tokens, TOKENIZER.eos_token_id]:
        pieces.append(generation.take(one_hot(token)))
        if generation.finish_reason:
            break
    return generation, pieces


@settings(deadline=None)
@given(st.text(max_size=40))
def test_pieces_joined_are_the_text(text: str) -> None:
    text = text.encode("utf-8", "ignore").decode().replace("\ufffd", "")
    generation, pieces = say(text)
    assert "".join(pieces) == generation.text == text
    assert generation.finish_reason == "stop"


@settings(deadline=None)
@given(st.text("abc\u20ac ", max_size=30), st.lists(st.text("abc\u20ac ", min_size=1, max_size=4)))
def test_text_ends_before_the_first_stop_string(text: str, stop: list[str]) -> None:
    generation, pieces = say(text, stop=tuple(stop))
    # As soon as one stands there the text ends, so one that begins earlier but ends later loses.
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    first = min(ends)[0] if ends else None
    whole = text if first is None else text[: min(at for end, at in ends if at < first)]
    assert generation.text.startswith(whole[: len(generation.text)])
    assert "".join(pieces) == generation.text
    assert not any(s in generation.text for s in stop)
    if not ends:
        assert generation.text == text


def test_half_a_character_is_held_back() -> None:
    _, pieces = say("a\U0001f600b")
    assert "\ufffd" not in "".join(pieces)
    assert pieces[0] == "a"


def test_the_limit_ends_a_text() -> None:
    generation, _ = say("The ferry leaves at nine.", limit=3)
    assert generation.finish_reason == "length"
    assert len(generation.tokens) == 3


def test_the_end_can_be_ignored() -> None:
    generation = Generation(TOKENIZER, Sampling(ignore_end=True), END, 5)
    while generation.finish_reason is None:
        generation.take(one_hot(TOKENIZER.eos_token_id))
    assert (len(generation.tokens), generation.finish_reason) == (5, "length")


def test_top_p_is_the_smallest_set_that_reaches_it() -> None:
    probabilities = torch.tensor([0.5, 0.05, 0.3, 0.15])
    generator = torch.Generator().manual_seed(0)
    for top_p, allowed in (
        (0.4, {0}),
        (0.5, {0}),
        (0.7, {0, 2}),
        (0.9, {0, 2, 3}),
        (1, {0, 1, 2, 3}),
    ):
        sampling = Sampling(temperature=1, top_p=top_p)
        drawn = [choose(probabilities.log(), sampling, generator) for _ in range(300)]
        assert set(drawn) == allowed


def test_frequencies_follow_the_temperature() -> None:
    logits = torch.tensor([1.0, 0.0, 2.0])
    generator = torch.Generator().manual_seed(1)
    drawn = torch.tensor([choose(logits, Sampling(0.5), generator) for _ in range(4000)])
    seen = drawn.bincount(minlength=3) / 4000
    assert (seen - (logits / 0.5).softmax(0)).abs().max() < 0.03
    assert choose(logits, Sampling(0), generator) == 2


def test_a_seed_gives_the_same_text_and_each_stream_its_own() -> None:
    def draw(seed: int, stream: int) -> list[int]:
        generation = Generation(TOKENIZER, Sampling(1.0, seed=seed), frozenset(), 20, stream)
        while generation.finish_reason is None:
            generation.take(torch.zeros(len(TOKENIZER)))
        return generation.tokens

    assert draw(3, 0) == draw(3, 0)
    assert len({tuple(draw(seed, stream)) for seed in (3, 4) for stream in (0, 1, 2)}) == 6


@pytest.mark.parametrize(
    "options", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.1}, {"stop": ("",)}]
)
def test_options_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options)).replace("stop", "stop string")):
        Sampling(**options)
