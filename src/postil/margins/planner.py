"""What goes into the next forward: decided here, from counts alone, without a model.

A forward costs a fixed part, above all the reading of the weights, and a part per token. So the
work is packed: while margins are being written, one token a forward, each forward also takes the
next slice of the document, and where a segment ends its extractive prompt. Margins of several
segments are written side by side, and a long document's are done soon after its end.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """How a read is scheduled. None of it changes what is read or written.

    Attributes:
        slice_tokens: tokens in a forward that only reads.
        beside: tokens in a forward that also writes margins; the document gets those that the
            margins leave. Fewer let margins appear earlier, more make the whole read take fewer
            forwards.
        together: the most margins that are written at once.
    """

    slice_tokens: int = 512
    beside: int = 256
    together: int = 8


@dataclass(frozen=True)
class State:
    """Where a read stands.

    Attributes:
        unread: document tokens that are not in the cache yet.
        waiting: segments that have been read and whose margin has not been started.
        writing: margins that are being written.
        under_way: tokens that these and the verdicts take in the next forward.
        prompt_tokens: tokens that a margin takes when it is started.
    """

    unread: int
    waiting: int
    writing: int
    under_way: int
    prompt_tokens: int


@dataclass(frozen=True)
class Work:
    """What the next forward takes up, besides the branches and verdicts that are under way.

    Attributes:
        start: how many of the waiting margins are started.
        read: the most document tokens.
    """

    start: int
    read: int


def plan(state: State, policy: Policy) -> Work:
    """The next forward's work."""
    start = min(state.waiting, policy.together - state.writing)
    if not state.unread:
        return Work(start, read=0)
    if not state.writing + start:
        return Work(start, read=policy.slice_tokens)
    taken = state.under_way + start * state.prompt_tokens
    return Work(start, read=max(0, policy.beside - taken))
