"""The LM head's share of the loss, over chunks of tokens: no (tokens, vocabulary) array is ever whole.

Unless a single chunk holds all tokens: its logits are kept, since computing them again would save nothing.

The idea of computing a cross-entropy from states and matrix chunk by chunk, recomputing logits in
the backward pass, is that of Wijmans et al. 2024 (Cut Your Losses); here the target's logit and the
others' log-sum-exp come out apart, each with its own gradient, because the mixture weighs every token
differently.
"""

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from cplm_jax.double_word import LogTotal
from cplm_jax.kernels.blocks import block_length, cut, join
from cplm_jax.precision import LOWEST
from cplm_jax.sharding import on_mesh, part_index, pmax, psum, sum_parts

# Logits held at a time, on each device: 128 MiB in float32.
LOGIT_BUDGET = 2**25


class LMTerms(NamedTuple):
    """The target's logit ``z_t[y_t]`` and the log-sum-exp of all others, each (batch, length), float32.

    With the target apart, ``1 - p_lm(y_t)``, which the gradient is made of, keeps its relative precision.
    """

    target: Float[Array, "batch length"]
    others: LogTotal


_HIDDEN, _MATRIX, _TOKENS = ("batch", "length", None), ("vocabulary", None), ("batch", "length")
_TERMS = LMTerms._make([_TOKENS, LogTotal._make([_TOKENS] * 2)])


def lm_terms(
    hidden: Float[Array, "batch length width"],
    matrix: Float[Array, "vocabulary width"],
    targets: Int[Array, "batch length"],
    chunk: int | None = None,
) -> LMTerms:
    """Returns the targets' logits, and the log-sum-exps of the others, of ``z = W h``.

    Products run in the type of ``hidden`` and accumulate in float32, forward and backward. The
    vocabulary may be split over the mesh; only sums of (batch, length) are exchanged forward.

    Args:
      hidden: h, in the compute dtype.
      matrix: W, float32.
      targets: y, each below the vocabulary size.
      chunk: tokens whose logits exist at a time on a device; ``None`` chooses.
    """
    chex.assert_equal_shape_prefix([hidden, targets], 2)
    return _lm_terms(hidden, matrix, targets, chunk)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _lm_terms(hidden: Array, matrix: Array, targets: Array, chunk: int | None) -> LMTerms:
    terms, _ = _forward(hidden, matrix, targets, chunk)
    return terms


def _forward(hidden: Array, matrix: Array, targets: Array, chunk: int | None) -> tuple[LMTerms, tuple]:
    run = on_mesh(
        functools.partial(_local_forward, chunk),
        (_HIDDEN, _MATRIX, _TOKENS),
        (_TERMS, ("tokens", "vocabulary")),
    )
    terms, logits = run(hidden, matrix, targets)
    return terms, (hidden, matrix, targets, terms, logits)


def _backward(chunk: int | None, residuals: tuple, cotangents: LMTerms) -> tuple[Array, Array, None]:
    hidden, matrix, targets, terms, logits = residuals
    run = on_mesh(
        functools.partial(_local_backward, chunk),
        (_HIDDEN, _MATRIX, _TOKENS, _TERMS.others, ("tokens", "vocabulary"), (_TOKENS, _TOKENS)),
        (_HIDDEN, ("vocabulary", "embed")),
    )
    of_terms = (cotangents.target, cotangents.others.rest)
    d_hidden, d_matrix = run(hidden, matrix, targets, terms.others, logits, of_terms)
    return d_hidden, d_matrix, None


_lm_terms.defvjp(_forward, _backward)


def _logits(hidden_nd: Array, matrix_vd: Array) -> Array:
    return jnp.einsum("nd,vd->nv", hidden_nd, matrix_vd, preferred_element_type=jnp.float32)


def _is_target(targets_n: Array, vocabulary: int) -> Array:
    """Returns where the target's logit lies in this device's part of the vocabulary, (n, vocabulary)."""
    first = part_index("vocabulary") * vocabulary
    return jnp.arange(vocabulary)[None] == (targets_n - first)[:, None]


