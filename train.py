"""Trains a language model: ``python train.py --config FILE [--section.field value ...]``."""

import sys

from cplm_jax.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
