"""Takes batches of a stream, as one of several processes, and writes those of its rows.

python streamed_batches.py PREPARED FROM_STATE TAKE OUTPUT [--section.field value ...]
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np

from cplm_jax.config_loading import load_config
from cplm_jax.data.corpus import load_corpus
from cplm_jax.data.pipeline import Batch, TrainingBatches, make_rows
from cplm_jax.sharding import make_mesh
from cplm_jax.training.setup import initialize_processes

STEPS = 40


def open_stream(flags):
    config = load_config([], flags)
    initialize_processes(config.mesh)
    rows, _ = make_rows(load_corpus(config.data), config)
    train = config.train
    return TrainingBatches(
        rows, train.batch_size, train.accumulation, STEPS, make_mesh(config.mesh), config.data
    )


def local(batch):
    """Returns the rows held here: ``(accumulation part, row) -> arrays``."""
    found = {}
    for name in Batch._fields:
        for shard in getattr(batch, name).addressable_shards:
            first = shard.index[1].start or 0
            for (part, row), values in zip(
                np.ndindex(shard.data.shape[:2]),
                np.asarray(shard.data).reshape(-1, shard.data.shape[2]),
                strict=True,
            ):
                found[f"{part} {first + row} {name}"] = values
    return found


def main():
    state_file, take, output, *flags = sys.argv[1:]
    stream = open_stream(flags)
    if state_file != "-":
        stream.set_state(json.loads(Path(state_file).read_text()))
    arrays = {}
    for number in range(int(take)):
        arrays |= {f"{number} {key}": value for key, value in local(next(stream)).items()}
    Path(f"{output}-{jax.process_index()}.json").write_text(json.dumps(stream.get_state()))
    np.savez(f"{output}-{jax.process_index()}.npz", **arrays)
    stream.close()
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()  # waits for the others, who would be ended with this process


if __name__ == "__main__":
    main()
