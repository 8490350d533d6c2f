"""Every mesh gives the single device's losses; so does gradient accumulation."""

import numpy as np
import pytest

from tests.fake_devices import run_on_devices

BATCH = ("--train.batch_size", "32")
# Every option of the copy head that has parameters or a path of its own.
RICH = (
    *("--model.copy_head.gate", "confidence", "--model.copy_head.alignment", "both"),
    *("--model.copy_head.pointers", "2", "--model.copy_head.normalize", "true"),
    *("--model.copy_head.recency_bias", "true", "--model.copy_head.key_layer", "1"),
    *("--train.z_loss", "0.001", "--train.pointer_loss", "0.1"),
    *("--model.copy_head.score_block", "16", "--model.logit_chunk", "60", "--model.attention_block", "16"),
)
CASES = {
    "copy head": BATCH,
    "baseline, accumulated": (*BATCH, "--train.accumulation", "4", "--model.copy_head", "null"),
    "richest copy head, accumulated": (*BATCH, *RICH, "--train.accumulation", "4"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sharding")


def run(folder, which, flags):
    return run_on_devices(8, "tests.training.sharded_losses", folder, which, *flags)


@pytest.mark.parametrize("case", CASES)
def test_meshes_give_the_single_device_losses(folder, case):
    flags = CASES[case]
    results = run(folder, "all", flags)
    assert results.pop("moved")
    expected = results["single"]
    if "--train.accumulation" in flags:  # compared with the full batch, not with its own parts
        at = flags.index("--train.accumulation")
        expected = run(folder, "single", flags[:at] + flags[at + 2 :])["single"]
    for mesh, result in results.items():
        np.testing.assert_allclose(result["train"], expected["train"], rtol=1e-4, err_msg=mesh)
        np.testing.assert_allclose(result["validation"], expected["validation"], rtol=1e-4, err_msg=mesh)
    # The parameters really were split where the mesh says so.
    assert results["fsdp=8"]["shards"] == 8
    assert results["data=8"]["shards"] == 1
    assert results["data=2, fsdp=2, tensor=2"]["shards"] >= 2
