"""Validation and copying figures against NumPy, target by target."""

import jax
import numpy as np
import pytest

from cplm_jax.data.pipeline import validation_batches
from cplm_jax.evaluation.copying import evaluate_copying, token_report
from cplm_jax.evaluation.validation import Validator
from cplm_jax.mixture import copy_distribution, log_distribution
from cplm_jax.training.setup import set_up
from tests.tiny import tiny_config

HEADS = {
    "baseline": ["--model.copy_head", "null"],
    "learned": [],
    "sentinel": ["--model.copy_head.gate", "sentinel"],
    "two pointers": ["--model.copy_head.gate", "confidence", "--model.copy_head.pointers", "2"],
    "context_logits": ["--model.copy_head.gate", "context_logits"],
}


@pytest.fixture(scope="module", params=HEADS)
def measured(request, tmp_path_factory):
    """A model with random parameters, its batches, and log p(v) in float64 for every target."""
    folder = tmp_path_factory.mktemp("measures")
    setup = set_up(tiny_config(folder, *HEADS[request.param], "--model.vocabulary_size", "330"))
    params = setup.definition.init(jax.random.key(5))
    params = jax.tree.map(lambda p: p * 1.5, params)
    batches = list(validation_batches(setup.validation_rows, 8, None, setup.mesh))

    @jax.jit
    def distribution(batch):
        outputs = setup.definition.bind(params)(
            batch.tokens, batch.segment_ids, batch.positions, batch.copyable
        )
        return log_distribution(outputs.logits, outputs.pointer)

    targets = []
    for batch in batches:
        log_p = np.asarray(distribution(batch), np.float64)
        tokens, segments = np.asarray(batch.tokens), np.asarray(batch.segment_ids)
        for b, t in zip(*np.nonzero(batch.loss_mask), strict=True):
            here = (segments[b, : t + 1] == segments[b, t]) & np.asarray(batch.copyable)[b, : t + 1]
            targets.append((log_p[b, t], int(batch.targets[b, t]), set(tokens[b, : t + 1][here].tolist())))
    return setup, params, batches, targets


def mean(values):
    return np.mean(np.fromiter(values, np.float64))


def test_validation_figures(measured):
    setup, params, batches, targets = measured
    lengths = setup.corpus.tokenizer.byte_lengths(330)
    found = Validator(setup.definition, setup.mesh, lengths)(params, batches)
    inside = [y in context for _, y, context in targets]
    losses = np.array([-log_p[y] for log_p, y, _ in targets])
    expected = {
        "loss": losses.mean(),
        "loss_in_context": losses[inside].mean(),
        "loss_novel": losses[np.logical_not(inside)].mean(),
        "fraction_in_context": np.mean(inside),
        "target_tokens": len(targets),
        "bits_per_byte": losses.sum() / np.log(2) / lengths[[y for _, y, _ in targets]].sum(),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)
    assert ("gate" in found) == (setup.config.model.copy_head is not None)
    # Every held-out token is a target once, and so is the EOS of every document.
    validation = setup.corpus.validation
    assert found["target_tokens"] == validation.tokens + len(validation)


def test_copying_figures(measured):
    setup, params, batches, targets = measured
    found = evaluate_copying(setup.definition, params, batches)
    novel = [(log_p, y, context) for log_p, y, context in targets if y not in context]

    def log_outside(log_p, context):
        return np.log(np.exp(np.delete(log_p, sorted(context))).sum())

    def detection(log_p, y, context):
        outside = np.exp(log_outside(log_p, context))
        return -np.log(1 - outside if y in context else outside)

    expected = {
        "loss_detection": mean(detection(*target) for target in targets),
        "accuracy": mean(np.argmax(log_p) == y for log_p, y, _ in targets),
        "accuracy_in_context": mean(np.argmax(log_p) == y for log_p, y, context in targets if y in context),
        "accuracy_novel": mean(np.argmax(log_p) == y for log_p, y, _ in novel),
        "loss_novel_detection": mean(-log_outside(log_p, context) for log_p, _, context in novel),
        "loss_novel_identity": mean(log_outside(log_p, context) - log_p[y] for log_p, y, context in novel),
        "target_tokens": len(targets),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, err_msg=name)
    has_head = setup.config.model.copy_head is not None
    assert ("copy_accuracy" in found) == ("calibration" in found) == has_head
    if has_head:
        assert sum(bin["tokens"] for bin in found["calibration"]) == len(targets)
        share = sum(bin["copyable"] * bin["tokens"] for bin in found["calibration"]) / len(targets)
        np.testing.assert_allclose(share, mean(y in context for _, y, context in targets), rtol=1e-6)
        gate = sum(bin["gate"] * bin["tokens"] for bin in found["calibration"]) / len(targets)
        np.testing.assert_allclose(gate, found["gate"], rtol=1e-6)


def test_sources_point_at_earlier_occurrences_of_the_target(measured):
    setup, params, batches, _ = measured
    report = jax.jit(lambda b: token_report(setup.definition, params, b))(batches[0])
    source, targets, tokens = (np.asarray(x) for x in (report.source, batches[0].targets, batches[0].tokens))
    segments = np.asarray(batches[0].segment_ids)
    for b, t in np.ndindex(source.shape):
        j = source[b, t]
        if j >= 0:
            assert j <= t
            assert tokens[b, j] == targets[b, t]
            assert segments[b, j] == segments[b, t]
            # Without a gate, a score may also lower a token's probability.
            assert report.responsibility[b, t] > 0 or setup.config.model.copy_head.gate == "context_logits"
        else:
            assert report.responsibility[b, t] == 0
    assert (source >= 0).any() == (setup.config.model.copy_head is not None)


def test_the_copy_heads_own_choice_is_its_most_probable_token(measured):
    """All occurrences of a token together, by a search through the candidates."""
    setup, params, batches, _ = measured
    batch = jax.tree.map(np.asarray, batches[0])
    report = jax.jit(lambda b: token_report(setup.definition, params, b))(batches[0])
    outputs = jax.jit(lambda b: setup.definition.bind(params)(*b))(
        (batch.tokens, batch.segment_ids, batch.positions, batch.copyable)
    )
    if outputs.pointer is None:
        assert not np.asarray(report.copy_correct).any()
        return
    copy = jax.tree.map(np.asarray, copy_distribution(outputs.logits, outputs.pointer))
    for b, t in np.ndindex(batch.tokens.shape):
        mass = {}
        for j in np.flatnonzero(copy.valid[b, t]):
            token = int(batch.tokens[b, j])
            mass[token] = mass.get(token, 0.0) + float(np.exp(copy.log_prob.value[b, t, j], dtype=np.float64))
        best = sorted(mass.values())[-2:]
        if len(best) == 2 and best[1] - best[0] < 1e-6:
            continue  # a tie of rounding may fall to either side
        choice = max(mass, key=mass.get) if mass else None
        assert report.copy_correct[b, t] == (choice == batch.targets[b, t])


def test_the_report_does_not_depend_on_how_positions_are_cut(measured, monkeypatch):
    setup, params, batches, _ = measured
    whole = jax.jit(lambda b: token_report(setup.definition, params, b))(batches[0])
    monkeypatch.setattr("cplm_jax.evaluation.copying.positions_at_a_time", lambda *_: 9)
    cut = jax.jit(lambda b: token_report(setup.definition, params, b))(batches[0])
    for name, value in whole._asdict().items():
        np.testing.assert_allclose(getattr(cut, name), value, rtol=1e-5, atol=1e-5, err_msg=name)
