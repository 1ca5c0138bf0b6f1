"""The user's cache folder, and writing into it so that nothing half-written is ever used."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from platformdirs import user_cache_path

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)  # what an `OSError` says of a full disk

# A process that was killed outright leaves its folder; by then none is still at work in it.
_ABANDONED_AFTER_SECONDS = 24 * 3600


def cache_folder() -> Path:
    """`$POSTIL_CACHE`, or where this system keeps what can be fetched or made again."""
    moved = os.environ.get("POSTIL_CACHE")
    return (Path(moved).expanduser() if moved else user_cache_path("postil")).absolute()


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A folder in `parent` for files on their way; it is gone afterwards, whatever happens.

    What is complete is moved out of it with `os.replace`, so nothing half-written has a name that
    anybody looks for.
    """
    parent.mkdir(parents=True, exist_ok=True)
    for folder in parent.glob(".scratch-*"):
        with suppress(OSError):  # another process has just removed it
            if time.time() - folder.stat().st_mtime > _ABANDONED_AFTER_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(
        dir=parent, prefix=".scratch-", ignore_cleanup_errors=True
    ) as scratch:
        yield Path(scratch)
