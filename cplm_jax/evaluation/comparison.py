"""Two finished runs on the same batches, side by side: the facts of ``cplm compare``, without their layout."""

import codecs
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from cplm_jax.config import FREE_TO_CHANGE, Config
from cplm_jax.config_loading import differences, flatten, load_config
from cplm_jax.data.corpus import Corpus
from cplm_jax.data.packing import PackedRows, Row
from cplm_jax.data.pipeline import Batch
from cplm_jax.data.tokenizer import Tokenizer
from cplm_jax.errors import UserError
from cplm_jax.evaluation.copying import TokenReport, token_report
from cplm_jax.evaluation.suites import evaluate, evaluation_corpus
from cplm_jax.interop.export import is_export
from cplm_jax.loading import LoadedModel, load_model
from cplm_jax.training.run_directory import RunDirectory, read_rows

# With these, the corpus and the tokenizer equal, two runs see the same batches in the same order.
SAME = ("seed", "data.sequence_length", "train.steps", "train.batch_size", "model.vocabulary_size")

METRICS = (
    *("loss", "bits_per_byte", "loss_in_context", "loss_novel", "loss_novel_detection", "loss_novel_identity"),
    *("fraction_in_context", "accuracy", "accuracy_in_context", "accuracy_novel", "copy_accuracy"),
    *("gate", "gate_in_context", "gate_novel", "responsibility", "responsibility_in_context"),
)
"""What is measured on held-out text, as the suites name it."""

EXCERPTS, EXCERPT_TOKENS, SHORTEST_EXCERPT = 3, 200, 32
ROWS_LOOKED_AT = 200
COPYABLE_SHARE = 0.5
PARTIAL = "\N{MIDDLE DOT}"
"""Shown for a token that ends inside a character; the token that completes the character shows it."""
_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")


@dataclass(frozen=True)
class Point:
    """A row of metrics.jsonl: losses in nats per target token after ``tokens`` target tokens.

    Only validations have the last two, and not where they are means over no token.
    """

    step: int
    tokens: int
    loss: float
    loss_in_context: float | None = None
    loss_novel: float | None = None


@dataclass(frozen=True)
class Cost:
    """What a run cost; ``None`` where it was not recorded.

    ``step_seconds`` and ``tokens_per_second`` are medians of the training rows; the bytes are the
    compiler's figures for the training step on one device.
    """

    parameters: int | None
    copy_head_parameters: int | None
    step_seconds: float | None
    tokens_per_second: float | None
    argument_bytes: int | None
    temporary_bytes: int | None
    compile_seconds: float | None
    device: str | None
    devices: int | None
    versions: dict[str, str] | None


@dataclass(frozen=True)
class RunFigures:
    """One of the two runs.

    Attributes:
      name: name of its folder, with as many parents as it takes to tell the two apart.
      copy_head: its configuration; ``None`` for a baseline.
      tokens: target tokens trained on.
      metrics: :data:`METRICS` of the last checkpoint, measured anew; ``None`` where undefined.
      calibration: bins of the gate (:class:`~cplm_jax.evaluation.copying.Calibration`); empty for a baseline.
      train, validation: the curves that training wrote.
    """

    name: str
    path: str
    copy_head: dict[str, Any] | None
    tokens: int
    metrics: dict[str, float | None]
    calibration: tuple[dict[str, float], ...]
    cost: Cost
    train: tuple[Point, ...]
    validation: tuple[Point, ...]


@dataclass(frozen=True)
class Reach:
    """When a run reached a loss.

    Attributes:
      loss: the loss.
      tokens: target tokens after which it was first reached, interpolated; ``None`` if it never was.
      share: ``tokens`` over all tokens of the other run.
      at_first_validation: the first validation was there already, so ``tokens`` is an upper bound.
      resolution: tokens between the validations interpolated.
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
class Shared:
    """What both runs have in common, and what they were measured on."""

    seed: int
    steps: int
    batch_size: int
    sequence_length: int
    vocabulary_size: int
    train_documents: int
    train_corpus_tokens: int
    epochs: float
    held_out_documents: int
    measured_documents: int
    measured_target_tokens: int


@dataclass(frozen=True)
class Reading:
    """What a run made of each token of an excerpt, given those before it.

    ``source`` is the index, within the excerpt, of the earlier occurrence with the highest copy
    score. An entry is ``None`` where there is nothing to say, as at the first token.
    """

    probability: tuple[float | None, ...]
    gate: tuple[float | None, ...]
    responsibility: tuple[float | None, ...]
    source: tuple[int | None, ...]


@dataclass(frozen=True)
class Excerpt:
    """Held-out text, token by token.

    Attributes:
      document: identifier of its document.
      offset: index of its first token in the document, BOS included.
      copyable: share of its targets that occur earlier in it.
      texts: what each token shows (:func:`token_texts`).
      in_context: whether each token occurs earlier in it; ``None`` at the first.
    """

    document: str
    offset: int
    copyable: float
    texts: tuple[str, ...]
    in_context: tuple[bool | None, ...]
    reference: Reading
    candidate: Reading


@dataclass(frozen=True)
class Comparison:
    """Everything the report says.

    Attributes:
      reference: the baseline, if exactly one of the runs is one; else the run named first.
      change: ``{metric: candidate - reference}``.
      candidate_reach: when the candidate reached the reference's final validation loss.
      reference_reach: the other way round.
    """

    reference: RunFigures
    candidate: RunFigures
    shared: Shared
    change: dict[str, float | None]
    candidate_reach: Reach
    reference_reach: Reach
    differences: tuple[Difference, ...]
    excerpts: tuple[Excerpt, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain dicts and lists for JSON; numbers that are not finite become ``None``."""
        return _plain(dataclasses.asdict(self))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _Opened(NamedTuple):
    """A run's small files."""

    name: str
    run: RunDirectory
    config: Config
    details: dict[str, Any]
    rows: dict[str, list[dict[str, Any]]]
    checkpoint: int


