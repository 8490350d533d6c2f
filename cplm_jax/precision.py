"""Float32 arithmetic: products of narrower operands, and log-sum-exps of nothing."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

# Stands for minus infinity: finite, so that neither it nor its gradient makes a NaN.
LOWEST = float(jnp.finfo(jnp.float32).min)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def einsum_float32(subscripts: str, a: Float[Array, "..."], b: Float[Array, "..."]) -> Float[Array, "..."]:
    """Contracts two arrays, accumulating in float32.

    The backward products take the cotangent in the operands' type and accumulate in float32 too;
    left to itself, a float32 result would make them float32 products.

    Args:
      subscripts: as for ``jnp.einsum``, ``"x,y->z"``, every index in at least two of x, y and z.
      a: first operand.
      b: second operand, of the type of ``a``.

    Returns:
      The float32 contraction.
    """
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def _forward(subscripts: str, a: Array, b: Array) -> tuple[Array, tuple[Array, Array]]:
    return einsum_float32(subscripts, a, b), (a, b)


def _backward(subscripts: str, operands: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    a, b = operands
    of_a, of_b, of_result = subscripts.replace("->", ",").split(",")
    cotangent = cotangent.astype(a.dtype)

    def contract(pattern: str, x: Array) -> Array:
        return jnp.einsum(pattern, cotangent, x, preferred_element_type=jnp.float32).astype(x.dtype)

    return contract(f"{of_result},{of_b}->{of_a}", b), contract(f"{of_result},{of_a}->{of_b}", a)


einsum_float32.defvjp(_forward, _backward)


def masked_logsumexp(x: Float[Array, "..."], mask: Bool[Array, "..."]) -> Float[Array, "..."]:
    """Log-sum-exp of ``x`` over the last axis where ``mask``; ``LOWEST``, with zero gradient, if nowhere."""
    peak = jax.lax.stop_gradient(jnp.max(jnp.where(mask, x, LOWEST), axis=-1, keepdims=True))
    total = jnp.sum(jnp.where(mask, jnp.exp(jnp.where(mask, x - peak, 0.0)), 0.0), axis=-1)
    some = jnp.any(mask, axis=-1)
    return jnp.where(some, peak[..., 0] + jnp.log(jnp.where(some, total, 1.0)), LOWEST)
