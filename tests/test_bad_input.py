"""Every kind of bad input, as a user types it: exit status 2, one message, nothing lost."""

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import sentencepiece

from cplm_jax import cli
from cplm_jax.config_loading import FIELDS, help_text
from cplm_jax.training.run_directory import RunDirectory
from tests.tiny import write_corpus

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = {
    "train": ["train.py"],
    "eval": ["eval.py"],
    "generate": ["-c", "from cplm_jax.cli import main; main()", "generate"],
    "export": ["-c", "from cplm_jax.cli import main; main()", "export"],
    "cplm": ["-c", "from cplm_jax.cli import main; main()"],
}
BASE = """\
seed: 1
model: {{width: 32, layers: 2, heads: 4, kv_heads: 2, mlp_width: 64, copy_head: {{width: 16}}}}
data:
  paths: {corpus}
  tokenizer_vocabulary_size: 320
  sequence_length: 64
  cache_dir: {cache}
  prefetch: 0
optimizer: {{warmup_steps: 2}}
mesh: {{data: 1}}
checkpoint: {{every: 5, keep: 3}}
evaluation: {{every: 5, batch_size: 8, batches: 1}}
logging: {{every: 1, tensorboard: false}}
train: {{steps: 15, batch_size: 4}}
"""


def cplm(
    command: str, arguments: Sequence[str], env: dict[str, str] | None = None, stdin: bytes = b""
) -> subprocess.CompletedProcess:
    clean = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return subprocess.run(
        [sys.executable, *COMMANDS[command], *arguments],
        cwd=ROOT,
        env={**clean, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **(env or {})},
        input=stdin,
        capture_output=True,
        timeout=300,
        check=False,
    )


@dataclass
class World:
    """A corpus, a run of 15 steps that was killed after its checkpoint of step 10, and its export."""

    tmp: Path

    def __post_init__(self):
        self.corpus, self.cache = self.tmp / "corpus", self.tmp / "cache"
        self.run, self.export, self.base = self.tmp / "run", self.tmp / "export", self.tmp / "base.yaml"
        self.newest = self.run / "checkpoints" / "10"

    def write(self, name: str, content: str | bytes) -> str:
        path = self.tmp / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        return str(path)


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = World(tmp_path_factory.mktemp("bad_input"))
    write_corpus(world.corpus)
    world.write("base.yaml", BASE.format(corpus=world.corpus, cache=world.cache))
    assert cli.run(cli.train_command, ["--config", str(world.base), "--run_dir", str(world.run)]) == 0
    assert cli.run(cli.export_command, ["--checkpoint", str(world.run), "--output", str(world.export)]) == 0
    shutil.rmtree(world.run / "checkpoints" / "15")
    return world


@pytest.fixture
def world(template: World, tmp_path: Path) -> World:
    """A copy that a test may spoil; corpus and cache are shared."""
    copy = World(tmp_path)
    copy.corpus, copy.cache, copy.base = template.corpus, template.cache, template.base
    shutil.copytree(template.run, copy.run)
    shutil.copytree(template.export, copy.export)
    return copy


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None
        for p in sorted(folder.rglob("*"))
        if p.name != ".lock"
    }


@dataclass
class Case:
    arguments: Callable[[World], Sequence[str]]
    fragments: Sequence[str]
    """What the message must contain; {tmp}, {run}, {corpus}, ... stand for the world's paths."""
    command: str = "train"
    env: dict[str, str] = field(default_factory=dict)
    stdin: bytes = b""
    inside: bool = False
    """Whether it runs in this process, which has loaded JAX already."""
    alone: bool = False
    """Whether the words come without the good configuration."""
    while_running: Callable[[World], contextlib.AbstractContextManager] = lambda world: (
        contextlib.nullcontext()
    )


CASES: dict[str, Case] = {}


def add(name: str, case: Case) -> None:
    assert name not in CASES, f"two cases named {name}"
    CASES[name] = case


def flags(name: str, words: str, *fragments: str, **options) -> None:
    """A case of ``train.py`` with these words after a good configuration."""
    add(name, Case(lambda world: words.format(**paths(world)).split(), fragments, **options))


def yaml(name: str, text: str | bytes, *fragments: str, **options) -> None:
    """A case of ``train.py`` with a second configuration file, bad.yaml."""
    add(name, Case(lambda world: ["--config", world.write("bad.yaml", text)], fragments, **options))


def case(*fragments: str, **options) -> Callable:
    """A case whose words a function makes, perhaps after spoiling something in the world."""

    def register(make: Callable[[World], Sequence[str]]) -> Callable:
        add(make.__name__, Case(make, fragments, **options))
        return make

    return register


def paths(world: World) -> dict[str, str]:
    return {k: str(getattr(world, k)) for k in ("tmp", "corpus", "cache", "run", "export", "base", "newest")}


# ---------------------------------------------------------------- command line

