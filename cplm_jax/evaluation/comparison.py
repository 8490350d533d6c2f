"""Two finished runs on the same batches, side by side: the facts of ``cplm compare``, not their layout."""

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from cplm_jax.config import FREE_TO_CHANGE, Config
from cplm_jax.config_loading import differences, flatten, load_config, to_dict
from cplm_jax.data.corpus import Corpus
from cplm_jax.data.packing import PackedRows, Rows
from cplm_jax.data.pipeline import Batch, held_out_rows
from cplm_jax.errors import UserError
from cplm_jax.evaluation.copying import token_report
from cplm_jax.evaluation.suites import evaluate, evaluation_corpus
from cplm_jax.interop.export import is_export
from cplm_jax.loading import LoadedModel, load_model
from cplm_jax.training.run_directory import RunDirectory, read_rows

# With these, the documents and the tokenizer equal, two runs see the same batches in the same order.
_SAME = ("seed", "data.sequence_length", "train.steps", "train.batch_size", "model.vocabulary_size")

EXCERPTS, EXCERPT_TOKENS, SHORTEST_EXCERPT, ROWS_LOOKED_AT, COPYABLE_SHARE = 3, 200, 32, 200, 0.5


@dataclass(frozen=True)
class Point:
    """A row of metrics.jsonl: losses in nats per target token after ``tokens`` target tokens.

    Only validations have the last two, and those not where they are means over no token.
    """

    step: int
    tokens: int
    loss: float
    loss_in_context: float | None = None
    loss_novel: float | None = None


@dataclass(frozen=True)
class RunFigures:
    """One of the two runs, in the folder ``path``.

    Attributes:
      name: name of its folder, with as many parents as it takes to tell the two apart.
      config: its configuration, as nested dicts.
      details: what run.json says: parameters, compile time, memory, device, versions, corpus.
      tokens: target tokens trained on.
      step_seconds, tokens_per_second: medians of the training rows; ``None`` if there is none.
      metrics: figures of both suites for the last checkpoint, measured anew.
      calibration: bins of the gate, as the copying suite returns them; empty for a baseline.
      train, validation: the curves that training wrote.
    """

    name: str
    path: str
    config: dict[str, Any]
    details: dict[str, Any]
    tokens: int
    step_seconds: float | None
    tokens_per_second: float | None
    metrics: dict[str, float]
    calibration: tuple[dict[str, float], ...]
    train: tuple[Point, ...]
    validation: tuple[Point, ...]

    @property
    def copy_head(self) -> dict[str, Any] | None:
        """The copy head's configuration; ``None`` for a baseline."""
        return self.config["model"]["copy_head"]


@dataclass(frozen=True)
class Reach:
    """When a run reached ``loss``.

    Attributes:
      tokens: target tokens after which it first was, interpolated; ``None`` if it never was.
      share: ``tokens`` over all tokens of the other run.
      at_first_validation: the first validation was there already, so ``tokens`` is an upper bound.
      resolution: tokens between the two validations interpolated.
    """

    loss: float
    tokens: float | None
    share: float | None
    at_first_validation: bool
    resolution: int


@dataclass(frozen=True)
class Difference:
    """A configuration field that differs; ``may_change_result`` is false for mere bookkeeping."""

    field: str
    reference: Any
    candidate: Any
    may_change_result: bool


@dataclass(frozen=True)
class Reading:
    """What a run made of each token of an excerpt, given those before it; all of the excerpt's length.

    ``source`` is the index, within the excerpt, of the earlier occurrence with the highest copy
    score. An entry is ``None`` where there is nothing to say, as at the first token.
    """

    probability: tuple[float | None, ...]
    gate: tuple[float | None, ...]
    responsibility: tuple[float | None, ...]
    source: tuple[int | None, ...]


