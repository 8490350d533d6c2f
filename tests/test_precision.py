"""Products that accumulate in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cplm_jax.precision import einsum_float32


@pytest.mark.parametrize("subscripts", ["btd,vd->btv", "btc,bjc->btj"])
def test_values_and_gradients_are_einsums(subscripts):
    rng = np.random.default_rng(0)
    sizes = dict(zip("btdvcj", (2, 3, 4, 5, 4, 3), strict=True))
    first, second = subscripts.split("->")[0].split(",")
    a, b = (rng.standard_normal([sizes[i] for i in index]).astype(np.float32) for index in (first, second))

    def total(product):
        return lambda a, b: jnp.sum(jnp.sin(product(subscripts, a, b)))

    ours, expected = (
        jax.value_and_grad(total(product), argnums=(0, 1))(a, b) for product in (einsum_float32, jnp.einsum)
    )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), ours, expected)


def test_bfloat16_operands_give_float32_and_bfloat16_gradients():
    a, b = jnp.ones((1, 512, 8), jnp.bfloat16), jnp.ones((3, 8), jnp.bfloat16)
    result, pull = jax.vjp(lambda a, b: einsum_float32("btd,vd->btv", a, b), a, b)
    assert result.dtype == jnp.float32
    of_a, of_b = pull(jnp.ones_like(result))
    assert of_a.dtype == of_b.dtype == jnp.bfloat16
    assert float(of_b[0, 0]) == 512.0  # a sum of 512 ones in bfloat16 would stop at 256
