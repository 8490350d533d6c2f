"""Measures how fast batches come from prepared folders, on one core or more.

    python benchmarks/data.py FOLDER [FOLDER ...] [--cores 1] [--workers 0] [--seconds 10]

For each packing: target tokens a second of whole batches on the device, as training takes them, and the
padding. The first batch (opening the shards, laying out the epoch) is timed by itself.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence


def measure(folders: Sequence[str], packing: str, options: argparse.Namespace) -> str:
    """Returns a row of the table."""
    from cplm_jax.config_loading import load_config
    from cplm_jax.data.corpus import load_corpus
    from cplm_jax.data.pipeline import TrainingBatches, make_rows
    from cplm_jax.sharding import make_mesh

    flags = ["--data.prepared", *folders, "--data.packing", packing, "--data.workers", str(options.workers)]
    flags += ["--data.sequence_length", str(options.length), "--mesh.data", "1"]
    config = load_config([], flags)
    began = time.perf_counter()
    rows, _ = make_rows(load_corpus(config.data), config)
    batches = TrainingBatches(rows, options.batch_size, 1, 2**40, make_mesh(config.mesh), config.data)
    next(batches)
    first = time.perf_counter() - began
    taken, began = 0, time.perf_counter()
    while time.perf_counter() - began < options.seconds:
        next(batches)
        taken += 1
    seconds = time.perf_counter() - began
    batches.close()
    padding = sum(s.padding * share for s, share in zip(rows.sources, rows.shares, strict=True))
    rate = taken * options.batch_size * options.length * (1 - padding) / seconds
    return f"| {packing} | {rate / 1e6:.2f} | {padding:.2%} | {first:.2f} |"


def command(arguments: Sequence[str]) -> int:
    """Runs ``data.py``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("folders", nargs="+", help="folders that cplm prepare made")
    parser.add_argument("--cores", type=int, default=1, help="cores to use (%(default)s)")
    parser.add_argument("--workers", type=int, default=0, help="data.workers (%(default)s)")
    parser.add_argument("--length", type=int, default=2048, help="data.sequence_length (%(default)s)")
    parser.add_argument("--batch_size", type=int, default=16, help="rows of a batch (%(default)s)")
    parser.add_argument("--seconds", type=float, default=10, help="to measure for, each (%(default)s)")
    options = parser.parse_args(arguments)
    cores = sorted(os.sched_getaffinity(0))[: options.cores]
    os.sched_setaffinity(0, cores)  # before JAX starts its threads
    print(f"{len(cores)} core(s), {options.workers} worker processes, rows of {options.length}\n")
    print("| packing | M target tokens/s | padding | first batch, s |\n|---|--:|--:|--:|")
    for packing in ("concatenate", "best_fit"):
        print(measure(options.folders, packing, options), flush=True)
    return 0


if __name__ == "__main__":
    from cplm_jax.cli import run

    sys.exit(run(command, sys.argv[1:]))
