"""The library as its users hold it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import postil
from postil.engine.loading import prepare
from postil.notebook.model import Model
from tests.tiny import tiny_network, tiny_tokenizer

TEXT = "".join(f"Rule {i}. Boats of class {i * 7} lie at berth {i * 3}.\n\n" for i in range(12))
SHORT: dict[str, Any] = {"margin_tokens": 6, "answer_tokens": 8}


@pytest.fixture
def model() -> Model:
    tokenizer = tiny_tokenizer()
    return Model(prepare("tiny", tiny_network("llama", len(tokenizer), 1024), tokenizer))


def test_several_documents_keep_their_places(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "rules.md"
    path.write_text(TEXT)
    book = model.open(path, "The keeper is Solveig.", segment_tokens=90)
    assert {segment.source for segment in book.segments} == {str(path), "text"}
    for document in book.documents:
        mine = [s for s in book.segments if s.source == document.source]
        assert "".join(segment.text for segment in mine) == document.text
        assert all(document.text[s.start : s.end] == s.text for s in mine)
    assert [segment.index for segment in book.segments] == list(range(len(book.segments)))


def test_ask_and_stream_say_the_same(model: Model) -> None:
    asked = model.open(TEXT, segment_tokens=90).ask("Where do boats lie?", **SHORT)
    stream = model.open(TEXT, segment_tokens=90).stream("Where do boats lie?", **SHORT)
    *_, done = stream
    assert isinstance(done, postil.Done)
    assert str(asked) == done.answer.text
    assert [m.text for m in stream.margins] == [m.text for m in asked.margins]
    assert json.loads(json.dumps(asked.to_dict()))["answer"] == asked.text


def test_a_second_question_reads_nothing(model: Model) -> None:
    book = model.open(TEXT, segment_tokens=90)
    first = book.ask("Where do boats lie?", **SHORT)
    second = book.ask("Which class lies at berth 3?", **SHORT)
    assert first.usage.document_tokens == book.document_tokens
    assert (second.usage.document_tokens, second.usage.reused_tokens) == (0, book.document_tokens)


def test_one_stream_at_a_time(model: Model) -> None:
    book = model.open(TEXT, segment_tokens=90)
    stream = book.stream("Where do boats lie?", **SHORT)
    next(stream)
    with pytest.raises(postil.PostilError, match="close"):
        book.ask("Who?", **SHORT)
    stream.close()
    assert (
        book.ask("Who?", **SHORT).text
        == model.open(TEXT, segment_tokens=90).ask("Who?", **SHORT).text
    )


def test_a_stream_that_nobody_holds_is_over(model: Model) -> None:
    book = model.open(TEXT, segment_tokens=90)
    unread = book.stream("Where do boats lie?", **SHORT)
    for event in book.stream("Where do boats lie?", **SHORT):
        if isinstance(event, postil.MarginToken):
            break
    answer = book.ask("Where do boats lie?", **SHORT)
    assert (
        answer.text == model.open(TEXT, segment_tokens=90).ask("Where do boats lie?", **SHORT).text
    )
    *_, done = unread
    assert isinstance(done, postil.Done)
    assert done.answer.text == answer.text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"strategy": "guess"}, "strategy"),
        ({"margin_tokens": 0}, "margin_tokens"),
        ({"answer_tokens": -1}, "answer_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
    ],
)
def test_options_that_make_no_sense(model: Model, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        model.open(TEXT).stream("Where?", **options)


def test_what_cannot_be_opened_or_asked(model: Model) -> None:
    with pytest.raises(ValueError, match="document"):
        model.open()
    with pytest.raises(postil.DocumentError):
        model.open(b"\x00\x01\x02\x00\xff")
    with pytest.raises(ValueError, match="segment_tokens"):
        model.open(TEXT, segment_tokens=5000)
    with pytest.raises(ValueError, match="question"):
        model.open(TEXT).ask(" \n")


def test_the_description_is_true(model: Model) -> None:
    described = json.loads(json.dumps(model.describe().to_dict()))
    assert described["largest_error"] < 1e-5
    assert described["architecture"] == "LlamaForCausalLM"
    assert described["layer_kinds"] == {"full_attention": 3}
    assert (described["heads"], described["kv_heads"], described["head_dim"]) == (4, 2, 8)
    assert described["cache_bytes_per_token"] == 3 * 2 * 2 * 8 * 4
    network = model.loaded.network
    assert described["weight_bytes"] == 4 * sum(p.numel() for p in network.parameters())


def test_the_self_test_finds_what_is_wrong(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    from postil.kv.visibility import Group

    monkeypatch.setattr(
        Group, "mask", lambda group, window, repeat=1: 0.0 * mask(group, None, repeat)
    )
    assert model.describe().largest_error > 1e-2


def mask(group: Any, window: int | None, repeat: int) -> Any:
    """A mask of the right shape that hides nothing."""
    import torch

    rows = (group.rows.stop - group.rows.start) * repeat
    return torch.zeros(rows, group.cells.stop - group.cells.start)


def test_public_names_come_when_they_are_used() -> None:
    for name in postil.__all__:
        assert getattr(postil, name) is not None
    assert set(postil.__all__) == set(dir(postil))
    with pytest.raises(AttributeError):
        postil.no_such_name  # noqa: B018
    code = "import sys, postil; assert 'torch' not in sys.modules; postil.__version__"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
