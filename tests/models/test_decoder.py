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
from cplm_jax.models.attention import attend
from cplm_jax.models.decoder import States, define_model, parameter_count
from cplm_jax.pointer import copy_scores

VOCABULARY, LENGTH = 53, 16
BASELINE = ModelConfig(
    vocabulary_size=VOCABULARY, width=32, layers=3, heads=4, kv_heads=2, mlp_width=48, copy_head=None
)
HEADS = [
    CopyHeadConfig(gate=gate, alignment=alignment, width=8)
    for gate in ("learned", "sentinel", "shared_softmax")
    for alignment in ("preceding", "containing", "both")
]

# One for every other option of the copy head.
RICHER = [
    CopyHeadConfig(width=8, gate="confidence", pointers=2),
    CopyHeadConfig(width=8, gate="learned", pointers=3, alignment="both", recency_bias=True),
    CopyHeadConfig(width=8, gate="sentinel", normalize=True, pointers=2),
    CopyHeadConfig(width=8, gate="shared_softmax", key_layer=1, pointers=2),
    CopyHeadConfig(width=8, gate="context_logits", pointers=2),
    CopyHeadConfig(width=8, gate="context_logits_sum"),
]


def name_of(head):
    if head is None:
        return "baseline"
    default = CopyHeadConfig(width=8)
    options = {f.name: getattr(head, f.name) for f in dataclasses.fields(head)}
    changed = {n: v for n, v in options.items() if v != getattr(default, n)}
    return "-".join(f"{n}={v}" for n, v in changed.items()) or "default"


def with_head(head, **changes):
    return dataclasses.replace(BASELINE, copy_head=head, **changes)


