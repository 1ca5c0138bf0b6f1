"""Cuts documents into segments at paragraph or sentence ends, by the model's own tokenizer."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from semantic_text_splitter import TextSplitter

from postil.documents import Document
from postil.margins.events import Segment

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

Count = Callable[[str], int]


def default_segment_tokens(document_tokens: int, window: int) -> int:
    """How many tokens a segment has where the user does not say.

    4,096, but at most a quarter of the model's `window` (tokens), so that margins and answer
    have room beside it, and at most an eighth of the document, so that a short one still gets
    several margins; never under 512 for the document's sake, nor under 16 at all.
    """
    return max(16, min(4096, window // 4, max(512, math.ceil(document_tokens / 8))))


def split(
    documents: Sequence[Document],
    tokenizer: PreTrainedTokenizerBase | Count,
    segment_tokens: int,
) -> list[Segment]:
    """The segments of all documents, in order; `index` counts on from one document to the next.

    The texts of a document's segments, joined, are its text: blanks stay, at the end of the
    segment that they follow. A segment consists of blanks alone only where a document has more
    of them in a row than fit one segment.

    Args:
        documents: what to cut. No segment spans two documents.
        tokenizer: the model's own, or a function that counts the tokens of a text. With a
            tokenizer written in Rust, 1 MB of English takes 2 s; otherwise some ten times the
            time that the text takes to tokenize.
        segment_tokens: the most tokens of a segment that is tokenized by itself, without special
            tokens. Only a single character that has more than that goes beyond.

    Raises:
        ValueError: `segment_tokens` is less than 1.
    """
    if segment_tokens < 1:
        raise ValueError(f"segment_tokens is {segment_tokens}: give 1 or more.")
    counter = _counter(tokenizer)
    segments: list[Segment] = []
    for document in documents:
        start = 0
        for text in _merge(_cut(document.text, counter, segment_tokens), counter, segment_tokens):
            segments.append(
                Segment(
                    index=len(segments),
                    source=document.source,
                    start=start,
                    end=start + len(text),
                    page=document.page_at(start),
                    text=text,
                )
            )
            start += len(text)
    return segments


class _Counter:
    """Counts the tokens of texts with any function that can."""

    def __init__(self, count: Count) -> None:
        self.count = count

    def for_parts_of(self, text: str) -> Count:
        """A function that counts the tokens of pieces of `text`, perhaps one or two off."""
        return self.count


class _RustCounter(_Counter):
    """Counts with a tokenizer that tells where in the text each token starts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids))
        self.tokenizer = tokenizer

    def for_parts_of(self, text: str) -> Count:
        # The splitter asks for the length of about ten pieces for each that it keeps. Tokenizing
        # every one takes 13 s for 1 MB, looking up in the tokens of the whole text 0.2 s
        # (SmolLM2, 512 tokens a segment, 2 cores). The splitter goes forward, so a piece is
        # found at once when the search begins at the last one.
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        starts = [start for start, _ in encoding.offsets]
        last = 0

        def count(piece: str) -> int:
            nonlocal last
            at = text.find(piece, last)
            if at < 0:
                return self.count(piece)
            last = at
            return bisect_left(starts, at + len(piece)) - bisect_left(starts, at)

        return count


def _counter(tokenizer: PreTrainedTokenizerBase | Count) -> _Counter:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        if backend.truncation is not None or backend.padding is not None:
            # The tokenizer is the caller's: take a copy and leave its settings alone.
            backend = type(backend).from_str(backend.to_str())
            backend.no_truncation()
            backend.no_padding()
        return _RustCounter(backend)
    encode = getattr(tokenizer, "encode", None)
    if encode is not None:
        return _Counter(lambda text: len(encode(text, add_special_tokens=False)))
    return _Counter(tokenizer)


def _cut(
    text: str, counter: _Counter, limit: int, capacity: int | None = None
) -> Iterator[tuple[str, int]]:
    """The pieces of `text` and how many tokens each has, at most `limit`.

    The splitter is told `capacity`: it counts neither the blanks after a piece nor, where the
    counts come from the whole text, the tokens that come about by cutting. A piece that turns
    out too long is cut again, shorter by its excess.
    """
    capacity = limit if capacity is None else capacity
    splitter = TextSplitter.from_callback(counter.for_parts_of(text), capacity)
    starts = [start for start, _ in splitter.chunk_indices(text)]
    for start, end in pairwise([0, *starts[1:], len(text)]):
        piece = text[start:end]
        tokens = counter.count(piece)
        excess = tokens - limit
        if excess <= 0:
            if piece:
                yield piece, tokens
        elif excess < capacity:
            yield from _cut(piece, counter, limit, capacity - excess)
        else:  # more blanks in a row than fit one segment: nowhere to cut but between them
            untrimmed = TextSplitter.from_callback(counter.count, limit, trim=False)
            yield from ((part, counter.count(part)) for part in untrimmed.chunks(piece))


def _merge(pieces: Iterator[tuple[str, int]], counter: _Counter, limit: int) -> Iterator[str]:
    """Joins neighbours that fit one segment.

    The splitter keeps a heading between wide gaps to itself. As a segment of its own it would
    cost a margin that has nothing to say.
    """
    group: list[str] = []
    group_tokens = 0
    for piece, tokens in pieces:
        if group and group_tokens + tokens > limit:
            yield from _joined(group, counter, limit)
            group, group_tokens = [], 0
        group.append(piece)
        group_tokens += tokens
    yield from _joined(group, counter, limit)


def _joined(group: list[str], counter: _Counter, limit: int) -> Iterator[str]:
    text = "".join(group)
    # Two texts may have fewer tokens than the two joined.
    if len(group) < 2 or counter.count(text) <= limit:
        yield from [text] if group else []
    else:
        yield from group
