"""Sums and log-sum-exps by token id: they turn scores of candidates into a vocabulary's."""

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from cplm_jax.precision import LOWEST
from cplm_jax.sharding import on_mesh, part_index, parts, pmax, psum

Method = Literal["auto", "segment_sum", "one_hot"]

# Positions from which on `auto` scatters on every backend: whole rows are evaluated, and must be exact.
_WIDE = 128


def logsumexp_by_token(
    scores: Float[Array, "batch length candidates"],
    valid: Bool[Array, "batch length candidates"],
    tokens: Int[Array, "batch candidates"],
    vocabulary: int,
    method: Method = "auto",
) -> Float[Array, "batch length vocabulary"]:
    """Returns, for every v, the log-sum-exp of the valid scores whose candidate is v; ``LOWEST`` if none.

    On a mesh each device makes its own part of the vocabulary from all rows' candidates, and drops
    those of other parts: splitting the vocabulary costs no communication. Where candidates are split
    (``sequence``), their peaks and sums are combined.

    Args:
      scores: float32.
      valid: which scores count.
      tokens: id of each candidate, below ``vocabulary``.
      vocabulary: number of ids V.
      method: ``segment_sum`` scatters, exact for scores of any size. ``one_hot`` multiplies with a
        one-hot matrix; it takes one peak for all tokens of a position, so that what lies more than 87
        below it becomes ``LOWEST``. ``auto`` takes ``one_hot`` on TPUs for less than 128 positions
        (decoding), where it is about six times as fast, and ``segment_sum`` otherwise, which on CPUs is
        250 times as fast (``benchmarks/scatter.py``).
    """
    return _by_token(scores, valid, tokens, vocabulary, method, _logsumexp_scattered, _logsumexp_one_hot)


def sum_by_token(
    values: Float[Array, "batch length candidates"],
    valid: Bool[Array, "batch length candidates"],
    tokens: Int[Array, "batch candidates"],
    vocabulary: int,
    method: Method = "auto",
) -> Float[Array, "batch length vocabulary"]:
    """Returns, for every v, the sum of the valid values whose candidate is v.

    Args are those of :func:`logsumexp_by_token`; both methods give the same sums, to float32 rounding.
    """
    return _by_token(values, valid, tokens, vocabulary, method, _sum_scattered, _sum_one_hot)


def _by_token(
    values: Array,
    valid: Array,
    tokens: Array,
    vocabulary: int,
    method: Method,
    scattered: Callable[..., Array],
    one_hot: Callable[..., Array],
) -> Array:
    def local(values: Array, valid: Array, tokens: Array) -> Array:
        size = vocabulary // parts("vocabulary")
        ids = tokens - part_index("vocabulary") * size
        here = (ids >= 0) & (ids < size)
        ids = jnp.where(here, ids, size)  # the dropped bin
        # Dropped values must not reach an exponential either: infinity times no gradient is no number.
        valid = valid & here[:, None, :]
        of_scatter, of_product = (functools.partial(f, vocabulary=size) for f in (scattered, one_hot))
        if method == "segment_sum" or (method == "auto" and values.shape[1] >= _WIDE):
            return of_scatter(values, valid, ids)
        if method == "one_hot":
            return of_product(values, valid, ids)
        return jax.lax.platform_dependent(values, valid, ids, tpu=of_product, default=of_scatter)

    candidates = ("batch", None, "length")
    run = on_mesh(local, (candidates, candidates, ("batch", "length")), ("batch", None, "vocabulary"))
    return run(values, valid, tokens)


def _logarithm(peak: Array, total: Array) -> Array:
    some = total > 0
    return jnp.where(some, peak + jnp.log(jnp.where(some, total, 1.0)), LOWEST)


def _rows(function: Callable[..., Array], values_btj: Array, valid_btj: Array, ids_bj: Array) -> Array:
    """Scatters row by row: candidates lead and positions trail, so that one scatter serves all positions."""
    result = jax.vmap(function)(jnp.swapaxes(values_btj, 1, 2), jnp.swapaxes(valid_btj, 1, 2), ids_bj)
    return jnp.swapaxes(result, 1, 2)


def _logsumexp_scattered(scores_btj: Array, valid_btj: Array, ids_bj: Array, vocabulary: int) -> Array:
    def row(scores_jt: Array, valid_jt: Array, ids_j: Array) -> Array:
        # The peak of each token is taken out first, so that scores of any size keep their precision.
        peak = jax.ops.segment_max(jnp.where(valid_jt, scores_jt, LOWEST), ids_j, vocabulary)
        peak = pmax(jax.lax.stop_gradient(jnp.maximum(peak, LOWEST)), "length")
        shifted = jnp.where(valid_jt, scores_jt - peak.at[ids_j].get(mode="clip"), 0.0)
        mass = jnp.where(valid_jt, jnp.exp(shifted), 0.0)
        return _logarithm(peak, psum(jax.ops.segment_sum(mass, ids_j, vocabulary), "length"))

    return _rows(row, scores_btj, valid_btj, ids_bj)


def _logsumexp_one_hot(scores_btj: Array, valid_btj: Array, ids_bj: Array, vocabulary: int) -> Array:
    peak = jnp.max(jnp.where(valid_btj, scores_btj, LOWEST), axis=-1, keepdims=True)
    peak = pmax(jax.lax.stop_gradient(peak), "length")
    mass = jnp.exp(jnp.where(valid_btj, scores_btj - peak, 0.0))
    return _logarithm(peak, _sum_one_hot(mass, valid_btj, ids_bj, vocabulary))


def _sum_scattered(values_btj: Array, valid_btj: Array, ids_bj: Array, vocabulary: int) -> Array:
    def row(values_jt: Array, valid_jt: Array, ids_j: Array) -> Array:
        total = jax.ops.segment_sum(jnp.where(valid_jt, values_jt, 0.0), ids_j, vocabulary)
        return psum(total, "length")

    return _rows(row, values_btj, valid_btj, ids_bj)


def _sum_one_hot(values_btj: Array, valid_btj: Array, ids_bj: Array, vocabulary: int) -> Array:
    onehot = jax.nn.one_hot(ids_bj, vocabulary, dtype=jnp.float32)  # zeros for the dropped bin
    masked = jnp.where(valid_btj, values_btj, 0.0)
    total = jnp.einsum("btj,bjv->btv", masked, onehot, precision=jax.lax.Precision.HIGHEST)
    return psum(total, "length")
