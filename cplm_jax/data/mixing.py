"""Several sources in one stream of rows, in a fixed ratio, with random access."""

from collections.abc import Sequence

import numpy as np

from cplm_jax.data.packing import PackedRows, Recent, Rows
from cplm_jax.errors import UserError

# Rows in which every source has its share exactly (to a row); within them, the order is random.
PERIOD = 16_384


class MixedRows:
    """Rows of several sources.

    Each stretch of :data:`PERIOD` rows holds the same number from each source, in an order drawn
    from the seed; the rows of a source come in its own order, epoch after epoch. So row i, and how
    many rows of each source come before it, follow from i alone.

    Args:
      sources: rows of each source, of one length.
      weights: share of rows of each source; need not add up to 1.
      seed: seed of the order.

    Attributes:
      shares: rows of each source in a period, as shares; the weights, rounded to a row.

    Raises:
      UserError: if a weight is so small that a source would have no row in a period.
    """

    def __init__(self, sources: Sequence[PackedRows], weights: Sequence[float], seed: int):
        self.sources = list(sources)
        self.sequence_length = self.sources[0].sequence_length
        self._seed = seed
        exact = np.asarray(weights, np.float64) / np.sum(weights) * PERIOD
        self._counts = np.floor(exact).astype(np.int64)
        largest_remainders = np.argsort(self._counts - exact, kind="stable")
        self._counts[largest_remainders[: PERIOD - int(self._counts.sum())]] += 1
        if not self._counts.all():
            which = int(np.argmin(self._counts))
            raise UserError(
                f"data.weights: {weights[which]} of {sum(weights)} is less than one row in {PERIOD:,}; raise "
                "it, or leave that source out"
            )
        self.shares = self._counts / PERIOD
        self._periods: Recent[tuple[np.ndarray, np.ndarray]] = Recent(2)

    def _make_period(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source of each row of a period, and the row's number among that source's there."""
        generator = np.random.Generator(np.random.Philox(key=[self._seed, number + 2**60]))
        source = generator.permutation(np.repeat(np.arange(len(self.sources)), self._counts))
        rank = np.zeros(PERIOD, np.int64)
        for s in range(len(self.sources)):
            rank[source == s] = np.arange(self._counts[s])
        return source, rank

    def locate(self, number: int) -> tuple[int, int]:
        """Returns the source of row ``number``, and its number among that source's rows."""
        if len(self.sources) == 1:
            return 0, number
        period, offset = divmod(number, PERIOD)
        source, rank = self._periods.get(period, self._make_period)
        s = int(source[offset])
        return s, period * int(self._counts[s]) + int(rank[offset])

    def targets_of(self, numbers: Sequence[int]) -> np.ndarray:
        """Returns how many targets the rows ``numbers`` have from each source, int64 (sources,)."""
        found = np.zeros(len(self.sources), np.int64)
        for number in numbers:
            source, row = self.locate(number)
            found[source] += self.sources[source].targets_in(row)
        return found

    def rows(self, numbers: Sequence[int]) -> Rows:
        """Returns rows of the endless stream, as :meth:`PackedRows.rows` does."""
        placed = [self.locate(number) for number in numbers]
        out: Rows = {}
        for s, source in enumerate(self.sources):
            here = [i for i, (which, _) in enumerate(placed) if which == s]
            if not here:
                continue
            found = source.rows([placed[i][1] for i in here])
            if len(here) == len(numbers):
                return found
            for name, values in found.items():
                out.setdefault(name, np.empty((len(numbers), self.sequence_length), values.dtype))
                out[name][here] = values
        return out
