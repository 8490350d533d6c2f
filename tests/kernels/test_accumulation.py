"""Blocks: sums over them are float32 although products are bfloat16; those that see nothing are skipped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cplm_jax.kernels import pointer
from cplm_jax.kernels.blocks import block_length
from cplm_jax.kernels.lm_head import lm_terms
from cplm_jax.kernels.pointer import pointer_terms
from cplm_jax.models.attention import attend

BATCH, LENGTH, WIDTH, VOCABULARY = 1, 1024, 16, 64
RNG = np.random.default_rng(0)
TARGETS = RNG.integers(0, VOCABULARY, (BATCH, LENGTH), dtype=np.int32)
TOKENS = np.roll(TARGETS, 1, axis=1)
ONES = np.ones_like(TOKENS)


def normal(*shape):
    """Numbers that bfloat16 holds exactly."""
    return jnp.asarray(RNG.standard_normal(shape), jnp.bfloat16)


HIDDEN, MATRIX = normal(BATCH, LENGTH, WIDTH), normal(VOCABULARY, WIDTH).astype(jnp.float32)
QUERY, KEY, VALUE = (normal(BATCH, LENGTH, 2, WIDTH) for _ in range(3))


def of_matrix(dtype, block):
    def loss(matrix):
        terms = lm_terms(HIDDEN.astype(dtype), matrix, TARGETS, block)
        return jnp.sum(jax.nn.softplus(sum(terms.others) - terms.target))

    return jax.grad(loss)(MATRIX)


def of_key(dtype, block):
    def loss(key):
        terms = pointer_terms(
            QUERY.astype(dtype), key.astype(dtype), None, TARGETS, TOKENS, ONES, ONES, ONES > 0, block
        )
        match, others = (sum(x.total) for x in terms)
        return jnp.sum(jnp.where(match > -1e30, jax.nn.softplus(others - match), 0.0))

    return jax.grad(loss)(KEY.astype(jnp.float32))


def of_value(dtype, block):
    def loss(value):
        mixed = attend(QUERY.astype(dtype), KEY.astype(dtype), value.astype(dtype), ONES, block)
        return jnp.sum(mixed.astype(jnp.float32))

    return jax.grad(loss)(VALUE.astype(jnp.float32))


@pytest.mark.parametrize("gradient", [of_matrix, of_key, of_value])
def test_many_blocks_lose_no_more_than_one(gradient):
    run = jax.jit(gradient, static_argnums=(0, 1))
    exact = np.asarray(run(jnp.float32, LENGTH), np.float64)

    def error(block):
        return np.linalg.norm(np.asarray(run(jnp.bfloat16, block)) - exact) / np.linalg.norm(exact)

    assert error(4) < 1.2 * error(LENGTH) + 1e-3
    assert error(LENGTH) < 0.01


def test_blocks_above_the_diagonal_are_skipped(monkeypatch):
    counted = []
    scores = pointer._Grid.scores
    monkeypatch.setattr(pointer._Grid, "scores", lambda self, *args: counted.append(1) or scores(self, *args))
    with jax.disable_jit():
        short = [x[:, :64] for x in (QUERY, KEY, TARGETS, TOKENS, ONES)]
        pointer_terms(short[0], short[1], None, *short[2:4], short[4], short[4], short[4] > 0, block=16)
    assert len(counted) == 4 * 5 // 2


@pytest.mark.parametrize("length", [1, 7, 100, 4096])
@pytest.mark.parametrize("elements", [1, 10, 2**20])
@pytest.mark.parametrize("budget", [1, 10, 999, 2**25])
def test_blocks_keep_to_their_budget(length, elements, budget):
    block = block_length(length, elements, budget)
    assert 1 <= block <= length
    assert block == 1 or block * elements <= budget
