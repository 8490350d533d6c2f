"""What the readers of all formats give: documents, and records that are none."""

from typing import NamedTuple

from cplm_jax.data.files import SourceFile
from cplm_jax.errors import first_line


class Document(NamedTuple):
    """A document of a corpus."""

    text: str
    data: bytes
    """``text`` in UTF-8."""
    record: str
    """Place within the file: empty for a file that is one document."""


class BadRecord(NamedTuple):
    """A record that is no document."""

    message: str
    """File, record, what is wrong and what to do."""
    empty: bool = False
    """Whether it is a document without text, and nothing else is wrong."""


class Reading(NamedTuple):
    """How records become documents."""

    text_field: str
    """Field of a JSON record, or column of a table, that holds the text."""
    max_document_bytes: int
    """Size from which a record is bad, so that memory is bounded."""
    text_option: str = "--text_field"
    """Where ``text_field`` was set, for messages."""
    size_option: str = "--max_document_bytes"
    """Where ``max_document_bytes`` was set, for messages."""
    skip_empty: bool = False
    """Whether empty documents are left out; else they are bad records."""


class Piece(NamedTuple):
    """A part of a file that can be read by itself."""

    file: SourceFile
    start: int
    """First byte of plain JSONL, or first row group of Parquet; else 0."""
    stop: int | None
    """End of the part; None for all the rest."""


def damaged(file: SourceFile, after: str, error: Exception) -> BadRecord:
    """Returns what becomes of a file that cannot be read to its end."""
    what = "is cut short" if isinstance(error, EOFError) else f"is damaged ({first_line(error)})"
    return BadRecord(f"{file.path}: {what} after {after}; fetch or compress it again")


def too_long(where: str, reading: Reading) -> BadRecord:
    """Returns what becomes of a record that is not held."""
    return BadRecord(
        f"{where}: has more than {reading.max_document_bytes:,} bytes, and a record is held in memory; "
        f"split it, or raise {reading.size_option} if memory allows"
    )


def decoded(data: bytes, where: str) -> str | BadRecord:
    """Returns the text of a record, or what is wrong with its bytes."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        return BadRecord(
            f"{where}: byte {e.start} is not valid UTF-8 ({e.reason}); convert it to UTF-8 or leave it out"
        )


def document(data: bytes, where: str, record: str) -> Document | BadRecord:
    """Returns the document of a record."""
    text = decoded(data, where)
    if isinstance(text, BadRecord):
        return text
    return Document(text, data, record) if text else BadRecord(f"{where}: is empty; remove it", empty=True)
