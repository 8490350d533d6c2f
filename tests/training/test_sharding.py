"""Every mesh gives the single device's losses; so does gradient accumulation."""

import json
import subprocess
import sys

import numpy as np
import pytest

BATCH = ("--train.batch_size", "32")
CASES = {
    "copy head": BATCH,
    "baseline": (*BATCH, "--model.copy_head", "null"),
    "copy head, accumulated": (*BATCH, "--train.accumulation", "4"),
    "baseline, accumulated": (*BATCH, "--train.accumulation", "4", "--model.copy_head", "null"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sharding")


def run(folder, flags):
    command = [sys.executable, "-m", "tests.training.sharded_losses", str(folder), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def single_device(folder):
    """Losses on one device, full batch, by whether there is a copy head."""
    return {}


@pytest.mark.parametrize("case", CASES)
def test_meshes_give_the_single_device_losses(folder, single_device, case):
    results = run(folder, CASES[case])
    kind = case.split(",")[0]
    expected = single_device.setdefault(kind, results["single"])
    for mesh, result in results.items():
        np.testing.assert_allclose(result["train"], expected["train"], rtol=1e-4, err_msg=mesh)
        np.testing.assert_allclose(result["validation"], expected["validation"], rtol=1e-4, err_msg=mesh)
    # The parameters really were split where the mesh says so.
    assert results["fsdp=8"]["shards"] == 8
    assert results["data=8"]["shards"] == 1
    assert results["data=2, fsdp=2, tensor=2"]["shards"] >= 2