flags("unknown_flag", "--train.stps 5", "--train.stps", "did you mean '--train.steps'")
flags("unknown_flag_without_section", "--steps 5", "--steps", "did you mean '--train.steps'")
flags("unknown_section", "--trian.steps 5", "--trian.steps", "did you mean '--train.steps'")
flags("section_as_flag", "--model 5", "--model is a section", "--model.")
flags("optional_section_as_flag", "--model.copy_head learned", "--model.copy_head takes only null")
flags("value_missing", "--train.steps --seed 1", "--train.steps needs a value", "integer")
flags("config_without_file", "--config", "--config needs a YAML file")
flags("two_values", "--train.steps 5 6", "--train.steps takes one value", "5 6")
add("one_dash", Case(lambda w: ["-steps", "5"], ["'-steps'", "--section.field value"], alone=True))
flags("wrong_type", "--train.steps many", "--train.steps", "'many'", "integer")
flags("fraction_for_integer", "--model.width 32.5", "--model.width", "'32.5'", "integer")
flags("empty_value", "--train.steps=", "--train.steps", "integer")
flags("not_a_list", "--data.paths [a,b", "--data.paths", "not a YAML list", "[a,b")
flags("misspelt_boolean", "--model.tied_embeddings ture", "--model.tied_embeddings", "'ture'", "true|false")
flags(
    "misspelt_choice",
    "--model.copy_head.gate lerned",
    "--model.copy_head.gate",
    "'lerned'",
    "learned|sentinel",
)
flags("null_not_allowed", "--train.batch_size null", "--train.batch_size", "integer")
flags("negative", "--model.layers -2", "--model.layers", "'-2'", "greater than 0")
flags("zero", "--train.accumulation 0", "--train.accumulation", "greater than 0")
flags("not_a_number", "--optimizer.learning_rate nan", "--optimizer.learning_rate", "'nan'", "finite")
flags("infinite", "--optimizer.weight_decay inf", "--optimizer.weight_decay", "'inf'", "finite")
flags("negative_rate", "--optimizer.learning_rate -0.1", "--optimizer.learning_rate", "greater than 0")
flags("fraction_of_one", "--data.validation_fraction 1", "--data.validation_fraction", "less than 1")
flags("too_small_for_float32", "--optimizer.epsilon 1e-50", "--optimizer.epsilon", "'1e-50'", "float32")
flags("too_large_for_float32", "--model.copy_head.gate_bias -1e39", "--model.copy_head.gate_bias", "float32")
flags("seed_negative", "--seed -1", "--seed", "'-1'", "greater than or equal to 0")
flags("seed_huge", "--seed 99999999999", "--seed", "'99999999999'", "less than")
flags("number_beyond_machine_words", f"--model.width {10**30}", "--model.width", str(10**30), "less than")
flags("config_missing", "--config {tmp}/none.yaml", "--config {tmp}/none.yaml", "No such file")
flags("config_is_folder", "--config {corpus}", "--config {corpus}", "directory")
flags("empty_run_dir", "--run_dir=", "--run_dir", "empty")
flags("empty_corpus_path", "--data.paths=", "--data.paths", "empty")
flags("home_of_nobody", "--data.cache_dir ~nobody-of-that-name/c", "--data.cache_dir", "~nobody-of-that-name")
add("stray_word", Case(lambda w: ["stray"], ["'stray'", "--section.field value"], alone=True))
add("unknown_command", Case(lambda w: ["trian"], ["'trian'", "did you mean 'train'"], command="cplm"))
add("no_run_dir", Case(lambda w: ["--run_dir", "null"], ["run_dir", "--run_dir runs/"]))

# ---------------------------------------------------------------- YAML

yaml(
    "unknown_key",
    "seed: 2\ntrain:\n  stpes: 5\n",
    "bad.yaml:3",
    "'train.stpes'",
    "did you mean 'train.steps'",
)
yaml("key_twice", "seed: 2\ntrain: {steps: 5}\nseed: 3\n", "bad.yaml:3", "'seed'", "twice")
yaml("invalid_yaml", "seed: 2\ntrain: {steps: 5\nmodel: [\n", "bad.yaml:3", "not valid YAML")
yaml("control_character", "seed: 2\nrun_dir: a\x00b\n", "bad.yaml:2", "not valid YAML")
yaml("not_utf8", b"seed: 2\nrun_dir: caf\xe9\n", "bad.yaml:2", "UTF-8")
yaml("list", "- seed: 2\n", "bad.yaml:1", "`key: value`")
yaml("scalar_for_section", "seed: 2\nmodel: 5\n", "bad.yaml:2", "model", "got 5", "section")
yaml("null_for_section", "seed: 2\ntrain:\n", "bad.yaml:2", "train", "section")
yaml("wrong_type_in_yaml", "train:\n  steps: [5]\n", "bad.yaml:2", "train.steps", "[5]", "integer")
yaml("boolean_for_number", "train:\n  steps: yes\n", "bad.yaml:2", "train.steps", "true", "integer")
yaml(
    "boolean_for_rate",
    "optimizer:\n\n  learning_rate: on\n",
    "bad.yaml:3",
    "optimizer.learning_rate",
    "number",
)
yaml("number_for_path", "data:\n  paths: [7]\n", "bad.yaml:2", "data.paths", "7", "list of text")
yaml("unknown_tag", "seed: !!python/object:os.system 1\n", "bad.yaml:1", "not valid YAML")
yaml("impossible_date", "run_dir: 2024-13-45\n", "bad.yaml:1", "not valid YAML")
yaml(
    "infinite_in_yaml",
    "optimizer:\n  learning_rate: .inf\n",
    "bad.yaml:2",
    "optimizer.learning_rate",
    "finite",
)
yaml("nul_in_path", 'data:\n  cache_dir: "a\\0b"\n', "bad.yaml:2", "data.cache_dir", "NUL")

