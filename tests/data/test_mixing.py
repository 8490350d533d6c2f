"""Several sources in one stream: weights, accounts and random access."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cplm_jax.data import mixing
from cplm_jax.data.mixing import PERIOD, MixedRows
from cplm_jax.data.packing import PackedRows
from cplm_jax.errors import UserError
from tests.data.test_packing import Ids, Store


def make_sources(count, packing="concatenate", length=8):
    return [
        PackedRows(Store([5 + s, 9, 3 * s + 1] * 4, seed=s), Ids(), length, 0, "training", packing, s)
        for s in range(count)
    ]


@settings(max_examples=50, deadline=None)
@given(
    weights=st.lists(st.floats(0.1, 100), min_size=1, max_size=5),
    seed=st.integers(0, 2**31 - 1),
    start=st.integers(0, 10**12),
)
def test_rows_of_each_source_come_in_its_order_without_a_gap(weights, seed, start):
    rows = MixedRows(make_sources(len(weights)), weights, seed)
    placed = [rows.locate(number) for number in range(start, start + 300)]
    for source in range(len(weights)):
        numbers = [row for which, row in placed if which == source]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
    again = MixedRows(make_sources(len(weights)), weights, seed)
    assert [again.locate(n) for n in range(start, start + 300)] == placed


@settings(max_examples=20, deadline=None)
@given(weights=st.lists(st.floats(0.05, 20), min_size=2, max_size=5), period=st.integers(0, 1000))
def test_weights_hold_to_a_row_in_each_period(weights, period):
    rows = MixedRows(make_sources(len(weights)), weights, seed=3)
    found = Counter(rows.locate(n)[0] for n in range(period * PERIOD, (period + 1) * PERIOD))
    for source, weight in enumerate(weights):
        assert abs(found[source] - weight / sum(weights) * PERIOD) < 1
        assert found[source] == round(rows.shares[source] * PERIOD)


def test_short_stretches_have_the_weights_within_sampling_error():
    rows = MixedRows(make_sources(2), [3, 1], seed=0)
    share = np.asarray([rows.locate(n)[0] == 0 for n in range(10 * PERIOD)]).reshape(-1, 256).mean(1)
    deviation = np.sqrt(0.75 * 0.25 / 256)
    assert abs(share.mean() - 0.75) < 1e-9
    assert 0.8 < share.std() / deviation < 1.1
    assert np.abs(share - 0.75).max() < 5 * deviation


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_rows_are_those_of_the_sources_and_are_counted(monkeypatch, packing):
    monkeypatch.setattr(mixing, "PERIOD", 10)
    sources = make_sources(3, packing)
    rows = MixedRows(sources, [5, 3, 2], seed=1)
    numbers = list(range(7, 47))
    found = rows.rows(numbers)
    counts = np.zeros(3, int)
    for place, number in enumerate(numbers):
        which, row = rows.locate(number)
        alone = sources[which].rows([row])
        for name, values in alone.items():
            np.testing.assert_array_equal(found[name][place], values[0])
        counts[which] += alone["loss_mask"].sum()
    np.testing.assert_array_equal(rows.targets_of(numbers), counts)
    assert counts.sum() == found["loss_mask"].sum()


def test_each_source_has_epochs_of_its_own(monkeypatch):
    monkeypatch.setattr(mixing, "PERIOD", 10)
    sources = make_sources(2)
    rows = MixedRows(sources, [4, 1], seed=1)
    first = [[], []]
    number = 0
    while any(len(f) < s.rows_per_epoch for f, s in zip(first, sources, strict=True)):
        which, row = rows.locate(number)
        if len(first[which]) < sources[which].rows_per_epoch:
            first[which].append(row)
        number += 1
    for numbers, source in zip(first, sources, strict=True):
        targets = source.rows(numbers)
        seen = Counter(targets["targets"][targets["loss_mask"]].tolist())
        tokens = source._documents.documents
        assert seen == Counter([t for d in tokens for t in [*d.tolist(), Ids.eos_id]])


def test_a_weight_too_small_to_be_seen_is_refused():
    with pytest.raises(UserError, match=r"data\.weights: 1e-06 of .* is less than one row in 16,384"):
        MixedRows(make_sources(2), [1, 1e-6], seed=0)
