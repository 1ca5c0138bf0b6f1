"""What is put into a file of each format is what comes out, on the page it was put on."""

from __future__ import annotations

import io
import os
import threading
import zipfile
from pathlib import Path

import docx
import pytest
from reportlab.lib.pdfencrypt import StandardEncryption
from reportlab.pdfgen.canvas import Canvas

from postil.documents import Document, formats, read_document
from postil.errors import DocumentError

PAGES = (
    ["The seller hands over the goods in May.", "The buyer pays within thirty days."],
    ["Either side may give notice of six weeks."],
    ["Signed in Lucerne."],
)


def pdf(*pages: list[str], password: str | None = None) -> bytes:
    file = io.BytesIO()
    encrypt = StandardEncryption(password, ownerPassword="owner") if password else None
    canvas = Canvas(file, encrypt=encrypt)
    for lines in pages:
        for number, line in enumerate(lines):
            canvas.drawString(72, 760 - 20 * number, line)
        canvas.showPage()
    canvas.save()
    return file.getvalue()


def epub(chapters: dict[str, str], spine: list[str], **more: str) -> bytes:
    items = "".join(
        f'<item id="i{n}" href="{path}" media-type="'
        f'{"image/jpeg" if path.endswith(".jpg") else "application/xhtml+xml"}"/>'
        for n, path in enumerate(chapters)
    )
    order = "".join(f'<itemref idref="i{list(chapters).index(path)}"/>' for path in spine)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("mimetype", "application/epub+zip")
        archive.writestr(
            "META-INF/container.xml",
            '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container" version="1.0">'
            '<rootfiles><rootfile full-path="OEBPS/book.opf"/></rootfiles></container>',
        )
        archive.writestr(
            "OEBPS/book.opf",
            '<package xmlns="http://www.idpf.org/2007/opf" version="3.0">'
            f"<manifest>{items}</manifest><spine>{order}</spine></package>",
        )
        for path, body in chapters.items():
            archive.writestr(
                f"OEBPS/{path.replace('%20', ' ')}",
                '<?xml version="1.0" encoding="utf-8"?>\n<!DOCTYPE html>\n'
                '<html xmlns="http://www.w3.org/1999/xhtml"><head><title/>'
                f'<script src="x.js"/></head><body><a id="top"/>{body}</body></html>',
            )
        for path, text in more.items():
            archive.writestr(path, text)
    return file.getvalue()


def message(source: object, **arguments: str) -> str:
    """What a reader is told, after checking that it is one sentence on one line."""
    with pytest.raises(DocumentError) as caught:
        read_document(source, **arguments)  # type: ignore[arg-type]
    text = str(caught.value)
    assert "\n" not in text and text.endswith(".") and ": " in text
    return text


# Paths, texts, bytes


def test_a_path_object_or_its_name_is_read_and_named_as_given(tmp_path: Path) -> None:
    path = tmp_path / "note.md"
    path.write_text("# Title\n\nA *note*.\n")
    assert read_document(path) == Document(str(path), "# Title\n\nA *note*.\n")
    assert read_document(str(path)) == read_document(path)
    assert read_document(path, name="annex").source == "annex"


def test_a_relative_name_stays_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("LICENSE").write_text("Do as you like.")
    assert read_document("LICENSE") == Document("LICENSE", "Do as you like.")


def test_the_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("at home")
    assert read_document("~/a.txt") == Document("~/a.txt", "at home")


@pytest.mark.parametrize(
    "text",
    [
        "hello",
        "The file report.txt says so and/or not.",
        "See chapter 3.2",
        "a/b\nc/d\n",
        "Version 1.5",
        "1.5",
        "Done.",
        "<p>markup that is meant as text</p> here",
        "x" * 100_000,
        "nul \0 in a text",
    ],
)
def test_prose_is_the_text_itself(text: str) -> None:
    assert read_document(text) == Document("text", text)


