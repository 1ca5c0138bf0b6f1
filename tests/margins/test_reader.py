"""The pattern against a second implementation: plain uncached forwards, one step at a time."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from postil.engine.drafting import Lookup
from postil.engine.loading import prepare
from postil.engine.sampling import Generation, Sampling
from postil.errors import ContextOverflow
from postil.margins.context import Context
from postil.margins.events import (
    Answer,
    AnswerToken,
    Done,
    Event,
    MarginStarted,
    MarginToken,
    MarginWritten,
    Progress,
    Segment,
)
from postil.margins.planner import BALANCED, BATCH, EAGER, STRETCH, Policy
from postil.margins.prompts import Prompts, shared_length
from postil.margins.reader import Options, Reader
from tests.tiny import plain_logits, tiny_network, tiny_tokenizer

TEXTS = [
    "The ferry leaves at nine. It carries sheep and post.\n\n",
    "The keeper of the light is called Solveig, and she reads the gauge twice a day.\n\n",
    "Dues are paid at the harbour office, before noon.\n\n",
    "In winter the quay is closed to boats of more than forty feet.\n\n",
    "Admiral is a pony. He pulls the lifeboat down to the water.",
]
QUESTION = "Who keeps the light?"
OPTIONS = Options("margins", margin_tokens=12, answer_tokens=15)
ONE_BY_ONE = Policy(slice_tokens=11, beside_first=0, beside=0, together=1, draft_tokens=0)
STEADY = Policy(slice_tokens=20, beside_first=2, beside=2, draft_tokens=0)


def make_loaded(name: str = "llama", window: int = 1024) -> Any:
    tokenizer = tiny_tokenizer()
    return prepare(name, tiny_network(name, len(tokenizer), window), tokenizer)


def make_context(loaded: Any, texts: list[str] = TEXTS) -> tuple[Context, Prompts]:
    prompts = Prompts(loaded.tokenizer)
    segments, at = [], 0
    for index, text in enumerate(texts):
        segments.append(Segment(index, "text", at, at + len(text), None, text))
        at += len(text)
    return Context(loaded, prompts.opening, segments, [prompts.encode(t) for t in texts]), prompts


def ask(
    context: Context, prompts: Prompts, policy: Policy = BALANCED, options: Options = OPTIONS
) -> tuple[Answer, list[Event]]:
    events = list(Reader(context, prompts, QUESTION, options, policy).events())
    assert isinstance(events[-1], Done)
    return events[-1].answer, events


def written(answer: Answer) -> list[tuple[str, bool, str | None]]:
    return [(margin.text, margin.kept, margin.finish_reason) for margin in answer.margins]


def overheard(prompts: Prompts, name: str, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The notes that a prompt is built from, as it happens."""
    heard: list[list[str]] = []
    build = getattr(prompts, name)

    def listen(question: str, notes: Sequence[str]) -> list[int]:
        heard.append(list(notes))
        return build(question, notes)

    monkeypatch.setattr(prompts, name, listen)
    return heard


