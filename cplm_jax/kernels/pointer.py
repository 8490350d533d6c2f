"""The copy head's share of the loss, over blocks of queries and candidates.

No (length, length) array is ever whole: blocks above the diagonal are skipped, and the backward pass
recomputes scores from the log-sum-exps, as FlashAttention does for attention (Dao et al. 2022).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from cplm_jax.double_word import LogTotal
from cplm_jax.kernels.blocks import block_length, cut, join, pad_to
from cplm_jax.precision import LOWEST
from cplm_jax.sharding import on_mesh, part_index, psum, sum_parts

# Scores of one block, on each device: 16 MiB in float32.
SCORE_BUDGET = 2**22


class ScoreTerms(NamedTuple):
    """Of the copy scores of some candidates, each (batch, length, pointers), float32."""

    total: LogTotal
    """Their log-sum-exp."""
    entropy: Float[Array, "batch length pointers"]
    """That of their softmax; 0 where there is none, and unless asked for."""


class PointerTerms(NamedTuple):
    """Terms of the valid candidates that hold the target, and of those that do not.

    With both apart, ``1 - p_copy(y_t)``, which the gradient is made of, keeps its relative precision.
    """

    match: ScoreTerms
    """``M_t(y_t)``."""
    others: ScoreTerms


class _Options(NamedTuple):
    """What is known at compile time; see :func:`pointer_terms`."""

    block: int | None
    with_entropy: bool


class _Queries(NamedTuple):
    """Arrays of (batch, length, ...) that belong to the querying positions."""

    query: Array
    targets: Array
    segment_ids: Array


class _Candidates(NamedTuple):
    """Arrays of (batch, candidates, ...) that belong to the candidates."""

    key: Array
    tokens: Array
    segment_ids: Array
    copyable: Array


_QUERY_AXES = _Queries._make([("batch", "length", None, None), ("batch", "length"), ("batch", "length")])
_CANDIDATE_AXES = _Candidates._make([("batch", None, None, None), *[("batch", None)] * 3])
_TERM_AXES = ("batch", None, "length")  # terms are (batch, pointers, length) inside
_TERMS_AXES = PointerTerms._make([ScoreTerms._make([LogTotal._make([_TERM_AXES] * 2), _TERM_AXES])] * 2)


def pointer_terms(
    query: Float[Array, "batch length pointers copy"],
    key: Float[Array, "batch length pointers copy"],
    recency: Float[Array, "pointers"] | None,
    targets: Int[Array, "batch length"],
    tokens: Int[Array, "batch length"],
    segment_ids: Int[Array, "batch length"],
    candidate_segment_ids: Int[Array, "batch length"],
    copyable: Bool[Array, "batch length"],
    block: int | None = None,
    with_entropy: bool = False,
) -> PointerTerms:
    """Returns the log-sum-exps of ``e_tj = q_t . k_j / sqrt(C) - recency (t - j)``.

    Products run in the type of ``query`` and accumulate in float32, forward and backward.

    Args:
      query: q, in the compute dtype.
      key: k, likewise.
      recency: what a score loses for each position from j to t, float32; ``None`` for nothing.
      targets: y.
      tokens: x, the tokens that candidates stand for.
      segment_ids: document of each querying position; candidates of other documents are invalid.
      candidate_segment_ids: document of each candidate.
      copyable: whether the token at j may be copied at all.
      block: positions in a block of queries and of candidates; ``None`` chooses.
      with_entropy: whether to compute the entropies.
    """
    queries = _Queries(query, targets, segment_ids)
    candidates = _Candidates(key, tokens, candidate_segment_ids, copyable)
    return _terms(queries, candidates, recency, _Options(block, with_entropy))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _terms(
    queries: _Queries, candidates: _Candidates, recency: Array | None, options: _Options
) -> PointerTerms:
    terms, _ = _forward(queries, candidates, recency, options)
    return terms


def _forward(
    queries: _Queries, candidates: _Candidates, recency: Array | None, options: _Options
) -> tuple[PointerTerms, tuple]:
    run = on_mesh(
        functools.partial(_local_forward, options),
        (_QUERY_AXES, _CANDIDATE_AXES, (None,)),
        _TERMS_AXES,
    )
    terms = run(queries, candidates, recency)
    return jax.tree.map(_swap, terms), (queries, candidates, recency, terms)


def _backward(options: _Options, saved: tuple, cotangents: PointerTerms) -> tuple:
    queries, candidates, recency, terms = saved
    run = on_mesh(
        functools.partial(_local_backward, options),
        (_QUERY_AXES, _CANDIDATE_AXES, (None,), _TERMS_AXES, _TERMS_AXES),
        (_QUERY_AXES.query, ("batch", "length", None, None), (None,)),
    )
    of_terms = jax.tree.map(_swap, cotangents)
    d_query, d_key, d_recency = run(queries, candidates, recency, terms, of_terms)
    return _Queries._make([d_query, None, None]), _Candidates._make([d_key, None, None, None]), d_recency


_terms.defvjp(_forward, _backward)


def _swap(term: Array) -> Array:
    """Between the order of axes outside, (batch, length, pointers), and inside, (batch, pointers, length)."""
    return jnp.swapaxes(term, 1, 2)


class _Grid:
    """Cuts one device's queries and all candidates into blocks and loops over those below the diagonal.

    Args:
      block: positions in a block; ``None`` chooses.
      queries: this device's queries.
      candidates: all candidates of its rows.
      recency: loss of score per position.
    """

    def __init__(self, block: int | None, queries: _Queries, candidates: _Candidates, recency: Array | None):
        batch, self.length, pointers, _ = queries.query.shape
        self.width = candidates.tokens.shape[1]
        if block is None:
            # Square blocks: the side is the root of what the budget leaves for a row and pointer.
            side = int((SCORE_BUDGET / (batch * pointers)) ** 0.5)
            block = block_length(self.length, 1, max(16, side))
        self.block = min(block, self.length)
        self.recency = recency
        self.first = part_index("length") * self.length
        self.queries = jax.tree.map(lambda x: cut(x, 1, self.block), queries)
        self.rows = self.queries.targets.shape[0]
        self.columns = -(-self.width // self.block)
        # Padding candidates are not copyable (False), so they are never valid.
        self.candidates = jax.tree.map(lambda x: pad_to(x, 1, self.columns * self.block), candidates)

    def each_row(self, function: Callable[[Array, Any, Any], Any], carry: Any, *xs: Array) -> Any:
        """Scans ``function(carry, row, (queries, *xs))`` over blocks of queries."""
        every = (jnp.arange(self.rows), (self.queries, *xs))
        if self.rows == 1:
            carry, ys = function(carry, 0, jax.tree.map(lambda x: x[0], every[1]))
            return carry, jax.tree.map(lambda y: y[None], ys)
        return jax.lax.scan(lambda c, x: function(c, *x), carry, every)

    def each_column(self, row: Any, function: Callable[[Any, Any], Any], carry: Any) -> Any:
        """Folds ``function(column, carry)`` over the blocks of candidates that the row's queries may see."""
        if self.columns == 1:
            return function(0, carry)
        last = self.first + (row + 1) * self.block
        columns = jnp.minimum(-(-last // self.block), self.columns)
        return jax.lax.fori_loop(0, columns, function, carry)

    def column(self, x: Array, column: Any) -> Array:
        """Returns a block of candidates of ``x``."""
        return jax.lax.dynamic_slice_in_dim(x, column * self.block, self.block, axis=1)

    def scores(self, queries: _Queries, row: Any, column: Any) -> tuple[Array, Array, Array, Array, Array]:
        """Returns scores (batch, pointers, t, j), which are valid, which match, distances t - j, and keys."""
        c = jax.tree.map(lambda x: self.column(x, column), self.candidates)
        e = jnp.einsum("btpc,bjpc->bptj", queries.query, c.key, preferred_element_type=jnp.float32)
        t = self.first + row * self.block + jnp.arange(self.block)
        distance = t[:, None] - (column * self.block + jnp.arange(self.block))[None]
        e = e * score_scale(queries.query)
        if self.recency is not None:
            e = e - self.recency[:, None, None] * distance
        inside = (distance >= 0) & (t < self.first + self.length)[:, None]
        valid = inside & (queries.segment_ids[:, :, None] == c.segment_ids[:, None])
        valid = (valid & c.copyable[:, None])[:, None]
        match = valid & (queries.targets[:, :, None] == c.tokens[:, None])[:, None]
        return e, valid, match, distance, c.key


def score_scale(query: Float[Array, "... copy"]) -> float:
    """Returns the factor ``1 / sqrt(C)`` of the scores."""
    return query.shape[-1] ** -0.5


class _Sum(NamedTuple):
    """A running sum of ``exp(e)`` and, if wanted, ``e exp(e)``, both relative to the largest e so far."""

    peak: Array
    total: Array
    weighted: Array | None

    @staticmethod
    def nothing(shape: tuple[int, ...], weighted: bool = False) -> "_Sum":
        """Returns sums of this shape before anything was added."""
        return _Sum(jnp.full(shape, LOWEST), jnp.zeros(shape), jnp.zeros(shape) if weighted else None)

    def add(self, e: Array, mask: Array) -> "_Sum":
        """Adds the masked scores of the last axis."""
        peak = jnp.maximum(self.peak, jnp.max(jnp.where(mask, e, LOWEST), axis=-1))
        shifted = jnp.where(mask, e - peak[..., None], 0.0)
        mass = jnp.where(mask, jnp.exp(shifted), 0.0)
        some = self.total > 0
        moved = jnp.where(some, self.peak - peak, 0.0)
        scale = jnp.exp(moved)
        weighted = self.weighted
        if weighted is not None:
            more = jnp.sum(jnp.where(mask, mass * shifted, 0.0), axis=-1)
            weighted = (weighted + self.total * moved) * scale + more
        return _Sum(peak, self.total * scale + jnp.sum(mass, axis=-1), weighted)

    def terms(self) -> ScoreTerms:
        """Returns log-sum-exp and entropy."""
        total = LogTotal.of(self.peak, self.total)
        if self.weighted is None:
            return ScoreTerms(total, jnp.zeros_like(self.total))
        return ScoreTerms(total, total.rest - self.weighted / jnp.where(self.total > 0, self.total, 1.0))


def _local_forward(
    options: _Options, queries: _Queries, candidates: _Candidates, recency: Array | None
) -> PointerTerms:
    grid = _Grid(options.block, queries, candidates, recency)
    batch, _, pointers, _ = queries.query.shape

    def one_row(_: Any, row: Any, x: Any) -> tuple[None, PointerTerms]:
        def add(column: Any, sums: tuple[_Sum, _Sum]) -> tuple[_Sum, _Sum]:
            e, valid, match, _, _ = grid.scores(x[0], row, column)
            return sums[0].add(e, match), sums[1].add(e, valid & ~match)

        nothing = _Sum.nothing((batch, pointers, grid.block), options.with_entropy)
        matching, others = grid.each_column(row, add, (nothing, nothing))
        return None, PointerTerms(matching.terms(), others.terms())

    _, rows = grid.each_row(one_row, None)
    return jax.tree.map(lambda y: join(y, 2, grid.length), rows)


def _local_backward(
    options: _Options,
    queries: _Queries,
    candidates: _Candidates,
    recency: Array | None,
    terms: PointerTerms,
    cotangents: PointerTerms,
) -> tuple[Array, Array, Array | None]:
    grid = _Grid(options.block, queries, candidates, recency)
    dtype, scale = queries.query.dtype, score_scale(queries.query)
    split = jax.tree.map(lambda x: cut(x, 2, grid.block), (terms, cotangents))

    def one_row(carry: Any, row: Any, x: Any) -> tuple[Any, Array]:
        q, *of_terms = x
        of_terms = jax.tree.map(lambda y: y[..., None], of_terms)

        def add(column: Any, sums: tuple[Array, Array, Array | None]) -> tuple[Array, Array, Array | None]:
            d_query, d_key, d_recency = sums
            e, valid, match, distance, key = grid.scores(q, row, column)
            # A score counts either among those that match or among the others.
            terms, d_terms = (
                jax.tree.map(lambda *both: jnp.where(match, *both), of.match, of.others) for of in of_terms
            )
            log_share = jnp.where(valid, (e - terms.total.peak) - terms.total.rest, 0.0)
            d_log = d_terms.total.rest
            if options.with_entropy:
                d_log = d_log - d_terms.entropy * (log_share + terms.entropy)
            d_e = jnp.where(valid, jnp.exp(log_share) * d_log, 0.0)
            if d_recency is not None:
                d_recency = d_recency - jnp.sum(d_e * distance, axis=(0, 2, 3))
            d_e = (d_e * scale).astype(dtype)
            d_query = d_query + jnp.einsum("bptj,bjpc->btpc", d_e, key, preferred_element_type=jnp.float32)
            more = jnp.einsum("bptj,btpc->bjpc", d_e, q.query, preferred_element_type=jnp.float32)
            start = column * grid.block
            d_key = jax.lax.dynamic_update_slice_in_dim(
                d_key, grid.column(d_key, column) + more, start, axis=1
            )
            return d_query, d_key, d_recency

        d_query, *carry = grid.each_column(row, add, (jnp.zeros(q.query.shape, jnp.float32), *carry))
        return tuple(carry), d_query

    nothing = (
        jnp.zeros(grid.candidates.key.shape, jnp.float32),
        None if recency is None else jnp.zeros(recency.shape, jnp.float32),
    )
    (d_key, d_recency), d_query = grid.each_row(one_row, nothing, *split)
    d_query = join(d_query, 1, grid.length).astype(dtype)
    d_key = sum_parts(d_key[:, : grid.width], over=("length",), axes=("batch", "length", None, None))
    if d_recency is not None:
        d_recency = psum(d_recency, "tokens")
    return d_query, d_key.astype(dtype), d_recency
