"""The reading pattern: read a document, write margins on the way, answer from both.

One loop: decide what goes into the next forward (`planner`), run it (`engine.step`), take in what
came out. Whatever one forward works on is a `_Slice` of something that is only read, a `_Writing`
(a margin or the answer, a few tokens a forward) or a `_Judging` (a margin's verdict, one forward in
all). Events come out on the way.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from postil.engine import sampling
from postil.engine.drafting import Lookup, Source
from postil.engine.sampling import Sampling
from postil.engine.step import Feed
from postil.errors import ContextOverflow
from postil.margins.classify import relevance
from postil.margins.context import Context
from postil.margins.events import (
    Answer,
    AnswerToken,
    Done,
    Event,
    FinishReason,
    Margin,
    MarginStarted,
    MarginToken,
    MarginWritten,
    Phase,
    Progress,
    Segment,
    Usage,
)
from postil.margins.planner import BALANCED, Policy, State, plan
from postil.margins.prompts import Prompts, shared_length

MARGIN_TOKENS = 64
ANSWER_TOKENS = 256
# What a note takes in a prompt besides its own tokens: a dash, a line end, a token split otherwise.
LISTING_TOKENS = 4


@dataclass(frozen=True)
class Options:
    """What a question may choose.

    Attributes:
        strategy: `margins`; `plain` (the whole document, then the question); or `auto`: `plain`
            for a document of one segment, where margins do not pay, else `margins`.
        margin_tokens: the most tokens of each margin.
        answer_tokens: the most tokens of the answer.
        sampling: of margins and answer; its stop strings hold for the answer alone.
    """

    strategy: str = "auto"
    margin_tokens: int = MARGIN_TOKENS
    answer_tokens: int = ANSWER_TOKENS
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        if self.strategy not in ("auto", "margins", "plain"):
            raise ValueError(f"there is no strategy {self.strategy!r}: auto, margins or plain")
        if self.margin_tokens < 1 or self.answer_tokens < 1:
            raise ValueError("margin_tokens and answer_tokens must be 1 or more")


@dataclass(eq=False)
class _Slice:
    """What is only read: the next piece of the document, or what all verdicts have in common."""

    sequence: int
    tokens: list[int]
    document_tokens: int = 0

    def feed(self) -> Feed:
        return Feed(self.sequence, self.tokens, logits=0)


@dataclass(eq=False)
class _Writing:
    """A text in the making on a branch of its own.

    Attributes:
        tokens: what its next forward takes: the prompt, then the token chosen last.
        lookup: where drafts come from.
        draft: tokens that are tried behind `tokens` in the next forward.
        event: makes of new text what is told to the user, if anything is.
        margin: that the text is for, if it is for one.
    """

    sequence: int
    tokens: list[int]
    generation: sampling.Generation
    lookup: Lookup
    draft: list[int] = field(default_factory=list)
    event: Callable[[str], Event] | None = None
    margin: Margin | None = None

    def feed(self) -> Feed:
        return Feed(self.sequence, [*self.tokens, *self.draft], logits=1 + len(self.draft))


@dataclass(eq=False)
class _Judging:
    """What a margin's classification prompt has of its own, after what all have in common."""

    sequence: int
    tokens: list[int]
    margin: Margin

    def feed(self) -> Feed:
        return Feed(self.sequence, self.tokens)


_Work = _Slice | _Writing | _Judging


@dataclass(frozen=True)
class _Note:
    """What the answer prompt says of a margin, or of several that were condensed."""

    text: str
    segments: list[Segment]
    relevance: float

    @classmethod
    def of(cls, margin: Margin) -> _Note:
        return cls(margin.text.strip(), [margin.segment], margin.relevance or 0.0)


