"""Documents from the columns of tables: Parquet and Arrow."""

import io
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, cast

from cplm_jax.data.compression import DAMAGED, opened
from cplm_jax.data.files import SourceFile
from cplm_jax.data.records import BadRecord, Document, Piece, Reading, damaged, document, too_long
from cplm_jax.errors import first_line

# What every stream of Arrow ends with.
_ARROW_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def _bad_schema(schema: Any, file: SourceFile, reading: Reading) -> BadRecord | None:
    """Returns what is wrong with the columns of a table, if anything is.

    Raises:
      UnicodeDecodeError: if the name of a column is damaged.
    """
    import pyarrow as pa

    names, where = schema.names, f"{file.path}: "
    column = f"column {reading.text_field!r} ({reading.text_option})"
    if reading.text_field not in names:
        return BadRecord(f"{where}no {column}; the file has {', '.join(map(repr, names)) or 'none'}")
    if names.count(reading.text_field) > 1:
        return BadRecord(
            f"{where}has {names.count(reading.text_field)} columns {reading.text_field!r}; rename them"
        )
    kind = schema.field(reading.text_field).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        return BadRecord(f"{where}{column} holds {kind}, not text; name another")
    return None


def parquet_pieces(file: SourceFile, size: int, reading: Reading) -> list[tuple[Piece, int]] | BadRecord:
    """Cuts a Parquet file at row groups, as :func:`~cplm_jax.data.formats.pieces_of` does."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with opened(file) as raw:
        try:
            table = pq.ParquetFile(raw)
            bad = _bad_schema(table.schema_arrow, file, reading)
            groups = [table.metadata.row_group(i).total_byte_size for i in range(table.num_row_groups)]
        except MemoryError:
            raise
        except (pa.ArrowException, OSError, UnicodeDecodeError) as e:
            if raw.error is not None:
                raise raw.error from None
            return BadRecord(_not_parquet(file, e))
    if bad is not None:
        return bad
    pieces, start, held = [], 0, 0
    for i, group in enumerate(groups, start=1):
        held += group
        if held >= size or i == len(groups):
            pieces.append((Piece(file, start, i), held))
            start, held = i, 0
    return pieces or [(Piece(file, 0, 0), 0)]


def read_parquet(
    stream: BinaryIO, piece: Piece, reading: Reading, advance: Callable[[int], None]
) -> Iterator[Document | BadRecord]:
    """Yields the records of a piece of a Parquet file, and tells ``advance`` of bytes as its pieces count."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = 0
    try:
        # Buffered, a column is read page by page, not a row group at a time.
        table = pq.ParquetFile(stream, buffer_size=2**20, pre_buffer=False)
        bad = _bad_schema(table.schema_arrow, piece.file, reading)
    except MemoryError:
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError) as e:
        yield BadRecord(_not_parquet(piece.file, e))
        return
    if bad is not None:
        yield bad
        return
    try:
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
    except MemoryError:
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError) as e:
        yield damaged(piece.file, f"row {row}", e)


def _not_parquet(file: SourceFile, error: Exception) -> str:
    return f"{file.path}: not a Parquet file, or a damaged one ({first_line(error)}); fetch it again"


class _Tail(io.RawIOBase):
    """A stream that remembers the end of what was read."""

    def __init__(self, stream: BinaryIO):
        self._stream, self.tail = stream, b""

    def readable(self) -> bool:
        """Returns True."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Reads up to ``size`` bytes."""
        data = self._stream.read(size)
        self.tail = (self.tail + data[-len(_ARROW_END) :])[-len(_ARROW_END) :]
        return data


def read_arrow(stream: BinaryIO, piece: Piece, reading: Reading) -> Iterator[Document | BadRecord]:
    """Yields the records of an Arrow stream, or of an Arrow file."""
    import pyarrow as pa

    row = 0
    try:
        # A file of Arrow is a stream between a head of eight bytes and a footer.
        if cast(io.BufferedReader, stream).peek(8)[:6] == b"ARROW1":
            stream.read(8)
        tail = _Tail(stream)
        with pa.ipc.open_stream(tail) as table:
            bad = _bad_schema(table.schema, piece.file, reading)
            if bad is not None:
                yield bad
                return
            for batch in table:
                column = batch.column(table.schema.get_field_index(reading.text_field))
                for record in _rows(column, row, piece.file, reading):
                    row += 1
                    yield record
        if tail.tail != _ARROW_END:  # which the library does not ask for
            raise EOFError
    except MemoryError:
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError, *DAMAGED) as e:
        yield damaged(piece.file, f"row {row}", e)


def _rows(column: Any, first: int, file: SourceFile, reading: Reading) -> Iterator[Document | BadRecord]:
    """Yields a batch of a table's column; rows count from 1, as lines do."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    for number, value in enumerate(column.cast(pa.large_binary()), first + 1):
        where, data = f"{file.path}, row {number}", value.as_py()
        if data is None:
            yield BadRecord(f"{where}: column {reading.text_field!r} is null; mend or remove the row")
        elif len(data) > reading.max_document_bytes:
            yield too_long(where, reading)
        else:
            yield document(data, where, f"row {number}")
