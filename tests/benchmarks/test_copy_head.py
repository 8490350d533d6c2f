"""The benchmark of the copy head's cost, run as a user would; its flops, against a count by hand."""

import importlib.util
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks import copy_head
from tests.tiny import write_yaml

ROOT = Path(__file__).parents[2]
# Wide enough for matrix products to be nearly all of the flops.
WIDTH, LAYERS, MLP, VOCABULARY, COPY, TOKENS = 128, 3, 320, 512, 32, 512
SETTINGS = {
    "data": {"tokenizer_vocabulary_size": VOCABULARY, "sequence_length": 64},
    "model": {
        "width": WIDTH,
        "layers": LAYERS,
        "heads": 4,
        "kv_heads": 2,
        "mlp_width": MLP,
        "copy_head": {"width": COPY, "gate": "learned", "alignment": "preceding"},
    },
}


def run(folder, *words):
    """Runs the command on the settings above and returns the process."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "XLA_FLAGS": "--xla_backend_optimization_level=0",  # the CPU programs are the same, compiled sooner
    }
    config = write_yaml(folder / "mine.yaml", SETTINGS)
    command = [sys.executable, ROOT / "benchmarks" / "copy_head.py", "--config", config, *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("benchmark")
    sizes = ["--lengths", "64", "--tokens", str(TOKENS), "--step_tokens", str(TOKENS)]
    files = ["--output", "result.json", "--table", "table.md"]
    done = run(folder, *sizes, *files, "--compiles", "1", "--pairs", "3")
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "result.json").read_text()), (folder / "table.md").read_text(), done.stdout


def products(length):
    """Multiply-adds of the training step's matrix products: one forward and two backward of each, times 2.

    Returns those of the baseline and those that the copy head adds. Masked attention and copy scores count
    in full, nothing is recomputed.
    """
    attention = WIDTH * (WIDTH + 2 * WIDTH // 2) + WIDTH * WIDTH + 2 * length * WIDTH
    block = attention + 3 * WIDTH * MLP
    forward = TOKENS * (LAYERS * block + WIDTH * VOCABULARY)
    copying = TOKENS * (2 * WIDTH * COPY + length * COPY)
    return 6 * forward, 6 * copying


def check_flops(flops, length):
    """Checks both variants' flops; beyond the products there are elementwise operations and recomputation."""
    baseline, copying = products(length)
    assert baseline < flops["baseline"] < 1.2 * baseline
    assert copying < flops["copy_head"] - flops["baseline"] < 3 * copying


def test_loops_count_as_often_as_they_run():
    def outer(x, weight):
        return jax.lax.scan(lambda x, _: (x @ weight, None), x, length=7)[0], None

    def chain(x, weights):
        return jax.lax.scan(outer, x, weights)[0]

    compiled = jax.jit(chain).lower(jnp.ones((32, 64)), jnp.ones((11, 64, 64))).compile()
    once = 2 * 32 * 64 * 64
    assert compiled.cost_analysis()["flops"] == pytest.approx(once, rel=0.01)
    assert copy_head.count_flops(compiled.as_text()) == pytest.approx(7 * 11 * once, rel=0.01)


def test_blocks_below_a_diagonal_count_as_often_as_they_run():
    def row(x, index):
        return jax.lax.fori_loop(0, index + 1, lambda _, x: x @ jnp.ones((64, 64)), x), None

    compiled = jax.jit(lambda x: jax.lax.scan(row, x, jnp.arange(6))[0]).lower(jnp.ones((32, 64))).compile()
    once = 2 * 32 * 64 * 64
    assert copy_head.count_flops(compiled.as_text()) == pytest.approx(21 * once, rel=0.01)


def test_a_loop_of_unknown_length_is_refused():
    compiled = (
        jax.jit(lambda x: jax.lax.while_loop(lambda x: x < 10, lambda x: x * 1.5, x)).lower(1.0).compile()
    )
    with pytest.raises(ValueError, match="how often"):
        copy_head.count_flops(compiled.as_text())


def test_flops_are_those_of_the_model(measured):
    result, _, _ = measured
    check_flops(result["cases"][0]["measures"]["flops"], 64)