class Reader:
    """One question to a context.

    Attributes:
        margins: those started so far, in the order of their segments.

    Raises:
        ContextOverflow: the question fits neither the window nor the memory.
    """

    def __init__(
        self,
        context: Context,
        prompts: Prompts,
        question: str,
        options: Options,
        policy: Policy = BALANCED,
    ) -> None:
        self.margins: list[Margin] = []
        self._context = context
        self._prompts = prompts
        self._question = question
        self._options = options
        self._policy = policy
        self._strategy = options.strategy
        if self._strategy == "auto":
            self._strategy = "margins" if len(context.segments) > 1 else "plain"
        self._takes_notes = self._strategy == "margins"
        self._extract = prompts.extract(question)
        self._stem_tokens = prompts.classify_stem(question)
        self._stem: int | None = None
        self._after_document = self._reserve()
        self._stop_tokens = context.loaded.stop_tokens | prompts.stop_tokens
        self._answer_now = self._cancelled = False
        self._branches: set[int] = set()
        self._writing: list[_Writing] = []
        self._margin_tokens: list[list[int]] = []
        self._judging: list[_Judging] = []
        self._answer = ""
        self._finish_reason: FinishReason = "cancelled"
        self._rests_on: list[Segment] = []

    def answer_now(self) -> None:
        """Read no further; answer from what has been read, which is one slice at least."""
        self._answer_now = True

    def cancel(self) -> None:
        """Stop before the next forward."""
        self._cancelled = True

    def events(self) -> Generator[Event]:
        """Do the work. The last event is `Done`; what was read stays read, whatever happens."""
        pool, engine = self._context.pool, self._context.engine
        pool.peak_used = pool.used
        self._usage = Usage(
            reused_tokens=self._context.read, pool_bytes=pool.capacity * pool.bytes_per_cell
        )
        self._seconds: dict[str, float] = {"read": 0.0, "margins": 0.0, "answer": 0.0}
        self._begun, forwards = time.perf_counter(), engine.forwards
        try:
            yield self._progress("read")
            yield from self._read_on()
            if not self._cancelled:
                yield from self._give_answer()
        finally:
            for sequence in self._branches:
                pool.drop(sequence)
            self._branches.clear()
        self._usage.forwards = engine.forwards - forwards
        self._usage.peak_cache_bytes = pool.peak_used * pool.bytes_per_cell
        self._usage.seconds = {**self._seconds, "total": time.perf_counter() - self._begun}
        yield Done(
            Answer(
                text=self._answer.strip(),
                margins=self.margins,
                segments=self._rests_on,
                usage=self._usage,
                finish_reason="cancelled" if self._cancelled else self._finish_reason,
                strategy=self._strategy,
                model=self._context.loaded.name,
            )
        )

    def _reserve(self) -> int:
        """Make room for what is to be written; how many tokens must fit behind the document."""
        context, prompts, options = self._context, self._prompts, self._options
        window, longest = context.loaded.window, options.margin_tokens
        note = longest + LISTING_TOKENS
        judged = len(prompts.classify(self._question, "")) + longest
        extracted = len(self._extract) + longest
        condensed = len(self._condense([])) + note + longest
        plain = self._strategy == "plain"
        listed = [] if plain else ["-"]
        answered = len(prompts.answer(self._question, listed)) + options.answer_tokens
        from_notes = len(prompts.answer_from_notes(self._question, listed)) + options.answer_tokens
        needed = max(judged, extracted, condensed, answered, from_notes + note)
        if needed > window:
            raise ContextOverflow(
                f"The question and what is to be written take {needed:,} tokens, but the model's "
                f"window has {window:,}: ask a shorter question, or for shorter margins or a "
                "shorter answer."
            )
        after_document = answered if plain else answered + note
        notes = min(note * len(context.segments), window)
        context.reserve(
            after_segment=answered if plain else extracted,
            after_document=after_document,
            scratch=self._policy.together * (extracted + judged)
            + notes
            + max(answered, from_notes, condensed),
            whole=plain,
        )
        return after_document

    # Reading

    def _read_on(self) -> Iterator[Event]:
        """Read to the end of the document and write a margin for every segment."""
        while not self._cancelled and not (self._answer_now and self._context.read):
            if not (self._context.ahead or self._waiting() or self._writing or self._judging):
                return
            yield from self._turn("margins", reading=True)
        for writing in self._writing:  # cut short: half a note is no note
            if writing.margin is not None:
                writing.margin.finish_reason = "cancelled"
            self._drop(writing.sequence)
        self._writing.clear()
        while self._judging and not self._cancelled:
            yield from self._turn("margins")

    def _waiting(self) -> int:
        """Segments that have been read and whose margin has not been started."""
        return self._context.segments_read() - len(self.margins) if self._takes_notes else 0

    def _start_margin(self) -> Margin:
        """Fork the main sequence where the next segment ends."""
        context, index = self._context, len(self.margins)
        margin = Margin(context.segments[index])
        parent, event = context.boundary(index), partial(MarginToken, margin)
        self._write(self._extract, self._options.margin_tokens, index, parent, event, margin)
        self.margins.append(margin)
        return margin

    # Answering

    def _give_answer(self) -> Iterator[Event]:
        """Put the notes before the question: behind the document, if all of it can be seen."""
        context, pool, prompts = self._context, self._context.pool, self._prompts
        limit = self._options.answer_tokens
        main = context.windows[0].sequence
        notes = [_Note.of(margin) for margin in self.margins if margin.kept and margin.text.strip()]
        room = context.loaded.window - pool.length(main) - limit
        if context.windows_read == 1 and room + limit >= self._after_document:
            room -= len(prompts.answer(self._question, []))
            notes = yield from self._condensed(notes, room)
            prompt = prompts.answer(self._question, [note.text for note in notes])
            parent = main, pool.length(main)
            self._rests_on = context.segments[: context.segments_read(partly=True)]
        else:
            if not notes:  # the document cannot be seen from here, so any note is better than none
                notes = [_Note.of(margin) for margin in self.margins if _is_usable(margin)]
            room = (
                context.loaded.window - limit - len(prompts.answer_from_notes(self._question, []))
            )
            notes = yield from self._condensed(notes, room)
            prompt = prompts.answer_from_notes(self._question, [note.text for note in notes])
            parent = None
        if notes:
            self._rests_on = [segment for note in notes for segment in note.segments]
        answer = self._write(prompt, limit, len(context.segments), parent, event=AnswerToken)
        while not self._cancelled and self._writing:
            yield from self._turn("answer")
        self._answer = answer.text
        self._finish_reason = answer.finish_reason or "cancelled"

    def _condensed(self, notes: list[_Note], room: int) -> Generator[Event, None, list[_Note]]:
        """At most `room` tokens of notes: margins of margins are written until they fit."""
        while self._tokens_of(notes) > room and not self._cancelled:
            longest = self._options.margin_tokens
            fits = self._context.loaded.window - len(self._condense([])) - longest
            groups = max(
                room // (longest + LISTING_TOKENS), math.ceil(self._tokens_of(notes) / fits)
            )
            if groups >= len(notes):  # writing them anew would not make them fewer
                weakest = min(notes, key=lambda note: note.relevance)
                notes = [note for note in notes if note is not weakest]
                continue
            size = math.ceil(len(notes) / groups)
            batches = [notes[at : at + size] for at in range(0, len(notes), size)]
            notes = yield from self._write_anew(batches)
        return notes

    def _write_anew(self, batches: list[list[_Note]]) -> Generator[Event, None, list[_Note]]:
        """One note out of each batch of notes."""
        longest, pool = self._options.margin_tokens, self._context.pool
        waiting = [(batch, self._condense(batch)) for batch in batches]
        written: list[tuple[list[_Note], sampling.Generation]] = []
        while (waiting or self._writing) and not self._cancelled:
            while waiting and (not self._writing or len(waiting[0][1]) + longest <= pool.free):
                batch, prompt = waiting.pop(0)
                stream = len(self._context.segments) + 1 + len(written)
                written.append((batch, self._write(prompt, longest, stream)))
            yield from self._turn("margins")
        return [
            _Note(
                text, [s for note in batch for s in note.segments], max(n.relevance for n in batch)
            )
            for batch, generation in written
            if (text := generation.text.strip())
        ]

    def _condense(self, notes: list[_Note]) -> list[int]:
        return self._prompts.condense(self._question, [note.text for note in notes])

    def _tokens_of(self, notes: list[_Note]) -> int:
        """What notes add to an answer prompt."""
        texts = [note.text for note in notes]
        build = self._prompts.answer
        return len(build(self._question, texts)) - len(build(self._question, []))

    # One forward

    def _turn(self, phase: Phase, *, reading: bool = False) -> Iterator[Event]:
        """Plan one forward, run it, and take in what comes out.

        Args:
            phase: what its time is counted as, unless it reads.
            reading: more of the document may go into it, and new margins.
        """
        for writing in self._writing:
            left = writing.generation.left - 1  # besides the one that the forward gives anyway
            writing.draft = writing.lookup.propose(writing.generation.tokens, left)
        state = State(
            ahead=self._context.ahead if reading else 0,
            waiting=self._waiting() if reading else 0,
            prompt_tokens=len(self._extract),
            first=not any(margin.finish_reason for margin in self.margins),
            texts=[len(writing.tokens) for writing in self._writing],
            proposed=[len(writing.draft) for writing in self._writing],
            verdicts=[len(judging.tokens) for judging in self._judging],
        )
        batch = plan(state, self._policy)
        for writing, length in zip(self._writing, batch.drafts, strict=True):
            del writing.draft[length:]
        work: list[_Work] = [*self._judging, *self._writing]
        if batch.start and self._stem is None:
            self._stem = self._branch(len(self._stem_tokens))
            work.append(_Slice(self._stem, self._stem_tokens))
        for _ in range(batch.start):
            yield MarginStarted(self._start_margin())
            work.append(self._writing[-1])
        if batch.read:
            work.append(_Slice(*self._context.next_slice(batch.read)))
            phase = "read"
        before = time.perf_counter()
        logits = self._context.engine.step([item.feed() for item in work])
        self._seconds[phase] += time.perf_counter() - before
        for item, rows in zip(work, logits, strict=True):
            match item:
                case _Slice():
                    self._usage.prefill_tokens += len(item.tokens)
                    self._usage.document_tokens += item.document_tokens
                    if item.document_tokens:
                        yield self._progress(phase)
                case _Writing():
                    yield from self._take(item, rows)
                case _Judging():
                    self._usage.prefill_tokens += len(item.tokens)
                    item.margin.relevance = relevance(rows[0], self._prompts.yes, self._prompts.no)
                    self._drop(item.sequence)
                    self._judging.remove(item)
                    yield MarginWritten(item.margin)

    def _take(self, writing: _Writing, logits: torch.Tensor) -> Iterator[Event]:
        """The next tokens of a text; at the end of a margin, its verdict is next.

        Args:
            logits: (1 + draft, vocabulary). A row counts if the draft was right up to it.
        """
        generation, margin, draft = writing.generation, writing.margin, writing.draft
        if not generation.tokens:
            self._usage.prefill_tokens += len(writing.tokens)
        taken = 0
        for text in generation.follow(logits, draft):
            taken += 1
            if margin is not None:
                margin.text = generation.text
            if text and writing.event is not None:
                yield writing.event(text)
        accepted = taken - 1
        self._usage.generated_tokens += taken
        self._usage.drafted_tokens += len(draft)
        self._usage.accepted_tokens += accepted
        writing.lookup.learn(len(draft), accepted)
        writing.tokens = generation.tokens[-1:]
        if generation.finish_reason is None:
            pool = self._context.pool
            wrong = len(draft) - accepted
            pool.truncate(writing.sequence, pool.length(writing.sequence) - wrong)
            return
        self._drop(writing.sequence)
        self._writing.remove(writing)
        if margin is not None:
            margin.finish_reason = generation.finish_reason
            yield from self._judge(margin)

    def _judge(self, margin: Margin) -> Iterator[Event]:
        if not margin.text.strip():
            margin.relevance = 0.0
            yield MarginWritten(margin)
            return
        prompt = self._prompts.classify(self._question, margin.text)
        # What all these prompts begin with was read when the first margin was started.
        assert self._stem is not None
        shared = shared_length(self._stem_tokens, prompt)
        own = prompt[shared:]
        branch = self._branch(len(own), (self._stem, shared))
        self._judging.append(_Judging(branch, own, margin))

    def _write(
        self,
        prompt: list[int],
        limit: int,
        stream: int,
        parent: tuple[int, int] | None = None,
        event: Callable[[str], Event] | None = None,
        margin: Margin | None = None,
    ) -> sampling.Generation:
        """Begin a text of at most `limit` tokens: it is written from the next forward on.

        Args:
            stream: tells its random numbers from those of other texts; that of the answer, which
                alone heeds the user's stop strings, is the number of segments.
            parent: what it sees before its prompt; see `_branch`.
        """
        context, how = self._context, self._options.sampling
        if stream != len(context.segments):
            how = replace(how, stop=())
        generation = sampling.Generation(
            context.loaded.tokenizer, how, self._stop_tokens, limit, stream
        )
        # Where its words may come from, the likeliest place first.
        sources = [Source(prompt)]
        if margin is not None:
            sources.insert(0, context.segment_source(margin.segment.index))
        if parent is not None:
            sources.append(context.window_source(parent[0]))
        branch = self._branch(len(prompt) + limit, parent)
        if margin is not None:
            self._margin_tokens.append(generation.tokens)
        siblings = self._margin_tokens if margin is not None else ()
        lookup = Lookup(prompt, sources, siblings)
        self._writing.append(_Writing(branch, prompt, generation, lookup, [], event, margin))
        return generation

    def _branch(self, room: int, parent: tuple[int, int] | None = None) -> int:
        """A sequence with cells for `room` tokens, dropped however the read ends.

        It sees the first tokens of `parent`, a sequence and a length, or nothing.
        """
        pool = self._context.pool
        self._context.make_room(room)
        if parent is None:
            sequence = pool.new(room=room, branch=True)
        else:
            sequence = pool.fork(*parent, room=room)
        self._branches.add(sequence)
        return sequence

    def _drop(self, sequence: int) -> None:
        self._branches.remove(sequence)
        self._context.pool.drop(sequence)

    def _progress(self, phase: Phase) -> Progress:
        """Tokens in the cache, at the rate since the question was asked."""
        read, total = self._context.read, self._context.total
        done = self._usage.document_tokens
        rate = done / (time.perf_counter() - self._begun) if done else None
        left = (total - read) / rate if rate else None
        return Progress(read, total, rate, left, phase)


def _is_usable(margin: Margin) -> bool:
    whole = margin.finish_reason in ("stop", "length")
    return whole and margin.verdict != "discard" and bool(margin.text.strip())
