"""Two processes train as one does, and stop together."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.tiny import tiny_settings, write_corpus, write_yaml

ROOT = Path(__file__).parents[2]


def start(config_file, run_dir, processes, *flags):
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    started = []
    for number in range(processes):
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        more = list(flags)
        if processes > 1:
            environment |= {
                "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
                "JAX_NUM_PROCESSES": str(processes),
                "JAX_PROCESS_ID": str(number),
            }
            more += ["--mesh.distributed", "true"]
        command = [sys.executable, "train.py", "--config", str(config_file), "--run_dir", str(run_dir), *more]
        started.append(
            subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        )
    return started


def finish(started):
    outputs = [p.communicate(timeout=600)[1] for p in started]
    return [p.returncode for p in started], outputs


def losses(run_dir):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {(r["split"], r["step"]): r["loss"] for r in rows}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def config_file(folder):
    settings = tiny_settings(write_corpus(folder / "corpus"), folder / "cache")
    settings["train"] = {"steps": 30, "batch_size": 16}
    return write_yaml(folder / "run.yaml", settings)


# Both processes hold all rows and half of every parameter.
SPLIT_MODEL = ("--mesh.data", "1", "--mesh.fsdp", "1", "--mesh.tensor", "2")
# Each process holds half of the rows and half of every parameter.
SPLIT_ROWS = ("--mesh.data", "1", "--mesh.fsdp", "2")


@pytest.fixture(scope="module")
def one(folder, config_file):
    statuses, outputs = finish(start(config_file, folder / "one", 1))
    assert statuses == [0], outputs
    return losses(folder / "one")


def test_two_processes_give_the_losses_of_one_and_stop_and_go_on_together(folder, config_file, one):
    run_dir = folder / "two"
    processes = start(config_file, run_dir, 2, *SPLIT_ROWS)
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and all(p.poll() is None for p in processes):
        if (run_dir / "metrics.jsonl").exists() and len(losses(run_dir)) > 3:
            break
        time.sleep(0.002)
    processes[1].send_signal(signal.SIGTERM)  # the other one learns of it from its peer
    statuses, outputs = finish(processes)
    assert statuses == [128 + signal.SIGTERM] * 2, outputs
    assert list((run_dir / "checkpoints").iterdir())

    statuses, outputs = finish(start(config_file, run_dir, 2, *SPLIT_ROWS))
    assert statuses == [0, 0], outputs
    assert "going on from step" in outputs[0]
    two = losses(run_dir)
    assert one.keys() == two.keys()
    np.testing.assert_allclose(list(two.values()), list(one.values()), rtol=1e-4)


def test_number_of_processes_may_change_between_two_parts_of_a_run(folder, config_file, one):
    run_dir = folder / "moved"
    statuses, outputs = finish(start(config_file, run_dir, 2, *SPLIT_MODEL))
    assert statuses == [0, 0], outputs
    # Taken back to step 10, it goes on in one process.
    for newer in (run_dir / "checkpoints").iterdir():
        if newer.name != "20":
            subprocess.run(["rm", "-r", str(newer)], check=True)
    statuses, outputs = finish(start(config_file, run_dir, 1))
    assert statuses == [0], outputs
    assert "going on from step 20" in outputs[0]
    np.testing.assert_allclose(list(losses(run_dir).values()), list(one.values()), rtol=1e-4)
