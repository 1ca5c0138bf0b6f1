"""A read as it is seen on the terminal: progress, margins, keys, the answer."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from postil.margins.events import (
    Answer,
    AnswerToken,
    Done,
    Event,
    Margin,
    MarginStarted,
    MarginWritten,
    Progress,
    Segment,
)
from postil.notebook.notebook import Stream

HINT = "d discard the last margin · k keep it · a answer now · Ctrl-C stop"
SECONDS_BETWEEN_LINES = 5.0
# What a model writes may hold control characters, and a terminal obeys them.
CONTROL = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])


class View:
    """Shows one stream on stderr and its answer on stdout.

    Args:
        console: on stderr. Where that is no terminal, plain lines are printed.
        stream: what to show.
        segments: of the notebook.
        keys: whether keys may be read from standard input.
    """

    def __init__(
        self, console: Console, stream: Stream, segments: Sequence[Segment], keys: bool
    ) -> None:
        self._console = console
        self._stream = stream
        self._segments = segments
        self._several = len({segment.source for segment in segments}) > 1
        self._keys = keys and console.is_terminal and sys.stdin.isatty()
        self._progress: Progress | None = None
        self._writing: list[Margin] = []
        self._written: list[Margin] = []
        self._last_line = 0.0
        self._hint = ""

    def run(self, *, echo_answer: bool) -> Answer:
        """Show all events; on stdout the answer as it comes, if it is to be echoed."""
        begun = False
        with ExitStack() as stack:
            pressed = stack.enter_context(_keys()) if self._keys else None
            self._hint = HINT if pressed else ""
            live = None
            if self._console.is_terminal:
                live = stack.enter_context(
                    Live(console=self._console, transient=True, refresh_per_second=10)
                )
            for event in self._stream:
                if pressed:
                    self._act_on(pressed())
                match event:
                    case AnswerToken():
                        if live is not None:  # the answer takes the place of the display
                            live.update(Text(""))
                            live.stop()
                            live = None
                        if echo_answer:
                            text = event.text.translate(CONTROL)
                            text = text if begun else text.lstrip()
                            begun = begun or bool(text)
                            sys.stdout.write(text)
                            sys.stdout.flush()
                    case Done():
                        answer = event.answer
                    case _:
                        self._show(event)
                        if live is not None:
                            live.update(self._display())
        if echo_answer:
            print(flush=True)
        self._close(answer)
        return answer

    def _show(self, event: Event) -> None:
        match event:
            case Progress():
                self._progress = event
                if not self._console.is_terminal:
                    self._progress_line(event)
            case MarginStarted():
                self._writing.append(event.margin)
            case MarginWritten():
                self._writing.remove(event.margin)
                self._written.append(event.margin)
                self._console.print(self._line(event.margin))

    def _progress_line(self, progress: Progress) -> None:
        now = time.monotonic()
        if progress.tokens < progress.total and now - self._last_line < SECONDS_BETWEEN_LINES:
            return
        self._last_line = now
        self._console.print(f"read {progress.tokens:,} of {progress.total:,} tokens")

    def _display(self) -> RenderableType:
        """The part that changes: margins in the making, progress, keys."""
        width = self._console.width
        lines: list[RenderableType] = []
        for margin in self._writing:
            line = Text(f"{self._place(margin.segment)}  ", style="dim")
            text = _one_line(margin.text)
            room = max(10, width - len(line) - 1)
            line.append(text[-room:], style="default")
            lines.append(line)
        if (progress := self._progress) is not None:
            bar = Table.grid(padding=(0, 1))
            bar.add_row(
                ProgressBar(total=progress.total, completed=progress.tokens, width=30),
                _progress_text(progress),
            )
            lines.append(bar)
        if self._hint:
            lines.append(Text(self._hint, style="dim"))
        return Group(*lines)

    def _line(self, margin: Margin) -> Text:
        """A written margin: where it stands, the verdict, the text."""
        place = self._place(margin.segment)
        verdict, style = _verdict(margin)
        text = _one_line(margin.text) or "(nothing)"
        return Text.assemble(
            (f"{place}  ", "bold" if margin.kept else "dim"),
            (f"{verdict}  ", style),
            (text, "" if margin.kept else "dim"),
        )

    def _place(self, segment: Segment) -> str:
        where = f"p. {segment.page}" if segment.page else f"{segment.index + 1}"
        if not segment.page:
            where += f"/{len(self._segments)}"
        return f"{segment.source}, {where}" if self._several else where

    def _act_on(self, keys: str) -> None:
        for key in keys:
            match key:
                case "a":
                    self._hint = "answering from what has been read"
                    self._stream.answer_now()
                case "d" | "k" if self._written:
                    margin = self._written[-1]
                    margin.discard() if key == "d" else margin.keep()
                    self._console.print(self._line(margin))

    def _close(self, answer: Answer) -> None:
        """What the answer cost, and what it rests on."""
        usage = answer.usage
        parts = []
        kept = [margin.segment for margin in answer.margins if margin.kept]
        if kept:
            places = dict.fromkeys(self._place(segment) for segment in kept)
            parts.append(f"notes from {', '.join(places)}")
        parts.append(f"{usage.document_tokens:,} tokens read")
        parts.append(f"{usage.generated_tokens:,} written")
        parts.append(f"{usage.seconds['total']:.1f} s")
        if answer.finish_reason == "length":
            parts.append("cut short: --answer-tokens allows a longer answer")
        self._console.print(Text(" · ".join(parts), style="dim"))


def _one_line(text: str) -> str:
    return " ".join(text.split()).translate(CONTROL)


def _verdict(margin: Margin) -> tuple[str, str]:
    if margin.verdict is not None:
        return ("kept by you", "green") if margin.kept else ("discarded by you", "red")
    score = f"{margin.relevance or 0.0:.2f}"
    return (f"kept {score}", "green") if margin.kept else (f"not relevant {score}", "yellow")


def _progress_text(progress: Progress) -> str:
    text = f"{progress.tokens:,} of {progress.total:,} tokens"
    if progress.tokens_per_second:
        text += f", {progress.tokens_per_second:,.0f}/s"
    if progress.seconds_left:
        minutes, seconds = divmod(round(progress.seconds_left), 60)
        text += f", {minutes}:{seconds:02} left"
    return text


@contextmanager
def _keys() -> Iterator[Callable[[], str] | None]:
    """Lets keys be read one by one and unseen; yields a function that gives those pressed."""
    try:
        import termios
        import tty
    except ImportError:  # Windows
        yield None
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal, termios.TCSANOW)

        def pressed() -> str:
            keys = b""
            with suppress(OSError):
                while select.select([terminal], [], [], 0)[0] and (key := os.read(terminal, 64)):
                    keys += key
            return keys.decode(errors="ignore")

        yield pressed
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
