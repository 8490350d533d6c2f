"""The copy-paste mixture: one formula, a loss path and a distribution path.

With LM-head logits ``z_t``, copy scores ``e_tj`` over the valid candidates j of
position t, and a gate logit ``g_t``::

    log p_lm(v)   = z_t[v] - lse(z_t)
    A_t           = lse over valid j of e_tj
    M_t(v)        = lse over valid j with x_j = v of e_tj
    log p_copy(v) = M_t(v) - A_t                        (minus infinity where v does not occur)
    log p(v)      = logaddexp(logsigmoid(-g_t) + log p_lm(v), logsigmoid(g_t) + log p_copy(v))

and where no candidate is valid, ``log p = log p_lm``. The known mechanisms are
choices of ``g_t`` (:func:`gate_logits`). Each of P pointers has its own ``e``, ``A``, ``M`` and
``g``, and the gate is a softmax over {LM, pointer 1..P}; that is the same formula with

    g_t       = lse over p of g_tp
    p_copy(v) = sum over p of softmax_p(g_tp) p_copy,p(v)

* :func:`target_terms` is the loss path: only ``lse(z_t)``, ``z_t[y_t]``, ``A_t`` and ``M_t(y_t)`` enter.
  They are computed blockwise (:mod:`cplm_jax.kernels`), so that neither a (length, length) nor a
  (tokens, vocabulary) array exists, beyond what fits one block.
* :func:`log_distribution` is the distribution path: ``M_t(v)`` for every v by
  ``jax.ops.segment_sum`` over the candidates' token ids.

``context_logits`` is another mixture, for comparison: one softmax over logits to which the copy scores
of each token's occurrences were added (:func:`context_log_softmax`).

Everything here is float32, whatever the model computes in. Shapes: B batch, T length, J candidates,
P pointers, C copy width, V vocabulary.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from cplm_jax.kernels.blocks import block_length, map_blocks
from cplm_jax.kernels.lm_head import LOGIT_BUDGET, lm_terms
from cplm_jax.kernels.pointer import pointer_terms
from cplm_jax.kernels.scatter import Method, TokenTerms, logsumexp_by_token, sum_by_token
from cplm_jax.pointer import Pointer, copy_scores
from cplm_jax.precision import (
    LOWEST,
    einsum_float32,
    logsumexp_of_sums,
    masked_logsumexp,
    product_parts,
    sum_and_lost,
)
from cplm_jax.sharding import ways


class TargetTerms(NamedTuple):
    """Parts of the target's log-probability, each of shape (batch, length), float32."""

    log_prob: Float[Array, "batch length"]
    """log p(y_t)."""
    gate: Float[Array, "batch length"]
    """sigmoid(g_t), the weight of copying; 0 where no candidate is valid. With ``context_logits``, which has
    no gate, the probability of the tokens that received a score."""
    responsibility: Float[Array, "batch length"]
    """r_t = sigmoid(g_t) p_copy(y_t) / p(y_t), the share of p(y_t) that came from copying. With
    ``context_logits``, the share by which p(y_t) exceeds p_lm(y_t), where y_t received a score."""
    log_copy: Float[Array, "batch length"]
    """log p_copy(y_t); ``LOWEST`` where y_t is not among the valid candidates."""
    lm_log_total: Float[Array, "batch length"]
    """lse(z_t)."""


class Totals(NamedTuple):
    """``A_t``, the mean score under ``exp(e_tj - A_t)``, and ``lse(z_t)``, relative to their peaks.

    Scores and logits may be far larger than their differences. With the peaks (largest terms,
    without a gradient) apart, float32 subtracts large numbers from each other before it adds small ones.
    """

    copy_peak: Float[Array, "batch length pointers"]
    copy_rest: Float[Array, "batch length pointers"]
    copy_mean: Float[Array, "batch length pointers"]
    lm_peak: Float[Array, "batch length 1"]
    lm_rest: Float[Array, "batch length 1"]


