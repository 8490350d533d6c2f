"""A corpus and a configuration small enough for every test."""

import random
from pathlib import Path

import yaml

from cplm_jax.config import Config
from cplm_jax.config_loading import load_config

_WORDS = [
    "def",
    "return",
    "self",
    "value",
    "for",
    "in",
    "range",
    "print",
    "data",
    "index",
    "token",
    "copy",
    "paste",
    "model",
    "layer",
    "batch",
]


def write_corpus(folder: Path, documents: int = 40, seed: int = 0) -> Path:
    """Writes text files that look a little like code and repeat names, as code does."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(documents):
        names = [f"{rng.choice(_WORDS)}_{rng.choice('abcdefgh')}{rng.randrange(100)}" for _ in range(4)]
        lines = [
            "    " * rng.randrange(3)
            + " ".join(rng.choice(names + _WORDS) for _ in range(rng.randrange(1, 9)))
            for _ in range(rng.randrange(5, 60))
        ]
        (folder / f"{number:03}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def tiny_settings(corpus: Path, cache: Path, run_dir: Path | None = None) -> dict:
    """Settings of a model of about 0.03 M parameters on one device."""
    return {
        "run_dir": None if run_dir is None else str(run_dir),
        "data": {
            "paths": str(corpus / "*.txt"),
            "tokenizer_vocabulary_size": 320,
            "sequence_length": 64,
            "cache_dir": str(cache),
            "validation_fraction": 0.2,
        },
        "model": {
            "width": 32,
            "layers": 2,
            "heads": 4,
            "kv_heads": 4,
            "mlp_width": 48,
            "copy_head": {"width": 16},
        },
        "optimizer": {"warmup_steps": 3},
        "train": {"steps": 20, "batch_size": 8},
        "evaluation": {"every": 10, "batches": 2, "batch_size": 8},
        "checkpoint": {"every": 10},
        "logging": {"every": 1, "tensorboard": False},
        "mesh": {"data": 1},
    }


def write_yaml(path: Path, settings: dict) -> Path:
    """Writes settings as a configuration file."""
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


def tiny_config(folder: Path, *flags: str) -> Config:
    """Builds a tiny configuration, with its corpus, below ``folder``; ``flags`` override it."""
    corpus = folder / "corpus"
    if not corpus.exists():
        write_corpus(corpus)
    file = write_yaml(folder / "tiny.yaml", tiny_settings(corpus, folder / "cache", folder / "run"))
    return load_config([str(file)], flags)
