"""What several commands share: their options, and loading a model with a sign of life."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from postil import Model, Policy


class DType(StrEnum):
    """What numbers are computed in."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FLOAT16 = "float16"


class Quantize(StrEnum):
    """What weights are kept in."""

    INT8 = "int8"


ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help="Read with this model: a hub id, a folder or a .gguf file. Without it SmolLM2-135M, "
        "a small one that is fetched once (93 MB).",
    ),
]
DTypeOption = Annotated[
    DType,
    typer.Option(
        help="Compute in these numbers; auto takes bfloat16 where the hardware multiplies it."
    ),
]
QuantizeOption = Annotated[
    Quantize | None,
    typer.Option(help="Keep weights in 8 bits (CPU only): less memory, faster margins."),
]
DeviceOption = Annotated[
    str, typer.Option(metavar="DEVICE", help="Run on cpu, cuda, cuda:1, ...; auto takes a GPU.")
]
ThreadsOption = Annotated[
    int | None, typer.Option(min=1, help="Use so many CPU threads instead of one per core.")
]
EagerOption = Annotated[bool, typer.Option("--eager", help="Show every margin as early as can be.")]
BatchOption = Annotated[
    bool, typer.Option("--batch", help="Write margins eight at a time: the fewest forward passes.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def stderr() -> Console:
    """The console for everything but results."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())


def load(
    model: str | None,
    dtype: DType,
    device: str,
    threads: int | None,
    quantize: Quantize | None = None,
) -> Model:
    """Load a model; on a terminal something moves meanwhile."""
    import postil

    options: dict[str, Any] = {
        "dtype": dtype.value,
        "device": device,
        "threads": threads,
        "quantize": quantize.value if quantize else None,
    }
    console = stderr()
    # A model that must be fetched first shows a progress bar of its own, and two do not mix.
    from postil.engine import hub

    if console.is_terminal:
        hub.pull(model)
        with console.status("Loading the model"):
            return postil.load(model, **options)
    return postil.load(model, **options)


def policy(eager: bool, batch: bool) -> Policy:
    """The policy that the options name."""
    import postil

    if eager and batch:
        raise typer.BadParameter("--eager and --batch exclude each other: choose one")
    return postil.EAGER if eager else postil.BATCH if batch else postil.BALANCED


def size(count: float) -> str:
    """Bytes for people, in powers of ten as on the disk's label."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
