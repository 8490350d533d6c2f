"""Validation loss over held-out text, whole and split by whether a target can be copied."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from cplm_jax.data.pipeline import Batch
from cplm_jax.models.decoder import ModelDefinition
from cplm_jax.pointer import occurs_in_context


class ValidationSums(NamedTuple):
    """Sums over the target tokens of a batch, or of many."""

    loss: Float[Array, ""]
    loss_in_context: Float[Array, ""]
    gate: Float[Array, ""]
    responsibility: Float[Array, ""]
    tokens: Int[Array, ""]
    tokens_in_context: Int[Array, ""]
    bytes: Int[Array, ""]


class Validator:
    """Computes validation metrics of a model, without the copy distribution over the vocabulary.

    Args:
      definition: the model.
      mesh: the device mesh.
      byte_lengths: bytes of text each token id stands for, shape (vocabulary,).
    """

    def __init__(self, definition: ModelDefinition, mesh: Mesh, byte_lengths: np.ndarray):
        self._definition, self._mesh = definition, mesh
        replicated = NamedSharding(mesh, PartitionSpec())
        self._bytes = jax.device_put(byte_lengths, replicated)
        self._sums = jax.jit(functools.partial(_batch_sums, definition), out_shardings=replicated)

    def __call__(
        self, params: Any, batches: Iterable[Batch], interrupted: Callable[[], bool] = lambda: False
    ) -> dict[str, float] | None:
        """Returns the metrics over ``batches``, or ``None`` if ``interrupted`` said so in between.

        ``loss``, ``loss_in_context``, ``loss_novel`` in nats per target token; ``bits_per_byte``
        (the losses of all targets, EOS included, over the bytes of text); ``fraction_in_context``;
        ``target_tokens``; with a copy head also ``gate`` and ``responsibility``, means over
        targets. A loss over no token is left out.
        """
        # Summed in float64 and in one order, so that no batch's sum is lost in a larger one.
        total = dict.fromkeys(ValidationSums._fields, 0.0)
        with jax.set_mesh(self._mesh):
            for batch in batches:
                if interrupted():
                    return None
                sums = jax.device_get(self._sums(params, batch, self._bytes))
                total = {name: value + float(getattr(sums, name)) for name, value in total.items()}
        tokens, inside = total["tokens"], total["tokens_in_context"]
        novel = tokens - inside
        result = {"loss": total["loss"] / tokens}
        if total["bytes"]:
            result["bits_per_byte"] = total["loss"] / math.log(2) / total["bytes"]
        if inside:
            result["loss_in_context"] = total["loss_in_context"] / inside
        if novel:
            result["loss_novel"] = (total["loss"] - total["loss_in_context"]) / novel
        result |= {"fraction_in_context": inside / tokens, "target_tokens": int(tokens)}
        if self._definition.config.copy_head is not None:
            result |= {"gate": total["gate"] / tokens, "responsibility": total["responsibility"] / tokens}
        return result


def _batch_sums(
    definition: ModelDefinition, params: Any, batch: Batch, byte_lengths: Int[Array, "vocabulary"]
) -> ValidationSums:
    terms = definition.bind(params).target_terms(
        batch.tokens, batch.targets, batch.segment_ids, batch.positions, batch.copyable
    )
    in_context = occurs_in_context(batch.tokens, batch.segment_ids, batch.copyable, batch.targets)
    mask = batch.loss_mask

    def total(x: Array, where: Array = mask) -> Array:
        return jnp.sum(jnp.where(where, x, jnp.zeros_like(x)))

    return ValidationSums(
        loss=total(-terms.log_prob),
        loss_in_context=total(-terms.log_prob, mask & in_context),
        gate=total(terms.gate),
        responsibility=total(terms.responsibility),
        tokens=jnp.sum(mask, dtype=jnp.int32),
        tokens_in_context=jnp.sum(mask & in_context, dtype=jnp.int32),
        bytes=total(byte_lengths[batch.targets]),
    )
