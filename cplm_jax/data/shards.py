"""Tokenised documents on disk: ArrayRecord shards, the lengths of all documents, and a manifest.

    manifest.json            what there is and what it was made from; written last
    tokenizer.model          the tokenizer (or tokenizer.json)
    train.lengths.npy        tokens of each document, uint32, in order
    train-00012-003.arrayrecord
    train-00012-003.names.jsonl   where each of its documents came from
    validation...            the same, of the held-out documents

A document is one record, or several of :data:`RECORD_TOKENS` tokens each if it is longer, so that a part
of a long document is read without the rest. Records are little-endian token ids without BOS and EOS.
"""

import array
import contextlib
import hashlib
import itertools
import json
import os
import resource
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from array_record.python import array_record_data_source
from array_record.python import array_record_module as array_record  # type: ignore[attr-defined]

from cplm_jax.errors import MachineError, UserError, first_line

FORMAT = "cplm_jax documents"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
RECORD_TOKENS = 16_384
SIDES = ("train", "validation")
# Open files of a process besides shards: devices, sockets, checkpoints.
_OTHER_FILES = 1024
# A group of one record makes random access cheap; token ids hardly compress.
WRITER_OPTIONS = "group_size:1,uncompressed"


def lengths_file(side: str) -> str:
    """Returns the name of the file with the documents' lengths."""
    return f"{side}.lengths.npy"


def names_file(shard: str) -> str:
    """Returns the name of the file that tells where the documents of a shard came from."""
    return shard.removesuffix(".arrayrecord") + ".names.jsonl"


def token_dtype(vocabulary_size: int) -> np.dtype:
    """Returns the type that token ids are stored as."""
    return np.dtype("<u2" if vocabulary_size <= 2**16 else "<u4")


