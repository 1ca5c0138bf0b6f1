"""Is a model over a pool the same model? Proved on the loaded one, by running it both ways."""

from __future__ import annotations

import torch

from postil.engine import attention
from postil.engine.loading import Loaded
from postil.engine.step import Engine, Feed
from postil.kv.pool import Pool

PROBE_TOKENS = 96
FORK_AT = 40


@torch.inference_mode()
def largest_error(loaded: Loaded) -> float:
    """The largest difference of a logit, relative to the largest logit.

    A probe is prefilled in two slices while a branch that was forked from its middle runs beside
    it; both must give what one plain forward of transformers' own attention gives.
    """
    vocabulary = loaded.network.config.get_text_config().vocab_size
    probe = [(7919 * i + 11) % vocabulary for i in range(PROBE_TOKENS)]
    branch = [*probe[:FORK_AT], *probe[:20]]
    pool = Pool(loaded.layers, 2 * PROBE_TOKENS, dtype=loaded.dtype, device=loaded.device)
    engine, main = Engine(loaded, pool), pool.new(room=PROBE_TOKENS)
    (first,) = engine.step([Feed(main, probe[:60], logits=60)])
    fork = pool.fork(main, FORK_AT)
    second, beside = engine.step(
        [Feed(main, probe[60:], logits=PROBE_TOKENS - 60), Feed(fork, probe[:20], logits=20)]
    )
    errors = []
    for tokens, got in ((probe, torch.cat([first, second])), (branch, beside)):
        want = _plain_logits(loaded, tokens)[-len(got) :]
        errors.append(float((got - want).abs().max() / want.abs().max()))
    return max(errors)


def _plain_logits(loaded: Loaded, tokens: list[int]) -> torch.Tensor:
    """Logits of one uncached forward of transformers' own: (tokens, vocabulary), float32."""
    network = loaded.network
    network.set_attn_implementation("eager")
    try:
        ids = torch.tensor([tokens], device=loaded.device)
        return network(input_ids=ids, use_cache=False).logits[0].float()
    finally:
        network.set_attn_implementation(attention.NAME)