def gate_logits(pointer: Pointer, totals: Totals) -> tuple[Float[Array, "batch length #pointers"], ...]:
    """Returns the gate logit ``g_t`` of every pointer, as terms to be added.

    ``learned``: ``w . h_t + b``, as in the pointer-generator (See et al. 2017).
    ``sentinel``: ``A_t - q_t . s`` (Merity et al. 2017).
    ``shared_softmax``: ``A_t + b - lse(z_t)``, one softmax over logits and copy scores (CopyNet, Gu et al.
    2016; TRIME, Zhong et al. 2022).
    ``confidence``: ``w . h_t + b + u A_t + v H_t``, which sees how sure the pointer is: H_t is the
    entropy of its distribution over candidates.
    The ``context_logits`` have no gate; ``A_t + b`` divides the copy scores among several pointers.

    Args:
      pointer: its ``gate_term`` is ``w . h_t + b``, ``q_t . s``, ``b``, ``w . h_t + b`` and ``b``.
      totals: ``A_t``, mean score and ``lse(z_t)``.
    """
    term = pointer.gate_term.astype(jnp.float32)
    if pointer.gate == "learned":
        return (term,)
    if pointer.gate == "sentinel":
        return totals.copy_peak, -term, totals.copy_rest
    if pointer.gate == "shared_softmax":
        return totals.copy_peak, -totals.lm_peak, term, totals.copy_rest - totals.lm_rest
    if pointer.gate != "confidence":
        return totals.copy_peak, term, totals.copy_rest
    assert pointer.confidence is not None
    entropy = totals.copy_rest - totals.copy_mean
    of_total, of_entropy = pointer.confidence
    return (
        term,
        *product_parts(of_total, totals.copy_peak),
        of_total * totals.copy_rest + of_entropy * entropy,
    )


def mix(
    log_lm: Float[Array, "..."],
    log_copy: Float[Array, "..."],
    gate: Float[Array, "..."],
    log_odds: Float[Array, "..."],
    some_valid: Bool[Array, "..."],
) -> Float[Array, "..."]:
    """The formula: ``logaddexp(logsigmoid(-g) + log p_lm, logsigmoid(g) + log p_copy)``.

    Arguments broadcast. Its two terms may be far larger than their difference, whose sigmoid is the share of
    p that was copied, and which the gradient is made of: it is an argument of its own.

    Args:
      log_lm: log p_lm.
      log_copy: log p_copy.
      gate: g.
      log_odds: ``g + log p_copy - log p_lm``.
      some_valid: where a candidate exists; elsewhere the result is ``log_lm``.
    """
    copied = log_odds > 0
    larger = jnp.where(copied, jax.nn.log_sigmoid(gate) + log_copy, jax.nn.log_sigmoid(-gate) + log_lm)
    mixed = larger + jax.nn.softplus(jnp.where(copied, -log_odds, log_odds))
    return jnp.where(some_valid, mixed, log_lm)


