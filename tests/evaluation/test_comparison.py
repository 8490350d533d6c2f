"""The comparison of two runs, and its report."""

import dataclasses
import functools
import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

from cplm_jax.cli import compare_command, run
from cplm_jax.config_loading import load_config
from cplm_jax.data.pipeline import Batch, held_out_rows
from cplm_jax.data.tokenizer import Tokenizer
from cplm_jax.errors import UserError
from cplm_jax.evaluation import report as reports
from cplm_jax.evaluation.comparison import (
    EXCERPT_TOKENS,
    Comparison,
    Point,
    _held_out,
    compare,
    tokens_to_reach,
)
from cplm_jax.evaluation.copying import token_report
from cplm_jax.evaluation.suites import evaluation_corpus, held_out_batches
from cplm_jax.loading import load_model
from cplm_jax.training.loop import train
from cplm_jax.training.run_directory import read_rows
from tests.tiny import tiny_settings, write_corpus, write_yaml

HOSTILE = "</script><script>alert(\"1\")</script> & 'x' <b>\n\tif a < b:\r\n    日本語 😀 e\u0301 \u202e$x$\n"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A baseline and a CPLM, trained on the same batches."""
    folder = tmp_path_factory.mktemp("comparison")
    held_out = write_corpus(folder / "held_out", documents=6, seed=1)
    (held_out / "000.txt").write_text(HOSTILE * 12, encoding="utf-8")
    settings = tiny_settings(write_corpus(folder / "corpus"), folder / "cache")
    settings["data"]["validation_paths"] = str(held_out / "*.txt")
    settings["evaluation"] = {"every": 5, "batches": 2, "batch_size": 8}
    for name in ("baseline", "cplm"):
        file = write_yaml(folder / f"{name}.yaml", {**settings, "run_dir": str(folder / "runs" / name)})
        train(load_config([str(file)], ["--model.copy_head", "null"] if name == "baseline" else []))
    return folder / "runs"


@pytest.fixture(scope="module")
def comparison(runs) -> Comparison:
    return compare(runs / "cplm", runs / "baseline")


@pytest.fixture(scope="module")
def report(comparison, tmp_path_factory) -> Path:
    return reports.write_report(comparison, tmp_path_factory.mktemp("report") / "made" / "for_it")


@pytest.fixture
def copies(runs, tmp_path):
    """The same runs, to be edited."""
    for name in ("baseline", "cplm"):
        shutil.copytree(runs / name, tmp_path / name)
    return tmp_path


def edit_config(run_dir, **changes):
    file = run_dir / "config.yaml"
    settings = yaml.safe_load(file.read_text())
    for path, value in changes.items():
        *sections, leaf = path.split("__")
        functools.reduce(dict.__getitem__, sections, settings)[leaf] = value
    file.write_text(yaml.safe_dump(settings))


class Page(HTMLParser):
    """Checks that tags are balanced, and collects attributes, text and the tokens of each excerpt."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.words, self.excerpts = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in ("meta", "img"):
            self.open.append(tag)
        if tag == "pre":
            self.excerpts.append([])
        if tag == "span" and "pre" in self.open:
            self.excerpts[-1].append([dict(attributes), ""])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "pre" in self.open:
            assert "span" in self.open, "text of an excerpt that belongs to no token"
            self.excerpts[-1][-1][1] += data
        elif "script" not in self.open and "style" not in self.open:
            self.words.append(data)


@pytest.fixture(scope="module")
def page(report) -> Page:
    return Page(report.read_text(encoding="utf-8"))


def test_writes_every_file(report):
    assert report.name == "report.html"
    assert {p.name for p in report.parent.iterdir()} == set(reports.FILES)
    for image in ("loss.png", "context.png", "calibration.png", "text.png"):
        assert (report.parent / image).read_bytes().startswith(b"\x89PNG")
        assert f"]({image})" in (report.parent / "report.md").read_text(encoding="utf-8")


def test_page_needs_nothing_from_elsewhere(page, report):
    for name, value in page.attributes:
        if name in ("src", "href", "srcset", "data", "action"):
            assert value.startswith("data:image/svg+xml;base64,"), (name, value[:60])
    assert not re.search(r"://|url\(|@import", report.read_text(encoding="utf-8"))


def test_page_is_accessible(page):
    assert page.tags.count("h1") == 1
    assert ("lang", "en") in page.attributes
    assert ("name", "viewport") in page.attributes
    assert page.tags.count("img") == sum(name == "alt" and bool(value) for name, value in page.attributes)
    assert page.tags.count("th") == sum(name == "scope" for name, _ in page.attributes)


