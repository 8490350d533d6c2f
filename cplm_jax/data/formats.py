"""Documents from the files people keep text in: text, JSONL, Parquet and Arrow, plain or compressed.

A reader yields every record of its file, in order, as a :class:`Document` or, if something is wrong with
it, as a :class:`BadRecord` that says what; whether that ends the work or is skipped is its user's
decision. No reader holds more than a record and a buffer.
"""

import functools
import io
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, BinaryIO, NamedTuple, cast

from cplm_jax.data.compression import BUFFER, DAMAGED, decompressed
from cplm_jax.data.files import SourceFile, open_file
from cplm_jax.errors import UserError, first_line

_SUFFIX_KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}


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


_Reader = Callable[[BinaryIO, Piece, Reading], Iterator[Document | BadRecord]]


def kind_of(name: str) -> tuple[str, str | None]:
    """Returns the format (``text``, ``jsonl``, ``parquet``, ``arrow``) and compression of a file's name."""
    stem, compression = name.lower(), None
    for suffix, found in _COMPRESSIONS.items():
        if stem.endswith(suffix):
            stem, compression = stem[: -len(suffix)], found
    for suffix, kind in _SUFFIX_KINDS.items():
        if stem.endswith(suffix):
            return kind, compression
    return "text", compression


def pieces_of(file: SourceFile, size: int, reading: Reading) -> list[tuple[Piece, int]]:
    """Cuts a file into pieces of about ``size`` bytes, as far as its format can be cut.

    Returns:
      The pieces, each with its bytes.

    Raises:
      UserError: if the file is Parquet and is compressed, its footer cannot be read or has no such column.
    """
    kind, compression = kind_of(file.name)
    if kind == "jsonl" and compression is None:
        bounds = [*range(0, file.size, size), file.size]
        return [(Piece(file, a, b), b - a) for a, b in itertools.pairwise(bounds)] or [(Piece(file, 0, 0), 0)]
    if kind == "parquet":
        if compression is not None:
            raise UserError(
                f"{file.path}: Parquet is read from its end, which {compression} hides; decompress the file "
                "(Parquet compresses by itself)"
            )
        return _parquet_pieces(file, size, reading)
    return [(Piece(file, 0, None), file.size)]


def read_piece(
    piece: Piece, reading: Reading, advance: Callable[[int], None] = lambda _: None
) -> Iterator[Document | BadRecord]:
    """Yields the records of a piece.

    Args:
      piece: what to read.
      reading: how.
      advance: called with bytes of the file that were read.

    Raises:
      UserError: if the file cannot be opened or read at all.
    """
    kind, compression = kind_of(piece.file.name)
    readers: dict[str, _Reader] = {"text": _read_text, "jsonl": _read_jsonl, "arrow": _read_arrow}
    # The sizes of Parquet's pieces are those of its row groups decompressed, not of what is read.
    readers["parquet"] = functools.partial(_read_parquet, advance=advance)
    counted = advance if kind != "parquet" else lambda _: None
    try:
        with ExitStack() as stack:
            stream = decompressed(stack.enter_context(open_file(piece.file)), compression, counted)
            for record in readers[kind](stream, piece, reading):
                if not (reading.skip_empty and isinstance(record, BadRecord) and record.empty):
                    yield record
    except OSError as e:  # local or remote: permission, a lost mount
        raise UserError(f"{piece.file.path}: cannot read it: {e.strerror or first_line(e)}") from e


def _damaged(file: SourceFile, after: str, error: Exception) -> BadRecord:
    what = "is cut short" if isinstance(error, EOFError) else f"is damaged ({first_line(error)})"
    return BadRecord(f"{file.path}: {what} after {after}; fetch or compress it again")


def _too_long(where: str, reading: Reading) -> BadRecord:
    return BadRecord(
        f"{where}: has more than {reading.max_document_bytes:,} bytes, and a record is held in memory; "
        f"split it, or raise {reading.size_option} if memory allows"
    )


def _decoded(data: bytes, where: str) -> str | BadRecord:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        return BadRecord(
            f"{where}: byte {e.start} is not valid UTF-8 ({e.reason}); convert it to UTF-8 or leave it out"
        )


def _document(data: bytes, where: str, record: str) -> Document | BadRecord:
    text = _decoded(data, where)
    if isinstance(text, BadRecord):
        return text
    return Document(text, data, record) if text else BadRecord(f"{where}: is empty; remove it", empty=True)


# Text


def _read_text(stream: BinaryIO, piece: Piece, reading: Reading) -> Iterator[Document | BadRecord]:
    path = piece.file.path
    try:
        data = stream.read(reading.max_document_bytes + 1)
    except DAMAGED as e:
        yield _damaged(piece.file, "its beginning", e)
        return
    if len(data) > reading.max_document_bytes:
        yield _too_long(path, reading)
        return
    yield _document(data, path, "")


# JSONL


def _read_jsonl(stream: BinaryIO, piece: Piece, reading: Reading) -> Iterator[Document | BadRecord]:
    position = 0
    if piece.start:  # the line that reaches across the start belongs to the piece before
        position = stream.seek(piece.start - 1)
        position += _skip_line(stream)
    number = 0
    while piece.stop is None or position < piece.stop:
        number += 1
        try:
            line = stream.readline(reading.max_document_bytes + 1)
            length = len(line)
            if length > reading.max_document_bytes and not line.endswith(b"\n"):
                length += _skip_line(stream)
        except DAMAGED as e:
            yield _damaged(piece.file, f"line {number - 1}", e)
            return
        if not line:
            return
        # The number of a line is known from the start of the file only.
        record = f"line {number}" if piece.start == 0 else f"line at byte {position}"
        where = f"{piece.file.path}:{number}" if piece.start == 0 else f"{piece.file.path}, {record}"
        position += length
        if length > reading.max_document_bytes + 1:
            yield _too_long(where, reading)
        elif line.strip():
            yield _parse(line, where, record, reading)


