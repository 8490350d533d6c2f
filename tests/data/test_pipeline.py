"""The stream of batches: the same wherever it is resumed, and whatever prepares it."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from cplm_jax import cli
from cplm_jax.data.files import list_files
from cplm_jax.data.pipeline import Batch
from cplm_jax.data.preparation.plan import Settings
from cplm_jax.data.preparation.prepare import prepare
from cplm_jax.data.records import Reading
from cplm_jax.data.shards import read_manifest
from cplm_jax.data.tokenizer import train_tokenizer
from cplm_jax.errors import UserError
from tests.data.streamed_batches import STEPS, open_stream
from tests.tiny import write_corpus, write_yaml

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = Settings(Reading("text", 10**6), 0.1, False, shard_tokens=2000, unit_bytes=20_000)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two sources, prepared with one tokenizer."""
    base = tmp_path_factory.mktemp("sources")
    corpora = [write_corpus(base / f"in{i}", documents=25, seed=i) for i in range(2)]
    texts = [p.read_text() for corpus in corpora for p in sorted(corpus.iterdir())]
    tokenizer = train_tokenizer(texts, 320, 10**6)
    for i, corpus in enumerate(corpora):
        prepare(list_files([str(corpus)], "--paths"), tokenizer, base / f"out{i}", SETTINGS)
    return [str(base / f"out{i}") for i in range(2)]


def flags_of(folders, packing, *more):
    return [
        *("--data.prepared", *folders, "--data.weights", "3", "1", "--data.packing", packing),
        *("--data.sequence_length", "32", "--train.batch_size", "8", "--train.accumulation", "2"),
        *("--mesh.data", "1", *more),
    ]


def arrays(batch):
    return {name: np.asarray(getattr(batch, name)) for name in Batch._fields}


def take(stream, count):
    return [arrays(next(stream)) for _ in range(count)]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        for name in Batch._fields:
            np.testing.assert_array_equal(a[name], b[name])


PACKING = pytest.mark.parametrize("packing", ["concatenate", "best_fit"])


@pytest.fixture(scope="module", params=["concatenate", "best_fit"])
def undisturbed(request, folders):
    stream = open_stream(flags_of(folders, request.param))
    batches, states = [], [stream.get_state()]
    for _ in range(STEPS):
        batches.append(arrays(next(stream)))
        states.append(json.loads(json.dumps(stream.get_state())))
    stream.close()
    return request.param, batches, states


def test_resumed_at_twenty_points(undisturbed, folders):
    packing, batches, states = undisturbed
    rng = random.Random(0)
    for point in rng.sample(range(STEPS), 20):
        stream = open_stream(flags_of(folders, packing, "--data.prefetch", str(rng.randrange(4))))
        stream.set_state(states[point])
        count = min(3, STEPS - point)
        assert_same(take(stream, count), batches[point : point + count])
        assert stream.get_state() == states[point + count]
        # And a second time, from the middle of what was read ahead.
        stream.set_state(states[point])
        assert_same(take(stream, 1), batches[point : point + 1])
        stream.close()


def test_workers_change_nothing(undisturbed, folders):
    packing, batches, states = undisturbed
    stream = open_stream(flags_of(folders, packing, "--data.workers", "2"))
    assert_same(take(stream, 7), batches[:7])
    assert stream.get_state() == states[7]
    stream.set_state(states[31])
    assert_same(take(stream, STEPS - 31), batches[31:])
    stream.close()


def test_sources_are_counted_exactly(undisturbed):
    _, batches, states = undisturbed
    total = sum(int(batch["loss_mask"].sum()) for batch in batches)
    assert sum(states[-1]["source_tokens"]) == total
    share = states[-1]["source_tokens"][0] / total
    assert abs(share - 0.75) < 4 * np.sqrt(0.75 * 0.25 / (STEPS * 8))


