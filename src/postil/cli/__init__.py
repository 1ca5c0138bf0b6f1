"""The command line: a thin skin over the library.

Everything heavy is imported inside the commands, so that `postil --help` answers at once.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Annotated

import typer

from postil.errors import PostilError

app = typer.Typer(
    name="postil",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
models_app = typer.Typer(no_args_is_help=True, help="See and fetch models.")
bench_app = typer.Typer(no_args_is_help=True, help="Measure what reading costs on this machine.")

FAILED, INTERRUPTED = 1, 130


def _version(wanted: bool) -> None:
    if wanted:
        import postil

        typer.echo(f"postil {postil.__version__}")
        raise typer.Exit


@app.callback(
    help="""
    Read documents that are longer than a language model reads well.

    While the document is read, the model writes a short note about the question after each
    segment: a margin. The margins then stand right before the question.

    Example: `postil ask contract.pdf "What is the notice period?"`
    """
)
def _postil(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del version


def _register() -> None:
    from postil.cli import ask, bench, doctor, models

    app.command("ask")(ask.ask)
    app.add_typer(models_app, name="models")
    models_app.command("list")(models.list_models)
    models_app.command("pull")(models.pull)
    app.command("doctor")(doctor.doctor)
    app.add_typer(bench_app, name="bench")
    bench_app.command("margins")(bench.margins)
    bench_app.command("decode")(bench.decode)


_register()


def main() -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 usage, 130 stopped by Ctrl-C."""
    # transformers' advice would stand between our own lines.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        app()
    except PostilError as error:
        _say(f"Error: {_sentence(str(error))}")
        sys.exit(FAILED)
    except SystemExit as exit_:
        if exit_.code == INTERRUPTED:
            _say("Stopped.")
        raise


def _say(line: str) -> None:
    with suppress(BrokenPipeError):
        print(line, file=sys.stderr, flush=True)


def _sentence(text: str) -> str:
    """One line with a full stop. It may begin with a name, so its first letter stays as it is."""
    line = " ".join(text.split())
    return line if line.endswith((".", "!", "?")) else line + "."
