"""The command line as a user meets it: one process for each test that reads, as few as will do."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from postil.cli import app

POSTIL = [sys.executable, "-P", "-c", "from postil.cli import main; main()"]
QUESTION = "Who keeps the light?"


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("documents") / "island.md"
    lines = (f"Rule {i}. Boats of class {i * 7} lie at berth {i * 3}, sir.\n\n" for i in range(20))
    path.write_text("".join(lines))
    return path


def run(
    *arguments: object, stdin: bytes = b"", **environment: str
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*POSTIL, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        env=os.environ | environment,
        timeout=120,
        check=False,
    )


SHORT = ("--segment-tokens", 150, "--margin-tokens", 8, "--answer-tokens", 12)


def test_ask_prints_the_answer_alone(tiny_model_dir: Path, document: Path) -> None:
    done = run("ask", document, QUESTION, "--model", tiny_model_dir, *SHORT)
    said = done.stderr.decode()
    assert done.returncode == 0, said
    assert "\x1b" not in said
    assert re.search(r"^1/\d+  (kept|not relevant) \d\.\d\d  ", said, re.MULTILINE)
    as_json = run("ask", document, QUESTION, "--model", tiny_model_dir, *SHORT, "--json")
    answer = json.loads(as_json.stdout)
    # What would steer a terminal is left out of what people read.
    assert (
        done.stdout.decode().strip()
        == re.sub("[\0-\x08\x0b-\x1f\x7f-\x9f]", "", answer["answer"]).strip()
    )
    text = document.read_text()
    places = [margin["segment"] for margin in answer["margins"]]
    assert [place["index"] for place in places] == list(range(len(places)))
    assert "".join(text[place["start"] : place["end"]] for place in places) == text
    assert {place["source"] for place in places} == {str(document)}
    assert set(answer["margins"][0]) == {"text", "relevance", "kept", "segment"}
    assert set(places[0]) == {"index", "source", "start", "end", "page"}
    assert answer["strategy"] == "margins"
    assert answer["model"] == str(tiny_model_dir)
    assert answer["usage"]["document_tokens"] > 0


def test_events_come_one_a_line(tiny_model_dir: Path) -> None:
    document = b"The keeper of the light is Solveig."
    done = run("ask", "-", QUESTION, "-m", tiny_model_dir, *SHORT, "--events", stdin=document)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert {"progress", "answer_token", "done"} == {event["event"] for event in events}
    assert events[-1]["event"] == "done"
    assert events[-1]["strategy"] == "plain"
    tokens = "".join(event["text"] for event in events if event["event"] == "answer_token")
    assert tokens.strip() == events[-1]["answer"]


def test_a_reader_that_goes_away_is_no_error(tiny_model_dir: Path, document: Path) -> None:
    command = [*POSTIL, "ask", str(document), QUESTION, "-m", str(tiny_model_dir), "--events"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read().decode()
        assert process.wait(timeout=60) == 1
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["ask", "missing.pdf", "why?"], 1, "no such file as missing.pdf"),
        (["ask", "empty.txt", "why?"], 1, "no text"),
        (["ask", "rubbish.pdf", "why?"], 1, "rubbish.pdf cannot be read as PDF"),
        (["ask", "word.txt", "why?", "--model", "no-such-model"], 1, "no-such-model"),
        (["ask", "word.txt", "why?", "--model", "short.gguf"], 1, "short.gguf is"),
        (["ask", "word.txt"], 2, "Name a document"),
        (["ask", "word.txt", " "], 2, "question is empty"),
        (["ask", "word.txt", "why?", "--json", "--events"], 2, "exclude"),
        (["ask", "word.txt", "why?", "--margin-tokens", "0"], 2, "margin-tokens"),
        (["ask", "word.txt", "why?", "--strategy", "guess"], 2, "strategy"),
        (["read"], 2, "No such command"),
    ],
)
def test_bad_input_gets_one_sentence(
    arguments: list[str],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from postil.cli import main

    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text(" \n")
    Path("word.txt").write_text("word")
    Path("rubbish.pdf").write_bytes(b"%PDF-1.7 \xff\x00\x01" * 9)
    Path("short.gguf").write_bytes(
        b"GGUF" + (3).to_bytes(4, "little") + (5).to_bytes(8, "little") * 2
    )
    monkeypatch.setattr(sys, "argv", ["postil", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    out, err = capfd.readouterr()
    assert stopped.value.code == code
    assert said in " ".join(err.replace("│", " ").split())
    assert out == ""
    if code == 1:
        assert err.startswith("Error: ")
        assert err.count("\n") == 1


def test_a_question_longer_than_the_window(tiny_model_dir: Path, document: Path) -> None:
    done = run("ask", document, "why " * 3000, "-m", tiny_model_dir)
    assert done.returncode == 1
    assert done.stderr.decode().splitlines()[-1].endswith("or a shorter answer.")
    assert "Traceback" not in done.stderr.decode()


def test_doctor_proves_the_model(tiny_model_dir: Path) -> None:
    done = run("doctor", tiny_model_dir, "--json", "--dtype", "float32")
    found = json.loads(done.stdout)
    assert found["model"]["architecture"] == "LlamaForCausalLM"
    assert found["model"]["largest_error"] < 1e-5
    assert found["machine"]["python"] == sys.version.split()[0]


def test_models_list_and_help_need_no_torch() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from postil.cli import app\n"
        "for words in (['--help'], ['ask', '--help'], ['models', 'list'], ['bench', '--help']):\n"
        "    assert CliRunner().invoke(app, words).exit_code == 0, words\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_help_teaches_by_example() -> None:
    for command in (
        ["ask"],
        ["doctor"],
        ["models", "list"],
        ["models", "pull"],
        ["bench", "margins"],
        ["bench", "decode"],
    ):
        said = CliRunner().invoke(app, [*command, "--help"]).output
        assert f"Example: postil {' '.join(command)}" in said


BENCH = ("--document-tokens", 40, "--segment-tokens", 20, "--margin-tokens", 3, "--runs", 1)


def test_a_benchmark_prints_a_table_and_keeps_json_and_a_picture(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "new" / "results"
    done = run(
        *("bench", "margins", "-m", tiny_model_dir, *BENCH, "--compare", "transformers"),
        *("--output", folder),
    )
    said = done.stdout.decode()
    assert done.returncode == 0, done.stderr
    assert re.search(r"2 x 20, margins of 3 +postil +[\d.]+ +[\d.]+ +[\d.]+ +\d+ % +\d+ %", said)
    assert re.search(r"2 x 20, margins of 3 +transformers +[\d.]+", said)
    kept = json.loads((folder / "margins.json").read_text())
    assert [row["who"] for row in kept["rows"]] == ["postil", "transformers"]
    assert (folder / "margins.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("wrong", "code", "says"),
    [
        (("--document-tokens", 50), 2, "whole number of segments"),
        (("--compare", "vllm"), 2, "--compare takes"),
        (("--compare", "http://127.0.0.1:9/v1"), 1, "start one that serves"),
        (("--eager", "--batch"), 2, "exclude each other"),
        (("--text", "no such file"), 2, "does not exist"),
        (("--text", __file__, "--document-tokens", 400_000), 2, "give a longer one"),
        (("--output", "/dev/null/there"), 2, "cannot be made"),
    ],
)
def test_a_benchmark_that_cannot_be_run_says_why(
    tiny_model_dir: Path, wrong: tuple[object, ...], code: int, says: str
) -> None:
    done = run("bench", "margins", "-m", tiny_model_dir, *BENCH, *wrong)
    assert done.returncode == code, done.stderr
    assert says in " ".join(re.sub("[\u2500-\u257f]", " ", done.stderr.decode()).split())
    assert b"Traceback" not in done.stderr


def test_decoding_is_compared(tiny_model_dir: Path) -> None:
    done = run(
        *("bench", "decode", "-m", tiny_model_dir, "--runs", 1, "--json"),
        *("--cached-tokens", 100, "--new-tokens", 4),
    )
    result = json.loads(done.stdout)
    assert result["cached_tokens"] == 100
    assert min(result["generate"], result["plain"], result["drafted"]) > 0


def test_policies_change_nothing_of_what_is_said(tiny_model_dir: Path, document: Path) -> None:
    said = {
        run("ask", document, QUESTION, "-m", tiny_model_dir, *SHORT, *options).stdout
        for options in ((), ("--eager",), ("--batch",))
    }
    assert len(said) == 1
    assert said != {b""}


# On a terminal


class Terminal:
    """A process on a terminal of its own."""

    def __init__(self, *arguments: object) -> None:
        self.ours, self.theirs = pty.openpty()
        self.before = termios.tcgetattr(self.theirs)
        self.process = subprocess.Popen(
            [*POSTIL, *map(str, arguments)],
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=self.theirs,
            start_new_session=True,
            preexec_fn=lambda: os.close(self.ours),
            env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "100"},
        )
        self.said = ""

    def wait_for(self, pattern: str, seconds: float = 60) -> None:
        until = time.monotonic() + seconds
        while not re.search(pattern, self.said):
            assert time.monotonic() < until, self.said
            self.read()

    def read(self) -> None:
        if select.select([self.ours], [], [], 0.1)[0]:
            self.said += os.read(self.ours, 1 << 16).decode(errors="replace")

    def press(self, key: str) -> None:
        os.write(self.ours, key.encode())

    def end(self) -> int:
        while self.process.poll() is None:
            self.read()
        for _ in range(3):
            self.read()
        assert termios.tcgetattr(self.theirs) == self.before, "the terminal was not restored"
        os.close(self.ours)
        os.close(self.theirs)
        return self.process.returncode


def test_margins_can_be_discarded_and_reading_ended(tiny_model_dir: Path, tmp_path: Path) -> None:
    long = tmp_path / "long.txt"
    long.write_text("".join(f"Rule {i}. Boat {i * 7} lies at berth {i}.\n\n" for i in range(3000)))
    terminal = Terminal("ask", long, QUESTION, "-m", tiny_model_dir, *SHORT)
    terminal.wait_for(r"1/\d+")
    terminal.wait_for(r"(kept|not relevant) \d\.\d\d")
    terminal.press("d")
    terminal.wait_for("discarded by you")
    terminal.press("k")
    terminal.wait_for("kept by you")
    terminal.press("a")
    assert terminal.end() == 0, terminal.said
    assert "notes from" in terminal.said
    assert "Traceback" not in terminal.said


def test_ctrl_c_stops_while_reading(tiny_model_dir: Path, tmp_path: Path) -> None:
    long = tmp_path / "long.txt"
    long.write_text("".join(f"Rule {i}. Boat {i * 7} lies at berth {i}.\n\n" for i in range(3000)))
    terminal = Terminal("ask", long, QUESTION, "-m", tiny_model_dir, *SHORT)
    terminal.wait_for(r"(kept|not relevant) \d\.\d\d")
    os.kill(terminal.process.pid, signal.SIGINT)
    assert terminal.end() == 130, terminal.said
    assert "Stopped." in terminal.said
    assert "Traceback" not in terminal.said


def test_ctrl_c_stops_while_loading(tiny_model_dir: Path, document: Path) -> None:
    terminal = Terminal("ask", document, QUESTION, "-m", tiny_model_dir)
    terminal.wait_for("Loading the model")
    os.kill(terminal.process.pid, signal.SIGINT)
    assert terminal.end() == 130, terminal.said
    assert "Traceback" not in terminal.said
