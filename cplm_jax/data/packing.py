"""Packed rows: documents concatenated and split to a fixed length, with random access.

The stream of an epoch is its documents in shuffled order, each ``BOS tokens EOS``. Row i
holds the stream's tokens ``[i T, (i + 1) T)`` and, as targets, the ones that follow; so
every token is a target once an epoch, except the BOS of each document, which is never
predicted from its neighbour. With documents' lengths known, row i is computed directly,
and the state of a data stream is one integer.
"""

from functools import lru_cache

import grain
import numpy as np

from cplm_jax.data.corpus import TokenStore
from cplm_jax.data.tokenizer import Tokenizer, control_mask
from cplm_jax.errors import UserError

Row = dict[str, np.ndarray]


class PackedRows:
    """Rows of every epoch of a token store.

    Args:
      store: the documents.
      tokenizer: names the control tokens.
      sequence_length: T.
      seed: seed of the order of documents and of rows; ``None`` keeps both as stored.
      name: what the documents are, for messages.

    Raises:
      UserError: if the whole stream is shorter than a row.
    """

    def __init__(
        self, store: TokenStore, tokenizer: Tokenizer, sequence_length: int, seed: int | None, name: str
    ):
        self.sequence_length = sequence_length
        self._store, self._tokenizer, self._seed = store, tokenizer, seed
        self._lengths = np.diff(store.offsets) + 2  # BOS and EOS
        self.stream_tokens = int(self._lengths.sum())
        if seed is not None and self.stream_tokens <= sequence_length:
            raise UserError(
                f"data.sequence_length = {sequence_length} is longer than the whole {name} text "
                f"({self.stream_tokens} tokens with BOS and EOS); lower it or add documents"
            )
        # The last token of the stream has no target, so it starts no row.
        self.rows_per_epoch = -(-(self.stream_tokens - 1) // sequence_length)
        self._order = lru_cache(maxsize=2)(self._make_order)

    def _make_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the epoch's documents in order and where each ends in the stream."""
        if self._seed is None:
            order = np.arange(self._store.documents)
        else:
            order = np.random.Generator(np.random.Philox(key=[self._seed, epoch])).permutation(
                self._store.documents
            )
        return order, np.cumsum(self._lengths[order])

    def row(self, number: int) -> Row:
        """Returns row ``number`` of the endless sequence of epochs.

        int32 ``tokens``, ``targets``, ``segment_ids`` (1, 2, ... a document; 0 is padding) and
        ``positions`` (in the part of the document that is in the row), bool ``copyable`` and
        ``loss_mask`` (target is of the same document), each of shape (sequence_length,).
        """
        epoch, index = divmod(number, self.rows_per_epoch)
        if self._seed is not None:
            index = grain.experimental.index_shuffle(
                index, max_index=self.rows_per_epoch - 1, seed=_row_seed(self._seed, epoch), rounds=4
            )
        return self._cut(epoch, index)

    def _cut(self, epoch: int, index: int) -> Row:
        order, ends = self._order(epoch)
        length = self.sequence_length
        start = index * length
        tokens = np.full(length + 1, self._tokenizer.pad_id, np.int32)
        segments = np.zeros(length + 1, np.int32)
        positions = np.zeros(length + 1, np.int32)
        filled, segment = 0, 0
        which = int(np.searchsorted(ends, start, side="right"))
        while filled <= length and which < len(order):
            document = order[which]
            skip = start + filled - int(ends[which] - self._lengths[document])
            part = self._document(document)[skip : skip + length + 1 - filled]
            segment += 1
            here = slice(filled, filled + len(part))
            tokens[here], segments[here], positions[here] = part, segment, np.arange(len(part))
            filled += len(part)
            which += 1
        return {
            "tokens": tokens[:-1],
            "targets": tokens[1:],
            "segment_ids": segments[:-1],
            "positions": positions[:-1],
            "copyable": control_mask(tokens[:-1], self._tokenizer.control_ids) & (segments[:-1] > 0),
            "loss_mask": (segments[1:] == segments[:-1]) & (segments[1:] > 0),
        }

    def empty(self) -> Row:
        """Returns a row of padding, which fills up the last validation batch."""
        nothing = np.zeros(self.sequence_length, np.int32)
        padding = np.full(self.sequence_length, self._tokenizer.pad_id, np.int32)
        return {
            "tokens": padding,
            "targets": padding,
            "segment_ids": nothing,
            "positions": nothing,
            "copyable": nothing.astype(bool),
            "loss_mask": nothing.astype(bool),
        }

    def _document(self, document: int) -> np.ndarray:
        start, stop = self._store.offsets[document : document + 2]
        framed = np.empty(stop - start + 2, np.int32)
        framed[0], framed[-1] = self._tokenizer.bos_id, self._tokenizer.eos_id
        framed[1:-1] = self._store.tokens[start:stop]
        return framed


def _row_seed(seed: int, epoch: int) -> int:
    # index_shuffle takes 32 bits; a counter-based generator spreads (seed, epoch) over them.
    return int(np.random.Philox(key=[seed, epoch]).random_raw() >> 32)
