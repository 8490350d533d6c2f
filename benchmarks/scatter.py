"""What turning copy scores into a distribution over the vocabulary costs: `segment_sum` against `one_hot`.

    python benchmarks/scatter.py                    # runs on the CPU, in turns
    python benchmarks/scatter.py --target tpu-v5e   # the TPU compiler's estimate: needs libtpu, but no TPU

`cplm_jax/kernels/scatter.py` chooses by these figures.
"""

import argparse
import os
import statistics
import time

if __name__ == "__main__":
    os.environ |= {"JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from cplm_jax.double_word import DoubleWord
from cplm_jax.kernels.scatter import logsumexp_by_token

METHODS = ("segment_sum", "one_hot")
SIZES = ((8, 1, 2048), (1, 1, 32768), (1, 128, 2048), (1, 1024, 1024))  # batch, positions, candidates


def compiled(method, size, vocabulary, device):
    """Compiles the scatter for a device that need not be there."""
    batch, positions, candidates = size
    sharding = SingleDeviceSharding(device)

    def struct(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    arguments = (
        DoubleWord(*[struct((batch, positions, candidates), jnp.float32)] * 2),
        struct((batch, positions, candidates), jnp.bool_),
        struct((batch, candidates), jnp.int32),
    )
    function = jax.jit(lambda *args: logsumexp_by_token(*args, vocabulary, method))
    return function.trace(*arguments).lower(lowering_platforms=(device.platform,)).compile()


def seconds(programs, size, vocabulary, repeats):
    """Runs the programs in turns and returns the median time of each."""
    rng = np.random.default_rng(0)
    batch, positions, candidates = size
    scores = jnp.asarray(rng.standard_normal((batch, positions, candidates)), jnp.float32)
    tokens = jnp.asarray(rng.integers(0, vocabulary, (batch, candidates)), jnp.int32)
    times = {method: [] for method in programs}
    for turn in range(repeats + 1):
        for method, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(DoubleWord.of(scores), jnp.ones(scores.shape, bool), tokens))
            if turn:  # the first only warms up
                times[method].append(time.perf_counter() - start)
    return {method: statistics.median(values) for method, values in times.items()}


def main():
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", choices=("cpu", "tpu-v5e"), default="cpu")
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    if options.target == "cpu":
        device = jax.devices()[0]
    else:
        device = topologies.get_topology_desc(
            platform="tpu", topology_name="v5e:1x1", chips_per_host_bounds=(1, 1, 1)
        ).devices[0]
    what = "measured" if options.target == "cpu" else "estimated by the compiler"
    print(f"{options.target}, {options.vocabulary:,} token ids, milliseconds {what}, temporary MiB")
    print(f"{'rows x positions x candidates':32}" + "".join(f"{m:>22}" for m in METHODS))
    for size in SIZES:
        programs = {m: compiled(m, size, options.vocabulary, device) for m in METHODS}
        if options.target == "cpu":
            times = seconds(programs, size, options.vocabulary, options.repeats)
        else:
            times = {m: p.cost_analysis()["optimal_seconds"] for m, p in programs.items()}
        memory = {m: p.memory_analysis().temp_size_in_bytes / 2**20 for m, p in programs.items()}
        cells = "".join(f"{1000 * times[m]:12.3f}{memory[m]:10.1f}" for m in METHODS)
        print(f"{' x '.join(map(str, size)):32}{cells}", flush=True)


if __name__ == "__main__":
    main()
