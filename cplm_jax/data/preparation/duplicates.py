"""Which documents occurred before, found from digests on disk in bounded memory."""

from collections.abc import Sequence

import numpy as np

from cplm_jax.data.preparation.units import Unit
from cplm_jax.data.shards import write_file

# Documents whose digests are sorted at a time: 24 bytes each.
_AT_A_TIME = 16_000_000


def find_duplicates(units: Sequence[Unit], at_a_time: int = _AT_A_TIME) -> int:
    """Writes, for each unit, the numbers of its documents whose text occurred earlier in the input.

    Digests are uniform, so those in each of a number of equal ranges are sorted by themselves.

    Args:
      units: all units, in order; their digests are written.
      at_a_time: documents to sort at a time, about.

    Returns:
      The number of documents that occurred before.
    """
    digests = [np.load(unit.digests_file, mmap_mode="r") if _any(unit) else _NONE for unit in units]
    ranges = max(1, -(-sum(map(len, digests)) // at_a_time))
    found: list[list[np.ndarray]] = [[] for _ in units]
    for part in range(ranges):
        low, high = (np.uint64(min(2**64 * i // ranges, 2**64 - 1)) for i in (part, part + 1))
        keys, owners, places = [], [], []
        for number, digest in enumerate(digests):
            first = digest[:, 0].astype(np.uint64)
            inside = first >= low
            if part + 1 < ranges:
                inside &= first < high
            place = np.flatnonzero(inside)
            keys.append(digest[place].astype(np.uint64))
            owners.append(np.full(len(place), number, np.int32))
            places.append(place.astype(np.int64))
        key, owner, place = np.concatenate(keys), np.concatenate(owners), np.concatenate(places)
        order = np.lexsort((key[:, 1], key[:, 0]))  # stable: of equal ones, the first in the input leads
        ordered = key[order]
        again = order[1:][(ordered[1:] == ordered[:-1]).all(axis=1)]
        again = again[np.argsort(owner[again], kind="stable")]
        numbers, starts = np.unique(owner[again], return_index=True)
        for number, mine in zip(numbers.tolist(), np.split(again, starts[1:]), strict=False):
            found[number].append(place[mine])
    total = 0
    for unit, parts in zip(units, found, strict=True):
        numbers = np.sort(np.concatenate(parts)) if parts else np.zeros(0, np.int64)
        total += len(numbers)
        write_file(unit.duplicates_file, numbers)
    return total


_NONE = np.zeros((0, 2), np.uint64)


def _any(unit: Unit) -> bool:
    return len(np.load(unit.digests_file)) > 0  # an empty array cannot be mapped
