"""What the copy head does: accuracy, calibration of the gate, where it points, the cost of novelty."""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from cplm_jax.data.pipeline import Batch
from cplm_jax.kernels.blocks import map_blocks
from cplm_jax.kernels.scatter import logsumexp_by_token, sum_by_token
from cplm_jax.mixture import copy_distribution, log_distribution, positions_at_a_time, target_terms
from cplm_jax.models.decoder import ModelDefinition
from cplm_jax.pointer import occurs_in_context, valid_candidates
from cplm_jax.precision import LOWEST, masked_logsumexp

CALIBRATION_BINS = 10


class TokenReport(NamedTuple):
    """Per-position facts, each of shape (batch, length)."""

    log_prob: Float[Array, "batch length"]
    """log p(y_t) of the mixture."""
    correct: Bool[Array, "batch length"]
    """Whether the target is the most probable token of the mixture."""
    in_context: Bool[Array, "batch length"]
    """Whether the target occurs among the copyable tokens of its document so far."""
    log_novel: Float[Array, "batch length"]
    """log of the probability that the mixture gives to all tokens that do not occur in context."""
    log_known: Float[Array, "batch length"]
    """log of the probability that it gives to all tokens that do; ``LOWEST`` if there is none."""
    gate: Float[Array, "batch length"]
    """Weight of copying, 0 without candidates or without a copy head."""
    responsibility: Float[Array, "batch length"]
    """Share of p(y_t) that came from copying."""
    copy_correct: Bool[Array, "batch length"]
    """Whether the target is the most probable token of the copy head alone."""
    source: Int[Array, "batch length"]
    """Position of the occurrence of y_t that the copy head thinks likeliest; -1 if there is none."""


def token_report(definition: ModelDefinition, params: Any, batch: Batch) -> TokenReport:
    """Computes the report of a batch from the full distribution of the mixture; jit-able.

    Positions are taken some at a time, since each takes arrays of the vocabulary's size.
    """
    model = definition.bind(params)
    states = model.states(batch.tokens, batch.segment_ids, batch.positions)
    pointer = model.pointer(states, batch.tokens, batch.segment_ids, batch.copyable)
    terms = target_terms(states.hidden, model.lm_matrix, batch.targets, pointer, model.config.logit_chunk)

    def distributions(
        hidden: Array, targets: Array, segment_ids: Array, index: Array, *of_pointer: Array
    ) -> dict[str, Array]:
        logits = model.logits(hidden)
        part = None if pointer is None else pointer.part(of_pointer[0], of_pointer[1], segment_ids)
        log_p = log_distribution(logits, part, index)
        valid = valid_candidates(batch.copyable, batch.segment_ids, segment_ids, index)
        present = sum_by_token(valid.astype(jnp.float32), valid, batch.tokens, log_p.shape[-1]) > 0
        copy_correct, source = jnp.zeros(targets.shape, bool), jnp.full(targets.shape, -1, jnp.int32)
        if part is not None:
            copy = copy_distribution(logits, part, index)
            matches = copy.valid & (batch.tokens[:, None, :] == targets[:, :, None])
            best_match = jnp.argmax(jnp.where(matches, copy.log_prob.value, LOWEST), -1).astype(jnp.int32)
            source = jnp.where(jnp.any(matches, -1), best_match, -1)
            by_token = logsumexp_by_token(copy.log_prob, copy.valid, batch.tokens, log_p.shape[-1])
            likeliest = jnp.argmax(by_token.value, -1)
            copy_correct = jnp.any(copy.valid, -1) & (likeliest == targets)
        return {
            "correct": jnp.argmax(log_p, -1) == targets,
            "log_novel": masked_logsumexp(log_p, ~present),
            "log_known": masked_logsumexp(log_p, present),
            "copy_correct": copy_correct,
            "source": source,
        }

    index = jnp.broadcast_to(jnp.arange(batch.tokens.shape[1]), batch.tokens.shape)
    of_pointer = () if pointer is None else (pointer.query, pointer.gate_term)
    block = positions_at_a_time(pointer, batch.targets, model.lm_matrix.shape[0])
    parts = map_blocks(
        distributions, block, states.hidden, batch.targets, batch.segment_ids, index, *of_pointer
    )
    return TokenReport(
        log_prob=terms.log_prob,
        in_context=occurs_in_context(batch.tokens, batch.segment_ids, batch.copyable, batch.targets),
        gate=terms.gate,
        responsibility=terms.responsibility,
        **parts,
    )


class Calibration(NamedTuple):
    """One bin of the gate's calibration."""

    gate: float
    """Mean gate of the bin's targets."""
    copyable: float
    """Share of the bin's targets that occur in context."""
    tokens: int


def evaluate_copying(definition: ModelDefinition, params: Any, batches: Iterable[Batch]) -> dict[str, Any]:
    """Returns how the model does on targets that can be copied and on those that cannot.

    ``accuracy``, ``accuracy_in_context`` and ``accuracy_novel``: share of targets that the mixture
    thinks most probable. ``loss_detection``: nats for saying whether the target is novel, over all
    targets. ``loss_novel_detection`` and ``loss_novel_identity``: the two parts of the
    loss of novel targets, in nats, that the target is novel and which one it is. With a copy head
    also ``copy_accuracy`` (share of in-context targets that the copy head alone thinks most
    probable), ``gate``, ``gate_in_context``, ``gate_novel``, ``responsibility_in_context`` (means)
    and ``calibration`` (bins of equal width: mean gate against the share of targets that occur in
    context). A mean over no token is left out.
    """
    report_of = jax.jit(functools.partial(token_report, definition))
    parts = []
    for batch in batches:
        report = jax.device_get(report_of(params, batch))._asdict()
        mask = np.asarray(batch.loss_mask)
        parts.append({name: np.asarray(values)[mask] for name, values in report.items()})
    r = {name: np.concatenate([part[name] for part in parts]) for name in TokenReport._fields}
    inside, novel = r["in_context"], ~r["in_context"]
    everything = np.ones_like(inside)
    means = {
        "accuracy": (r["correct"], everything),
        "accuracy_in_context": (r["correct"], inside),
        "accuracy_novel": (r["correct"], novel),
        "loss_detection": (-np.where(novel, r["log_novel"], r["log_known"]), everything),
        "loss_novel_detection": (-r["log_novel"], novel),
        "loss_novel_identity": (r["log_novel"] - r["log_prob"], novel),
    }
    if definition.config.copy_head is not None:
        means |= {
            "copy_accuracy": (r["copy_correct"], inside),
            "gate": (r["gate"], everything),
            "gate_in_context": (r["gate"], inside),
            "gate_novel": (r["gate"], novel),
            "responsibility_in_context": (r["responsibility"], inside),
        }
    result: dict[str, Any] = {
        name: float(np.mean(values[where], dtype=np.float64))
        for name, (values, where) in means.items()
        if where.any()
    }
    result["target_tokens"] = int(inside.size)
    if definition.config.copy_head is not None:
        result["calibration"] = [bin._asdict() for bin in _calibration(r["gate"], inside)]
    return result


def _calibration(gate: np.ndarray, copyable: np.ndarray) -> list[Calibration]:
    which = np.minimum((gate * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
    bins = []
    for i in range(CALIBRATION_BINS):
        here = which == i
        if here.any():
            bins.append(
                Calibration(
                    float(gate[here].mean(dtype=np.float64)), float(copyable[here].mean()), int(here.sum())
                )
            )
    return bins
