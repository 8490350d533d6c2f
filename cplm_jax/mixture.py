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

* :func:`target_terms` is the loss path: only ``lse(z_t)``, ``z_t[y_t]``, ``A_t`` and ``M_t(y_t)`` enter, each
  log-sum-exp as the target's part and that of the others.
  They are computed blockwise (:mod:`cplm_jax.kernels`), so that neither a (length, length) nor a
  (tokens, vocabulary) array exists, beyond what fits one block.
* :func:`log_distribution` is the distribution path: ``M_t(v)`` for every v by
  ``jax.ops.segment_sum`` over the candidates' token ids.

``context_logits`` is another mixture, for comparison: one softmax over logits to which the copy scores
of each token's occurrences were added (:func:`context_log_softmax`).

Everything here is float32, whatever the model computes in, and what may be large is a double word
(:mod:`cplm_jax.double_word`), since probabilities are made of differences. Shapes: B batch, T length,
J candidates, P pointers, C copy width, V vocabulary.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from cplm_jax.double_word import (
    DoubleWord,
    log_share,
    log_softmax,
    logsumexp,
    product,
    softmax,
)
from cplm_jax.kernels.blocks import block_length, map_blocks
from cplm_jax.kernels.lm_head import LOGIT_BUDGET, lm_terms
from cplm_jax.kernels.pointer import pointer_terms
from cplm_jax.kernels.scatter import Method, logsumexp_by_token, sum_by_token
from cplm_jax.pointer import Pointer, copy_scores
from cplm_jax.precision import LOWEST, einsum_float32, masked_logsumexp
from cplm_jax.sharding import ways

_LM_GATE = DoubleWord(*np.zeros(2, np.float32))


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
    """What gates may see of both heads."""

    copy: DoubleWord
    """A_t, (batch, length, pointers)."""
    entropy: Float[Array, "batch length pointers"]
    """H_t, of each pointer's distribution over candidates."""
    lm: DoubleWord
    """lse(z_t), (batch, length, 1)."""


def gate_logits(pointer: Pointer, totals: Totals) -> DoubleWord:
    """Returns the gate logit ``g_t`` of every pointer, (batch, length, pointers).

    ``learned``: ``w . h_t + b``, as in the pointer-generator (See et al. 2017).
    ``sentinel``: ``A_t - q_t . s`` (Merity et al. 2017).
    ``shared_softmax``: ``A_t + b - lse(z_t)``, one softmax over logits and copy scores (CopyNet, Gu et al.
    2016; TRIME, Zhong et al. 2022).
    ``confidence``: ``w . h_t + b + u A_t + v H_t``, which sees how sure the pointer is: H_t is the
    entropy of its distribution over candidates.
    The ``context_logits`` have no gate; ``A_t + b`` divides the copy scores among several pointers.

    Args:
      pointer: its ``gate_term`` is ``w . h_t + b``, ``q_t . s``, ``b``, ``w . h_t + b`` and ``b``.
      totals: ``A_t``, ``H_t`` and ``lse(z_t)``.
    """
    term = pointer.gate_term.astype(jnp.float32)
    if pointer.gate == "learned":
        return DoubleWord.of(term)
    if pointer.gate == "sentinel":
        return totals.copy - term
    if pointer.gate == "shared_softmax":
        return totals.copy + term - totals.lm
    if pointer.gate != "confidence":
        return totals.copy + term
    assert pointer.confidence is not None
    of_total, of_entropy = pointer.confidence
    return product(of_total, totals.copy) + term + product(of_entropy, DoubleWord.of(totals.entropy))


@jax.custom_jvp
def mix(gates: tuple[DoubleWord, ...], log_probs: tuple[DoubleWord, ...]) -> DoubleWord:
    """The formula: ``log p = lse_i (g_i + log p_i) - lse_i g_i``, the heads' mean weighed by ``softmax(g)``.

    Of the LM head, whose g is 0, and a single pointer it is
    ``logaddexp(logsigmoid(-g) + log p_lm, logsigmoid(g) + log p_copy)``.

    Args:
      gates: g of every head.
      log_probs: log p of every head; shapes broadcast.
    """
    if len(gates) == 1:
        return log_probs[0]
    return logsumexp(_joint(gates, log_probs)) - logsumexp(gates)


