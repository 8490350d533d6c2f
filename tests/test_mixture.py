"""Both paths of the mixture against the float64 reference, values and gradients."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cplm_jax import mixture
from cplm_jax.double_word import DoubleWord
from cplm_jax.kernels.scatter import logsumexp_by_token
from cplm_jax.pointer import Candidates, Pointer, occurs_in_context
from cplm_jax.precision import LOWEST
from tests import reference

GATES = ("learned", "sentinel", "shared_softmax", "confidence", "context_logits", "context_logits_sum")
GATED = GATES[:4]
TOLERANCE = 1e-5


def exact(rng, shape, size):
    """Numbers whose products, and sums of a few, are exact in float32: only the mixture itself rounds."""
    return (rng.integers(-64, 65, shape) * 2.0 ** np.round(np.log2(size) - 6)).astype(np.float32)


def factors(rng, left, right, size, width):
    """Two arrays whose products are exact, on a grid or, with a width of 1, any float32 numbers."""
    left, right = (*left, width), (*right, width)
    if width > 1:
        return exact(rng, left, size / 4), exact(rng, right, 4.0)
    size = size**0.5
    powers = 2.0 ** (np.round(np.log2(size)) - rng.integers(0, 2, left)) * rng.choice([-1, 1], left)
    return powers.astype(np.float32), (rng.uniform(-1, 1, right) * size).astype(np.float32)


def make_case(
    seed,
    shape,
    score_scale=1.0,
    logit_scale=1.0,
    gate_scale=1.0,
    documents="one",
    copyable=1.0,
    recency=None,
    width=4,
):
    rng = np.random.default_rng(seed)
    batch, length, vocabulary, pointers = shape
    segments = np.zeros((batch, length), np.int32)
    for row in segments:
        used = rng.integers(0, length + 1) if documents == "padded" else length
        cuts = np.sort(rng.integers(0, used + 1, 2)) if documents != "one" else np.array([used, used])
        row[:used] = 1 + np.searchsorted(cuts, np.arange(used), side="right")
    hidden, matrix = factors(rng, (batch, length), (vocabulary,), logit_scale, width)
    query, key = factors(rng, (batch, length, pointers), (batch, length, pointers), score_scale, width)
    case = {
        "tokens": rng.integers(0, vocabulary, (batch, length), dtype=np.int32),
        "targets": rng.integers(0, vocabulary, (batch, length), dtype=np.int32),
        "segment_ids": segments,
        "copyable": rng.random((batch, length)) < copyable,
        "hidden": hidden,
        "matrix": matrix,
        "query": query,
        "key": key,
        "gate_term": (rng.standard_normal((batch, length, pointers)) * gate_scale).astype(np.float32),
        "confidence": rng.standard_normal((2, pointers)).astype(np.float32),
        "weights": rng.random((batch, length)).astype(np.float32),
    }
    if recency is not None:
        case["recency"] = (recency * 2.0 ** -rng.integers(0, 4, pointers)).astype(np.float32)
    return case


def pointer_of(inputs, case, gate="learned", block=None):
    candidates = Candidates(inputs["key"], case["tokens"], case["segment_ids"], case["copyable"])
    return Pointer(
        query=inputs["query"],
        gate_term=inputs["gate_term"],
        segment_ids=case["segment_ids"],
        candidates=candidates,
        recency=inputs.get("recency"),
        confidence=inputs["confidence"] if gate == "confidence" else None,
        gate=gate,
        block=block,
    )


def logits_of(inputs):
    return jnp.einsum("btd,vd->btv", inputs["hidden"], inputs["matrix"], precision="highest")


@functools.partial(jax.jit, static_argnames=("gate", "path", "cuts"))
def loss_and_gradients(case, gate, path, cuts=(None, None)):
    chunk, block = cuts

    def loss(inputs):
        pointer = pointer_of(inputs, case, gate, block)
        if path == "loss":
            terms = mixture.target_terms(inputs["hidden"], inputs["matrix"], case["targets"], pointer, chunk)
            log_prob = terms.log_prob
        else:
            terms = log_p = mixture.log_distribution(logits_of(inputs), pointer, method=path)
            log_prob = jnp.take_along_axis(log_p, case["targets"][..., None], axis=-1)[..., 0]
        return -jnp.sum(case["weights"] * log_prob), (log_prob, terms)

    inputs = {n: case[n] for n in reference.INPUTS if n in case}
    (_, (log_prob, terms)), gradients = jax.value_and_grad(loss, has_aux=True)(inputs)
    return log_prob, gradients, terms


@functools.partial(jax.jit, static_argnames=("gate", "method"))
def full_distribution(case, gate, method="segment_sum"):
    return mixture.log_distribution(logits_of(case), pointer_of(case, case, gate), method=method)


@functools.partial(jax.jit, static_argnames="gate")
def target_terms_of(case, gate):
    return mixture.target_terms(case["hidden"], case["matrix"], case["targets"], pointer_of(case, case, gate))


def assert_close(actual, expected, what, size=1.0):
    """Within TOLERANCE of each value, or of ``size``."""
    actual = np.asarray(actual, np.float64)
    assert np.isfinite(actual).all(), what
    np.testing.assert_allclose(actual, expected, rtol=TOLERANCE, atol=TOLERANCE * size, err_msg=what)


def check_case(case, gate, cuts=(None, None), paths=("loss", "segment_sum")):
    log_p, terms, gradients = reference.mixture(case, gate)
    expected = np.take_along_axis(log_p, case["targets"][..., None], -1)[..., 0]
    for path in paths:
        actual, actual_gradients, actual_terms = loss_and_gradients(case, gate, path, cuts)
        assert_close(actual, expected, f"{path} path")
        if path != "loss":
            assert_close(actual_terms, log_p, f"distribution by {path}")
            total = np.exp(np.asarray(actual_terms, np.float64)).sum(-1)
            np.testing.assert_allclose(total, 1.0, rtol=TOLERANCE)
        for name, value in gradients.items():
            size = max(1.0, np.abs(value).max())
            assert_close(actual_gradients[name] / size, value / size, f"{path} path, gradient of {name}")
        if path == "loss":
            for name, value in terms.items():
                known = np.maximum(value, LOWEST)  # LOWEST stands for minus infinity
                # Without a gate, responsibility is a difference of log-probabilities.
                size = np.abs(expected).max() if (name, gate[:7]) == ("responsibility", "context") else 1.0
                assert_close(getattr(actual_terms, name), known, name, max(1.0, size))


# (batch, length, vocabulary, pointers), width, recency, (chunk, block): what compilation depends on.
LAYOUTS = [
    ((1, 1, 3, 1), 4, None, (None, None)),
    ((2, 7, 5, 1), 4, None, (3, 2)),
    ((1, 12, 17, 2), 4, 0.5, (None, None)),
    ((3, 5, 9, 3), 4, 0.5, (4, 2)),
    ((2, 6, 4, 1), 1, None, (None, None)),
    ((2, 6, 4, 2), 1, None, (4, 2)),
]


@pytest.mark.parametrize("gate", GATES)
@settings(max_examples=90, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    layout=st.sampled_from(LAYOUTS),
    score_scale=st.sampled_from([0.25, 1.0, 16.0, 1e4]),
    logit_scale=st.sampled_from([0.1, 1.0, 30.0, 1e4]),
    gate_scale=st.sampled_from([0.0, 1.0, 100.0, 1e4]),
    documents=st.sampled_from(["one", "several", "padded"]),
    copyable=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_both_paths_equal_the_reference(seed, gate, layout, **kinds):
    shape, width, recency, cuts = layout
    if gate == "context_logits_sum":
        width = 4  # scores are added up, which is exact on a grid only
    check_case(make_case(seed, shape, width=width, recency=recency, **kinds), gate, cuts)


@pytest.mark.parametrize("gate", GATES)
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    score_scale=st.sampled_from([0.25, 1.0, 16.0]),
    documents=st.sampled_from(["several", "padded"]),
    copyable=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_the_one_hot_product_equals_the_reference(seed, gate, **kinds):
    check_case(make_case(seed, (1, 12, 17, 2), **kinds), gate, paths=("one_hot",))


@pytest.mark.parametrize("gate", GATES)
def test_target_that_never_occurs_and_target_that_always_occurs(gate):
    case = make_case(0, (2, 7, 5, 1))
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
@pytest.mark.parametrize("pointers", [1, 2])
@pytest.mark.parametrize("gate", ["learned", "confidence"])
def test_saturated_gate(gate_value, pointers, gate):
    for seed in range(4):
        case = make_case(seed, (2, 7, 5, pointers), score_scale=256.0, documents="several", copyable=0.5)
        case["gate_term"] = np.full_like(case["gate_term"], gate_value)
        check_case(case, gate)


def last_of_two(scores, logits, term):
    """A case whose first token is copied from position 0 and whose second, the target, from position 1."""
    pointers = len(term)
    case = make_case(0, (1, 2, 3, pointers), width=1)
    case["tokens"], case["targets"] = np.array([[0, 1]], np.int32), np.array([[2, 1]], np.int32)
    case["hidden"], case["query"] = np.ones((1, 2, 1), np.float32), np.ones((1, 2, pointers, 1), np.float32)
    case["matrix"] = np.array(logits, np.float32)[:, None]
    case["key"] = np.array(scores, np.float32)[None, :, :, None]
    case["gate_term"] = np.tile(np.array(term, np.float32), (1, 2, 1))
    case["weights"] = np.array([[0.0, 1.0]], np.float32)
    return case


@pytest.mark.parametrize("gate", ["learned", "sentinel", "shared_softmax", "context_logits"])
def test_heads_in_balance_on_large_numbers(gate):
    """Sums of logits, scores and gate that come out near 0, though none is a multiple of a power of 2."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        u = rng.uniform(-1, 1)
        peak, z, e = np.float32([rng.uniform(1e4, 1.6e4), *rng.uniform(-1e4, 0, 2)]).tolist()
        logits, other, term = [peak, z, 0], e - (z - peak) + u, 0.0
        if gate == "sentinel":
            term = other
        elif gate == "shared_softmax":
            term = rng.uniform(-1, 1)
            other, e = peak + rng.uniform(8e3, 1.2e4), z + u - term
        elif gate == "context_logits":
            other, e = e, peak + e - z + u
        check_case(last_of_two([[other], [e]], logits, [term]), gate)