@dataclass(frozen=True)
class Excerpt:
    """Held-out text of a document, token by token, and what the runs made of it.

    Attributes:
      offset: index of its first token in the document, counting BOS.
      copyable: share of its targets that occur earlier in it.
      pieces: the bytes each token stands for; none for BOS and EOS.
      in_context: whether each token occurs earlier in it.
    """

    document: str
    offset: int
    copyable: float
    pieces: tuple[bytes, ...]
    in_context: tuple[bool, ...]
    reference: Reading
    candidate: Reading


@dataclass(frozen=True)
class Comparison:
    """Everything a report says.

    Attributes:
      reference: the baseline, if exactly one of the runs is one; else the run named first.
      candidate: the other.
      target_tokens, documents: how many held-out targets, of how many documents, were measured.
      candidate_reach, reference_reach: when each reached the other's final validation loss.
      differences: fields of the configuration; those that may change the result come first.
    """

    reference: RunFigures
    candidate: RunFigures
    target_tokens: int
    documents: int
    candidate_reach: Reach
    reference_reach: Reach
    differences: tuple[Difference, ...]
    excerpts: tuple[Excerpt, ...]


class _Opened(NamedTuple):
    name: str
    run: RunDirectory
    config: Config
    details: dict[str, Any]
    rows: dict[str, list[dict[str, Any]]]
    checkpoint: int  # step of the newest


class _Passage(NamedTuple):
    document: int
    offset: int
    row: Rows  # a document's part in a row, cut to the length of an excerpt
    in_context: np.ndarray
    copyable: float


def compare(run_a: Path, run_b: Path, report: Callable[[str], None] = lambda _: None) -> Comparison:
    """Measures two finished runs on their held-out text and puts them side by side.

    Args:
      run_a: a run directory.
      run_b: another; a baseline may come first or last.
      report: called with lines of progress.

    Raises:
      UserError: if one is no run directory, or naming all for which they cannot be compared: not
        finished, or not trained and validated on the same batches.
    """
    opened = _open_both(run_a, run_b)
    _check_comparable(*opened)
    opened.sort(key=lambda o: o.config.model.copy_head is not None)  # a baseline first
    corpus: Corpus | None = None
    figures, readings = [], []
    for o in opened:
        report(f"measuring {o.name} on its held-out text")
        model = load_model(o.run.path)
        if corpus is None:
            corpus = evaluation_corpus(model)
            documents, passages = _held_out(o.config, corpus)
        figures.append(_figures(o, evaluate(model, corpus=corpus)))
        readings.append(_read(model, passages))
        del model  # two need not fit at once
    assert corpus is not None
    excerpts = [
        Excerpt(
            document=corpus.validation.label(p.document),
            offset=p.offset,
            copyable=p.copyable,
            pieces=tuple(corpus.tokenizer.decode_bytes([t]) for t in p.row["tokens"].tolist()),
            in_context=tuple(p.in_context.tolist()),
            reference=of_reference,
            candidate=of_candidate,
        )
        for p, of_reference, of_candidate in zip(passages, *readings, strict=True)
    ]
    reference, candidate = figures
    return Comparison(
        reference,
        candidate,
        int(candidate.metrics["target_tokens"]),
        documents,
        tokens_to_reach(candidate.validation, reference.validation[-1].loss, reference.tokens),
        tokens_to_reach(reference.validation, candidate.validation[-1].loss, candidate.tokens),
        _differences(opened[0].config, opened[1].config),
        tuple(excerpts),
    )


def tokens_to_reach(points: Sequence[Point], loss: float, total: int) -> Reach:
    """Returns when a run first reached ``loss``, interpolating linearly between validations.

    Args:
      points: the run's validations, at least one, in order.
      loss: the loss to reach.
      total: target tokens that :attr:`Reach.share` is a share of.
    """
    before = None
    for point in points:
        if point.loss <= loss:
            if before is None:
                return Reach(loss, point.tokens, point.tokens / total, True, point.tokens)
            part = (before.loss - loss) / (before.loss - point.loss)
            tokens = before.tokens + part * (point.tokens - before.tokens)
            return Reach(loss, tokens, tokens / total, False, point.tokens - before.tokens)
        before = point
    return Reach(loss, None, None, False, points[-1].tokens - (points[-2].tokens if len(points) > 1 else 0))


