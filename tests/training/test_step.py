"""The objective: added losses have the values they are documented to have; dropout differs in every part."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cplm_jax import mixture
from cplm_jax.config import TrainConfig
from cplm_jax.data.pipeline import Batch
from cplm_jax.models.decoder import define_model
from cplm_jax.training.step import batch_gradients
from tests.models.test_decoder import BASELINE, HEADS, RICHER, make_batch, name_of, with_head


def one_part(rows=2):
    tokens, segment_ids, positions, copyable = make_batch(rows=rows)
    targets = np.roll(tokens, -1, axis=1)
    loss_mask = np.ones_like(tokens, bool)
    loss_mask[:, ::5] = False
    named = {
        "tokens": tokens,
        "targets": targets,
        "segment_ids": segment_ids,
        "positions": positions,
        "copyable": copyable,
        "loss_mask": loss_mask,
    }
    return Batch(**named)


@pytest.mark.parametrize("head", [None, HEADS[0], RICHER[1]], ids=name_of)
def test_added_losses_have_their_documented_values(head):
    definition, part = define_model(with_head(head)), one_part()
    params = definition.init(jax.random.key(0))
    train = TrainConfig(z_loss=0.3, pointer_loss=0.7)
    batch = jax.tree.map(lambda x: x[None], part)
    gradients, sums, tokens = jax.jit(lambda p: batch_gradients(definition, train, p, batch, None))(params)

    def documented(params):
        """By the distribution path, which the step does not take."""
        outputs = definition.bind(params)(part.tokens, part.segment_ids, part.positions, part.copyable)
        log_p = mixture.log_distribution(outputs.logits, outputs.pointer)
        nll = -jnp.take_along_axis(log_p, part.targets[..., None], -1)[..., 0]
        z_loss = 0.3 * jnp.square(jax.nn.logsumexp(outputs.logits, axis=-1))
        pointer_loss = 0.0
        if outputs.pointer is not None:
            copy = mixture.copy_distribution(outputs.logits, outputs.pointer)
            match = copy.valid & (part.tokens[:, None, :] == part.targets[:, :, None])
            mass = jnp.sum(jnp.where(match, jnp.exp(copy.log_prob.value), 0.0), -1)
            found = jnp.any(match, -1)
            pointer_loss = -0.7 * jnp.where(found, jnp.log(jnp.where(found, mass, 1.0)), 0.0)
        total = jnp.where(part.loss_mask, nll + z_loss + pointer_loss, 0.0)
        return jnp.sum(total) / part.loss_mask.sum(), jnp.sum(jnp.where(part.loss_mask, nll, 0.0))

    expected, nll = jax.jit(jax.grad(documented, has_aux=True))(params)
    for (path, actual), wanted in zip(
        jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-5, err_msg=str(path))
    np.testing.assert_allclose(sums.loss, nll / part.loss_mask.sum(), rtol=1e-5)  # reported without them
    assert tokens == part.loss_mask.sum()


def test_parts_of_a_batch_draw_different_dropout():
    definition = define_model(dataclasses.replace(BASELINE, dropout=0.3))
    params, part = definition.init(jax.random.key(0)), one_part()

    def loss(parts):
        batch = jax.tree.map(lambda x: np.stack([x] * parts), part)
        return batch_gradients(definition, TrainConfig(), params, batch, jax.random.key(1))[1].loss

    once, twice = loss(1), loss(2)
    assert abs(once - twice) > 1e-4  # the same rows, but not the same elements dropped