def test_tokens_point_at_equal_tokens_before_them(page, comparison):
    assert len(page.excerpts) == len(comparison.excerpts) == 3
    pointing = 0
    for tokens in page.excerpts:
        assert 2 <= len(tokens) <= EXCERPT_TOKENS
        assert "data-p" not in tokens[0][0]
        for i, (attributes, text) in enumerate(tokens[1:], start=1):
            assert len(attributes["data-p"].split()) == 2
            if "data-s" in attributes:
                source = int(attributes["data-s"])
                assert 0 <= source < i
                assert tokens[source][1] == text
                pointing += 1
            else:
                assert float(attributes["data-r"]) == 0
    assert pointing > 20


def test_held_out_text_survives_whole(page, comparison):
    assert "000.txt" in {e.document for e in comparison.excerpts}
    for tokens, excerpt in zip(page.excerpts, comparison.excerpts, strict=True):
        shown = "".join(text for _, text in tokens)
        if excerpt.document == "000.txt":
            assert shown.startswith("⟨start⟩" + HOSTILE[: HOSTILE.index("\r")] + "␍\n    ·")
        else:
            written = b"".join(excerpt.pieces).decode("utf-8")
            assert shown.replace("⟨start⟩", "").replace("⟨end⟩", "") == written
    assert page.tags.count("script") == 1
    assert "b" not in page.tags[page.tags.index("pre") :]


def test_hostile_text(runs):
    tokenizer = Tokenizer.load(runs / "cplm" / "tokenizer.model")
    texts = reports.token_texts([tokenizer.decode_bytes([t]) for t in tokenizer.encode(HOSTILE)])
    expected = HOSTILE.replace("\r", "␍").replace("\u202e", "⟨U+202E⟩")
    assert "".join(texts).replace("·", "") == expected


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_documents_are_those_that_validation_reads(runs, limit):
    model = load_model(runs / "cplm")
    evaluation = dataclasses.replace(model.config.evaluation, batches=limit, batch_size=1)
    model = model._replace(config=dataclasses.replace(model.config, evaluation=evaluation))
    corpus, length = evaluation_corpus(model), model.config.data.sequence_length
    rows = held_out_rows(corpus, model.config)
    numbers = {rows.rows([n])["tokens"].tobytes(): n for n in range(rows.rows_per_epoch)}
    owners = np.repeat(np.arange(len(corpus.validation)), corpus.validation.lengths + 1)
    read = set()
    for batch in held_out_batches(model, corpus):
        number = numbers[np.asarray(batch.tokens[0]).tobytes()]
        read.update(owners[number * length + np.flatnonzero(batch.loss_mask[0])].tolist())
    assert _held_out(model.config, corpus)[0] == len(read)


def test_excerpts_are_read_as_within_their_rows(comparison, runs):
    """An excerpt is cut out of its row; that must not change what the model makes of it."""
    model = load_model(runs / "cplm")
    corpus, length = evaluation_corpus(model), model.config.data.sequence_length
    rows = held_out_rows(corpus, model.config)
    names = [corpus.validation.label(i) for i in range(len(corpus.validation))]
    report_of = jax.jit(functools.partial(token_report, model.definition))
    for excerpt in comparison.excerpts:
        document = names.index(excerpt.document)
        place = int((corpus.validation.lengths[:document] + 1).sum()) + excerpt.offset
        number, first = divmod(place, length)
        batch = Batch(**{name: rows.rows([number])[name] for name in Batch._fields})
        with jax.set_mesh(model.mesh):
            whole = report_of(model.params, batch)
        here = slice(first, first + len(excerpt.pieces) - 1)
        assert bool(np.all(batch.loss_mask[0, here]))
        reading = excerpt.candidate
        np.testing.assert_allclose(reading.probability[1:], np.exp(whole.log_prob[0, here]), rtol=1e-4)
        np.testing.assert_allclose(reading.gate[1:], whole.gate[0, here], rtol=1e-4)
        np.testing.assert_allclose(reading.responsibility[1:], whole.responsibility[0, here], atol=1e-5)
        sources = [-1 if s is None else s + first for s in reading.source[1:]]
        assert sources == whole.source[0, here].tolist()
        assert excerpt.in_context[1:] == tuple(whole.in_context[0, here].tolist())


