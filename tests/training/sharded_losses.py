"""Prints, as JSON, the losses of 20 steps on meshes of 8 fake devices.

Started by :func:`tests.fake_devices.run_on_devices` as
``python -m tests.training.sharded_losses FOLDER all|single [flags]``. With ``all`` it also saves
the state of one mesh and restores it onto another.
"""

import contextlib
import json
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

from cplm_jax.data.pipeline import TrainingBatches, validation_batches
from cplm_jax.evaluation.validation import Validator
from cplm_jax.training.checkpointing import Checkpointer, Progress
from cplm_jax.training.setup import set_up
from cplm_jax.training.step import Trainer
from tests.tiny import tiny_config

MESHES = {
    "single": {"data": 1},
    "data=8": {"data": 8},
    "fsdp=8": {"data": 1, "fsdp": 8},
    "tensor=4, data=2": {"data": 2, "tensor": 4},
    "data=2, fsdp=2, tensor=2": {"data": 2, "fsdp": 2, "tensor": 2},
    "data=2, sequence=4": {"data": 2, "sequence": 4},
    "fsdp=2, tensor=2, sequence=2": {"data": 1, "fsdp": 2, "tensor": 2, "sequence": 2},
}


def losses(folder, mesh, flags):
    mesh_flags = [word for axis, size in mesh.items() for word in (f"--mesh.{axis}", str(size))]
    setup = set_up(tiny_config(folder, *flags, *mesh_flags))
    train, data = setup.config.train, setup.config.data
    trainer = Trainer(setup.config, setup.definition, setup.mesh)
    state, step = trainer.init(), trainer.compile_step()
    batches = TrainingBatches(
        setup.train_rows, train.batch_size, train.accumulation, train.steps, setup.mesh, data
    )
    result = []
    for _ in range(train.steps):
        state, metrics = step(state, next(batches))
        result.append(metrics.loss.item())
    lengths = setup.corpus.tokenizer.byte_lengths(setup.config.model.vocabulary_size)
    held_out = validation_batches(setup.validation_rows, 8, 2, setup.mesh)
    found = {
        "train": result,
        "validation": Validator(setup.definition, setup.mesh, lengths)(state.params, held_out)["loss"],
        "shards": len({str(s.index) for s in jax.tree.leaves(state.params)[0].addressable_shards}),
    }
    return found, trainer, state


def moved(folder, state, trainer):
    """Returns whether a state restored onto the mesh of ``trainer`` is the one that was saved, and split."""
    with contextlib.closing(Checkpointer(folder, keep=1)) as checkpointer:
        checkpointer.save(int(state.step), state, Progress(0, {}))
        checkpointer.wait()
        restored, _ = checkpointer.restore(trainer.abstract_state)
    leaves = zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True)
    same = all(np.array_equal(jax.device_get(a), jax.device_get(b)) for a, b in leaves)
    embedding, wanted = restored.params["embedding"], trainer.abstract_state.params["embedding"]
    return same and embedding.sharding == wanted.sharding and embedding.sharding.mesh == trainer.mesh


if __name__ == "__main__":
    folder, which, *words = Path(sys.argv[1]), *sys.argv[2:]
    names = ["single"] if which == "single" else list(MESHES)
    runs = {name: losses(folder, MESHES[name], words) for name in names}
    results = {name: found for name, (found, _, _) in runs.items()}
    if which == "all":
        _, _, saved = runs["fsdp=8"]
        with tempfile.TemporaryDirectory() as checkpoints:
            results["moved"] = moved(Path(checkpoints), saved, runs["tensor=4, data=2"][1])
    print(json.dumps(results))
