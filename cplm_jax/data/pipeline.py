"""Grain pipelines: global batches for training and validation, placed on a mesh."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import grain
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Int

from cplm_jax.data.packing import PackedRows, Row
from cplm_jax.sharding import named_sharding


class Batch(NamedTuple):
    """Packed rows; every array has shape (accumulation, rows, length) in training, (rows, length) else."""

    tokens: Int[Array, "*parts length"]
    targets: Int[Array, "*parts length"]
    """The token that follows each position."""
    segment_ids: Int[Array, "*parts length"]
    """Document of each position within its row, from 1; 0 is padding."""
    positions: Int[Array, "*parts length"]
    """Position within the document's part that is in the row."""
    copyable: Bool[Array, "*parts length"]
    """Whether the token is an ordinary one (no BOS, EOS or PAD)."""
    loss_mask: Bool[Array, "*parts length"]
    """Whether the target belongs to the same document and counts."""


class _LocalRows(grain.sources.RandomAccessDataSource):
    """The rows of a stream of global batches that this process holds, in order.

    Args:
      rows: the packed rows.
      columns: indices, within one accumulation part, of the rows held here.
      part_rows: rows of one accumulation part, over all processes.
      total_rows: rows of the whole run, over all processes.
    """

    def __init__(self, rows: PackedRows, columns: list[int], part_rows: int, total_rows: int):
        self._rows, self._columns, self._part_rows, self._total = rows, columns, part_rows, total_rows

    def __len__(self) -> int:
        return self._total // self._part_rows * len(self._columns)

    def __getitem__(self, index: int) -> Row:
        part, column = divmod(int(index), len(self._columns))
        return self._rows.row(part * self._part_rows + self._columns[column])


def local_columns(sharding: NamedSharding, shape: tuple[int, int, int]) -> list[int]:
    """Returns which rows (second axis of ``shape``) the devices of this process hold, ascending."""
    held: set[int] = set()
    for index in sharding.addressable_devices_indices_map(shape).values():
        assert index is not None
        held.update(range(*index[1].indices(shape[1])))
    return sorted(held)


class TrainingBatches:
    """An endless, resumable stream of global training batches.

    Batch i holds rows ``[i * batch_size, (i + 1) * batch_size)`` of ``rows``, whatever the mesh,
    the processes or the prefetching; the state is the number of batches taken.

    Args:
      rows: the packed rows.
      batch_size: rows of a global batch.
      accumulation: parts a batch is computed in; divides ``batch_size``.
      steps: number of batches of the whole run.
      mesh: where batches are placed.
      prefetch: batches prepared ahead; 0 prepares each when asked for.
    """

    def __init__(
        self, rows: PackedRows, batch_size: int, accumulation: int, steps: int, mesh: Mesh, prefetch: int
    ):
        part_rows = batch_size // accumulation
        self._shape = (accumulation, part_rows, rows.sequence_length)
        self.sharding = named_sharding(mesh, None, "batch", "length")
        self._columns = local_columns(self.sharding, self._shape)
        source = _LocalRows(rows, self._columns, part_rows, steps * batch_size)
        options = grain.ReadOptions(num_threads=min(prefetch, 2), prefetch_buffer_size=prefetch)
        dataset: Any = grain.MapDataset.source(source).batch(accumulation * len(self._columns))
        self._iterator = iter(dataset.to_iter_dataset(options))

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        local = next(self._iterator)
        return Batch(**{name: self._place(local[name]) for name in Batch._fields})

    def _place(self, local: np.ndarray) -> jax.Array:
        accumulation, _, length = self._shape
        parts = local.reshape(accumulation, len(self._columns), length)
        first = {column: i for i, column in enumerate(self._columns)}

        def piece(index: Any) -> np.ndarray:
            start, stop, _ = index[1].indices(self._shape[1])
            return parts[index[0], first[start] : first[start] + stop - start, index[2]]

        return jax.make_array_from_callback(self._shape, self.sharding, piece)

    def get_state(self) -> dict[str, Any]:
        """Returns the position in the stream, as JSON."""
        return dict(self._iterator.get_state())

    def set_state(self, state: dict[str, Any]) -> None:
        """Moves to a position that :meth:`get_state` returned."""
        self._iterator.set_state(state)


def validation_batches(rows: PackedRows, batch_size: int, limit: int | None, mesh: Mesh) -> Iterator[Batch]:
    """Yields every row once, in order, or evenly spaced ones; the last batch is filled with padding.

    Args:
      rows: the packed rows, made with ``seed=None``.
      batch_size: rows of a global batch.
      limit: number of batches, whose rows are spread evenly over all of them; ``None`` for all.
      mesh: where batches are placed.
    """
    shape = (batch_size, rows.sequence_length)
    sharding = named_sharding(mesh, "batch", "length")
    total = rows.rows_per_epoch
    used = total if limit is None else min(limit * batch_size, total)
    filler = rows.empty()
    for first in range(0, used, batch_size):

        @functools.cache  # each array of the batch asks for the same rows
        def row(i: int, first: int = first) -> Row:
            return rows.row((first + i) * total // used) if first + i < used else filler

        def place(name: str, row: Any = row) -> jax.Array:
            def piece(index: Any) -> np.ndarray:
                here = range(batch_size)[index[0]]
                return np.stack([row(i)[name] for i in here])[:, index[1]]

            return jax.make_array_from_callback(shape, sharding, piece)

        yield Batch(*map(place, Batch._fields))