@pytest.mark.parametrize(
    "name", ["contract.pdf", "docs/contract", "./x", "setup.cfg", "my annual report.pdf", "a.mp3"]
)
def test_what_looks_like_a_file_must_be_one(name: str) -> None:
    assert "no such file" in message(name) and name in message(name)
    assert "no such file" in message(Path(name))


def test_a_document_is_given_back() -> None:
    document = Document("a", "text", (0,))
    assert read_document(document) is document
    assert read_document(document, name="b") == Document("b", "text", (0,))


def test_bytes_are_called_text_or_as_told() -> None:
    assert read_document(b"from a pipe") == Document("text", "from a pipe")
    assert read_document(b"from a pipe", name="stdin").source == "stdin"


def test_a_pipe_is_read_like_a_file(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=("through a pipe",))
    writer.start()
    assert read_document(path).text == "through a pipe"
    writer.join()


def test_a_directory_is_refused(tmp_path: Path) -> None:
    assert "is a directory" in message(tmp_path)
    assert "is a directory" in message(str(tmp_path))


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "secret.txt"
    path.write_text("x")
    monkeypatch.setattr("builtins.open", refuse)  # root may read files of any mode
    assert "permissions" in message(path)


def test_a_file_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "MOST_BYTES", 2**20)
    path = tmp_path / "large.txt"
    path.write_bytes(b"a" * 2**20)
    assert len(read_document(path).text) == 2**20
    path.write_bytes(b"a" * (2**20 + 1))
    assert "larger than 1 MiB" in message(path)


# Text


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32", "cp1252"])
def test_encodings(encoding: str) -> None:
    text = "Größere Flüsse führen auch im Sommer genügend Wasser für die Mühlen am Ufer. " * 5
    assert read_document(text.encode(encoding)).text == text


def test_cyrillic_and_japanese_in_their_old_character_sets() -> None:
    for text, encoding in (
        ("Съешь же ещё этих мягких французских булок, да выпей чаю. " * 5, "cp1251"),
        ("吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。" * 5, "shift_jis"),
    ):
        assert read_document(text.encode(encoding)).text == text


def test_one_accent_in_an_old_character_set() -> None:
    assert read_document(b"We met in a small caf\xe9 by the river.").text.split()[5] == "café"


@pytest.mark.parametrize("damage", [b"\xff", b"\xc3", b"\xe2\x82"])
def test_a_damaged_character_does_not_spoil_the_others(damage: bytes) -> None:
    text = "Größere Flüsse führen auch im Sommer genügend Wasser für die Mühlen am Ufer. " * 5
    data = text.encode()
    for whole, broken in ((data, data + damage), (data + b"!", data + damage + b"!")):
        expected = whole.decode().replace(text, text + "\ufffd", 1)
        assert read_document(broken).text == expected


def test_a_byte_order_mark_is_no_text() -> None:
    for encoding in ("utf-8-sig", "utf-16", "utf-32"):
        assert read_document("a b".encode(encoding)).text == "a b"
    assert read_document("\ufeffa b").text == "a b"


def test_lines_end_in_newlines() -> None:
    assert read_document(b"a\r\nb\rc\n").text == "a\nb\nc\n"
    assert read_document("a\r\nb").text == "a\nb"


def test_half_a_surrogate_pair_becomes_a_replacement_character() -> None:
    assert read_document("a \udc80 b").text == "a \ufffd b"


@pytest.mark.parametrize("data", [b"\x00\x01\x02", b"text\0text", bytes(range(1, 256)) * 8])
def test_binary_rubbish_is_refused(data: bytes) -> None:
    assert "cannot" not in message(data) and "decoded" in message(data, name="a.bin")


@pytest.mark.parametrize("source", ["", " \n\t ", "\ufeff", b"", b"\xef\xbb\xbf", b"\r\n"])
def test_nothing_to_read(source: str | bytes) -> None:
    assert "has no text" in message(source)


