"""Measures a trained model: ``python eval.py --checkpoint RUN_OR_EXPORT [--suites ...] [--output FILE]``."""

import sys

from cplm_jax.cli import main

if __name__ == "__main__":
    main(["eval", *sys.argv[1:]])
