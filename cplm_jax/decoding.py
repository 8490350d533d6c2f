"""Cached decoding: a pass over the prompts, then one token of every row at a time.

Rows may hold different numbers of tokens: each writes to its own next place and sees its own past.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from cplm_jax.config import ModelConfig
from cplm_jax.kernels.blocks import pad_to
from cplm_jax.mixture import log_distribution
from cplm_jax.models.attention import attend, masked_attention
from cplm_jax.models.decoder import Decoder, ModelDefinition
from cplm_jax.pointer import Candidates


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["keys", "values", "candidates", "preceding", "length"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Cache:
    """What decoding remembers of the tokens so far; S is its capacity in tokens.

    Attributes:
      keys: attention keys of every layer, (layers, batch, S, kv_heads, head_width).
      values: likewise.
      candidates: what can be copied, ``None`` for a baseline: pointers x copy width numbers a token and its
        id, once, where attention takes 2 x kv_heads x head_width in every layer.
      preceding: what the last state adds to the copy key of the token that follows it, (batch, pointers,
        copy), or ``None`` where the alignment has no such part.
      length: tokens of each row, (batch,).
    """

    keys: Float[Array, "layers batch capacity kv_heads head_width"]
    values: Float[Array, "layers batch capacity kv_heads head_width"]
    candidates: Candidates | None
    preceding: Float[Array, "batch pointers copy"] | None
    length: Int[Array, "batch"]


def prefill(
    definition: ModelDefinition,
    params: Any,
    tokens: Int[Array, "batch length"],
    lengths: Int[Array, "batch"],
    copyable: Bool[Array, "batch length"],
    capacity: int,
) -> tuple[Float[Array, "batch vocabulary"], Cache]:
    """Reads prompts; jit-able with ``definition`` and ``capacity`` static.

    Args:
      definition: the model.
      params: its parameters.
      tokens: one document a row, padded at the end.
      lengths: tokens of each row, at least 1.
      copyable: whether a position holds an ordinary token (no BOS, EOS or PAD).
      capacity: tokens that a row can grow to, at least the prompts' padded length.

    Returns:
      log p of the token that follows each prompt, and the cache.

    Raises:
      ValueError: if the prompts are longer than the capacity.
    """
    if not tokens.shape[1] <= capacity:
        raise ValueError(f"prompts of {tokens.shape[1]} tokens do not fit a cache of {capacity}")
    model = definition.bind(params)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    segment_ids = (positions < lengths[:, None]).astype(jnp.int32)

    def attention(
        query: Array, key: Array, value: Array, layer: Array, memory: tuple[Array, Array]
    ) -> tuple[Array, tuple[Array, Array]]:
        keys, values = memory
        memory = (
            jax.lax.dynamic_update_slice(keys, key[None], (layer, 0, 0, 0, 0)),
            jax.lax.dynamic_update_slice(values, value[None], (layer, 0, 0, 0, 0)),
        )
        return attend(query, key, value, segment_ids, model.config.attention_block), memory

    x = model.embed(tokens)
    nothing = jnp.zeros(_attention_cache_shape(model.config, tokens.shape[0], capacity), x.dtype)
    states, (keys, values) = model.run_blocks(x, positions, attention, (nothing, nothing))
    last = (lengths - 1)[:, None]
    hidden = jnp.take_along_axis(states.hidden, last[..., None], axis=1)
    candidates = preceding = None
    if model.copy_head is not None:
        candidates = model.copy_head.candidates(states.key_source, tokens, segment_ids, copyable)
        candidates = jax.tree.map(lambda x: pad_to(x, 1, capacity), candidates)
        _, preceding = model.copy_head.key_parts(
            jnp.take_along_axis(states.key_source, last[..., None], axis=1)
        )
        preceding = None if preceding is None else preceding[:, 0]
    return _next(model, hidden, candidates, last), Cache(keys, values, candidates, preceding, lengths)


def decode(
    definition: ModelDefinition,
    params: Any,
    cache: Cache,
    tokens: Int[Array, "batch"],
    copyable: Bool[Array, "batch"],
) -> tuple[Float[Array, "batch vocabulary"], Cache]:
    """Reads one more token of every row; jit-able with ``definition`` static.

    Args:
      definition: the model.
      params: its parameters.
      cache: what :func:`prefill` or this function returned. A row that is full does not remember the
        token, and its distribution means nothing.
      tokens: the next token of each row.
      copyable: whether it is an ordinary token.

    Returns:
      log p of the token that follows, and the cache with the token in it.
    """
    model = definition.bind(params)
    at, row = cache.length[:, None], jnp.arange(tokens.shape[0])
    seen = jnp.arange(cache.keys.shape[2]) <= at[..., None]  # (batch, 1, capacity)

    def write(whole: Array, one: Array) -> Array:
        return whole.at[row, cache.length].set(one)

    def attention(
        query: Array, key: Array, value: Array, layer: Array, memory: tuple[Array, Array]
    ) -> tuple[Array, tuple[Array, Array]]:
        # Carried whole from block to block, so that a donated cache is written in place.
        keys = memory[0].at[layer, row, cache.length].set(key[:, 0])
        values = memory[1].at[layer, row, cache.length].set(value[:, 0])
        return masked_attention(query, keys[layer], values[layer], seen), (keys, values)

    states, (keys, values) = model.run_blocks(
        model.embed(tokens[:, None]), at, attention, (cache.keys, cache.values)
    )
    candidates = preceding = None
    if model.copy_head is not None and cache.candidates is not None:
        own, following = model.copy_head.key_parts(states.key_source)
        before = None if cache.preceding is None else cache.preceding[:, None]
        candidates = Candidates(
            key=write(cache.candidates.key, model.copy_head.key(own, before)[:, 0]),
            tokens=write(cache.candidates.tokens, tokens),
            segment_ids=write(cache.candidates.segment_ids, jnp.ones_like(tokens)),
            copyable=write(cache.candidates.copyable, copyable),
        )
        preceding = None if following is None else following[:, 0]
    log_p = _next(model, states.hidden, candidates, at)
    return log_p, Cache(keys, values, candidates, preceding, cache.length + 1)


def _attention_cache_shape(config: ModelConfig, batch: int, capacity: int) -> tuple[int, ...]:
    head_width = config.head_width or config.width // config.heads
    return config.layers, batch, capacity, config.kv_heads, head_width


def _next(
    model: Decoder, hidden: Array, candidates: Candidates | None, index: Int[Array, "batch 1"]
) -> Float[Array, "batch vocabulary"]:
    """Returns log p of what follows the states ``hidden``, (batch, 1, width), which lie at ``index``."""
    pointer = None
    if model.copy_head is not None and candidates is not None:
        pointer = model.copy_head.point(hidden, jnp.ones_like(index), candidates)
    return log_distribution(model.logits(hidden), pointer, index)[:, 0]
