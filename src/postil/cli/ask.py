"""`postil ask`: a question to documents."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    stderr,
)

if TYPE_CHECKING:
    from postil import Document


class Strategy(StrEnum):
    """How the answer is found."""

    AUTO = "auto"
    MARGINS = "margins"
    PLAIN = "plain"


def ask(
    documents_and_question: Annotated[
        list[str],
        typer.Argument(
            metavar="DOC... QUESTION",
            help="Files to read (text, Markdown, source code, HTML, PDF, DOCX, EPUB; - is standard "
            "input), then the question in quotes.",
            show_default=False,
        ),
    ],
    model: ModelOption = None,
    strategy: Annotated[
        Strategy,
        typer.Option(
            help="margins takes a note after every segment; plain only reads; auto reads plainly "
            "where the document fits one segment."
        ),
    ] = Strategy.AUTO,
    segment_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Cut the document into segments of at most so many tokens."),
    ] = None,
    margin_tokens: Annotated[
        int | None, typer.Option(min=1, help="End each margin after so many tokens (64).")
    ] = None,
    answer_tokens: Annotated[
        int | None, typer.Option(min=1, help="End the answer after so many tokens (256).")
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Draw words at random; 0 always takes the likeliest.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Draw only from the likeliest words up to this.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Draw the same words again with the same seed.")] = 0,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="End the answer before this text; may be repeated."),
    ] = None,
    eager: EagerOption = False,
    batch: BatchOption = False,
    dtype: DTypeOption = DType.AUTO,
    quantize: QuantizeOption = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
    as_events: Annotated[
        bool, typer.Option("--events", help="Print every event as it happens, one JSON a line.")
    ] = False,
) -> None:
    """Read documents and answer a question about them.

    On a terminal the margins appear as they are written; d discards the last one, k keeps it,
    a answers now from what has been read. The answer alone goes to standard output.

    Example: `postil ask report.pdf annex.md "Who signed the report?"`
    """
    from postil.cli import display

    *names, question = documents_and_question
    if not names:
        raise typer.BadParameter('Name a document and then the question: postil ask DOC "QUESTION"')
    if not question.strip():
        raise typer.BadParameter("The question is empty: put it last, in quotes")
    if as_json and as_events:
        raise typer.BadParameter("--json and --events exclude each other: choose one")
    documents = _read(names)
    options: dict[str, Any] = {
        "strategy": strategy.value,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "stop": stop or (),
        "policy": policy(eager, batch),
    }
    if margin_tokens is not None:
        options["margin_tokens"] = margin_tokens
    if answer_tokens is not None:
        options["answer_tokens"] = answer_tokens
    loaded = load(model, dtype, device, threads, quantize)
    try:
        book = loaded.open(*documents, segment_tokens=segment_tokens)
        stream = book.stream(question, **options)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if as_events:
        for event in stream:
            print(json.dumps(event.to_dict(), ensure_ascii=False), flush=True)
        return
    view = display.View(stderr(), stream, book.segments, keys="-" not in names)
    answer = view.run(echo_answer=not as_json)
    if as_json:
        print(json.dumps(answer.to_dict(), ensure_ascii=False, indent=2))


def _read(names: list[str]) -> list[Document]:
    """All documents, before a model is loaded: what is missing should show at once."""
    from postil.documents import read_document

    if names.count("-") > 1:
        raise typer.BadParameter("Standard input (-) can be read only once")
    return [
        read_document(sys.stdin.buffer.read(), "stdin")
        if name == "-"
        else read_document(Path(name))
        for name in names
    ]
