"""Prompt lookup: what is written was often read before, so its next words can be guessed.

If the last few tokens of a text stand somewhere in what the model has read, those that follow there
are proposed as a draft. The next forward runs the draft too, and as much of it is accepted as the
model would have written anyway: the text is the same token for token, in fewer forwards. This is
speculative decoding (Leviathan et al., arXiv:2211.17192) with a draft that costs nothing (Saxena,
"Prompt lookup decoding", 2023).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

SHORTEST, LONGEST = 2, 4  # tokens of a match; a longer one is no better than one of four
FIRST_DRAFT = 4


class Source:
    """Tokens in which n-grams are looked up."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens
        self._bytes = array("i", tokens).tobytes()

    def after(self, ngram: Sequence[int]) -> int | None:
        """Where the token after the last occurrence of an n-gram stands, if there is one."""
        wanted, size = array("i", ngram).tobytes(), array("i").itemsize
        end = len(self._bytes) - size  # something must follow
        while (at := self._bytes.rfind(wanted, 0, end)) >= 0:
            if at % size == 0:
                return at // size + len(ngram)
            end = at + len(wanted) - 1  # it began in the middle of a token
        return None


class Lookup:
    """The drafts of one text.

    Args:
        sources: what the text may be copied from, the likeliest first. Its own beginning is
            always looked at before them.

    Attributes:
        length: the most tokens of the next draft. It doubles while drafts are accepted whole.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self.length = FIRST_DRAFT
        self._sources = sources

    def propose(self, text: Sequence[int], limit: int) -> list[int]:
        """At most `limit` tokens that may follow `text`."""
        own = Source(text)
        longest, source, at = SHORTEST - 1, own, 0
        for candidate in (own, *self._sources):
            for size in range(longest + 1, min(LONGEST, len(text)) + 1):
                found = candidate.after(text[-size:])
                if found is None:
                    break
                longest, source, at = size, candidate, found
        if longest < SHORTEST:
            return []
        draft: list[int] = []
        for place in range(at, at + min(self.length, limit)):
            if place < len(source.tokens):
                draft.append(source.tokens[place])
            elif source is own:  # it repeats itself: so does the draft
                draft.append(draft[place - len(text)])
        return draft

    def learn(self, drafted: int, accepted: int) -> None:
        """Make the next draft as long as the last one was good; without one there is no news."""
        if drafted:
            self.length = 2 * drafted if accepted == drafted else max(1, accepted)
