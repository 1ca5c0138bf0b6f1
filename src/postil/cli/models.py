"""`postil models`: what is there, and fetching more."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from postil.cli.common import JsonOption, size


def list_models(as_json: JsonOption = False) -> None:
    """List the models that need no network.

    Example: `postil models list`
    """
    from rich.console import Console
    from rich.table import Table

    from postil.engine import hub

    models = hub.cached_models()
    if as_json:
        entries = [asdict(model) | {"path": str(model.path)} for model in models]
        typer.echo(json.dumps(entries, indent=2))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("MODEL", "KIND", "SIZE", "PATH"):
        table.add_column(column, overflow="fold", justify="right" if column == "SIZE" else "left")
    for model in models:
        path = str(model.path) if model.fetched else "fetched on first use"
        table.add_row(model.name, model.kind, size(model.bytes), path)
    console = Console()
    # A table that is read by a program must not be folded to a terminal's width.
    console.print(table, soft_wrap=not console.is_terminal)


def pull(
    name: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="A hub id; without one, SmolLM2-135M.")
    ] = None,
) -> None:
    """Fetch a model now, so that it needs no network later.

    Example: `postil models pull Qwen/Qwen2.5-0.5B-Instruct`
    """
    from postil.engine import hub

    source = hub.pull(name)
    where = (
        source.path_or_id
        if source.gguf_file is None
        else (f"{source.path_or_id}/{source.gguf_file}")
    )
    typer.echo(f"{source.name} is ready: {where}")
