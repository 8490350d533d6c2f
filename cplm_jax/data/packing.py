"""Packed rows: documents laid into rows of a fixed length, with random access.

A document of n tokens, framed as ``BOS tokens EOS``, makes n + 1 predictions: of each token from the
ones before it, and of EOS. Rows consist of predictions, an input and its target at each position, so
every token is a target once an epoch, and nothing is ever predicted from a neighbour.

Two ways of packing are a matter of which predictions share a row. ``concatenate`` lays the shuffled
documents end to end and cuts every T predictions: no padding, but most rows begin and end inside a
document. ``best_fit`` cuts only what is longer than a row, and fits the pieces into rows as whole
ones: a little padding, and far fewer cut documents (best-fit decreasing; Ding et al. 2024, "Fewer
Truncations Improve Language Modeling"). Either way the epoch's order follows from lengths and seed
alone, so row i is computed directly, and the state of a stream is one integer.
"""

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Generic, NamedTuple, Protocol, TypeVar

import grain
import numpy as np

from cplm_jax.data.shards import Span
from cplm_jax.data.tokenizer import Tokenizer
from cplm_jax.errors import UserError

Rows = dict[str, np.ndarray]


_T = TypeVar("_T")


class Recent(Generic[_T]):
    """The last results of a function of a number, made once whichever thread asks; pickled without them.

    Args:
      keep: results to keep.
    """

    def __init__(self, keep: int):
        self._keep, self._lock = keep, threading.Lock()
        self._found: dict[int, _T] = {}

    def get(self, number: int, make: Callable[[int], _T]) -> _T:
        """Returns ``make(number)``."""
        with self._lock:
            result = self._found.pop(number) if number in self._found else make(number)
            self._found[number] = result  # the last in order, so that the first was not asked for longest
            if len(self._found) > self._keep:
                del self._found[next(iter(self._found))]
            return result

    def __reduce__(self) -> tuple[type["Recent"], tuple[int]]:
        return Recent, (self._keep,)


class DocumentSource(Protocol):
    """What rows are made from."""

    lengths: np.ndarray
    """Tokens of each document, without BOS and EOS."""

    def read(self, spans: Sequence[Span]) -> list[np.ndarray]:
        """Returns the token ids of parts of documents."""


class Part(NamedTuple):
    """Predictions ``[start, stop)`` of a document, in a row."""

    document: int
    start: int
    stop: int


class _Concatenated:
    """An epoch's documents end to end, cut every T predictions.

    Args:
      predictions: of each document, int64.
      length: T.
      order: of the documents.
    """

    def __init__(self, predictions: np.ndarray, length: int, order: np.ndarray):
        self._order, self._length = order, length
        self._predictions = predictions
        self._ends = np.cumsum(predictions[order])

    def parts(self, row: int) -> list[Part]:
        """Returns what a row of the epoch consists of."""
        start, found = row * self._length, []
        stop = min(start + self._length, int(self._ends[-1]))
        which = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            document, end = int(self._order[which]), int(self._ends[which])
            first = end - int(self._predictions[document])
            found.append(Part(document, start - first, min(stop, end) - first))
            start, which = end, which + 1
        return found

    def size(self, row: int) -> int:
        """Returns the predictions of a row of the epoch."""
        return min(self._length, int(self._ends[-1]) - row * self._length)


