"""Float32 arithmetic: products of narrower operands, empty log-sum-exps, and sums of large numbers.

Numbers that are far larger than the differences that count are kept as a float32 and what rounding took
from it ("lost"), which is added once the large ones have cancelled. What was lost has no gradient.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

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


def sum_and_lost(terms: Sequence[Array]) -> tuple[Array, Array]:
    """Returns the sum of terms, and what rounding took from it (Knuth's two-sum for each addition)."""
    total, lost = terms[0], jnp.zeros_like(terms[0])
    for term in terms[1:]:
        larger = total + term
        added = larger - total
        lost += (total - (larger - added)) + (term - added)
        total = larger
    lost = jax.lax.stop_gradient(lost)
    rounded = total + lost
    return rounded, jax.lax.stop_gradient(lost - (rounded - total))


def product_parts(a: Array, b: Array) -> tuple[Array, Array]:
    """Returns two numbers whose sum is the product, to about 35 bits (after Dekker 1971).

    The first is the exact product of the upper halves of the operands' bits. A rounded product would not do:
    where compilers fuse it with a sum, the sum takes the exact one.
    """

    def halves(x: Array) -> tuple[Array, Array]:
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFFF000)
        high = jax.lax.bitcast_convert_type(bits, jnp.float32)
        return high, x - high

    (a_high, a_low), (b_high, b_low) = halves(a), halves(b)
    return a_high * b_high, (a_high * b_low + a_low * b_high) + a_low * b_low


class LogSumExp(NamedTuple):
    """``lse_i s_i`` and ``s_i - lse_i s_i``, each with what rounding took from it."""

    total: Float[Array, "..."]
    total_lost: Float[Array, "..."]
    share: Float[Array, "... n"]
    share_lost: Float[Array, "... n"]


def logsumexp_of_sums(terms: Sequence[Float[Array, "... #n"]]) -> LogSumExp:
    """Returns the log-sum-exp over the last axis of the sums s of the terms.

    Terms may be far larger than differences of sums: each term's value at the largest sum is subtracted
    from it before terms are added, and what rounding takes is added after.
    """
    terms = jnp.broadcast_arrays(*terms)
    if terms[0].shape[-1] == 1:  # a sum is its own log-sum-exp
        total, lost = (x[..., 0] for x in sum_and_lost(terms))
        return LogSumExp(total, lost, jnp.zeros_like(terms[0]), jnp.zeros_like(terms[0]))
    best = jnp.argmax(functools.reduce(jnp.add, terms), axis=-1, keepdims=True)
    at_best = [jax.lax.stop_gradient(jnp.take_along_axis(term, best, axis=-1)) for term in terms]
    pairs = zip(terms, at_best, strict=True)
    above, above_lost = sum_and_lost([part for term, most in pairs for part in (term, -most)])
    # Where terms are so large that another sum is the largest, once what was lost is added, that one leads.
    rest = jax.nn.logsumexp(above, axis=-1, keepdims=True)
    total, lost = sum_and_lost([*at_best, rest])
    return LogSumExp(total[..., 0], lost[..., 0], *sum_and_lost([above, -rest, above_lost]))
