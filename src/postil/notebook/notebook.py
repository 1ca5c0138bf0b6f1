"""A document that is being read, and the questions to it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

from postil.documents import Document
from postil.engine.loading import Loaded
from postil.engine.sampling import Sampling
from postil.errors import PostilError
from postil.margins.context import Context
from postil.margins.events import Answer, Done, Event, Margin, Segment
from postil.margins.planner import BALANCED, Policy
from postil.margins.prompts import Prompts
from postil.margins.reader import ANSWER_TOKENS, MARGIN_TOKENS, Options, Reader
from postil.margins.segments import default_segment_tokens, split


class Notebook:
    """One or more documents in a KV cache. Made by `Model.open`.

    The first question reads the document; later ones find it in the cache and prefill none of it.
    One question at a time: a notebook is not for several threads.

    Attributes:
        documents: their texts and names.
        segments: of all documents, in order; their texts joined give the documents back.
        document_tokens: tokens of all segments.
    """

    def __init__(
        self,
        loaded: Loaded,
        prompts: Prompts,
        documents: Sequence[Document],
        segment_tokens: int | None = None,
    ) -> None:
        self.documents = list(documents)
        self._prompts = prompts
        if segment_tokens is None:
            tokens = sum(len(prompts.encode(document.text)) for document in documents)
            segment_tokens = default_segment_tokens(tokens, loaded.window)
        elif not 1 <= segment_tokens < loaded.window:
            raise ValueError(
                f"segment_tokens is {segment_tokens}: choose 1 or more, and less than the model's "
                f"window of {loaded.window:,}"
            )
        self.segments: list[Segment] = split(documents, loaded.tokenizer, segment_tokens)
        tokens_of_each = [prompts.encode(segment.text) for segment in self.segments]
        self.document_tokens = sum(map(len, tokens_of_each))
        self._context = Context(loaded, prompts.opening, self.segments, tokens_of_each)
        # Weak: a stream that nobody holds any more has stopped, and its branches are gone.
        self._running: weakref.ref[Stream] | None = None

    def __repr__(self) -> str:
        sources = ", ".join(document.source for document in self.documents)
        return (
            f"<Notebook {sources}: {self.document_tokens:,} tokens, {len(self.segments)} segments>"
        )

    def ask(
        self,
        question: str,
        *,
        strategy: str = "auto",
        margin_tokens: int = MARGIN_TOKENS,
        answer_tokens: int = ANSWER_TOKENS,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: Sequence[str] = (),
        policy: Policy = BALANCED,
    ) -> Answer:
        """Read what has not been read, write margins, and answer. See `stream` for the options."""
        stream = self.stream(
            question,
            strategy=strategy,
            margin_tokens=margin_tokens,
            answer_tokens=answer_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            stop=stop,
            policy=policy,
        )
        return next(event.answer for event in stream if isinstance(event, Done))

    def stream(
        self,
        question: str,
        *,
        strategy: str = "auto",
        margin_tokens: int = MARGIN_TOKENS,
        answer_tokens: int = ANSWER_TOKENS,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: Sequence[str] = (),
        policy: Policy = BALANCED,
    ) -> Stream:
        """Answer as `ask` does, and tell what happens on the way.

        Args:
            question: what to answer.
            strategy: `margins`; `plain` (the whole document, then the question); or `auto`:
                `plain` for a document of one segment, where margins do not pay, else `margins`.
            margin_tokens: the most tokens of each margin.
            answer_tokens: the most tokens of the answer.
            temperature: 0 is greedy.
            top_p: sample from the fewest tokens whose probabilities reach this sum.
            seed: the same seed gives the same text.
            stop: strings that end the answer; they are not part of it.
            policy: how the work is packed into forwards, which changes when margins appear and
                not what they say: `postil.BALANCED`, `EAGER`, `BATCH` or a `Policy` of your own.

        Raises:
            ContextOverflow: the question, or for `plain` the document, does not fit the model's
                window, or the cache does not fit the memory.
            ValueError: an option makes no sense, or the question is empty.
            PostilError: at the first event, if another stream of this notebook has not ended.
        """
        if not question.strip():
            raise ValueError("the question is empty: ask something")
        options = Options(
            strategy, margin_tokens, answer_tokens, Sampling(temperature, top_p, seed, tuple(stop))
        )
        return Stream(self, Reader(self._context, self._prompts, question, options, policy))

    def _begin(self, stream: Stream) -> None:
        """Called by a stream before its first event."""
        running = self._running() if self._running is not None else None
        if running is not None and not running.ended:
            raise PostilError(
                "this notebook is answering another question: read that stream to its end, or "
                "close() it"
            )
        self._running = weakref.ref(stream)


class Stream:
    """The events of one question, in order; `Done` is the last. Made by `Notebook.stream`.

    `answer_now` and `cancel` may be called from any thread.

    Attributes:
        ended: nothing more will come.
    """

    def __init__(self, notebook: Notebook, reader: Reader) -> None:
        self._notebook = notebook
        self._reader = reader
        self._events = reader.events()
        self._begun = False
        self.ended = False

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        if not self._begun:
            self._notebook._begin(self)
            self._begun = True
        try:
            event = next(self._events)
        except BaseException:  # StopIteration too
            self.ended = True
            raise
        self.ended = isinstance(event, Done)
        return event

    @property
    def margins(self) -> list[Margin]:
        """Those started so far; each can be kept or discarded until the answer begins."""
        return self._reader.margins

    def answer_now(self) -> None:
        """Read no further: answer from what has been read and from the margins that are whole."""
        self._reader.answer_now()

    def cancel(self) -> None:
        """Stop before the next forward. `Done` still comes, with what there is."""
        self._reader.cancel()

    def close(self) -> None:
        """Stop at once, without `Done`. What was read stays read."""
        self._events.close()
        self.ended = True