class _BestFit:
    """An epoch's documents fitted into rows.

    Args:
      predictions: of each document, int64.
      length: T.
      order: of the documents; which of equally long ones share a row depends on it.
    """

    def __init__(self, predictions: np.ndarray, length: int, order: np.ndarray):
        self._predictions, self._length, self._order = predictions, length, order
        pieces = -(-predictions[order] // length)
        self._first = np.cumsum(pieces) - pieces  # piece that each document of the order begins with
        total = int(pieces.sum())
        sizes = np.full(total, length, np.int64)
        sizes[self._first + pieces - 1] = predictions[order] - (pieces - 1) * length
        rows = fit(sizes, length)
        # Keys that are all different have one order, whichever way a machine sorts.
        keys = rows * total + np.arange(total)
        keys.sort()
        keys %= total
        self._pieces = keys.astype(np.int32 if total < 2**31 else np.int64)
        self._starts = np.concatenate([[0], np.cumsum(np.bincount(rows))])
        self._sizes = np.bincount(rows, sizes).astype(np.int32)

    @property
    def rows(self) -> int:
        """Number of rows of the epoch."""
        return len(self._starts) - 1

    def parts(self, row: int) -> list[Part]:
        """Returns what a row of the epoch consists of."""
        found = []
        for piece in self._pieces[self._starts[row] : self._starts[row + 1]].tolist():
            place = int(np.searchsorted(self._first, piece, side="right")) - 1
            document = int(self._order[place])
            start = (piece - int(self._first[place])) * self._length
            found.append(Part(document, start, min(start + self._length, int(self._predictions[document]))))
        return found

    def size(self, row: int) -> int:
        """Returns the predictions of a row of the epoch."""
        return int(self._sizes[row])


def fit(sizes: np.ndarray, length: int) -> np.ndarray:
    """Assigns pieces to rows by best-fit decreasing.

    Each piece, the longest first, goes into the fullest row that has room for it. Pieces of a size
    are placed together: a row once begun takes as many of them as fit before another one does, so
    the work grows with the number of sizes and of rows' fillings, not of pieces.

    Args:
      sizes: of the pieces, from 1 to ``length``.
      length: of a row.

    Returns:
      The row of each piece, int64.
    """
    descending = length - sizes
    if length < 2**16:
        descending = descending.astype(np.uint16)  # which NumPy sorts by radix
    by_size = np.argsort(descending, kind="stable")
    counts = np.bincount(sizes, minlength=length + 1)
    rows = np.zeros(len(sizes), np.int64)
    room: list[list[np.ndarray]] = [[] for _ in range(length + 1)]  # rows by the room they have left
    has_room = 0  # bit r: some row has room r
    begun = placed = 0
    for size in np.flatnonzero(counts)[::-1].tolist():
        todo = int(counts[size])
        while todo:
            open_for = has_room >> size
            if open_for:
                free = size + (open_for & -open_for).bit_length() - 1
                candidates = np.concatenate(room[free])
                room[free] = []
                has_room &= ~(1 << free)
            else:
                free = length
                candidates = np.arange(begun, begun - (-todo // (length // size)))
                begun += len(candidates)
            each = free // size
            used = min(len(candidates), -(-todo // each))
            taken = np.repeat(candidates[:used], each)[:todo]
            rows[by_size[placed : placed + len(taken)]] = taken
            placed += len(taken)
            todo -= len(taken)
            full = used if len(taken) == used * each else used - 1
            left_over = [
                (candidates[:full], free - each * size),
                (candidates[full:used], free - (len(taken) - full * each) * size),
                (candidates[used:], free),
            ]
            for which, left in left_over:
                if len(which) and left:
                    room[left].append(which)
                    has_room |= 1 << left
    return rows


class PackedRows:
    """Rows of every epoch of documents.

    Args:
      documents: the documents.
      tokenizer: names the control tokens.
      sequence_length: T.
      seed: seed of the order of documents and of rows; ``None`` keeps both as stored.
      name: what the documents are, for messages.
      packing: ``concatenate`` or ``best_fit``.
      source: number of the source; sources of one seed are shuffled differently.

    Attributes:
      rows_per_epoch: number of rows.
      predictions: of an epoch.
      padding: share of all positions that are padding.

    Raises:
      UserError: if all documents together are shorter than a row, and rows are for training.
    """

    def __init__(
        self,
        documents: DocumentSource,
        tokenizer: Tokenizer,
        sequence_length: int,
        seed: int | None,
        name: str,
        packing: str = "concatenate",
        source: int = 0,
    ):
        self.sequence_length = sequence_length
        self._documents, self._tokenizer, self._seed, self._source = documents, tokenizer, seed, source
        self._predictions = documents.lengths.astype(np.int64) + 1
        self._packing = packing
        self.predictions = int(self._predictions.sum())
        if seed is not None and self.predictions < sequence_length:
            raise UserError(
                f"data.sequence_length = {sequence_length} is longer than the whole {name} "
                f"({self.predictions} tokens with EOS); lower it or add documents"
            )
        self._is_control = np.zeros(max(tokenizer.size, tokenizer.pad_id + 1), bool)
        self._is_control[list(tokenizer.control_ids)] = True
        self._count = np.arange(sequence_length, dtype=np.int32)
        # An epoch takes longer to order than a row to read, so a neighbour is kept: prefetching crosses.
        self._layouts: Recent[_Concatenated | _BestFit] = Recent(2)
        self.rows_per_epoch = -(-self.predictions // sequence_length)
        if packing == "best_fit":
            first = self._layouts.get(0, self._make_layout)
            assert isinstance(first, _BestFit)
            self.rows_per_epoch = first.rows  # of every epoch: it follows from the lengths alone
        self.padding = 1 - self.predictions / (self.rows_per_epoch * sequence_length)

    def _make_layout(self, epoch: int) -> _Concatenated | _BestFit:
        count = len(self._predictions)
        order = np.arange(count)
        if self._seed is not None:
            order = np.random.Generator(np.random.Philox(key=[self._seed, self._stream(epoch)])).permutation(
                count
            )
        order = order.astype(np.int32 if count < 2**31 else np.int64)
        layout = _BestFit if self._packing == "best_fit" else _Concatenated
        return layout(self._predictions, self.sequence_length, order)

    def _stream(self, epoch: int) -> int:
        return epoch + (self._source << 40)

    def _place(self, number: int) -> tuple[_Concatenated | _BestFit, int]:
        epoch, index = divmod(number, self.rows_per_epoch)
        if self._seed is not None:
            index = grain.experimental.index_shuffle(
                index,
                max_index=self.rows_per_epoch - 1,
                seed=_row_seed(self._seed, self._stream(epoch)),
                rounds=4,
            )
        return self._layouts.get(epoch, self._make_layout), index

    def parts(self, number: int) -> list[Part]:
        """Returns what row ``number`` of the endless sequence of epochs consists of, in order."""
        layout, index = self._place(number)
        return layout.parts(index)

    def targets_in(self, number: int) -> int:
        """Returns the number of targets in row ``number`` of the endless sequence of epochs."""
        layout, index = self._place(number)
        return layout.size(index)

    def rows(self, numbers: Sequence[int | None]) -> Rows:
        """Returns rows of the endless sequence of epochs; None stands for a row of padding.

        int32 ``tokens``, ``targets``, ``segment_ids`` (1, 2, ... a document; 0 is padding) and
        ``positions`` (in the part of the document that is in the row), bool ``copyable`` and
        ``loss_mask`` (not padding), each of shape (len(numbers), sequence_length).
        """
        shape = len(numbers), self.sequence_length
        tokens = np.full(shape, self._tokenizer.pad_id, np.int32)
        targets, segments, positions = tokens.copy(), np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        parts = [[] if n is None else self.parts(n) for n in numbers]
        # Prediction i reads framed token i, which is token i - 1 of the document, and has token i as target.
        spans = [
            Span(d, max(a - 1, 0), min(b, int(self._predictions[d]) - 1)) for row in parts for d, a, b in row
        ]
        texts = iter(self._documents.read(spans))
        for r, row in enumerate(parts):
            place = 0
            for segment, (document, start, stop) in enumerate(row, start=1):
                text, here = next(texts), slice(place, place + stop - start)
                inputs, outputs = tokens[r, here], targets[r, here]
                ends = stop == self._predictions[document]
                if start == 0:
                    inputs[0] = self._tokenizer.bos_id
                    inputs[1:] = text[: stop - 1]
                    outputs[: len(text)] = text
                else:
                    inputs[:] = text[: stop - start]
                    outputs[: len(text) - 1] = text[1:]
                if ends:
                    outputs[-1] = self._tokenizer.eos_id
                segments[r, here] = segment
                positions[r, here] = self._count[: stop - start]
                place = here.stop
        real = segments > 0
        return {
            "tokens": tokens,
            "targets": targets,
            "segment_ids": segments,
            "positions": positions,
            "copyable": ~self._is_control[tokens] & real,
            "loss_mask": real,
        }


@lru_cache(maxsize=8)
def _row_seed(seed: int, stream: int) -> int:
    # index_shuffle takes 32 bits; a counter-based generator spreads both over them.
    return int(np.random.Philox(key=[seed, stream]).random_raw() >> 32)
