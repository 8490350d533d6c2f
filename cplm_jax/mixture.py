"""The copy-paste mixture: one formula, a loss path and a distribution path.

With LM-head logits ``z_t``, copy scores ``e_tj`` over the valid candidates j of
position t, and a gate logit ``g_t``::

    log p_lm(v)   = z_t[v] - lse(z_t)
    A_t           = lse over valid j of e_tj
    M_t(v)        = lse over valid j with x_j = v of e_tj
    log p_copy(v) = M_t(v) - A_t                        (minus infinity where v does not occur)
    log p(v)      = logaddexp(logsigmoid(-g_t) + log p_lm(v), logsigmoid(g_t) + log p_copy(v))

and where no candidate is valid, ``log p = log p_lm``. The known mechanisms are
choices of ``g_t`` (:func:`gate_logit`).

* :func:`target_terms` is the loss path: only ``A_t`` and ``M_t(y_t)`` enter, two
  log-sum-exps over candidates; nothing of the vocabulary's size is made for copying.
* :func:`log_distribution` is the distribution path: ``M_t(v)`` for every v by
  ``jax.ops.segment_sum`` over the candidates' token ids.

Everything here is float32, whatever the model computes in. Shapes: B batch, T
length, C copy width, V vocabulary.
"""

import functools
from dataclasses import dataclass
from typing import Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from cplm_jax.precision import einsum_float32

Gate = Literal["learned", "sentinel", "shared_softmax"]

# Stands for minus infinity: finite, so that neither it nor its gradient makes a NaN.
LOWEST = float(jnp.finfo(jnp.float32).min)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["query", "key", "candidate", "gate_term"],
    meta_fields=["gate"],
)
@dataclass(frozen=True)
class Pointer:
    """What the copy head says about a batch.

    Attributes:
      query: q_t, (batch, length, copy).
      key: k_j, (batch, length, copy).
      candidate: whether the token at j may be copied at all, (batch, length).
      gate_term: the part of the gate logit that the copy head computes, (batch, length); see
        :func:`gate_logit`.
      gate: the gate's kind.
    """

    query: Float[Array, "batch length copy"]
    key: Float[Array, "batch length copy"]
    candidate: Bool[Array, "batch length"]
    gate_term: Float[Array, "batch length"]
    gate: Gate


class TargetTerms(NamedTuple):
    """Parts of the target's log-probability, each of shape (batch, length), float32."""

    log_prob: Float[Array, "batch length"]
    """log p(y_t)."""
    gate: Float[Array, "batch length"]
    """sigmoid(g_t), the weight of copying; 0 where no candidate is valid."""
    responsibility: Float[Array, "batch length"]
    """r_t = sigmoid(g_t) p_copy(y_t) / p(y_t), the share of p(y_t) that came from copying."""


def copy_scores(pointer: Pointer) -> Float[Array, "batch length candidates"]:
    """Returns ``e_tj = q_t . k_j / sqrt(C)`` for every pair of positions, in float32."""
    chex.assert_equal_shape([pointer.query, pointer.key])
    scores = einsum_float32("btc,bjc->btj", pointer.query, pointer.key)
    return scores / jnp.sqrt(jnp.float32(pointer.query.shape[-1]))


def valid_candidates(
    candidate: Bool[Array, "batch length"], segment_ids: Int[Array, "batch length"]
) -> Bool[Array, "batch length candidates"]:
    """Returns which j position t may copy: j <= t, the same document, and a candidate."""
    length = segment_ids.shape[-1]
    causal = jnp.tril(jnp.ones((length, length), bool))
    same_document = segment_ids[:, :, None] == segment_ids[:, None, :]
    return causal & same_document & candidate[:, None, :]


def occurs_in_context(
    tokens: Int[Array, "batch length"],
    segment_ids: Int[Array, "batch length"],
    copyable: Bool[Array, "batch length"],
    targets: Int[Array, "batch length"],
) -> Bool[Array, "batch length"]:
    """Returns whether each target occurs among the copyable tokens of its document so far.

    The measure does not depend on a model, so a baseline and any copy head share it.
    """
    valid = valid_candidates(copyable, segment_ids)
    return jnp.any(valid & (tokens[:, None, :] == targets[:, :, None]), axis=-1)


def masked_logsumexp(x: Float[Array, "..."], mask: Bool[Array, "..."]) -> Float[Array, "..."]:
    """Log-sum-exp of ``x`` over the last axis where ``mask``; ``LOWEST``, with zero gradient, if nowhere."""
    peak = jax.lax.stop_gradient(jnp.max(jnp.where(mask, x, LOWEST), axis=-1, keepdims=True))
    total = jnp.sum(jnp.where(mask, jnp.exp(jnp.where(mask, x - peak, 0.0)), 0.0), axis=-1)
    some = jnp.any(mask, axis=-1)
    return jnp.where(some, peak[..., 0] + jnp.log(jnp.where(some, total, 1.0)), LOWEST)


