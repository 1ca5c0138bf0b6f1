"""One function for each format: from the bytes of a file to a `Document`.

Every function takes the bytes and the name to call them by. It raises `DocumentError` for what
the user can mend; `reading` turns whatever else a library raises into one.
"""

from __future__ import annotations

import codecs
import io
import re
import threading
import zipfile
from contextlib import closing
from itertools import accumulate
from posixpath import dirname, join, normpath
from typing import TYPE_CHECKING
from urllib.parse import unquote
from xml.etree import ElementTree

from postil.documents.document import Document
from postil.errors import DocumentError

if TYPE_CHECKING:
    from pypdfium2 import PdfDocument

# The libraries are imported where they are used: together they take 0.2 s, and most runs need
# none or one of them.

MOST_BYTES = 512 * 2**20  # of a file; many times what any model reads
# Of the markup in an archive; its trees take some 30 times that in memory.
MOST_BYTES_OF_MARKUP = 64 * 2**20
# The spine of an EPUB may also name pictures, such as its cover.
_CHAPTER_TYPES = ("application/xhtml+xml", "text/html", "text/x-oeb1-document")
_MARKUP_SUFFIXES = (".xml", ".xhtml", ".html", ".htm", ".opf")

# The longer marks come first: that of UTF-32-LE begins with that of UTF-16-LE.
_BYTE_ORDER_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
# PDFium marks with these a hyphen at the end of a line that only breaks a word.
_BROKEN_WORD = re.compile("[\x02\ufffe](\r\n)?")
_BLANK_LINES = re.compile(r"\n{3,}")

# PDFium may not be entered by two threads at once.
_pdfium_lock = threading.Lock()


