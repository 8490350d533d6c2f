"""Documents from the files people keep text in: text, JSONL, Parquet and Arrow, plain or compressed.

A reader yields every record of its file, in order, as a :class:`Document` or, if something is wrong with
it, as a :class:`BadRecord` that says what; whether that ends the work or is skipped is its user's
decision. No reader holds more than a record and a buffer.
"""

import functools
import itertools
import json
from collections.abc import Callable, Iterator
from typing import BinaryIO

from cplm_jax.data.compression import BUFFER, DAMAGED, decompressed, opened
from cplm_jax.data.files import SourceFile
from cplm_jax.data.records import BadRecord, Document, Piece, Reading, damaged, decoded, document, too_long
from cplm_jax.data.tables import parquet_pieces, read_arrow, read_parquet

_SUFFIX_KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
_UNREADABLE = (".bz2", ".xz", ".lzma", ".lz4", ".br", ".zip", ".7z", ".rar", ".tar", ".tgz")
_BYTE_ORDER_MARK = "\ufeff".encode()


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


def pieces_of(file: SourceFile, size: int, reading: Reading) -> list[tuple[Piece, int]] | BadRecord:
    """Cuts a file into pieces of about ``size`` bytes, as far as its format can be cut.

    Returns:
      The pieces, each with its bytes; or what is wrong, if no document of the file can be read: its kind is
      unknown, or it is Parquet that is compressed, damaged or has no such column.

    Raises:
      UserError: if the file cannot be opened or read.
    """
    problem = _unreadable(file)
    if problem:
        return BadRecord(problem)
    kind, compression = kind_of(file.name)
    if kind == "jsonl" and compression is None:
        bounds = [*range(0, file.size, size), file.size]
        return [(Piece(file, a, b), b - a) for a, b in itertools.pairwise(bounds)] or [(Piece(file, 0, 0), 0)]
    if kind == "parquet":
        return parquet_pieces(file, size, reading)
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
      UserError: if the file cannot be opened or read.
    """
    problem = _unreadable(piece.file)
    if problem:
        yield BadRecord(problem)
        return
    kind, compression = kind_of(piece.file.name)
    readers: dict[str, _Reader] = {"text": _read_text, "jsonl": _read_jsonl, "arrow": read_arrow}
    # The sizes of Parquet's pieces are those of its row groups decompressed, not of what is read.
    readers["parquet"] = functools.partial(read_parquet, advance=advance)
    told = advance if kind != "parquet" else lambda _: None
    with opened(piece.file, told) as raw:
        for record in readers[kind](decompressed(raw, compression), piece, reading):
            if raw.error is not None:
                raise raw.error
            if not (reading.skip_empty and isinstance(record, BadRecord) and record.empty):
                yield record


def _unreadable(file: SourceFile) -> str | None:
    """Returns what is wrong with a file whose documents cannot be read, going by its name."""
    suffix = next((suffix for suffix in _UNREADABLE if file.name.lower().endswith(suffix)), None)
    if suffix is not None:
        return f"{file.path}: {suffix} files are not read; unpack it, or compress it with gzip or zstd"
    kind, compression = kind_of(file.name)
    if kind == "parquet" and compression is not None:
        return (
            f"{file.path}: Parquet is read from its end, which {compression} hides; decompress the file "
            "(Parquet compresses by itself)"
        )
    return None


# Text


def _read_text(stream: BinaryIO, piece: Piece, reading: Reading) -> Iterator[Document | BadRecord]:
    path = piece.file.path
    try:
        data = stream.read(reading.max_document_bytes + 1)
    except DAMAGED as e:
        yield damaged(piece.file, "its beginning", e)
        return
    if len(data) > reading.max_document_bytes:
        yield too_long(path, reading)
        return
    yield document(data.removeprefix(_BYTE_ORDER_MARK), path, "")


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
            yield damaged(piece.file, f"line {number - 1}", e)
            return
        if not line:
            return
        # The number of a line is known from the start of the file only.
        record = f"line {number}" if piece.start == 0 else f"line at byte {position}"
        where = f"{piece.file.path}:{number}" if piece.start == 0 else f"{piece.file.path}, {record}"
        position += length
        if position == length:
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if length > reading.max_document_bytes + 1:
            yield too_long(where, reading)
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
    text = decoded(line, where)
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
        return document(value.encode("utf-8"), where, record)
    except UnicodeEncodeError as e:  # JSON can spell half of a surrogate pair, which is no character
        return BadRecord(
            f"{where}: field {field!r} has half a character (a lone surrogate) at position {e.start}; mend "
            "or remove that record"
        )