def records_of(lengths: np.ndarray) -> np.ndarray:
    """Returns how many records documents of ``lengths`` tokens are, int64 (an empty one is one record)."""
    return np.maximum(-(-lengths.astype(np.int64) // RECORD_TOKENS), 1)


def sha256_of(path: Path) -> str:
    """Returns the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_file(path: Path, data: bytes | np.ndarray) -> None:
    """Makes a file of bytes, or an array, appear whole and durable under its name."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with open(scratch, "wb") as file:
        if isinstance(data, bytes):
            file.write(data)
        else:
            np.save(file, data)
    make_appear(scratch, path)


def make_appear(scratch: Path, path: Path) -> None:
    """Gives a finished file its name, such that not even a loss of power leaves a part of it there."""
    _sync(scratch)
    os.replace(scratch, path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class ShardWriter:
    """Writes the documents of one shard.

    Args:
      path: the file to make.
      dtype: of the token ids.
    """

    def __init__(self, path: Path, dtype: np.dtype):
        self._dtype = dtype
        self._writer = array_record.ArrayRecordWriter(str(path), WRITER_OPTIONS)
        self.lengths = array.array("I")

    def add(self, tokens: np.ndarray) -> None:
        """Appends a document. Raises :class:`OSError` if it could not be written."""
        tokens = tokens.astype(self._dtype, copy=False)
        with _write_errors():
            for start in range(0, max(len(tokens), 1), RECORD_TOKENS):
                self._writer.write(tokens[start : start + RECORD_TOKENS].tobytes())
        self.lengths.append(len(tokens))

    def close(self) -> None:
        """Finishes the file. Raises :class:`OSError` if it could not be written."""
        with _write_errors():
            self._writer.close()


@contextlib.contextmanager
def _write_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as e:  # what the writer raises for a full disk
        raise OSError(first_line(e)) from e


class Span(NamedTuple):
    """Tokens ``[start, stop)`` of a document."""

    document: int
    start: int
    stop: int


class Documents:
    """The documents of one side of a prepared folder, read from its shards as they are asked for.

    Args:
      folder: the folder.
      side: ``train`` or ``validation``.
      manifest: the content of its manifest.

    Attributes:
      lengths: tokens of each document, without BOS and EOS; of shape (documents,), memory-mapped.
      tokens: their sum.
      bytes: bytes of text.

    Raises:
      UserError: if a file is missing or has another size than the manifest says.
    """

    def __init__(self, folder: Path, side: str, manifest: dict[str, Any]):
        self.folder, self.side, self._manifest = folder, side, manifest
        described = manifest[side]
        self.tokens, self.bytes = int(described["tokens"]), int(described["bytes"])
        self._dtype = np.dtype(manifest["dtype"])
        self._shards = described["shards"]
        for shard in self._shards:
            _check_size(folder / shard["file"], shard["size"])
        path = folder / lengths_file(side)
        _check_size(path, described["lengths_size"])
        try:
            self.lengths: np.ndarray = np.load(path, mmap_mode="r" if described["documents"] else None)
        except ValueError as e:
            raise _damaged(path, first_line(e)) from e
        # A wrong length would shift, without a sign of it, what is read of all later documents.
        if sha256_of(path) != described["lengths_sha256"]:
            raise _damaged(path, "its sha256 is not the manifest's")

    def __reduce__(self) -> tuple[Any, ...]:  # another process opens the files itself
        return Documents, (self.folder, self.side, self._manifest)

    def __len__(self) -> int:
        return len(self.lengths)

    def label(self, document: int) -> str:
        """Returns where a document came from: its file, and its place there."""
        shard = int(np.searchsorted(self._ends, document, side="right"))
        place = document - int(self._ends[shard]) + self._shards[shard]["documents"]
        path = self.folder / names_file(self._shards[shard]["file"])
        try:
            with open(path, "rb") as lines:
                return json.loads(next(itertools.islice(lines, place, None)))
        except (OSError, ValueError, StopIteration) as e:
            raise _damaged(path, first_line(e) or "it is too short") from e

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([shard["documents"] for shard in self._shards])

    @cached_property
    def _source(self) -> Any:
        _allow_open_files(len(self._shards))
        # Told how many records there are, the source opens a shard when it first reads from it.
        return array_record_data_source.ArrayRecordDataSource(
            [_Instruction(str(self.folder / s["file"]), 0, s["records"], s["records"]) for s in self._shards]
        )

    @cached_property
    def _long(self) -> tuple[np.ndarray, np.ndarray]:
        """The documents of several records, and how many records more than one they and those before have."""
        long = np.flatnonzero(np.asarray(self.lengths) > RECORD_TOKENS)
        return long, np.concatenate([[0], np.cumsum(records_of(self.lengths[long]) - 1)])

    def read(self, spans: Sequence[Span]) -> list[np.ndarray]:
        """Returns the token ids of spans, each of the stored type.

        Raises:
          UserError: if a shard is missing or damaged.
        """
        long, extra = self._long
        keys: list[int] = []
        cuts: list[tuple[int, int]] = []
        for document, start, stop in spans:
            first = document + int(extra[np.searchsorted(long, document)])
            a, b = start // RECORD_TOKENS, max(-(-stop // RECORD_TOKENS), start // RECORD_TOKENS + 1)
            cuts.append((len(keys), len(keys) + b - a))
            keys += range(first + a, first + b)
        records = self._records(keys)
        out = []
        for (document, start, stop), (a, b) in zip(spans, cuts, strict=True):
            data = records[a] if b - a == 1 else b"".join(records[a:b])
            skip = start % RECORD_TOKENS
            tokens = np.frombuffer(data, self._dtype)[skip : skip + stop - start]
            if len(tokens) != stop - start:
                raise self._unreadable(document, "it is shorter than it should be")
            out.append(tokens)
        return out

    def _records(self, keys: list[int]) -> Sequence[bytes]:
        try:
            return self._source.__getitems__(keys) if len(keys) > 1 else [self._source[k] for k in keys]
        except Exception as e:  # the reader has no error type of its own
            bad = next((s for s in self._shards if not (self.folder / s["file"]).exists()), None)
            if bad is not None:
                raise UserError(
                    f"{self.folder / bad['file']}: the shard is gone; restore it, or prepare the folder again"
                ) from e
            raise self._failed(keys, e) from e

    def _failed(self, keys: list[int], error: Exception) -> UserError | MachineError:
        """Returns what went wrong with one of the records."""
        if isinstance(error, OSError) or "Too many open files" in str(error):
            return MachineError(
                f"{self.folder}: cannot read a shard: {first_line(error)}; every one of its "
                f"{len(self._shards):,} shards is kept open, so raise the hard limit of open files (ulimit "
                "-Hn)"
            )
        ends = np.cumsum([shard["records"] for shard in self._shards])
        for key in keys:
            try:
                self._source[key]
            except Exception as e:
                shard = int(np.searchsorted(ends, key, side="right"))
                record = key - int(ends[shard]) + self._shards[shard]["records"]
                return UserError(
                    f"{self.folder / self._shards[shard]['file']}: record {record:,} is damaged "
                    f"({first_line(e)}); restore the shard, or prepare the folder again"
                )
        return UserError(f"{self.folder}: a shard was damaged while it was read: {first_line(error)}")

    def _unreadable(self, document: int, what: str) -> UserError:
        return UserError(
            f"{self.folder}: {self.side} document {document:,} ({self.label(document)}) cannot be read: "
            f"{what}; prepare the folder again"
        )


_allowed = 0


def _allow_open_files(more: int) -> None:
    """Raises this process's soft limit of open files by ``more``, as far as the hard one allows."""
    global _allowed
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    _allowed += more
    wanted = _allowed + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


class _Instruction(NamedTuple):
    """What array_record knows as a FileInstruction: a shard whose number of records is known."""

    filename: str
    skip: int
    take: int
    examples_in_shard: int


def _damaged(path: Path, what: str) -> UserError:
    return UserError(f"{path}: damaged ({what}); restore the file, or prepare the folder again")


def _check_size(path: Path, size: int) -> None:
    try:
        found = path.stat().st_size
    except OSError as e:
        raise UserError(
            f"{path}: cannot read it: {e.strerror or e}; restore the file, or prepare the folder again"
        ) from e
    if found != size:
        raise _damaged(path, f"it has {found:,} bytes, the manifest says {size:,}")


def is_prepared(path: Path) -> bool:
    """Returns whether ``cplm prepare`` wrote, or began to write, to a folder."""
    return (path / MANIFEST).is_file() or (path / "work" / "plan.json").is_file()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns what a prepared folder's manifest says.

    Raises:
      UserError: if it is missing, damaged, or of a format this version does not know.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError as e:
        unfinished = is_prepared(folder)
        raise UserError(
            f"{folder}: "
            + (
                "cplm prepare has not finished here; run the same command again, and it goes on"
                if unfinished
                else f"there is no {MANIFEST}; give a folder that cplm prepare made"
            )
        ) from e
    except (OSError, ValueError) as e:
        raise _damaged(path, first_line(e)) from e
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise UserError(f"{path}: not a manifest of prepared documents")
    if manifest.get("format_version") != FORMAT_VERSION:
        raise UserError(
            f"{path}: has format version {manifest.get('format_version')}, and this cplm_jax reads "
            f"{FORMAT_VERSION}; prepare the folder again"
        )
    return manifest
