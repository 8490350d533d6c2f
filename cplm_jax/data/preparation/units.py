"""The work on one unit of input: its documents become shards, a part at a time.

A part is finished when its record is in the work folder; it is written after the part's shards, so
whatever a kill leaves half-done has no record and is made again, the same.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from cplm_jax.data.compression import opened
from cplm_jax.data.files import SourceFile
from cplm_jax.data.formats import read_piece
from cplm_jax.data.preparation.plan import Settings
from cplm_jax.data.records import BadRecord, Document, Piece
from cplm_jax.data.shards import (
    ShardWriter,
    make_appear,
    names_file,
    records_of,
    sha256_of,
    token_dtype,
    write_file,
)
from cplm_jax.data.tokenizer import Tokenizer
from cplm_jax.errors import UserError

KEPT_MESSAGES = 20
_HASHED_BYTES = 2**22


class Progress(Protocol):
    """Where the work tells how far it is, and learns that it should stop."""

    def add(self, documents: int, size: int) -> None:
        """Counts documents, and bytes of input."""

    def check(self) -> None:
        """Raises :class:`Stopped` if the work is over."""


class Stopped(Exception):  # noqa: N818 - not an error
    """Another unit failed, or the user stopped the preparation."""


class Unit(NamedTuple):
    """A unit of input and where its results go."""

    number: int
    pieces: list[Piece]
    settings: Settings
    max_bad: int
    """Bad records that are skipped and counted; one more is an error."""
    output: Path
    """Folder of the shards."""

    @property
    def work(self) -> Path:
        """Folder of what is needed until all units are finished."""
        return self.output / "work"

    def part_file(self, part: int) -> Path:
        """Record of a finished part."""
        return self.work / f"{self.number:05}-{part:03}.json"

    def lengths_file(self, side: str, part: int) -> Path:
        """Lengths of the documents of a finished part."""
        return self.work / f"{side}-{self.number:05}-{part:03}.npy"

    @property
    def digests_file(self) -> Path:
        """Digests of the unit's documents, each once, and the number of the document that has it first."""
        return self.work / f"digests-{self.number:05}.npy"

    @property
    def repeats_file(self) -> Path:
        """Numbers of the unit's documents that occurred earlier in the unit."""
        return self.work / f"repeats-{self.number:05}.npy"

    @property
    def duplicates_file(self) -> Path:
        """Numbers of the unit's documents that occurred before."""
        return self.work / f"duplicates-{self.number:05}.npy"

    @property
    def hashes_file(self) -> Path:
        """SHA-256 of the files that begin in the unit."""
        return self.work / f"sha256-{self.number:05}.json"


def finished_parts(unit: Unit) -> list[dict[str, Any]]:
    """Returns the records of the parts that were finished before and whose files are all there."""
    parts: list[dict[str, Any]] = []
    while unit.part_file(len(parts)).exists():
        part = json.loads(unit.part_file(len(parts)).read_bytes())
        if not all(_is_there(unit, side, len(parts), part["sides"][side]) for side in part["sides"]):
            break
        parts.append(part)
    return parts


def _is_there(unit: Unit, side: str, part: int, described: dict[str, Any]) -> bool:
    shard = unit.output / described["file"]
    sizes = {
        shard: described["size"],
        shard.with_name(names_file(shard.name)): described["names_size"],
        unit.lengths_file(side, part): None,
    }
    try:
        return all(path.stat().st_size == size or size is None for path, size in sizes.items())
    except FileNotFoundError:
        return False


def is_finished(unit: Unit) -> bool:
    """Returns whether all of a unit is done."""
    parts = finished_parts(unit)
    return bool(parts) and parts[-1]["last"]


def text_digest(data: bytes) -> bytes:
    """Returns 16 bytes that stand for a document's text."""
    return hashlib.blake2b(data, digest_size=16).digest()


def is_held_out(digest: bytes, fraction: float) -> bool:
    """Returns whether a document is held out: the same for equal texts, wherever they lie."""
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def digest_unit(unit: Unit, tokenizer: Tokenizer, progress: Progress) -> None:
    """Writes the digests of a unit's documents."""
    del tokenizer
    digests = bytearray()
    bad = _Bad(unit.max_bad)
    for _, record in _records(unit, progress):
        if isinstance(record, BadRecord):
            bad.add(record)
        else:
            digests += text_digest(record.data)
            progress.add(1, 0)
    write_digests(unit, np.frombuffer(digests, ">u8").reshape(-1, 2))


