"""Text out of files: plain text, Markdown, source code, HTML, PDF, DOCX and EPUB."""

from postil.documents.document import Document
from postil.documents.reading import read_document

__all__ = ["Document", "read_document"]
