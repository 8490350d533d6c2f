"""The copy head: projects the decoder's states to pointers into the context."""

import math

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from cplm_jax.config import CopyHeadConfig
from cplm_jax.models.layers import RMSNorm, constant, parameter
from cplm_jax.pointer import Candidates, Pointer

# Initial loss of score for each position of distance, with `recency_bias`: half the weight after 90.
_INITIAL_RECENCY = 1 / 128


class CopyHead(nnx.Module):
    """Queries, keys and gate terms of the mixture (:mod:`cplm_jax.mixture`).

    The key of candidate j comes from ``h_{j-1}``, the state that predicted x_j
    (alignment ``preceding``: neural cache, Grave et al. 2017; TRIME, Zhong et al. 2022), from
    ``h_j``, the state that has read it (``containing``: pointer sentinel, Merity et al. 2017),
    or from both.

    With ``normalize``, scores are cosines times a learned temperature (as in Henry et al. 2020). With
    ``recency_bias`` each pointer subtracts a learned multiple of the distance (ALiBi, Press et al. 2022;
    a cache that decays exponentially, Clarkson & Robinson 1997).
    """

    def __init__(self, config: CopyHeadConfig, width: int, norm_epsilon: float, *, rngs: nnx.Rngs):
        scale, pointers, copy = width**-0.5, config.pointers, config.width
        self.config = config
        # All are drawn always, so that each parameter starts alike whichever others exist.
        query_key, preceding_key, containing_key, gate_key = (rngs.copy_head() for _ in range(4))

        def projection(key: Array, used: bool) -> nnx.Param | None:
            shape, axes = (width, pointers, copy), ("embed", "pointers", None)
            return parameter(key, shape, axes, scale) if used else None

        def per_pointer(value: float, used: bool, *more: int) -> nnx.Param | None:
            axes = (*[None] * len(more), "pointers")
            return constant(value, (*more, pointers), axes) if used else None

        self.query = projection(query_key, True)
        self.preceding = projection(preceding_key, config.alignment in ("preceding", "both"))
        self.containing = projection(containing_key, config.alignment in ("containing", "both"))
        self.key_norm = None if config.key_layer is None else RMSNorm(width, norm_epsilon)
        self.gate_kernel = per_pointer(0.0, config.gate in ("learned", "confidence"), width)
        self.gate_bias = per_pointer(config.gate_bias, config.gate != "sentinel")
        self.confidence = per_pointer(0.0, config.gate == "confidence", 2)
        self.sentinel = (
            parameter(gate_key, (pointers, copy), ("pointers", None), copy**-0.5)
            if config.gate == "sentinel"
            else None
        )
        # As large at the start as scores without normalisation are.
        self.log_temperature = per_pointer(math.log(copy) / 2, config.normalize)
        self.log_recency = per_pointer(math.log(_INITIAL_RECENCY), config.recency_bias)

    def candidates(
        self,
        states: Float[Array, "batch length width"],
        tokens: Int[Array, "batch length"],
        segment_ids: Int[Array, "batch length"],
        copyable: Bool[Array, "batch length"],
    ) -> Candidates:
        """Returns what can be copied from a batch.

        Args:
          states: those that keys are made from, in the compute dtype.
          tokens: x.
          segment_ids: document of each position; 0 is padding.
          copyable: whether a position holds an ordinary token (no BOS, EOS or PAD).
        """
        containing, preceding = self.key_parts(states)
        if preceding is not None:
            preceding = jnp.pad(preceding, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]
            # The first token of a document was predicted by no state of that document.
            same_document = segment_ids[:, 1:] == segment_ids[:, :-1]
            copyable = copyable & jnp.pad(same_document, ((0, 0), (1, 0)))
        return Candidates(self.key(containing, preceding), tokens, segment_ids, copyable)

    def key_parts(self, states: Float[Array, "batch length width"]) -> tuple[Array | None, Array | None]:
        """Returns what each position adds to its own key and to the next one's, where the alignment does.

        Each is (batch, length, pointers, copy); :meth:`key` makes keys of them.
        """
        if self.key_norm is not None:
            states = self.key_norm(states)

        def project(kernel: nnx.Param | None) -> Array | None:
            return (
                None
                if kernel is None
                else jnp.einsum("btd,dpc->btpc", states, kernel[...].astype(states.dtype))
            )

        return project(self.containing), project(self.preceding)

    def key(
        self, containing: Array | None, preceding: Array | None
    ) -> Float[Array, "batch length pointers copy"]:
        """Returns k_j from the two parts of :meth:`key_parts` that belong to the same candidate."""
        parts = [part for part in (containing, preceding) if part is not None]
        key = sum(parts[1:], start=parts[0])
        return key if self.log_temperature is None else _unit(key)

    def point(
        self,
        hidden: Float[Array, "batch length width"],
        segment_ids: Int[Array, "batch length"],
        candidates: Candidates,
    ) -> Pointer:
        """Returns the pointers of final-norm states ``hidden`` into ``candidates``."""
        assert self.query is not None
        config = self.config
        query = jnp.einsum("btd,dpc->btpc", hidden, self.query[...].astype(hidden.dtype))
        if self.log_temperature is not None:
            temperature = jnp.exp(self.log_temperature[...]) * config.width**0.5
            query = (_unit(query).astype(jnp.float32) * temperature[:, None]).astype(hidden.dtype)
        return Pointer(
            query=query,
            gate_term=self._gate_term(hidden, query),
            segment_ids=segment_ids,
            candidates=candidates,
            recency=None if self.log_recency is None else jnp.exp(self.log_recency[...]),
            confidence=None if self.confidence is None else self.confidence[...],
            gate=config.gate,
            block=config.score_block,
        )

    def _gate_term(self, hidden: Array, query: Array) -> Float[Array, "batch length pointers"]:
        if self.sentinel is not None:
            return jnp.einsum("btpc,pc->btp", query.astype(jnp.float32), self.sentinel[...])
        assert self.gate_bias is not None
        term = jnp.broadcast_to(self.gate_bias[...], query.shape[:3])
        if self.gate_kernel is None:
            return term
        return term + jnp.einsum("btd,dp->btp", hidden.astype(jnp.float32), self.gate_kernel[...])


def _unit(x: Float[Array, "... copy"]) -> Float[Array, "... copy"]:
    """Scales vectors to length 1, in float32; the zero vector stays."""
    y = x.astype(jnp.float32)
    return (y * jnp.reciprocal(jnp.sqrt(jnp.sum(jnp.square(y), axis=-1, keepdims=True) + 1e-12))).astype(
        x.dtype
    )
