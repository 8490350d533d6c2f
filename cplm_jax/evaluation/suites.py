"""``eval.py``: the suites, run on a model, as a table and as JSON."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax

from cplm_jax.data.corpus import Corpus, load_corpus
from cplm_jax.data.pipeline import Batch, held_out_rows, validation_batches
from cplm_jax.errors import UserError, nearest
from cplm_jax.evaluation.copying import evaluate_copying
from cplm_jax.evaluation.validation import Validator
from cplm_jax.loading import LoadedModel

SUITES = ("validation", "copying")


def check_suites(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the suites' names. Raises :class:`UserError` for one that does not exist."""
    for name in names:
        if name not in SUITES:
            raise UserError(
                f"--suites: unknown suite {name!r}{nearest(name, SUITES)} (there are {', '.join(SUITES)})"
            )
    return tuple(dict.fromkeys(names))


def evaluation_corpus(model: LoadedModel) -> Corpus:
    """Loads the corpus the model was trained with.

    Raises:
      UserError: if its documents or its tokenizer are not the ones of the run.
    """
    corpus = load_corpus(model.config.data)
    if corpus.tokenizer.sha256 != model.tokenizer.sha256:
        raise UserError(
            f"the tokenizer made from the configuration of {model.path} is not the model's; its corpus or "
            "data.tokenizer changed since the run"
        )
    if corpus.fingerprint != model.details.get("corpus_fingerprint"):
        raise UserError(f"the documents of data.paths changed since {model.path} was trained")
    return corpus


def held_out_batches(model: LoadedModel, corpus: Corpus) -> Iterator[Batch]:
    """Yields the validation batches of the run, as training used them."""
    config = model.config
    rows = held_out_rows(corpus, config)
    return validation_batches(rows, config.evaluation.batch_size, config.evaluation.batches, model.mesh)


def evaluate(
    model: LoadedModel, suites: Sequence[str] = SUITES, corpus: Corpus | None = None
) -> dict[str, Any]:
    """Runs suites on a model.

    Args:
      model: the model.
      suites: names out of :data:`SUITES`.
      corpus: the model's corpus, if it is loaded already.

    Returns:
      ``{"checkpoint": ..., "step": ..., "tokens": ..., suite: {metric: value}}``.
    """
    corpus = evaluation_corpus(model) if corpus is None else corpus
    result: dict[str, Any] = {"checkpoint": str(model.path), "step": model.step, "tokens": model.tokens}
    vocabulary_size = model.config.model.vocabulary_size or 0
    for suite in check_suites(suites):
        batches = held_out_batches(model, corpus)
        if suite == "validation":
            validator = Validator(
                model.definition, model.mesh, corpus.tokenizer.byte_lengths(vocabulary_size)
            )
            result[suite] = validator(model.params, batches)
        else:
            with jax.set_mesh(model.mesh):
                result[suite] = evaluate_copying(model.definition, model.params, batches)
    return result


def table(result: dict[str, Any]) -> str:
    """Returns the figures of :func:`evaluate` as an aligned text table."""
    lines = [f"{result['checkpoint']} at step {result['step']:,} ({result['tokens']:,} target tokens)"]
    for suite in SUITES:
        if suite not in result:
            continue
        lines.append(f"\n{suite}")
        for name, value in result[suite].items():
            if name == "calibration":
                lines.append("  gate calibration: mean gate, share in context, tokens")
                lines += [f"    {b['gate']:8.3f} {b['copyable']:8.3f} {b['tokens']:10,}" for b in value]
            else:
                lines.append(
                    f"  {name:28}{value:12,}" if isinstance(value, int) else f"  {name:28}{value:12.4f}"
                )
    return "\n".join(lines)
