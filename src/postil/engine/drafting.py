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
        prompt: what the text follows; its end counts as the text's beginning.
        sources: what the text may be copied from, the likeliest first. Its own beginning is
            always looked at before them.
        siblings: texts that follow the same prompt elsewhere, as far as they are written: margins
            of one question often begin alike. It may hold the text itself.

    Attributes:
        length: the most tokens of the next draft.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        sources: Sequence[Source],
        siblings: Sequence[Sequence[int]] = (),
    ) -> None:
        self.length = FIRST_DRAFT
        self._head = prompt[-LONGEST:]
        self._sources = sources
        self._siblings = siblings

    def propose(self, text: Sequence[int], limit: int) -> list[int]:
        """At most `limit` tokens that may follow `text`, of which there is one at least."""
        whole = [*self._head, *text]
        own = Source(whole)
        others = [[*self._head, *other] for other in self._siblings if other is not text]
        siblings = Source([token for other in others for token in other])
        longest, source, at = SHORTEST - 1, own, 0
        for candidate in (own, siblings, *self._sources):
            for size in range(longest + 1, min(LONGEST, len(whole)) + 1):
                found = candidate.after(whole[-size:])
                if found is None:
                    break
                longest, source, at = size, candidate, found
        if not text or longest < SHORTEST:
            return []
        draft: list[int] = []
        for place in range(at, at + min(self.length, limit)):
            if place < len(source.tokens):
                draft.append(source.tokens[place])
            elif source is own:  # it repeats itself: so does the draft
                draft.append(draft[place - len(whole)])
        return draft

    def learn(self, drafted: int, accepted: int) -> None:
        """Make the next draft twice as long if all of the last one held, else a bit longer."""
        if drafted:
            self.length = 2 * drafted if accepted == drafted else accepted + 2
