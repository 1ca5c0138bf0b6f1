"""Peers write what the same model writes plainly, and a server is asked what it should be."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from postil.bench import decode
from postil.bench.peers import Server, Transformers, peers
from postil.bench.workload import QUESTION
from postil.engine import loading
from postil.engine.loading import Loaded
from postil.errors import BackendError
from postil.margins.prompts import Prompts
from postil.notebook.model import load
from tests.tiny import plain_logits, tiny_tokenizer

SEGMENTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13]]


def load_plain(folder: Path) -> Loaded:
    return loading.load(folder, dtype="float32", pack=False)


def test_transformers_writes_one_margin_after_the_other(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = Transformers(load_plain(tiny_model_dir))
    fed: list[list[int]] = []
    given: list[int] = []
    feed = peer._next

    def listen(tokens: list[int], cache: Any) -> int:
        fed.append(tokens)
        given.append(feed(tokens, cache))
        return given[-1]

    monkeypatch.setattr(peer, "_next", listen)
    timing = peer.margins(SEGMENTS, 3)
    assert timing.first_margin_s is not None
    assert 0 < timing.first_margin_s < timing.margins_s
    extract = Prompts(tiny_tokenizer()).extract(QUESTION)
    network, read, want = load_plain(tiny_model_dir).network, list[int](), list[list[int]]()
    for tokens in SEGMENTS:
        read += tokens
        want += [tokens, extract]
        said = [*read, *extract]
        for left in (2, 1, 0):
            said.append(int(plain_logits(network, said)[-1].argmax()))
            want += [[said[-1]]] if left else []
    assert fed == want


def test_generate_is_compared_with_as_many_tokens(tiny_model_dir: Path) -> None:
    model = load(tiny_model_dir, dtype="float32")
    peer = Transformers(load_plain(tiny_model_dir))
    result = decode.measure(model, peer, cached_tokens=200, new_tokens=8, runs=2)
    assert (result.cached_tokens, result.new_tokens) == (200, 8)
    assert all(len(rates) == 2 and min(rates) > 0 for rates in result.every.values())
    assert result.plain == pytest.approx(sum(result.every["plain"]) / 2)


class Handler(BaseHTTPRequestHandler):
    """As much of an OpenAI-compatible server as is asked."""

    asked: ClassVar[list[tuple[str, dict[str, Any]]]]
    fail = False

    def do_GET(self) -> None:
        self._answer(json.dumps({"data": [{"id": "tiny"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(("begin", body))
        if self.fail:
            self.send_error(503)
            return
        self._answer('data: {"choices": [{"text": "a"}]}\n\n', end=False)
        self.server.gate.wait(0.2)  # type: ignore[attr-defined]
        self.wfile.write(b"data: [DONE]\n\n")
        self.asked.append(("end", body))

    def _answer(self, text: str, *, end: bool = True) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())
        self.wfile.flush()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, type[Handler]]]:
    class Mine(Handler):
        asked: ClassVar = []

    serving = ThreadingHTTPServer(("127.0.0.1", 0), Mine)
    serving.gate = threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=serving.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{serving.server_port}/v1", Mine
    serving.shutdown()
    thread.join()
    serving.server_close()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_server_gets_a_request_for_each_margin(
    server: tuple[str, type[Handler]], *, overlap: bool
) -> None:
    url, handler = server
    prompts = Prompts(tiny_tokenizer())
    peer = Server(url, prompts, overlap=overlap)
    timing = peer.margins(SEGMENTS, 9)
    assert timing.first_margin_s is not None
    assert 0 < timing.first_margin_s <= timing.margins_s
    extract, bodies = prompts.extract(QUESTION), [b for k, b in handler.asked if k == "begin"]
    assert [body["prompt"] for body in bodies] == [
        [*SEGMENTS[0], *extract],
        [*SEGMENTS[0], *SEGMENTS[1], *extract],
    ]
    assert {(b["model"], b["max_tokens"], b["temperature"]) for b in bodies} == {("tiny", 9, 0)}
    order = [kind for kind, _ in handler.asked]
    assert order == (["begin", "begin", "end", "end"] if overlap else ["begin", "end"] * 2)
    peer.plain(SEGMENTS)
    assert handler.asked[-1][1]["prompt"] == [*SEGMENTS[0], *SEGMENTS[1]]
    assert handler.asked[-1][1]["max_tokens"] == 1


def test_a_server_that_fails_is_reported(server: tuple[str, type[Handler]]) -> None:
    url, handler = server
    peer = Server(url, Prompts(tiny_tokenizer()), overlap=True)
    handler.fail = True
    with pytest.raises(BackendError, match="503"):
        peer.margins(SEGMENTS, 9)


def test_peers_are_named_by_what_they_are(tiny_model_dir: Path) -> None:
    found = peers(["transformers"], lambda: load_plain(tiny_model_dir))
    assert [peer.name for peer in found] == ["transformers"]
    with pytest.raises(ValueError, match="takes transformers or the URL"):
        peers(["vllm"], lambda: load_plain(tiny_model_dir))
    with pytest.raises(BackendError, match="start one"):
        peers(["http://127.0.0.1:9/v1"], lambda: load_plain(tiny_model_dir))


def test_the_network_of_a_peer_is_left_as_transformers_made_it(tiny_model_dir: Path) -> None:
    kinds = {type(module) for module in load_plain(tiny_model_dir).network.modules()}
    assert torch.nn.Linear in kinds
