"""Generation draws from the mixture, filtered as asked."""

import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cplm_jax.errors import UserError
from cplm_jax.generation import _Reader, filter_log_probs, generate
from cplm_jax.loading import load_model
from cplm_jax.mixture import log_distribution
from cplm_jax.training.loop import train
from tests.tiny import tiny_config


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    # `containing`, so that BOS would be a candidate if control tokens were.
    flags = ("--optimizer.learning_rate", "1e-2", "--model.copy_head.alignment", "containing")
    config = tiny_config(tmp_path_factory.mktemp("generation"), *flags)
    train(config)
    return load_model(config.run_dir)


@pytest.fixture(scope="module")
def exact_next(model):
    """log p of the next token by one whole pass, without a cache."""

    @jax.jit
    def whole(tokens, count):
        positions = jnp.arange(tokens.shape[1])[None]
        segment_ids = (positions < count).astype(jnp.int32)
        copyable = ~jnp.isin(tokens, jnp.asarray(model.tokenizer.control_ids))
        outputs = model.model(tokens, segment_ids, positions, copyable)
        return log_distribution(outputs.logits, outputs.pointer)[0, count - 1]

    def next_log_probs(ids):
        tokens = np.full((1, model.config.data.sequence_length), 7, np.int32)
        tokens[0, : len(ids)] = ids
        return np.asarray(whole(tokens, len(ids)))

    return next_log_probs


def test_greedy_text_is_the_argmax_of_the_full_pass(model, exact_next):
    prompt = "return self value_a1 value_a1"
    ids = [model.tokenizer.bos_id, *model.tokenizer.encode(prompt)]
    start = len(ids)
    for _ in range(8):
        ids.append(int(np.argmax(exact_next(ids))))
        if ids[-1] == model.tokenizer.eos_id:
            break
    assert generate(model, prompt, max_tokens=8) == model.tokenizer.decode(ids[start:])


def test_prompts_of_different_lengths_are_continued_as_each_alone(model):
    prompts = ["return self value_a1 value_a1", "", "token copy_b7 token copy " * 3]
    assert generate(model, prompts, max_tokens=10) == [generate(model, p, max_tokens=10) for p in prompts]
    assert generate(model, []) == []


def test_the_reader_gives_the_distributions_of_the_full_pass(model, exact_next):
    texts = [[model.tokenizer.bos_id, *model.tokenizer.encode(p)] for p in ("def value_a1 def", "token")]
    reader, running = _Reader(model, 40), np.ones(2, bool)
    for _ in range(4):
        log_p = np.asarray(reader.next_log_probs(texts, running))
        for row, ids in zip(log_p, texts, strict=True):
            np.testing.assert_allclose(row, exact_next(ids), rtol=1e-4, atol=1e-5)
            ids.append(int(np.argsort(row)[-2]))


def greedy(model, exact_next, prompt, count, eos=None):
    """Ids of a continuation, by whole passes."""
    ids = [model.tokenizer.bos_id, *model.tokenizer.encode(prompt)]
    start = len(ids)
    while len(ids) < start + count:
        chosen = int(np.argmax(exact_next(ids)))
        if chosen == eos:
            break
        ids.append(chosen)
    return ids[start:]


def test_a_text_ends_at_eos_and_the_others_go_on(model, exact_next, monkeypatch):
    words = [
        "def",
        "return",
        "self",
        "value_a1",
        "index",
        "print",
        "data",
        "layer_c3",
        "for",
        "batch",
        "in",
        "model",
        "paste",
        "token",
        "copy_b7",
    ]
    # A prompt whose continuation changes, so that it can end there.
    for first in map(" ".join, itertools.permutations(words, 2)):
        ids = greedy(model, exact_next, first, 12)
        ends = [i for i in range(1, len(ids)) if ids[i] not in ids[:i]]
        if ends:
            break
    prompts, end = [first, "token copy_b7 token copy"], ends[0]
    monkeypatch.setattr(model.tokenizer, "eos_id", ids[end])
    other = greedy(model, exact_next, prompts[1], 12, ids[end])
    assert len(other) > end  # it does go on
    expected = [model.tokenizer.decode(x) for x in (ids[:end], other)]
    assert generate(model, prompts, max_tokens=12) == expected


