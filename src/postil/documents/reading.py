"""From whatever the user names (a path, a text, bytes) to a `Document`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import PurePath

from postil.documents import formats
from postil.documents.document import Document
from postil.errors import DocumentError

Reader = Callable[[bytes, str], Document]

READERS: dict[str, Reader] = {
    "text": formats.read_text,
    "HTML": formats.read_html,
    "PDF": formats.read_pdf,
    "DOCX": formats.read_docx,
    "EPUB": formats.read_epub,
}

_KIND_OF_SUFFIX = {
    ".html": "HTML",
    ".htm": "HTML",
    ".xhtml": "HTML",
    ".pdf": "PDF",
    ".docx": "DOCX",
    ".docm": "DOCX",
    ".epub": "EPUB",
}
_HTML_START = re.compile(
    rb"(\xef\xbb\xbf)?\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)*<(!doctype html|html)\b",
    re.IGNORECASE | re.DOTALL,
)
_SUFFIX = re.compile(r"\.(?=\w*[A-Za-z])\w{1,8}", re.ASCII)
_SURROGATE = re.compile("[\ud800-\udfff]")


def read_document(
    source: str | os.PathLike[str] | bytes | Document, name: str | None = None
) -> Document:
    """The text of a document, with the offsets of its pages where the format has pages.

    Args:
        source: a path object or a string that names a file; the content of a file as bytes; or
            the text itself as a string. A string of one line that looks like the name of a file
            (no blanks, and a path separator or a suffix; or the suffix of a PDF, DOCX or EPUB)
            is taken for one, also where no such file exists. A `Document` is given back as it is.
        name: what to call the document in place of its path; `"text"` where there is neither.
            The suffix of a name given with bytes tells the format where the bytes do not.

    Raises:
        DocumentError: there is no such file, it cannot be read or decoded, it is encrypted, or
            there is no text in it.
    """
    if isinstance(source, Document):
        return source if name is None else replace(source, source=name)
    if isinstance(source, bytes):
        document = _decode(source, name or "text", suffix_of=name or "")
    elif not isinstance(source, str) or os.path.exists(source) or _names_a_file(source):
        path = os.fsdecode(source)
        document = _decode(_read_bytes(path), name or path, suffix_of=path)
    else:
        text = formats.normalise_newlines(source.removeprefix("\ufeff"))
        document = Document(name or "text", text)
    if not document.text.strip():
        raise DocumentError(f"{document.source} has no text in it: give a document that has some.")
    # Half a surrogate pair is no character, and no tokenizer takes it.
    return replace(document, text=_SURROGATE.sub("\ufffd", document.text))


def _names_a_file(text: str) -> bool:
    if "\n" in text or not text.strip():
        return False
    suffix = PurePath(text).suffix
    if len(text.split()) > 1:
        return _KIND_OF_SUFFIX.get(suffix.lower()) in ("PDF", "DOCX", "EPUB")
    return "/" in text or os.sep in text or _SUFFIX.fullmatch(suffix) is not None


def _read_bytes(path: str) -> bytes:
    try:
        # One byte more than the limit tells a file that is too large from one that just fits;
        # asking for the size first would say 0 for pipes, which are welcome here.
        with open(os.path.expanduser(path), "rb") as file:
            data = file.read(formats.MOST_BYTES + 1)
    except FileNotFoundError:
        raise DocumentError(f"There is no such file as {path}: check the path.") from None
    except IsADirectoryError:
        raise DocumentError(f"{path} is a directory: name the files in it one by one.") from None
    except PermissionError:
        raise DocumentError(
            f"{path} may not be read by this user: change its permissions."
        ) from None
    except (OSError, ValueError, MemoryError) as error:
        raise DocumentError(f"{path} cannot be read ({_reason(error)}): check the file.") from error
    if len(data) > formats.MOST_BYTES:
        raise DocumentError(
            f"{path} is larger than {formats.MOST_BYTES >> 20} MiB: split it into smaller files."
        )
    return data


def _decode(data: bytes, source: str, suffix_of: str) -> Document:
    kind = _kind(data, PurePath(suffix_of).suffix.lower(), source)
    try:
        return READERS[kind](data, source)
    except DocumentError:
        raise
    except Exception as error:  # the libraries promise no errors of their own for broken files
        raise DocumentError(
            f"{source} cannot be read as {kind} ({_reason(error)}): "
            "check that it opens elsewhere and export it again."
        ) from error


def _kind(data: bytes, suffix: str, source: str) -> str:
    """What the content says it is; where it says nothing, what the name says."""
    if data[:1024].lstrip().startswith(b"%PDF-"):
        return "PDF"
    if data.startswith(b"PK\x03\x04"):
        kind = formats.kind_of_archive(data) or _KIND_OF_SUFFIX.get(suffix)
        if kind is None:
            raise DocumentError(
                f"{source} is an archive of an unknown kind: give text, HTML, PDF, DOCX or EPUB."
            )
        return kind
    if data.startswith(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"):
        raise DocumentError(
            f"{source} is an encrypted or old Office file: save it as DOCX without a password."
        )
    if data.startswith(b"{\\rtf"):
        raise DocumentError(f"{source} is an RTF file: save it as DOCX or as plain text.")
    if suffix in _KIND_OF_SUFFIX:
        return _KIND_OF_SUFFIX[suffix]
    # A text file may well begin with a piece of HTML, so a suffix that is not one of HTML's counts.
    return "HTML" if not suffix and _HTML_START.match(data[:4096]) else "text"


def _reason(error: BaseException) -> str:
    """The first line of what went wrong, short enough for a message of one line."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return text.strip().splitlines()[0].rstrip(".")[:100]
