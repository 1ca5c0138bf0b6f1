"""Tokens a second of one sequence that is decoded behind a long document."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from postil.bench.machine import machine
from postil.bench.peers import Transformers
from postil.bench.workload import Workload
from postil.engine.drafting import Lookup, Source
from postil.engine.sampling import Generation, Sampling
from postil.engine.step import Engine, Feed
from postil.kv.pool import Pool
from postil.margins.planner import BALANCED
from postil.margins.prompts import Prompts
from postil.notebook.model import Model


@dataclass(frozen=True)
class Decoding:
    """Tokens a second, medians over the runs, and every run's in order.

    Attributes:
        generate: transformers' `generate` over a `DynamicCache`.
        plain: this engine, one token a forward.
        drafted: this engine with prompt lookup.
    """

    model: str
    dtype: str
    quantize: str | None
    machine: str
    threads: int
    torch: str
    date: str
    runs: int
    cached_tokens: int
    new_tokens: int
    generate: float
    plain: float
    drafted: float
    every: dict[str, list[float]]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    model: Model,
    peer: Transformers,
    *,
    cached_tokens: int = 4096,
    new_tokens: int = 64,
    runs: int = 5,
    progress: Callable[[int, int, str], None] = lambda done, total, label: None,
) -> Decoding:
    """Write `new_tokens` behind `cached_tokens` in turn: `generate`, ours, ours with drafts.

    Args:
        peer: the same model as transformers runs it.
        progress: called with texts written, texts in all, and who writes next.
    """
    prompts = Prompts(model.loaded.tokenizer)
    workload = Workload(cached_tokens, cached_tokens, new_tokens)
    every: dict[str, list[float]] = {"generate": [], "plain": [], "drafted": []}
    for run in range(runs):
        (document,) = workload.segments(prompts, run)
        prompt = [*document, *prompts.extract("Where is Sandra?")][-cached_tokens:]
        progress(3 * run, 3 * runs, "generate")
        every["generate"].append(new_tokens / peer.decode(prompt, new_tokens))
        for at, (kind, most) in enumerate((("plain", 0), ("drafted", BALANCED.draft_tokens))):
            progress(3 * run + 1 + at, 3 * runs, kind)
            every[kind].append(new_tokens / _ours(model, prompt, new_tokens, most))
    progress(3 * runs, 3 * runs, "done")
    return Decoding(
        model=model.name,
        dtype=model.dtype,
        quantize=model.loaded.quantize,
        machine=machine(),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        date=time.strftime("%Y-%m-%d"),
        runs=runs,
        cached_tokens=len(prompt),
        new_tokens=new_tokens,
        **{kind: statistics.median(rates) for kind, rates in every.items()},
        every=every,
    )


def _ours(model: Model, prompt: list[int], tokens: int, most: int) -> float:
    """Seconds for so many tokens, with drafts of at most `most`, behind a prompt that is read."""
    loaded = model.loaded
    room = len(prompt) + tokens
    engine = Engine(loaded, Pool(loaded.layers, room, dtype=loaded.dtype, device=loaded.device))
    sequence = engine.pool.new(room=room)
    for at in range(0, len(prompt) - 1, 512):
        engine.step([Feed(sequence, prompt[at : min(at + 512, len(prompt) - 1)], logits=0)])
    how = Sampling(ignore_end=True)
    generation = Generation(loaded.tokenizer, how, loaded.stop_tokens, tokens)
    lookup = Lookup(prompt, [Source(prompt)])
    start, feed = time.perf_counter(), prompt[-1:]
    while generation.finish_reason is None:
        left = min(generation.left - 1, most)
        draft = lookup.propose(generation.tokens, left) if left > 0 else []
        (rows,) = engine.step([Feed(sequence, [*feed, *draft], logits=1 + len(draft))])
        accepted = len(list(generation.follow(rows, draft))) - 1
        lookup.learn(len(draft), accepted)
        length = engine.pool.length(sequence)
        engine.pool.truncate(sequence, length - (len(draft) - accepted))
        feed = generation.tokens[-1:]
    return time.perf_counter() - start
