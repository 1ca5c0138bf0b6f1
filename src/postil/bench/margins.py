"""What margins cost: a document read plainly and with margins, by us and by others.

Everything is measured in turn, run by run, so that whatever else the machine does falls on all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch

from postil.bench.machine import machine, peak_memory, reset_peak_memory
from postil.bench.workload import QUESTION, SECOND_QUESTION, Workload
from postil.engine.sampling import Sampling
from postil.engine.step import Feed
from postil.margins.context import Context
from postil.margins.events import Done, MarginWritten, Segment, Usage
from postil.margins.planner import BALANCED, Policy, State, plan
from postil.margins.prompts import Prompts
from postil.margins.reader import Options, Reader
from postil.notebook.model import Model

US = "postil"


@dataclass(frozen=True)
class Timing:
    """Seconds of one read with margins.

    Attributes:
        margins_s: until the last margin is written (and judged, where that is done).
        first_margin_s: until the first one is.
        first_question_s, second_question_s: of two whole questions, answers of as many tokens as
            a margin; the second finds the document in the cache.
        usage: of the first question.
        peak_memory_bytes: the most resident memory of the process meanwhile, where it is known.
    """

    margins_s: float
    first_margin_s: float | None = None
    first_question_s: float | None = None
    second_question_s: float | None = None
    usage: Usage | None = None
    peak_memory_bytes: int | None = None


class System(Protocol):
    """Something that reads: Postil, or a peer."""

    name: str

    def plain(self, segments: list[list[int]]) -> float:
        """Seconds to read the segments alone."""
        ...

    def margins(self, segments: list[list[int]], margin_tokens: int) -> Timing:
        """Read the segments and write a margin after each."""
        ...


class Postil:
    """This engine, as `Notebook.ask` uses it, on tokens instead of text."""

    name = US

    def __init__(self, model: Model, policy: Policy = BALANCED) -> None:
        self._loaded = model.loaded
        self._prompts = Prompts(model.loaded.tokenizer)
        self._policy = policy

    def plain(self, segments: list[list[int]]) -> float:
        context = self._context(segments)
        Reader(context, self._prompts, QUESTION, self._options(1), self._policy)  # it reserves
        start = time.perf_counter()
        while context.ahead:
            batch = plan(State(context.ahead, 0, 0, first=False), self._policy)
            sequence, tokens, _ = context.next_slice(batch.read)
            context.engine.step([Feed(sequence, tokens, logits=0)])
        return time.perf_counter() - start

    def margins(self, segments: list[list[int]], margin_tokens: int) -> Timing:
        reset_peak_memory()
        context, options = self._context(segments), self._options(margin_tokens)
        start = time.perf_counter()
        written, usage = [], Usage()
        for event in Reader(context, self._prompts, QUESTION, options, self._policy).events():
            match event:
                case MarginWritten():
                    written.append(time.perf_counter() - start)
                case Done():
                    usage = event.answer.usage
        first_question = time.perf_counter() - start
        peak = peak_memory()
        start = time.perf_counter()
        for _ in Reader(context, self._prompts, SECOND_QUESTION, options, self._policy).events():
            pass
        return Timing(
            written[-1],
            written[0],
            first_question,
            time.perf_counter() - start,
            usage,
            peak,
        )

    def _context(self, segments: list[list[int]]) -> Context:
        places = [Segment(index, "bench", 0, 0, None, "") for index in range(len(segments))]
        return Context(self._loaded, self._prompts.opening, places, segments)

    def _options(self, tokens: int) -> Options:
        return Options("margins", tokens, tokens, Sampling(ignore_end=True))


@dataclass(frozen=True)
class Row:
    """One system on one workload: medians over the runs, and every measured time in order.

    Attributes:
        ratio: `margins_s` by `plain_s`.
        first_margin_share: when the first margin was there, as a share of `margins_s`.
        second_question_share: `second_question_s` by `first_question_s`.
    """

    who: str
    document_tokens: int
    segment_tokens: int
    margin_tokens: int
    plain_s: float
    margins_s: float
    ratio: float
    first_margin_s: float | None
    first_margin_share: float | None
    first_question_s: float | None
    second_question_s: float | None
    second_question_share: float | None
    peak_memory_bytes: int | None
    usage: dict[str, Any] | None
    every: dict[str, list[float]]


@dataclass(frozen=True)
class Result:
    """All rows of one sitting, and what they were measured on."""

    model: str
    dtype: str
    quantize: str | None
    device: str
    threads: int
    machine: str
    torch: str
    date: str
    runs: int
    policy: dict[str, Any]
    weight_bytes: int
    cache_bytes_per_token: int
    rows: list[Row] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    model: Model,
    workloads: Sequence[Workload] = (Workload(),),
    *,
    peers: Sequence[System] = (),
    runs: int = 5,
    policy: Policy = BALANCED,
    text: str | None = None,
    progress: Callable[[int, int, str], None] = lambda done, total, label: None,
) -> Result:
    """Read every workload plainly and with margins, each system in turn, `runs` times.

    Args:
        peers: who else reads.
        text: what documents are taken from, instead of prose of no meaning.
        progress: called with reads done, reads in all, and what comes next.

    Raises:
        ValueError: the text is too short.
        BackendError: a peer does not answer.
    """
    systems: list[System] = [Postil(model, policy), *peers]
    prompts = Prompts(model.loaded.tokenizer)
    result = Result(
        model=model.name,
        dtype=model.dtype,
        quantize=model.loaded.quantize,
        device=model.device,
        threads=torch.get_num_threads(),
        machine=machine(),
        torch=torch.__version__,
        date=time.strftime("%Y-%m-%d"),
        runs=runs,
        policy=asdict(policy),
        weight_bytes=model.loaded.weight_bytes,
        cache_bytes_per_token=model.loaded.cache_bytes_per_token,
    )
    total, done = len(workloads) * runs * len(systems) * 2, 0
    reads = 2 * runs * len(systems)
    for workload in workloads:  # a text that is too short is found before anything is measured
        workload.segments(prompts, reads, text)
    for system in systems:
        progress(done, total, f"{system.name} warms up")
        warm = Workload(512, 256, 4).segments(prompts, 0, text)
        system.plain(warm)
        system.margins(warm, 4)
    for workload in workloads:
        plain: dict[str, list[float]] = {system.name: [] for system in systems}
        timings: dict[str, list[Timing]] = {system.name: [] for system in systems}
        seed = 1
        for _ in range(runs):
            for system in systems:
                progress(done, total, f"{workload}: {system.name}, plain")
                plain[system.name].append(system.plain(workload.segments(prompts, seed, text)))
                progress(done + 1, total, f"{workload}: {system.name}, margins")
                segments = workload.segments(prompts, seed + 1, text)
                timings[system.name].append(system.margins(segments, workload.margin_tokens))
                done, seed = done + 2, seed + 2
        result.rows.extend(
            _row(workload, system.name, plain[system.name], timings[system.name])
            for system in systems
        )
    progress(total, total, "done")
    return result


def _row(workload: Workload, who: str, plain: list[float], timings: list[Timing]) -> Row:
    every = {"plain_s": plain}
    for kind in ("margins_s", "first_margin_s", "first_question_s", "second_question_s"):
        seconds = [getattr(timing, kind) for timing in timings]
        if None not in seconds:
            every[kind] = seconds
    median = {kind: statistics.median(seconds) for kind, seconds in every.items()}

    def share(part: str, whole: str) -> float | None:
        return median[part] / median[whole] if part in median else None

    usage = timings[-1].usage
    return Row(
        who=who,
        **asdict(workload),
        plain_s=median["plain_s"],
        margins_s=median["margins_s"],
        ratio=median["margins_s"] / median["plain_s"],
        first_margin_s=median.get("first_margin_s"),
        first_margin_share=share("first_margin_s", "margins_s"),
        first_question_s=median.get("first_question_s"),
        second_question_s=median.get("second_question_s"),
        second_question_share=share("second_question_s", "first_question_s"),
        peak_memory_bytes=max((t.peak_memory_bytes or 0 for t in timings), default=0) or None,
        usage=usage.to_dict() if usage else None,
        every=every,
    )
