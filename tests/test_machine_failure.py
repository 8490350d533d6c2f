"""What the machine does to a run (a full disk, a lost device, a diverged loss): exit status 1, no loss."""

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from cplm_jax import cli, folders
from cplm_jax.evaluation.validation import Validator
from cplm_jax.loading import load_model
from cplm_jax.training.step import Trainer
from tests.tiny import tiny_settings, write_corpus, write_yaml

ROOT = Path(__file__).resolve().parents[1]
# Runs the command with files limited to LIMIT bytes, from the start or from the checkpoint of step FROM:
# a write that fails for real, wherever it is made, without a disk to fill.
DRIVER = """
import os, resource
from cplm_jax import cli
from cplm_jax.training.checkpointing import Checkpointer

def shrink():
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(os.environ["LIMIT"]), hard))

def save(self, step, *rest, save=Checkpointer.save):
    if step == int(os.environ["FROM"]):
        self.wait()
        shrink()
    save(self, step, *rest)

if os.environ["FROM"] == "start":
    shrink()
Checkpointer.save = save
cli.main()
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("machine") / "corpus")


def settings_file(corpus: Path, folder: Path, cache: Path) -> list[str]:
    settings = tiny_settings(corpus, cache, folder / "run")
    settings["train"]["steps"] = 15
    settings["checkpoint"] = {"every": 5, "keep": 3}
    settings["evaluation"] = {"every": 5, "batches": 1, "batch_size": 8}
    return ["--config", str(write_yaml(folder / "tiny.yaml", settings))]


@pytest.fixture
def words(corpus: Path, tmp_path: Path) -> list[str]:
    return settings_file(corpus, tmp_path, corpus.parent / "cache")


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert cli.run(cli.train_command, settings_file(corpus, folder, corpus.parent / "cache")) == 0
    return folder / "run"


def limited(limit: int, since: str, command: Sequence[str]) -> tuple[int, str]:
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "LIMIT": str(limit), "FROM": since}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, *command],
        cwd=ROOT,
        env=env,
        capture_output=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stderr.decode()


def check_message(error: str, *fragments: str) -> None:
    assert "Traceback" not in error, error
    assert len(re.findall(r"^error: ", error, flags=re.MULTILINE)) == 1, error
    message = error[re.search(r"^error: ", error, flags=re.MULTILINE).start() :]
    for fragment in fragments:
        assert fragment in message, f"no {fragment!r} in {message}"


def rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[tuple[str, int, float]]:
    return [(row["split"], row["step"], row["loss"]) for row in rows(run)]


def check_goes_on(words: Sequence[str], run: Path, step: int, undisturbed: Path, capfd) -> None:
    """The last good checkpoint loads, and the run goes on from it as if nothing had happened."""
    assert load_model(run).step == step
    capfd.readouterr()
    assert cli.run(cli.train_command, words) == 0
    assert f"going on from step {step} of 15" in capfd.readouterr().err
    assert losses(run) == losses(undisturbed)


@pytest.mark.parametrize("limit", [50_000, 4_000], ids=["arrays_do_not_fit", "metrics_do_not_either"])
@pytest.mark.parametrize("tensorboard", ["false", "true"])
def test_full_disk(words, tmp_path, undisturbed, capfd, limit, tensorboard):
    status, error = limited(limit, "10", ["train", *words, "--logging.tensorboard", tensorboard])
    assert status == 1, error
    check_message(error, "could not be written", str(tmp_path / "run"), "File too large", "the same command")
    check_goes_on(words, tmp_path / "run", 5, undisturbed, capfd)


def test_full_disk_says_which_checkpoint_is_good(words, tmp_path, undisturbed, monkeypatch, capfd):
    save = ocp.CheckpointManager.save

    def full(self, step, *args, **kwargs):
        if step == 10:
            self.wait_until_finished()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return save(self, step, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(ocp.CheckpointManager, "save", full)
        assert cli.run(cli.train_command, words) == 1
    check_message(
        capfd.readouterr().err,
        "the checkpoint of step 10 could not be written",
        str(tmp_path / "run" / "checkpoints"),
        "No space left on device",
        "the last good one is of step 5",
        "the same command goes on",
    )
    check_goes_on(words, tmp_path / "run", 5, undisturbed, capfd)


def test_full_disk_before_the_first_checkpoint(words, tmp_path, undisturbed):
    status, error = limited(50_000, "5", ["train", *words])
    assert status == 1, error
    check_message(error, "there is none yet", "the same command starts over")
    assert cli.run(cli.train_command, words) == 0
    assert losses(tmp_path / "run") == losses(undisturbed)


def test_full_disk_in_the_cache(corpus, tmp_path):
    words = settings_file(corpus, tmp_path, tmp_path / "cache")
    status, error = limited(1_000, "start", ["train", *words])
    assert status == 1, error
    check_message(error, "data.cache_dir", str(tmp_path / "cache"), "File too large")
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]
    assert cli.run(cli.train_command, words) == 0


def test_full_disk_during_export(undisturbed, tmp_path):
    command = ["export", "--checkpoint", str(undisturbed), "--output", str(tmp_path / "export")]
    status, error = limited(10_000, "start", command)
    assert status == 1, error
    check_message(error, f"--output {tmp_path / 'export'}", "File too large")
    assert not list(tmp_path.iterdir())


def test_full_disk_while_other_arrays_are_still_written(undisturbed, tmp_path, monkeypatch, capfd):
    written = []

    def full(self, path, params):
        written.append(path / "d")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write_late(seconds):
        if len(written) < 4:
            written.append(written[0])
            written[0].mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(ocp.StandardCheckpointer, "save", full)
    monkeypatch.setattr(folders.time, "sleep", write_late)
    command = ["--checkpoint", str(undisturbed), "--output", str(tmp_path / "export")]
    assert cli.run(cli.export_command, command) == 1
    check_message(capfd.readouterr().err, "No space left on device")
    assert len(written) == 4
    assert not list(tmp_path.iterdir())


OVERFLOW = "--optimizer.learning_rate 3e38 --optimizer.weight_decay 1e6"


def finite_checkpoints(run: Path) -> list[int]:
    """Returns the steps of a run's checkpoints, newest first, after a look at every number in them."""
    steps = []
    for folder in sorted((run / "checkpoints").iterdir(), key=lambda p: int(p.name), reverse=True):
        steps.append(int(folder.name))
        for item in ("params", "optimizer"):
            with ocp.StandardCheckpointer() as checkpointer:
                arrays = jax.tree.leaves(checkpointer.restore(folder / item))
            assert arrays
            assert all(np.isfinite(a).all() for a in arrays), (folder, item)
    return steps


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        # The loss of the second step, from parameters that are finite but absurd.
        ("--optimizer.learning_rate 1e30", "the loss of step"),
        # The first update overflows, and a checkpoint or a validation is due before a loss could tell.
        (f"{OVERFLOW} --checkpoint.every 1", "after step 1 are not finite"),
        (f"{OVERFLOW} --evaluation.every 1", "after step 1 are not finite"),
    ],
    ids=["loss", "checkpoint", "validation"],
)
def test_divergence(words, tmp_path, capfd, flags, message):
    assert cli.run(cli.train_command, [*words, "--optimizer.warmup_steps", "0", *flags.split()]) == 1
    check_message(capfd.readouterr().err, message, "optimizer.learning_rate", "another run_dir")
    assert not finite_checkpoints(tmp_path / "run")
    assert all(np.isfinite(row["loss"]) for row in rows(tmp_path / "run"))


