"""`postil bench`: measurements, as tables, JSON and pictures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from postil.cli.common import (
    BatchOption,
    DeviceOption,
    DType,
    DTypeOption,
    EagerOption,
    JsonOption,
    ModelOption,
    QuantizeOption,
    ThreadsOption,
    load,
    policy,
    size,
    stderr,
)

if TYPE_CHECKING:
    from postil.bench.decode import Decoding
    from postil.bench.margins import Result
    from postil.engine.loading import Loaded

RunsOption = Annotated[int, typer.Option(min=1, help="Take the medians of so many runs.")]


def margins(
    model: ModelOption = None,
    runs: RunsOption = 5,
    document_tokens: Annotated[
        int, typer.Option(min=1, help="Read so many tokens, a whole number of segments.")
    ] = 4096,
    segment_tokens: Annotated[int, typer.Option(min=1, help="Cut them into such segments.")] = 512,
    margin_tokens: Annotated[int, typer.Option(min=1, help="Write such margins.")] = 48,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="Read the beginning of this text instead of prose of no meaning.",
        ),
    ] = None,
    sweep: Annotated[
        bool,
        typer.Option(
            "--sweep",
            help="Also documents of 2k to 32k tokens, segments of 1,024 and 2,048, and margins of "
            "16 and 96. Takes long.",
        ),
    ] = False,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PEER",
            help="Also time transformers, or a server of the same model by its address "
            "(http://127.0.0.1:8000/v1); may be repeated.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            file_okay=False,
            help="Write margins.json and margins.png into this folder.",
        ),
    ] = None,
    eager: EagerOption = False,
    batch: BatchOption = False,
    dtype: DTypeOption = DType.AUTO,
    quantize: QuantizeOption = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare reading with margins to plain reading, and to what others take.

    Each system reads the same documents, plainly and with margins, in turns: ratios of one sitting
    can be compared, seconds of different days cannot.

    Example: `postil bench margins --runs 3 --compare transformers --output results`
    """
    from postil.bench import margins as bench
    from postil.bench.peers import peers
    from postil.bench.workload import Workload
    from postil.documents import read_document

    chosen = policy(eager, batch)
    if output is not None:
        _check_plots(output)
    try:
        workloads = [Workload(document_tokens, segment_tokens, margin_tokens)]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if sweep:
        wanted = [Workload(tokens, 512, 48) for tokens in (2048, 4096, 8192, 16384, 32768)]
        wanted += [Workload(8192, 1024, 48), Workload(8192, 2048, 48)]
        wanted += [Workload(4096, 512, 16), Workload(4096, 512, 96)]
        workloads += [workload for workload in wanted if workload not in workloads]
    words = None if text is None else read_document(text).text

    def load_plain() -> Loaded:
        from postil.engine import loading

        return loading.load(model, dtype=dtype.value, device=device, pack=False)

    try:
        others = peers(compare or (), load_plain)
        loaded = load(model, dtype, device, threads, quantize)
        with _progress() as progress:
            result = bench.measure(
                loaded,
                workloads,
                peers=others,
                runs=runs,
                policy=chosen,
                text=words,
                progress=progress,
            )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if output is not None:
        from postil.bench.plots import plot

        output.mkdir(parents=True, exist_ok=True)
        (output / "margins.json").write_text(json.dumps(result.to_dict(), indent=1) + "\n")
        plot(result, output / "margins.png")
    if as_json:
        typer.echo(json.dumps(result.to_dict(), indent=2))
    else:
        _print_margins(result)


def decode(
    model: ModelOption = None,
    runs: RunsOption = 5,
    cached_tokens: Annotated[
        int, typer.Option(min=64, help="Write behind so many tokens that have been read.")
    ] = 4096,
    new_tokens: Annotated[int, typer.Option(min=2, help="Write so many tokens.")] = 64,
    dtype: DTypeOption = DType.AUTO,
    quantize: QuantizeOption = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare the decoding of one sequence with transformers' `generate`.

    Example: `postil bench decode --cached-tokens 8000`
    """
    from rich.console import Console
    from rich.table import Table

    from postil.bench import decode as bench
    from postil.bench.peers import Transformers
    from postil.engine import loading

    loaded = load(model, dtype, device, threads, quantize)
    peer = Transformers(loading.load(model, dtype=dtype.value, device=device, pack=False))
    with _progress() as progress:
        result = bench.measure(
            loaded,
            peer,
            cached_tokens=cached_tokens,
            new_tokens=new_tokens,
            runs=runs,
            progress=progress,
        )
    if as_json:
        typer.echo(json.dumps(result.to_dict(), indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for column in ("", "tokens/s", "by generate"):
        table.add_column(column, justify="left" if not column else "right")
    for who, rate in (
        ("transformers, generate", result.generate),
        ("postil, a token a forward", result.plain),
        ("postil, with prompt lookup", result.drafted),
    ):
        table.add_row(who, f"{rate:.1f}", f"{rate / result.generate:.2f}")
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{result.new_tokens} tokens behind {result.cached_tokens:,}, medians of {result.runs} runs"
    )
    console.print(f"{result.model}, {_numbers(result)}; {result.machine}, {result.threads} threads")
    console.print(table)


@contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """A bar on standard error, if that is a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = stderr()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("starting", total=None)

        def progress(done: int, total: int, label: str) -> None:
            bar.update(task, completed=done, total=total, description=label)

        yield progress


def _check_plots(output: Path) -> None:
    """Before minutes of measuring: can the results be written?"""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise typer.BadParameter('--output draws a picture: pip install "postil[bench]" first')
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"{output} cannot be made: {error.strerror}") from error


def _print_margins(result: Result) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 120  # a file is as wide as the table
    console.print(
        f"{result.model}, {_numbers(result)} on {result.device}; {result.machine}, "
        f"{result.threads} threads, torch {result.torch}; medians of {result.runs} runs"
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("document", no_wrap=True)
    table.add_column("who", overflow="fold")
    for column in ("plain, s", "margins, s", "ratio", "first margin", "2nd question"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in result.rows:
        table.add_row(
            f"{row.document_tokens // row.segment_tokens} x {row.segment_tokens}, "
            f"margins of {row.margin_tokens}",
            row.who,
            f"{row.plain_s:.2f}",
            f"{row.margins_s:.2f}",
            f"[bold]{row.ratio:.2f}[/bold]",
            _share(row.first_margin_share),
            _share(row.second_question_share),
        )
    console.print(table)
    row = result.rows[0]
    if row.usage is not None:
        usage = row.usage
        console.print(
            f"{row.who}: {usage['forwards']} forwards, {usage['generated_tokens']} tokens written, "
            f"{usage['drafted_tokens']} drafted, {usage['accepted_tokens']} accepted"
        )
        besides = (row.peak_memory_bytes or 0) - result.weight_bytes - usage["pool_bytes"]
        console.print(
            f"memory: weights {size(result.weight_bytes)}, cache {size(usage['pool_bytes'])}"
            + (f", {size(besides)} besides" if row.peak_memory_bytes else "")
        )
    console.print(
        "first margin: when it was there, as a share of the read; 2nd question: its time as a "
        "share of the first one's"
    )


def _numbers(result: Result | Decoding) -> str:
    return result.dtype + (f" with {result.quantize} weights" if result.quantize else "")


def _share(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"
