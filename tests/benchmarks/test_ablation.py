"""The ablation as a user runs it: killed, continued, tabulated."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tiny import tiny_settings, write_corpus, write_yaml

ROOT = Path(__file__).parents[2]
MEMBER = "sentinel-both-1"
COLUMNS = {
    "total": ("validation", "loss"),
    "in-context": ("validation", "loss_in_context"),
    "novel": ("validation", "loss_novel"),
    "novel detection": ("copying", "loss_novel_detection"),
    "novel identity": ("copying", "loss_novel_identity"),
}


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ablation")
    # What is compiled runs for a few steps only, so it need not be fast, and each seed compiles the same.
    fast = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {fast}")
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(folder / "jax_cache"))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        patch.setenv("PYTHONPATH", str(ROOT))  # the package beside the script
        yield folder


def ablation(*words, start=subprocess.run):
    command = [sys.executable, "benchmarks/ablation.py", *map(str, words)]
    return start(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def lines_of(results):
    return results.read_bytes().splitlines(keepends=True) if results.exists() else []


@pytest.fixture(scope="module")
def options(folder):
    settings = tiny_settings(write_corpus(folder / "corpus"), folder / "cache")
    settings["model"]["layers"] = 1
    del settings["data"]["paths"]
    config = write_yaml(folder / "tiny.yaml", settings)
    common = ["--config", config, "--corpora", "prose", "--prose", folder / "corpus" / "*.txt"]
    return [*common, "--members", MEMBER, "--seeds", "0,1", "--steps", "6"]


@pytest.fixture(scope="module")
def results(folder, options):
    """The results of two members and two seeds, of an ablation that was killed and continued."""
    path = folder / "results.jsonl"
    command = [*options, "--results", path, "--table", folder / "table.md"]
    killed = ablation(*command, start=subprocess.Popen)
    while killed.poll() is None and not lines_of(path):
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    _, stderr = killed.communicate()
    assert killed.returncode == -signal.SIGKILL, stderr
    kept = lines_of(path)
    assert 1 <= len(kept) < 4
    with open(path, "ab") as file:  # a kill may also come within a line
        file.write(kept[0][:100])
    done = ablation(*command)
    assert done.returncode == 0, done.stderr
    assert f"4 runs, {len(kept)} of them finished before" in done.stderr
    assert lines_of(path)[: len(kept)] == kept
    assert done.stdout.splitlines()[-1] == str(folder / "table.md")
    return path


def rows_of(results):
    rows = [json.loads(line) for line in lines_of(results)]
    return {(row["member"], row["seed"]): row for row in rows}


def cells_of(text, number):
    """Returns {member: {column: cell}} of one of a text's Markdown tables."""
    tables = [block.strip() for block in text.split("\n\n") if block.startswith("|")]
    header, _, *rows = [
        [c.strip() for c in line.strip("|").split("|")] for line in tables[number].split("\n")
    ]
    return {row[0]: dict(zip(header, row, strict=True)) for row in rows}


def estimate(values, sign=""):
    mean = sum(values) / len(values)
    error = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))
    return f"{mean:{sign}.4f} ± {error:.4f}"


def test_every_run_is_finished_once_in_order_and_on_the_baselines_tokens(results):
    rows = rows_of(results)
    assert list(rows) == [("baseline", 0), (MEMBER, 0), ("baseline", 1), (MEMBER, 1)]
    assert len(rows) == len(lines_of(results))
    for seed in (0, 1):
        assert rows["baseline", seed]["tokens"] == rows[MEMBER, seed]["tokens"] > 0
    assert rows["baseline", 0]["results"] != rows["baseline", 1]["results"]
    assert {row["steps"] for row in rows.values()} == {6}
    assert rows["baseline", 0]["copy_head_parameters"] == 0 < rows[MEMBER, 0]["copy_head_parameters"]


def test_the_table_has_means_errors_and_paired_differences(folder, results):
    text, rows = (folder / "table.md").read_text(), rows_of(results)
    losses, differences = cells_of(text, 0), cells_of(text, 1)
    assert list(losses) == ["baseline", MEMBER]
    assert list(differences) == [MEMBER]
    assert losses[MEMBER]["seeds"] == differences[MEMBER]["pairs"] == "2"
    for column, (suite, name) in COLUMNS.items():
        value = {key: row["results"][suite][name] for key, row in rows.items()}
        for member, cells in losses.items():
            assert cells[column] == estimate([value[member, 0], value[member, 1]])
        pairs = [value[MEMBER, seed] - value["baseline", seed] for seed in (0, 1)]
        assert differences[MEMBER][column] == estimate(pairs, "+")


def test_a_missing_seed_shows_and_has_no_standard_error(folder, options, results):
    part = folder / "part.jsonl"
    part.write_bytes(b"".join(lines_of(results)[:3]))
    done = ablation(*options, "--results", part, "--only-table")
    losses, differences = cells_of(done.stdout, 0), cells_of(done.stdout, 1)
    rows = rows_of(part)
    ours, theirs = (rows[member, 0]["results"]["validation"]["loss"] for member in (MEMBER, "baseline"))
    assert (losses["baseline"]["seeds"], losses[MEMBER]["seeds"]) == ("2", "1 of 2")
    assert losses[MEMBER]["total"] == f"{ours:.4f}"
    assert differences[MEMBER]["pairs"] == "1 of 2"
    assert differences[MEMBER]["total"] == f"{ours - theirs:+.4f}"


def test_results_of_another_configuration_are_not_mixed_in(folder, options, results):
    done = ablation(*options, "--results", results, "--only-table", "--steps", "7")
    assert "No results yet." in done.stdout
    assert "4 more results" in done.stdout
    other = folder / "other.jsonl"
    lines = [json.loads(line) for line in lines_of(results)]
    lines[0]["corpus_fingerprint"] = "another"
    other.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = ablation(*options, "--results", other, "--only-table")
    assert [cells_of(done.stdout, n)["baseline"]["seeds"] for n in (0, 2)] == ["1 of 2", "1 of 2"]
    assert cells_of(done.stdout, 3)[MEMBER]["pairs"] == "1 of 2"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--members", "sentinal-both-1"], "did you mean 'sentinel-both-1'?"),
        (["--members", "baseline@1"], "--members baseline@1: expected NAME@N"),
        (["--seeds", "0,x"], "--seed: got 'x', expected integer"),
        (["--seeds", "0,,1"], "--seeds '0,,1'"),
        (["--steps", "many"], "--train.steps: got 'many', expected integer"),
        (["--shard", "3/2"], "--shard 3/2: expected I/N"),
        (["--corpora", "stdlib,verse"], "--corpora: unknown corpus 'verse'"),
        (["--member", "grid"], "unknown option '--member'; did you mean '--members'?"),
        (["--corpora", "prose"], "give --prose"),
        (["--only-table", "--results", "/nonexistent"], "/nonexistent: no such file"),
        (["--model.copy_head.gat", "x"], "did you mean '--model.copy_head.gate'?"),
    ],
)
def test_mistakes_end_in_one_line(words, message):
    done = ablation("--corpora", "stdlib", "--members", MEMBER, *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_a_damaged_results_file_is_refused_and_kept(folder, options, results):
    damaged = folder / "damaged.jsonl"
    content = b"not a result\n" + results.read_bytes()
    damaged.write_bytes(content)
    done = ablation(*options, "--results", damaged)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"{damaged}:1: not a result" in done.stderr
    assert damaged.read_bytes() == content