def target_terms(
    hidden: Float[Array, "batch length width"],
    matrix: Float[Array, "vocabulary width"],
    targets: Int[Array, "batch length"],
    pointer: Pointer | None,
    chunk: int | None = None,
) -> TargetTerms:
    """The loss path: log-probability of each target and what copying contributed to it.

    Args:
      hidden: h, the decoder's output, in the compute dtype.
      matrix: W, the LM head's matrix.
      targets: y, the token that follows each position.
      pointer: what the copy head says about the same positions; ``None`` for a baseline.
      chunk: tokens whose logits exist at a time on a device; ``None`` chooses.
    """
    chex.assert_equal_shape_prefix([hidden, targets], 2)
    if pointer is not None and not pointer.gated:
        return _context_terms(hidden, matrix, targets, pointer, chunk)
    lm = lm_terms(hidden, matrix, targets, chunk)
    log_lm, lm_log_total = (lm.target - lm.peak) - lm.rest, lm.peak + lm.rest
    if pointer is None:
        nothing = jnp.zeros_like(log_lm)
        return TargetTerms(log_lm, nothing, nothing, jnp.full_like(log_lm, LOWEST), lm_log_total)
    copy = pointer_terms(
        pointer.query,
        pointer.candidates.key,
        pointer.recency,
        targets,
        pointer.candidates.tokens,
        pointer.segment_ids,
        pointer.candidates.segment_ids,
        pointer.candidates.copyable,
        block=pointer.block,
        with_mean=pointer.gate == "confidence",
    )
    # Pointers differ in scores, not in which candidates are valid or match.
    some_valid, some_match = (jnp.any(x > LOWEST, axis=-1) for x in (copy.total, copy.match))
    total = jnp.where(some_valid[..., None], copy.total, 0.0)
    match = jnp.where(some_match[..., None], copy.match, 0.0)
    totals = Totals(copy.peak, total, copy.mean, lm.peak[..., None], lm.rest[..., None])
    gates = gate_logits(pointer, totals)
    gate, gate_lost, *_ = logsumexp_of_sums(gates)
    # g + log p_copy, from which both log p_copy and the odds are taken.
    of_copy, lost, *_ = logsumexp_of_sums((*gates, copy.match_peak, -copy.peak, match, -total))
    log_copy = jnp.add(*sum_and_lost([of_copy, -gate, lost, -gate_lost]))
    log_odds = jnp.add(*sum_and_lost([of_copy, -lm.target, lm.peak, lost, lm.rest]))
    log_copy, log_odds = (jnp.where(some_match, x, LOWEST) for x in (log_copy, log_odds))
    log_prob = mix(log_lm, log_copy, gate, log_odds, some_valid)
    responsibility = jax.nn.sigmoid(log_odds)
    return TargetTerms(
        log_prob, jnp.where(some_valid, jax.nn.sigmoid(gate), 0.0), responsibility, log_copy, lm_log_total
    )


class CopyDistribution(NamedTuple):
    """The copy head's distribution over candidates, and its weight."""

    log_prob: Float[Array, "batch length candidates"]
    """log of the share of each valid candidate in the copied probability."""
    log_prob_lost: Float[Array, "batch length candidates"]
    """What rounding took from it."""
    valid: Bool[Array, "batch length candidates"]
    gate: Float[Array, "batch length"]
    """g_t."""
    gate_lost: Float[Array, "batch length"]
    """What rounding took from g_t."""


def copy_distribution(
    logits: Float[Array, "batch length vocabulary"],
    pointer: Pointer,
    index: Int[Array, "batch length"] | None = None,
) -> CopyDistribution:
    """Returns where the pointers point, all together, and the gate logit.

    Args are those of :func:`log_distribution`.
    """
    scores = copy_scores(pointer, index)
    valid = pointer.valid(index)
    some_valid = jnp.any(valid, axis=-1)[..., None]
    valid_p = valid[:, :, None, :]
    peak = jax.lax.stop_gradient(jnp.max(jnp.where(valid_p, scores, LOWEST), axis=-1))
    peak = jnp.where(some_valid, peak, 0.0)
    above = scores - peak[..., None]
    rest = jnp.where(some_valid, masked_logsumexp(above, valid_p), 0.0)
    weights = jnp.exp(jnp.where(valid_p, above - rest[..., None], LOWEST))
    mean = jnp.sum(jnp.where(valid_p, weights * above, 0.0), axis=-1)
    lm_peak, lm_rest = _lm_total(logits)
    totals = Totals(peak, rest, mean, lm_peak, lm_rest)
    gate = logsumexp_of_sums(gate_logits(pointer, totals))
    # One scatter serves all pointers: their shares of a candidate are added up before it.
    of_pointer = (-peak, gate.share, -rest, gate.share_lost)
    shares, lost = sum_and_lost([scores, *(x[..., None] for x in of_pointer)])
    most = jax.lax.stop_gradient(jnp.max(shares, axis=2))
    of_most = jnp.where(valid_p, (shares - most[:, :, None]) + lost, 0.0)
    log_prob, log_prob_lost = sum_and_lost([most, jax.nn.logsumexp(of_most, axis=2)])
    log_prob = jnp.where(valid, log_prob, LOWEST)
    return CopyDistribution(log_prob, log_prob_lost, valid, gate.total, gate.total_lost)