def _open_both(run_a: Path, run_b: Path) -> list[_Opened]:
    paths = [RunDirectory(p).path.resolve() for p in (run_a, run_b)]
    if paths[0] == paths[1]:
        raise UserError(f"{run_a} and {run_b} are the same run; give two")
    depth = next(n for n in itertools.count(1) if paths[0].parts[-n:] != paths[1].parts[-n:])
    return [_open(path, "/".join(path.parts[-depth:])) for path in paths]


def _open(path: Path, name: str) -> _Opened:
    run = RunDirectory(path)
    if not os.path.isdir(path):
        raise UserError(f"{path}: no such folder; give the folder of a run (--run_dir of its training)")
    if is_export(path):
        raise UserError(f"{path}: an export has no metrics; give the run directory it was made from")
    for file in (run.config_file, run.details_file, run.metrics_file):
        if not file.exists():
            raise UserError(f"{path}: has no {file.name}; give the run directory of a finished training")
    rows: dict[str, list[dict[str, Any]]] = {"train": [], "validation": []}
    for row in read_rows(run.metrics_file):
        if not {"split", "tokens", "loss"} <= row.keys():
            raise UserError(f"{run.metrics_file}: the row of step {row['step']} has no split, tokens or loss")
        rows.setdefault(row["split"], []).append(row)
    steps = [int(p.name) for p in run.checkpoints.glob("*") if p.name.isdigit()]
    return _Opened(name, run, load_config([str(run.config_file)]), run.details(), rows, max(steps, default=0))


def _check_comparable(a: _Opened, b: _Opened) -> None:
    problems = []
    for o in (a, b):
        steps, validations = o.config.train.steps, o.rows["validation"]
        if o.checkpoint < steps:
            problems.append(f"{o.name} is not finished: it was saved at step {o.checkpoint} of {steps}")
        elif not validations or validations[-1]["step"] != steps:
            problems.append(f"{o.name} has no validation of step {steps}, its last, in metrics.jsonl")
    different = {"corpus_fingerprint": "documents, or their split,", "tokenizer_sha256": "tokenizers"}
    for key, what in different.items():
        x, y = (str(o.details.get(key)) for o in (a, b))
        if x != y:
            problems.append(f"the {what} differ: {key} is {x[:12]} in {a.name}, {y[:12]} in {b.name}")
    fields = [*_SAME, "evaluation.batches"]
    if a.config.evaluation.batches is not None:  # else every held-out token counts once, in whatever batches
        fields.append("evaluation.batch_size")
    values = {f: (flatten(a.config)[f], flatten(b.config)[f]) for f in fields}
    problems += [f"{f} is {x} in {a.name}, {y} in {b.name}" for f, (x, y) in values.items() if x != y]
    if problems:
        problems.append("compare two finished runs with the same documents, tokenizer, batches and steps")
        raise UserError("\n  ".join([f"{a.name} and {b.name} cannot be compared:", *problems]))


def _differences(reference: Config, candidate: Config) -> tuple[Difference, ...]:
    heads = [to_dict(c)["model"]["copy_head"] for c in (reference, candidate)]
    one_head = heads.count(None) == 1
    changed = differences(reference, candidate, ["run_dir", *(["model.copy_head"] if one_head else [])])
    may_change = differences(reference, candidate, FREE_TO_CHANGE)
    found = [Difference(field, *values, field in may_change) for field, values in changed.items()]
    if one_head:
        found.append(Difference("model.copy_head", heads[0], heads[1], True))
    return tuple(sorted(found, key=lambda d: (not d.may_change_result, d.field)))