# ---------------------------------------------------------------- fields that do not fit together

flags("heads_do_not_divide", "--model.heads 5", "model.heads = 5", "model.width = 32")
flags("kv_heads_do_not_divide", "--model.kv_heads 3", "model.kv_heads = 3", "model.heads = 4")
flags("odd_head_width", "--model.head_width 7", "model.head_width", "even")
flags(
    "accumulation_does_not_divide", "--train.accumulation 3", "train.accumulation = 3", "train.batch_size = 4"
)
flags("warmup_beyond_end", "--optimizer.warmup_steps 15", "optimizer.warmup_steps = 15", "train.steps = 15")
flags(
    "two_axes_take_the_rest",
    "--mesh.data -1 --mesh.fsdp -1",
    "mesh.data = -1 and mesh.fsdp = -1",
    "only one axis",
)
flags("axis_of_zero", "--mesh.tensor 0", "mesh.tensor", "0", "positive or -1")
flags("axis_of_minus_two", "--mesh.tensor -2", "--mesh.tensor", "'-2'", "greater than or equal to -1")
flags(
    "keys_from_no_earlier_layer",
    "--model.copy_head.key_layer 2",
    "model.copy_head.key_layer = 2",
    "model.layers = 2",
)
flags("nothing_held_out", "--data.validation_fraction 0", "data.validation_fraction", "data.validation_paths")

# ---------------------------------------------------------------- devices

EIGHT = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
flags("mesh_beyond_devices", "--mesh.data 4", "mesh.data = 4", "4 devices", "1 are present")
flags(
    "mesh_overflows",
    f"--mesh.data {2**30} --mesh.fsdp {2**30} --mesh.tensor {2**4}",
    "devices",
    "are present",
)
flags("mesh_does_not_divide_devices", "--mesh.fsdp 3 --mesh.data -1", "mesh.fsdp = 3", "8", env=EIGHT)
flags("rows_do_not_divide", "--mesh.data 8", "train.batch_size", "= 4", "mesh.data", "= 8", env=EIGHT)
flags(
    "validation_rows_do_not_divide",
    "--mesh.data 4 --evaluation.batch_size 6",
    "evaluation.batch_size = 6",
    "mesh.data",
    env=EIGHT,
)
flags(
    "tensor_does_not_divide_kv_heads", "--mesh.tensor 4", "model.kv_heads = 2", "mesh.tensor = 4", env=EIGHT
)
flags(
    "tensor_does_not_divide_vocabulary",
    "--mesh.tensor 2 --model.vocabulary_size 321",
    "model.vocabulary_size = 321",
    "mesh.tensor = 2",
    env=EIGHT,
)
flags(
    "fsdp_does_not_divide_width",
    "--mesh.fsdp 4 --model.width 42 --model.head_width 8",
    "model.width = 42",
    env=EIGHT,
)
flags(
    "sequence_does_not_divide_length",
    "--mesh.sequence 8 --data.sequence_length 60",
    "data.sequence_length = 60",
    "mesh.sequence = 8",
    env=EIGHT,
)
flags("no_such_device", "--seed 1", "no usable device", "cuda", env={"JAX_PLATFORMS": "cuda"})
flags(
    "processes_not_set",
    "--mesh.distributed true",
    "mesh.distributed",
    "JAX_NUM_PROCESSES",
    env={"JAX_COORDINATOR_ADDRESS": "localhost:1", "JAX_NUM_PROCESSES": "two", "JAX_PROCESS_ID": "0"},
)

# ---------------------------------------------------------------- corpus