def normalise_newlines(text: str) -> str:
    """The text with `\\n` at the end of every line."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def decode(data: bytes, source: str) -> str:
    """The text of bytes in UTF-8, in what their byte order mark says, or in what they look like.

    Raises:
        DocumentError: the bytes are no text.
    """
    encoding = next((e for mark, e in _BYTE_ORDER_MARKS.items() if data.startswith(mark)), "utf-8")
    try:
        text: str | None = data.decode(encoding)
    except UnicodeDecodeError:
        text = _decode_by_guess(data)
    if text is None or "\0" in text:
        raise DocumentError(
            f"{source} is not a text that can be decoded: "
            "give text in UTF-8, HTML, PDF, DOCX or EPUB."
        )
    return normalise_newlines(text)


def _decode_by_guess(data: bytes) -> str | None:
    """The text in UTF-8 with a few damaged characters, or in the likeliest older character set.

    `None` if it looks like neither.
    """
    import charset_normalizer

    text = data.decode("utf-8", "replace")
    damaged = text.count("\ufffd")
    not_ascii = len(text) - len(text.encode("ascii", "ignore"))
    # In older character sets next to nothing but ASCII happens to be valid UTF-8.
    if 10 * damaged <= not_ascii:
        return text

    # Any two bytes are some character in UTF-16, so without its mark it is too ready a guess.
    guess = charset_normalizer.from_bytes(
        data, cp_exclusion=["utf_16", "utf_16_le", "utf_16_be", "utf_32"]
    ).best()
    return None if guess is None else str(guess)


def read_text(data: bytes, source: str) -> Document:
    """Plain text, Markdown, source code: as it stands."""
    return Document(source, decode(data, source))


def read_html(data: bytes, source: str) -> Document:
    """HTML as it would be laid out in a terminal: lists and tables keep their shape."""
    return Document(source, text_of_html(decode(data, source)))


def text_of_html(markup: str) -> str:
    """What a reader of the page would see, without runs of blank lines."""
    from inscriptis import Inscriptis
    from lxml.etree import ParserError
    from lxml.html import HTMLParser, document_fromstring

    markup = re.sub(r"^\s*<\?xml[^>]*\?>", "", markup)  # lxml refuses a declaration in a string
    # Without `huge_tree` libxml2 drops, in silence, text longer than 10 MB and elements nested
    # deeper than 256.
    parser = HTMLParser(huge_tree=True)
    try:
        text = Inscriptis(document_fromstring(markup, parser=parser)).get_text()
    except ParserError:  # there is no element in it
        return ""
    lines = [line.rstrip() for line in text.split("\n")]
    return _BLANK_LINES.sub("\n\n", "\n".join(lines)).strip("\n") + "\n"


def read_pdf(data: bytes, source: str) -> Document:
    """The text layer of a PDF, page after page, with an empty line after each."""
    from pypdfium2 import PdfDocument, PdfiumError
    from pypdfium2.raw import FPDF_ERR_PASSWORD, FPDF_ERR_SECURITY

    with _pdfium_lock:
        try:
            pdf = PdfDocument(data)
        except PdfiumError as error:
            if error.err_code in (FPDF_ERR_PASSWORD, FPDF_ERR_SECURITY):
                raise DocumentError(
                    f"{source} is encrypted: remove the password and try again."
                ) from None
            raise
        with closing(pdf):
            pages = [_text_of_page(pdf, index) for index in range(len(pdf))]
    if not any(pages):
        raise DocumentError(
            f"{source} has no text layer, it may be a scan: run OCR on it and try again."
        )
    page_starts = accumulate(map(len, pages[:-1]), initial=0)
    return Document(source, "".join(pages), tuple(page_starts))


def _text_of_page(pdf: PdfDocument, index: int) -> str:
    """The text of one page and an empty line, or nothing at all."""
    with closing(pdf[index]) as page, closing(page.get_textpage()) as text_page:
        text = _BROKEN_WORD.sub("", text_page.get_text_bounded())
    text = normalise_newlines(text).strip()
    return f"{text}\n\n" if text else ""


def read_docx(data: bytes, source: str) -> Document:
    """The body and the notes of a Word document."""
    import mammoth

    _open_archive(data, source)
    # Pictures are left out: they would come as long strings of base64.
    no_picture = mammoth.images.img_element(lambda image: {})
    html = mammoth.convert_to_html(io.BytesIO(data), convert_image=no_picture).value
    return Document(source, text_of_html(html))


def read_epub(data: bytes, source: str) -> Document:
    """The chapters of an EPUB in reading order (EPUB 3.3, sections 4.2.6.3 and 5.7)."""
    archive = _open_archive(data, source)
    container = ElementTree.fromstring(archive.read("META-INF/container.xml"))
    package_path = container.findall(".//{*}rootfile")[0].attrib["full-path"]
    package = ElementTree.fromstring(archive.read(package_path))
    items = {item.attrib["id"]: item.attrib for item in package.iterfind(".//{*}item")}
    encrypted = _encrypted_in(archive)
    chapters = []
    for reference in package.iterfind(".//{*}itemref"):
        item = items[reference.attrib["idref"]]
        if item["media-type"] not in _CHAPTER_TYPES:
            continue
        path = normpath(join(dirname(package_path), unquote(item["href"])))
        if path in encrypted:
            raise DocumentError(f"{source} is encrypted (DRM): give a copy of it that is not.")
        chapters.append(text_of_html(decode(archive.read(path), f"{source} ({path})")))
    return Document(source, "\n".join(chapters))


def _encrypted_in(archive: zipfile.ZipFile) -> set[str]:
    """The files of an EPUB that are encrypted; often these are only fonts."""
    if "META-INF/encryption.xml" not in archive.namelist():
        return set()
    encryption = ElementTree.fromstring(archive.read("META-INF/encryption.xml"))
    return {unquote(data.attrib["URI"]) for data in encryption.iterfind(".//{*}CipherReference")}


def kind_of_archive(data: bytes) -> str | None:
    """`"DOCX"` or `"EPUB"` where the ZIP archive `data` is one of them."""
    try:
        names = zipfile.ZipFile(io.BytesIO(data)).namelist()
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError):
        return None
    if "META-INF/container.xml" in names:
        return "EPUB"
    return "DOCX" if any(name.startswith("word/") for name in names) else None


def _open_archive(data: bytes, source: str) -> zipfile.ZipFile:
    """The archive, unless what is packed in it would fill the memory."""
    archive = zipfile.ZipFile(io.BytesIO(data))
    markup = [entry for entry in archive.infolist() if entry.filename.endswith(_MARKUP_SUFFIXES)]
    if sum(entry.file_size for entry in markup) > MOST_BYTES_OF_MARKUP:
        raise DocumentError(
            f"{source} holds more than {MOST_BYTES_OF_MARKUP >> 20} MiB of text: "
            "split it into smaller files."
        )
    return archive
