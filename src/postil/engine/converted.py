"""Copies of GGUF files in transformers' own format, since unpacking takes long.

SmolLM2-135M takes 11 s from its GGUF, most of it for reading the vocabulary four times, and under
a second from such a copy (2 cores). The copy is a cache: what goes wrong with it is passed over.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers

from postil.engine.cache import cache_folder, scratch_folder
from postil.errors import UnsupportedModel

if TYPE_CHECKING:
    from postil.engine.loading import Loaded

logger = logging.getLogger(__name__)

MOST_BYTES = 2 << 30  # of a copy: nobody expects a cache of many gigabytes


def load(file: Path, dtype: torch.dtype, read: Callable[[Path, dict[str, str]], Loaded]) -> Loaded:
    """Load a GGUF file, from its copy if there is one; if not, make one for the next time.

    Args:
        file: the GGUF.
        dtype: of the weights, in memory and in the copy.
        read: loads a folder; takes options of transformers' `from_pretrained`, too.
    """
    copy = _folder(file, dtype)
    if copy.is_dir():
        try:
            return read(copy, {})
        except (UnsupportedModel, torch.OutOfMemoryError):
            raise
        except Exception:  # damaged, in whatever way
            shutil.rmtree(copy, ignore_errors=True)
    loaded = read(file.parent, {"gguf_file": file.name})
    try:
        _keep(loaded, copy)
    except Exception:
        logger.debug("%s could not be kept in %s", file, copy, exc_info=True)
    return loaded


def _folder(file: Path, dtype: torch.dtype) -> Path:
    """Where the copy is: beside those of the same file in other dtypes or before it changed."""
    path, now = file.resolve(), file.stat()
    content = _digest(now.st_size, now.st_mtime_ns, transformers.__version__)
    name = f"{path.stem[:80]}-{_digest(path)}-{content}-{str(dtype).removeprefix('torch.')}"
    return cache_folder() / "converted" / name


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:10]


def _keep(loaded: Loaded, copy: Path) -> None:
    """Write the copy, if there is plenty of space, and remove those of what the file once was."""
    if loaded.weight_bytes > MOST_BYTES:
        return
    with scratch_folder(copy.parent) as scratch:
        if shutil.disk_usage(scratch).free < 2 * loaded.weight_bytes:
            return
        loaded.network.save_pretrained(scratch / "copy")
        loaded.tokenizer.save_pretrained(scratch / "copy")
        os.replace(scratch / "copy", copy)
    file, content, _dtype = copy.name.rsplit("-", 2)
    for other in copy.parent.iterdir():
        if other.name.startswith(f"{file}-") and not other.name.startswith(f"{file}-{content}-"):
            shutil.rmtree(other, ignore_errors=True)
