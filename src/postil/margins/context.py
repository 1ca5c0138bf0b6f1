"""What a notebook has read: the document's tokens, window by window, in one pool of cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import psutil

from postil.engine.drafting import Source
from postil.engine.loading import Loaded
from postil.engine.step import Engine
from postil.errors import ContextOverflow
from postil.kv.pool import Pool
from postil.margins.events import Segment

# Kept free at the end of each window of a long document, for questions that are asked later.
RESERVE_TOKENS = 1024


@dataclass(eq=False)
class Window:
    """One root sequence: the opening, then as many segments as fit the model's window.

    Attributes:
        segments: indices of its segments.
        tokens: the opening's and the segments'; the sequence holds the first of them.
        ends: for each segment the length of the sequence at its end.
    """

    segments: range
    tokens: list[int]
    ends: list[int]
    sequence: int = 0

    @cached_property
    def source(self) -> Source:
        """Its tokens, to be looked up; a window no longer changes once it has been cut."""
        return Source(self.tokens)


class Context:
    """A document in a pool. It outlives questions: what has been read is never read again.

    How many tokens have been read is not kept here: it is the length of the windows' sequences.

    Args:
        loaded: the model.
        opening: tokens before the first segment of each window.
        segments: of all documents, in order.
        segment_tokens: the token ids of each.

    Attributes:
        total: tokens of the document.
        windows: none until the first question has been planned for.
    """

    def __init__(
        self,
        loaded: Loaded,
        opening: Sequence[int],
        segments: Sequence[Segment],
        segment_tokens: Sequence[Sequence[int]],
    ) -> None:
        self.loaded = loaded
        self.segments = list(segments)
        self.total = sum(map(len, segment_tokens))
        self.windows: list[Window] = []
        self._opening = list(opening)
        self._segment_tokens = segment_tokens
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "reserve() comes first"
        return self._engine

    @property
    def pool(self) -> Pool:
        return self.engine.pool

    def reserve(
        self, *, after_segment: int, after_document: int, scratch: int, whole: bool = False
    ) -> None:
        """Make sure that a question can be answered; the first one also fixes the windows.

        Args:
            after_segment: tokens that must fit a window behind any segment.
            after_document: tokens that should fit behind the whole document. If they do not, the
                document is read in several windows.
            scratch: cells for branches.
            whole: the document has to stand in one window.

        Raises:
            ContextOverflow: something does not fit the window or the machine. Nothing changed.
        """
        windows = self.windows or self._cut(after_segment, after_document)
        behind = self.loaded.window - max(len(window.tokens) for window in windows)
        if whole and (len(windows) > 1 or behind < after_document):
            raise ContextOverflow(
                f"The document has {self.total:,} tokens and does not fit the model's window of "
                f"{self.loaded.window:,} together with the question and the answer: use the "
                "strategy margins, which reads it window by window."
            )
        if after_segment > behind:
            raise ContextOverflow(
                f"The question's prompt and a margin need {after_segment:,} tokens, but only "
                f"{behind:,} fit behind the document: ask a shorter question, or open the document "
                "again and ask the long question first."
            )
        if self._engine is not None:
            self.make_room(scratch)
            return
        capacity = scratch + sum(len(window.tokens) for window in windows)
        self._check_memory(capacity)
        pool = Pool(
            self.loaded.layers,
            capacity,
            boundary=scratch,
            dtype=self.loaded.dtype,
            device=self.loaded.device,
        )
        for window in windows:
            window.sequence = pool.new(room=len(window.tokens))
        self._engine = Engine(self.loaded, pool)
        self.windows = windows

    def make_room(self, cells: int) -> None:
        """Grow the pool if fewer cells are free.

        Only a later question that may write more needs it, or a text that has more tokens when it
        is read than it had when it was written.

        Raises:
            ContextOverflow: they do not fit the memory.
        """
        if (missing := cells - self.pool.free) > 0:
            self._check_memory(missing)
            self.pool.grow(missing)

    def _cut(self, after_segment: int, after_document: int) -> list[Window]:
        """As few windows as hold the document and what must stand behind it."""
        if len(self._opening) + self.total + after_document <= self.loaded.window:
            most = self.loaded.window
        else:
            spare = max(after_segment, min(RESERVE_TOKENS, self.loaded.window // 4))
            most = self.loaded.window - spare
        longest = max(map(len, self._segment_tokens))
        if len(self._opening) + longest > most:
            raise ContextOverflow(
                f"The question's prompt and a margin ({after_segment:,} tokens) do not fit the "
                f"model's window of {self.loaded.window:,} behind a segment of {longest:,}: ask a "
                "shorter question, or choose shorter margins or segments."
            )
        windows: list[Window] = []
        for index, tokens in enumerate(self._segment_tokens):
            if not windows or len(windows[-1].tokens) + len(tokens) > most:
                windows.append(Window(range(index, index), list(self._opening), []))
            window = windows[-1]
            window.tokens += tokens
            window.ends.append(len(window.tokens))
            window.segments = range(window.segments.start, index + 1)
        return windows

    def _check_memory(self, cells: int) -> None:
        needed = cells * self.loaded.cache_bytes_per_token
        if self.loaded.device.type != "cpu":
            return  # torch says itself when a device is full
        available = psutil.virtual_memory().available
        if needed > available:
            raise ContextOverflow(
                f"The cache of this document takes {needed / 1e9:.1f} GB and "
                f"{available / 1e9:.1f} GB of memory are free: choose --dtype bfloat16 or a "
                "smaller model, or ask about a part of the document."
            )

    # Where the read stands

    @property
    def read(self) -> int:
        """Document tokens in the cache."""
        lengths = (self.pool.length(window.sequence) for window in self.windows)
        return sum(max(0, length - len(self._opening)) for length in lengths)

    @property
    def windows_read(self) -> int:
        """Windows of which something is in the cache."""
        return sum(self.pool.length(window.sequence) > 0 for window in self.windows)

    def segments_read(self, *, partly: bool = False) -> int:
        """How many segments are in the cache, whole (or at least in part)."""
        count = 0
        for window in self.windows:
            length = self.pool.length(window.sequence)
            if partly:
                starts = [len(self._opening), *window.ends[:-1]]
                count += sum(start < length for start in starts)
            else:
                count += sum(end <= length for end in window.ends)
        return count

    def boundary(self, index: int) -> tuple[int, int]:
        """Where a segment ends: the sequence of its window, and the length there."""
        window = next(window for window in self.windows if index in window.segments)
        return window.sequence, window.ends[index - window.segments.start]

    @property
    def ahead(self) -> int:
        """Tokens up to where the next slice has to end, 0 when everything has been read.

        That is the end of a window, and of the first segment, whose margin is waited for.
        """
        for window in self.windows:
            at = self.pool.length(window.sequence)
            ends = (
                [*window.ends[:1], len(window.tokens)]
                if window is self.windows[0]
                else [len(window.tokens)]
            )
            if at < len(window.tokens):
                return next(end for end in ends if at < end) - at
        return 0

    def next_slice(self, count: int) -> tuple[int, list[int], int]:
        """What is read next: the sequence, `count` tokens for it, how many are document.

        Args:
            count: at most `ahead`.
        """
        window = next(w for w in self.windows if self.pool.length(w.sequence) < len(w.tokens))
        at = self.pool.length(window.sequence)
        still_opening = max(0, len(self._opening) - at)
        return window.sequence, window.tokens[at : at + count], max(0, count - still_opening)

    def segment_source(self, index: int) -> Source:
        """A segment's tokens, where a draft of its margin is looked up first."""
        return Source(self._segment_tokens[index])

    def window_source(self, sequence: int) -> Source:
        """The tokens of the window that a sequence holds."""
        return next(window.source for window in self.windows if window.sequence == sequence)