@pytest.mark.parametrize("pointers", [1, 2])
@pytest.mark.parametrize("gate", GATES[:5])
def test_gates_in_balance_on_large_totals(gate, pointers):
    """Gates are near 0, though log-sum-exps and the terms added to them are not."""
    rng = np.random.default_rng(1)

    def parts(wide, *shape):
        """Factors [1, large] and [small, 1], whose product is exact, as are sums of gradients."""
        large, small = np.round(rng.uniform(3e3, 1e4, wide) * 64) / 64, rng.integers(-64, 65, shape) / 64
        left = np.zeros((*wide, 4), np.float32) + np.array([1, 0, 0, 0], np.float32)
        right = np.zeros((*shape, 4), np.float32) + np.array([0, 1, 0, 0], np.float32)
        left[..., 1], right[..., 0] = large, small
        return left, right, large + small

    for _ in range(20):
        case = make_case(0, (1, 2, 3, pointers))
        case["tokens"], case["targets"] = np.array([[0, 1]], np.int32), np.array([[2, 1]], np.int32)
        case["weights"] = np.array([[0.0, 1.0]], np.float32)
        hidden, case["matrix"], logits = parts((1,), 3)
        query, key, scores = parts((pointers,), 2, pointers)
        case["hidden"], case["key"] = np.tile(hidden, (1, 2, 1)), key[None]
        case["query"] = np.tile(2 * query, (1, 2, 1, 1))  # scores are divided by 2, the root of the width
        of_total, of_entropy = case["confidence"]
        total, of_lm = (np.logaddexp.reduce(x) for x in (scores, logits))
        share = np.exp(scores - total)
        balance = {
            "learned": 0.0,
            "sentinel": total,
            "shared_softmax": of_lm - total,
            "confidence": -of_total * total + of_entropy * np.sum(share * np.log(share), axis=0),
            "context_logits": -total,
        }[gate]
        term = balance + rng.uniform(-1, 1, pointers)
        case["gate_term"] = np.tile(term.astype(np.float32), (1, 2, 1))
        check_case(case, gate)


