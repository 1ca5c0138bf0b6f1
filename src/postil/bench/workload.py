"""What is read in a benchmark: so many tokens, in segments, with a margin after each."""

from __future__ import annotations

import random
from dataclasses import dataclass

from postil.margins.prompts import Prompts

QUESTION = "Where is Sandra?"
SECOND_QUESTION = "Who walked to the garden?"
_PEOPLE = ("Sandra", "Mary", "Daniel", "John", "the gardener", "my aunt", "the doctor", "nobody")
_VERBS = ("walked to", "came back from", "left", "was seen in", "slept in", "asked about", "swept")
_PLACES = ("the kitchen", "the garden", "the office", "the hallway", "the attic", "the old mill")
_ENDS = (
    "before the rain began",
    "with a lamp in one hand",
    "and nobody knew why",
    "as on every other day",
    "while the others were still at table",
    "and closed the door without a word",
)


@dataclass(frozen=True)
class Workload:
    """A document of `document_tokens` in segments of `segment_tokens`.

    Margins have `margin_tokens` each: end of text is ignored, so that every system writes as much.

    Raises:
        ValueError: the segments do not fill the document.
    """

    document_tokens: int = 4096
    segment_tokens: int = 512
    margin_tokens: int = 48

    def __post_init__(self) -> None:
        if self.document_tokens % self.segment_tokens:
            raise ValueError(
                f"{self.document_tokens} tokens are no whole number of segments of "
                f"{self.segment_tokens}"
            )

    def __str__(self) -> str:
        segments = self.document_tokens // self.segment_tokens
        return f"{segments} x {self.segment_tokens}, margins of {self.margin_tokens}"

    def segments(self, prompts: Prompts, seed: int, text: str | None = None) -> list[list[int]]:
        """Token ids of each segment.

        Args:
            seed: another document, so that no server finds it in its cache.
            text: what the document is taken from; prose of no meaning if that is not said.

        Raises:
            ValueError: the text is too short.
        """
        tokens = prompts.encode(text) if text is not None else _prose(prompts, self, seed)
        start = 7 * seed if text is not None else 0
        tokens = tokens[start : start + self.document_tokens]
        if len(tokens) < self.document_tokens:
            raise ValueError(
                f"the text has fewer than {start + self.document_tokens:,} tokens, which this "
                "many runs take: give a longer one"
            )
        size = self.segment_tokens
        return [tokens[at : at + size] for at in range(0, len(tokens), size)]


def _prose(prompts: Prompts, workload: Workload, seed: int) -> list[int]:
    """Sentences in which somebody is always going somewhere; the same on every machine."""
    source, text = random.Random(seed), ""
    while True:
        for _ in range(workload.document_tokens // 8):
            words = (source.choice(part) for part in (_PEOPLE, _VERBS, _PLACES, _ENDS))
            sentence = " ".join(words)
            text += sentence[0].upper() + sentence[1:] + ". "
        if len(tokens := prompts.encode(text)) >= workload.document_tokens:
            return tokens