def run_processes(folder, name, count, state, take_count, flags):
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    started = []
    for number in range(count):
        env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        env.pop("XLA_FLAGS", None)
        more = []
        if count > 1:
            env |= {
                "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
                "JAX_NUM_PROCESSES": str(count),
                "JAX_PROCESS_ID": str(number),
            }
            more = ["--mesh.distributed", "true", "--mesh.data", str(count)]
        command = [sys.executable, str(ROOT / "tests/data/streamed_batches.py"), str(state), str(take_count)]
        started.append(
            subprocess.Popen(
                [*command, str(folder / name), *flags, *more], env=env, stderr=subprocess.PIPE, text=True
            )
        )
    for process in started:
        _, error = process.communicate(timeout=300)
        assert process.returncode == 0, error
    states = [(folder / f"{name}-{i}.json").read_text() for i in range(count)]
    assert len(set(states)) == 1
    rows = {}
    for i in range(count):
        with np.load(folder / f"{name}-{i}.npz") as found:
            assert count == 1 or 0 < len(found.files) == take_count * 8 // count * len(Batch._fields)
            assert not rows.keys() & set(found.files)
            rows |= {key: found[key] for key in found.files}
    return [
        {
            key: np.stack([[rows[f"{n} {part} {row} {key}"] for row in range(4)] for part in range(2)])
            for key in Batch._fields
        }
        for n in range(take_count)
    ]


def test_a_run_may_move_between_numbers_of_processes(undisturbed, folders, tmp_path):
    packing, batches, states = undisturbed
    found, workers = [], {"concatenate": "0", "best_fit": "1"}[packing]
    flags = flags_of(folders, packing, "--data.workers", workers)
    state, begun = "-", 0
    for name, count, taken in (("a", 2, 9), ("b", 1, 11), ("c", 2, 20)):
        found += run_processes(tmp_path, name, count, state, taken, flags)
        state, begun = tmp_path / f"{name}-0.json", begun + taken
        assert json.loads(state.read_text()) == states[begun]
    assert_same(found, batches)


def test_training_on_prepared_sources(folders, tmp_path, capfd):
    settings = {
        "run_dir": str(tmp_path / "run"),
        "data": {"prepared": folders, "weights": [3, 1], "sequence_length": 64, "packing": "best_fit"},
        "model": {"width": 32, "layers": 1, "heads": 2, "kv_heads": 2, "mlp_width": 48},
        "train": {"steps": 4, "batch_size": 8},
        "optimizer": {"warmup_steps": 1},
        "evaluation": {"every": 4, "batches": 1, "batch_size": 4},
        "checkpoint": {"every": 2},
        "logging": {"every": 1, "tensorboard": False},
        "mesh": {"data": 1},
    }
    words = ["--config", str(write_yaml(tmp_path / "c.yaml", settings))]
    assert cli.run(cli.train_command, words) == 0, capfd.readouterr().err
    assert "of the training positions are padding" in capfd.readouterr().err
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for row in (row for row in rows if row["split"] == "train"):
        names = [Path(folder).name for folder in folders]
        assert row["tokens"] == sum(row[f"tokens/{name}"] for name in names)
        for name, folder in zip(names, folders, strict=True):
            part = read_manifest(Path(folder))["train"]
            epochs = row[f"tokens/{name}"] / (part["tokens"] + part["documents"])
            assert row[f"epochs/{name}"] == pytest.approx(epochs)
        assert 0 <= row["data_wait"] < 1
    details = json.loads((tmp_path / "run" / "run.json").read_text())
    assert [source["name"] for source in details["sources"]] == ["out0", "out1"]
    assert [source["share_of_rows"] for source in details["sources"]] == [0.75, 0.25]
    assert cli.run(cli.eval_command, ["--checkpoint", str(tmp_path / "run")]) == 0


def refused(capfd, folders, *flags):
    words = ["--run_dir", folders[0] + "-run", "--data.prepared", *folders, *flags]
    assert cli.run(cli.train_command, words) == 2
    return capfd.readouterr().err


