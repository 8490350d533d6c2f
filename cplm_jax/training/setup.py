"""Everything that is checked and made before a run starts: devices, data, model."""

import dataclasses
import os
import platform
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from cplm_jax.config import Config, MeshConfig
from cplm_jax.data.corpus import Corpus, load_corpus
from cplm_jax.data.files import check_apart
from cplm_jax.data.mixing import MixedRows
from cplm_jax.data.packing import PackedRows
from cplm_jax.data.pipeline import make_rows
from cplm_jax.errors import UserError, first_line
from cplm_jax.models.decoder import ModelDefinition, define_model, parameter_count
from cplm_jax.sharding import check_batches_divisible, check_divisible, make_mesh


class Setup(NamedTuple):
    """What a run is made of; nothing here was compiled."""

    config: Config
    """With ``model.vocabulary_size`` resolved."""
    corpus: Corpus
    mesh: Mesh
    definition: ModelDefinition
    train_rows: MixedRows
    validation_rows: PackedRows

    def details(self) -> dict[str, Any]:
        """Returns facts of the run that are no configuration, for run.json."""
        train = [source.documents for source in self.corpus.sources]
        validation, rows = self.corpus.validation, self.train_rows
        return {
            "corpus_fingerprint": self.corpus.fingerprint,
            "tokenizer_sha256": self.corpus.tokenizer.sha256,
            "train_documents": sum(map(len, train)),
            "train_tokens": sum(documents.tokens for documents in train),
            "train_bytes": sum(documents.bytes for documents in train),
            "validation_documents": len(validation),
            "validation_tokens": validation.tokens,
            "validation_bytes": validation.bytes,
            "rows_per_epoch": sum(source.rows_per_epoch for source in rows.sources),
            "sources": [
                {
                    "name": source.name,
                    "documents": len(source.documents),
                    "tokens": source.documents.tokens,
                    "share_of_rows": float(share),
                    "rows_per_epoch": packed.rows_per_epoch,
                    "padding": packed.padding,
                }
                for source, share, packed in zip(self.corpus.sources, rows.shares, rows.sources, strict=True)
            ],
            "parameters": parameter_count(self.definition.shapes),
            "copy_head_parameters": parameter_count(self.definition.shapes.get("copy_head", {})),
            "device": jax.devices()[0].device_kind,
            "devices": self.mesh.size,
            "processes": jax.process_count(),
            "python": platform.python_version(),
            "versions": {
                name: version(name)
                for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")
            },
        }


def initialize_processes(config: MeshConfig) -> None:
    """Joins the processes of a multi-process run; must come before anything asks for devices.

    Reads JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID where they are set, and lets
    JAX find out otherwise (TPU pods, Slurm, MPI).

    Raises:
      UserError: if JAX cannot find the other processes.
    """
    if not config.distributed or jax.distributed.is_initialized():
        return
    count, number = os.environ.get("JAX_NUM_PROCESSES"), os.environ.get("JAX_PROCESS_ID")
    try:
        jax.distributed.initialize(
            coordinator_address=os.environ.get("JAX_COORDINATOR_ADDRESS"),
            num_processes=None if count is None else int(count),
            process_id=None if number is None else int(number),
        )
    except (ValueError, RuntimeError) as e:
        raise UserError(
            f"mesh.distributed = true, but the processes could not be joined ({first_line(e)}); set "
            "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, or mesh.distributed to false"
        ) from e


def set_up(config: Config, report: Callable[[str], None] = lambda _: None) -> Setup:
    """Checks a configuration against devices and data and makes all but the run directory.

    Args:
      config: the configuration.
      report: called with lines of progress.

    Raises:
      UserError: for anything that cannot work, before compilation.
    """
    initialize_processes(config.mesh)
    mesh = make_mesh(config.mesh)
    warning = slow_scatter_warning(mesh.devices.flat[0].platform, version("jaxlib"))
    if warning is not None:
        report(warning)
    written = {"data.cache_dir": config.data.cache_dir}
    if config.run_dir is not None:
        written["run_dir"] = config.run_dir
    for field, paths in (
        ("data.paths", config.data.paths),
        ("data.validation_paths", config.data.validation_paths),
    ):
        check_apart(paths, field, written)
    corpus = load_corpus(config.data, report)
    config = resolve_vocabulary(config, corpus.tokenizer.size)
    definition = define_model(config.model)
    check_divisible(definition.logical_axes, definition.shapes, mesh)
    check_batches_divisible(config, mesh)
    train_rows, validation_rows = make_rows(corpus, config)
    padding = float(np.dot(train_rows.shares, [source.padding for source in train_rows.sources]))
    if config.data.packing == "best_fit":
        report(f"packing: {padding:.2%} of the training positions are padding")
    return Setup(
        config=config,
        corpus=corpus,
        mesh=mesh,
        definition=definition,
        train_rows=train_rows,
        validation_rows=validation_rows,
    )


def slow_scatter_warning(platform: str, jaxlib: str) -> str | None:
    """Returns a warning about jaxlib 0.10.2 to 0.11.0's slow float32 scatter-add on GPUs (jax #38806)."""
    release = tuple(int(part) for part in jaxlib.split(".")[:3] if part.isdigit())
    if platform != "gpu" or not (0, 10, 2) <= release < (0, 11, 1):
        return None
    return (
        f"warning: jaxlib {jaxlib} adds float32 scatters slowly on GPUs, and the embedding's gradient is "
        "one; install jaxlib 0.11.1 or newer (Python 3.12)"
    )


def resolve_vocabulary(config: Config, tokenizer_size: int) -> Config:
    """Fills in ``model.vocabulary_size`` from the tokenizer.

    Raises:
      UserError: if the tokenizer has ids beyond the configured size.
    """
    size = config.model.vocabulary_size
    if size is None:
        size = tokenizer_size
    if size < tokenizer_size:
        raise UserError(
            f"model.vocabulary_size = {size}, but the tokenizer makes token ids up to {tokenizer_size - 1}; "
            f"set it to at least {tokenizer_size}, or to null"
        )
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocabulary_size=size))