def test_ratios_are_those_of_what_was_measured(measured):
    result, _, _ = measured
    (case,) = result["cases"]
    assert case["rows"] * case["length"] == TOKENS
    measures = case["measures"]
    added = measures["parameters"]["copy_head"] - measures["parameters"]["baseline"]
    assert added == 2 * WIDTH * COPY + WIDTH + 2  # two projections, the gate's vector and bias, a temperature
    assert measures["peak_bytes"]["baseline"] > measures["temp_bytes"]["baseline"]
    assert len(measures["step_seconds"]["pairs"]) == 3
    for name, entry in measures.items():
        ratio = entry["copy_head"] / entry["baseline"]
        if name.endswith("_seconds"):
            ratio = statistics.median(second / first for first, second in entry["pairs"])
            assert entry["quartiles"][0] <= ratio <= entry["quartiles"][1]
        assert entry["ratio"] == pytest.approx(ratio)


def test_results_tell_how_they_were_made(measured):
    result, _, _ = measured
    assert result["target"] == result["device"] == "cpu"
    assert result["versions"]["jax"] == jax.__version__
    assert "--compiles 1 --pairs 3" in result["command"]
    assert len(result["date"]) == len("2026-01-31")


def test_table_and_bars_are_printed(measured):
    result, table, printed = measured
    assert table in printed
    head, _, row = table.splitlines()
    assert head.count("|") == row.count("|")
    assert row.startswith("| mine | 64 | 8 |")
    assert f"{result['cases'][0]['measures']['flops']['ratio']:.4f}" in row
    assert "not run" not in row
    assert "not measured: 135m T=1024 step_seconds: at most 1.02" in printed


def test_what_is_not_run_shows():
    case = {"shape": "mine", "length": 64, "rows": 8, "measures": {}, "out_of_memory": {}}
    assert "not run" in copy_head.table([case], "cpu")
    assert "step" not in copy_head.table([case], "tpu-v5e")


def test_bars_are_held_against_ratios():
    measures = {"flops": {"ratio": 1.02}, "parameters": {"ratio": 1.001}, "peak_bytes": {"ratio": None}}
    bars = copy_head.judge([{"shape": "135m", "length": 2048, "measures": measures}], "tpu-v5e")
    assert {bar["measure"]: bar["verdict"] for bar in bars} == {
        "parameters": "pass",
        "flops": "FAIL",
        "peak_bytes": "not measured",
        "compile_seconds": "not measured",
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model.widht", "3"], "did you mean '--model.width'"),
        (["--model.copy_head", "null"], "nothing to compare"),
        (["--lengths", "512,0"], "'0' is no whole number above 0"),
        (["--shapes", "136m"], "the shapes are 135m, small"),
        (["--output", "nowhere/result.json"], "does not exist"),
    ],
)
def test_mistakes_are_told_before_anything_is_compiled(words, message, tmp_path, monkeypatch, capsys):
    config = write_yaml(tmp_path / "mine.yaml", SETTINGS)
    monkeypatch.setattr(copy_head, "compile_step", None)
    with pytest.raises((SystemExit, copy_head.UserError)) as error:  # argparse prints its message
        copy_head.benchmark(*copy_head.parse(["--config", str(config), *words]))
    assert message in str(error.value) + capsys.readouterr().err


def test_compiles_for_a_tpu_without_one(tmp_path):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed, so nothing can be compiled for a TPU (pip install libtpu)")
    sizes = ["--lengths", "64", "--tokens", str(TOKENS), "--compiles", "1", "--output", "result.json"]
    done = run(tmp_path, "--target", "tpu-v5e", *sizes)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["device"] == "TPU v5 lite"
    check_flops(result["cases"][0]["measures"]["flops"], 64)


def test_a_tpu_too_small_is_an_entry_of_the_table(tmp_path):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed, so nothing can be compiled for a TPU (pip install libtpu)")
    done = run(tmp_path, "--target", "tpu-v5e", "--lengths", "64", "--tokens", str(2**25), "--compiles", "1")
    assert done.returncode == 0, done.stderr
    assert "out of memory (" in done.stdout
