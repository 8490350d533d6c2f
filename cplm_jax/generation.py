"""Text generation from the mixture: greedy, temperature, top-k and top-p."""

import functools
from collections.abc import Sequence
from typing import overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from cplm_jax.decoding import Cache, decode, prefill
from cplm_jax.errors import UserError
from cplm_jax.loading import LoadedModel
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

    The model sees at most the last ``data.sequence_length`` tokens, the length it was trained at; when
    a text has filled them, its oldest quarter is forgotten.

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
    """
    check_arguments(max_tokens, temperature, top_k, top_p, seed)
    prompts = [prompt] if isinstance(prompt, str) else prompt
    if not prompts:
        return []
    tokenizer = model.tokenizer
    texts = [[tokenizer.bos_id, *tokenizer.encode(text)] for text in prompts]
    starts, ends = [len(ids) for ids in texts], [len(ids) + max_tokens for ids in texts]
    choose = jax.jit(functools.partial(_choose, temperature, top_k, top_p))
    keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(seed)))(jnp.arange(len(texts)))
    with jax.set_mesh(model.mesh):
        reader = _Reader(model, max(ends))
        for number in range(max_tokens):
            chosen = np.asarray(choose(reader.next_log_probs(texts), keys, np.int32(number)))
            for row, token in enumerate(chosen.tolist()):
                if token == tokenizer.eos_id:
                    ends[row] = min(ends[row], len(texts[row]))
                texts[row].append(token)  # a finished text keeps growing, and is cut below
            if all(end < len(ids) for ids, end in zip(texts, ends, strict=True)):
                break
    continuations = (ids[start:end] for ids, start, end in zip(texts, starts, ends, strict=True))
    decoded = [tokenizer.decode(i for i in ids if i < tokenizer.size) for ids in continuations]
    return decoded[0] if isinstance(prompt, str) else decoded


class _Reader:
    """Reads growing texts: through the cache, and afresh where a text outgrew it.

    Args:
      model: the model.
      longest: tokens that no text will exceed.
    """

    def __init__(self, model: LoadedModel, longest: int):
        self._model = model
        self._capacity = _round_up(longest, model.config.data.sequence_length)
        self._prefill = jax.jit(
            functools.partial(prefill, model.definition, capacity=self._capacity), static_argnames="capacity"
        )
        self._decode = jax.jit(functools.partial(decode, model.definition), donate_argnames="cache")
        self._cache: Cache | None = None
        self._begins: list[int] = []

    def next_log_probs(self, texts: Sequence[Sequence[int]]) -> Float[Array, "batch vocabulary"]:
        """Returns log p of what follows each text; each call finds texts one token longer."""
        params, capacity = self._model.params, self._capacity
        if self._cache is None:
            self._begins = [max(0, len(ids) - capacity) for ids in texts]
        full = [len(ids) - begin > capacity for ids, begin in zip(texts, self._begins, strict=True)]
        if self._cache is not None and not any(full):
            last = np.asarray([ids[-1] for ids in texts], np.int32)
            log_p, self._cache = self._decode(
                params, cache=self._cache, tokens=last, copyable=self._copyable(last)
            )
            return log_p
        kept = capacity - capacity // 4
        self._begins = [
            len(ids) - kept if over else begin
            for ids, begin, over in zip(texts, self._begins, full, strict=True)
        ]
        seen = [ids[begin:] for ids, begin in zip(texts, self._begins, strict=True)]
        lengths = np.asarray([len(ids) for ids in seen], np.int32)
        tokens = np.full(
            (len(seen), _round_up(lengths.max(), capacity)), self._model.tokenizer.pad_id, np.int32
        )
        for row, ids in zip(tokens, seen, strict=True):
            row[: len(ids)] = ids
        log_p, self._cache = self._prefill(params, tokens, lengths, self._copyable(tokens))
        return log_p

    def _copyable(self, tokens: np.ndarray) -> np.ndarray:
        return ~np.isin(tokens, self._model.tokenizer.control_ids)


def _round_up(length: int, limit: int) -> int:
    """Returns a power of two of at least ``length``, or ``limit``: few sizes, so few compilations."""
    return min(limit, max(16, 1 << (int(length) - 1).bit_length()))


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


def _choose(
    temperature: float, top_k: int | None, top_p: float | None, log_p: Array, keys: Array, number: Array
) -> Int[Array, "batch"]:
    """Returns the next token of every row; ``keys`` are its own, ``number`` counts its tokens."""
    if temperature == 0.0:
        return jnp.argmax(log_p, axis=-1)
    drawn = jax.vmap(jax.random.fold_in, (0, None))(keys, number)
    return jax.vmap(jax.random.categorical)(drawn, filter_log_probs(log_p, temperature, top_k, top_p))
