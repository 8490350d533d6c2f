"""How long arrays are cut into blocks."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array


def block_length(length: int, elements: int, budget: int) -> int:
    """Returns the length of equal blocks that ``length`` positions are cut into.

    Args:
      length: number of positions.
      elements: array elements that each position of a block takes.
      budget: elements that a block may take; a block has at least one position.
    """
    longest = max(1, budget // max(1, elements))
    if longest >= length:
        return length
    # Accelerators want multiples of eight; equal blocks waste the least.
    longest = longest // 8 * 8 or longest
    equal = math.ceil(length / math.ceil(length / longest))
    return min(longest, math.ceil(equal / 8) * 8)


def pad_to(x: Array, axis: int, length: int, value: Any = 0) -> Array:
    """Pads one axis of ``x`` at its end up to ``length``."""
    if x.shape[axis] == length:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, widths, constant_values=value)


def cut(x: Array, axis: int, block: int, value: Any = 0) -> Array:
    """Cuts an axis into blocks: (..., length, ...) to (blocks, ..., block, ...), padded with ``value``."""
    blocks = math.ceil(x.shape[axis] / block)
    x = pad_to(x, axis, blocks * block, value)
    x = x.reshape(*x.shape[:axis], blocks, block, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def join(x: Array, axis: int, length: int) -> Array:
    """Undoes :func:`cut`."""
    x = jnp.moveaxis(x, 0, axis)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return jax.lax.slice_in_dim(x, 0, length, axis=axis)


def map_blocks(function: Callable[..., Any], block: int, *arrays: Array) -> Any:
    """Applies a function to blocks of positions one after the other, recomputing them in the backward pass.

    Args:
      function: maps arrays of shape (batch, block, ...) to a tree of the same kind.
      block: positions in a block.
      arrays: each of shape (batch, length, ...).

    Returns:
      What ``function`` would return for the whole length.
    """
    length = arrays[0].shape[1]
    if block >= length:
        return function(*arrays)
    xs = tuple(cut(x, 1, block) for x in arrays)
    body = jax.checkpoint(lambda x: function(*x), prevent_cse=False)  # inside a scan CSE cannot undo it
    return jax.tree.map(lambda y: join(y, 1, length), jax.lax.map(body, xs))
