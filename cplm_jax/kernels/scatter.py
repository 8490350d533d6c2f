"""Sums and log-sum-exps by token id: they turn scores of candidates into a vocabulary's."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from cplm_jax.double_word import DoubleWord, LogTotal, leading, probability_of_others, renormalized
from cplm_jax.precision import LOWEST
from cplm_jax.sharding import on_mesh, part_index, parts, pmax, psum

Method = Literal["auto", "segment_sum", "one_hot"]

# Positions from which on `auto` scatters on every backend: whole rows are evaluated, and must be exact.
_WIDE = 128

_RESULT_AXES = ("batch", None, "vocabulary")


def logsumexp_by_token(
    scores: DoubleWord,
    valid: Bool[Array, "batch length candidates"],
    tokens: Int[Array, "batch candidates"],
    vocabulary: int,
    method: Method = "auto",
    normalized: bool = False,
) -> DoubleWord:
    """Returns, for every v, the log-sum-exp of the valid scores whose candidate is v; ``LOWEST`` if none is.

    Its parts are (batch, length, vocabulary).

    On a mesh each device makes its own part of the vocabulary from all rows' candidates, and drops
    those of other parts: splitting the vocabulary costs no communication, or where ``normalized`` one sum
    for each position. Where candidates are split (``sequence``), their peaks and sums are combined.

    Args:
      scores: (batch, length, candidates).
      valid: which scores count.
      tokens: id of each candidate, below ``vocabulary``.
      vocabulary: number of ids V.
      method: ``segment_sum`` scatters, exact for scores of any size. ``one_hot`` multiplies with a
        one-hot matrix; it takes one peak for all tokens of a position, so that what lies more than 87
        below it becomes ``LOWEST``. ``auto`` takes ``one_hot`` on TPUs for less than 128 positions
        (decoding), where it is four to seven times as fast, and ``segment_sum`` otherwise, which there is
        more than 100 times as fast on CPUs (``benchmarks/scatter.py``).
      normalized: whether the scores are log-probabilities that add up to 1; those of the tokens are
        :func:`~cplm_jax.double_word.renormalized` then.
    """
    # Of scores beyond 10 million so much is lost that it does not count, and might overflow.
    values = (scores.value, jnp.clip(scores.lost, -1.0, 1.0))
    paths = _logsumexp_scattered, _logsumexp_one_hot
    axes = _RESULT_AXES, _RESULT_AXES, ("batch", None, None)
    value, lost, others = _by_token(values, valid, tokens, vocabulary, method, *paths, axes)
    result = DoubleWord(value, lost)
    return renormalized(result, others) if normalized else result


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
    return _by_token((values,), valid, tokens, vocabulary, method, _sum_scattered, _sum_one_hot, _RESULT_AXES)


def _by_token(
    values: tuple[Array, ...],
    valid: Array,
    tokens: Array,
    vocabulary: int,
    method: Method,
    scattered: Callable[..., Any],
    one_hot: Callable[..., Any],
    result_axes: Any,
) -> Any:
    def local(tokens: Array, valid: Array, *values: Array) -> Any:
        size = vocabulary // parts("vocabulary")
        ids = tokens - part_index("vocabulary") * size
        here = (ids >= 0) & (ids < size)
        ids = jnp.where(here, ids, size)  # the dropped bin
        # Dropped values must not reach an exponential either: infinity times no gradient is no number.
        valid = valid & here[:, None, :]
        of_scatter, of_product = (functools.partial(f, size) for f in (scattered, one_hot))
        if method == "segment_sum" or (method == "auto" and valid.shape[1] >= _WIDE):
            return of_scatter(ids, valid, *values)
        if method == "one_hot":
            return of_product(ids, valid, *values)
        return jax.lax.platform_dependent(ids, valid, *values, tpu=of_product, default=of_scatter)

    candidates = ("batch", None, "length")
    run = on_mesh(local, (("batch", "length"), *[candidates] * (1 + len(values))), result_axes)
    return run(tokens, valid, *values)


def _rows(function: Callable[..., Any], ids_bj: Array, *of_candidates_btj: Array) -> Any:
    """Scatters row by row: candidates lead and positions trail, so that one scatter serves all positions."""
    result = jax.vmap(function)(ids_bj, *(jnp.swapaxes(x, 1, 2) for x in of_candidates_btj))
    return jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2), result)


def _logsumexp_scattered(
    vocabulary: int, ids_bj: Array, valid_btj: Array, scores_btj: Array, lost_btj: Array
) -> tuple[Array, Array, Array]:
    def row(ids_j: Array, valid_jt: Array, scores_jt: Array, lost_jt: Array) -> tuple[Array, Array, Array]:
        # The peak of each token is taken out first, so that scores of any size keep their precision.
        peak = jax.ops.segment_max(jnp.where(valid_jt, scores_jt, LOWEST), ids_j, vocabulary)
        peak = pmax(jax.lax.stop_gradient(jnp.maximum(peak, LOWEST)), "length")
        peak_jt = peak.at[ids_j].get(mode="clip")
        above = jnp.where(valid_jt, (scores_jt - peak_jt) + lost_jt, LOWEST)
        total = psum(jax.ops.segment_sum(jnp.exp(above), ids_j, vocabulary), "length")
        # Over candidates, which are fewer than tokens.
        total_jt = LogTotal.of(peak_jt, total.at[ids_j].get(mode="clip"))
        others = jnp.where(leading(total_jt.peak + total_jt.rest), 0.0, jnp.exp(above + peak_jt))
        others = psum(jnp.sum(others, axis=0, keepdims=True), "length")
        result = LogTotal.of(peak, total).double()
        return result.value, result.lost, psum(others, "vocabulary")

    return _rows(row, ids_bj, valid_btj, scores_btj, lost_btj)


def _logsumexp_one_hot(
    vocabulary: int, ids_bj: Array, valid_btj: Array, scores_btj: Array, lost_btj: Array
) -> tuple[Array, Array, Array]:
    peak = jnp.max(jnp.where(valid_btj, scores_btj, LOWEST), axis=-1, keepdims=True)
    peak = pmax(jax.lax.stop_gradient(peak), "length")
    mass = jnp.exp(jnp.where(valid_btj, (scores_btj - peak) + lost_btj, 0.0))
    result = LogTotal.of(peak, _sum_one_hot(vocabulary, ids_bj, valid_btj, mass)).double()
    return result.value, result.lost, psum(probability_of_others(result.value), "vocabulary")


def _sum_scattered(vocabulary: int, ids_bj: Array, valid_btj: Array, values_btj: Array) -> Array:
    def row(ids_j: Array, valid_jt: Array, values_jt: Array) -> Array:
        total = jax.ops.segment_sum(jnp.where(valid_jt, values_jt, 0.0), ids_j, vocabulary)
        return psum(total, "length")

    return _rows(row, ids_bj, valid_btj, values_btj)


def _sum_one_hot(vocabulary: int, ids_bj: Array, valid_btj: Array, values_btj: Array) -> Array:
    onehot = jax.nn.one_hot(ids_bj, vocabulary, dtype=jnp.float32)  # zeros for the dropped bin
    masked = jnp.where(valid_btj, values_btj, 0.0)
    total = jnp.einsum("btj,bjv->btv", masked, onehot, precision=jax.lax.Precision.HIGHEST)
    return psum(total, "length")