@pytest.mark.parametrize("zero", ["query", "hidden", "gate_term"])
@pytest.mark.parametrize("gate", GATES)
def test_gradients_where_scores_logits_or_heads_are_equal(gate, zero):
    """As at the start of training, where one side of a difference is as large as the other."""
    for seed in range(4):
        case = make_case(seed, (2, 7, 5, 2), documents="several", copyable=0.5)
        case[zero] = np.zeros_like(case[zero])
        check_case(case, gate)
        check_case({**case, "query": 0 * case["query"], "matrix": 0 * case["matrix"]}, gate)


@pytest.mark.parametrize("gate", ["shared_softmax", "confidence", "context_logits"])
def test_second_derivatives_are_those_of_the_reference(gate):
    """Products of the Hessian and a vector, against differences of the reference's gradients."""
    case = make_case(1, (1, 4, 3, 2))
    inputs = {n: case[n] for n in reference.INPUTS if n in case}
    vector = {n: np.random.default_rng(3).standard_normal(x.shape) for n, x in inputs.items()}

    def shifted(by):
        return reference.mixture(case | {n: inputs[n] + by * vector[n] for n in inputs}, gate)[2]

    step = 1e-5
    above, below = shifted(step), shifted(-step)
    for path in ("loss", "segment_sum"):

        def slope(inputs, path=path):
            gradients = loss_and_gradients({**case, **inputs}, gate, path)[1]
            return sum(jnp.vdot(gradients[n], vector[n].astype(np.float32)) for n in inputs)

        for name, actual in jax.jit(jax.grad(slope))(inputs).items():
            expected = (above[name] - below[name]) / (2 * step)
            size = max(1.0, np.abs(expected).max())
            assert_close(actual / size, expected / size, f"{path} path, {name}")