def write_digests(unit: Unit, digests: np.ndarray) -> None:
    """Writes digests of shape (documents, 2), in order, to the unit's files."""
    order = np.lexsort((digests[:, 1], digests[:, 0]))  # stable: of equal ones, the first leads
    ordered = digests[order].astype(np.uint64)
    again = np.zeros(len(order), bool)
    again[1:] = (ordered[1:] == ordered[:-1]).all(axis=1)
    write_file(unit.repeats_file, np.sort(order[again]).astype(np.uint32))
    first = order[~again].astype(np.uint64)
    write_file(unit.digests_file, np.concatenate([ordered[~again], first[:, None]], axis=1))


def hash_unit(unit: Unit, tokenizer: Tokenizer, progress: Progress) -> None:
    """Writes the SHA-256 of the files that begin in a unit."""
    del tokenizer
    hashes = {}
    for file in files_of(unit):
        digest = hashlib.sha256()
        with opened(file, lambda size: progress.add(0, size)) as stream:
            while block := stream.read(_HASHED_BYTES):
                digest.update(block)
                progress.check()
        hashes[file.path] = digest.hexdigest()
    write_file(unit.hashes_file, json.dumps(hashes).encode())


def files_of(unit: Unit) -> list[SourceFile]:
    """Returns the files that begin in a unit."""
    return [piece.file for piece in unit.pieces if piece.start == 0]


def prepare_unit(unit: Unit, tokenizer: Tokenizer, progress: Progress) -> None:
    """Writes the shards of a unit, from the first part on that is not finished.

    Raises:
      UserError: for a bad record that may not be skipped, or a file that cannot be read.
      OSError: if something cannot be written.
      Stopped: if the work is over.
    """
    before = finished_parts(unit)
    if before and before[-1]["last"]:
        return
    done = sum(part["records"] for part in before)
    good = done - sum(part["bad"] for part in before)
    bad = _Bad(unit.max_bad, sum(part["bad"] for part in before))
    duplicates = np.zeros(0, np.uint32)
    if unit.settings.deduplicate:
        duplicates = np.load(unit.duplicates_file)
    dropped = int(np.searchsorted(duplicates, good))
    part = _Part(unit, len(before), tokenizer)
    for number, (file, record) in enumerate(_records(unit, progress)):
        if number < done:
            continue
        part.records += 1
        if isinstance(record, BadRecord):
            bad.add(record)
            part.add_bad(record)
            continue
        good += 1
        if dropped < len(duplicates) and duplicates[dropped] == good - 1:
            dropped += 1
            part.duplicates += 1
            continue
        part.add(file, record)
        progress.add(1, 0)
        if part.full:
            part.finish(last=False)
            part = _Part(unit, part.number + 1, tokenizer)
    if unit.settings.deduplicate:
        _check_read_alike(unit, good)
    part.finish(last=True)


def _check_read_alike(unit: Unit, documents: int) -> None:
    """Raises :class:`UserError` if the unit had more or fewer documents when duplicates were looked for."""
    before = sum(len(np.load(path)) for path in (unit.digests_file, unit.repeats_file))
    if before != documents:
        names = f"{unit.pieces[0].file.path} to {unit.pieces[-1].file.path}"
        raise UserError(
            f"{names}: {before:,} documents were read first, and then {documents:,}, so that the wrong ones "
            f"may have been dropped as duplicates; remove {unit.output} and prepare again"
        )


def _records(unit: Unit, progress: Progress) -> Iterator[tuple[SourceFile, Document | BadRecord]]:
    for piece in unit.pieces:
        for record in read_piece(piece, unit.settings.reading, lambda size: progress.add(0, size)):
            progress.check()
            yield piece.file, record


class _Bad:
    """Counts bad records of a unit up to the limit."""

    def __init__(self, limit: int, count: int = 0):
        self._limit, self._count = limit, count

    def add(self, record: BadRecord) -> None:
        """Counts a record. Raises :class:`UserError` if it is one too many."""
        self._count += 1
        check_bad(self._count, self._limit, record.message)


