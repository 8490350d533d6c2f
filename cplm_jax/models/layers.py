"""Parameters with logical axes, and the small layers: RMSNorm, SwiGLU, rotary positions, dropout."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int


def parameter(
    key: jax.Array, shape: tuple[int, ...], axes: tuple[str | None, ...], scale: float
) -> nnx.Param:
    """Creates a float32 parameter drawn from a normal distribution cut at two standard deviations.

    Args:
      key: random key.
      shape: shape of the array.
      axes: logical axis of each dimension, for :mod:`cplm_jax.sharding`.
      scale: standard deviation before the cut.
    """
    value = scale * jax.random.truncated_normal(key, -2.0, 2.0, shape, jnp.float32)
    return nnx.Param(value, logical_axes=axes)


def constant(value: float, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> nnx.Param:
    """Creates a float32 parameter filled with ``value``."""
    return nnx.Param(jnp.full(shape, value, jnp.float32), logical_axes=axes)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation with a learned scale (Zhang & Sennrich 2019); statistics in float32."""

    def __init__(self, width: int, epsilon: float):
        self.scale = constant(1.0, (width,), (None,))
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "... width"]) -> Float[Array, "... width"]:
        """Normalises the last axis; the result has the type of ``x``."""
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.epsilon)
        return (y * self.scale[...]).astype(x.dtype)


class SwiGLU(nnx.Module):
    """Gated MLP ``down(silu(gate x) * up x)`` (Shazeer 2020)."""

    def __init__(self, width: int, inner: int, residual_scale: float, *, rngs: nnx.Rngs):
        self.gate = parameter(rngs.params(), (width, inner), ("embed", "mlp"), width**-0.5)
        self.up = parameter(rngs.params(), (width, inner), ("embed", "mlp"), width**-0.5)
        self.down = parameter(rngs.params(), (inner, width), ("mlp", "embed"), residual_scale * inner**-0.5)

    def __call__(self, x: Float[Array, "batch length width"]) -> Float[Array, "batch length width"]:
        """Applies the MLP at every position, in the type of ``x``."""
        dtype = x.dtype
        gated = jax.nn.silu(x @ self.gate[...].astype(dtype)) * (x @ self.up[...].astype(dtype))
        return gated @ self.down[...].astype(dtype)


def rotate(
    x: Float[Array, "batch length heads head_width"], positions: Int[Array, "batch length"], theta: float
) -> Float[Array, "batch length heads head_width"]:
    """Rotary position embedding (Su et al. 2021): rotates the halves of each head by position."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def dropout(x: Array, rate: float, key: jax.Array | None) -> Array:
    """Drops elements with probability ``rate`` and scales up the rest; the identity without a key."""
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), 0.0).astype(x.dtype)
