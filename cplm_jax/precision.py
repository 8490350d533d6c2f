"""Matrix products whose result is float32 while every product runs in the operands' type."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


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
