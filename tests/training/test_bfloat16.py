"""bfloat16 compute follows float32 over a run, and extreme gates leave every number finite."""

import jax
import numpy as np
import pytest

from cplm_jax.data.pipeline import TrainingBatches
from cplm_jax.training.setup import set_up
from cplm_jax.training.step import Trainer
from tests.tiny import tiny_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bfloat16")


def run(folder, *flags):
    """Trains, and returns the loss of every step, once all parameters were seen to be finite."""
    setup = set_up(tiny_config(folder, "--optimizer.learning_rate", "6e-3", *flags))
    train = setup.config.train
    trainer = Trainer(setup.config, setup.definition, setup.mesh)
    state, step = trainer.init(), trainer.compile_step()
    batches = TrainingBatches(
        setup.train_rows, train.batch_size, train.accumulation, train.steps, setup.mesh, setup.config.data
    )
    losses = []
    for _ in range(train.steps):
        state, metrics = step(state, next(batches))
        losses.append(metrics.loss.item())
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.device_get(state.params)))
    assert np.isfinite(losses).all()
    return np.asarray(losses)


RICH = ("--model.copy_head.gate", "confidence", "--model.copy_head.pointers", "2")


@pytest.mark.parametrize(
    "head", [(), RICH, ("--model.copy_head", "null")], ids=["default", "rich", "baseline"]
)
def test_loss_stays_within_one_percent_of_float32(folder, head):
    # With the package's own warm-up: a start at full speed is chaotic, whatever the precision.
    steps = ("--train.steps", "200", "--optimizer.warmup_steps", "20")
    full = run(folder, *head, *steps)
    half = run(folder, *head, *steps, "--model.compute_dtype", "bfloat16")
    assert full[-10:].mean() < 0.8 * full[0]  # it learned something
    np.testing.assert_allclose(half, full, rtol=0.01)
    assert (half != full).any()


@pytest.mark.parametrize(
    ("gate", "bias"),
    [("learned", "-100"), ("learned", "100"), ("shared_softmax", "100"), ("confidence", "-100")],
)
def test_a_saturated_gate_keeps_everything_finite(folder, gate, bias):
    head = ("--model.copy_head.gate", gate, "--model.copy_head.gate_bias", bias)
    run(folder, *head, "--model.compute_dtype", "bfloat16")