def make_batch(seed=0, rows=2):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(4, 12, (rows, LENGTH), dtype=np.int32)
    segment_ids = np.repeat([[1, 2]], LENGTH // 2, axis=1).repeat(rows, 0).astype(np.int32)
    segment_ids.sort()
    positions = np.tile(np.arange(LENGTH // 2, dtype=np.int32), (rows, 2))
    return tokens, segment_ids, positions, np.ones_like(tokens, bool)


def outputs_of(config, params, batch):
    definition = define_model(config)
    return jax.jit(lambda p, b: definition.bind(p)(*b))(params, batch)


def target_terms(definition, params, batch, key=None):
    """The loss path for targets that are the batch's tokens, shifted and wrapped round."""
    tokens, segment_ids, positions, copyable = batch
    targets = jnp.roll(jnp.asarray(tokens), -1, axis=1)
    return definition.bind(params).target_terms(tokens, targets, segment_ids, positions, copyable, key)


@functools.partial(jax.jit, static_argnames="config")
def distribution(config, params, batch):
    outputs = define_model(config).bind(params)(*batch)
    return mixture.log_distribution(outputs.logits, outputs.pointer)


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
    np.testing.assert_allclose(
        target_terms(define_model(config), params, batch).log_prob,
        target_terms(define_model(BASELINE), shared, batch).log_prob,
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
        return jnp.sum(target_terms(definition, params, (tokens, *batch[1:])).log_prob[:, half:])

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
        x, _ = block(x, positions, lambda q, k, v, i, m: (attend(q, k, v, segment_ids), m), jnp.int32(i))
    states = model.states(tokens, segment_ids, positions)
    np.testing.assert_allclose(model.final_norm(x), states.hidden, rtol=1e-5, atol=1e-5)


def gradient_of(config, params, batch):
    definition = define_model(config)

    def loss(params):
        return -jnp.mean(target_terms(definition, params, batch).log_prob)

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
            return -jnp.sum(target_terms(definition, params, (tokens, ones, positions, ones > 0)).log_prob)

        return np.asarray(jax.jit(jax.grad(loss))(params)["embedding"])[5]

    half, full = gradient(config), gradient(dataclasses.replace(config, compute_dtype="float32"))
    assert np.linalg.norm(half - full) < 0.02 * np.linalg.norm(full)


@pytest.mark.parametrize("cuts", [(None, None), (8, 8)])
def test_products_of_both_heads_stay_in_bfloat16_and_accumulate_in_float32(cuts):
    head = dataclasses.replace(HEADS[0], score_block=cuts[1])
    config = dataclasses.replace(with_head(head), compute_dtype="bfloat16", layers=1, logit_chunk=cuts[0])
    definition, batch = define_model(config), make_batch()

    def loss(states, matrix, query, key):
        model = definition.bind(definition.init(jax.random.key(0)))
        pointer = model.pointer(States(states, states), batch[0], batch[1], batch[3])
        candidates = dataclasses.replace(pointer.candidates, key=key)
        pointer = dataclasses.replace(pointer, query=query, candidates=candidates)
        return jnp.sum(mixture.target_terms(states, matrix, batch[0], pointer, cuts[0]).log_prob)

    hidden = jnp.zeros((2, LENGTH, 32), jnp.bfloat16)
    copy = jnp.zeros((2, LENGTH, 1, 8), jnp.bfloat16)
    matrix = jnp.zeros((VOCABULARY, 32), jnp.float32)
    text = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(hidden, matrix, copy, copy).as_text()
    types = [line.split(" : ")[-1] for line in text.splitlines() if "dot_general" in line]
    lm = [t for t in types if f"x{VOCABULARY}x" in t or f"<{VOCABULARY}x" in t]
    scores = [t for t in types if "x1x8x" in t and t not in lm]
    # Forward, of the states and of the matrix or keys; and forward again where blocks are recomputed.
    assert len(lm) == (3 if cuts[0] is None else 4)
    assert len(scores) >= 3
    for kind in (*lm, *scores):
        operands, result = kind.split("->")
        assert "f32" not in operands, kind
        assert "f32" in result, kind


def test_dropout_needs_its_key_and_changes_with_it():
    config, batch = dataclasses.replace(BASELINE, dropout=0.3), make_batch()
    params = define_model(config).init(jax.random.key(2))

    def log_prob(config, key=None):
        return target_terms(define_model(config), params, batch, key).log_prob

    plain = log_prob(config)
    np.testing.assert_array_equal(plain, log_prob(BASELINE))
    first, again, other = (log_prob(config, jax.random.key(k)) for k in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert np.abs(np.asarray(first) - np.asarray(plain)).max() > 1e-3
    assert np.abs(np.asarray(first) - np.asarray(other)).max() > 1e-3


@pytest.mark.parametrize("head", [None, *HEADS, *RICHER], ids=name_of)
def test_every_parameter_has_logical_axes_and_gets_a_gradient(head):
    config = with_head(head)
    definition = define_model(config)
    jax.tree.map(
        lambda shape, axes: chex.assert_rank(shape, len(axes)),
        definition.shapes,
        definition.logical_axes,
    )
    params = definition.init(jax.random.key(2))
    _, gradient = gradient_of(config, params, make_batch())
    chex.assert_tree_all_finite(gradient)
    for path, g in jax.tree_util.tree_leaves_with_path(gradient):
        assert np.asarray(g).any(), path
    assert parameter_count(params) == parameter_count(definition.shapes)


@pytest.mark.parametrize("head", [*HEADS, *RICHER], ids=name_of)
def test_both_paths_agree_in_the_model(head):
    config, batch = with_head(head), make_batch()
    params = define_model(config).init(jax.random.key(2))
    log_p = distribution(config, params, batch)
    targets = np.roll(batch[0], -1, axis=1)
    picked = np.take_along_axis(np.asarray(log_p), targets[..., None], -1)[..., 0]
    terms = jax.jit(functools.partial(target_terms, define_model(config)))(params, batch)
    np.testing.assert_allclose(terms.log_prob, picked, rtol=1e-5, atol=1e-5)


def test_normalised_scores_are_cosines_times_the_temperature():
    config, batch = with_head(CopyHeadConfig(width=8, pointers=2, normalize=True)), make_batch()
    params = define_model(config).init(jax.random.key(2))
    params["copy_head"]["log_temperature"] = jnp.log(jnp.array([3.0, 5.0]))
    pointer = outputs_of(config, params, batch).pointer
    scores = np.asarray(copy_scores(pointer))
    q, k = np.asarray(pointer.query), np.asarray(pointer.candidates.key)
    lengths = (
        np.linalg.norm(q, axis=-1)[:, :, :, None] * np.linalg.norm(k, axis=-1).transpose(0, 2, 1)[:, None]
    )
    cosines = np.einsum("btpc,bjpc->btpj", q, k) / np.maximum(lengths, 1e-9)
    expected = cosines * np.array([3.0, 5.0])[None, None, :, None]
    np.testing.assert_allclose(scores[..., 1:], expected[..., 1:], rtol=1e-4, atol=1e-5)


def test_keys_from_an_earlier_layer_do_not_see_later_ones():
    config, batch = with_head(CopyHeadConfig(width=8, key_layer=1)), make_batch()
    params = define_model(config).init(jax.random.key(2))
    changed = jax.tree.map(lambda x: x, params)
    changed["blocks"] = jax.tree.map(lambda x: x.at[1:].multiply(1.5), params["blocks"])
    before, after = (outputs_of(config, p, batch).pointer for p in (params, changed))
    np.testing.assert_array_equal(before.candidates.key, after.candidates.key)
    assert (np.asarray(before.query) != np.asarray(after.query)).any()


@pytest.mark.parametrize("block", [1, 5, 8, 16])
def test_attention_over_blocks_of_queries_equals_attention_at_once(block):
    batch = make_batch()
    params = define_model(BASELINE).init(jax.random.key(2))
    loss, gradient = gradient_of(dataclasses.replace(BASELINE, attention_block=LENGTH), params, batch)
    in_blocks = gradient_of(dataclasses.replace(BASELINE, attention_block=block), params, batch)
    chex.assert_trees_all_close((loss, gradient), in_blocks, rtol=1e-5, atol=1e-6)


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
