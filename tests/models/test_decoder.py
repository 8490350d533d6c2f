"""The decoder: documents apart, shared initial values, scan and rematerialisation, types."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cplm_jax import mixture
from cplm_jax.config import CopyHeadConfig, ModelConfig
from cplm_jax.models.attention import attention_mask
from cplm_jax.models.decoder import define_model, parameter_count

VOCABULARY, LENGTH = 53, 16
BASELINE = ModelConfig(
    vocabulary_size=VOCABULARY, width=32, layers=3, heads=4, kv_heads=2, mlp_width=48, copy_head=None
)
HEADS = [
    CopyHeadConfig(gate=gate, alignment=alignment, width=8)
    for gate in ("learned", "sentinel", "shared_softmax")
    for alignment in ("preceding", "containing", "both")
]


def with_head(head, **changes):
    return dataclasses.replace(BASELINE, copy_head=head, **changes)


def make_batch(seed=0, rows=2):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(4, 12, (rows, LENGTH), dtype=np.int32)
    segment_ids = np.repeat([[1, 2]], LENGTH // 2, axis=1).repeat(rows, 0).astype(np.int32)
    segment_ids.sort()
    positions = np.tile(np.arange(LENGTH // 2, dtype=np.int32), (rows, 2))
    return tokens, segment_ids, positions, np.ones_like(tokens, bool)


def outputs_of(config, params, batch, key=None):
    definition = define_model(config)
    return jax.jit(lambda p, b: definition.bind(p)(*b, key))(params, batch)


@functools.partial(jax.jit, static_argnames="config")
def distribution(config, params, batch):
    outputs = define_model(config).bind(params)(*batch)
    return mixture.log_distribution(outputs.logits, batch[0], batch[1], outputs.pointer)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", HEADS, ids=lambda h: f"{h.gate}-{h.alignment}")
def test_shared_parameters_start_as_the_baselines(head, tied):
    key = jax.random.key(3)
    baseline = define_model(dataclasses.replace(BASELINE, tied_embeddings=tied)).init(key)
    ours = define_model(with_head(head, tied_embeddings=tied)).init(key)
    chex.assert_trees_all_equal({k: v for k, v in ours.items() if k != "copy_head"}, baseline)
    assert ("lm_head" in baseline) is not tied


def test_copy_head_parameters_do_not_depend_on_which_others_exist():
    key = jax.random.key(3)
    drawn = [define_model(with_head(h)).init(key)["copy_head"] for h in HEADS]
    for name in ("query", "preceding", "containing"):
        values = [d[name] for d in drawn if name in d]
        for value in values[1:]:
            chex.assert_trees_all_equal(value, values[0])


def test_learned_gate_forced_shut_is_the_baseline():
    key, batch = jax.random.key(0), make_batch()
    config = with_head(CopyHeadConfig(width=8, gate_bias=-1e9))
    params = define_model(config).init(key)
    shared = {k: v for k, v in params.items() if k != "copy_head"}
    np.testing.assert_allclose(
        distribution(config, params, batch), distribution(BASELINE, shared, batch), rtol=1e-6, atol=1e-6
    )
    tokens, segment_ids, _, _ = batch
    targets = np.roll(tokens, -1, axis=1)
    outputs, plain = outputs_of(config, params, batch), outputs_of(BASELINE, shared, batch)
    np.testing.assert_allclose(
        mixture.target_terms(outputs.logits, targets, tokens, segment_ids, outputs.pointer).log_prob,
        mixture.target_terms(plain.logits, targets, tokens, segment_ids, None).log_prob,
        rtol=1e-6,
        atol=1e-6,
    )


@pytest.mark.parametrize(
    "config",
    [BASELINE, *map(with_head, HEADS)],
    ids=lambda c: str(c.copy_head and (c.copy_head.gate, c.copy_head.alignment)),
)
def test_a_document_does_not_see_its_neighbour(config):
    """Neither through the output nor through the gradient, and packed it is as it is alone."""
    params = define_model(config).init(jax.random.key(1))
    batch = make_batch()
    half = LENGTH // 2
    changed = (batch[0].copy(), *batch[1:])
    changed[0][:, :half] = (changed[0][:, :half] + 1) % 40 + 4
    before, after = distribution(config, params, batch), distribution(config, params, changed)
    np.testing.assert_array_equal(before[:, half:], after[:, half:])
    assert (np.asarray(before[:, :half]) != np.asarray(after[:, :half])).any()
    alone = tuple(x[:, half:] for x in batch)
    np.testing.assert_allclose(before[:, half:], distribution(config, params, alone), rtol=1e-4, atol=1e-5)

    # The gradient of the second document's loss reaches no embedding that only the first one uses.
    tokens = batch[0].copy()
    tokens[:, :half] += 20
    definition = define_model(dataclasses.replace(config, tied_embeddings=False))
    untied = definition.init(jax.random.key(1))

    def loss(params):
        outputs = definition.bind(params)(tokens, *batch[1:])
        terms = mixture.target_terms(
            outputs.logits, np.roll(batch[0], -1, axis=1), tokens, batch[1], outputs.pointer
        )
        return jnp.sum(terms.log_prob[:, half:])

    gradient = np.asarray(jax.jit(jax.grad(loss))(untied)["embedding"])
    first_only = np.setdiff1d(tokens[:, :half], tokens[:, half:])
    assert not gradient[first_only].any()
    assert gradient[np.unique(tokens[:, half:])].any(axis=1).all()


@pytest.mark.parametrize("head", [None, HEADS[0]], ids=["baseline", "copy head"])
def test_the_future_is_not_seen(head):
    config = with_head(head)
    params = define_model(config).init(jax.random.key(1))
    batch = make_batch()
    changed = (batch[0].copy(), *batch[1:])
    changed[0][:, -1] += 1
    before, after = distribution(config, params, batch), distribution(config, params, changed)
    np.testing.assert_array_equal(before[:, :-1], after[:, :-1])


def test_scanned_blocks_equal_the_blocks_one_after_the_other():
    params = define_model(BASELINE).init(jax.random.key(2))
    batch = make_batch()
    tokens, segment_ids, positions, _ = batch
    model = define_model(BASELINE).bind(params)
    graph, stacked = nnx.split(model.blocks)
    x = params["embedding"][tokens] * BASELINE.width**0.5
    for i in range(BASELINE.layers):
        block = nnx.merge(graph, jax.tree.map(lambda p, i=i: p[i], stacked))
        x = block(x, positions, attention_mask(segment_ids), None)
    np.testing.assert_allclose(
        model.final_norm(x), model.hidden(tokens, segment_ids, positions), rtol=1e-5, atol=1e-5
    )


def gradient_of(config, params, batch):
    definition = define_model(config)

    def loss(params):
        outputs = definition.bind(params)(*batch)
        terms = mixture.target_terms(
            outputs.logits, np.roll(batch[0], -1, 1), batch[0], batch[1], outputs.pointer
        )
        return -jnp.mean(terms.log_prob)

    return jax.jit(jax.value_and_grad(loss))(params)


def test_rematerialisation_changes_no_gradient():
    config, batch = with_head(HEADS[0]), make_batch()
    params = define_model(config).init(jax.random.key(2))
    plain = gradient_of(config, params, batch)
    again = gradient_of(dataclasses.replace(config, rematerialize=True), params, batch)
    chex.assert_trees_all_close(plain, again, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("head", [None, HEADS[0]], ids=["baseline", "copy head"])
def test_bfloat16_compute_keeps_float32_where_it_matters(head):
    config, batch = with_head(head), make_batch()
    half = dataclasses.replace(config, compute_dtype="bfloat16")
    params = define_model(config).init(jax.random.key(2))
    outputs = outputs_of(half, params, batch)
    assert outputs.logits.dtype == jnp.float32
    loss, _ = gradient_of(half, params, batch)
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, gradient_of(config, params, batch)[0], rtol=0.02)


def test_gradient_of_a_frequent_token_is_summed_in_float32():
    """Thousands of bfloat16 terms, summed in bfloat16, would lose most of the sum."""
    config = dataclasses.replace(
        BASELINE, layers=1, compute_dtype="bfloat16", tied_embeddings=False, vocabulary_size=8
    )
    params = define_model(config).init(jax.random.key(2))
    tokens = np.full((64, 64), 5, np.int32)
    tokens[:, ::7] = 6
    ones, positions = np.ones_like(tokens), np.tile(np.arange(64, dtype=np.int32), (64, 1))

    def gradient(config):
        definition = define_model(config)

        def loss(params):
            outputs = definition.bind(params)(tokens, ones, positions, ones > 0)
            terms = mixture.target_terms(outputs.logits, np.roll(tokens, -1, 1), tokens, ones, None)
            return -jnp.sum(terms.log_prob)

        return np.asarray(jax.jit(jax.grad(loss))(params)["embedding"])[5]

    half, full = gradient(config), gradient(dataclasses.replace(config, compute_dtype="float32"))
    assert np.linalg.norm(half - full) < 0.02 * np.linalg.norm(full)


def test_backward_products_stay_in_bfloat16():
    """Of the LM head and of the copy scores: three products each, none of them in float32."""
    config = dataclasses.replace(with_head(HEADS[0]), compute_dtype="bfloat16", layers=1)
    definition, batch = define_model(config), make_batch()

    def loss(params):
        outputs = definition.bind(params)(*batch)
        terms = mixture.target_terms(
            outputs.logits, np.roll(batch[0], -1, 1), batch[0], batch[1], outputs.pointer
        )
        return -jnp.mean(terms.log_prob)

    text = jax.jit(jax.grad(loss)).lower(definition.init(jax.random.key(0))).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    sized = [line for line in products if f"x{VOCABULARY}x" in line or f"{LENGTH}x{LENGTH}x" in line]
    operands = [line.split(" : ")[-1].split("->")[0] for line in sized]
    of_heads = [o for o in operands if f"x{VOCABULARY}x" in o or f"2x{LENGTH}x{LENGTH}x" in o]
    assert (
        len([o for o in of_heads if f"x{VOCABULARY}x" in o]) == 2
    )  # the backward ones; the forward has it last
    assert of_heads
    assert not [o for o in of_heads if "xf32>" in o], of_heads


def test_dropout_needs_its_key_and_changes_with_it():
    config, batch = dataclasses.replace(BASELINE, dropout=0.3), make_batch()
    params = define_model(config).init(jax.random.key(2))
    plain = outputs_of(config, params, batch).logits
    np.testing.assert_array_equal(plain, outputs_of(BASELINE, params, batch).logits)
    first, again, other = (outputs_of(config, params, batch, jax.random.key(k)).logits for k in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert np.abs(np.asarray(first) - np.asarray(plain)).max() > 1e-3
    assert np.abs(np.asarray(first) - np.asarray(other)).max() > 1e-3


def test_every_parameter_has_logical_axes_and_gets_a_gradient():
    for head in [None, *HEADS]:
        definition = define_model(with_head(head))
        axes = definition.logical_axes
        jax.tree.map(
            lambda shape, a: chex.assert_rank(shape, len(a)),
            definition.shapes,
            jax.tree.map(lambda a: a, axes, is_leaf=lambda x: isinstance(x, tuple)),
        )
    config = with_head(HEADS[2])
    params = define_model(config).init(jax.random.key(2))
    _, gradient = gradient_of(config, params, make_batch())
    chex.assert_tree_all_finite(gradient)
    assert all(np.asarray(g).any() for g in jax.tree.leaves(gradient))
    assert parameter_count(params) == parameter_count(define_model(config).shapes)


def test_the_copy_head_is_light():
    """At the 135M shape it adds less than 1% parameters."""
    shape = {
        "vocabulary_size": 49152,
        "width": 576,
        "layers": 30,
        "heads": 9,
        "kv_heads": 3,
        "mlp_width": 1536,
    }
    baseline = parameter_count(define_model(ModelConfig(**shape, copy_head=None)).shapes)
    ours = parameter_count(define_model(ModelConfig(**shape)).shapes)
    assert 134e6 < baseline < 136e6
    assert baseline < ours < 1.01 * baseline
