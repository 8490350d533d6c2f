"""Which documents occurred before, found from digests on disk in bounded memory."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cplm_jax.data.preparation.units import Unit
from cplm_jax.data.shards import write_file

# Documents whose digests are sorted at a time: up to 80 bytes each.
_AT_A_TIME = 8_000_000
_NPY_HEADER = 128


def find_duplicates(units: Sequence[Unit], at_a_time: int = _AT_A_TIME) -> int:
    """Writes, for each unit, the numbers of its documents whose text occurred earlier in the input.

    Digests are uniform, so those in each of a number of equal ranges are sorted by themselves. Every unit
    has a digest but once, so that many copies of one text do not crowd a range. What grows with the input
    is four bytes for each duplicate.

    Args:
      units: all units, in order; their digests are written.
      at_a_time: documents to sort at a time, about.

    Returns:
      The number of documents that occurred before.
    """
    total = sum(unit.digests_file.stat().st_size - _NPY_HEADER for unit in units) // 24
    ranges = max(1, -(-total // at_a_time))
    found: list[list[np.ndarray]] = [[np.load(unit.repeats_file)] for unit in units]
    for part in range(ranges):
        low, high = (min(2**64 * i // ranges, 2**64) for i in (part, part + 1))
        rows = [_between(unit.digests_file, low, high) for unit in units]
        owner = np.repeat(np.arange(len(units), dtype=np.int32), [len(row) for row in rows])
        entries = np.concatenate(rows)
        order = np.lexsort((entries[:, 1], entries[:, 0]))  # stable: the first in the input leads
        ordered = entries[order, :2]
        again = order[1:][(ordered[1:] == ordered[:-1]).all(axis=1)]
        again.sort()  # by unit
        places = entries[again, 2].astype(np.uint32)
        numbers, starts = np.unique(owner[again], return_index=True)
        for number, mine in zip(numbers.tolist(), np.split(places, starts[1:]), strict=False):
            found[number].append(mine)
    total = 0
    for unit, parts in zip(units, found, strict=True):
        duplicates = np.sort(np.concatenate(parts))
        total += len(duplicates)
        write_file(unit.duplicates_file, duplicates)
    return total


def _between(path: Path, low: int, high: int) -> np.ndarray:
    """Returns the rows of a sorted file whose key begins with a number in ``[low, high)``.

    Files are mapped one at a time, as each that is mapped counts as an open one.
    """
    if path.stat().st_size <= _NPY_HEADER:  # an empty array cannot be mapped
        return np.zeros((0, 3), np.uint64)
    rows = np.load(path, mmap_mode="r")
    first = np.searchsorted(rows[:, 0], np.uint64(low))
    end = len(rows) if high == 2**64 else np.searchsorted(rows[:, 0], np.uint64(high))
    return np.array(rows[first:end])