flags("no_paths", "--data.paths []", "data.paths is empty", "--data.paths 'corpus/*.txt'")
flags("corpus_missing", "--data.paths {tmp}/none", "data.paths", "{tmp}/none", "matches no file")
flags("glob_matches_nothing", "--data.paths {corpus}/*.md", "data.paths", "{corpus}/*.md", "matches no file")
flags("corpus_is_device", "--data.paths /dev/zero", "data.paths", "/dev/zero", "matches no file")
flags(
    "validation_paths_missing",
    "--data.validation_paths {tmp}/none",
    "data.validation_paths",
    "matches no file",
)
flags(
    "everything_held_out",
    "--data.validation_fraction 0.999999",
    "no training document",
    "validation_fraction",
)
flags("one_document", "--data.paths {corpus}/000.txt", "no held-out document", "data.validation_paths")
flags(
    "trained_on_held_out",
    "--data.validation_paths {corpus}/000.txt",
    "000.txt",
    "data.paths",
    "data.validation_paths",
)
flags(
    "sequence_beyond_text",
    "--data.sequence_length 9999999",
    "data.sequence_length = 9999999",
    "tokens",
    "lower it",
)


@case("no training document", "data.paths")
def only_empty_files(world: World) -> Sequence[str]:
    world.write("empty/a.txt", "")
    world.write("empty/b.jsonl", "\n\n")
    return ["--data.paths", str(world.tmp / "empty")]


@case("{tmp}/bad/b.txt", "byte 5", "UTF-8")
def undecodable_file(world: World) -> Sequence[str]:
    world.write("bad/a.txt", "good\n")
    world.write("bad/b.txt", b"fine \xff\n")
    return ["--data.paths", str(world.tmp / "bad")]


def jsonl(name: str, line: str | bytes, *fragments: str, options: str = "") -> None:
    line = line if isinstance(line, bytes) else line.encode("utf-8", "surrogatepass")
    content = b'{"text": "good", "name": "a"}\n\n' + line + b'\n{"text": "good", "name": "b"}\n'

    def make(world: World) -> Sequence[str]:
        return ["--data.paths", world.write("bad.jsonl", content), *options.split()]

    add(f"jsonl_{name}", Case(make, ["{tmp}/bad.jsonl:3", *fragments], inside=True))


jsonl("invalid", '{"text": "a"', "not valid JSON")
jsonl("not_an_object", '["a"]', "JSON object", "list")
jsonl("field_missing", '{"txt": "a"}', "no field 'text'", "data.text_field", "'txt'")
jsonl("field_not_text", '{"text": 5}', "field 'text'", "data.text_field", "int")
jsonl("lone_surrogate", '{"text": "a\\ud800"}', "surrogate", "'text'")
jsonl("not_utf8", b'{"text": "\xff"}', "UTF-8")
jsonl("huge_number", '{"text": "a", "n": ' + "1" * 5000 + "}", "not valid JSON")
jsonl("nested_too_deep", '{"text": "a", "n": ' + "[" * 100_000 + "]" * 100_000 + "}", "not valid JSON")

# ---------------------------------------------------------------- tokenizer

flags(
    "vocabulary_below_tokenizer",
    "--model.vocabulary_size 300",
    "model.vocabulary_size = 300",
    "319",
    "at least 320",
)
flags(
    "tokenizer_too_large",
    "--data.tokenizer_vocabulary_size 90000",
    "data.tokenizer_vocabulary_size = 90000",
    "too small",
    "lower it",
)
flags(
    "tokenizer_huge",
    f"--data.tokenizer_vocabulary_size {10**12}",
    "data.tokenizer_vocabulary_size",
    "less than",
)
flags(
    "tokenizer_tiny", "--data.tokenizer_vocabulary_size 100", "data.tokenizer_vocabulary_size", "'100'", "300"
)
flags(
    "tokenizer_missing",
    "--data.tokenizer {tmp}/none.model",
    "data.tokenizer",
    "{tmp}/none.model",
    "No such file",
)
flags("tokenizer_is_folder", "--data.tokenizer {corpus}", "data.tokenizer", "{corpus}", "directory")
flags("not_a_tokenizer", "--data.tokenizer {base}", "data.tokenizer", "{base}", "not a sentencepiece model")


@case("data.tokenizer", "{tmp}/empty.model", "not a sentencepiece model")
def empty_tokenizer(world: World) -> Sequence[str]:
    return ["--data.tokenizer", world.write("empty.model", b"")]


def train_sentencepiece(world: World, **options) -> str:
    path = world.tmp / "other.model"
    with open(path, "wb") as out:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter((world.corpus / "000.txt").read_text().splitlines()),
            model_writer=out,
            minloglevel=2,
            **options,
        )
    return str(path)


@case("data.tokenizer", "{tmp}/other.model", "byte fallback")
def tokenizer_without_bytes(world: World) -> Sequence[str]:
    return [
        "--data.tokenizer",
        train_sentencepiece(world, model_type="char", vocab_size=20, hard_vocab_limit=False),
    ]


