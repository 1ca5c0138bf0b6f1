"""What goes into the next forward: decided here, from counts alone, without a model.

A forward costs a fixed part, above all the reading of the weights, and a part per token. So the
work is packed: while margins are being written, a few tokens a forward, each forward also takes the
next slice of the document, and where a segment ends its extractive prompt. The fixed part is paid
for nothing in two places alone: while the first margin is written, which should be seen early, and
after the end of the document, while the last margins are finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# A slice may be this much longer if that brings it to where it has to end: no crumbs.
STRETCH = 1.25


@dataclass(frozen=True)
class Policy:
    """How a read is scheduled. None of it changes what is read or written.

    Attributes:
        slice_tokens: the most tokens in a forward, the document's and all others; margins that
            are under way may exceed it.
        beside_first: the same while the first margin is written; none lets it appear earliest.
        beside: the same while other margins are written. Few let them appear early, many spare
            forwards.
        gather: margins are started when so many segments wait for theirs, or when the document
            has been read.
        together: the most margins that are written at once.
        draft_tokens: the most tokens that prompt lookup proposes for one text in a forward; 0
            turns drafting off.
    """

    slice_tokens: int = 512
    beside_first: int = 0
    beside: int = 256
    gather: int = 1
    together: int = 8
    draft_tokens: int = 16

    def __post_init__(self) -> None:
        if min(self.slice_tokens, self.gather, self.together) < 1:
            raise ValueError("slice_tokens, gather and together must be 1 or more")
        if min(self.beside_first, self.beside, self.draft_tokens) < 0:
            raise ValueError("beside_first, beside and draft_tokens must be 0 or more")


BALANCED = Policy()  # the first margin early, then few forwards
EAGER = Policy(beside=64)  # every margin early
BATCH = Policy(beside_first=512, beside=512, gather=8)  # the fewest forwards


@dataclass(frozen=True)
class State:
    """Where a read stands.

    Attributes:
        ahead: tokens up to where the next slice has to end; 0 when all is read that is to be.
        waiting: segments that have been read and whose margin has not been started.
        prompt_tokens: tokens that a margin takes when it is started.
        first: no margin has been written yet.
        texts: for each text that is being written the tokens that it takes in any case: the
            prompt, or the token chosen last.
        proposed: for each text how many tokens are proposed to follow.
        verdicts: tokens of each classification prompt that is due.
    """

    ahead: int
    waiting: int
    prompt_tokens: int
    first: bool
    texts: Sequence[int] = ()
    proposed: Sequence[int] = ()
    verdicts: Sequence[int] = ()


@dataclass(frozen=True)
class Batch:
    """What is packed into the next forward, besides the texts and verdicts that are under way.

    Attributes:
        start: how many of the waiting margins are started.
        drafts: for each text that is being written how many of the proposed tokens are tried.
        read: document tokens.
    """

    start: int
    drafts: tuple[int, ...]
    read: int


def plan(state: State, policy: Policy) -> Batch:
    """The next forward's batch."""
    gathered = state.waiting >= min(policy.gather, policy.together) or not state.ahead
    start = min(state.waiting, policy.together - len(state.texts)) if gathered else 0
    drafts = tuple(min(proposed, policy.draft_tokens) for proposed in state.proposed)
    if not state.texts and not start:
        most = policy.slice_tokens
    else:
        most = policy.beside_first if state.first else policy.beside
    taken = sum(state.texts) + sum(drafts) + sum(state.verdicts) + start * state.prompt_tokens
    room = max(0, most - taken)
    return Batch(start, drafts, read=state.ahead if state.ahead <= room * STRETCH else room)
