"""Grain pipelines: global batches for training and validation, placed on a mesh."""

import functools
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import absl.flags
import grain
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Int

from cplm_jax.config import Config, DataConfig
from cplm_jax.data.corpus import Corpus
from cplm_jax.data.mixing import MixedRows
from cplm_jax.data.packing import PackedRows, Rows
from cplm_jax.errors import MachineError, UserError, first_line
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


def make_rows(corpus: Corpus, config: Config) -> tuple[MixedRows, PackedRows]:
    """Returns the rows that a run trains on, and those it validates on.

    Held-out rows are always concatenated, so that runs with either packing measure the same.

    Raises:
      UserError: if a source is shorter than a row, or has too little weight to be seen.
    """
    data, tokenizer = config.data, corpus.tokenizer
    several = len(corpus.sources) > 1
    names = [f"training text of {source.name}" if several else "training text" for source in corpus.sources]
    packed = [
        PackedRows(
            source.documents,
            tokenizer,
            data.sequence_length,
            config.seed,
            names[number],
            data.packing,
            number,
        )
        for number, source in enumerate(corpus.sources)
    ]
    weights = [source.weight for source in corpus.sources]
    return MixedRows(packed, weights, config.seed), held_out_rows(corpus, config)


def held_out_rows(corpus: Corpus, config: Config) -> PackedRows:
    """Returns the rows that a run validates on: the held-out documents as they are stored, end to end."""
    return PackedRows(corpus.validation, corpus.tokenizer, config.data.sequence_length, None, "held-out text")


class _LocalBatches(grain.sources.RandomAccessDataSource):
    """The rows of a run's global batches that this process holds; element i is batch i.

    Args:
      rows: the rows of the run.
      columns: indices, within one accumulation part, of the rows held here.
      accumulation: parts of a batch.
      part_rows: rows of one accumulation part, over all processes.
      steps: batches of the run.
    """

    def __init__(self, rows: MixedRows, columns: list[int], accumulation: int, part_rows: int, steps: int):
        self._rows, self._columns, self._steps = rows, columns, steps
        self._accumulation, self._part_rows = accumulation, part_rows

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: Any) -> Rows:
        first = int(index) * self._accumulation * self._part_rows
        parts = range(first, first + self._accumulation * self._part_rows, self._part_rows)
        local = self._rows.rows([part + column for part in parts for column in self._columns])
        everywhere = range(first, first + self._accumulation * self._part_rows)
        local["source_tokens"] = self._rows.targets_of(everywhere)
        return local


def local_columns(sharding: NamedSharding, shape: tuple[int, int, int]) -> list[int]:
    """Returns which rows (second axis of ``shape``) the devices of this process hold, ascending."""
    held: set[int] = set()
    for index in sharding.addressable_devices_indices_map(shape).values():
        assert index is not None
        held.update(range(*index[1].indices(shape[1])))
    return sorted(held)