def compare(run_a: Path, run_b: Path, report: Callable[[str], None] = lambda message: None) -> Comparison:
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
    if opened[1].config.model.copy_head is None and opened[0].config.model.copy_head is not None:
        opened.reverse()
    corpus: Corpus | None = None
    figures, reports = [], []
    for o in opened:
        report(f"measuring {o.name} on its held-out text")
        model = load_model(o.run.path)
        if corpus is None:
            corpus = evaluation_corpus(model)
            shared, passages = _shared(o, corpus), _passages(o.config, corpus)
        result = evaluate(model, corpus=corpus)
        figures.append(_figures(o, result))
        reports.append(_read(model, passages))
        del model  # two models need not fit at once
    assert corpus is not None
    tokenizer, (reference, candidate) = corpus.tokenizer, figures
    return Comparison(
        reference,
        candidate,
        dataclasses.replace(shared, measured_target_tokens=result["validation"]["target_tokens"]),
        {m: _minus(candidate.metrics[m], reference.metrics[m]) for m in METRICS},
        tokens_to_reach(candidate.validation, reference.validation[-1].loss, reference.tokens),
        tokens_to_reach(reference.validation, candidate.validation[-1].loss, candidate.tokens),
        _differences(opened[0].config, opened[1].config),
        tuple(_excerpt(i, p, tokenizer, *reports) for i, p in enumerate(passages)),
    )


def _minus(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


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
    depth = 1
    while paths[0].parts[-depth:] == paths[1].parts[-depth:]:
        depth += 1
    opened, problems = [], []
    for path in paths:
        try:
            opened.append(_open(path, "/".join(path.parts[-depth:])))
        except UserError as e:
            problems.append(str(e))
    if problems:
        raise UserError("\n".join(problems))
    return opened


def _open(path: Path, name: str) -> _Opened:
    run = RunDirectory(path)
    if not path.is_dir():
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
            problems.append(f"{o.name} is not finished: its newest checkpoint is of step {o.checkpoint} of {steps}")
        elif not validations or validations[-1]["step"] != steps:
            problems.append(f"{o.name} has no validation of step {steps}, its last, in metrics.jsonl")
    for key, what in (("corpus_fingerprint", "documents, or their split,"), ("tokenizer_sha256", "tokenizers")):
        x, y = (str(o.details.get(key)) for o in (a, b))
        if x != y:
            problems.append(f"the {what} differ: {key} is {x[:12]} in {a.name}, {y[:12]} in {b.name}")
    fields = [*SAME, "evaluation.batches"]
    if a.config.evaluation.batches is not None:  # else every held-out token counts once, in whatever batches
        fields.append("evaluation.batch_size")
    left, right = flatten(a.config), flatten(b.config)
    problems += [f"{f} is {left[f]} in {a.name}, {right[f]} in {b.name}" for f in fields if left[f] != right[f]]
    if problems:
        raise UserError(
            f"{a.name} and {b.name} cannot be compared:\n  " + "\n  ".join(problems) + "\n"
            "compare two finished runs with the same documents, tokenizer, batches and steps"
        )


def _copy_head(config: Config) -> dict[str, Any] | None:
    head = config.model.copy_head
    return None if head is None else dataclasses.asdict(head)


def _differences(reference: Config, candidate: Config) -> tuple[Difference, ...]:
    heads, prefix = [_copy_head(c) for c in (reference, candidate)], "model.copy_head"
    one_head = None in heads and heads != [None, None]
    changed = differences(reference, candidate, ["run_dir", *([prefix] if one_head else [])])
    free = changed.keys() - differences(reference, candidate, FREE_TO_CHANGE).keys()
    found = [Difference(field, *values, field not in free) for field, values in changed.items()]
    if one_head:
        found.append(Difference(prefix, heads[0], heads[1], True))
    return tuple(sorted(found, key=lambda d: (not d.may_change_result, d.field)))


def _figures(o: _Opened, result: dict[str, Any]) -> RunFigures:
    measured = {**result["copying"], **result["validation"]}
    timed = {
        key: float(np.median(values)) if (values := [r[key] for r in o.rows["train"] if key in r]) else None
        for key in ("step_seconds", "tokens_per_second")
    }
    known = {**o.details, **o.details.get("memory_per_device", {}), **timed}
    fields = [f.name for f in dataclasses.fields(Point)]
    points = {
        split: tuple(Point(**{f: row[f] for f in fields if f in row}) for row in o.rows[split])
        for split in ("train", "validation")
    }
    return RunFigures(
        name=o.name,
        path=str(o.run.path),
        copy_head=_copy_head(o.config),
        tokens=points["validation"][-1].tokens,
        metrics={m: measured.get(m) for m in METRICS},
        calibration=tuple(measured.get("calibration", ())),
        cost=Cost(**{f.name: known.get(f.name) for f in dataclasses.fields(Cost)}),
        **points,
    )
