"""What goes into the next forward: decided here, from counts alone, without a model.

A forward costs a fixed part and a part per token, so few forwards are what makes a read fast.
Margins are therefore written together: several segments are read, then a branch is forked at the
end of each, and all branches are decoded in the same forwards. Their extractive prompts ride with
the next slice of the document. The first margin does not wait for others, so that whoever watches
sees early what kind of notes to expect.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """How a read is scheduled. None of it changes what is read or written.

    Attributes:
        slice_tokens: document tokens in one forward.
        first: segments read before the first margins are started.
        together: segments read before later margins are started, and the most branches at once.
    """

    slice_tokens: int = 512
    first: int = 1
    together: int = 8


@dataclass(frozen=True)
class State:
    """Where a read stands.

    Attributes:
        unread: document tokens that are not in the cache yet.
        waiting: segments that have been read and whose margin has not been started.
        writing: margins that are being written.
        started: margins that were started so far.
    """

    unread: int
    waiting: int
    writing: int
    started: int


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
    """The next forward's work. While margins are written the document waits."""
    if not state.unread:
        return Work(start=min(state.waiting, policy.together - state.writing), read=0)
    if state.writing:
        return Work(start=0, read=0)
    enough = policy.together if state.started else policy.first
    start = min(state.waiting, policy.together) if state.waiting >= enough else 0
    return Work(start=start, read=policy.slice_tokens)