def log_distribution(
    logits: Float[Array, "batch length vocabulary"],
    pointer: Pointer | None,
    index: Int[Array, "batch length"] | None = None,
    method: Method = "auto",
) -> Float[Array, "batch length vocabulary"]:
    """The distribution path: log p(v) for every token v at every position.

    Holds several arrays of (batch, length, vocabulary); meant for evaluation, generation and
    distillation.

    Args:
      logits: LM-head logits z.
      pointer: what the copy head says about the same positions; ``None`` for a baseline.
      index: where each position lies among the pointer's candidates, for cached decoding; ``None`` if
        positions and candidates are the same.
      method: see :func:`~cplm_jax.kernels.scatter.logsumexp_by_token`.
    """
    logits = logits.astype(jnp.float32)
    if pointer is None:
        return _log_softmax(logits)
    chex.assert_equal_shape_prefix([logits, pointer.query], 2)
    if not pointer.gated:
        return context_log_softmax(logits, pointer, index, method)[0]
    copy, of_token = _copied_by_token(logits, pointer, index, method)
    gate, gate_lost = copy.gate[..., None], copy.gate_lost[..., None]
    (lm_peak, lm_rest), copied = _lm_total(logits), of_token.rest > LOWEST
    of_copy = (gate, of_token.peak, jnp.where(copied, of_token.rest, 0.0), gate_lost)
    log_odds = jnp.add(*sum_and_lost([*of_copy, -logits, lm_peak, lm_rest]))
    log_odds = jnp.where(copied, log_odds, LOWEST)
    some_valid = jnp.any(copy.valid, axis=-1)[..., None]
    return mix((logits - lm_peak) - lm_rest, of_token.peak + of_token.rest, gate, log_odds, some_valid)


def _copied_by_token(
    logits: Array, pointer: Pointer, index: Array | None, method: Method
) -> tuple[CopyDistribution, TokenTerms]:
    """Returns the distribution over candidates, and that over tokens which they make."""
    copy = copy_distribution(logits, pointer, index)
    tokens, vocabulary = pointer.candidates.tokens, logits.shape[-1]
    return copy, logsumexp_by_token(copy.log_prob, copy.valid, tokens, vocabulary, method, copy.log_prob_lost)


def context_log_softmax(
    logits: Float[Array, "batch length vocabulary"],
    pointer: Pointer,
    index: Int[Array, "batch length"] | None = None,
    method: Method = "auto",
) -> tuple[Float[Array, "batch length vocabulary"], Bool[Array, "batch length vocabulary"]]:
    """The other mixture: one softmax over logits to which copy scores were added, where v occurs.

    ``context_logits`` adds the log-sum-exp, and ``context_logits_sum`` the sum, of ``e_tj + b`` over the
    occurrences of v and the pointers, the idea of the pointer variants of Softmax-CPR (Chang et al. 2023).

    Args are those of :func:`log_distribution`.

    Returns:
      log p(v), and whether v received a score.
    """
    tokens, vocabulary = pointer.candidates.tokens, logits.shape[-1]
    parts: tuple[Array, ...]
    if pointer.gate == "context_logits":
        copy, of_token = _copied_by_token(logits, pointer, index, method)
        received = of_token.rest > LOWEST
        copied = (copy.gate[..., None], *of_token, copy.gate_lost[..., None])
        parts = (logits, *(jnp.where(received, part, 0.0) for part in copied))
    else:
        valid = pointer.valid(index)
        scores = jnp.sum(copy_scores(pointer, index), axis=2)
        added = sum_by_token(scores, valid, tokens, vocabulary, method)
        occurrences = sum_by_token(jnp.ones_like(scores), valid, tokens, vocabulary, method)
        received = occurrences > 0
        terms = jnp.split(pointer.gate_term.astype(jnp.float32), pointer.gate_term.shape[-1], axis=-1)
        bias, lost = sum_and_lost(terms)
        parts = (logits, added, *product_parts(occurrences, bias), occurrences * lost)
    return logsumexp_of_sums(parts).share, received


