"""The configurations that come with the package: they load, and have the size that they say."""

from pathlib import Path

import pytest
import yaml

from cplm_jax.config import Config
from cplm_jax.config_loading import differences, load_config, to_yaml
from cplm_jax.errors import UserError
from cplm_jax.models.decoder import define_model, parameter_count
from cplm_jax.training.setup import resolve_vocabulary

FOLDER = Path(__file__).parents[1] / "configs"
FILES = sorted(FOLDER.glob("*.yaml"))
SIZES = {"quickstart": (1.2e6, 3e6), "135m": (134e6, 136e6), "360m": (360e6, 364e6), "1.7b": (1.70e9, 1.73e9)}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_configuration_loads_and_has_the_size_it_names(path):
    config = load_config([str(path)])
    low, high = SIZES[path.stem]
    resolved = resolve_vocabulary(config, config.data.tokenizer_vocabulary_size)
    assert low < parameter_count(define_model(resolved.model).shapes) < high
    assert set(path.read_text().split("\n\n")[0].splitlines()[0][:2]) == {"#", " "}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_written_configuration_reads_back_equal(path, tmp_path):
    config = load_config([str(path)])
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load_config([str(tmp_path / "again.yaml")]) == config


def test_flags_override_files_wherever_they_stand_and_later_files_earlier_ones(tmp_path):
    first, second = tmp_path / "1.yaml", tmp_path / "2.yaml"
    first.write_text("seed: 1\nmodel: {layers: 1, heads: 2, copy_head: null}\n")
    second.write_text("seed: 2\nmodel: {layers: 3}\n")
    config = load_config(arguments=["--seed", "3", "--config", str(first), "--config", str(second)])
    assert (config.seed, config.model.layers, config.model.heads) == (3, 3, 2)
    assert config.model.copy_head is None
    config = load_config([str(first)], ["--model.copy_head.gate=sentinel"])
    assert config.model.copy_head.gate == "sentinel"
    assert load_config([str(second)], ["--model.copy_head", "null"]).model.copy_head is None


def test_flags_are_read_by_the_type_of_their_field():
    words = "--optimizer.learning_rate 1e-4 --model.tied_embeddings false --optimizer.gradient_clip null"
    config = load_config(arguments=[*words.split(), "--data.paths", "a", "b", "--run_dir", "7"])
    assert config.optimizer.learning_rate == 1e-4
    assert config.model.tied_embeddings is False
    assert config.optimizer.gradient_clip is None
    assert config.data.paths == ["a", "b"]
    assert config.run_dir == "7"
    assert load_config(arguments=["--data.paths=[a, b]"]) == load_config(arguments=["--data.paths", "a", "b"])


@pytest.mark.parametrize("field", ["run_dir", "data.prepared", "data.tokenizer", "data.cache_dir"])
def test_what_is_written_or_mapped_is_no_url(field):
    with pytest.raises(UserError, match=rf"{field}.*a URL, but a path on this machine is needed; mount the"):
        load_config(arguments=[f"--{field}", "gs://bucket/x"])
    assert load_config(arguments=["--data.paths", "gs://bucket/x"]).data.paths == ["gs://bucket/x"]


def test_differences_name_the_fields():
    found = differences(Config(), load_config(arguments=["--seed", "3", "--train.steps", "5000"]))
    assert found == {"seed": (0, 3), "train.steps": (1000, 5000)}


def test_run_configuration_is_plain_yaml():
    assert yaml.safe_load(to_yaml(Config()))["model"]["copy_head"]["gate"] == "shared_softmax"