def check_bad(count: int, limit: int, message: str) -> None:
    """Raises :class:`UserError` with ``message`` if there are more bad records than may be skipped."""
    if count <= limit:
        return
    if limit == 0:
        raise UserError(f"{message} (--max_bad N skips and counts up to N such records)")
    raise UserError(f"{message} (more than --max_bad {limit:,} bad records)")


class _Shard:
    """A shard of a part that is being written, and the names of its documents."""

    def __init__(self, unit: Unit, side: str, part: int, dtype: np.dtype):
        self.counts: Counter[str] = Counter()
        self._unit, self._side, self._part = unit, side, part
        self._name = f"{side}-{unit.number:05}-{part:03}.arrayrecord"
        self._scratch = unit.work / f"{self._name}.{os.getpid()}.partial"
        self._writer = ShardWriter(self._scratch, dtype)
        self._names_scratch = unit.work / f"{names_file(self._name)}.{os.getpid()}.partial"
        self._names = open(self._names_scratch, "wb")  # noqa: SIM115 - closed in finish

    def add(self, name: str, document: Document, tokens: np.ndarray, size: int) -> None:
        """Appends a document, of which ``size`` bytes can be had back from its tokens."""
        self._writer.add(tokens)
        self._names.write(json.dumps(name).encode() + b"\n")
        self.counts.update(
            documents=1,
            tokens=len(tokens),
            bytes=len(document.data),
            # All occurrences of a token but its first are targets that occurred earlier.
            repeated_targets=len(tokens) - len(np.unique(tokens)),
            inexact=int(size != len(document.data)),
        )

    def finish(self) -> dict[str, Any]:
        """Makes the files appear, and returns what the manifest says of them."""
        self._writer.close()
        self._names.close()
        shard = self._unit.output / self._name
        names = shard.with_name(names_file(self._name))
        make_appear(self._scratch, shard)
        make_appear(self._names_scratch, names)
        lengths = np.frombuffer(self._writer.lengths, np.uint32)
        write_file(self._unit.lengths_file(self._side, self._part), lengths)
        return dict(self.counts) | {
            "file": shard.name,
            "records": int(records_of(lengths).sum()),
            "size": shard.stat().st_size,
            "sha256": sha256_of(shard),
            "names_size": names.stat().st_size,
            "names_sha256": sha256_of(names),
        }


class _Part:
    """A part of a unit that becomes a shard of each side."""

    def __init__(self, unit: Unit, number: int, tokenizer: Tokenizer):
        self.number, self.records, self.duplicates = number, 0, 0
        self._bad = 0
        self._messages: list[str] = []
        self._last_message: str | None = None
        self._unit, self._tokenizer = unit, tokenizer
        self._dtype, self._sizes = token_dtype(tokenizer.size), tokenizer.byte_lengths(tokenizer.size)
        self._shards: dict[str, _Shard] = {}
        self._documents: Counter[str] = Counter()

    @property
    def full(self) -> bool:
        """Whether the part has the tokens of a shard."""
        train = self._shards.get("train")
        return train is not None and train.counts["tokens"] >= self._unit.settings.shard_tokens

    def add(self, file: SourceFile, document: Document) -> None:
        """Tokenises a document and adds it to its side."""
        held_out = is_held_out(text_digest(document.data), self._unit.settings.validation_fraction)
        side = "validation" if held_out else "train"
        if side not in self._shards:
            self._shards[side] = _Shard(self._unit, side, self.number, self._dtype)
        tokens = self._tokenizer.encode_array(document.text)
        size = int(self._sizes[tokens].sum())
        self._shards[side].add(f"{file.name} {document.record}".rstrip(), document, tokens, size)
        self._documents[file.path] += 1

    def add_bad(self, record: BadRecord) -> None:
        """Counts a bad record that is skipped."""
        self._bad += 1
        self._last_message = record.message
        if len(self._messages) < KEPT_MESSAGES:
            self._messages.append(record.message)

    def finish(self, last: bool) -> None:
        """Makes the shards appear, and then the record of the part."""
        record = {
            "last": last,
            "records": self.records,
            "bad": self._bad,
            "messages": self._messages,
            "last_message": self._last_message,
            "duplicates": self.duplicates,
            "documents_of": dict(self._documents),
            "sides": {side: shard.finish() for side, shard in self._shards.items()},
        }
        write_file(self._unit.part_file(self.number), json.dumps(record).encode())