def _leave_interrupts_to_parent(worker: int, workers: int) -> None:
    del worker, workers
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class TrainingBatches:
    """A resumable stream of global training batches.

    Batch i holds rows ``[i * batch_size, (i + 1) * batch_size)`` of ``rows``, whatever the mesh, the
    processes, the workers or the prefetching; the state is the number of batches taken.

    Args:
      rows: the rows of the run.
      batch_size: rows of a global batch.
      accumulation: parts a batch is computed in; divides ``batch_size``.
      steps: number of batches of the whole run.
      mesh: where batches are placed.
      config: ``prefetch`` and ``workers``.

    Attributes:
      source_tokens: targets that the batches taken had from each source, over all processes.
      seconds_waited: time until batches that were asked for were there, since this object was made.
    """

    def __init__(
        self, rows: MixedRows, batch_size: int, accumulation: int, steps: int, mesh: Mesh, config: DataConfig
    ):
        part_rows = batch_size // accumulation
        self._shape = (accumulation, part_rows, rows.sequence_length)
        self.sharding = named_sharding(mesh, None, "batch", "length")
        self._columns = local_columns(self.sharding, self._shape)
        self._source = _LocalBatches(rows, self._columns, accumulation, part_rows, steps)
        self._prefetch, self._workers = config.prefetch, config.workers
        self.seconds_waited = 0.0
        self._iterator: Any = None
        self._ahead: Future[tuple[Batch, np.ndarray]] | None = None
        self.set_state({"batches": 0, "source_tokens": [0] * len(rows.sources)})

    def set_state(self, state: dict[str, Any]) -> None:
        """Moves to a position that :meth:`get_state` returned."""
        self.close()
        self._taken = int(state["batches"])
        self.source_tokens = np.asarray(state["source_tokens"], np.int64)

    def get_state(self) -> dict[str, Any]:
        """Returns the position in the stream, as JSON."""
        return {"batches": self._taken, "source_tokens": self.source_tokens.tolist()}

    def close(self) -> None:
        """Ends the threads and processes that prepare batches; the next batch starts them again."""
        if self._iterator is not None:
            self._placing.shutdown(cancel_futures=True)
            self._iterator.close()
            self._iterator = self._ahead = None

    def _start(self) -> None:
        options = grain.ReadOptions(num_threads=min(self._prefetch, 2), prefetch_buffer_size=self._prefetch)
        # Grain's own position depends on the number of workers, so a stream begins where it is needed.
        dataset: Any = grain.MapDataset.source(self._source)[self._taken :].to_iter_dataset(options)
        if self._workers:
            # Grain reads absl's flags in its workers, which only absl's own main function parses.
            absl.flags.FLAGS.mark_as_parsed()
            # Through pipes: shared memory that a stop leaves behind is not given back, and containers have
            # as little as 64 MiB of it.
            dataset = grain.experimental.WithOptionsIterDataset(
                dataset, grain.experimental.DatasetOptions(min_shm_size=sys.maxsize)
            )
            dataset = dataset.mp_prefetch(
                grain.MultiprocessingOptions(self._workers, per_worker_buffer_size=max(self._prefetch, 1)),
                _leave_interrupts_to_parent,
            )
        self._iterator = iter(dataset)
        self._placing = ThreadPoolExecutor(1, "placing batches")

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._taken >= len(self._source):
            raise StopIteration
        began = time.perf_counter()
        if self._iterator is None:
            self._start()
        batch, drawn = self._make() if self._ahead is None else self._ahead.result()
        # Until here: starting on the batch after it, this thread competes with others, while devices compute.
        self.seconds_waited += time.perf_counter() - began
        self._taken += 1
        self.source_tokens = self.source_tokens + drawn
        self._ahead = None
        if self._prefetch and self._taken < len(self._source):  # to the devices, while they compute
            self._ahead = self._placing.submit(self._make)
        return batch

    def _make(self) -> tuple[Batch, np.ndarray]:
        """Returns the next batch, on the devices, and its targets from each source."""
        try:
            local = next(self._iterator)
        except UserError as e:  # Grain adds a remark about tracebacks
            raise UserError(str(e).partition("\n---")[0]) from e
        except RuntimeError as e:
            if not self._workers:
                raise
            raise MachineError(
                f"a process of data.workers failed ({first_line(e)}), perhaps for want of memory; the same "
                "command goes on from the newest checkpoint"
            ) from e
        return Batch(**{name: self._place(local[name]) for name in Batch._fields}), local["source_tokens"]

    def _place(self, local: np.ndarray) -> jax.Array:
        accumulation, _, length = self._shape
        parts = local.reshape(accumulation, len(self._columns), length)
        first = {column: i for i, column in enumerate(self._columns)}

        def piece(index: Any) -> np.ndarray:
            start, stop, _ = index[1].indices(self._shape[1])
            return parts[index[0], first[start] : first[start] + stop - start, index[2]]

        return jax.make_array_from_callback(self._shape, self.sharding, piece)


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
    for first in range(0, used, batch_size):

        @functools.cache  # each array of the batch asks for the same rows
        def part(start: int, stop: int, first: int = first) -> Rows:
            numbers = [i * total // used if i < used else None for i in range(first + start, first + stop)]
            return rows.rows(numbers)

        def place(name: str, part: Any = part) -> jax.Array:
            def piece(index: Any) -> np.ndarray:
                start, stop, _ = index[0].indices(batch_size)
                return part(start, stop)[name][:, index[1]]

            return jax.make_array_from_callback(shape, sharding, piece)

        yield Batch(*map(place, Batch._fields))
