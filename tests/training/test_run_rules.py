"""Where a run may lie, what must be there to go on, and what a signal means at its end."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cplm_jax import quickstart as quickstart_module
from cplm_jax.config_loading import load_config
from cplm_jax.data.files import check_apart, list_files
from cplm_jax.errors import UserError
from cplm_jax.quickstart import quickstart
from cplm_jax.training.loop import Outcome, _Run, train
from cplm_jax.training.setup import slow_scatter_warning
from tests.tiny import tiny_config

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("paths", "run_dir", "cache_dir", "field"),
    [
        ("corpus", "corpus/run", "cache", "run_dir"),
        ("corpus", "run", "corpus/cache", "data.cache_dir"),
        (".", "run", "../cache", "run_dir"),
        ("**/*", "run", "../cache", "run_dir"),
        ("**/*.jsonl", "run", "../cache", "run_dir"),
        ("*", "runs/a", "../cache", "run_dir"),
        ("corp*", "corpus/run", "../cache", "run_dir"),
        ("c*", "run", "cache", "data.cache_dir"),
        ("*.jsonl", ".", "../cache", "run_dir"),
        ("*/*", "run", "../cache", "run_dir"),
    ],
)
def test_a_run_does_not_lie_among_its_documents(tmp_path, monkeypatch, paths, run_dir, cache_dir, field):
    tiny_config(tmp_path)
    (tmp_path / "one.jsonl").write_text('{"text": "a"}')
    monkeypatch.chdir(tmp_path)
    flags = ("--data.paths", paths, "--run_dir", run_dir, "--data.cache_dir", cache_dir)
    with pytest.raises(UserError, match=f"{field} = .* lies in data.paths"):
        train(tiny_config(tmp_path, *flags))


@pytest.mark.parametrize(
    ("paths", "run_dir"),
    [("*", ".runs/a"), ("corpus/*", "run"), ("*.txt", "run"), ("*/*.txt", "run/a"), ("**/*.txt", "run")],
)
def test_a_run_may_lie_where_no_glob_finds_it(tmp_path, monkeypatch, paths, run_dir):
    (tmp_path / "corpus").mkdir()
    monkeypatch.chdir(tmp_path)
    check_apart([paths], "data.paths", {"run_dir": run_dir})


def test_two_spellings_of_a_file_are_one_document(tmp_path, monkeypatch):
    tiny_config(tmp_path)
    monkeypatch.chdir(tmp_path)
    once = list_files(["corpus"], "data.paths")
    again = list_files(["corpus", str(tmp_path / "corpus"), "./corpus/*.txt"], "data.paths")
    assert once == again


def test_metrics_taken_away_and_a_file_in_a_folders_place_are_refused(tmp_path):
    config = tiny_config(tmp_path, "--train.steps", "4")
    train(config)
    metrics = Path(config.run_dir) / "metrics.jsonl"
    content = metrics.read_bytes()
    metrics.unlink()
    with pytest.raises(UserError, match=r"no metrics\.jsonl"):
        train(config)
    metrics.write_bytes(content)
    assert train(config).outcome is Outcome.ALREADY_FINISHED
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "tensorboard").touch()
    with pytest.raises(UserError, match="tensorboard is no folder"):
        train(tiny_config(tmp_path, "--run_dir", str(taken)))


def test_a_path_that_is_no_utf8_is_refused():
    with pytest.raises(UserError, match="not UTF-8"):
        load_config(arguments=["--run_dir", os.fsdecode(b"bad\xff")])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_after_the_last_step_of_the_baseline_stops_the_quickstart(tmp_path, monkeypatch, number):
    config = tiny_config(tmp_path, "--train.steps", "4", "--run_dir", str(tmp_path / "runs" / "cplm"))
    real = _Run._finish_saving

    def interrupted(run):
        os.kill(os.getpid(), number)
        real(run)

    with monkeypatch.context() as patched:
        patched.setattr(_Run, "_finish_saving", interrupted)
        result = quickstart(config)
    assert result == (Outcome.FINISHED, 4, number)
    assert not (tmp_path / "runs" / "cplm").exists()
    seen = []
    with monkeypatch.context() as patched:
        patched.setattr(quickstart_module, "train", lambda c: seen.append(train(c)) or seen[-1])
        assert quickstart(config).name == "report.html"
    assert [r.outcome for r in seen] == [Outcome.ALREADY_FINISHED, Outcome.FINISHED]


@pytest.mark.parametrize(
    ("platform", "jaxlib", "warned"),
    [
        ("gpu", "0.10.2", True),
        ("gpu", "0.11.0", True),
        ("gpu", "0.11.1", False),
        ("gpu", "0.12.0.1", False),
        ("cpu", "0.10.2", False),
        ("tpu", "0.10.2", False),
    ],
)
def test_slow_scatters_are_warned_of_where_they_are(platform, jaxlib, warned):
    assert (slow_scatter_warning(platform, jaxlib) is not None) == warned


def test_a_terminal_without_utf8_gets_escapes(tmp_path):
    command = [sys.executable, "train.py", "--run_dir", "ü", "--print_config"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, check=False, env={**os.environ, "PYTHONIOENCODING": "ascii"}
    )
    assert done.returncode == 0
    assert b"run_dir: \\xfc" in done.stdout


def test_the_package_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "cplm_jax", "--help"], cwd=ROOT, capture_output=True, check=False
    )
    assert done.returncode == 0
    assert b"usage: cplm" in done.stdout