def positions_at_a_time(pointer: Pointer | None, targets: Int[Array, "batch length"], vocabulary: int) -> int:
    """Returns how many positions of every row :func:`log_distribution` should be asked for at a time.

    It holds several arrays of (batch, positions, vocabulary) and (batch, positions, pointers, candidates).
    """
    batch, length = targets.shape
    scores = 0 if pointer is None else pointer.query.shape[2] * pointer.candidates.tokens.shape[1]
    elements = math.ceil(batch / ways("batch")) * (math.ceil(vocabulary / ways("vocabulary")) + scores)
    return block_length(length, elements, LOGIT_BUDGET // 4)


def _context_terms(
    hidden: Array, matrix: Array, targets: Array, pointer: Pointer, chunk: int | None
) -> TargetTerms:
    """:func:`target_terms` of the other mixture: its distribution path over blocks of positions."""
    batch, length = targets.shape
    block = positions_at_a_time(pointer, targets, matrix.shape[0])
    if chunk is not None:
        block = max(1, chunk * ways("batch") // batch)
    # In float32 outside of the blocks, whose gradients of it add up.
    key = pointer.candidates.key.astype(jnp.float32)

    def terms(
        hidden: Array, targets: Array, index: Array, query: Array, term: Array, ids: Array
    ) -> TargetTerms:
        logits = einsum_float32("btd,vd->btv", hidden, matrix.astype(hidden.dtype))
        candidates = dataclasses.replace(pointer.candidates, key=key.astype(query.dtype))
        part = dataclasses.replace(pointer, candidates=candidates).part(query, term, ids)
        log_p, received = context_log_softmax(logits, part, index)
        copy = copy_distribution(logits, part, index)
        matches = copy.valid & (candidates.tokens[:, None, :] == targets[:, :, None])
        log_prob, without = _pick(log_p, targets), _pick(_log_softmax(logits), targets)
        return TargetTerms(
            log_prob=log_prob,
            gate=jnp.sum(jnp.where(received, jnp.exp(log_p), 0.0), axis=-1),
            responsibility=jnp.where(
                jnp.any(matches, -1), 1 - jnp.exp(jnp.minimum(without - log_prob, 0)), 0
            ),
            log_copy=masked_logsumexp(copy.log_prob, matches),
            lm_log_total=functools.reduce(jnp.add, _lm_total(logits))[..., 0],
        )

    index = jnp.broadcast_to(jnp.arange(length), targets.shape)
    arrays = (hidden, targets, index, pointer.query, pointer.gate_term, pointer.segment_ids)
    return map_blocks(terms, block, *arrays)


def _lm_total(
    logits: Float[Array, "batch length vocabulary"],
) -> tuple[Float[Array, "batch length 1"], Float[Array, "batch length 1"]]:
    """Returns the largest logit, without a gradient, and the log-sum-exp of what exceeds it."""
    peak = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    return peak, jnp.log(jnp.sum(jnp.exp(logits - peak), axis=-1, keepdims=True))


def _log_softmax(logits: Float[Array, "batch length vocabulary"]) -> Float[Array, "batch length vocabulary"]:
    peak, rest = _lm_total(logits)
    return (logits - peak) - rest


def _pick(
    values: Float[Array, "batch length vocabulary"], targets: Int[Array, "batch length"]
) -> Float[Array, "batch length"]:
    """Returns each target's value."""
    # A masked sum rather than a gather: it stays local when the vocabulary is sharded, and its
    # gradient is no scatter.
    ids = jax.lax.broadcasted_iota(targets.dtype, values.shape, values.ndim - 1)
    return jnp.sum(jnp.where(ids == targets[..., None], values, 0.0), axis=-1)
