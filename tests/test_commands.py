"""The commands as a user types them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import tiny_settings, write_corpus, write_yaml

ROOT = Path(__file__).parents[1]
CPLM = [sys.executable, "-c", "from cplm_jax.cli import main; main()"]


def run(*command, **kwargs):
    done = subprocess.run(
        [str(word) for word in command], cwd=ROOT, capture_output=True, text=True, check=False, **kwargs
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("commands")


@pytest.fixture(scope="module")
def runs(folder):
    """A quickstart at tiny size: two runs and their report."""
    settings = tiny_settings(write_corpus(folder / "corpus"), folder / "cache", folder / "runs" / "cplm")
    config = write_yaml(folder / "tiny.yaml", settings)
    command = (*CPLM, "quickstart", "--config", config)
    done = run(*command)
    assert done.stdout.splitlines()[-1] == str(folder / "runs" / "report.html")
    return command


def test_quickstart_again_just_reports(folder, runs):
    before = {p: p.read_bytes() for p in (folder / "runs").rglob("metrics.jsonl")}
    assert len(before) == 2
    done = run(*runs)
    assert done.stdout.splitlines()[-1] == str(folder / "runs" / "report.html")
    assert "compiling the training step" not in done.stderr
    assert {p: p.read_bytes() for p in before} == before


def test_eval_of_run_and_export_agree_with_the_training_run(folder, runs):
    run_dir, exported = folder / "runs" / "cplm", folder / "exported"
    done = run(sys.executable, "eval.py", "--checkpoint", run_dir, "--output", folder / "run.json")
    assert "bits_per_byte" in done.stdout
    run(*CPLM, "export", "--checkpoint", run_dir, "--output", exported)
    run(sys.executable, "eval.py", "--checkpoint", exported, "--output", folder / "export.json")
    of_run, of_export = (json.loads((folder / f"{n}.json").read_text()) for n in ("run", "export"))
    assert of_run.pop("checkpoint") != of_export.pop("checkpoint")
    assert of_run == of_export
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["split"] == "validation"
    for name in ("loss", "bits_per_byte", "loss_in_context", "loss_novel", "gate"):
        assert of_run["validation"][name] == rows[-1][name], name
    copying = of_run["copying"]
    parts = copying["loss_novel_detection"] + copying["loss_novel_identity"]
    assert parts == pytest.approx(of_run["validation"]["loss_novel"], rel=1e-5)
    assert {"copy_accuracy", "gate", "calibration"} <= copying.keys()


def test_metrics_rows_have_what_the_contract_names(folder, runs):
    for name in ("cplm", "baseline"):
        lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        train = {
            "step",
            "tokens",
            "loss",
            "learning_rate",
            "gradient_norm",
            "step_seconds",
            "tokens_per_second",
        }
        held_out = {"step", "loss", "bits_per_byte", "loss_in_context", "loss_novel", "fraction_in_context"}
        for row in rows:
            assert (train if row["split"] == "train" else held_out) <= row.keys()
            assert ("gate" in row) == (name == "cplm")
        steps = [row["step"] for row in rows if row["split"] == "train"]
        assert steps == list(range(1, 21))


def test_both_runs_saw_the_same_batches(folder, runs):
    seen = []
    for name in ("cplm", "baseline"):
        lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
        seen.append([json.loads(line)["tokens"] for line in lines])
    assert seen[0] == seen[1]


def test_generate_reads_a_prompt_from_flag_and_standard_input(folder, runs):
    command = (*CPLM, "generate", "--checkpoint", folder / "runs" / "cplm", "--max_tokens", "5", "--prompt")
    spoken = run(*command, "return self\n").stdout
    assert spoken.startswith("return self\n")
    assert run(*command, "-", input="return self\n").stdout == spoken


def test_written_configuration_starts_an_equal_run(folder, runs):
    again = folder / "again"
    run(sys.executable, "train.py", "--config", folder / "runs" / "cplm" / "config.yaml", "--run_dir", again)

    def losses(path):
        return [json.loads(line)["loss"] for line in (path / "metrics.jsonl").read_text().splitlines()]

    assert losses(again) == losses(folder / "runs" / "cplm")


def test_help_lists_the_commands():
    text = run(*CPLM, "--help").stdout
    for name in ("train", "quickstart", "eval", "compare", "generate", "export"):
        assert re.search(rf"^  {name} ", text, re.MULTILINE)
        assert "--" in run(*CPLM, name, "--help").stdout


def test_readme_names_only_what_exists():
    text = (ROOT / "README.md").read_text()
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / link).exists(), link
    from cplm_jax.config_loading import FIELDS

    for flag in re.findall(r"--([a-z_]+\.[a-z_.]+)", text):
        assert flag in FIELDS, flag
    for field in re.findall(r"`((?:data|model|mesh|train|optimizer|evaluation|checkpoint)\.[a-z_.]+)`", text):
        assert field in FIELDS, field
    for command in re.findall(r"^(?:cplm|make) ([a-z]+)", text, re.MULTILINE):
        assert command in (*text_of_commands(), "quickstart", "test")


def text_of_commands():
    from cplm_jax.cli import _COMMANDS

    return tuple(_COMMANDS)
