"""Learning-rate schedules at their corners, and which parameters are decayed."""

import jax
import numpy as np
import pytest

from cplm_jax.config import CopyHeadConfig, ModelConfig, OptimizerConfig
from cplm_jax.config_loading import load_config
from cplm_jax.errors import UserError
from cplm_jax.models.decoder import define_model
from cplm_jax.training.optimizer import decay_mask, learning_rate_schedule


def rates(steps, **settings):
    schedule = learning_rate_schedule(OptimizerConfig(learning_rate=1.0, **settings), steps)
    return np.array([float(schedule(i)) for i in range(steps)])


@pytest.mark.parametrize("warmup", [0, 1, 10, 50])
def test_cosine_warms_up_peaks_and_ends_at_its_last_rate(warmup):
    found = rates(100, warmup_steps=warmup)
    assert found[warmup] == pytest.approx(1.0)
    assert found[-1] == pytest.approx(0.1, rel=1e-5)
    assert (np.diff(found[:warmup]) > 0).all()
    assert (np.diff(found[warmup:]) < 0).all()
    if warmup:
        assert found[0] == pytest.approx(1 / (warmup + 1))


@pytest.mark.parametrize(("warmup", "fraction"), [(0, 0.2), (10, 0.2), (50, 0.49), (10, 0.01)])
def test_wsd_stays_at_the_peak_and_ends_at_its_last_rate(warmup, fraction):
    found = rates(100, schedule="wsd", warmup_steps=warmup, decay_fraction=fraction)
    decay = round(100 * fraction)
    np.testing.assert_allclose(found[warmup : 100 - decay], 1.0, rtol=1e-6)
    assert found[-1] == pytest.approx(0.1, rel=1e-5)
    np.testing.assert_allclose(np.diff(found[99 - decay :]), -0.9 / decay, rtol=1e-3)


def test_wsd_without_decay_stays_at_the_peak():
    np.testing.assert_allclose(rates(50, schedule="wsd", warmup_steps=5, decay_fraction=0.0)[5:], 1.0)


def test_wsd_whose_phases_overlap_is_refused():
    flags = "--optimizer.schedule wsd --optimizer.warmup_steps 50 --train.steps 100"
    flags += " --optimizer.decay_fraction 0.6"
    with pytest.raises(UserError, match=r"optimizer.decay_fraction.*overlap"):
        load_config(arguments=flags.split())


def test_matrices_alone_are_decayed():
    model = ModelConfig(
        vocabulary_size=16,
        copy_head=CopyHeadConfig(gate="learned", alignment="preceding"),
        tied_embeddings=False,
    )
    definition = define_model(model)
    mask = decay_mask(definition.logical_axes)
    found = {
        jax.tree_util.keystr(path, simple=True, separator="."): decayed
        for path, decayed in jax.tree_util.tree_leaves_with_path(mask)
    }
    assert {name for name, decayed in found.items() if not decayed} == {
        "blocks.attention_norm.scale",
        "copy_head.log_temperature",
        "blocks.mlp_norm.scale",
        "final_norm.scale",
        "copy_head.gate_kernel",
        "copy_head.gate_bias",
    }
    assert len(found) == 17
