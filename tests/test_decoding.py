"""One step of cached decoding gives the distribution of the full pass, for prompts of different lengths."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cplm_jax import mixture
from cplm_jax.decoding import decode, prefill
from cplm_jax.models.decoder import define_model
from tests.models.test_decoder import HEADS, RICHER, VOCABULARY, name_of, with_head

LENGTHS = [9, 1, 5]
STEPS, PADDED, CAPACITY = 4, 10, 14


def full_pass(definition, params, tokens):
    """Log-probabilities after every prefix of one document."""
    positions = jnp.arange(tokens.shape[1])[None]
    outputs = definition.bind(params)(tokens, jnp.ones_like(tokens), positions, tokens != 2)
    return mixture.log_distribution(outputs.logits, outputs.pointer)[0]


@pytest.mark.parametrize("head", [None, *HEADS, *RICHER], ids=name_of)
def test_cached_decoding_equals_the_full_pass(head):
    definition = define_model(with_head(head))
    params = definition.init(jax.random.key(4))
    rng = np.random.default_rng(5)
    # Few different tokens, so that all repeat; 2 plays a control token.
    rows = [rng.integers(2, 8, (1, length + STEPS), dtype=np.int32) for length in LENGTHS]
    whole = jax.jit(functools.partial(full_pass, definition))
    expected = [np.asarray(whole(params, row)) for row in rows]
    tokens = np.full((3, PADDED), 7, np.int32)  # padding that looks like an ordinary token
    for row, padded, length in zip(rows, tokens, LENGTHS, strict=True):
        padded[:length] = row[0, :length]

    read = jax.jit(functools.partial(prefill, definition, capacity=CAPACITY))
    step = jax.jit(functools.partial(decode, definition))
    log_p, cache = read(params, tokens, np.asarray(LENGTHS, np.int32), tokens != 2)
    for number in range(STEPS + 1):
        assert log_p.shape == (3, VOCABULARY)
        for row, length in enumerate(LENGTHS):
            np.testing.assert_allclose(
                log_p[row],
                expected[row][length - 1 + number],
                rtol=1e-4,
                atol=1e-5,
                err_msg=f"{row} {number}",
            )
        if number < STEPS:
            following = np.asarray(
                [row[0, length + number] for row, length in zip(rows, LENGTHS, strict=True)]
            )
            log_p, cache = step(params, cache, following, following != 2)
    np.testing.assert_array_equal(cache.length, np.asarray(LENGTHS) + STEPS)


def test_the_copy_cache_costs_pointers_times_width_once():
    definition = define_model(with_head(RICHER[0]))
    shapes = jax.eval_shape(
        functools.partial(prefill, definition, capacity=CAPACITY),
        definition.shapes,
        jax.ShapeDtypeStruct((3, PADDED), jnp.int32),
        jax.ShapeDtypeStruct((3,), jnp.int32),
        jax.ShapeDtypeStruct((3, PADDED), jnp.bool_),
    )[1]
    assert shapes.candidates.key.shape == (3, CAPACITY, 2, 8)
    assert shapes.keys.shape == (3, 3, CAPACITY, 2, 8)  # layers, batch, capacity, kv_heads, head_width