def test_mistakes(folders, tmp_path, capfd):
    other = write_corpus(tmp_path / "in", documents=20, seed=9)
    files = list_files([str(other)], "--paths")
    another = train_tokenizer([p.read_text() for p in other.iterdir()], 330, 10**6)
    prepare(files, another, tmp_path / "other", SETTINGS)
    error = refused(capfd, [folders[0], str(tmp_path / "other")])
    assert "was prepared with another tokenizer" in error
    assert str(tmp_path / "other") in error
    prepare(files, another, tmp_path / "nothing_held_out", SETTINGS._replace(validation_fraction=0))
    error = refused(capfd, [str(tmp_path / "nothing_held_out")])
    assert "no held-out document; prepare one of data.prepared with a larger" in error
    prepare(files, another, tmp_path / "fraction", SETTINGS._replace(validation_fraction=0.3))
    error = refused(capfd, [str(tmp_path / "other"), str(tmp_path / "fraction")])
    assert "with --validation_fraction 0.3" in error
    assert "is there twice" in refused(capfd, [folders[0], folders[0] + "/."])
    assert "give a folder that cplm prepare made" in refused(capfd, [str(tmp_path)])
    assert "data.prepared and data.paths are both set" in refused(capfd, folders, "--data.paths", "x")
    assert "data.weights has 1 numbers for 2 folders" in refused(capfd, folders, "--data.weights", "1")
    assert "greater than 0" in refused(capfd, folders, "--data.weights", "1", "0")
    (tmp_path / "other" / "tokenizer.model").write_bytes(another.proto + b"x")
    error = refused(capfd, [str(tmp_path / "other")])
    assert "not the tokenizer of the manifest" in error or "damaged" in error


def test_a_shard_deleted_while_training_is_told(folders, tmp_path, capfd):
    corpus = write_corpus(tmp_path / "in", documents=30, seed=5)
    tokenizer = train_tokenizer([p.read_text() for p in corpus.iterdir()], 320, 10**6)
    prepare(list_files([str(corpus)], "--paths"), tokenizer, tmp_path / "out", SETTINGS)
    for workers in ("0", "1"):
        flags = ["--data.prepared", str(tmp_path / "out"), "--data.workers", workers, "--mesh.data", "1"]
        flags += ["--data.sequence_length", "32", "--train.batch_size", "8"]
        stream = open_stream(flags)
        shard = next(iter((tmp_path / "out").glob("train-*.arrayrecord")))
        content = shard.read_bytes()
        shard.unlink()
        with pytest.raises(UserError, match=rf"{shard.name}: (the shard is gone|.* No such file)[^\n]*$"):
            take(stream, STEPS)
        stream.close()
        shard.write_bytes(content)


def test_ctrl_c_ends_the_workers_quietly(folders, tmp_path):
    settings = {
        "run_dir": str(tmp_path / "run"),
        "data": {"prepared": folders, "sequence_length": 64, "workers": 2},
        "model": {"width": 16, "layers": 1, "heads": 2, "kv_heads": 2, "mlp_width": 16},
        "train": {"steps": 100_000, "batch_size": 4},
        "logging": {"every": 1, "tensorboard": False},
        "mesh": {"data": 1},
    }
    command = [sys.executable, "train.py", "--config", str(write_yaml(tmp_path / "c.yaml", settings))]
    with open(tmp_path / "stderr", "wb") as stderr:
        process = subprocess.Popen(command, cwd=ROOT, stderr=stderr, start_new_session=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_bytes().count(b"\n") > 2):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert process.wait(timeout=120) == 128 + signal.SIGINT
    error = (tmp_path / "stderr").read_text()
    assert "Traceback" not in error, error
    assert "leaked" not in error, error
    assert (tmp_path / "run" / "checkpoints").is_dir()
    deadline = time.monotonic() + 60
    while left_of(process) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left_of(process)


def left_of(process):
    """Processes of a group that are still there."""
    return subprocess.run(["pgrep", "-g", str(process.pid)], capture_output=True, check=False).stdout