@pytest.mark.parametrize("pointers", [1, 2])
@pytest.mark.parametrize("gate", GATES)
def test_relative_precision_of_gradients_where_the_target_is_all_but_certain(gate, pointers):
    """Both heads give the target 1 - 1e-3 to 1 - 1e-7; gradients are differences from 1 and of each other."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        gaps, (of_lm, other) = rng.uniform(6, 15, pointers), rng.uniform(6, 15, 2)
        case = last_of_two([9 - gaps, 9 + 0 * gaps], [-of_lm, 0, -other], rng.standard_normal(pointers))
        case["weights"] *= 1e4  # scores, which gradients are multiplied with, may be as large
        check_case(case, gate)


@pytest.mark.parametrize(
    ("gate", "value", "scores"),
    [
        ("learned", 1e9, [[31, 97], [-95, 95]]),
        ("learned", -1e9, [[97, 31], [95, -95]]),
        ("learned", 1e10, [[400, 500], [-1000, 499]]),
        ("sentinel", -1e9, [[100, 103], [-900, 102.5]]),
    ],
)
def test_pointers_that_differ_by_less_than_rounding_takes_from_their_gates(gate, value, scores):
    check_case(last_of_two(scores, [0, 0, 0], [value, value]), gate)


def test_scores_of_which_more_is_lost_than_an_exponential_holds():
    large = DoubleWord(np.full((1, 1, 2), -1e12, np.float32), np.float32([[[300, -300]]]))
    for method in ("segment_sum", "one_hot"):
        total = logsumexp_by_token(large, np.ones((1, 1, 2), bool), np.array([[0, 1]]), 3, method)
        np.testing.assert_allclose(total.value, [[[-1e12, -1e12, LOWEST]]], rtol=1e-6)


@pytest.mark.parametrize("gate", GATES)
def test_without_candidates_the_result_is_exactly_the_lm_head(gate):
    case = make_case(2, (2, 7, 5, 1), documents="several", copyable=0.0)
    log_p = full_distribution(case, gate)
    baseline = jax.jit(lambda case: mixture.log_distribution(logits_of(case), None))(case)
    if gate.startswith("context_logits"):  # the same numbers, summed by the other mixture's expression
        np.testing.assert_allclose(log_p, baseline, rtol=1e-6)
    else:
        chex.assert_trees_all_equal(log_p, baseline)
    terms = target_terms_of(case, gate)
    assert not np.asarray(terms.gate).any()
    assert not np.asarray(terms.responsibility).any()


@pytest.mark.parametrize("gate", GATES)
def test_control_tokens_other_documents_and_the_future_are_never_copied(gate):
    case = make_case(3, (1, 12, 17, 2))
    case["tokens"] = np.arange(12, dtype=np.int32)[None]
    case["segment_ids"] = np.repeat([1, 2], 6)[None].astype(np.int32)
    case["copyable"][0, 8] = False
    before = np.asarray(mixture.log_distribution(logits_of(case), None))[0]
    after = np.asarray(full_distribution(case, gate))[0]
    for t in range(12):
        start = 6 * (t // 6)
        allowed = [j for j in range(start, t + 1) if j != 8]
        rest = np.setdiff1d(np.arange(17), allowed)
        # All tokens that may not be copied lose alike.
        changed = (after - before)[t, rest]
        np.testing.assert_allclose(changed, changed[0], atol=1e-5)


def test_occurs_in_context_matches_a_search(monkeypatch):
    case = make_case(4, (3, 5, 9, 1), documents="padded", copyable=0.5)
    arrays = [jnp.asarray(case[n]) for n in ("tokens", "segment_ids", "copyable", "targets")]
    found = np.asarray(occurs_in_context(*arrays))
    for b, t in np.ndindex(found.shape):
        document = [j for j in range(t + 1) if case["segment_ids"][b, j] == case["segment_ids"][b, t]]
        copyable = {case["tokens"][b, j] for j in document if case["copyable"][b, j]}
        assert found[b, t] == (case["targets"][b, t] in copyable)
    monkeypatch.setattr("cplm_jax.pointer._MATCH_BUDGET", 30)  # blocks of two positions
    np.testing.assert_array_equal(occurs_in_context(*arrays), found)


@pytest.mark.parametrize("gate", GATED)
def test_the_loss_path_never_holds_a_square_or_the_logits(gate):
    """No array of the lowered program has two axes of the length, or tokens and vocabulary."""
    length, vocabulary = 29, 31  # primes, so that no other array has them as dimensions
    case = make_case(5, (2, length, vocabulary, 2), documents="several", recency=0.5)

    def loss(inputs):
        pointer = pointer_of(inputs, case, gate, block=8)
        terms = mixture.target_terms(inputs["hidden"], inputs["matrix"], case["targets"], pointer, 6)
        return jnp.sum(terms.log_prob)

    text = jax.jit(jax.grad(loss)).lower({n: case[n] for n in reference.INPUTS}).as_text()
    shapes = {
        tuple(map(int, re.findall(r"(\d+)x", shape))) for shape in re.findall(r"tensor<([0-9x]+)", text)
    }
    assert any(vocabulary in shape for shape in shapes)
    assert any(8 in shape for shape in shapes)
    padded = {length, 32, 58, 60}  # positions, and tokens of both rows, whole or padded to blocks
    for shape in shapes:
        long = [n for n in shape if n in padded]
        assert len(long) < 2, shape
        assert not (vocabulary in shape and long), shape
    assert "scatter" not in text


def temporary_memory(gate, length, tokens, vocabulary, cuts):
    """Bytes of the compiled value and gradient of the loss, as XLA counts them."""
    rows = tokens // length
    shapes = {
        "hidden": (rows, length, 32),
        "matrix": (vocabulary, 32),
        "query": (rows, length, 2, 16),
        "key": (rows, length, 2, 16),
        "gate_term": (rows, length, 2),
        "confidence": (2, 2),
    }
    inputs = {n: jax.ShapeDtypeStruct(shape, jnp.float32) for n, shape in shapes.items()}
    ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    case = dict.fromkeys(("tokens", "targets", "segment_ids"), ids)
    case["copyable"] = jax.ShapeDtypeStruct((rows, length), jnp.bool_)

    def loss(inputs, case):
        pointer = pointer_of(inputs, case, gate, cuts[1])
        terms = mixture.target_terms(inputs["hidden"], inputs["matrix"], case["targets"], pointer, cuts[0])
        return jnp.sum(terms.log_prob)

    return (
        jax.jit(jax.value_and_grad(loss)).lower(inputs, case).compile().memory_analysis().temp_size_in_bytes
    )


@pytest.mark.parametrize("gate", ["learned", "confidence", "context_logits"])
def test_memory_of_the_loss_grows_at_most_linearly_with_the_length(gate):
    """At a fixed number of tokens, and far below what whole scores and logits take."""
    tokens, vocabulary, cuts = 8192, 1024, (64 if gate == "context_logits" else 256, 128)
    used = {length: temporary_memory(gate, length, tokens, vocabulary, cuts) for length in (1024, 2048, 8192)}
    assert used[2048] <= 2.2 * used[1024]
    assert used[8192] <= 4.4 * used[2048]
    logits, scores = 4 * tokens * vocabulary, 4 * tokens * 8192 * 2
    assert used[8192] < (logits + scores) / 8