def test_divergence_of_a_run_that_goes_on(words, tmp_path, capfd):
    assert cli.run(cli.train_command, [*words, "--train.steps", "5"]) == 0
    changed = [*words, "--checkpoint.allow_changed_config", "true", "--optimizer.learning_rate", "1e30"]
    capfd.readouterr()
    assert cli.run(cli.train_command, changed) == 1
    check_message(capfd.readouterr().err, "the loss of step", str(tmp_path / "run" / "checkpoints"))
    assert finite_checkpoints(tmp_path / "run") == [5]
    assert load_model(tmp_path / "run").step == 5
    assert cli.run(cli.train_command, [*words, "--checkpoint.allow_changed_config", "true"]) == 0
    assert finite_checkpoints(tmp_path / "run") == [15, 10, 5]


def test_validation_that_is_not_finite(words, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(Validator, "__call__", lambda *_: {"loss": float("nan")})
    assert cli.run(cli.train_command, words) == 1
    check_message(capfd.readouterr().err, "the validation loss of step 5 is nan", "optimizer.learning_rate")
    assert not finite_checkpoints(tmp_path / "run")
    assert {row["split"] for row in rows(tmp_path / "run")} == {"train"}


def test_lost_device(words, tmp_path, undisturbed, monkeypatch, capfd):
    compile_step = Trainer.compile_step

    class Lost:
        def __init__(self, compiled):
            self.compiled, self.left, self.memory_analysis = compiled, 7, compiled.memory_analysis

        def __call__(self, *args):
            self.left -= 1
            if self.left < 0:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nallocator table")
            return self.compiled(*args)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "compile_step", lambda self: Lost(compile_step(self)))
        assert cli.run(cli.train_command, words) == 1
    error = capfd.readouterr().err
    check_message(error, "RESOURCE_EXHAUSTED: Out of memory", "train.batch_size", "train.accumulation")
    assert "allocator table" not in error
    check_goes_on(words, tmp_path / "run", 5, undisturbed, capfd)
