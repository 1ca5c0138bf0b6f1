"""What a read gives back: segments, margins, usage, the answer, and the events on the way.

Every class has `to_dict()`: plain values, ready for JSON. The command line, the library and
the benchmark all print these and nothing else.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "cancelled"]
Phase = Literal["read", "margins", "answer"]


@dataclass(frozen=True)
class Segment:
    """A piece of a document that is prefilled as one unit.

    `start` and `end` are character offsets into the text of the document named `source`;
    `page` is counted from 1 and `None` where the format has no pages.
    """

    index: int
    source: str
    start: int
    end: int
    page: int | None
    text: str = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the text."""
        return {k: v for k, v in asdict(self).items() if k != "text"}


@dataclass(eq=False)
class Margin:
    """The note that the model writes after a segment for one query.

    `relevance` is the model's own verdict, P(YES) / (P(YES) + P(NO)), in 0..1, or `None` until
    it is known. `kept` says whether the note goes into the answer prompt: the user's verdict
    where there is one, else whether `relevance` reaches the threshold.
    """

    segment: Segment
    text: str = ""
    relevance: float | None = None
    threshold: float = 0.5
    finish_reason: FinishReason | None = None
    verdict: Literal["keep", "discard"] | None = None

    def keep(self) -> None:
        """Put this margin into the answer prompt whatever the model thinks of it."""
        self.verdict = "keep"

    def discard(self) -> None:
        """Leave this margin out of the answer prompt."""
        self.verdict = "discard"

    @property
    def kept(self) -> bool:
        if self.verdict is not None:
            return self.verdict == "keep"
        return self.relevance is not None and self.relevance >= self.threshold

    def to_dict(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "relevance": self.relevance,
            "kept": self.kept,
            "segment": self.segment.to_dict(),
        }


@dataclass
class Usage:
    """What a question cost, counted by the engine as it works.

    Attributes:
        prefill_tokens: tokens fed that were not generated: document and prompts.
        document_tokens: those of them that belong to the document.
        reused_tokens: document tokens that were already in the cache.
        generated_tokens: tokens that the model wrote: margins and answer.
        drafted_tokens: tokens proposed by drafting; accepted_tokens: those that held.
        forwards: packed forward passes.
        seconds: wall-clock seconds by phase (`read`, `margins`, `answer`) and `total`.
        peak_cache_bytes: the most bytes of keys and values that were in use at once.
        pool_bytes: bytes reserved for keys and values.
    """

    prefill_tokens: int = 0
    document_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    forwards: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    peak_cache_bytes: int = 0
    pool_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Answer:
    """The answer to one question, with the margins that were written for it.

    `strategy` is the one that was used: a document that fits one segment is answered `plain`.
    `segments` are those the answer rests on: the segments of the kept margins, or all that were
    read where the answer was given over the whole context.
    """

    text: str
    margins: list[Margin]
    segments: list[Segment]
    usage: Usage
    finish_reason: FinishReason
    strategy: str
    model: str

    def __str__(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        return {
            "answer": self.text,
            "margins": [margin.to_dict() for margin in self.margins],
            "segments": [segment.to_dict() for segment in self.segments],
            "usage": self.usage.to_dict(),
            "finish_reason": self.finish_reason,
            "strategy": self.strategy,
            "model": self.model,
        }


@dataclass(frozen=True)
class Progress:
    """How far the document is read. `tokens_per_second` and `seconds_left` are `None` at first."""

    tokens: int
    total: int
    tokens_per_second: float | None
    seconds_left: float | None
    phase: Phase

    def to_dict(self) -> dict[str, Any]:
        return {"event": "progress", **asdict(self)}


@dataclass(frozen=True)
class MarginStarted:
    """A margin is about to be written. Several may be in the writing at once."""

    margin: Margin

    def to_dict(self) -> dict[str, Any]:
        return {"event": "margin_started", "segment": self.margin.segment.to_dict()}


@dataclass(frozen=True)
class MarginToken:
    """`text` was appended to the margin."""

    margin: Margin
    text: str

    def to_dict(self) -> dict[str, Any]:
        return {"event": "margin_token", "segment": self.margin.segment.index, "text": self.text}


@dataclass(frozen=True)
class MarginWritten:
    """The margin is complete and judged."""

    margin: Margin

    def to_dict(self) -> dict[str, Any]:
        return {"event": "margin_written", "margin": self.margin.to_dict()}


@dataclass(frozen=True)
class AnswerToken:
    """`text` was appended to the answer."""

    text: str

    def to_dict(self) -> dict[str, Any]:
        return {"event": "answer_token", "text": self.text}


@dataclass(frozen=True)
class Done:
    """The last event of every read, also of one that was cancelled."""

    answer: Answer

    def to_dict(self) -> dict[str, Any]:
        return {"event": "done", **self.answer.to_dict()}


Event = Progress | MarginStarted | MarginToken | MarginWritten | AnswerToken | Done