def test_an_empty_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "empty.txt"
    path.touch()
    assert str(path) in message(path)


# HTML

HTML = """<!DOCTYPE html><html><head><title>No</title><style>p {}</style>
<script>var no = 1</script></head><body><h1>Fish &amp; chips</h1><p>One
two <b>bold</b>.<p>Three.<ul><li>first<li>second</ul><!-- no --></body></html>"""


def test_html_by_name_or_by_content(tmp_path: Path) -> None:
    path = tmp_path / "page.htm"
    path.write_text(HTML)
    text = read_document(path).text
    assert text.splitlines()[:5] == ["Fish & chips", "", "One two bold.", "", "Three."]
    assert "* first" in text and "* second" in text
    assert "no" not in text.lower()
    assert read_document(HTML.encode(), name="stdin").text == text


def test_source_code_that_holds_html_stays_source_code() -> None:
    assert read_document(HTML.encode(), name="page.jinja").text == HTML


def test_html_in_the_character_set_it_declares() -> None:
    page = "<html><meta charset=windows-1252><p>Übermäßig heiße Öfen glühen über Nacht.</p></html>"
    assert read_document(page.encode("cp1252")).text.strip() == (
        "Übermäßig heiße Öfen glühen über Nacht."
    )


def test_nothing_is_lost_in_long_or_deep_html() -> None:
    words = "word " * 2_100_000  # over 10 MB
    assert read_document(f"<html><p>{words}</p><p>end".encode()).text.count("word") == 2_100_000
    deep = "<html>" + "<div>" * 300 + "deep" + "</div>" * 300 + "<p>end"
    assert read_document(deep.encode()).text.split() == ["deep", "end"]


@pytest.mark.parametrize(
    "data",
    [b"<html><script>x</script></html>", b"<!-- nothing -->", b"<?xml version='1.0'?>", b" "],
)
def test_html_without_text(data: bytes) -> None:
    assert "has no text" in message(data, name="page.html")


# PDF


def test_pdf_pages(tmp_path: Path) -> None:
    path = tmp_path / "contract.pdf"
    path.write_bytes(pdf(*PAGES))
    document = read_document(path)
    assert document.text.split() == " ".join(line for page in PAGES for line in page).split()
    assert "\r" not in document.text
    for number, lines in enumerate(PAGES, start=1):
        for line in lines:
            at = document.text.index(line)
            assert document.page_at(at) == document.page_at(at + len(line) - 1) == number
    assert document.page_at(0) == 1
    assert document.page_at(len(document.text)) == 3


def test_an_empty_page_counts() -> None:
    document = read_document(pdf([], ["second"], [], ["fourth"], []))
    assert len(document.page_starts) == 5
    assert document.page_at(document.text.index("second")) == 2
    assert document.page_at(document.text.index("fourth")) == 4


def test_a_word_broken_at_the_end_of_a_line_is_joined() -> None:
    assert "agreement" in read_document(pdf(["This agree-", "ment ends."])).text


def test_a_scan_needs_ocr() -> None:
    assert "OCR" in message(pdf([], []))


def test_an_encrypted_pdf_needs_its_password_removed() -> None:
    text = message(pdf(*PAGES, password="secret"), name="locked.pdf")
    assert "locked.pdf" in text and "password" in text


def test_a_pdf_is_told_by_content_not_by_name() -> None:
    assert read_document(pdf(*PAGES), name="download").page_starts
    assert read_document(b"\r\n" + pdf(*PAGES)).page_starts


# DOCX


def test_docx() -> None:
    word = docx.Document()
    word.add_heading("Lease", 1)
    word.add_paragraph("The rent is due on the first of the month.")
    word.add_paragraph("Keys", style="List Bullet")
    table = word.add_table(rows=1, cols=2)
    table.cell(0, 0).text, table.cell(0, 1).text = "Deposit", "900 francs"
    file = io.BytesIO()
    word.save(file)
    document = read_document(file.getvalue())
    lines = [line.strip() for line in document.text.splitlines() if line.strip()]
    assert lines[:3] == ["Lease", "The rent is due on the first of the month.", "* Keys"]
    assert lines[3].split() == ["Deposit", "900", "francs"]
    assert document.page_starts == () and document.page_at(0) is None


