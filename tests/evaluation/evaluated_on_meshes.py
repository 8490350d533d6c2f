"""Prints, as JSON, what a model loaded onto meshes of two fake devices says.

Started by :func:`tests.fake_devices.run_on_devices` as
``python -m tests.evaluation.evaluated_on_meshes FOLDER``, where FOLDER is new.
"""

import json
import sys
from pathlib import Path

from cplm_jax.config import MeshConfig
from cplm_jax.errors import UserError
from cplm_jax.evaluation.suites import evaluate
from cplm_jax.generation import generate
from cplm_jax.loading import load_model
from cplm_jax.sharding import make_mesh
from cplm_jax.training.loop import train
from tests.tiny import tiny_config

MESHES = ({"data": 1}, {"data": 2}, {"fsdp": 2}, {"tensor": 2}, {"sequence": 2})

if __name__ == "__main__":
    config = tiny_config(Path(sys.argv[1]), "--train.steps", "6", "--data.sequence_length", "64")
    train(config)
    results = {}
    for sizes in MESHES:
        model = load_model(config.run_dir, make_mesh(MeshConfig(**{"data": 1, **sizes})))
        results[str(sizes)] = {
            "figures": evaluate(model),
            "texts": generate(model, ["return self", "", "value"], max_tokens=5),
        }
    odd = tiny_config(Path(sys.argv[1]) / "odd", "--train.steps", "4", "--model.vocabulary_size", "333")
    train(odd)
    try:
        load_model(odd.run_dir, make_mesh(MeshConfig(data=1, tensor=2)))
        results["odd"] = "loaded"
    except UserError as e:
        results["odd"] = str(e)
    print(json.dumps(results))
