"""From logits to text: choosing tokens, turning them into characters, knowing when to stop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: 0 is greedy.
        top_p: sample from the fewest tokens whose probabilities reach this sum.
        seed: the same seed gives the same text, however the work was packed.
        stop: strings that end the text; they are not part of it.
        ignore_end: go on through end-of-text tokens (for benchmarks of a fixed length).
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: Sequence[str] = ()
    ignore_end: bool = False

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature must be 0 or more, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if any(not text for text in self.stop):
            raise ValueError("a stop string must not be empty")


def choose(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token id from logits (vocabulary,), float32."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    probabilities = (logits / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:
        ordered, ids = probabilities.sort(descending=True)
        before = ordered.cumsum(-1) - ordered  # what the more probable ones reach without it
        ordered[before >= sampling.top_p] = 0
        return int(ids[torch.multinomial(ordered, 1, generator=generator)])
    return int(torch.multinomial(probabilities, 1, generator=generator))


class Generation:
    """One text in the making.

    Args:
        tokenizer: of the model.
        sampling: how tokens are chosen.
        stop_tokens: ids that end the text; they are not part of it.
        limit: the most tokens.
        stream: mixed into the seed, so that texts made side by side are drawn independently.

    Attributes:
        tokens: what was chosen so far, without a stop token.
        text: the characters that are final; a stop string that may be arriving is held back.
        finish_reason: `stop` or `length` at the end, else `None`.
    """

    def __init__(
        self,
        tokenizer: Any,
        sampling: Sampling,
        stop_tokens: frozenset[int],
        limit: int,
        stream: int = 0,
    ) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.finish_reason: Literal["stop", "length"] | None = None
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._stop_tokens = stop_tokens
        self._limit = limit
        # A fixed mix rather than hash(), which may change from one Python to the next.
        seed = (sampling.seed * 1_000_003 + stream) % (1 << 63)
        self._generator = torch.Generator().manual_seed(seed)

    @property
    def left(self) -> int:
        """How many tokens may still be chosen."""
        return self._limit - len(self.tokens)

    def take(self, logits: torch.Tensor) -> str:
        """Choose the next token from logits (vocabulary,); give back the new final characters."""
        token = choose(logits.cpu(), self._sampling, self._generator)
        if token in self._stop_tokens and not self._sampling.ignore_end:
            self.finish_reason = "stop"
        else:
            self.tokens.append(token)
            if len(self.tokens) >= self._limit:
                self.finish_reason = "length"
        return self._advance()

    def follow(self, logits: torch.Tensor, draft: Sequence[int]) -> Iterator[str]:
        """Choose the next tokens, as far as the draft was right; each one's new final characters.

        What is chosen is what `take` would choose one forward at a time. That makes it exact: a
        row's logits are right if all tokens before it are those that were chosen.

        Args:
            logits: (1 + draft, vocabulary), after the last token and after each of the draft.
        """
        for row, guess in zip(logits, [*draft, None], strict=True):
            yield self.take(row)
            if self.finish_reason is not None or self.tokens[-1] != guess:
                return

    def _advance(self) -> str:
        whole = self._tokenizer.decode(
            self.tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        at = min((i for s in self._sampling.stop if (i := whole.find(s)) >= 0), default=None)
        if at is not None:
            whole, self.finish_reason = whole[:at], "stop"
        elif self.finish_reason is None:
            whole = whole[: len(whole) - self._unsure(whole)]
        if new := whole[len(self.text) :]:
            self.text = whole
        return new

    def _unsure(self, text: str) -> int:
        """How many characters at the end may still change or belong to a stop string."""
        unsure = len(text) - len(text.rstrip("\ufffd"))  # a character whose bytes are incomplete
        for stop in self._sampling.stop:
            for size in range(len(stop) - 1, unsure, -1):
                if text.endswith(stop[:size]):
                    unsure = max(unsure, size)
                    break
        return unsure