class Plainly:
    """The method as its description has it, without a cache, on transformers' own attention."""

    def __init__(self, loaded: Any, prompts: Prompts) -> None:
        self.loaded, self.prompts = loaded, prompts
        self.stop = loaded.stop_tokens | prompts.stop_tokens

    def write(self, tokens: list[int], limit: int) -> str:
        said: list[int] = []
        while len(said) < limit:
            token = int(plain_logits(self.loaded.network, tokens + said)[-1].argmax())
            if token in self.stop:
                break
            said.append(token)
        return self.loaded.tokenizer.decode(said, skip_special_tokens=True)

    def judge(self, note: str) -> float:
        prompt = self.prompts.classify(QUESTION, note)
        p = plain_logits(self.loaded.network, prompt)[-1].softmax(0)
        both = set(self.prompts.yes) & set(self.prompts.no)
        yes = sum(float(p[t]) for t in self.prompts.yes if t not in both)
        no = sum(float(p[t]) for t in self.prompts.no if t not in both)
        return yes / (yes + no)

    def ask(self, texts: list[str], options: Options) -> tuple[str, list[str], list[float]]:
        read, notes, scores = list(self.prompts.opening), [], []
        for text in texts:
            read += self.prompts.encode(text)
            prompt = self.prompts.extract(QUESTION)
            notes.append(self.write(read + prompt, options.margin_tokens))
            scores.append(self.judge(notes[-1]) if notes[-1].strip() else 0.0)
        kept = [n for n, score in zip(notes, scores, strict=True) if score >= 0.5]
        prompt = self.prompts.answer(QUESTION, kept)
        return self.write(read + prompt, options.answer_tokens).strip(), notes, scores


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "phi3"])
def test_it_is_the_method_token_for_token(name: str) -> None:
    loaded = make_loaded(name)
    context, prompts = make_context(loaded)
    answer, _ = ask(context, prompts)
    text, notes, scores = Plainly(loaded, prompts).ask(TEXTS, OPTIONS)
    assert [margin.text for margin in answer.margins] == notes
    assert [margin.relevance for margin in answer.margins] == pytest.approx(scores, abs=1e-5)
    assert answer.text == text
    assert any(notes)  # and not only because nothing was written


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_packing_changes_nothing(temperature: float) -> None:
    options = Options("margins", 12, 15, Sampling(temperature, 0.9, seed=3))
    loaded = make_loaded()
    one_by_one, _ = ask(*make_context(loaded), ONE_BY_ONE, options)
    assert one_by_one.usage.drafted_tokens == 0
    for policy in (BALANCED, EAGER, BATCH, STEADY, Policy(7, beside=20, together=3)):
        packed, _ = ask(*make_context(loaded), policy, options)
        assert written(packed) == written(one_by_one)
        assert packed.text == one_by_one.text
        assert packed.usage.document_tokens == one_by_one.usage.document_tokens


