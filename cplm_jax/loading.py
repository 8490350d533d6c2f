"""Opens a trained model: from a run directory or from an export."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from cplm_jax.config import Config, MeshConfig
from cplm_jax.config_loading import load_config
from cplm_jax.data.tokenizer import Tokenizer
from cplm_jax.errors import UserError
from cplm_jax.interop.export import is_export, restore_export
from cplm_jax.models.decoder import Decoder, ModelDefinition, define_model
from cplm_jax.sharding import check_batches_divisible, check_divisible, make_mesh, shardings
from cplm_jax.training.checkpointing import Checkpointer
from cplm_jax.training.run_directory import RunDirectory
from cplm_jax.training.setup import resolve_vocabulary


class LoadedModel(NamedTuple):
    """A model with its parameters, tokenizer and history.

    Attributes:
      path: the run directory or export it came from.
      config: the configuration it was trained with.
      tokenizer: its tokenizer.
      definition: the model without parameters.
      params: nested dict of float32 parameters.
      mesh: the devices the parameters lie on.
      step: number of optimizer steps it has seen.
      tokens: number of target tokens it has seen.
      details: facts of the run (see :class:`~cplm_jax.training.run_directory.RunDirectory`).
    """

    path: Path
    config: Config
    tokenizer: Tokenizer
    definition: ModelDefinition
    params: dict[str, Any]
    mesh: Mesh
    step: int
    tokens: int
    details: dict[str, Any]

    @property
    def model(self) -> Decoder:
        """The model as a Flax module."""
        return self.definition.bind(self.params)


def load_model(path: str | Path, mesh: Mesh | None = None) -> LoadedModel:
    """Loads the newest parameters of a run directory, or an export.

    Args:
      path: a run directory (``RUN``) or what ``cplm export`` wrote.
      mesh: devices to place parameters on; one device if ``None``.

    Raises:
      UserError: if the path holds neither, or what it holds is damaged, or if the mesh does not split the
        model or its evaluation batches evenly.
    """
    run = RunDirectory(path)
    if not os.path.isdir(run.path):
        raise UserError(f"checkpoint {path}: no such folder; give a run directory or an export")
    exported = is_export(run.path)
    if not exported and not run.has_checkpoints():
        raise UserError(
            f"checkpoint {path}: neither a run with checkpoints nor an export; give the run_dir of a "
            "training, or what `cplm export` wrote"
        )
    for needed in (run.config_file, run.tokenizer_file, run.details_file):
        if not needed.exists():
            raise UserError(
                f"checkpoint {path}: {needed.name} is missing; restore the file, or use another run directory"
            )
    config = load_config([str(run.config_file)])
    tokenizer = Tokenizer.load(run.tokenizer_file)
    details = run.details()
    if details["tokenizer_sha256"] != tokenizer.sha256:
        raise UserError(
            f"{run.tokenizer_file}: not the tokenizer this model was trained with; restore the file"
        )
    config = resolve_vocabulary(config, tokenizer.size)
    definition = define_model(config.model)
    if mesh is None:
        mesh = make_mesh(MeshConfig(data=1))
    check_divisible(definition.logical_axes, definition.shapes, mesh)
    check_batches_divisible(config, mesh, training=False)
    abstract = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        definition.shapes,
        shardings(definition.logical_axes, mesh),
    )
    if exported:
        params, step, tokens = restore_export(run.path, abstract, details)
    else:
        checkpointer = Checkpointer(run.checkpoints, keep=None)
        params, step, tokens = checkpointer.restore_params(abstract)
        checkpointer.close()
    return LoadedModel(run.path, config, tokenizer, definition, params, mesh, step, tokens, details)
