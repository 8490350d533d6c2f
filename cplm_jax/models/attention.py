"""Grouped-query self-attention that keeps packed documents apart."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from cplm_jax.kernels.blocks import block_length, map_blocks
from cplm_jax.models.layers import parameter, rotate
from cplm_jax.sharding import constrain, on_mesh, part_index

# Attention scores held at a time, on each device: 256 MiB in float32.
_SCORE_BUDGET = 2**26


def attend(
    query: Float[Array, "batch length heads head_width"],
    key: Float[Array, "batch length kv_heads head_width"],
    value: Float[Array, "batch length kv_heads head_width"],
    segment_ids: Int[Array, "batch length"],
    block: int | None = None,
) -> Float[Array, "batch length heads head_width"]:
    """Causal attention within documents, over blocks of queries; softmax in float32.

    Where the length is split over the mesh, each device attends from its own queries to gathered keys.

    Args:
      query: queries, in the compute dtype.
      key: keys; heads must be a multiple of kv_heads.
      value: values.
      segment_ids: document of each position.
      block: queries whose scores exist at a time on a device; ``None`` chooses.
    """
    whole, split = ("batch", None, "kv_heads", None), ("batch", "length", "heads", None)
    run = on_mesh(
        functools.partial(_attend, block),
        (split, whole, whole, ("batch", "length"), ("batch", None)),
        split,
    )
    return run(query, key, value, segment_ids, segment_ids)


def _attend(
    block: int | None, query: Array, key: Array, value: Array, segment_ids: Array, of_keys: Array
) -> Array:
    batch, length, heads, _ = query.shape
    if block is None:
        block = block_length(length, batch * heads * key.shape[1], _SCORE_BUDGET)
    # The blocks' gradients of keys and values add up in float32.
    key, value = key.astype(jnp.float32), value.astype(jnp.float32)
    first = part_index("length") * length
    index = jnp.broadcast_to(first + jnp.arange(length), (batch, length))

    def one(query: Array, segment_ids: Array, index: Array) -> Array:
        causal = index[:, :, None] >= jnp.arange(key.shape[1])
        mask = causal & (segment_ids[:, :, None] == of_keys[:, None, :])
        return masked_attention(query, key.astype(query.dtype), value.astype(query.dtype), mask)

    return map_blocks(one, block, query, segment_ids, index)


def masked_attention(
    query: Float[Array, "batch length heads head_width"],
    key: Float[Array, "batch keys kv_heads head_width"],
    value: Float[Array, "batch keys kv_heads head_width"],
    mask: Bool[Array, "batch length keys"],
) -> Float[Array, "batch length heads head_width"]:
    """Attention to the keys that ``mask`` allows."""
    # The XLA form: it honours an arbitrary mask on every backend.
    return jax.nn.dot_product_attention(query, key, value, mask=mask[:, None], implementation="xla")


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

    def project(
        self, x: Float[Array, "batch length width"], positions: Int[Array, "batch length"]
    ) -> tuple[Array, Array, Array]:
        """Returns rotated queries and keys, and values: (batch, length, heads or kv_heads, head_width)."""

        def one(weight: nnx.Param, axis: str) -> Array:
            y = jnp.einsum("btd,dhk->bthk", x, weight[...].astype(x.dtype))
            return constrain(y, "batch", "length", axis, None)

        query = rotate(one(self.query, "heads"), positions, self.rope_theta)
        key = rotate(one(self.key, "kv_heads"), positions, self.rope_theta)
        return query, key, one(self.value, "kv_heads")

    def merge(
        self, mixed: Float[Array, "batch length heads head_width"]
    ) -> Float[Array, "batch length width"]:
        """Projects what the heads gathered back to the residual stream."""
        return jnp.einsum("bthk,hkd->btd", mixed, self.output[...].astype(mixed.dtype))
