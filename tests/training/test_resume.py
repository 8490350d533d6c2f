"""A run that is killed and stopped goes on as if nothing had happened, to the last bit."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from cplm_jax.loading import load_model
from cplm_jax.training import loop
from cplm_jax.training.loop import Outcome, train
from tests.tiny import tiny_config, tiny_settings, write_corpus, write_yaml

ROOT = Path(__file__).parents[2]
TIMING = ("step_seconds", "tokens_per_second", "data_wait")


def rows(run):
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in TIMING} for row in found]


def last_step(run):
    try:
        lines = (run / "metrics.jsonl").read_bytes().split(b"\n")
    except FileNotFoundError:
        return 0
    return max((json.loads(line)["step"] for line in lines if line.endswith(b"}")), default=0)


def final_state(run):
    """Everything a checkpoint holds, leaf by leaf, in bytes."""
    import orbax.checkpoint as ocp

    step = max(int(p.name) for p in (run / "checkpoints").iterdir())
    with ocp.StandardCheckpointer() as reader:
        items = [
            reader.restore((run / "checkpoints" / str(step) / item).absolute())
            for item in ("params", "optimizer")
        ]
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(items)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def config_file(folder):
    settings = tiny_settings(write_corpus(folder / "corpus"), folder / "cache")
    settings["train"] = {"steps": 60, "batch_size": 64, "accumulation": 2}
    settings["model"]["dropout"] = 0.1  # so that the random state matters
    settings["evaluation"] |= {"every": 13}
    settings["checkpoint"] = {"every": 7}
    settings["logging"] = {"every": 2, "tensorboard": True}
    return write_yaml(folder / "run.yaml", settings)


def start(config_file, run, *flags):
    command = [sys.executable, "train.py", "--config", str(config_file), "--run_dir", str(run), *flags]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def interrupt(process, run, step, number):
    """Sends a signal once the run has logged ``step``."""
    deadline = time.monotonic() + 300
    while last_step(run) < step and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    assert process.poll() is None, f"the run ended before it could be interrupted: {process.communicate()}"
    process.send_signal(number)
    output = process.communicate(timeout=300)
    return process.returncode, output


@pytest.fixture(scope="module")
def undisturbed(folder, config_file):
    run = folder / "undisturbed"
    process = start(config_file, run)
    process.communicate(timeout=300)
    assert process.returncode == 0
    return run


def test_killed_and_stopped_run_equals_the_undisturbed_one(folder, config_file, undisturbed):
    run = folder / "disturbed"
    status, _ = interrupt(start(config_file, run), run, 18, signal.SIGKILL)
    assert status == -signal.SIGKILL
    status, (_, messages) = interrupt(start(config_file, run), run, 38, signal.SIGTERM)
    assert status == 128 + signal.SIGTERM
    assert "saved at step" in messages
    stopped_at = last_step(run)
    process = start(config_file, run)
    _, messages = process.communicate(timeout=300)
    assert process.returncode == 0, messages
    assert "going on from step" in messages
    assert stopped_at < 60

    assert rows(run) == rows(undisturbed)
    assert [r["step"] for r in rows(run) if r["split"] == "train"] == list(range(2, 61, 2))
    assert [r["step"] for r in rows(run) if r["split"] == "validation"] == [13, 26, 39, 52, 60]
    assert final_state(run) == final_state(undisturbed)
    assert list((run / "tensorboard").iterdir())

    process = start(config_file, run)
    _, messages = process.communicate(timeout=300)
    assert process.returncode == 0
    assert "nothing left to train" in messages
    assert rows(run) == rows(undisturbed)


def test_signal_during_compilation_still_saves(folder, config_file, undisturbed):
    run = folder / "compilation"
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(folder / "empty")}
    command = [sys.executable, "train.py", "--config", str(config_file), "--run_dir", str(run)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=environment)
    for line in process.stderr:
        if "compiling the training step" in line:
            break
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=300) == 128 + signal.SIGTERM
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["0"]
    process = start(config_file, run, "--train.steps", "60")
    process.communicate(timeout=300)
    assert process.returncode == 0
    assert rows(run) == rows(undisturbed)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_during_validation_saves_and_the_row_is_made_up_for(tmp_path, monkeypatch, number):
    whole = tiny_config(tmp_path)
    train(whole)
    expected = rows(Path(whole.run_dir))

    config = tiny_config(tmp_path, "--run_dir", str(tmp_path / "stopped"))
    real = loop.validation_batches

    def interrupted(*args):
        for batch in real(*args):
            os.kill(os.getpid(), number)
            yield batch

    with monkeypatch.context() as patched:
        patched.setattr(loop, "validation_batches", interrupted)
        result = train(config)
    assert result == (Outcome.STOPPED, 10, number)
    assert all(row["split"] == "train" for row in rows(Path(config.run_dir)))
    # The second validation, at the very last step, is interrupted too.
    with monkeypatch.context() as patched:
        patched.setattr(loop, "validation_batches", interrupted)
        assert train(config).step == 10
    assert train(config).outcome is Outcome.FINISHED
    assert rows(Path(config.run_dir)) == expected


def test_stopped_validation_of_the_last_step_is_made_up_for(tmp_path, monkeypatch):
    flags = ("--evaluation.every", "1000")
    expected_config = tiny_config(tmp_path, *flags)
    train(expected_config)
    config = tiny_config(tmp_path, *flags, "--run_dir", str(tmp_path / "stopped"))
    real = loop.validation_batches

    def interrupted(*args):
        for batch in real(*args):
            os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    with monkeypatch.context() as patched:
        patched.setattr(loop, "validation_batches", interrupted)
        assert train(config) == (Outcome.STOPPED, 20, signal.SIGTERM)
    assert train(config) == (Outcome.FINISHED, 20, None)
    assert train(config) == (Outcome.ALREADY_FINISHED, 20, None)
    assert rows(Path(config.run_dir)) == rows(Path(expected_config.run_dir))


def test_rows_past_the_last_checkpoint_and_a_torn_line_are_cut_off(tmp_path):
    config = tiny_config(tmp_path)
    train(config)
    run = Path(config.run_dir)
    expected = (run / "metrics.jsonl").read_text()
    with open(run / "metrics.jsonl", "a") as out:
        out.write(json.dumps({"split": "train", "step": 21, "loss": 0.0}) + "\n" + '{"split": "trai')
    longer = tiny_config(tmp_path, "--train.steps", "22", "--checkpoint.allow_changed_config", "true")
    train(longer)
    text = (run / "metrics.jsonl").read_text()
    assert text.startswith(expected)
    steps = [json.loads(line)["step"] for line in text.splitlines() if '"train"' in line]
    assert steps == list(range(1, 23))


def test_loaded_model_knows_its_step_and_tokens(tmp_path):
    config = tiny_config(tmp_path)
    train(config)
    model = load_model(config.run_dir)
    assert model.step == 20
    assert model.tokens == rows(Path(config.run_dir))[-1]["tokens"]


@pytest.mark.parametrize("every", [1, 3])
def test_accumulated_gradients_equal_the_full_batchs(tmp_path, every):
    """With rows of very different numbers of targets, which a mean of means would weigh alike."""
    from cplm_jax.data.pipeline import TrainingBatches
    from cplm_jax.training.setup import set_up
    from cplm_jax.training.step import batch_gradients

    config = tiny_config(tmp_path)
    setup = set_up(config)
    batch = next(TrainingBatches(setup.train_rows, 12, 1, 1, setup.mesh, setup.config.data))
    mask = np.array(batch.loss_mask)
    mask[:, : 12 // every, 3:] = False
    batch = batch._replace(loss_mask=mask)
    params = setup.definition.init(jax.random.key(0))
    whole = jax.jit(lambda p, b: batch_gradients(setup.definition, config.train, p, b, None))(params, batch)
    cut = jax.tree.map(lambda x: np.asarray(x).reshape(4, 3, -1), batch)
    parts = jax.jit(lambda p, b: batch_gradients(setup.definition, config.train, p, b, None))(params, cut)
    assert int(whole[2]) == int(parts[2]) == mask.sum()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), whole, parts)
