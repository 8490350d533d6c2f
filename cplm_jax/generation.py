"""Text generation from the mixture: greedy, temperature, top-k and top-p."""

import functools
from collections.abc import Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from cplm_jax.config import ModelConfig
from cplm_jax.decoding import Cache, decode, prefill
from cplm_jax.errors import UserError
from cplm_jax.loading import LoadedModel
from cplm_jax.models.decoder import define_model
from cplm_jax.precision import LOWEST
from cplm_jax.sharding import ways

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


@overload
def generate(
    model: LoadedModel,
    prompt: str,
    max_tokens: int = ...,
    temperature: float = ...,
    top_k: int | None = ...,
    top_p: float | None = ...,
    seed: int = ...,
) -> str: ...


@overload
def generate(
    model: LoadedModel,
    prompt: list[str],
    max_tokens: int = ...,
    temperature: float = ...,
    top_k: int | None = ...,
    top_p: float | None = ...,
    seed: int = ...,
) -> list[str]: ...


def generate(
    model: LoadedModel,
    prompt: str | list[str],
    max_tokens: int = 100,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> str | list[str]:
    """Continues one prompt, or several at a time, until EOS or ``max_tokens``.

    The model sees at most the last ``data.sequence_length`` tokens, the length it was trained at. When
    a text has filled them, its oldest quarter is forgotten, and as much of the texts beside it.

    Args:
      model: the model.
      prompt: text, which may be empty, or a list of texts of any lengths.
      max_tokens: tokens to generate at most.
      temperature: 0 takes the likeliest token; above 0 samples.
      top_k: see :func:`filter_log_probs`.
      top_p: see :func:`filter_log_probs`.
      seed: seed of the sampling; each prompt of a list draws its own.

    Returns:
      The continuation, without the prompt; a list of them for a list.

    Raises:
      UserError: if an argument is out of range.
      TypeError: if a prompt is no text.
    """
    check_arguments(max_tokens, temperature, top_k, top_p, seed)
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    for text in prompts:
        if not isinstance(text, str):
            raise TypeError(f"a prompt must be text, not {type(text).__name__}")
    if not prompts:
        return []
    tokenizer = model.tokenizer
    texts = [[tokenizer.bos_id, *tokenizer.encode(text)] for text in prompts]
    starts = [len(ids) for ids in texts]
    with jax.set_mesh(model.mesh):
        texts += [[tokenizer.bos_id]] * (-len(texts) % ways("batch"))  # a mesh splits rows evenly
        running = np.arange(len(texts)) < len(prompts)
        keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(seed)))(jnp.arange(len(texts)))
        reader = _Reader(model, max(starts) + max_tokens)
        for number in range(max_tokens):
            log_p = reader.next_log_probs(texts, running)
            chosen = np.asarray(_choose(log_p, keys, number, temperature, top_k, top_p))
            running &= chosen != tokenizer.eos_id
            for row in np.flatnonzero(running):
                texts[row].append(int(chosen[row]))
            if not running.any():
                break
    decoded = [
        tokenizer.decode(i for i in ids[start:] if i < tokenizer.size)
        for ids, start in zip(texts[: len(starts)], starts, strict=True)
    ]
    return decoded[0] if isinstance(prompt, str) else decoded


class _Reader:
    """Reads growing texts: through the cache, and afresh where a running text outgrew it.

    Args:
      model: the model.
      longest: tokens that no text will exceed.
    """

    def __init__(self, model: LoadedModel, longest: int):
        self._model = model
        self._capacity = _round_up(longest, model.config.data.sequence_length)
        self._prefill, self._decode = _compiled(model.definition.config)
        self._cache: Cache | None = None
        self._begins: list[int] = []

    def next_log_probs(
        self, texts: Sequence[Sequence[int]], running: np.ndarray
    ) -> Float[Array, "batch vocabulary"]:
        """Returns log p of what follows each text; each call finds running texts one token longer.

        What it returns for texts that do not run means nothing.
        """
        capacity = self._capacity
        if self._cache is None:
            self._begins = [max(0, len(ids) - capacity) for ids in texts]
            return self._read(texts)
        lengths = np.asarray([len(ids) for ids in texts]) - self._begins
        if np.any(lengths[running] > capacity):
            # All long texts forget together, so that soon no other outgrows the cache.
            kept = capacity - capacity // 4
            self._begins = [len(ids) - min(int(n), kept) for ids, n in zip(texts, lengths, strict=True)]
            self._cache = None  # before the new one is made
            return self._read(texts)
        last = np.asarray([ids[-1] for ids in texts], np.int32)
        log_p, self._cache = self._decode(self._model.params, self._cache, last, self._copyable(last))
        return log_p

    def _read(self, texts: Sequence[Sequence[int]]) -> Float[Array, "batch vocabulary"]:
        seen = [ids[begin:] for ids, begin in zip(texts, self._begins, strict=True)]
        lengths = np.asarray([len(ids) for ids in seen], np.int32)
        padded = _round_up(lengths.max(), self._capacity)
        tokens = np.full((len(seen), padded), self._model.tokenizer.pad_id, np.int32)
        for row, ids in zip(tokens, seen, strict=True):
            row[: len(ids)] = ids
        log_p, self._cache = self._prefill(
            self._model.params, tokens, lengths, self._copyable(tokens), capacity=self._capacity
        )
        return log_p

    def _copyable(self, tokens: np.ndarray) -> np.ndarray:
        return ~np.isin(tokens, self._model.tokenizer.control_ids)


@functools.lru_cache(maxsize=8)
def _compiled(config: ModelConfig) -> tuple[Any, Any]:
    """Returns jitted ``prefill`` and ``decode``, the same at every call: they keep what they compiled."""
    definition = define_model(config)
    read = jax.jit(functools.partial(prefill, definition), static_argnames="capacity")
    return read, jax.jit(functools.partial(decode, definition), donate_argnums=1)


def _round_up(length: int, limit: int) -> int:
    """Returns a power of two of at least ``length``, or ``limit``: few sizes, so few compilations."""
    return min(limit, max(16, 1 << (int(length) - 1).bit_length()))


def check_arguments(
    max_tokens: int, temperature: float, top_k: int | None, top_p: float | None, seed: int
) -> None:
    """Raises :class:`UserError` for an argument of :func:`generate` that is out of range."""
    for name, value in (("max_tokens", max_tokens), ("top_k", top_k), ("seed", seed)):
        if value is not None and not isinstance(value, int):
            raise UserError(f"--{name} {value}: must be a whole number")
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


@functools.partial(jax.jit, static_argnames=("temperature", "top_k", "top_p"))
def _choose(
    log_p: Array,
    keys: Array,
    number: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> Int[Array, "batch"]:
    """Returns the next token of every row; ``keys`` are its own, ``number`` counts its tokens."""
    if temperature == 0.0:
        return jnp.argmax(log_p, axis=-1)
    drawn = jax.vmap(jax.random.fold_in, (0, None))(keys, number)
    return jax.vmap(jax.random.categorical)(drawn, filter_log_probs(log_p, temperature, top_k, top_p))