def _joint(gates: Sequence[DoubleWord], log_probs: Sequence[DoubleWord]) -> list[DoubleWord]:
    return [gate + log_prob for gate, log_prob in zip(gates, log_probs, strict=True)]


@mix.defjvp
def _mix_jvp(primals: tuple, tangents: tuple) -> tuple[DoubleWord, DoubleWord]:
    """With weights w = softmax(g) and shares r = softmax(g + log p): r_i for log p_i, and r_i - w_i for g_i.

    Where heads agree, r_i and w_i are almost the same, and much may be multiplied with their difference.
    It is a sum over pairs of heads, each of which keeps its relative precision::

        r_i - w_i = sum over k of w_i w_k (p_i - p_k) / p = sum over k of r_i w_k (1 - p_k / p_i)
    """
    gates, log_probs = primals
    weights, shares = softmax(gates), softmax(_joint(gates, log_probs))
    of_gates, of_log_probs = ([x.value for x in tangent] for tangent in tangents)
    tangent = sum(share * of_log_prob for share, of_log_prob in zip(shares, of_log_probs, strict=True))
    for i, k in itertools.combinations(range(len(gates)), 2):
        ratio = (log_probs[i] - log_probs[k]).value
        less = -jnp.expm1(jnp.where(ratio > 0, -ratio, ratio))
        moved = less * jnp.where(ratio > 0, shares[i] * weights[k], -shares[k] * weights[i])
        tangent = tangent + moved * (of_gates[i] - of_gates[k])
    return mix(gates, log_probs), DoubleWord(tangent, jnp.zeros_like(tangent))


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
    target, others = DoubleWord.of(lm.target), lm.others.double()
    log_lm, lm_total = log_share(target, others), logsumexp((target, others))
    if pointer is None:
        nothing = jnp.zeros_like(lm.target)
        return TargetTerms(log_lm.value, nothing, nothing, nothing + LOWEST, lm_total.value)
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
        with_entropy=pointer.gate == "confidence",
    )
    match, others = copy.match.total.double(), copy.others.total.double()
    some_match = match.value > LOWEST
    some_valid = some_match | (others.value > LOWEST)
    log_copy = log_share(match, others).where(some_match, LOWEST)
    copy_total = logsumexp((match, others)).where(some_valid, 0.0)
    # The chain rule of entropy: that of whether the target is meant, and then of which candidate is.
    # Beyond 100 the first is 0 in float32, and its gradient too.
    odds = jnp.clip((match - others).value, -100.0, 100.0)
    entropy = jax.nn.sigmoid(odds) * (copy.match.entropy + jax.nn.softplus(-odds))
    entropy += jax.nn.sigmoid(-odds) * (copy.others.entropy + jax.nn.softplus(odds))

    gates = gate_logits(pointer, Totals(copy_total, entropy, lm_total.expanded()))
    of_pointers = gates.parts(-1), log_copy.parts(-1)
    heads = (_LM_GATE, *of_pointers[0]), (log_lm, *of_pointers[1])
    # Pointers differ in scores, not in which candidates are valid or match.
    some_valid = some_valid[..., 0]
    gate, responsibility = (functools.reduce(jnp.add, softmax(x)[1:]) for x in (heads[0], _joint(*heads)))
    return TargetTerms(
        log_prob=jnp.where(some_valid, mix(*heads).value, log_lm.value),
        gate=jnp.where(some_valid, gate, 0.0),
        responsibility=responsibility,
        log_copy=mix(*of_pointers).value,
        lm_log_total=lm_total.value,
    )


class CopyDistribution(NamedTuple):
    """The copy head's distribution over candidates, and its weight."""

    log_prob: DoubleWord
    """log of the share of each valid candidate in the copied probability, (batch, length, candidates)."""
    valid: Bool[Array, "batch length candidates"]
    gate: DoubleWord
    """g_t, (batch, length)."""


