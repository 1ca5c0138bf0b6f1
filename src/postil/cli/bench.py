"""`postil bench`: measurements, as tables or JSON."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from postil.cli.common import (
    DeviceOption,
    DType,
    DTypeOption,
    JsonOption,
    ModelOption,
    ThreadsOption,
    load,
    size,
    stderr,
)


def margins(
    model: ModelOption = None,
    runs: Annotated[int, typer.Option(min=1, help="Take the medians of so many runs.")] = 5,
    dtype: DTypeOption = DType.AUTO,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare reading with margins to plain reading.

    A document of 8 segments of 512 tokens, one margin of 48 tokens after each; the two kinds of
    reading take turns.

    Example: `postil bench margins --runs 3 --dtype bfloat16`
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Table

    from postil.bench import margins as bench

    loaded = load(model, dtype, device, threads)
    console = stderr()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("warming up", total=None)

        def progress(done: int, total: int, label: str) -> None:
            bar.update(task, completed=done, total=total, description=label)

        result = bench.measure(loaded, runs=runs, progress=progress)
    if as_json:
        typer.echo(json.dumps(result.to_dict(), indent=2))
        return
    title = f"{result.segments} x {result.segment_tokens}, margins of {result.margin_tokens}"
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row(title, f"medians of {result.runs} runs")
    table.add_row("model", f"{result.model}, {result.dtype} on {result.device}")
    table.add_row("machine", f"{result.machine}, {result.threads} threads, torch {result.torch}")
    table.add_row("plain", f"{result.plain_s:.2f} s")
    table.add_row("with margins", f"{result.margins_s:.2f} s")
    table.add_row("ratio", f"[bold]{result.ratio:.2f}[/bold]")
    table.add_row("forwards", f"{result.forwards:,}")
    table.add_row("tokens written", f"{result.decode_tokens:,}")
    table.add_row("weights, cache", f"{size(result.weight_bytes)}, {size(result.pool_bytes)}")
    if result.peak_memory_bytes is not None:
        besides = result.peak_memory_bytes - result.weight_bytes - result.pool_bytes
        peak = f"{size(result.peak_memory_bytes)}, {size(besides)} besides weights and cache"
        table.add_row("peak memory", peak)
    Console(highlight=False).print(table)