@case("{run}", "tokenizer", "data.tokenizer", "--checkpoint.allow_changed_config true")
def tokenizer_of_another_run(world: World) -> Sequence[str]:
    options = {"model_type": "bpe", "vocab_size": 320, "byte_fallback": True, "hard_vocab_limit": False}
    path = train_sentencepiece(world, **options)
    return ["--data.tokenizer", path, "--model.vocabulary_size", "320"]


# ---------------------------------------------------------------- token cache

flags("cache_below_file", "--data.cache_dir {base}/cache", "data.cache_dir", "{base}/cache")
flags("cache_unwritable", "--data.cache_dir /proc/cache", "data.cache_dir", "/proc/cache")


def damaged_cache(name: str, spoil: Callable[[Path], None]) -> None:
    def make(world: World) -> Sequence[str]:
        cache = world.tmp / "cache"
        shutil.copytree(world.cache, cache)
        for folder in (cache / "tokens").iterdir():
            spoil(folder)
        return ["--data.cache_dir", str(cache)]

    add(f"cache_{name}", Case(make, ["{tmp}/cache/tokens/", "damaged", "delete"], inside=True))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x40
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


damaged_cache("truncated", lambda folder: truncate(folder / "train-00000-000.arrayrecord"))
damaged_cache("flipped", lambda folder: flip(folder / "train-00000-000.arrayrecord"))
damaged_cache("flipped_lengths", lambda folder: flip(folder / "train.lengths.npy"))
damaged_cache("file_missing", lambda folder: (folder / "train-00000-000.arrayrecord").unlink())
damaged_cache("empty_file", lambda folder: (folder / "train.lengths.npy").write_bytes(b""))
damaged_cache("other_json", lambda folder: (folder / "manifest.json").write_text("[1]"))

# ---------------------------------------------------------------- run directory

flags("run_dir_below_file", "--run_dir {base}/run", "run_dir", "{base}/run", "choose another")
flags("run_dir_unwritable", "--run_dir /proc/run", "run_dir", "/proc/run", "choose another")
flags("run_dir_name_too_long", "--run_dir {tmp}/" + "x" * 5000, "run_dir", "too long", "choose another")


