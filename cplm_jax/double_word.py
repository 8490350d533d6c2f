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
        # XLA would compute each part, and what it was made of, anew for every use: on CPUs some sums of parts
        # take minutes to compile.
        once = jax.lax.optimization_barrier
        value, lost = once(self.value), once(jax.lax.stop_gradient(self.lost))
        return tuple(map(DoubleWord, jnp.unstack(value, axis=axis), jnp.unstack(lost, axis=axis)))

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
    """Returns the product; shapes broadcast.

    It is a sum of products of halves of the operands' bits, which are exact. A rounded product and what it
    lost would not do: where compilers fuse a product with a sum, the sum takes the exact one.
    """

    def halves(x: Array) -> tuple[Array, Array]:
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFFF000)
        high = jax.lax.bitcast_convert_type(bits, jnp.float32)
        return high, x - high

    (a_high, a_low), (b_high, b_low) = halves(a), halves(b.value)
    smallest = a_low * b_low + jax.lax.stop_gradient(a * b.lost)
    return DoubleWord.of(a_high * b_high) + a_high * b_low + a_low * b_high + smallest


def log_share(part: DoubleWord, others: DoubleWord) -> DoubleWord:
    """Returns the log of the share of ``exp(part)`` in its sum with ``exp(others)``."""
    x = others - part
    # -softplus(x), in two terms: neither large numbers nor a small result lose their precision. By selection:
    # the gradients of jnp.maximum and jnp.abs at 0 would not add up to that of either side.
    positive = x.value > 0
    return -(x.where(positive, 0.0) + jnp.log1p(jnp.exp(jnp.where(positive, -x.value, x.value))))


def logsumexp(terms: Sequence[DoubleWord]) -> DoubleWord:
    """Returns the log-sum-exp of numbers; shapes broadcast."""
    return functools.reduce(_logaddexp, terms)


def _logaddexp(x: DoubleWord, y: DoubleWord) -> DoubleWord:
    above = (y - x).value
    takes_y = above > 0
    larger = jax.tree.map(lambda of_x, of_y: jnp.where(takes_y, of_y, of_x), x, y)
    return larger + jnp.log1p(jnp.exp(jnp.where(takes_y, -above, above)))


def softmax(terms: Sequence[DoubleWord]) -> list[Float[Array, "..."]]:
    """Returns each number's share of the exponential sum; shapes broadcast."""
    total = logsumexp(terms)
    return [jnp.exp((term - total).value) for term in terms]


def log_softmax(x: DoubleWord) -> tuple[DoubleWord, DoubleWord]:
    """Returns ``x - lse(x)``, renormalized, and ``lse(x)``, over the last axis, which it keeps with length 1.

    ``LOWEST`` stands for nothing.
    """
    peak = jax.lax.stop_gradient(jnp.max(x.value, axis=-1, keepdims=True))
    mass = jnp.sum(jnp.exp((x - peak).value), axis=-1, keepdims=True)
    total = DoubleWord.of(peak) + jnp.log(mass)
    log_prob = x - total
    return renormalized(log_prob, probability_of_others(log_prob.value)), total


def leading(log_prob: Float[Array, "..."]) -> Bool[Array, "..."]:
    """Returns which probabilities lead, being well above half: at most one."""
    return log_prob > -0.6


def probability_of_others(log_prob: Float[Array, "... n"]) -> Float[Array, "... 1"]:
    """Returns the sum of the probabilities but for a leading one."""
    return jnp.sum(jnp.where(leading(log_prob), 0.0, jnp.exp(log_prob)), axis=-1, keepdims=True)


@jax.custom_jvp
def renormalized(log_prob: DoubleWord, others: Float[Array, "..."]) -> DoubleWord:
    """Returns log-probabilities, over the last axis, whose sum is 1 but for rounding, with the sum taken out.

    A probability of almost 1 becomes 1 less that of all others. Its logarithm, almost 0, and the gradient
    ``1 - p`` keep their relative precision, which rounding had taken from them.

    Args:
      log_prob: the log-probabilities.
      others: :func:`probability_of_others`; that they depend on the log-probabilities counts already.
    """
    leads = leading(log_prob.value)
    value = jnp.where(leads, jnp.log1p(-others), log_prob.value)
    return DoubleWord(value, jnp.where(leads, 0.0, log_prob.lost))


@renormalized.defjvp
def _renormalized_jvp(
    primals: tuple[DoubleWord, Array], tangents: tuple[DoubleWord, Array]
) -> tuple[DoubleWord, DoubleWord]:
    (log_prob, others), tangent = primals, tangents[0].value
    leads, result = leading(log_prob.value), renormalized(log_prob, others)
    # The derivative tangent - sum(prob * tangent), with the leader apart.
    weighed = jnp.exp(result.value) * tangent
    of_others = jnp.sum(jnp.where(leads, 0.0, weighed), axis=-1, keepdims=True)
    of_leader = jnp.sum(jnp.where(leads, weighed, 0.0), axis=-1, keepdims=True)
    tangent = jnp.where(leads, others * tangent, tangent - of_leader) - of_others
    return result, DoubleWord(tangent, jnp.zeros_like(tangent))