def test_a_docx_without_text() -> None:
    file = io.BytesIO()
    docx.Document().save(file)
    assert "has no text" in message(file.getvalue())


def test_an_encrypted_office_file() -> None:
    text = message(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\0" * 600, name="a.docx")
    assert "without a password" in text


# EPUB

CHAPTERS = {
    "one.xhtml": "<h1>Chapter one</h1><p>It was a wet day in Bergen.</p>",
    "text/two%20b.xhtml": "<h1>Chapter two</h1><p>The rain stopped at last.</p>",
}


def test_epub_in_the_order_of_its_spine(tmp_path: Path) -> None:
    path = tmp_path / "book.epub"
    path.write_bytes(epub(CHAPTERS, ["text/two%20b.xhtml", "one.xhtml"]))
    lines = [line for line in read_document(path).text.splitlines() if line]
    assert lines == [
        "Chapter two",
        "The rain stopped at last.",
        "Chapter one",
        "It was a wet day in Bergen.",
    ]


def test_epub_with_pictures_and_nothing_in_its_spine() -> None:
    data = epub(CHAPTERS | {"cover.jpg": "\0\1"}, ["cover.jpg", "one.xhtml"])
    assert read_document(data).text.startswith("Chapter one")
    data = epub(CHAPTERS | {"empty.xhtml": ""}, ["empty.xhtml", "one.xhtml"])
    assert "Chapter one" in read_document(data).text


def test_an_encrypted_epub() -> None:
    def encrypted(path: str) -> str:
        return f'<encryption><CipherReference URI="{path}"/></encryption>'

    def book(path: str) -> bytes:
        return epub(CHAPTERS, ["one.xhtml"], **{"META-INF/encryption.xml": encrypted(path)})

    assert "Chapter one" in read_document(book("OEBPS/font.otf")).text
    assert "is encrypted" in message(book("OEBPS/one.xhtml"))


def test_epub_with_a_chapter_missing() -> None:
    data = epub(CHAPTERS, ["one.xhtml"]).replace(b"one.xhtml", b"two.xhtml", 1)
    assert "a.epub" in message(data, name="a.epub")


def test_an_archive_that_would_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "MOST_BYTES_OF_MARKUP", 2**20)
    data = epub({"one.xhtml": "word " * 250_000}, ["one.xhtml"])
    assert "more than 1 MiB" in message(data)


def test_rich_text_is_refused() -> None:
    assert "is an RTF file" in message(rb"{\rtf1\ansi Hello.}", name="letter.rtf")


def test_another_kind_of_archive() -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("xl/workbook.xml", "<workbook/>")
    assert "archive" in message(file.getvalue(), name="table.xlsx")


# Rubbish


@pytest.mark.parametrize("suffix", [".pdf", ".docx", ".epub"])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"this is not what the name says",
        os.urandom(1000),
        b"%PDF-1.7\n" + b"\x93\x00" * 300,
        b"PK\x03\x04" + b"\x00\x93" * 300,
        pdf(*PAGES)[:400],
        epub(CHAPTERS, ["one.xhtml"])[:-40],
        epub({"one.xhtml": "<p>x</p>"}, []),
    ],
    ids=[
        "empty",
        "text",
        "random",
        "pdf-rubbish",
        "zip-rubbish",
        "pdf-cut",
        "epub-cut",
        "no-spine",
    ],
)
def test_rubbish_gets_one_sentence(
    tmp_path: Path, data: bytes, suffix: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"rubbish{suffix}"
    path.write_bytes(data)
    assert path.name in message(path)
    assert capfd.readouterr() == ("", "")
