"""Packed rows: every token a target once an epoch, documents apart, random access, for both packers."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cplm_jax.data.packing import PackedRows, fit
from cplm_jax.errors import UserError


class Ids:
    """The part of a tokenizer that packing uses."""

    pad_id, bos_id, eos_id, size = 0, 1, 2, 1000
    control_ids = (0, 1, 2, 3)


class Store:
    """Documents whose tokens are all different, so that a token names its document and position."""

    def __init__(self, lengths, seed=0):
        self.lengths = np.asarray(lengths, np.uint32)
        tokens = np.random.default_rng(seed).permutation(sum(lengths)).astype(np.uint16) + 10
        self.documents = np.split(tokens, np.cumsum(lengths)[:-1])

    def read(self, spans):
        assert all(0 <= a <= b <= len(self.documents[d]) for d, a, b in spans)
        return [self.documents[d][a:b] for d, a, b in spans]

    def framed(self):
        return [[Ids.bos_id, *d.tolist(), Ids.eos_id] for d in self.documents]


def every_row(rows, epoch=0):
    first = epoch * rows.rows_per_epoch
    return rows.rows(list(range(first, first + rows.rows_per_epoch)))


DOCUMENTS = st.lists(st.integers(1, 30), min_size=1, max_size=12)
PACKING = st.sampled_from(["concatenate", "best_fit"])


@settings(max_examples=200, deadline=None)
@given(
    lengths=DOCUMENTS,
    length=st.integers(2, 20),
    seed=st.integers(0, 1000),
    epoch=st.integers(0, 3),
    packing=PACKING,
)
def test_each_epoch_predicts_every_token_of_every_document_once_and_in_order(
    lengths, length, seed, epoch, packing
):
    store = Store(lengths)
    if sum(lengths) + len(lengths) < length:
        with pytest.raises(UserError, match="longer than the whole"):
            PackedRows(store, Ids(), length, seed, "training", packing)
        return
    rows = PackedRows(store, Ids(), length, seed, "training", packing)
    found = every_row(rows, epoch)
    assert all(v.shape == (rows.rows_per_epoch, length) for v in found.values())
    mask = found["loss_mask"]
    pairs = list(zip(found["tokens"][mask].tolist(), found["targets"][mask].tolist(), strict=True))
    expected = [(x, y) for d in store.framed() for x, y in itertools.pairwise(d)]
    # Every (token, next token) of a document is there exactly once, and nothing across documents.
    assert sorted(pairs) == sorted(expected)
    assert rows.padding == pytest.approx(1 - mask.mean())
    first = epoch * rows.rows_per_epoch
    assert [rows.targets_in(first + i) for i in range(rows.rows_per_epoch)] == mask.sum(1).tolist()
    documents = [d.tolist() for d in store.documents]
    for row in range(rows.rows_per_epoch):
        tokens, segments = found["tokens"][row], found["segment_ids"][row]
        np.testing.assert_array_equal(segments > 0, mask[row])
        for segment in range(1, segments.max(initial=0) + 1):
            here = np.flatnonzero(segments == segment)
            # A segment is a run of one document, in its order, and positions count up within it.
            assert np.diff(here).max(initial=1) == 1
            np.testing.assert_array_equal(found["positions"][row][here], np.arange(len(here)))
            text = [t for t in tokens[here].tolist() if t != Ids.bos_id]
            assert not text or any(
                text == d[i : i + len(text)] for d in documents for i in range(len(d)) if d[i] == text[0]
            )
            np.testing.assert_array_equal(found["targets"][row][here][:-1], tokens[here][1:])
    np.testing.assert_array_equal(
        found["copyable"], ~np.isin(found["tokens"], Ids.control_ids) & (found["segment_ids"] > 0)
    )


@settings(max_examples=100, deadline=None)
@given(lengths=DOCUMENTS, length=st.integers(2, 20), seed=st.integers(0, 100))
def test_best_fit_cuts_only_what_is_longer_than_a_row(lengths, length, seed):
    store = Store(lengths)
    if sum(lengths) + len(lengths) < length:
        return
    rows = PackedRows(store, Ids(), length, seed, "training", "best_fit")
    parts = [part for number in range(rows.rows_per_epoch) for part in rows.parts(number)]
    assert len(parts) == sum(-(-(n + 1) // length) for n in lengths)


def slow_best_fit_decreasing(sizes, length):
    """What every account of the algorithm says, one piece at a time."""
    loads = []
    for size in sorted(sizes, reverse=True):
        fitting = [i for i, load in enumerate(loads) if load + size <= length]
        if fitting:
            loads[max(fitting, key=loads.__getitem__)] += size
        else:
            loads.append(size)
    return loads


@settings(max_examples=300, deadline=None)
@given(data=st.data(), length=st.integers(1, 40))
def test_fit_is_best_fit_decreasing(data, length):
    sizes = data.draw(st.lists(st.integers(1, length), min_size=1, max_size=60))
    rows = fit(np.asarray(sizes), length)
    loads = np.bincount(rows, weights=sizes)
    assert sorted(loads.tolist()) == sorted(slow_best_fit_decreasing(sizes, length))


@settings(max_examples=50, deadline=None)
@given(lengths=DOCUMENTS, length=st.integers(2, 20))
def test_unshuffled_rows_are_the_documents_end_to_end(lengths, length):
    store = Store(lengths)
    found = every_row(PackedRows(store, Ids(), length, None, "held-out"))
    inputs = [x for d in store.framed() for x in d[:-1]]
    np.testing.assert_array_equal(found["tokens"].ravel()[: len(inputs)], inputs)
    np.testing.assert_array_equal(
        found["targets"].ravel()[: len(inputs)], [x for d in store.framed() for x in d[1:]]
    )
    assert not found["loss_mask"].ravel()[len(inputs) :].any()


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_epochs_seeds_and_sources_differ(packing):
    store = Store([20] * 20 + [7] * 10)

    def epoch(seed, number, source=0):
        return every_row(PackedRows(store, Ids(), 16, seed, "training", packing, source), number)["tokens"]

    first = epoch(0, 0)
    np.testing.assert_array_equal(first, epoch(0, 0))
    for other in (epoch(0, 1), epoch(1, 0), epoch(0, 0, source=1)):
        assert first.shape == other.shape
        assert (first != other).any()


def test_a_row_of_padding():
    rows = PackedRows(Store([5, 5]), Ids(), 4, None, "held-out")
    found = rows.rows([None, 0])
    assert not found["loss_mask"][0].any()
    assert not found["segment_ids"][0].any()
    assert found["loss_mask"][1].all()