def _tokens_of(chunk: int | None, hidden: Array, matrix: Array) -> int:
    tokens = hidden.shape[0] * hidden.shape[1]
    return min(tokens, chunk) if chunk is not None else block_length(tokens, matrix.shape[0], LOGIT_BUDGET)


def _flat(x: Array) -> Array:
    return x.reshape(-1, *x.shape[2:])


def _local_forward(
    chunk: int | None, hidden: Array, matrix: Array, targets: Array
) -> tuple[LMTerms, Array | None]:
    """On one device's rows and part of the vocabulary; also the logits, if they are a single chunk."""
    shape, matrix_vd = targets.shape, matrix.astype(hidden.dtype)
    size = _tokens_of(chunk, hidden, matrix)

    def one(hidden_nd: Array, targets_n: Array) -> tuple[LMTerms, Array]:
        z_nv = _logits(hidden_nd, matrix_vd)
        is_target = _is_target(targets_n, z_nv.shape[-1])
        target = psum(jnp.sum(jnp.where(is_target, z_nv, 0.0), axis=-1), "vocabulary")
        others = jnp.where(is_target, LOWEST, z_nv)
        peak = pmax(jnp.max(others, axis=-1), "vocabulary")
        total = psum(jnp.sum(jnp.exp(others - peak[:, None]), axis=-1), "vocabulary")
        return LMTerms(target, LogTotal.of(peak, total)), z_nv

    flat_hidden, flat_targets = _flat(hidden), _flat(targets)
    if size == targets.size:
        terms, logits = one(flat_hidden, flat_targets)  # recomputing a single chunk would save nothing
    else:
        xs = (cut(flat_hidden, 0, size), cut(flat_targets, 0, size))
        terms = jax.lax.map(lambda x: one(*x)[0], xs)
        terms, logits = jax.tree.map(lambda y: join(y, 0, targets.size), terms), None
    return jax.tree.map(lambda y: y.reshape(shape), terms), logits


def _local_backward(
    chunk: int | None,
    hidden: Array,
    matrix: Array,
    targets: Array,
    others: LogTotal,
    logits: Array | None,
    cotangents: tuple[Array, Array],
) -> tuple[Array, Array]:
    """Gradients of one device's rows, summed over the mesh."""
    dtype = hidden.dtype
    matrix_vd = matrix.astype(dtype)
    size = _tokens_of(chunk, hidden, matrix)

    def one(x: tuple[Array, ...], z_nv: Array | None = None) -> tuple[Array, Array]:
        hidden_nd, targets_n, peak_n, rest_n, d_target_n, d_rest_n = x
        if z_nv is None:
            z_nv = _logits(hidden_nd, matrix_vd)
        is_target = _is_target(targets_n, z_nv.shape[-1])
        others = jnp.where(is_target, LOWEST, z_nv)  # the target's may be infinite beside theirs
        of_others = d_rest_n[:, None] * jnp.exp((others - peak_n[:, None]) - rest_n[:, None])
        d_z = jnp.where(is_target, d_target_n[:, None], of_others)
        # In the compute dtype, as the forward products; left alone, float32 would make them slow.
        d_z = d_z.astype(dtype)
        d_hidden = jnp.einsum("nv,vd->nd", d_z, matrix_vd, preferred_element_type=jnp.float32)
        d_matrix = jnp.einsum("nv,nd->vd", d_z, hidden_nd, preferred_element_type=jnp.float32)
        return d_hidden, d_matrix

    xs = tuple(_flat(x) for x in (hidden, targets, *others, *cotangents))
    if logits is not None:
        d_hidden, d_matrix = one(xs, logits)
    else:

        def step(total: Array, x: tuple[Array, ...]) -> tuple[Array, Array]:
            d_hidden, d_matrix = one(x)
            return total + d_matrix, d_hidden

        d_matrix, d_hidden = jax.lax.scan(
            step, jnp.zeros(matrix.shape, jnp.float32), tuple(cut(x, 0, size) for x in xs)
        )
        d_hidden = join(d_hidden, 0, targets.size)
    d_hidden = psum(d_hidden, "vocabulary").reshape(hidden.shape).astype(dtype)
    d_matrix = sum_parts(d_matrix, over=("batch", "length"), axes=("vocabulary", "embed"))
    return d_hidden, d_matrix.astype(matrix.dtype)