def test_json_has_the_runs_numbers(report, runs):
    data = json.loads((report.parent / "report.json").read_text(), parse_constant=pytest.fail)  # no NaN
    for role, name in (("reference", "baseline"), ("candidate", "cplm")):
        last = [r for r in read_rows(runs / name / "metrics.jsonl") if r["split"] == "validation"][-1]
        figures = data[role]
        assert figures["name"] == name
        assert figures["validation"][-1]["loss"] == last["loss"]
        assert list(figures["metrics"]) == list(reports.METRICS)
        for key in ("loss", "bits_per_byte", "loss_in_context", "loss_novel", "fraction_in_context"):
            assert figures["metrics"][key] == pytest.approx(last[key], rel=1e-5)
        parts = figures["metrics"]["loss_novel_detection"] + figures["metrics"]["loss_novel_identity"]
        assert parts == pytest.approx(figures["metrics"]["loss_novel"], rel=1e-4)
        assert (
            figures["costs"]["parameters"] == json.loads((runs / name / "run.json").read_text())["parameters"]
        )
        assert data["target_tokens"] == last["target_tokens"]
    assert (
        data["change"]["loss"] == data["candidate"]["metrics"]["loss"] - data["reference"]["metrics"]["loss"]
    )
    assert data["reference"]["metrics"]["copy_accuracy"] is None
    assert data["documents"] == 6
    assert [d["field"] for d in data["differences"]] == ["model.copy_head"]
    for excerpt in data["excerpts"]:
        lengths = {len(column) for role in ("reference", "candidate") for column in excerpt[role].values()}
        assert lengths == {len(excerpt["texts"])}


def test_report_states_the_figures(page, report, comparison):
    metrics = comparison.reference.metrics, comparison.candidate.metrics
    difference = abs(metrics[1]["loss"] - metrics[0]["loss"])
    for text in ("".join(page.words), (report.parent / "report.md").read_text(encoding="utf-8")):
        assert (
            f"cplm\N{RIGHT SINGLE QUOTATION MARK}s validation loss is {difference:.3f} nats per token" in text
        )
        assert f"{comparison.target_tokens:,} held-out target tokens of 6 documents" in text
        assert "on novel targets: " in text
        assert "One seed (0)" in text
        assert "is not public" in text
        for metric in ("loss", "loss_in_context", "loss_novel", "loss_novel_identity", "bits_per_byte"):
            assert all(f"{m[metric]:.4f}" in text for m in metrics), metric


def test_order_of_runs_does_not_matter(runs, comparison):
    other = compare(runs / "baseline", runs / "cplm")
    assert reports.as_json(other) == reports.as_json(comparison)


def test_two_runs_without_copy_head(comparison, tmp_path):
    reading = comparison.excerpts[0].reference
    twin = dataclasses.replace(comparison.reference, name="twin")
    excerpts = tuple(dataclasses.replace(e, candidate=reading) for e in comparison.excerpts)
    both = dataclasses.replace(comparison, candidate=twin, excerpts=excerpts, differences=())
    (tmp_path / "report.json").write_text(json.dumps({"format": reports.FORMAT}))
    (tmp_path / "calibration.png").write_bytes(b"of an earlier report")
    page = Page(reports.write_report(both, tmp_path).read_text(encoding="utf-8"))
    assert page.excerpts == []
    assert "Neither run has a copy head" in "".join(page.words)
    assert "the same to three decimals" in "".join(page.words)
    assert not (tmp_path / "calibration.png").exists()


def test_names_are_escaped(comparison):
    name = "<i>\"a\" & 'b'|*c*</i>"
    hostile = dataclasses.replace(comparison, candidate=dataclasses.replace(comparison.candidate, name=name))
    page = Page(reports.render_html(hostile))
    assert f"{name} against baseline" in "".join(page.words)
    assert "i" not in page.tags[: page.tags.index("pre")]
    assert "\\<i\\>\"a\" \\& 'b'\\|\\*c\\*\\</i\\>" in reports.render_markdown(hostile)


def test_undefined_numbers(comparison):
    metrics = {k: v for k, v in comparison.candidate.metrics.items() if "novel" not in k} | {"loss": math.nan}
    candidate = dataclasses.replace(comparison.candidate, metrics=metrics, step_seconds=None, details={})
    broken = dataclasses.replace(comparison, candidate=candidate)
    assert reports.as_json(broken)["candidate"]["metrics"]["loss"] is None
    assert reports.as_json(broken)["change"]["loss_novel"] is None
    assert "All targets are of one kind" in "".join(Page(reports.render_html(broken)).words)


def points(*losses):
    return [Point(step, 100 * step, loss) for step, loss in enumerate(losses, start=1)]