class LogTotals(NamedTuple):
    """``A_t`` and ``lse(z_t)``, each as its peak (the largest term, no gradient) and the rest.

    Scores and logits may be far larger than their differences. With the peaks apart, float32
    subtracts large numbers from each other before it adds small ones.
    """

    copy_peak: Float[Array, "batch length"]
    copy_rest: Float[Array, "batch length"]
    lm_peak: Float[Array, "batch length"]
    lm_rest: Float[Array, "batch length"]


def gate_logit(
    gate: Gate, gate_term: Float[Array, "batch length"], totals: LogTotals
) -> Float[Array, "batch length"]:
    """Returns the gate logit ``g_t``.

    Args:
      gate: ``learned``: ``w . h_t + b``, as in the pointer-generator (See et al. 2017).
        ``sentinel``: ``A_t - q_t . s`` (Merity et al. 2017). ``shared_softmax``:
        ``A_t + b - lse(z_t)``, one softmax over logits and copy scores (CopyNet, Gu et al.
        2016; TRIME, Zhong et al. 2022).
      gate_term: ``w . h_t + b``, ``q_t . s`` and ``b`` for the three.
      totals: ``A_t`` and ``lse(z_t)``.
    """
    if gate == "learned":
        return gate_term
    if gate == "sentinel":
        return (totals.copy_peak - gate_term) + totals.copy_rest
    return (totals.copy_peak - totals.lm_peak) + gate_term + (totals.copy_rest - totals.lm_rest)


def mix(
    log_lm: Float[Array, "..."],
    log_copy: Float[Array, "..."],
    gate: Float[Array, "..."],
    some_valid: Bool[Array, "..."],
) -> Float[Array, "..."]:
    """The formula: ``logaddexp(logsigmoid(-g) + log p_lm, logsigmoid(g) + log p_copy)``.

    Arguments broadcast; ``some_valid`` says where a candidate exists. Elsewhere the result is
    ``log_lm``.
    """
    mixed = jnp.logaddexp(jax.nn.log_sigmoid(-gate) + log_lm, jax.nn.log_sigmoid(gate) + log_copy)
    return jnp.where(some_valid, mixed, log_lm)


class _Terms(NamedTuple):
    """What both paths start from."""

    scores: Float[Array, "batch length candidates"]
    """e_tj - peak_t."""
    valid: Bool[Array, "batch length candidates"]
    some_valid: Bool[Array, "batch length"]
    log_total: Float[Array, "batch length"]
    """A_t - peak_t."""
    gate: Float[Array, "batch length"]
    """g_t."""
    log_lm: Float[Array, "batch length vocabulary"]
    """log p_lm."""


def _terms(
    logits: Float[Array, "batch length vocabulary"],
    segment_ids: Int[Array, "batch length"],
    pointer: Pointer,
) -> _Terms:
    scores = copy_scores(pointer)
    valid = valid_candidates(pointer.candidate, segment_ids)
    some_valid = jnp.any(valid, axis=-1)
    peak = jax.lax.stop_gradient(jnp.max(jnp.where(valid, scores, LOWEST), axis=-1))
    peak = jnp.where(some_valid, peak, 0.0)
    scores = scores - peak[..., None]
    log_total = jnp.where(some_valid, masked_logsumexp(scores, valid), 0.0)
    lm_peak, lm_rest = _lm_total(logits)
    totals = LogTotals(peak, log_total, lm_peak, lm_rest)
    g = gate_logit(pointer.gate, pointer.gate_term.astype(jnp.float32), totals)
    return _Terms(scores, valid, some_valid, log_total, g, (logits - lm_peak[..., None]) - lm_rest[..., None])


def _lm_total(
    logits: Float[Array, "batch length vocabulary"],
) -> tuple[Float[Array, "batch length"], Float[Array, "batch length"]]:
    """Returns the largest logit, without a gradient, and the log-sum-exp of what exceeds it."""
    peak = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
    return peak, jnp.log(jnp.sum(jnp.exp(logits - peak[..., None]), axis=-1))


def _log_softmax(logits: Float[Array, "batch length vocabulary"]) -> Float[Array, "batch length vocabulary"]:
    peak, rest = _lm_total(logits)
    return (logits - peak[..., None]) - rest[..., None]


