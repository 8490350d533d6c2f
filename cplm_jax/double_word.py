"""Double-word arithmetic: numbers whose differences count although they are far smaller than the numbers.

Scores, logits and gates may be ten thousand while probabilities are made of their differences, and float32
keeps no more of ten thousand than its third decimal. A number is kept as a float32 and what rounding took
from it (Dekker 1971; error-free sums after Knuth), so that sums and differences have about 48 bits.

Gradients are those of the exact operations; what was lost has none of its own.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from cplm_jax.precision import LOWEST


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DoubleWord:
    """``value + lost``, of the same shape; the value is the sum, rounded to float32."""

    value: Float[Array, "..."]
    lost: Float[Array, "..."]

    @staticmethod
    def of(value: Float[Array, "..."]) -> "DoubleWord":
        """Returns the number as it is, nothing lost."""
        return DoubleWord(value, jnp.zeros_like(value))

    def __add__(self, other: "DoubleWord | Array") -> "DoubleWord":
        """Adds a number; shapes broadcast."""
        other = other if isinstance(other, DoubleWord) else DoubleWord.of(other)
        total = self.value + other.value
        added = total - self.value
        lost = (self.value - (total - added)) + (other.value - added)
        lost = jax.lax.stop_gradient(lost + (self.lost + other.lost))
        value = total + lost
        return DoubleWord(value, jax.lax.stop_gradient(lost - (value - total)))

    def __neg__(self) -> "DoubleWord":
        """Returns the negative."""
        return DoubleWord(-self.value, -self.lost)

    def __sub__(self, other: "DoubleWord | Array") -> "DoubleWord":
        """Subtracts a number; shapes broadcast."""
        return self + -other

    def where(self, mask: Bool[Array, "..."], otherwise: float) -> "DoubleWord":
        """Returns the number where ``mask``, and ``otherwise`` elsewhere."""
        return DoubleWord(jnp.where(mask, self.value, otherwise), jnp.where(mask, self.lost, 0.0))

    def parts(self, axis: int) -> "tuple[DoubleWord, ...]":
        """Splits an axis into its positions, without it."""
        value, lost = (jnp.unstack(x, axis=axis) for x in (self.value, self.lost))
        return tuple(map(DoubleWord, value, lost))

    def expanded(self) -> "DoubleWord":
        """Returns the numbers with a last axis of length 1 added."""
        return DoubleWord(self.value[..., None], self.lost[..., None])


class LogTotal(NamedTuple):
    """A log-sum-exp ``peak + rest``; over nothing the peak is ``LOWEST`` and the rest 0.

    The peak is the largest term and has no gradient. With it apart, differences of large log-sum-exps
    keep their precision.
    """

    peak: Float[Array, "..."]
    rest: Float[Array, "..."]

    @staticmethod
    def of(peak: Float[Array, "..."], total: Float[Array, "..."]) -> "LogTotal":
        """Returns the log-sum-exp of terms with this peak whose ``exp(term - peak)`` add up to ``total``."""
        some = total > 0
        return LogTotal(jnp.where(some, peak, LOWEST), jnp.log(jnp.where(some, total, 1.0)))

    def double(self) -> DoubleWord:
        """Returns the sum."""
        return DoubleWord.of(self.peak) + self.rest


def product(a: Float[Array, "..."], b: DoubleWord) -> DoubleWord:
    """Returns the product, to about 35 bits; shapes broadcast.

    Its largest part is the exact product of the upper halves of the operands' bits. A rounded product would
    not do: where compilers fuse it with a sum, the sum takes the exact one.
    """

    def halves(x: Array) -> tuple[Array, Array]:
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFFF000)
        high = jax.lax.bitcast_convert_type(bits, jnp.float32)
        return high, x - high

    (a_high, a_low), (b_high, b_low) = halves(a), halves(b.value)
    rest = (a_high * b_low + a_low * b_high) + a_low * b_low
    return DoubleWord.of(a_high * b_high) + rest + jax.lax.stop_gradient(a * b.lost)


def log_share(part: DoubleWord, others: DoubleWord) -> DoubleWord:
    """Returns the log of the share of ``exp(part)`` in its sum with ``exp(others)``."""
    x = others - part
    # -softplus(x), in two terms: neither large numbers nor a small result lose their precision. By selection:
    # the gradients of jnp.maximum and jnp.abs at 0 would not add up to that of either side.
    positive = x.value > 0
    return -(x.where(positive, 0.0) + jnp.log1p(jnp.exp(jnp.where(positive, -x.value, x.value))))


def logsumexp(terms: Sequence[DoubleWord]) -> DoubleWord:
    """Returns the log-sum-exp of numbers; shapes broadcast."""
    largest = functools.reduce(_larger, jax.lax.stop_gradient(tuple(terms)))
    return largest + jnp.log(sum(jnp.exp((term - largest).value) for term in terms))


def softmax(terms: Sequence[DoubleWord]) -> list[Float[Array, "..."]]:
    """Returns each number's share of the exponential sum; shapes broadcast."""
    total = logsumexp(terms)
    return [jnp.exp((term - total).value) for term in terms]


