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
    from transformers import PreTrainedTokenizerBase

Count = Callable[[str], int]

STRETCH = 64  # characters for each token of a segment: with English, 16 segments at a time


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
    count_in = _counting(tokenizer)
    segments: list[Segment] = []
    for document in documents:
        start = 0
        for text in _merge(_cut(document.text, count_in, segment_tokens), count_in, segment_tokens):
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


def _counting(tokenizer: PreTrainedTokenizerBase | Count) -> Callable[[str], Count]:
    """A function that makes of a text one that counts the tokens of pieces of that text.

    The text as a whole is counted exactly, its pieces perhaps one or two tokens off.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        encode = getattr(tokenizer, "encode", None)
        count = tokenizer if encode is None else lambda t: len(encode(t, add_special_tokens=False))
        return lambda text: count
    if backend.truncation is not None or backend.padding is not None:
        # The tokenizer is the caller's: take a copy and leave its settings alone.
        backend = type(backend).from_str(backend.to_str())
        backend.no_truncation()
        backend.no_padding()

    # The splitter asks for the length of about ten pieces for each that it keeps. Tokenizing
    # every one takes 13 s for 1 MB, looking up in the tokens of the whole text 0.2 s
    # (SmolLM2, 512 tokens a segment, 2 cores).
    def count_in(text: str) -> Count:
        encoding = backend.encode(text, add_special_tokens=False)
        starts = [start for start, _ in encoding.offsets]
        last = 0

        def count(piece: str) -> int:
            nonlocal last
            if piece == text:
                return len(starts)
            # The splitter goes forward, so a piece is found at once from where the last one was.
            at = text.find(piece, last)
            if at < 0:
                return len(backend.encode(piece, add_special_tokens=False).ids)
            last = at
            return bisect_left(starts, at + len(piece)) - bisect_left(starts, at)

        return count

    return count_in


def _cut(
    text: str, count_in: Callable[[str], Count], limit: int, capacity: int | None = None
) -> Iterator[tuple[str, int]]:
    """The pieces of `text` and how many tokens each has, at most `limit`.

    The splitter is told `capacity`: it counts neither the blanks after a piece nor, where the
    counts come from the whole text, the tokens that come about by cutting. A piece that turns
    out too long is cut again, shorter by its excess.
    """
    capacity = limit if capacity is None else capacity

    def count(whole: str) -> int:
        return count_in(whole)(whole)

    start = 0
    while start < len(text):
        # The splitter takes time by the square of what it cannot tell apart, such as 1 MB without
        # a blank. So it gets a stretch at a time, and of all but the last one the last piece,
        # which does not end by its choice, again with the next.
        stretch = text[start : start + STRETCH * limit]
        splitter = TextSplitter.from_callback(count_in(stretch), capacity)
        starts = [0, *[at for at, _ in splitter.chunk_indices(stretch)][1:]]
        if start + len(stretch) == len(text) or len(starts) == 1:
            starts.append(len(stretch))
        start += starts[-1]
        for piece in (stretch[at:end] for at, end in pairwise(starts)):
            tokens = count(piece)
            excess = tokens - limit
            if excess <= 0:
                yield piece, tokens
            elif excess < capacity:
                yield from _cut(piece, count_in, limit, capacity - excess)
            else:  # more blanks in a row than fit one segment: nowhere to cut but between them
                untrimmed = TextSplitter.from_callback(count, limit, trim=False)
                yield from ((part, count(part)) for part in untrimmed.chunks(piece))


def _merge(
    pieces: Iterator[tuple[str, int]], count_in: Callable[[str], Count], limit: int
) -> Iterator[str]:
    """Joins neighbours that fit one segment.

    The splitter keeps a heading between wide gaps to itself. As a segment of its own it would
    cost a margin that has nothing to say.
    """
    group: list[str] = []
    group_tokens = 0
    for piece, tokens in pieces:
        if group and group_tokens + tokens > limit:
            yield from _joined(group, count_in, limit)
            group, group_tokens = [], 0
        group.append(piece)
        group_tokens += tokens
    yield from _joined(group, count_in, limit)


def _joined(group: list[str], count_in: Callable[[str], Count], limit: int) -> Iterator[str]:
    text = "".join(group)
    # Two texts may have fewer tokens than the two joined.
    if len(group) < 2 or count_in(text)(text) <= limit:
        yield from [text] if group else []
    else:
        yield from group