def test_margins_that_are_written_together_share_forwards() -> None:
    loaded = make_loaded()
    one_by_one, _ = ask(*make_context(loaded), ONE_BY_ONE)
    packed, _ = ask(*make_context(loaded), Policy(draft_tokens=0))
    assert packed.usage.forwards < one_by_one.usage.forwards / 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_nothing(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is proposed: here what will be written, with a mistake here and there."""
    sampling = Sampling(temperature, seed=1, ignore_end=True)
    options = Options("margins", margin_tokens=40, answer_tokens=40, sampling=sampling)
    loaded = make_loaded()
    texts: list[list[int]] = []
    take = Generation.take

    def listen(generation: Generation, logits: torch.Tensor) -> str:
        if not generation.tokens:
            texts.append(generation.tokens)
        return take(generation, logits)

    monkeypatch.setattr(Generation, "take", listen)
    plainly, _ = ask(*make_context(loaded), Policy(draft_tokens=0), options)
    known = [list(tokens) for tokens in texts]

    def propose(_: Lookup, text: Sequence[int], limit: int) -> list[int]:
        after = next((t[len(text) :] for t in known if text and t[: len(text)] == text), [])
        wrong = len(text) % 5 + 2
        return [*after[:wrong], *([7] if len(after) > wrong else []), *after[wrong:]][
            : min(limit, 9)
        ]

    monkeypatch.setattr(Lookup, "propose", propose)
    drafted, _ = ask(*make_context(loaded), BALANCED, options)
    assert (written(drafted), drafted.text) == (written(plainly), plainly.text)
    assert texts[len(known) :] == known
    usage = drafted.usage
    assert usage.generated_tokens == plainly.usage.generated_tokens == 40 * (len(TEXTS) + 1)
    assert usage.generated_tokens / 2 < usage.accepted_tokens < usage.drafted_tokens
    assert usage.forwards < plainly.usage.forwards / 2


def test_a_text_that_repeats_is_drafted_from_what_was_read() -> None:
    loaded = make_loaded("qwen3")
    network = copy.deepcopy(loaded.network)
    for layer in network.model.layers:  # what it writes now hangs on the last token alone
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    loaded = prepare("repeats", network, loaded.tokenizer)
    options = Options("margins", 60, 60, Sampling(ignore_end=True))
    plainly, _ = ask(*make_context(loaded), Policy(draft_tokens=0), options)
    drafted, _ = ask(*make_context(loaded), BALANCED, options)
    assert (written(drafted), drafted.text) == (written(plainly), plainly.text)
    assert drafted.usage.accepted_tokens > drafted.usage.generated_tokens / 3


def test_usage_is_what_was_fed() -> None:
    context, prompts = make_context(make_loaded())
    answer, _ = ask(context, prompts)
    usage, question = answer.usage, QUESTION
    document = sum(len(prompts.encode(text)) for text in TEXTS)
    kept = [margin.text.strip() for margin in answer.margins if margin.kept]
    judged = [m.text for m in answer.margins if m.text.strip()]
    asked = len(prompts.opening) + len(TEXTS) * len(prompts.extract(question))
    stem = prompts.classify_stem(question)
    asked += len(stem) + sum(
        len(prompts.classify(question, text))
        - shared_length(prompts.classify(question, text), stem)
        for text in judged
    )
    asked += len(prompts.answer(question, kept))
    assert usage.document_tokens == document == context.total
    assert usage.prefill_tokens == document + asked
    assert usage.reused_tokens == 0
    assert usage.peak_cache_bytes <= usage.pool_bytes
    assert usage.seconds["total"] >= usage.seconds["read"] > 0


def test_a_second_question_reads_nothing_again() -> None:
    loaded = make_loaded()
    context, prompts = make_context(loaded)
    first, _ = ask(context, prompts)
    used = context.pool.used
    second, events = ask(context, prompts)
    assert (second.usage.document_tokens, second.usage.reused_tokens) == (0, context.total)
    assert (written(second), second.text) == (written(first), first.text)
    assert context.pool.used == used == context.total + len(prompts.opening)
    assert events[0] == Progress(context.total, context.total, None, None, "read")


def test_events_come_in_order() -> None:
    answer, events = ask(
        *make_context(make_loaded()), Policy(20, beside_first=9, beside=9, together=3)
    )
    for margin in answer.margins:
        mine = [e for e in events if getattr(e, "margin", None) is margin]
        assert isinstance(mine[0], MarginStarted)
        assert isinstance(mine[-1], MarginWritten)
        assert "".join(e.text for e in mine if isinstance(e, MarginToken)) == margin.text
    tokens = [event.text for event in events if isinstance(event, AnswerToken)]
    assert "".join(tokens).strip() == answer.text
    read = [event.tokens for event in events if isinstance(event, Progress)]
    assert read == sorted(read)
    assert read[-1] == answer.usage.document_tokens
    last_margin = max(i for i, e in enumerate(events) if isinstance(e, MarginWritten))
    assert last_margin < min(i for i, e in enumerate(events) if isinstance(e, AnswerToken))


def test_the_user_decides_which_margins_count(monkeypatch: pytest.MonkeyPatch) -> None:
    context, prompts = make_context(make_loaded())
    asked = overheard(prompts, "answer", monkeypatch)
    reader = Reader(context, prompts, QUESTION, OPTIONS)
    for event in reader.events():
        if isinstance(event, MarginWritten):
            keep = event.margin.segment.index % 2 == 0 and event.margin.text.strip()
            event.margin.keep() if keep else event.margin.discard()
    kept = [m.text.strip() for m in reader.margins if m.segment.index % 2 == 0 and m.text.strip()]
    assert asked[-1] == kept
    assert [m.kept for m in reader.margins] == [m.text.strip() in kept for m in reader.margins]


def test_answer_now_reads_no_further() -> None:
    loaded = make_loaded()
    context, prompts = make_context(loaded)
    reader = Reader(context, prompts, QUESTION, OPTIONS, STEADY)
    for event in reader.events():
        if isinstance(event, MarginWritten):
            reader.answer_now()
    assert isinstance(event, Done)
    assert 0 < event.answer.usage.document_tokens < context.total
    assert len(event.answer.margins) < len(TEXTS)
    assert event.answer.text
    assert {s.index for s in event.answer.segments} <= {0, 1}
    # What it did read is what a plain forward over it would say.
    read = context.pool.tokens(context.windows[0].sequence)
    notes = [m.text.strip() for m in event.answer.margins if m.kept]
    plainly = Plainly(loaded, prompts).write(read + prompts.answer(QUESTION, notes), 15)
    assert event.answer.text == plainly.strip()
    # The rest is read by the next question.
    later, _ = ask(context, prompts)
    fresh, _ = ask(*make_context(loaded))
    assert (written(later), later.text) == (written(fresh), fresh.text)
    assert later.usage.document_tokens == context.total - event.answer.usage.document_tokens


def test_half_a_margin_does_not_count_when_answering_now() -> None:
    context, prompts = make_context(make_loaded())
    reader = Reader(context, prompts, QUESTION, OPTIONS)
    for event in reader.events():
        if isinstance(event, MarginToken):
            reader.answer_now()
    assert isinstance(event, Done)
    assert {(m.finish_reason, m.kept) for m in event.answer.margins} == {("cancelled", False)}
    assert event.answer.text


def test_something_is_read_before_answering_now() -> None:
    context, prompts = make_context(make_loaded())
    reader = Reader(context, prompts, QUESTION, OPTIONS, STEADY)
    reader.answer_now()
    *_, done = reader.events()
    assert isinstance(done, Done)
    assert context.pool.tokens(context.windows[0].sequence)[:12] == prompts.opening[:12]
    assert 0 < done.answer.usage.document_tokens <= 20 * STRETCH


@pytest.mark.parametrize("kind", [Progress, MarginToken, MarginWritten, AnswerToken])
def test_cancel_stops_before_the_next_forward(kind: type[Event]) -> None:
    loaded = make_loaded()
    context, prompts = make_context(loaded)
    reader = Reader(context, prompts, QUESTION, OPTIONS, STEADY)
    cancelled_at = None
    for event in reader.events():
        if cancelled_at is None and isinstance(event, kind):
            reader.cancel()
            cancelled_at = context.engine.forwards
    assert isinstance(event, Done)
    assert event.answer.finish_reason == "cancelled"
    assert context.engine.forwards == cancelled_at
    assert context.pool.sequences() == [window.sequence for window in context.windows]
    answer, _ = ask(context, prompts)
    fresh, _ = ask(*make_context(loaded))
    assert (written(answer), answer.text) == (written(fresh), fresh.text)


def test_an_abandoned_read_leaves_what_was_read() -> None:
    context, prompts = make_context(make_loaded())
    events = Reader(context, prompts, QUESTION, OPTIONS).events()
    next(event for event in events if isinstance(event, MarginToken))
    events.close()
    assert context.pool.sequences() == [window.sequence for window in context.windows]
    assert context.read > 0


def test_plain_reads_and_answers() -> None:
    loaded = make_loaded()
    context, prompts = make_context(loaded)
    answer, _ = ask(context, prompts, options=Options("plain", answer_tokens=15))
    whole = prompts.opening + [t for text in TEXTS for t in prompts.encode(text)]
    text = Plainly(loaded, prompts).write(whole + prompts.answer(QUESTION, []), 15)
    assert (answer.text, answer.margins, answer.strategy) == (text.strip(), [], "plain")
    assert answer.segments == context.segments


def test_auto_is_plain_for_one_segment() -> None:
    loaded = make_loaded()
    options = Options(margin_tokens=12, answer_tokens=15)
    assert ask(*make_context(loaded, TEXTS[:1]), options=options)[0].strategy == "plain"
    assert ask(*make_context(loaded, TEXTS[:2]), options=options)[0].strategy == "margins"


# Documents that are longer than the window


def long_context(loaded: Any) -> tuple[Context, Prompts]:
    return make_context(loaded, [f"{i}. {text}" for i in range(4) for text in TEXTS])


def test_a_long_document_is_read_window_by_window(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = make_loaded(window=300)
    context, prompts = long_context(loaded)
    build = prompts.answer_from_notes
    asked = overheard(prompts, "answer_from_notes", monkeypatch)
    answer, _ = ask(context, prompts)
    assert len(context.windows) > 1
    assert [i for w in context.windows for i in w.segments] == list(range(20))
    assert answer.usage.document_tokens == context.total
    plainly = Plainly(loaded, prompts)
    for window in context.windows:
        read = list(prompts.opening)
        assert len(window.tokens) + len(prompts.extract(QUESTION)) + 12 <= 300
        for index in window.segments:
            read += prompts.encode(context.segments[index].text)
            note = plainly.write(read + prompts.extract(QUESTION), 12)
            assert answer.margins[index].text == note
    assert answer.text == plainly.write(build(QUESTION, asked[-1]), 15).strip()
    assert len(build(QUESTION, asked[-1])) + 15 <= 300
    assert set(answer.segments) <= set(context.segments)
    assert answer.segments

    again, _ = ask(context, prompts)
    assert again.usage.document_tokens == 0
    assert (written(again), again.text) == (written(answer), answer.text)


def test_margins_of_margins_are_written_until_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = make_loaded(window=300)
    context, prompts = long_context(loaded)
    reader = Reader(context, prompts, QUESTION, OPTIONS)
    condensed = overheard(prompts, "condense", monkeypatch)
    for event in reader.events():
        if isinstance(event, MarginWritten):
            event.margin.keep()
    assert isinstance(event, Done)
    first_round = [note for notes in condensed if notes for note in notes]
    assert [m.text.strip() for m in reader.margins if m.text.strip()] == first_round[:20]
    assert event.answer.text
    assert event.answer.segments == [m.segment for m in reader.margins if m.text.strip()]


def test_plain_says_when_the_document_does_not_fit() -> None:
    context, prompts = long_context(make_loaded(window=300))
    with pytest.raises(ContextOverflow, match="strategy margins"):
        ask(context, prompts, options=Options("plain", answer_tokens=15))
    answer, _ = ask(context, prompts)  # and nothing was changed by it
    assert answer.text


def test_a_question_longer_than_the_window_says_so() -> None:
    context, prompts = make_context(make_loaded(window=300))
    with pytest.raises(ContextOverflow, match="shorter question"):
        Reader(context, prompts, "why? " * 300, OPTIONS)
    assert context.windows == []
    assert ask(context, prompts)[0].text


def test_a_later_question_may_be_longer() -> None:
    loaded = make_loaded()
    context, prompts = make_context(loaded)
    ask(context, prompts)
    options = Options("margins", margin_tokens=40, answer_tokens=300)
    grown, _ = ask(context, prompts, options=options)
    fresh, _ = ask(*make_context(loaded), options=options)
    assert (written(grown), grown.text) == (written(fresh), fresh.text)
    assert grown.usage.document_tokens == 0


def test_a_margin_may_have_more_tokens_when_it_is_read_again() -> None:
    loaded = make_loaded()
    context, prompts = make_context(loaded)
    build = prompts.classify
    prompts.classify = lambda question, note: build(question, note) + [9] * 400 * bool(note)  # type: ignore[method-assign]
    answer, _ = ask(context, prompts)
    fresh, _ = ask(*make_context(loaded))
    assert [margin.text for margin in answer.margins] == [margin.text for margin in fresh.margins]
    assert all(margin.relevance is not None for margin in answer.margins)
