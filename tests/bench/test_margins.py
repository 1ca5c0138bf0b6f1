"""What a benchmark reports is what was read and timed."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from PIL import Image

from postil.bench.margins import Timing, measure
from postil.bench.plots import plot
from postil.bench.workload import Workload
from postil.margins.planner import BALANCED
from postil.margins.prompts import Prompts
from postil.notebook.model import Model, load
from tests.tiny import tiny_tokenizer

SMALL = Workload(60, 20, 4)


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> Model:
    return load(tiny_model_dir, dtype="float32")


class Clock:
    """A peer that notes what it is asked to read, and always takes as long."""

    name = "clock"

    def __init__(self) -> None:
        self.read: list[tuple[str, list[list[int]]]] = []

    def plain(self, segments: list[list[int]]) -> float:
        self.read.append(("plain", segments))
        return 2.0

    def margins(self, segments: list[list[int]], margin_tokens: int) -> Timing:
        self.read.append((f"margins of {margin_tokens}", segments))
        return Timing(3.0, 1.5)


def test_every_system_reads_every_workload_in_turn(model: Model) -> None:
    clock = Clock()
    labels: list[tuple[int, int, str]] = []
    long = Workload(40, 40, 3)
    result = measure(
        model,
        [SMALL, long],
        peers=[clock],
        runs=2,
        progress=lambda done, total, label: labels.append((done, total, label)),
    )
    assert [(row.who, row.document_tokens) for row in result.rows] == [
        ("postil", 60),
        ("clock", 60),
        ("postil", 40),
        ("clock", 40),
    ]
    ours, theirs = result.rows[:2]
    assert (theirs.plain_s, theirs.margins_s, theirs.ratio) == (2.0, 3.0, 1.5)
    assert theirs.first_margin_share == 0.5
    assert (theirs.second_question_s, theirs.second_question_share, theirs.usage) == (None,) * 3
    assert ours.ratio == ours.margins_s / ours.plain_s
    for kind, seconds in ours.every.items():
        assert len(seconds) == 2
        assert getattr(ours, kind) == statistics.median(seconds)
    assert 0 < ours.every["first_margin_s"][0] <= ours.every["margins_s"][0]
    assert ours.every["margins_s"][0] < ours.every["first_question_s"][0]
    assert labels[0][:2] == (0, 16)
    assert labels[-1][:2] == (16, 16)
    # After warming up: plain and margins by turns, another document each time.
    kinds = [kind for kind, _ in clock.read[2:]]
    assert kinds == ["plain", "margins of 4"] * 2 + ["plain", "margins of 3"] * 2
    documents = [segments for _, segments in clock.read[2:6]]
    assert all(one != other for one in documents for other in documents if one is not other)
    assert {tuple(map(len, segments)) for segments in documents} == {(20, 20, 20)}


def test_our_own_read_is_the_pattern(model: Model) -> None:
    (row,) = measure(model, [SMALL], runs=1).rows
    assert row.usage is not None
    assert row.usage["document_tokens"] == 60
    assert row.usage["generated_tokens"] == 4 * (3 + 1)  # margins and answer, all of full length
    assert row.second_question_s is not None


def test_a_document_longer_than_the_window_is_measured_too(model: Model) -> None:
    (row,) = measure(model, [Workload(4000, 500, 2)], runs=1).rows
    assert model.window < 4000
    assert row.usage is not None
    assert row.usage["document_tokens"] == 4000


def test_a_text_of_ones_own_is_read_from_its_beginning() -> None:
    prompts = Prompts(tiny_tokenizer())
    text = "The keeper of the light is called Solveig. " * 20
    segments = SMALL.segments(prompts, 0, text)
    assert [token for tokens in segments for token in tokens] == prompts.encode(text)[:60]
    assert SMALL.segments(prompts, 1, text) != segments
    with pytest.raises(ValueError, match="longer"):
        SMALL.segments(prompts, 500, text)


def test_segments_must_fill_the_document() -> None:
    with pytest.raises(ValueError, match="whole number"):
        Workload(100, 30, 4)


def test_results_are_json_and_a_picture(model: Model, tmp_path: Path) -> None:
    workloads = [SMALL, Workload(40, 20, 4), Workload(40, 40, 3)]
    result = measure(model, workloads, peers=[Clock()], runs=1, policy=BALANCED)
    assert json.loads(json.dumps(result.to_dict()))["rows"][1]["who"] == "clock"
    plot(result, tmp_path / "margins.png")
    with Image.open(tmp_path / "margins.png") as picture:
        picture.load()
        assert picture.width > picture.height > 100
