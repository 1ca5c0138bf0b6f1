"""Is a margin relevant? The model's own verdict, from one forward and without writing a word."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def relevance(logits: torch.Tensor, yes: Sequence[int], no: Sequence[int]) -> float:
    """P(YES) / (P(YES) + P(NO)) at the first position of the reply, in 0..1.

    Args:
        logits: (vocabulary,) float32, after the classification prompt.
        yes: first tokens of one verdict, in its spellings.
        no: likewise. A token that begins both says nothing and is left out.
    """
    both = set(yes) & set(no)
    score = torch.stack(
        [logits[[t for t in side if t not in both]].logsumexp(0) for side in (yes, no)]
    )
    return float(score.softmax(0)[0])
