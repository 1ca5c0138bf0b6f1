"""What a file becomes once it has been read."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Document:
    """The text of one document.

    Attributes:
        source: the file as the user named it, or `"text"` or `"stdin"`.
        text: the whole text; lines end in `\\n`.
        page_starts: for each page the character offset into `text` at which it starts; a page
            without text starts where the next one does. Empty where the format has no pages.
    """

    source: str
    text: str = field(repr=False)
    page_starts: tuple[int, ...] = field(default=(), repr=False)

    def page_at(self, offset: int) -> int | None:
        """The page, counted from 1, on which the character at `offset` stands."""
        if not self.page_starts:
            return None
        return max(1, bisect_right(self.page_starts, offset))