@pytest.mark.parametrize(
    ("losses", "tokens", "at_first", "resolution"),
    [
        ((4.0, 3.0, 2.0), 250.0, False, 100),
        ((4.0, 2.5), 200.0, False, 100),
        ((4.0, 3.0, 2.6), None, False, 100),
        ((2.0, 1.0), 100.0, True, 100),
        ((2.5,), 100.0, True, 100),
        ((3.0,), None, False, 100),
        ((4.0, 2.0, 3.0, 1.0), 175.0, False, 100),  # the first time counts
    ],
)
def test_tokens_to_reach(losses, tokens, at_first, resolution):
    reach = tokens_to_reach(points(*losses), 2.5, total=500)
    assert reach.tokens == tokens
    assert reach.share == (None if tokens is None else tokens / 500)
    assert (reach.at_first_validation, reach.resolution) == (at_first, resolution)


@pytest.mark.parametrize(
    ("pieces", "texts"),
    [
        ([b"", b"a", b""], ["⟨start⟩", "a", "⟨end⟩"]),
        (["é".encode()[:1], "é".encode()[1:], b"b"], ["·", "é", "b"]),
        (["語".encode()[2:], b"a"], ["\ufffd", "a"]),
        ([b"\xe8", b"a", b"\xe8"], ["·", "\ufffda", "·"]),
        ([b"\r\n\t\x00", "\u202e".encode()], ["␍\n\t␀", "⟨U+202E⟩"]),
        ([], []),
    ],
)
def test_token_texts(pieces, texts):
    assert reports.token_texts(pieces) == texts


@pytest.mark.parametrize(
    ("section", "value", "named"),
    [
        ("seed", 7, "seed is 0 in baseline, 7 in cplm"),
        ("data__sequence_length", 32, "data.sequence_length is 64"),
        ("train__batch_size", 4, "train.batch_size is 8"),
        ("train__steps", 10, "train.steps is 20"),
        ("evaluation__batches", 1, "evaluation.batches is 2"),
        ("evaluation__batch_size", 4, "evaluation.batch_size is 8"),
        ("model__vocabulary_size", 512, "model.vocabulary_size is 320"),
    ],
)
def test_refuses_other_settings(copies, section, value, named):
    edit_config(copies / "cplm", **{section: value})
    with pytest.raises(UserError, match=named):
        compare(copies / "baseline", copies / "cplm")


def test_refusal_names_all_that_differs(copies, capsys):
    edit_config(copies / "cplm", seed=7, train__batch_size=4, train__accumulation=2, mesh__fsdp=1)
    details = copies / "cplm" / "run.json"
    other = {"corpus_fingerprint": "other", "tokenizer_sha256": "another"}
    details.write_text(json.dumps(json.loads(details.read_text()) | other))
    edit_config(copies / "baseline", train__steps=25)
    assert run(compare_command, [str(copies / "cplm"), str(copies / "baseline")]) == 2
    message = capsys.readouterr().err
    for part in ("step 20 of 25", "seed is", "batch_size", "train.steps", "split, differ", "tokenizers"):
        assert part in message
    assert "accumulation" not in message
    assert not (copies / "report.html").exists()


def test_refuses_unusable_runs(copies):
    (copies / "export" / "params").mkdir(parents=True)
    for other, message in (
        ("export", "run directory"),
        ("nowhere", "no such folder"),
        ("baseline", "same run"),
    ):
        with pytest.raises(UserError, match=message):
            compare(copies / "baseline", copies / other)
    shutil.rmtree(copies / "cplm" / "checkpoints")
    with pytest.raises(UserError, match="cplm is not finished"):
        compare(copies / "baseline", copies / "cplm")
    for name in ("metrics.jsonl", "run.json", "config.yaml"):
        (copies / "cplm" / name).unlink()
        with pytest.raises(UserError, match=name):
            compare(copies / "baseline", copies / "cplm")


def test_output_folder(tmp_path, comparison):
    (tmp_path / "a").mkdir()
    assert reports.default_output(tmp_path / "a" / "x", tmp_path / "a" / "y") == tmp_path / "a"
    with pytest.raises(UserError, match="--output"):
        reports.default_output(tmp_path / "a" / "x", tmp_path / "y")
    (tmp_path / "a" / "loss.png").write_bytes(b"mine")
    with pytest.raises(UserError, match=r"loss\.png"):
        reports.write_report(comparison, tmp_path / "a")
    assert (tmp_path / "a" / "loss.png").read_bytes() == b"mine"
    with pytest.raises(UserError, match="no folder"):
        reports.check_output(tmp_path / "a" / "loss.png" / "below")