def _skip_line(stream: BinaryIO) -> int:
    skipped = 0
    while part := stream.readline(BUFFER):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped


def _parse(line: bytes, where: str, record: str, reading: Reading) -> Document | BadRecord:
    text = _decoded(line, where)
    if isinstance(text, BadRecord):
        return text
    try:
        fields = json.loads(text)
    except (
        ValueError,
        RecursionError,
    ) as e:  # a syntax error, or beyond Python's limits of numbers and depth
        return BadRecord(f"{where}: not valid JSON: {e}; a .jsonl file holds one JSON object a line")
    field, option = reading.text_field, reading.text_option
    if not isinstance(fields, dict):
        return BadRecord(
            f"{where}: expected a JSON object with a field {field!r}, got {type(fields).__name__}"
        )
    if field not in fields:
        return BadRecord(
            f"{where}: no field {field!r} ({option}); the record has "
            f"{', '.join(map(repr, fields)) or 'none'}; name one of them or mend the record"
        )
    value = fields[field]
    if not isinstance(value, str):
        return BadRecord(
            f"{where}: field {field!r} ({option}) is {type(value).__name__}, not text; mend the record, or "
            "name another field"
        )
    try:
        return _document(value.encode("utf-8"), where, record)
    except UnicodeEncodeError as e:  # JSON can spell half of a surrogate pair, which is no character
        return BadRecord(
            f"{where}: field {field!r} has half a character (a lone surrogate) at position {e.start}; mend "
            "or remove that record"
        )


# Tables


def _column(names: list[str], file: SourceFile, reading: Reading) -> None:
    if reading.text_field not in names:
        raise UserError(
            f"{file.path}: no column {reading.text_field!r} ({reading.text_option}); the file has "
            f"{', '.join(map(repr, names)) or 'none'}"
        )


def _parquet_pieces(file: SourceFile, size: int, reading: Reading) -> list[tuple[Piece, int]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open_file(file) as raw:
            table = pq.ParquetFile(raw)
            groups = [table.metadata.row_group(i).total_byte_size for i in range(table.num_row_groups)]
            names = table.schema_arrow.names
    except (pa.ArrowException, OSError) as e:
        raise UserError(
            f"{file.path}: not a Parquet file, or a damaged one ({first_line(e)}); fetch it again"
        ) from e
    _column(names, file, reading)
    pieces, start, held = [], 0, 0
    for i, group in enumerate(groups, start=1):
        held += group
        if held >= size or i == len(groups):
            pieces.append((Piece(file, start, i), held))
            start, held = i, 0
    return pieces or [(Piece(file, 0, 0), 0)]


def _read_parquet(
    stream: BinaryIO, piece: Piece, reading: Reading, advance: Callable[[int], None]
) -> Iterator[Document | BadRecord]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = 0
    try:
        # Buffered, a column is read page by page, not a row group at a time.
        table = pq.ParquetFile(stream, buffer_size=2**20, pre_buffer=False)
        _column(table.schema_arrow.names, piece.file, reading)
        groups = [table.metadata.row_group(i) for i in range(table.num_row_groups)]
        row = sum(group.num_rows for group in groups[: piece.start])
        for number in range(piece.start, len(groups) if piece.stop is None else piece.stop):
            size = groups[number].total_byte_size / max(groups[number].num_rows, 1)
            columns = [reading.text_field]
            for batch in table.iter_batches(64, row_groups=[number], columns=columns, use_threads=False):
                for record in _rows(batch.column(0), row, piece.file, reading):
                    row += 1
                    yield record
                advance(round(size * len(batch)))
    except (pa.ArrowException, OSError, *DAMAGED) as e:
        yield _damaged(piece.file, f"row {row}", e)


def _read_arrow(stream: BinaryIO, piece: Piece, reading: Reading) -> Iterator[Document | BadRecord]:
    import pyarrow as pa

    row = 0
    try:
        # A file of Arrow is a stream between a head of eight bytes and a footer.
        if cast(io.BufferedReader, stream).peek(8)[:6] == b"ARROW1":
            stream.read(8)
        with pa.ipc.open_stream(stream) as table:
            _column(table.schema.names, piece.file, reading)
            for batch in table:
                column = batch.column(table.schema.get_field_index(reading.text_field))
                for record in _rows(column, row, piece.file, reading):
                    row += 1
                    yield record
    except (pa.ArrowException, OSError, *DAMAGED) as e:
        yield _damaged(piece.file, f"row {row}", e)


def _rows(column: Any, first: int, file: SourceFile, reading: Reading) -> Iterator[Document | BadRecord]:
    """Yields a batch of a table's column; rows count from 1, as lines do."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise UserError(
            f"{file.path}: column {reading.text_field!r} ({reading.text_option}) holds {kind}, not text; "
            "name another"
        )
    for number, value in enumerate(column.cast(pa.large_binary()), first + 1):
        where, data = f"{file.path}, row {number}", value.as_py()
        if data is None:
            yield BadRecord(f"{where}: column {reading.text_field!r} is null; mend or remove the row")
        elif len(data) > reading.max_document_bytes:
            yield _too_long(where, reading)
        else:
            yield _document(data, where, f"row {number}")
