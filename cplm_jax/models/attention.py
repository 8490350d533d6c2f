"""Grouped-query self-attention that keeps packed documents apart."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from cplm_jax.models.layers import parameter, rotate
from cplm_jax.sharding import constrain


def attention_mask(segment_ids: Int[Array, "batch length"]) -> Bool[Array, "batch 1 length length"]:
    """Returns which keys (last axis) each query may see: earlier ones, and itself, of its document."""
    length = segment_ids.shape[-1]
    causal = jnp.tril(jnp.ones((length, length), bool))
    return (causal & (segment_ids[:, :, None] == segment_ids[:, None, :]))[:, None]


class Attention(nnx.Module):
    """Grouped-query attention (Ainslie et al. 2023) with rotary positions."""

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        head_width: int,
        rope_theta: float,
        residual_scale: float,
        *,
        rngs: nnx.Rngs,
    ):
        scale = width**-0.5
        self.query = parameter(rngs.params(), (width, heads, head_width), ("embed", "heads", None), scale)
        self.key = parameter(rngs.params(), (width, kv_heads, head_width), ("embed", "kv_heads", None), scale)
        self.value = parameter(
            rngs.params(), (width, kv_heads, head_width), ("embed", "kv_heads", None), scale
        )
        self.output = parameter(
            rngs.params(),
            (heads, head_width, width),
            ("heads", None, "embed"),
            residual_scale * (heads * head_width) ** -0.5,
        )
        self.rope_theta = rope_theta

    def __call__(
        self,
        x: Float[Array, "batch length width"],
        positions: Int[Array, "batch length"],
        mask: Bool[Array, "batch 1 length length"],
    ) -> Float[Array, "batch length width"]:
        """Attends within the documents that ``mask`` keeps apart; softmax in float32."""

        def project(weight: nnx.Param, axis: str) -> Array:
            y = jnp.einsum("btd,dhk->bthk", x, weight[...].astype(x.dtype))
            return constrain(y, "batch", "length", axis, None)

        query = rotate(project(self.query, "heads"), positions, self.rope_theta)
        key = rotate(project(self.key, "kv_heads"), positions, self.rope_theta)
        value = project(self.value, "kv_heads")
        # The XLA form: it honours an arbitrary mask on every backend.
        mixed = jax.nn.dot_product_attention(query, key, value, mask=mask, implementation="xla")
        return jnp.einsum("bthk,hkd->btd", mixed, self.output[...].astype(x.dtype))
