"""What the copy head says: candidates, queries, and their scores.

Shapes: B batch, T length, J candidates, P pointers, C copy width.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from cplm_jax.kernels.blocks import block_length, map_blocks
from cplm_jax.kernels.pointer import score_scale
from cplm_jax.precision import einsum_float32

# Pairs of position and candidate that are compared at a time: 16 MiB of 32-bit ids.
_MATCH_BUDGET = 2**22

Gate = Literal["learned", "sentinel", "shared_softmax", "confidence", "context_logits", "context_logits_sum"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Candidates:
    """The tokens that may be copied, in the order of their positions: all that decoding must keep.

    Attributes:
      key: k_j, (batch, candidates, pointers, copy).
      tokens: x_j, (batch, candidates).
      segment_ids: document of each, (batch, candidates).
      copyable: whether the token at j may be copied at all, (batch, candidates).
    """

    key: Float[Array, "batch candidates pointers copy"]
    tokens: Int[Array, "batch candidates"]
    segment_ids: Int[Array, "batch candidates"]
    copyable: Bool[Array, "batch candidates"]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["query", "gate_term", "segment_ids", "candidates", "recency", "confidence"],
    meta_fields=["gate", "block"],
)
@dataclass(frozen=True)
class Pointer:
    """What the copy head says about a batch.

    Attributes:
      query: q_t, (batch, length, pointers, copy).
      gate_term: the part of the gate logit that the copy head computes, (batch, length, pointers); see
        :func:`gate_logits`.
      segment_ids: document of each querying position, (batch, length).
      candidates: what can be copied.
      recency: what a score loses for each position from j to t, (pointers,), or ``None``.
      confidence: weights of the pointer's ``A_t`` and entropy in the gate ``confidence``, (2, pointers), or
        ``None`` with other gates.
      gate: the gate's kind.
      block: positions in a block of the loss path; ``None`` chooses.
    """

    query: Float[Array, "batch length pointers copy"]
    gate_term: Float[Array, "batch length pointers"]
    segment_ids: Int[Array, "batch length"]
    candidates: Candidates
    recency: Float[Array, "pointers"] | None
    confidence: Float[Array, "2 pointers"] | None
    gate: Gate
    block: int | None = None

    @property
    def gated(self) -> bool:
        """Whether a gate mixes the heads; if not, copy scores are added to the logits."""
        return self.gate not in ("context_logits", "context_logits_sum")

    def valid(
        self, index: Int[Array, "batch length"] | None = None
    ) -> Bool[Array, "batch length candidates"]:
        """Returns :func:`valid_candidates` of these queries and candidates."""
        candidates = self.candidates
        return valid_candidates(candidates.copyable, candidates.segment_ids, self.segment_ids, index)

    def part(self, query: Array, gate_term: Array, segment_ids: Array) -> "Pointer":
        """Returns the pointer of some of its positions, into the same candidates."""
        return dataclasses.replace(self, query=query, gate_term=gate_term, segment_ids=segment_ids)


def valid_candidates(
    copyable: Bool[Array, "batch candidates"],
    of_candidates: Int[Array, "batch candidates"],
    segment_ids: Int[Array, "batch length"],
    index: Int[Array, "batch length"] | None = None,
) -> Bool[Array, "batch length candidates"]:
    """Returns which candidates j position t may copy: j <= t, of the same document, and copyable.

    Args:
      copyable: whether the token at j may be copied at all.
      of_candidates: document of each j.
      segment_ids: document of each t.
      index: where each t lies among the candidates; ``None`` if t and j count the same positions.
    """
    causal = _distance(segment_ids, index, copyable.shape[1]) >= 0
    same_document = segment_ids[:, :, None] == of_candidates[:, None, :]
    return causal & same_document & copyable[:, None, :]


def _distance(segment_ids: Array, index: Array | None, candidates: int) -> Array:
    if index is None:
        index = jnp.arange(segment_ids.shape[1])[None]
    return index[:, :, None] - jnp.arange(candidates)


def copy_scores(
    pointer: Pointer, index: Int[Array, "batch length"] | None = None
) -> Float[Array, "batch length pointers candidates"]:
    """Returns ``e_tj = q_t . k_j / sqrt(C) - recency (t - j)`` for every pair of positions, in float32."""
    scores = einsum_float32("btpc,bjpc->btpj", pointer.query, pointer.candidates.key)
    scores = scores * score_scale(pointer.query)
    if pointer.recency is None:
        return scores
    distance = _distance(pointer.segment_ids, index, scores.shape[-1])
    return scores - pointer.recency[:, None] * distance[:, :, None, :]


def occurs_in_context(
    tokens: Int[Array, "batch length"],
    segment_ids: Int[Array, "batch length"],
    copyable: Bool[Array, "batch length"],
    targets: Int[Array, "batch length"],
) -> Bool[Array, "batch length"]:
    """Returns whether each target occurs among the copyable tokens of its document so far.

    The measure does not depend on a model, so a baseline and any copy head share it.
    """
    index = jnp.broadcast_to(jnp.arange(targets.shape[1]), targets.shape)

    def found(targets: Array, ids: Array, index: Array) -> Array:
        valid = valid_candidates(copyable, segment_ids, ids, index)
        return jnp.any(valid & (tokens[:, None, :] == targets[:, :, None]), axis=-1)

    return map_blocks(
        found, block_length(targets.shape[1], tokens.size, _MATCH_BUDGET), targets, segment_ids, index
    )
