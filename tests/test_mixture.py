"""Both paths of the mixture against the float64 reference, values and gradients."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cplm_jax import mixture
from cplm_jax.mixture import Pointer
from tests import reference

GATES = ("learned", "sentinel", "shared_softmax")
TOLERANCE = 1e-5


def make_case(seed, shape, score_scale, logit_scale, gate_scale, documents, copyable):
    """Random inputs whose scores are exact in float32, so that only the mixture itself rounds."""
    rng = np.random.default_rng(seed)
    batch, length, vocabulary = shape
    segments = np.zeros((batch, length), np.int32)
    for row in segments:
        used = rng.integers(0, length + 1) if documents == "padded" else length
        cuts = np.sort(rng.integers(0, used + 1, 2)) if documents != "one" else np.array([used, used])
        row[:used] = 1 + np.searchsorted(cuts, np.arange(used), side="right")
    exact = functools.partial(rng.integers, -64, 65, (batch, length, 4))
    return {
        "tokens": rng.integers(0, vocabulary, (batch, length), dtype=np.int32),
        "targets": rng.integers(0, vocabulary, (batch, length), dtype=np.int32),
        "segment_ids": segments,
        "candidate": rng.random((batch, length)) < copyable,
        "query": (exact() * 2.0 ** np.round(np.log2(score_scale) - 8)).astype(np.float32),
        "key": (exact() * 2.0**-4).astype(np.float32),
        "logits": (rng.standard_normal(shape) * logit_scale).astype(np.float32),
        "gate_term": (rng.standard_normal((batch, length)) * gate_scale).astype(np.float32),
        "weights": rng.random((batch, length)).astype(np.float32),
    }


def pointer_of(inputs, case, gate="learned"):
    return Pointer(inputs["query"], inputs["key"], case["candidate"], inputs["gate_term"], gate)


DIFFERENTIABLE = ("logits", "query", "key", "gate_term")


@functools.partial(jax.jit, static_argnames=("gate", "path"))
def loss_and_gradients(case, gate, path):
    def loss(inputs):
        args = (case["tokens"], case["segment_ids"], pointer_of(inputs, case, gate))
        if path == "loss":
            log_prob = mixture.target_terms(inputs["logits"], case["targets"], *args).log_prob
        else:
            log_p = mixture.log_distribution(inputs["logits"], *args)
            log_prob = jnp.take_along_axis(log_p, case["targets"][..., None], axis=-1)[..., 0]
        return -jnp.sum(case["weights"] * log_prob), log_prob

    inputs = {n: case[n] for n in DIFFERENTIABLE}
    (_, log_prob), gradients = jax.value_and_grad(loss, has_aux=True)(inputs)
    return log_prob, gradients


@functools.partial(jax.jit, static_argnames="gate")
def full_distribution(case, gate):
    args = (case["tokens"], case["segment_ids"], pointer_of(case, case, gate))
    return (
        mixture.log_distribution(case["logits"], *args),
        mixture.target_terms(case["logits"], case["targets"], *args),
    )


def assert_close(actual, expected, what):
    """Within TOLERANCE of the size of the values (at least 1) that the array holds."""
    actual = np.asarray(actual, np.float64)
    assert np.isfinite(actual).all(), what
    np.testing.assert_allclose(actual, expected, rtol=TOLERANCE, atol=TOLERANCE, err_msg=what)


def check_case(case, gate):
    log_p, responsibility, gradients = reference.mixture(case, gate)
    expected = np.take_along_axis(log_p, case["targets"][..., None], -1)[..., 0]
    for path in ("loss", "distribution"):
        actual, actual_gradients = loss_and_gradients(case, gate, path)
        assert_close(actual, expected, f"{path} path")
        for name in DIFFERENTIABLE:
            size = max(1.0, np.abs(gradients[name]).max())
            assert_close(
                actual_gradients[name] / size, gradients[name] / size, f"{path} path, gradient of {name}"
            )
    actual, terms = full_distribution(case, gate)
    assert_close(actual, log_p, "distribution")
    assert_close(terms.responsibility, responsibility, "responsibility")
    np.testing.assert_allclose(np.exp(np.asarray(actual, np.float64)).sum(-1), 1.0, rtol=TOLERANCE)


@pytest.mark.parametrize("gate", GATES)
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from([(1, 1, 3), (2, 7, 5), (1, 12, 17), (3, 5, 9)]),
    score_scale=st.sampled_from([0.25, 1.0, 16.0, 1e4]),
    logit_scale=st.sampled_from([0.1, 1.0, 30.0, 1e4]),
    gate_scale=st.sampled_from([0.0, 1.0, 100.0, 1e4]),
    documents=st.sampled_from(["one", "several", "padded"]),
    copyable=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_both_paths_equal_the_reference(seed, gate, **kinds):
    check_case(make_case(seed, **kinds), gate)


@pytest.mark.parametrize("gate", GATES)
def test_target_that_never_occurs_and_target_that_always_occurs(gate):
    case = make_case(0, (2, 7, 5), 1.0, 1.0, 1.0, "one", 1.0)
    for tokens, targets in ((0, 4), (4, 4)):
        check_case(
            {
                **case,
                "tokens": np.full_like(case["tokens"], tokens),
                "targets": np.full_like(case["targets"], targets),
            },
            gate,
        )


@pytest.mark.parametrize("gate_value", [-1e9, -100.0, 100.0, 1e9])
def test_saturated_learned_gate(gate_value):
    case = make_case(1, (2, 7, 5), 1.0, 1.0, 0.0, "several", 0.5)
    case["gate_term"] = np.full_like(case["gate_term"], gate_value)
    check_case(case, "learned")


@pytest.mark.parametrize("gate", GATES)
def test_without_candidates_the_result_is_exactly_the_lm_head(gate):
    case = make_case(2, (2, 7, 5), 1.0, 1.0, 1.0, "several", 0.0)
    log_p, terms = full_distribution(case, gate)
    baseline = mixture.log_distribution(
        jnp.asarray(case["logits"]), case["tokens"], case["segment_ids"], None
    )
    chex.assert_trees_all_equal(log_p, jax.jit(lambda: baseline)())
    assert not np.asarray(terms.gate).any()
    assert not np.asarray(terms.responsibility).any()


def test_control_tokens_other_documents_and_the_future_are_never_copied():
    case = make_case(3, (1, 12, 17), 1.0, 1.0, 0.0, "one", 1.0)
    case["tokens"] = np.arange(12, dtype=np.int32)[None]
    case["segment_ids"] = np.repeat([1, 2], 6)[None].astype(np.int32)
    case["candidate"][0, 8] = False
    case["gate_term"] = np.full_like(case["gate_term"], 100.0)  # nothing but copying
    log_p, _ = full_distribution(case, "learned")
    copied = np.asarray(log_p)[0] > -50
    for t in range(12):
        start = 6 * (t // 6)
        allowed = [j for j in range(start, t + 1) if j != 8]
        assert set(np.flatnonzero(copied[t])) <= set(allowed)


def test_occurs_in_context_matches_a_search():
    case = make_case(4, (3, 5, 9), 1.0, 1.0, 1.0, "padded", 0.5)
    found = np.asarray(
        mixture.occurs_in_context(
            *(jnp.asarray(case[n]) for n in ("tokens", "segment_ids", "candidate", "targets"))
        )
    )
    for b, t in np.ndindex(found.shape):
        document = [j for j in range(t + 1) if case["segment_ids"][b, j] == case["segment_ids"][b, t]]
        copyable = {case["tokens"][b, j] for j in document if case["candidate"][b, j]}
        assert found[b, t] == (case["targets"][b, t] in copyable)


def test_training_loss_holds_no_copy_distribution_over_the_vocabulary():
    """Its gradient needs the LM head's (N, V) arrays, and no more of them with a copy head."""
    vocabulary = 1013  # prime, so that no other array has it as a dimension

    def arrays_of_vocabulary_size(pointer):
        case = make_case(5, (2, 7, vocabulary), 1.0, 1.0, 1.0, "one", 1.0)

        def loss(logits, pointer):
            terms = mixture.target_terms(
                logits, case["targets"], case["tokens"], case["segment_ids"], pointer
            )
            return jnp.sum(terms.log_prob)

        text = jax.jit(jax.grad(loss, argnums=0)).lower(case["logits"], pointer).as_text()
        assert "scatter" not in text
        return {
            line.split("tensor<")[-1].split(">")[0] for line in text.splitlines() if str(vocabulary) in line
        }

    case = make_case(5, (2, 7, vocabulary), 1.0, 1.0, 1.0, "one", 1.0)
    shapes = arrays_of_vocabulary_size(pointer_of(case, case))
    assert shapes <= arrays_of_vocabulary_size(None)
