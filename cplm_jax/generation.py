"""Text generation from the mixture: greedy, temperature, top-k and top-p."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from cplm_jax.errors import UserError
from cplm_jax.loading import LoadedModel
from cplm_jax.mixture import log_distribution
from cplm_jax.models.decoder import ModelDefinition
from cplm_jax.precision import LOWEST

_COLDEST = 1e-4  # below this, a difference of log-probabilities overflows float32


def filter_log_probs(
    log_probs: Float[Array, "... vocabulary"], temperature: float, top_k: int | None, top_p: float | None
) -> Float[Array, "... vocabulary"]:
    """Sharpens log-probabilities and masks all but the likeliest tokens; unnormalised.

    Args:
      log_probs: normalised log-probabilities.
      temperature: above 0; probabilities are raised to its inverse.
      top_k: keep this many tokens (ties with the last one stay), or all if ``None``.
      top_p: then keep the fewest of the likeliest tokens whose probability, after temperature and
        ``top_k``, reaches this (nucleus sampling, Holtzman et al. 2020), or all if ``None``.
    """
    scaled = (log_probs - jnp.max(log_probs, axis=-1, keepdims=True)) / temperature
    if top_k is not None and top_k < scaled.shape[-1]:
        least = jax.lax.top_k(scaled, top_k)[0][..., -1:]
        scaled = jnp.where(scaled >= least, scaled, LOWEST)
    if top_p is not None and top_p < 1.0:
        ordered = jnp.flip(jnp.sort(scaled, axis=-1), axis=-1)
        probs = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(probs, axis=-1) - probs
        kept = jnp.where(before < top_p, ordered, jnp.inf)
        scaled = jnp.where(scaled >= jnp.min(kept, axis=-1, keepdims=True), scaled, LOWEST)
    return scaled


def next_log_probs(
    definition: ModelDefinition, params: Any, tokens: Int[Array, "length"], copyable: Array, count: Array
) -> Float[Array, "vocabulary"]:
    """Returns log p of the token that follows the first ``count`` of ``tokens``, one document; jit-able."""
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    segment_ids = (positions < count).astype(jnp.int32)
    outputs = definition.bind(params)(tokens[None], segment_ids[None], positions[None], copyable[None])
    log_p = log_distribution(outputs.logits, outputs.pointer)
    return log_p[0, count - 1]


def generate(
    model: LoadedModel,
    prompt: str,
    max_tokens: int = 100,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> str:
    """Continues a prompt until EOS or ``max_tokens``.

    The model sees at most the last ``data.sequence_length`` tokens, the length it was trained at;
    each step recomputes that window.

    Args:
      model: the model.
      prompt: text, which may be empty.
      max_tokens: tokens to generate at most.
      temperature: 0 takes the likeliest token; above 0 samples.
      top_k: see :func:`filter_log_probs`.
      top_p: see :func:`filter_log_probs`.
      seed: seed of the sampling.

    Returns:
      The continuation, without the prompt.

    Raises:
      UserError: if an argument is out of range.
    """
    check_arguments(max_tokens, temperature, top_k, top_p, seed)
    tokenizer, window = model.tokenizer, model.config.data.sequence_length
    ids = [tokenizer.bos_id, *tokenizer.encode(prompt)]
    start = len(ids)
    step = jax.jit(functools.partial(_next_token, model.definition, temperature, top_k, top_p))
    key = jax.random.key(seed)
    with jax.set_mesh(model.mesh):
        for number in range(max_tokens):
            tokens, copyable, count = _window(ids, window, tokenizer.pad_id, tokenizer.control_ids)
            chosen = int(step(model.params, tokens, copyable, count, jax.random.fold_in(key, number)))
            if chosen == tokenizer.eos_id:
                break
            ids.append(chosen)
    return tokenizer.decode(i for i in ids[start:] if i < tokenizer.size)


def check_arguments(
    max_tokens: int, temperature: float, top_k: int | None, top_p: float | None, seed: int
) -> None:
    """Raises :class:`UserError` for an argument of :func:`generate` that is out of range."""
    if max_tokens < 1:
        raise UserError(f"--max_tokens {max_tokens}: must be at least 1")
    if temperature != 0 and not _COLDEST <= temperature < float("inf"):
        raise UserError(f"--temperature {temperature}: must be 0 (likeliest token) or at least {_COLDEST}")
    if top_k is not None and top_k < 1:
        raise UserError(f"--top_k {top_k}: must be at least 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise UserError(f"--top_p {top_p}: must be above 0 and at most 1")
    if not 0 <= seed < 2**31:
        raise UserError(f"--seed {seed}: must be at least 0 and below 2**31")


def _window(
    ids: Sequence[int], window: int, pad_id: int, control_ids: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, np.int32]:
    seen = ids[-window:]
    tokens = np.full(window, pad_id, np.int32)
    tokens[: len(seen)] = seen
    return tokens, ~np.isin(tokens, control_ids), np.int32(len(seen))


def _next_token(
    definition: ModelDefinition,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    params: Any,
    tokens: Array,
    copyable: Array,
    count: Array,
    key: Array,
) -> Int[Array, ""]:
    log_p = next_log_probs(definition, params, tokens, copyable, count)
    if temperature == 0.0:
        return jnp.argmax(log_p)
    return jax.random.categorical(key, filter_log_probs(log_p, temperature, top_k, top_p))