def _pick(
    values: Float[Array, "batch length vocabulary"], targets: Int[Array, "batch length"]
) -> Float[Array, "batch length"]:
    """Returns each target's value."""
    # A masked sum rather than a gather: it stays local when the vocabulary is sharded, and its
    # gradient is no scatter.
    ids = jax.lax.broadcasted_iota(targets.dtype, values.shape, values.ndim - 1)
    return jnp.sum(jnp.where(ids == targets[..., None], values, 0.0), axis=-1)


def target_terms(
    logits: Float[Array, "batch length vocabulary"],
    targets: Int[Array, "batch length"],
    tokens: Int[Array, "batch length"],
    segment_ids: Int[Array, "batch length"],
    pointer: Pointer | None,
) -> TargetTerms:
    """The loss path: log-probability of each target and what copying contributed to it.

    Args:
      logits: LM-head logits z.
      targets: y, the token that follows each position.
      tokens: x, the tokens that candidates stand for.
      segment_ids: document of each position; 0 is padding.
      pointer: what the copy head says; ``None`` for a baseline.
    """
    chex.assert_equal_shape([targets, tokens, segment_ids])
    chex.assert_shape(logits, (*targets.shape, None))
    logits = logits.astype(jnp.float32)
    if pointer is None:
        log_lm = _pick(_log_softmax(logits), targets)
        return TargetTerms(log_lm, jnp.zeros_like(log_lm), jnp.zeros_like(log_lm))
    terms = _terms(logits, segment_ids, pointer)
    matches = terms.valid & (tokens[:, None, :] == targets[:, :, None])
    some_match = jnp.any(matches, axis=-1)
    log_copy = jnp.where(some_match, masked_logsumexp(terms.scores, matches) - terms.log_total, LOWEST)
    log_prob = mix(_pick(terms.log_lm, targets), log_copy, terms.gate, terms.some_valid)
    responsibility = jnp.where(some_match, jnp.exp(jax.nn.log_sigmoid(terms.gate) + log_copy - log_prob), 0.0)
    return TargetTerms(log_prob, jnp.where(terms.some_valid, jax.nn.sigmoid(terms.gate), 0.0), responsibility)


def segment_logsumexp(
    scores: Float[Array, "candidates ..."],
    mask: Bool[Array, "candidates ..."],
    ids: Int[Array, "candidates"],
    num_segments: int,
) -> tuple[Float[Array, "segments ..."], Bool[Array, "segments ..."]]:
    """Log-sum-exp of the masked scores that share an id, and whether there is any.

    The peak of each segment is taken out first, so that scores of any size keep their
    precision. Segments without a score get ``LOWEST``.
    """
    peak = jax.ops.segment_max(jnp.where(mask, scores, LOWEST), ids, num_segments)
    peak = jax.lax.stop_gradient(jnp.maximum(peak, LOWEST))
    shifted = jnp.where(mask, scores - peak[ids], 0.0)
    total = jax.ops.segment_sum(jnp.where(mask, jnp.exp(shifted), 0.0), ids, num_segments)
    some = total > 0
    return jnp.where(some, peak + jnp.log(jnp.where(some, total, 1.0)), LOWEST), some


def log_distribution(
    logits: Float[Array, "batch length vocabulary"],
    tokens: Int[Array, "batch length"],
    segment_ids: Int[Array, "batch length"],
    pointer: Pointer | None,
) -> Float[Array, "batch length vocabulary"]:
    """The distribution path: log p(v) for every token v at every position.

    Arguments are those of :func:`target_terms`. Holds several arrays of (batch, length,
    vocabulary); meant for evaluation, generation and distillation.
    """
    chex.assert_equal_shape([tokens, segment_ids])
    chex.assert_shape(logits, (*tokens.shape, None))
    logits = logits.astype(jnp.float32)
    if pointer is None:
        return _log_softmax(logits)
    terms = _terms(logits, segment_ids, pointer)

    def scatter(scores_txj: Array, valid_txj: Array, ids_j: Array) -> tuple[Array, Array]:
        # One scatter serves every position of a row: candidates lead, positions trail.
        return segment_logsumexp(scores_txj.T, valid_txj.T, ids_j, logits.shape[-1])

    log_match_bvt, some_match_bvt = jax.vmap(scatter)(terms.scores, terms.valid, tokens)
    log_match = jnp.swapaxes(log_match_bvt, 1, 2)
    some_match = jnp.swapaxes(some_match_bvt, 1, 2)
    log_copy = jnp.where(some_match, log_match - terms.log_total[..., None], LOWEST)
    return mix(terms.log_lm, log_copy, terms.gate[..., None], terms.some_valid[..., None])