def copy_distribution(
    logits: Float[Array, "batch length vocabulary"],
    pointer: Pointer,
    index: Int[Array, "batch length"] | None = None,
) -> CopyDistribution:
    """Returns where the pointers point, all together, and the gate logit.

    Args are those of :func:`log_distribution`.
    """
    valid = pointer.valid(index)
    valid_p = valid[:, :, None, :]
    scores = DoubleWord.of(copy_scores(pointer, index)).where(valid_p, LOWEST)
    log_shares, total = log_softmax(scores)
    some_valid = jnp.any(valid_p, axis=-1, keepdims=True)
    of_entropy = jnp.where(valid_p, jnp.exp(log_shares.value) * log_shares.value, 0.0)
    (copy_total,) = total.where(some_valid, 0.0).parts(-1)
    _, lm_total = log_softmax(DoubleWord.of(logits))
    gates = gate_logits(pointer, Totals(copy_total, -jnp.sum(of_entropy, axis=-1), lm_total)).parts(-1)
    # One scatter serves all pointers: their shares of a candidate are added up before it.
    log_prob = mix(tuple(gate.expanded() for gate in gates), log_shares.parts(-2))
    return CopyDistribution(log_prob.where(valid, LOWEST), valid, logsumexp(gates))


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
    log_lm, _ = log_softmax(DoubleWord.of(logits))
    if pointer is None:
        return log_lm.value
    chex.assert_equal_shape_prefix([logits, pointer.query], 2)
    if not pointer.gated:
        return context_log_softmax(logits, pointer, index, method)[0]
    copy, log_copy = _copied_by_token(logits, pointer, index, method)
    heads = [(_LM_GATE, copy.gate.expanded()), (log_lm, log_copy)]
    some_valid = jnp.any(copy.valid, axis=-1)[..., None]
    return jnp.where(some_valid, mix(*heads).value, log_lm.value)


def _copied_by_token(
    logits: Array, pointer: Pointer, index: Array | None, method: Method
) -> tuple[CopyDistribution, DoubleWord]:
    """Returns the distribution over candidates, and that over tokens which they make."""
    copy = copy_distribution(logits, pointer, index)
    tokens, vocabulary = pointer.candidates.tokens, logits.shape[-1]
    return copy, logsumexp_by_token(copy.log_prob, copy.valid, tokens, vocabulary, method, normalized=True)


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
    if pointer.gate == "context_logits":
        copy, of_token = _copied_by_token(logits, pointer, index, method)
        received = of_token.value > LOWEST
        added = (of_token + copy.gate.expanded()).where(received, 0.0)
    else:
        valid = pointer.valid(index)
        scores = jnp.sum(copy_scores(pointer, index), axis=2)
        occurrences = sum_by_token(jnp.ones_like(scores), valid, tokens, vocabulary, method)
        received = occurrences > 0
        first, *rest = DoubleWord.of(pointer.gate_term.astype(jnp.float32)).parts(-1)
        added = product(occurrences, sum(rest, first).expanded())
        added = added + sum_by_token(scores, valid, tokens, vocabulary, method)
    return log_softmax(added + logits.astype(jnp.float32))[0].value, received


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
        log_lm, lm_total = log_softmax(DoubleWord.of(logits))
        log_prob, without = _pick(log_p, targets), _pick(log_lm.value, targets)
        return TargetTerms(
            log_prob=log_prob,
            gate=jnp.sum(jnp.where(received, jnp.exp(log_p), 0.0), axis=-1),
            responsibility=jnp.where(
                jnp.any(matches, -1), 1 - jnp.exp(jnp.minimum(without - log_prob, 0)), 0
            ),
            log_copy=masked_logsumexp(copy.log_prob.value, matches),
            lm_log_total=lm_total.value[..., 0],
        )

    index = jnp.broadcast_to(jnp.arange(length), targets.shape)
    arrays = (hidden, targets, index, pointer.query, pointer.gate_term, pointer.segment_ids)
    return map_blocks(terms, block, *arrays)


def _pick(
    values: Float[Array, "batch length vocabulary"], targets: Int[Array, "batch length"]
) -> Float[Array, "batch length"]:
    """Returns each target's value."""
    # A masked sum rather than a gather: it stays local when the vocabulary is sharded, and its
    # gradient is no scatter.
    ids = jax.lax.broadcasted_iota(targets.dtype, values.shape, values.ndim - 1)
    return jnp.sum(jnp.where(ids == targets[..., None], values, 0.0), axis=-1)
