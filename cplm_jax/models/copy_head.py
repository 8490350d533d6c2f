"""The copy head: projects the decoder's states to a pointer over the context."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from cplm_jax.config import CopyHeadConfig
from cplm_jax.mixture import Pointer
from cplm_jax.models.layers import constant, parameter


class CopyHead(nnx.Module):
    """Queries, keys and gate term of the mixture (:mod:`cplm_jax.mixture`).

    The key of candidate j comes from ``h_{j-1}``, the state that predicted x_j
    (alignment ``preceding``: neural cache, Grave et al. 2017; TRIME, Zhong et al. 2022), from
    ``h_j``, the state that has read it (``containing``: pointer sentinel, Merity et al. 2017),
    or from both.
    """

    def __init__(self, config: CopyHeadConfig, width: int, *, rngs: nnx.Rngs):
        scale = width**-0.5
        shape, axes = (width, config.width), ("embed", None)
        self.gate = config.gate
        # All four are drawn always, so that each parameter starts alike whichever others exist.
        query_key, preceding_key, containing_key, gate_key = (rngs.copy_head() for _ in range(4))

        def projection(key: Array, used: bool) -> nnx.Param | None:
            return parameter(key, shape, axes, scale) if used else None

        self.query = parameter(query_key, shape, axes, scale)
        self.preceding = projection(preceding_key, config.alignment in ("preceding", "both"))
        self.containing = projection(containing_key, config.alignment in ("containing", "both"))
        self.gate_kernel = constant(0.0, (width,), (None,)) if config.gate == "learned" else None
        self.gate_bias = None if config.gate == "sentinel" else constant(config.gate_bias, (), ())
        self.sentinel = (
            parameter(gate_key, (config.width,), (None,), config.width**-0.5)
            if config.gate == "sentinel"
            else None
        )

    def __call__(
        self,
        hidden: Float[Array, "batch length width"],
        segment_ids: Int[Array, "batch length"],
        copyable: Bool[Array, "batch length"],
    ) -> Pointer:
        """Returns the pointer for final-norm states ``hidden``.

        Args:
          hidden: h, in the compute dtype.
          segment_ids: document of each position; 0 is padding.
          copyable: whether a position holds an ordinary token (no BOS, EOS or PAD).
        """
        dtype = hidden.dtype
        query = hidden @ self.query[...].astype(dtype)
        key = jnp.zeros_like(query)
        candidate = copyable
        if self.containing is not None:
            key = key + hidden @ self.containing[...].astype(dtype)
        if self.preceding is not None:
            predicted_by = hidden @ self.preceding[...].astype(dtype)
            key = key + jnp.pad(predicted_by, ((0, 0), (1, 0), (0, 0)))[:, :-1]
            # The first token of a document was predicted by no state of that document.
            same_document = segment_ids[:, 1:] == segment_ids[:, :-1]
            candidate = candidate & jnp.pad(same_document, ((0, 0), (1, 0)))
        return Pointer(query, key, candidate, self._gate_term(hidden, query), self.gate)

    def _gate_term(self, hidden: Array, query: Array) -> Float[Array, "batch length"]:
        if self.sentinel is not None:
            return jnp.einsum("btc,c->bt", query.astype(jnp.float32), self.sentinel[...])
        term = jnp.zeros(hidden.shape[:2], jnp.float32)
        if self.gate_kernel is not None:
            term = jnp.einsum("btd,d->bt", hidden.astype(jnp.float32), self.gate_kernel[...])
        return term if self.gate_bias is None else term + self.gate_bias[...]
