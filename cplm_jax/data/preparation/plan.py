"""What a preparation does: which input becomes which shards, decided before any work begins.

The input is cut into units of consecutive files, or parts of files, by their sizes alone; each unit
becomes shards of its own. So the shards do not depend on how many processes make them, nor on kills.
"""

import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tqdm import tqdm

from cplm_jax.data.files import SourceFile, version_of
from cplm_jax.data.formats import pieces_of
from cplm_jax.data.records import BadRecord, Piece, Reading
from cplm_jax.data.shards import FORMAT_VERSION
from cplm_jax.data.tokenizer import Tokenizer
from cplm_jax.errors import UserError

# Shards are open files and units are shards, so large inputs have larger units, not ever more of them.
_UNIT_BYTES = 64 * 2**20
_UNITS = 1000
# To look at a file in a bucket is to wait for it, and a bucket may have a hundred thousand.
_FILES_AT_A_TIME = 32
_FILES_SUBMITTED = 4096

_T = TypeVar("_T")


class Settings(NamedTuple):
    """What decides the content of the shards, besides the input and the tokenizer."""

    reading: Reading
    """How records become documents."""
    validation_fraction: float
    """Share of documents held out, by a hash of their text."""
    deduplicate: bool
    """Whether only the first of equal documents is kept."""
    shard_tokens: int
    """Training tokens from which a shard is full."""
    unit_bytes: int | None = None
    """Bytes of input from which a unit is full; None for what suits the size of the input."""


class Plan(NamedTuple):
    """A preparation."""

    files: list[SourceFile]
    """The input, in order."""
    units: list[list[Piece]]
    """The parts of the input that are worked on by themselves, in order."""
    sizes: list[int]
    """Bytes of each unit."""
    record: dict[str, Any]
    """All that the output follows from, as JSON."""


def make_plan(
    files: Sequence[SourceFile],
    settings: Settings,
    tokenizer: Tokenizer,
    max_bad: int = 0,
    quiet: bool = True,
) -> Plan:
    """Cuts the input into units.

    Args:
      files: the input.
      settings: what decides the content.
      tokenizer: splits the documents.
      max_bad: whether any, and how many, bad records are allowed for.
      quiet: whether to show no progress bar.

    Raises:
      UserError: if a file cannot be opened or read, or, unless ``max_bad`` allows for bad records, holds no
        documents that can be.
    """
    unit_bytes = settings.unit_bytes or max(_UNIT_BYTES, sum(file.size for file in files) // _UNITS)

    def look(file: SourceFile) -> tuple[int | str | None, list[tuple[Piece, int]]]:
        version = version_of(file)
        pieces = pieces_of(file, unit_bytes, settings.reading)
        if isinstance(pieces, BadRecord):
            if max_bad == 0:
                raise UserError(f"{pieces.message} (--max_bad N skips and counts up to N such files)")
            pieces = [(Piece(file, 0, None), file.size)]
        return version, pieces

    units: list[list[Piece]] = [[]]
    sizes = [0]
    looked = _of_each(files, look, "planning", quiet)
    for _, pieces in looked:
        for piece, size in pieces:
            if units[-1] and sizes[-1] + size > unit_bytes:
                units.append([])
                sizes.append(0)
            units[-1].append(piece)
            sizes[-1] += size
    record = {
        "format_version": FORMAT_VERSION,
        "tokenizer": tokenizer.sha256,
        "text_field": settings.reading.text_field,
        "max_document_bytes": settings.reading.max_document_bytes,
        "validation_fraction": settings.validation_fraction,
        "deduplicate": settings.deduplicate,
        "shard_tokens": settings.shard_tokens,
        "unit_bytes": unit_bytes,
        # Where a file could not be read when it was cut, another cut would number the units differently.
        "unit_pieces": [len(unit) for unit in units],
        "sources": [
            [file.name, file.size, version] for file, (version, _) in zip(files, looked, strict=True)
        ],
    }
    return Plan(list(files), units, sizes, record)


def _of_each(
    files: Sequence[SourceFile], look: Callable[[SourceFile], _T], name: str, quiet: bool
) -> list[_T]:
    """Calls ``look`` for every file, for several at a time, and raises what the first that fails raises."""
    found: list[_T] = []
    bar = tqdm(
        total=len(files), desc=name, unit=" files", file=sys.stderr, disable=quiet, delay=2, mininterval=1
    )
    with ThreadPoolExecutor(_FILES_AT_A_TIME) as pool, bar:
        for start in range(0, len(files), _FILES_SUBMITTED):
            for result in pool.map(look, files[start : start + _FILES_SUBMITTED]):
                found.append(result)
                bar.update()
    return found


def check_unchanged(plan: Plan, output: Path, quiet: bool = True) -> None:
    """Raises :class:`UserError` if a source file was changed since the plan was made."""
    versions = _of_each(plan.files, version_of, "checking", quiet)
    for file, now, (name, _, then) in zip(plan.files, versions, plan.record["sources"], strict=True):
        if now != then:
            raise UserError(
                f"{file.path}: changed while it was prepared, so that {output} may hold parts of "
                f"both; remove {output} and prepare {name} again"
            )


def check_same(before: dict[str, Any], plan: Plan, output: Path) -> None:
    """Checks that a preparation that was begun is this one.

    Raises:
      UserError: naming what differs.
    """
    if before == plan.record:
        return
    now = plan.record
    differing = [key for key in now if key != "sources" and before.get(key) != now[key]]
    whats = [f"{key} (then {before.get(key)}, now {now[key]})" for key in differing]
    then, here = ({tuple(entry) for entry in record.get("sources", [])} for record in (before, now))
    changed = sorted({entry[0] for entry in then ^ here})
    if changed:
        whats.append(f"{len(changed):,} source files are new, gone or changed, {changed[0]} among them")
    raise UserError(
        f"--output {output}: a preparation was begun there from something else: {'; '.join(whats)}; remove "
        "the folder to start again, or choose another"
    )


def read_record(path: Path) -> dict[str, Any]:
    """Reads what :func:`make_plan` put into ``Plan.record``. Raises :class:`UserError` if it is damaged."""
    try:
        record = json.loads(path.read_bytes())
        if isinstance(record, dict):
            return record
    except ValueError:
        pass
    raise UserError(f"{path}: damaged; remove the folder of the preparation and start again")
