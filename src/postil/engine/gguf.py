"""Is a GGUF file whole? Told from its header, before a minute is spent on reading it."""

from __future__ import annotations

import math
import mmap
import os
import struct

from postil.errors import ModelNotFound

_STRING, _ARRAY = 8, 9
_BYTES_OF_KIND = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_DEFAULT_ALIGNMENT = 32


def check(name: str, path: str) -> None:
    """Refuse what is no GGUF, or not a whole one.

    Args:
        name: what the user calls the file.
        path: of the file. Only its header is read.

    Raises:
        ModelNotFound: with the reason.
    """
    try:
        with open(path, "rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelNotFound(
                    f"{name} is not a GGUF file: give the path of one, or of a model folder"
                )
            size = os.path.getsize(path)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                whole = _Header(data).end_of_tensors() <= size
    except OSError as error:
        raise ModelNotFound(
            f"{name} cannot be read ({error.strerror or error}): check the file and its permissions"
        ) from error
    # What damaged bytes run into: an end too early, a kind that does not exist, a length too large.
    except (struct.error, KeyError, ValueError, ArithmeticError):
        whole = False
    if not whole:
        raise ModelNotFound(
            f"{name} is cut short or damaged (it has {size:,} bytes): copy or download it again"
        )


class _Header:
    """The start of a GGUF (version 2 or 3 of the format), read for what it says of the tensors.

    The reader of the package `gguf` makes an object of every word of the vocabulary, which takes
    it 3 s (49,152 words); this one steps over them.
    """

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 4  # behind the magic number

    def end_of_tensors(self) -> int:
        """How many bytes the file needs to hold every tensor that its header names."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        _version, tensors, entries = self._take("IQQ")
        alignment = _DEFAULT_ALIGNMENT
        for _ in range(entries):
            key = self._string()
            (kind,) = self._take("I")
            if key == b"general.alignment":
                (alignment,) = self._take("I")
            else:
                self._skip(kind)
        end = 0
        for _ in range(tensors):
            self._string()
            (dimensions,) = self._take("I")
            *shape, kind, offset = self._take(f"{dimensions}QIQ")
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
            end = max(end, offset + math.prod(shape) // block * block_bytes)
        return -(-self.at // alignment) * alignment + end

    def _take(self, layout: str) -> tuple[int, ...]:
        values = struct.unpack_from(f"<{layout}", self.data, self.at)
        self.at += struct.calcsize(f"<{layout}")
        return values

    def _string(self) -> bytes:
        (length,) = self._take("Q")
        self.at += length
        return self.data[self.at - length : self.at]

    def _skip(self, kind: int) -> None:
        count = 1
        if kind == _ARRAY:
            kind, count = self._take("IQ")
        if kind == _STRING:
            for _ in range(count):
                self._string()
        else:
            self.at += count * _BYTES_OF_KIND[kind]