def test_equal_prompts_of_a_batch_draw_different_texts(model):
    drawn = generate(model, ["def"] * 4, max_tokens=12, temperature=1.0, top_p=0.95)
    assert len(set(drawn)) > 1
    assert drawn == generate(model, ["def"] * 4, max_tokens=12, temperature=1.0, top_p=0.95)


def test_a_batch_that_fills_its_windows_is_read_afresh_seldom(model, monkeypatch):
    """Rows that overflow at different steps share their new beginnings."""
    reads = []
    whole = _Reader._read
    monkeypatch.setattr(_Reader, "_read", lambda self, texts: reads.append(1) or whole(self, texts))
    monkeypatch.setattr(model.tokenizer, "eos_id", -1)  # so that no text ends early
    window = model.config.data.sequence_length
    generate(model, ["def " * n for n in range(1, 9)], max_tokens=window + 20)
    assert len(reads) <= 1 + (window + 20) // (window // 4) + 1


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"prompt": None}, TypeError, "NoneType"),
        ({"prompt": ["a", 3]}, TypeError, "int"),
        ({"prompt": "a", "max_tokens": 2.5}, UserError, "max_tokens 2.5"),
        ({"prompt": "a", "seed": 1.5}, UserError, "seed 1.5"),
    ],
)
def test_wrong_arguments_are_named(model, arguments, error, words):
    with pytest.raises(error, match=words):
        generate(model, **arguments)


def test_a_text_that_outgrows_the_window_forgets_its_oldest_quarter(model, exact_next):
    window = model.config.data.sequence_length
    ids = [model.tokenizer.bos_id, *model.tokenizer.encode("return self value " * 60)]
    assert len(ids) > window
    text, begin, expected = list(ids), len(ids) - window, []
    for _ in range(window // 4 + 4):  # over the edge twice
        if len(text) - begin > window:
            begin = len(text) - (window - window // 4)
        expected.append(int(np.argmax(exact_next(text[begin:]))))
        if expected[-1] == model.tokenizer.eos_id:
            expected.pop()
            break
        text.append(expected[-1])
    continued = generate(model, "return self value " * 60, max_tokens=window // 4 + 4)
    assert continued == model.tokenizer.decode(expected)
    assert len(expected) > window // 4 + 1
    assert isinstance(generate(model, "", max_tokens=3), str)


def test_sampling_depends_on_the_seed_alone(model):
    def sample(seed):
        return generate(model, "def", max_tokens=12, temperature=1.0, top_p=0.9, seed=seed)

    assert sample(1) == sample(1)
    assert len({sample(seed) for seed in range(4)}) > 1


def test_sampled_frequencies_are_the_distributions():
    log_p = jnp.log(jnp.asarray([0.5, 0.25, 0.15, 0.1]))
    filtered = filter_log_probs(log_p, 1.0, None, None)
    drawn = np.asarray(
        jax.vmap(lambda k: jax.random.categorical(k, filtered))(jax.random.split(jax.random.key(0), 20_000))
    )
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / 20_000, np.exp(log_p), atol=0.015)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 2.0]),
    top_k=st.one_of(st.none(), st.integers(1, 12)),
    top_p=st.one_of(st.none(), st.floats(0.01, 1.0)),
)
def test_filter_matches_its_definition(seed, temperature, top_k, top_p):
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.full(10, 0.5)).astype(np.float32) + 1e-6
    p /= p.sum()
    kept = np.asarray(jax.nn.softmax(filter_log_probs(jnp.log(p), temperature, top_k, top_p)))
    q = p.astype(np.float64) ** (1 / temperature)
    q /= q.sum()
    order = np.argsort(-q)
    allowed = order[: top_k or len(q)]
    q_k = np.zeros_like(q)
    q_k[allowed] = q[allowed] / q[allowed].sum()
    if top_p is not None:
        before = np.cumsum(q_k[order]) - q_k[order]
        near = np.abs(before - top_p) < 1e-5  # a tie of rounding may fall to either side
        if near.any():
            return
        q_k[order[before >= top_p]] = 0
    np.testing.assert_allclose(kept, q_k / q_k.sum(), rtol=1e-3, atol=1e-5)


def test_ids_beyond_the_tokenizer_decode_to_nothing(tmp_path):
    config = tiny_config(tmp_path, "--model.vocabulary_size", "400", "--train.steps", "4")
    train(config)
    padded = load_model(Path(config.run_dir))
    assert isinstance(generate(padded, "def", max_tokens=5, temperature=5.0), str)