@contextlib.contextmanager
def locked(world: World) -> Iterator[None]:
    with open(world.run / ".lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


flags("run_dir_in_use", "--seed 1", "run_dir", "{run}", "another process", while_running=locked)
flags(
    "config_changed",
    "--train.steps 20 --optimizer.beta1 0.5 --model.copy_head null",
    "{run}",
    "train.steps: 15 -> 20",
    "optimizer.beta1: 0.9 -> 0.5",
    "model.copy_head",
    "--checkpoint.allow_changed_config true",
)
flags(
    "model_changed",
    "--model.width 64 --checkpoint.allow_changed_config true",
    "{newest}",
    "another model",
    "64",
    "32",
)
flags(
    "copy_head_removed",
    "--model.copy_head null --checkpoint.allow_changed_config true",
    "{newest}",
    "another model",
    "copy_head",
)
flags(
    "corpus_changed",
    "--data.paths {corpus}/0[0-2]*",
    "{run}",
    "data.paths",
    "--checkpoint.allow_changed_config",
)


@case("{run}", "config.yaml", "another run_dir")
def config_deleted(world: World) -> Sequence[str]:
    (world.run / "config.yaml").unlink()
    return []


@case("{run}/config.yaml:3", "'model.witdh'", "did you mean 'model.width'")
def config_damaged(world: World) -> Sequence[str]:
    config = world.run / "config.yaml"
    config.write_text(config.read_text().replace("  vocabulary_size", "  witdh: 32\n  vocabulary_size", 1))
    text = config.read_text().splitlines()
    assert "witdh" in text[3], text[:5]
    config.write_text("\n".join([*text[:2], *text[2:3], *text[3:]]).replace("seed: 1\n", "", 1))
    return []


def run_file(name: str, content: str | bytes | None, *fragments: str, command: str = "train") -> None:
    """A case of a file of the run directory with other content, or without it."""
    file = name.split("__")[1].replace("_json", ".json").replace("_model", ".model")

    def make(world: World) -> Sequence[str]:
        path = world.run / file
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return [] if command == "train" else ["--checkpoint", str(world.run)]

    add(f"{name}__{command}", Case(make, ["{run}", file, *fragments], command=command, inside=True))


for _command in ("train", "eval"):
    run_file("garbage__run_json", "{", "JSON", command=_command)
    run_file("list__run_json", "[1]", command=_command)
    run_file("scalar__run_json", "7", command=_command)
    run_file("empty_object__run_json", "{}", command=_command)
    run_file("undecodable__run_json", b"\xff", command=_command)
    run_file("missing__run_json", None, command=_command)
run_file("garbage__tokenizer_model", b"abc", "sentencepiece", command="eval")
run_file("missing__tokenizer_model", None, "missing", command="eval")


def metrics(name: str, line: str) -> None:
    def make(world: World) -> Sequence[str]:
        path = world.run / "metrics.jsonl"
        lines = path.read_text().splitlines()
        path.write_text("\n".join([*lines[:3], line, *lines[3:]]) + "\n")
        return ["--checkpoint.every", "7"]

    add(f"metrics_{name}", Case(make, ["{run}/metrics.jsonl:4", "not a row of metrics"], inside=True))


metrics("cut", '{"split": "train", "st')
metrics("without_step", '{"split": "train", "loss": 1.0}')
metrics("without_split", '{"step": 4, "loss": 1.0}')
metrics("not_an_object", "[4]")
metrics("not_finite", '{"split": "train", "step": 4, "loss": NaN}')
metrics("step_is_text", '{"split": "train", "step": "4"}')


@case("{run}", "metrics", "checkpoint", "another run_dir")
def checkpoints_deleted(world: World) -> Sequence[str]:
    shutil.rmtree(world.run / "checkpoints")
    return []


@case("{run}", "metrics", "checkpoint", "another run_dir")
def checkpoints_emptied(world: World) -> Sequence[str]:
    for step in (world.run / "checkpoints").iterdir():
        shutil.rmtree(step)
    return []


@case("{tmp}/other", "config.yaml", "another run_dir")
def run_dir_holds_another_project(world: World) -> Sequence[str]:
    world.write("other/config.yaml", "their: own\n")
    world.write("other/metrics.jsonl", "precious\n")
    return ["--run_dir", str(world.tmp / "other")]


@case("{tmp}/other", "tokenizer.model", "another run_dir")
def run_dir_holds_a_tokenizer(world: World) -> Sequence[str]:
    world.write("other/tokenizer.model", "their own\n")
    return ["--run_dir", str(world.tmp / "other")]


@case("{tmp}/other", "checkpoints", "another run_dir")
def run_dir_with_a_file_for_checkpoints(world: World) -> Sequence[str]:
    world.write("other/checkpoints", "their own\n")
    return ["--run_dir", str(world.tmp / "other")]


@case("{export}", "another run_dir")
def run_dir_is_an_export(world: World) -> Sequence[str]:
    return ["--run_dir", str(world.export)]


# ---------------------------------------------------------------- damaged checkpoints


def largest(folder: Path) -> Path:
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def garbage(path: Path) -> None:
    path.write_bytes(b"\x00garbage" * 20)


def edit_progress(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def edit(step: Path) -> None:
        path = step / "progress" / "metadata"
        record = json.loads(path.read_text())
        path.write_text(json.dumps(change(record)))

    return edit


def empty_step(step: Path) -> None:
    (step.parent / "12").mkdir()


def metadata_alone(step: Path) -> None:
    for item in ("params", "optimizer", "progress"):
        shutil.rmtree(step / item)


ALL, TRAIN = ("train", "eval"), ("train",)
DAMAGE: dict[str, tuple[Callable[[Path], object], Sequence[str]]] = {
    "params_truncated": (lambda step: truncate(largest(step / "params")), ALL),
    "params_emptied": (lambda step: os.truncate(largest(step / "params"), 0), ALL),
    "params_flipped": (lambda step: flip(largest(step / "params")), ALL),
    "params_file_deleted": (lambda step: largest(step / "params").unlink(), ALL),
    "params_deleted": (lambda step: shutil.rmtree(step / "params"), ALL),
    "params_metadata_garbage": (lambda step: garbage(step / "params" / "_METADATA"), ALL),
    "params_manifest_garbage": (lambda step: garbage(step / "params" / "manifest.ocdbt"), ALL),
    "optimizer_truncated": (lambda step: truncate(largest(step / "optimizer")), TRAIN),
    "optimizer_flipped": (lambda step: flip(largest(step / "optimizer")), TRAIN),
    "optimizer_deleted": (lambda step: shutil.rmtree(step / "optimizer"), TRAIN),
    "progress_garbage": (lambda step: garbage(step / "progress" / "metadata"), ALL),
    "progress_list": (edit_progress(lambda record: [1]), ALL),
    "progress_empty": (edit_progress(lambda record: {}), ALL),
    "progress_checksums_missing": (edit_progress(lambda record: {**record, "checksums": 3}), ALL),
    "progress_position": (edit_progress(lambda record: {**record, "data": {"next_index": 9}}), TRAIN),
    "progress_position_garbage": (edit_progress(lambda record: {**record, "data": {"a": 1}}), TRAIN),
    "progress_tokens": (edit_progress(lambda record: {**record, "tokens": "many"}), ALL),
    "progress_deleted": (lambda step: shutil.rmtree(step / "progress"), ALL),
    "items_deleted": (metadata_alone, ALL),
    "renamed": (lambda step: step.rename(step.parent / "11"), TRAIN),
    "empty_step": (empty_step, ALL),
}
for _name, (_spoil, _commands) in DAMAGE.items():
    for _command in _commands:

        def _make(world: World, spoil=_spoil, command=_command) -> Sequence[str]:
            spoil(world.newest)
            return [] if command == "train" else ["--checkpoint", str(world.run)]

        add(
            f"checkpoint_{_name}__{_command}",
            Case(
                _make,
                ["re:{run}/checkpoints/1[012]: ", "damaged", "move it away"],
                command=_command,
                inside=_name not in ("params_truncated", "params_file_deleted"),
            ),
        )


@case("{run}/checkpoints/10: ", "damaged", "no other checkpoint", "another run_dir")
def only_checkpoint_damaged(world: World) -> Sequence[str]:
    shutil.rmtree(world.run / "checkpoints" / "5")
    truncate(largest(world.newest / "params"))
    return []


# ---------------------------------------------------------------- eval, generate, export


def command(name: str, command: str, words: str, *fragments: str, **options) -> None:
    def make(world):
        return words.format(**paths(world)).split()

    add(f"{command}_{name}", Case(make, fragments, command=command, **options))


for _command, _more in (("eval", ""), ("generate", "--prompt a"), ("export", "--output {tmp}/new")):
    command(
        "missing",
        _command,
        f"--checkpoint {{tmp}}/none {_more}",
        "checkpoint {tmp}/none",
        "no such folder",
        "give a run",
    )
    command(
        "of_file",
        _command,
        f"--checkpoint {{base}} {_more}",
        "checkpoint {base}",
        "no such folder",
        "give a run",
    )
    command(
        "of_other_folder",
        _command,
        f"--checkpoint {{corpus}} {_more}",
        "checkpoint {corpus}",
        "neither a run",
        "give the run_dir",
    )
    command(
        "misspelt_option",
        _command,
        f"--checkpiont {{run}} {_more}",
        "--checkpiont",
        "did you mean '--checkpoint'",
    )
    command("without_checkpoint", _command, _more, "--checkpoint", "required")
command("too_long", "eval", "--checkpoint " + "x" * 5000, "checkpoint xxx", "no such folder")
command("empty", "eval", "--checkpoint=", "--checkpoint", "empty")
command(
    "home_of_nobody",
    "eval",
    "--checkpoint ~nobody-of-that-name/run",
    "--checkpoint",
    "~nobody-of-that-name/run",
)
command("no_such_device", "eval", "--checkpoint {run}", "no usable device", env={"JAX_PLATFORMS": "cuda"})
command("stray_word", "eval", "--checkpoint {run} stray", "stray", "--help")
command("unknown_suite", "eval", "--checkpoint {run} --suites validation,copyign", "'copyign'", "'copying'")
command("no_suite", "eval", "--checkpoint {run} --suites=", "--suites", "validation, copying")
command(
    "output_in_missing_folder",
    "eval",
    "--checkpoint {run} --output {tmp}/no/a.json",
    "--output {tmp}/no/a.json",
)
command("output_is_folder", "eval", "--checkpoint {run} --output {tmp}", "--output {tmp}", "folder")
command("temperature", "generate", "--checkpoint {run} --prompt a --temperature -1", "--temperature -1", "0")
command("temperature_nan", "generate", "--checkpoint {run} --prompt a --temperature nan", "--temperature nan")
command(
    "temperature_text",
    "generate",
    "--checkpoint {run} --prompt a --temperature hot",
    "--temperature",
    "'hot'",
)
command("top_p", "generate", "--checkpoint {run} --prompt a --top_p 0", "--top_p 0", "above 0")
command("top_k", "generate", "--checkpoint {run} --prompt a --top_k 0", "--top_k 0", "at least 1")
command(
    "max_tokens", "generate", "--checkpoint {run} --prompt a --max_tokens 0", "--max_tokens 0", "at least 1"
)
command("seed", "generate", "--checkpoint {run} --prompt a --seed -1", "--seed -1", "at least 0")
command("prompt_not_utf8", "generate", "--checkpoint {run} --prompt a\udcff", "--prompt", "UTF-8")
command(
    "stdin_not_utf8",
    "generate",
    "--checkpoint {run} --prompt -",
    "--prompt",
    "standard input",
    "UTF-8",
    stdin=b"a\xff",
)
command("onto_folder", "export", "--checkpoint {run} --output {corpus}", "--output {corpus}", "exists")
command("below_file", "export", "--checkpoint {run} --output {base}/a", "--output {base}/a", "cannot write")
command(
    "unknown_format",
    "export",
    "--checkpoint {run} --format onyx --output {tmp}/new",
    "--format",
    "'onyx'",
    "orbax",
)


@case("{run}", "corpus", "changed since the run", command="eval")
def eval_corpus_changed(world: World) -> Sequence[str]:
    other = world.tmp / "corpus"
    shutil.copytree(world.corpus, other)
    (other / "000.txt").write_text("changed\n")
    config = world.run / "config.yaml"
    config.write_text(config.read_text().replace(str(world.corpus), str(other)))
    return ["--checkpoint", str(world.run)]


@case("{run}", "config.yaml", "missing", command="eval")
def eval_config_deleted(world: World) -> Sequence[str]:
    (world.run / "config.yaml").unlink()
    return ["--checkpoint", str(world.run)]


@case("{newest}", "another model", command="eval")
def eval_config_emptied(world: World) -> Sequence[str]:
    (world.run / "config.yaml").write_text("")
    return ["--checkpoint", str(world.run)]


def damaged_export(name: str, spoil: Callable[[Path], object]) -> None:
    def make(world: World) -> Sequence[str]:
        spoil(world.export)
        return ["--checkpoint", str(world.export)]

    fragments = ["{export}", "damaged", "export the run again"]
    add(f"export_{name}", Case(make, fragments, command="eval", inside=name != "truncated"))


def edit_details(change: Callable[[dict], dict]) -> Callable[[Path], object]:
    def edit(export: Path) -> None:
        details = json.loads((export / "run.json").read_text())
        (export / "run.json").write_text(json.dumps(change(details)))

    return edit


damaged_export("truncated", lambda export: truncate(largest(export / "params")))
damaged_export("flipped", lambda export: flip(largest(export / "params")))
damaged_export("file_deleted", lambda export: largest(export / "params").unlink())
damaged_export("emptied", lambda export: (shutil.rmtree(export / "params"), (export / "params").mkdir()))
damaged_export("record_deleted", edit_details(lambda d: {k: v for k, v in d.items() if k != "export"}))
damaged_export("record_garbage", edit_details(lambda d: {**d, "export": [1]}))
damaged_export(
    "step_deleted", edit_details(lambda d: {**d, "export": {"checksums": d["export"]["checksums"]}})
)


# ---------------------------------------------------------------- the tests


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name: str, world: World, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    case = CASES[name]
    words = list(case.arguments(world))
    if case.command == "train" and not case.alone:
        words = ["--config", str(world.base), "--run_dir", str(world.run), *words]
    before = snapshot(world.tmp), snapshot(world.corpus)
    with case.while_running(world):
        if case.inside:
            status = cli.run(getattr(cli, f"{case.command}_command"), words)
            output, error = capfd.readouterr()
        else:
            done = cplm(case.command, words, case.env, case.stdin)
            status, output = done.returncode, done.stdout.decode()
            error = done.stderr.decode("utf-8", "backslashreplace")
    typed = " ".join(words)[:500].encode("utf-8", "backslashreplace").decode()
    shown = f"{case.command} {typed}\n-> {status}\n{error}\n{output}"
    assert status == 2, shown
    assert "Traceback" not in error, shown
    assert len(re.findall(r"^error: ", error, flags=re.MULTILINE)) == 1, shown
    assert "compiling the training step" not in error, shown
    assert not output, shown
    message = error[re.search(r"^error: ", error, flags=re.MULTILINE).start() :]
    for fragment in case.fragments:
        pattern = fragment.removeprefix("re:").format(**paths(world))
        found = re.search(pattern, message) if fragment.startswith("re:") else pattern in message
        assert found, f"no {pattern!r} in the message of {shown}"
    after = snapshot(world.tmp), snapshot(world.corpus)
    assert before == after


def test_no_permission(
    world: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Root may read everything, so the refusal is made up."""

    def refuse(run: RunDirectory) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(run.checkpoints))

    monkeypatch.setattr(RunDirectory, "has_checkpoints", refuse)
    assert cli.run(cli.eval_command, ["--checkpoint", str(world.run)]) == 2
    assert f"error: {world.run / 'checkpoints'}: no permission" in capfd.readouterr().err


def test_the_world_is_sound(world: World) -> None:
    """What the cases spoil works when it is not spoilt."""
    done = cplm("train", ["--config", str(world.base), "--run_dir", str(world.run)])
    assert done.returncode == 0, done.stderr.decode()
    assert "going on from step 10 of 15" in done.stderr.decode()
    for folder in (world.run, world.export):
        done = cplm("eval", ["--checkpoint", str(folder), "--suites", "validation"])
        assert done.returncode == 0, done.stderr.decode()


def test_help_documents_every_field() -> None:
    done = cplm("train", ["--help"])
    assert done.returncode == 0
    text = done.stdout.decode()
    assert help_text() in text
    lines = text.splitlines()
    for path, info in FIELDS.items():
        assert len(info.description) > 10, f"{path} is not described"
        heads = [i for i, line in enumerate(lines) if line.startswith(f"  --{path} (")]
        assert len(heads) == 1, path
        assert lines[heads[0] + 1].strip() == info.description
