"""Double-word arithmetic against float64 and against exact fractions."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cplm_jax.double_word import DoubleWord, log_share, log_softmax, logsumexp, product, softmax
from cplm_jax.precision import LOWEST

large = st.floats(-65504, 65504, width=32).filter(lambda x: x == 0 or abs(x) > 1e-20)


def exact(x):
    return Fraction(float(x.value)) + Fraction(float(x.lost))


@settings(max_examples=200, deadline=None)
@given(numbers=st.lists(large, min_size=1, max_size=8))
def test_sums_and_differences_keep_48_bits(numbers):
    total, expected, size = DoubleWord.of(jnp.float32(0)), Fraction(0), Fraction(0)
    for i, x in enumerate(numbers):
        sign = (-1) ** i
        total = total - jnp.float32(x) if i % 2 else total + DoubleWord.of(jnp.float32(x))
        expected, size = expected + sign * Fraction(x), size + abs(Fraction(x))
    assert abs(exact(total) - expected) <= size * Fraction(len(numbers), 2**47)
    assert total.value == np.float32(float(total.value) + float(total.lost))


@settings(max_examples=200, deadline=None)
@given(a=large, b=large, small=st.floats(-1, 1, width=32))
def test_products_keep_45_bits(a, b, small):
    factor = DoubleWord.of(jnp.float32(b)) + jnp.float32(small)
    for multiply in (product, jax.jit(product)):
        result = multiply(jnp.float32(a), factor)
        expected = Fraction(a) * exact(factor)
        assert abs(exact(result) - expected) <= abs(expected) * Fraction(1, 2**45) + Fraction(1e-30)


def test_gradients_are_those_of_the_exact_operations():
    def function(a, b, c):
        return (product(a, DoubleWord.of(b) - c) + DoubleWord.of(c)).value

    for arguments in ((3.0, 1e4, -7.0), (0.0, 0.0, 0.0), (1e4 / 3, 1 / 3, 1e4)):
        a, b, c = map(np.float32, arguments)
        np.testing.assert_allclose(jax.grad(function, (0, 1, 2))(a, b, c), (b - c, a, 1 - a), rtol=1e-6)


@pytest.mark.parametrize("size", [0.0, 1e4, 1e9, -1e9])
@pytest.mark.parametrize("gap", [0.0, 1e-3, 1.0, 20.0, 80.0, 1e4])
def test_shares_of_two(size, gap):
    """The logarithm and its gradient are precise relative to themselves, be they almost 0 or large."""
    big, small = DoubleWord.of(jnp.float32(size)), DoubleWord.of(jnp.float32(size)) - jnp.float32(gap)

    def of_both(big, small):
        return log_share(big, small).value, log_share(small, big).value

    of_big, of_small = of_both(big, small)
    np.testing.assert_allclose(of_big, -np.log1p(np.exp(-gap)), rtol=1e-6, atol=1e-37)
    np.testing.assert_allclose(of_small, -gap - np.log1p(np.exp(-gap)), rtol=1e-6)
    for_big, for_small = jax.jacobian(of_both)(big, small)
    share = np.exp(-gap) / (1 + np.exp(-gap))
    np.testing.assert_allclose(for_big.value, share, rtol=1e-6, atol=1e-37)
    np.testing.assert_allclose(for_small.value, share - 1, rtol=1e-6)
    total = logsumexp((small, big))
    np.testing.assert_allclose((total - jnp.float32(size)).value, np.log1p(np.exp(-gap)), atol=1e-6)
    np.testing.assert_allclose(softmax((big, small)), [1 - share, share], rtol=1e-6, atol=1e-37)


def test_nothing_has_no_share():
    nothing, some = (DoubleWord.of(jnp.float32(x)) for x in (LOWEST, -1e4))
    assert log_share(nothing, some).value == LOWEST
    assert log_share(some, nothing).value == 0
    assert logsumexp((nothing, some)).value == -1e4
    for x, y in ((nothing, some), (some, nothing), (nothing, nothing)):
        gradients = jax.grad(lambda x, y: log_share(x, y).value + logsumexp((x, y)).value, (0, 1))(x, y)
        assert np.isfinite(jax.tree.leaves(gradients)).all()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("lead", [0.0, 5.0, 12.0, 60.0])
@pytest.mark.parametrize("size", [0.0, 1e4, -1e5])
def test_log_softmax_keeps_what_a_leading_number_leaves(seed, lead, size):
    rng = np.random.default_rng(seed)
    numbers = rng.standard_normal((3, 7)).astype(np.float32)
    numbers[:, 2] += np.float32(lead)
    numbers[0, 4] = LOWEST
    x = DoubleWord.of(jnp.where(numbers > LOWEST, jnp.float32(size), 0.0)) + numbers
    weights = np.zeros((3, 7))
    weights[:, 2] = 1.0  # of the leading number, so that its gradient is 1 - softmax
    if seed % 2:
        weights = rng.standard_normal((3, 7))

    exact_numbers = np.where(numbers > LOWEST, numbers.astype(np.float64), -np.inf)
    peak = exact_numbers[:, 2:3]
    above = np.where(np.arange(7) == 2, 0, np.exp(exact_numbers - peak))
    rest = np.log1p(above.sum(-1, keepdims=True))
    share = np.exp(exact_numbers - peak - rest)
    left = above.sum(-1, keepdims=True) / (1 + above.sum(-1, keepdims=True))  # 1 - share of the leading one

    log_prob, total = log_softmax(x)
    some = numbers > LOWEST
    np.testing.assert_allclose(log_prob.value[:, 2:3], -rest, rtol=2e-6)
    np.testing.assert_allclose(log_prob.value[some], (exact_numbers - peak - rest)[some], rtol=2e-6)
    assert log_prob.value[0, 4] == LOWEST
    np.testing.assert_allclose((total - jnp.float32(size)).value, peak + rest, rtol=2e-6)

    def loss(x):
        log_prob, total = log_softmax(x)
        return jnp.sum(jnp.where(some, weights * log_prob.value, 0.0)) + 3 * jnp.sum(total.value)

    found = jax.jit(jax.grad(loss))(x).value - 3 * share
    weights = np.where(some, weights, 0)
    leads = np.arange(7) == 2
    others = np.where(leads, 0, weights).sum(-1, keepdims=True)
    expected = np.where(
        leads, weights * left - share * others, weights - share * weights.sum(-1, keepdims=True)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=5e-7)
    if not seed % 2:
        found = jax.grad(lambda x: jnp.sum(weights * log_softmax(x)[0].value))(x).value
        np.testing.assert_allclose(found[:, 2], left[:, 0], rtol=2e-6)
