"""Packed rows: every token a target once an epoch, documents apart, random access."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cplm_jax.data.corpus import TokenStore
from cplm_jax.data.packing import PackedRows
from cplm_jax.errors import UserError


class Ids:
    """The part of a tokenizer that packing uses."""

    pad_id, bos_id, eos_id = 0, 1, 2
    control_ids = (0, 1, 2, 3)


def make_store(lengths, seed=0):
    rng = np.random.default_rng(seed)
    # Each document has ids of its own, so that a token names its document and position.
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = (np.arange(offsets[-1]) + 10).astype(np.uint32)
    rng.shuffle(tokens)
    return TokenStore(tokens, offsets, [str(i) for i in range(len(lengths))], 0)


def framed(store):
    return [
        [Ids.bos_id, *store.tokens[a:b].tolist(), Ids.eos_id]
        for a, b in zip(store.offsets, store.offsets[1:], strict=False)
    ]


DOCUMENTS = st.lists(st.integers(1, 30), min_size=1, max_size=12)


@settings(max_examples=100, deadline=None)
@given(lengths=DOCUMENTS, length=st.integers(2, 20), seed=st.integers(0, 1000), epoch=st.integers(0, 3))
def test_each_epoch_predicts_every_token_of_every_document_once_and_in_order(lengths, length, seed, epoch):
    store = make_store(lengths)
    if sum(lengths) + 2 * len(lengths) <= length:
        with pytest.raises(UserError, match="longer than the whole"):
            PackedRows(store, Ids(), length, seed, "training")
        return
    rows = PackedRows(store, Ids(), length, seed, "training")
    pairs, bos = [], 0
    for number in range(epoch * rows.rows_per_epoch, (epoch + 1) * rows.rows_per_epoch):
        row = rows.row(number)
        assert all(v.shape == (length,) for v in row.values())
        pairs += [
            (int(x), int(y))
            for x, y, m in zip(row["tokens"], row["targets"], row["loss_mask"], strict=True)
            if m
        ]
        bos += int((row["tokens"] == Ids.bos_id).sum())
        # A segment is a run of one document, and positions count up within it.
        for segment in set(row["segment_ids"].tolist()) - {0}:
            here = row["segment_ids"] == segment
            np.testing.assert_array_equal(row["positions"][here], np.arange(here.sum()))
            assert np.diff(np.flatnonzero(here)).max(initial=1) == 1
        assert not row["copyable"][np.isin(row["tokens"], Ids.control_ids)].any()
        assert row["copyable"][~np.isin(row["tokens"], Ids.control_ids) & (row["segment_ids"] > 0)].all()
    expected = [(x, y) for d in framed(store) for x, y in itertools.pairwise(d)]
    # Every (token, next token) of a document is there exactly once, and nothing across documents.
    assert sorted(pairs) == sorted(expected)
    assert bos == len(lengths)


@settings(max_examples=50, deadline=None)
@given(lengths=DOCUMENTS, length=st.integers(2, 20))
def test_unshuffled_rows_are_the_stream(lengths, length):
    store = make_store(lengths)
    rows = PackedRows(store, Ids(), length, None, "held-out")
    stream = [x for d in framed(store) for x in d]
    got = np.concatenate([rows.row(i)["tokens"] for i in range(rows.rows_per_epoch)])
    got_targets = np.concatenate([rows.row(i)["targets"] for i in range(rows.rows_per_epoch)])
    usable = min(len(stream) - 1, len(got))
    np.testing.assert_array_equal(got[:usable], stream[:usable])
    np.testing.assert_array_equal(got_targets[:usable], stream[1 : usable + 1])


def test_epochs_differ_and_seeds_differ():
    store = make_store([20] * 30)

    def epoch(seed, number):
        rows = PackedRows(store, Ids(), 16, seed, "training")
        start = number * rows.rows_per_epoch
        return np.stack([rows.row(i)["tokens"] for i in range(start, start + rows.rows_per_epoch)])

    first = epoch(0, 0)
    np.testing.assert_array_equal(first, epoch(0, 0))
    assert (first != epoch(0, 1)).any()
    assert (first != epoch(1, 0)).any()