def _larger(x: DoubleWord, y: DoubleWord) -> DoubleWord:
    takes_y = (y - x).value > 0
    return jax.tree.map(lambda of_x, of_y: jnp.where(takes_y, of_y, of_x), x, y)


@jax.custom_jvp
def log_softmax(x: DoubleWord) -> tuple[DoubleWord, DoubleWord]:
    """Returns ``x - lse(x)`` and ``lse(x)``, over the last axis, of which the second keeps a length of 1.

    Where one number leads by far, its logarithm of almost 1, and the gradient ``1 - softmax`` of almost
    0, keep their relative precision: they are made of the others' sum. ``LOWEST`` stands for nothing.
    """
    log_prob, total, _ = _log_softmax(x)
    return log_prob, total


def _log_softmax(x: DoubleWord) -> tuple[DoubleWord, DoubleWord, Bool[Array, "..."]]:
    """Also returns which number leads (the first, if several do)."""
    peak = jnp.max(x.value, axis=-1, keepdims=True)
    # Not an argmax, which takes more than a reduction where the axis is split over devices.
    index = jax.lax.broadcasted_iota(jnp.int32, x.value.shape, x.value.ndim - 1)
    first = jnp.min(jnp.where(x.value == peak, index, x.value.shape[-1]), axis=-1, keepdims=True)
    leads = index == first
    leading = DoubleWord(peak, jnp.sum(jnp.where(leads, x.lost, 0.0), axis=-1, keepdims=True))
    above = x - leading
    rest = jnp.log1p(jnp.sum(jnp.where(leads, 0.0, jnp.exp(above.value)), axis=-1, keepdims=True))
    return above - rest, leading + rest, leads


@log_softmax.defjvp
def _log_softmax_jvp(primals: tuple[DoubleWord], tangents: tuple[DoubleWord]) -> tuple[tuple, tuple]:
    *results, leads = _log_softmax(*primals)
    log_prob, tangent = results[0], tangents[0].value
    softmax = jnp.exp(log_prob.value)
    # The derivative tangent - sum(softmax * tangent), with the leading number apart.
    of_others = jnp.sum(jnp.where(leads, 0.0, softmax * tangent), axis=-1, keepdims=True)
    leading, share = (jnp.sum(jnp.where(leads, y, 0.0), axis=-1, keepdims=True) for y in (tangent, softmax))
    own = jnp.where(leads, -jnp.expm1(log_prob.value) * tangent, tangent - share * leading)
    of_results = own - of_others, share * leading + of_others
    return tuple(results), tuple(DoubleWord(y, jnp.zeros_like(y)) for y in of_results)
