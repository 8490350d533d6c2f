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
from cplm_jax.mixture import occurs_in_context, target_terms
from cplm_jax.models.decoder import ModelDefinition


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
        self._sums = jax.jit(
            functools.partial(_batch_sums, definition),
            out_shardings=ValidationSums(*[replicated] * len(ValidationSums._fields)),
        )

    def __call__(
        self, params: Any, batches: Iterable[Batch], interrupted: Callable[[], bool] = lambda: False
    ) -> dict[str, float] | None:
        """Returns the metrics over ``batches``, or ``None`` if ``interrupted`` said so in between.

        ``loss``, ``loss_in_context``, ``loss_novel`` in nats per target token; ``bits_per_byte``
        (the losses of all targets, EOS included, over the bytes of text); ``fraction_in_context``;
        ``target_tokens``; with a copy head also ``gate`` and ``responsibility``, means over
        targets. A loss over no token is left out.
        """
        # Summed in float64 and in one order, so that the figure does not depend on batch sizes' rounding.
        total = np.zeros(len(ValidationSums._fields), np.float64)
        with jax.set_mesh(self._mesh):
            for batch in batches:
                if interrupted():
                    return None
                total += np.asarray(jax.device_get(self._sums(params, batch, self._bytes)), np.float64)
        sums = ValidationSums(*total)
        novel = sums.tokens - sums.tokens_in_context
        result = {"loss": sums.loss / sums.tokens}
        if sums.bytes:
            result["bits_per_byte"] = sums.loss / math.log(2) / sums.bytes
        if sums.tokens_in_context:
            result["loss_in_context"] = sums.loss_in_context / sums.tokens_in_context
        if novel:
            result["loss_novel"] = (sums.loss - sums.loss_in_context) / novel
        result["fraction_in_context"] = sums.tokens_in_context / sums.tokens
        result["target_tokens"] = int(sums.tokens)
        if self._definition.config.copy_head is not None:
            result["gate"] = sums.gate / sums.tokens
            result["responsibility"] = sums.responsibility / sums.tokens
        return {k: v if k == "target_tokens" else float(v) for k, v in result.items()}


def _batch_sums(
    definition: ModelDefinition, params: Any, batch: Batch, byte_lengths: Int[Array, "vocabulary"]
) -> ValidationSums:
    copy_head = definition.config.copy_head
    outputs = definition.bind(params)(batch.tokens, batch.segment_ids, batch.positions, batch.copyable)
    terms = target_terms(
        outputs.logits,
        batch.targets,
        batch.tokens,
        batch.segment_ids,
        outputs.pointer,
        "learned" if copy_head is None else copy_head.gate,
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