def _figures(o: _Opened, result: dict[str, Any]) -> RunFigures:
    measured = {**result["copying"], **result["validation"]}

    def curve(split: str) -> tuple[Point, ...]:
        names = [f.name for f in dataclasses.fields(Point)]
        return tuple(Point(**{name: row[name] for name in names if name in row}) for row in o.rows[split])

    def median(name: str) -> float | None:
        values = [row[name] for row in o.rows["train"] if name in row]
        return float(np.median(values)) if values else None

    return RunFigures(
        name=o.name,
        path=str(o.run.path),
        config=to_dict(o.config),
        details=o.details,
        tokens=o.rows["validation"][-1]["tokens"],
        step_seconds=median("step_seconds"),
        tokens_per_second=median("tokens_per_second"),
        calibration=tuple(measured.pop("calibration", ())),
        metrics=measured,
        train=curve("train"),
        validation=curve("validation"),
    )


def _held_out(config: Config, corpus: Corpus) -> tuple[int, list[_Passage]]:
    """Counts the documents validation reads and picks the excerpts, without looking at a model.

    The rows are cut into stretches; each gives its first document part, of a document not shown yet,
    of whose targets :data:`COPYABLE_SHARE` occur earlier in it; failing that, the nearest to it.
    """
    rows = held_out_rows(corpus, config)
    total, limit = rows.rows_per_epoch, config.evaluation.batches
    used = total if limit is None else min(total, limit * config.evaluation.batch_size)
    measured = np.arange(used) * total // used  # as validation_batches takes them
    lengths = corpus.validation.lengths.astype(np.int64) + 1  # predictions: of each token, and of EOS
    starts = np.cumsum(lengths) - lengths
    first, last = starts // rows.sequence_length, (starts + lengths - 1) // rows.sequence_length
    read = np.searchsorted(measured, first, "left") < np.searchsorted(measured, last, "right")
    chosen: list[_Passage] = []
    for stretch in np.array_split(measured, EXCERPTS):
        shown = {p.document for p in chosen}
        ranked = [
            (len(p.in_context) < SHORTEST_EXCERPT, p.document in shown, -min(p.copyable, COPYABLE_SHARE), p)
            for number in stretch[:ROWS_LOOKED_AT]
            for p in _parts(rows, int(number), starts)
        ]
        chosen += [best[-1] for best in sorted(ranked, key=lambda entry: entry[:-1])[:1]]
    return int(np.sum(read)), chosen


def _parts(rows: PackedRows, number: int, starts: np.ndarray) -> Iterator[_Passage]:
    row = {name: values[0] for name, values in rows.rows([number]).items()}
    for segment in np.flatnonzero(np.bincount(row["segment_ids"])[1:] > 1) + 1:  # those with a target
        where = np.flatnonzero(row["segment_ids"] == segment)
        place = number * rows.sequence_length + int(where[0])
        document = int(np.searchsorted(starts, place, side="right")) - 1
        part = {name: values[where[:EXCERPT_TOKENS]] for name, values in row.items()}
        _, first, inverse = np.unique(part["tokens"], return_index=True, return_inverse=True)
        # Control tokens only open and close a document, so they never repeat within it.
        in_context = first[inverse] < np.arange(len(inverse))
        yield _Passage(
            document, place - int(starts[document]), part, in_context, float(in_context[1:].mean())
        )


def _read(model: LoadedModel, passages: list[_Passage]) -> list[Reading]:
    longest = max((len(p.in_context) for p in passages), default=0)
    columns: dict[str, Any] = {
        name: np.stack([np.pad(p.row[name], (0, longest - len(p.in_context))) for p in passages])
        for name in Batch._fields
    }
    with jax.set_mesh(model.mesh):
        report_of = jax.jit(functools.partial(token_report, model.definition))
        report = jax.device_get(report_of(model.params, Batch(**columns)))
    figures: dict[str, Any] = {
        "probability": np.exp(report.log_prob),
        "gate": report.gate,
        "responsibility": report.responsibility,
        "source": np.where(report.source < 0, None, report.source),
    }
    return [  # position t is about token t + 1
        Reading(**{name: (None, *x[i, : len(p.in_context) - 1].tolist()) for name, x in figures.items()})
        for i, p in enumerate(passages)
    ]
