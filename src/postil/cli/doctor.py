"""`postil doctor`: what this machine has, and what works with a model."""

from __future__ import annotations

import json
import platform
import sys
from typing import Annotated, Any

import typer

from postil.cli.common import (
    DeviceOption,
    DType,
    DTypeOption,
    JsonOption,
    QuantizeOption,
    ThreadsOption,
    load,
    size,
)


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]", help="Load this model and test it; without one, SmolLM2-135M."
        ),
    ] = None,
    dtype: DTypeOption = DType.AUTO,
    quantize: QuantizeOption = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what this machine has and prove that a model can be read with.

    The proof runs packed forwards over a pool of cells beside one plain forward of transformers
    and prints the largest difference.

    Example: `postil doctor Qwen/Qwen2.5-0.5B-Instruct`
    """
    machine = _machine()
    if not as_json:
        _print_dict("Machine", machine)
    described = load(model, dtype, device, threads, quantize).describe().to_dict()
    if as_json:
        typer.echo(json.dumps({"machine": machine, "model": described}, indent=2))
    else:
        _print_dict("Model", described)


def _machine() -> dict[str, Any]:
    import psutil
    import torch
    import transformers

    import postil

    return {
        "postil": postil.__version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "system": platform.platform(terse=True),
        "cores": psutil.cpu_count(logical=True),
        "memory_bytes": psutil.virtual_memory().total,
        "native_bfloat16": torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _print_dict(title: str, values: dict[str, Any]) -> None:
    typer.echo(typer.style(title, bold=True))
    for key, value in values.items():
        label = key.removesuffix("_bytes").replace("_bytes_", "_").replace("_", " ")
        typer.echo(f"  {label:22}{_shown(key, value)}")


def _shown(key: str, value: Any) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return "yes" if value else "no"
        case int() if "bytes" in key:
            return size(value)
        case int():
            return f"{value:,}"
        case float():
            return f"{value:.2g}"
        case dict():
            return ", ".join(f"{count} {kind}" for kind, count in value.items())
    return str(value)
