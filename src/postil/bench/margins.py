"""What margins cost: the "8 x 512" workload, read plainly and with margins.

A document of 8 segments of 512 tokens is read with one margin of 48 tokens after each (end of text
ignored, greedy), verdicts included; against it, the same engine only reads the document. The two
take turns, so that whatever else the machine does falls on both.
"""

from __future__ import annotations

import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from postil.engine.loading import Loaded
from postil.engine.sampling import Sampling
from postil.margins.context import Context
from postil.margins.events import Done, MarginWritten, Progress, Segment, Usage
from postil.margins.prompts import Prompts
from postil.margins.reader import Options, Reader
from postil.notebook.model import Model

QUESTION = "Where is Sandra?"
_PEOPLE = ("Sandra", "Mary", "Daniel", "John", "the gardener", "my aunt", "the doctor", "nobody")
_VERBS = ("walked to", "came back from", "left", "was seen in", "slept in", "asked about", "swept")
_PLACES = ("the kitchen", "the garden", "the office", "the hallway", "the attic", "the old mill")
_ENDS = (
    "before the rain began",
    "with a lamp in one hand",
    "and nobody knew why",
    "as on every other day",
    "while the others were still at table",
    "and closed the door without a word",
)


@dataclass(frozen=True)
class Result:
    """Medians over the runs.

    Attributes:
        plain_s: seconds to read the document.
        margins_s: seconds to read it and write and judge every margin.
        ratio: the second by the first, of the medians.
        forwards: packed forwards of one read with margins.
        decode_tokens: tokens written in it.
        usage: of the last read with margins.
        weight_bytes, pool_bytes: of the model and of the cache.
        peak_memory_bytes: the most resident memory of the process in a read with margins, `None`
            where the system does not tell.
        every: all measured seconds, in order.
    """

    model: str
    dtype: str
    device: str
    threads: int
    machine: str
    torch: str
    runs: int
    segments: int
    segment_tokens: int
    margin_tokens: int
    plain_s: float
    margins_s: float
    ratio: float
    forwards: int
    decode_tokens: int
    usage: dict[str, Any]
    weight_bytes: int
    pool_bytes: int
    peak_memory_bytes: int | None
    every: dict[str, list[float]]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    model: Model,
    *,
    runs: int = 5,
    segments: int = 8,
    segment_tokens: int = 512,
    margin_tokens: int = 48,
    progress: Callable[[int, int, str], None] = lambda done, total, label: None,
) -> Result:
    """Read plainly and with margins in turn, `runs` times each, after one read to warm up.

    Args:
        progress: called with reads done, reads in all, and what comes next.
    """
    loaded, prompts = model.loaded, Prompts(model.loaded.tokenizer)
    tokens = _document(prompts, segments * segment_tokens)
    pieces = [tokens[at : at + segment_tokens] for at in range(0, len(tokens), segment_tokens)]
    total = 2 * runs + 1
    progress(0, total, "warming up")
    _read(loaded, prompts, pieces[:1], "margins", 4)
    every: dict[str, list[float]] = {"plain_s": [], "margins_s": []}
    peaks: list[int | None] = []
    for run in range(runs):
        progress(1 + 2 * run, total, "plain")
        every["plain_s"].append(_read(loaded, prompts, pieces, "plain", margin_tokens)[0])
        progress(2 + 2 * run, total, "margins")
        _reset_peak_memory()
        seconds, usage = _read(loaded, prompts, pieces, "margins", margin_tokens)
        every["margins_s"].append(seconds)
        peaks.append(_peak_memory())
    progress(total, total, "done")
    plain, margins = (statistics.median(every[kind]) for kind in ("plain_s", "margins_s"))
    return Result(
        model=model.name,
        dtype=model.dtype,
        device=model.device,
        threads=torch.get_num_threads(),
        machine=f"{_processor()}, {psutil.cpu_count(logical=True)} cores",
        torch=torch.__version__,
        runs=runs,
        segments=segments,
        segment_tokens=segment_tokens,
        margin_tokens=margin_tokens,
        plain_s=plain,
        margins_s=margins,
        ratio=margins / plain,
        forwards=usage.forwards,
        decode_tokens=usage.generated_tokens,
        usage=usage.to_dict(),
        weight_bytes=loaded.weight_bytes,
        pool_bytes=usage.pool_bytes,
        peak_memory_bytes=max((peak for peak in peaks if peak), default=None),
        every=every,
    )


def _read(
    loaded: Loaded, prompts: Prompts, pieces: list[list[int]], strategy: str, margin_tokens: int
) -> tuple[float, Usage]:
    """Seconds until the document is read or its last margin judged, and what was used."""
    segments = [Segment(index, "bench", 0, 0, None, "") for index in range(len(pieces))]
    context = Context(loaded, prompts.opening, segments, pieces)
    options = Options(strategy, margin_tokens, 1, Sampling(ignore_end=True))
    start, written, seconds = time.perf_counter(), 0, 0.0
    reader = Reader(context, prompts, QUESTION, options)
    for event in reader.events():
        match event:
            case MarginWritten():
                written += 1
                ended = written == len(pieces)
            case Progress():
                ended = strategy == "plain" and event.tokens == event.total
            case Done():
                return seconds, event.answer.usage
            case _:
                ended = False
        if ended:
            seconds = time.perf_counter() - start
            reader.cancel()
    raise AssertionError("a read ends with Done")


def _document(prompts: Prompts, count: int) -> list[int]:
    """Prose in which somebody is always going somewhere; the same on every machine."""
    source, text = random.Random(0), ""
    while True:
        for _ in range(count):
            words = (source.choice(part) for part in (_PEOPLE, _VERBS, _PLACES, _ENDS))
            sentence = " ".join(words)
            text += sentence[0].upper() + sentence[1:] + ". "
        if len(tokens := prompts.encode(text)) >= count:
            return tokens[:count]


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _reset_peak_memory() -> None:
    """Linux forgets the peak of a process when 5 is written here (man 5 proc)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_memory() -> int | None:
    """Bytes; of the process since the last reset, or of its whole life where there is none."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    with suppress(ImportError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return None
