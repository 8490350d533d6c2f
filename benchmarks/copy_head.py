"""What the copy head costs: the training step with it, as a ratio to the baseline's without it.

    python benchmarks/copy_head.py --output result.json --table result.md
    python benchmarks/copy_head.py --target tpu-v5e    # compiles for a TPU: needs libtpu, but no TPU
    python benchmarks/copy_head.py --config mine.yaml --lengths 1024,2048 --model.copy_head.width 128

Every row is a shape and a sequence length T at a fixed number of tokens a batch. Parameters, flops, memory
and compile time are those of the compiled training step (of one device, where a mesh has several); on a CPU
the smaller steps also run. Times are taken in turns, A B B A; their ratio is the median of the pairs' ratios.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import math
import os
import platform
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    # Where libtpu is installed, JAX would look for a TPU, and libtpu, which only compiles here, lock it.
    os.environ |= {"JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh
from jaxlib import _hlo, _jax

from cplm_jax.config import Config
from cplm_jax.config_loading import load_config
from cplm_jax.data.pipeline import Batch
from cplm_jax.errors import USER_ERROR_STATUS, UserError, first_line
from cplm_jax.models.decoder import define_model, parameter_count
from cplm_jax.sharding import AXES, check_batches_divisible, check_divisible, mesh_shape, named_sharding
from cplm_jax.training.setup import resolve_vocabulary
from cplm_jax.training.step import Trainer

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
SHAPES = {"135m": CONFIGS / "135m.yaml", "small": CONFIGS / "quickstart.yaml"}
VARIANTS = ("baseline", "copy_head")

BARS = (  # target, shape, length, measure, and the most that its ratio may be
    ("tpu-v5e", "135m", 2048, "parameters", 1.01),
    ("tpu-v5e", "135m", 2048, "flops", 1.01),
    ("tpu-v5e", "135m", 2048, "peak_bytes", 1.03),
    ("tpu-v5e", "135m", 2048, "compile_seconds", 1.3),
    ("cpu", "135m", 1024, "step_seconds", 1.02),
    ("cpu", "small", 256, "step_seconds", 1.10),
)
COLUMNS = {  # heading, unit, digits
    "parameters": ("parameters, M", 1e6, 3),
    "flops": ("flops, T", 1e12, 3),
    "peak_bytes": ("peak memory, MiB", 2**20, 0),
    "temp_bytes": ("temporary, MiB", 2**20, 0),
    "compile_seconds": ("compile, s", 1, 1),
    "step_seconds": ("step, s", 1, 3),
}


def count_flops(program: str) -> float:
    """Counts the floating-point operations of a compiled program, given as ``compiled.as_text()``.

    XLA's cost analysis takes the body of a loop once. So it is asked for every body by itself too, and a
    body's share is multiplied by the loop's trips. A loop whose trips depend on those of the n-trip loop
    around it is taken to run 1, 2, ... n times, as over the blocks below a diagonal. Of a conditional the
    dearest branch counts, and custom kernels count nothing. Raises :class:`ValueError` if there is no telling
    how often a loop runs.
    """
    program = re.sub(r"stack_frame_id=\d+", "", program)  # a number in a table that is left out below
    blocks = re.split(r"^(?=(?:ENTRY )?%[\w.-]+ \(.*\{$)", program, flags=re.MULTILINE)[1:]
    computations = {block.partition("%")[2].partition(" ")[0]: block for block in blocks}
    client = jax.local_devices(backend="cpu")[0].client

    @functools.cache
    def once(name: str) -> float:
        bare = {other: block.removeprefix("ENTRY ") for other, block in computations.items()}
        bare[name] = "ENTRY " + bare[name]
        module = _hlo.hlo_module_from_text("HloModule counted\n\n" + "".join(bare.values()))
        return _jax.hlo_module_cost_analysis(client, module).get("flops", 0.0)

    def trips(loop: str, condition: str, around: float) -> float:
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop):
            return int(known[1])
        # Programs for TPUs carry no such note, but JAX's scans count from 0 up to a constant.
        bounds = re.findall(r" constant\((\d+)\)", computations[condition])
        if len(bounds) == 1 and "direction=LT" in computations[condition]:
            return int(bounds[0])
        if not around:
            raise ValueError(f"how often does this loop run? {loop.strip()[:200]}")
        return (around + 1) / 2

    def loops(name: str, around: float) -> Iterator[tuple[str, float]]:
        for line in computations[name].splitlines():
            if loop := re.search(r" while\(.*condition=%([\w.-]+), body=%([\w.-]+)", line):
                yield loop[2], trips(line, loop[1], around)
                continue
            for called in re.findall(r"(?:calls|to_apply|\w+_computations?)=(%[\w.-]+|\{.*?\})", line):
                for callee in re.findall(r"%([\w.-]+)", called):
                    yield from loops(callee, around)

    def total(name: str, around: float) -> float:
        return once(name) + sum(n * total(body, n) - once(body) for body, n in loops(name, around))

    return total(next(name for name, block in computations.items() if block.startswith("ENTRY ")), 0)


def paired(measure: Callable[[int], float], pairs: range) -> list[list[float]]:
    """Measures variants 0 and 1 in turns, 0 before 1 in pairs of even number and after it in others."""
    results: list[list[float]] = [[], []]
    for pair in pairs:
        for variant in (0, 1) if pair % 2 == 0 else (1, 0):
            results[variant].append(measure(variant))
    return results


def compared(values: Sequence[float | None]) -> dict[str, Any]:
    """Returns the values of baseline and copy head, and their ratio where both are known."""
    ratio = None if None in values else values[1] / values[0]
    return {**dict(zip(VARIANTS, values, strict=True)), "ratio": ratio}


def compared_times(seconds: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Returns medians of two paired series, and the median and quartiles of their ratios."""
    low, ratio, high = np.quantile([b / a for a, b in zip(*seconds, strict=True)], (0.25, 0.5, 0.75)).tolist()
    medians = compared([statistics.median(series) for series in seconds])
    return {**medians, "ratio": ratio, "quartiles": [low, high], "pairs": list(zip(*seconds, strict=True))}


def variants_of(file: Path, length: int, tokens: int, flags: Sequence[str], mesh: Mesh) -> list[Config]:
    """Returns the configurations of the baseline and of the CPLM, for batches of ``tokens`` tokens."""
    sizes = [f"--data.sequence_length={length}", f"--train.batch_size={max(tokens // length, 1)}"]
    config = load_config([str(file)], ["--train.accumulation=1", *flags, *sizes])
    if config.model.copy_head is None:
        raise UserError(f"{file}: model.copy_head is null, so there is nothing to compare; set it")
    config = resolve_vocabulary(config, config.model.vocabulary_size or config.data.tokenizer_vocabulary_size)
    definition = define_model(config.model)
    check_divisible(definition.logical_axes, definition.shapes, mesh)
    check_batches_divisible(config, mesh)
    return [dataclasses.replace(config, model=dataclasses.replace(config.model, copy_head=None)), config]


def mesh_of(config: Config, target: str, topology: str) -> Mesh:
    """Builds the configuration's mesh on this machine's CPU or on the devices of a TPU topology."""
    devices: Sequence[Any] = jax.devices("cpu")
    if target != "cpu":
        try:
            devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
        except Exception as e:  # whatever the plugin raises, for a missing library or an unknown topology
            advice = "install libtpu (pip install libtpu), and name a topology as in --topology v5e:2x2"
            raise UserError(f"no compiler for TPU topology {topology!r}: {first_line(e)}; {advice}") from e
    sizes = mesh_shape(config.mesh, len(devices))
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * 4, devices=devices[: math.prod(sizes)])


class Step(NamedTuple):
    """A training step, compiled, or refused by the compiler for want of memory."""

    trainer: Trainer
    compiled: Any
    refusal: str
    seconds: float  # to trace, lower and compile


def compile_step(config: Config, mesh: Mesh) -> Step:
    """Compiles the training step of a configuration, with nothing left from an earlier compilation."""
    jax.clear_caches()
    trainer = Trainer(config, define_model(config.model), mesh)
    start = time.perf_counter()
    compiled, refusal = None, ""
    try:
        compiled = trainer.compile_step()
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        refusal = first_line(e)
    return Step(trainer, compiled, refusal, time.perf_counter() - start)


def analysis(step: Step) -> dict[str, float | None]:
    """Returns parameters, flops and bytes of memory of a step."""
    result: dict[str, float | None] = {"parameters": parameter_count(step.trainer.definition.shapes)}
    if step.compiled is None:
        return result
    try:
        result["flops"] = count_flops(step.compiled.as_text())
    except ValueError as e:
        print(f"flops not known: {e}", file=sys.stderr)
    memory = step.compiled.memory_analysis()
    others = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    result["peak_bytes"], result["temp_bytes"] = memory.temp_size_in_bytes + others, memory.temp_size_in_bytes
    return result


def time_steps(steps: Sequence[Step], mesh: Mesh, pairs: int) -> list[list[float]]:
    """Returns seconds of the two training steps, in turns, on random tokens with one document a row."""
    config, rng = steps[0].trainer.config, np.random.default_rng(0)
    parts, length = config.train.accumulation, config.data.sequence_length
    shape = (parts, config.train.batch_size // parts, length)
    tokens = rng.integers(0, config.model.vocabulary_size, shape, dtype=np.int32)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), shape)
    ones, true = np.ones(shape, np.int32), np.ones(shape, bool)
    batch = Batch(tokens, np.roll(tokens, -1, axis=-1), ones, positions, true, true)
    batch = jax.device_put(batch, named_sharding(mesh, None, "batch", "length"))
    states = []
    for trainer in (step.trainer for step in steps):
        state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), trainer.abstract_state)
        params = jax.tree.map(lambda leaf: rng.normal(0, 0.02, leaf.shape).astype(leaf.dtype), state.params)
        states.append(jax.device_put(dataclasses.replace(state, params=params), trainer.state_shardings))

    def measure(variant: int) -> float:
        start = time.perf_counter()
        states[variant], _ = steps[variant].compiled(states[variant], batch)
        jax.block_until_ready(states[variant])
        return time.perf_counter() - start

    paired(measure, range(1))  # warms up
    return paired(measure, range(pairs))


def measure_case(configs: list[Config], timed: list[Config], mesh: Mesh, options: Any) -> dict[str, Any]:
    """Measures one row: the pair ``configs``, and steps of the pair ``timed``, if any."""
    steps: dict[int, Step] = {}

    def compile_variant(variant: int) -> float:
        steps[variant] = compile_step(configs[variant], mesh)
        return steps[variant].seconds

    seconds = paired(compile_variant, range(1))
    refusals = {name: steps[i].refusal for i, name in enumerate(VARIANTS) if steps[i].refusal}
    if not refusals:
        more = paired(compile_variant, range(1, options.compiles))
        seconds = [a + b for a, b in zip(seconds, more, strict=True)]
    found = [analysis(steps[i]) for i in (0, 1)]
    counts = [name for name in COLUMNS if not name.endswith("_seconds")]
    measures = {name: compared([f.get(name) for f in found]) for name in counts}
    if not refusals:
        measures["compile_seconds"] = compared_times(seconds)
    if timed:
        timed_steps = [steps[i] if timed == configs else compile_step(timed[i], mesh) for i in (0, 1)]
        measures["step_seconds"] = compared_times(time_steps(timed_steps, mesh, options.pairs))
        measures["step_seconds"]["rows"] = timed[0].train.batch_size
    return {"rows": configs[0].train.batch_size, "measures": measures, "out_of_memory": refusals}


def cells(case: dict[str, Any], measure: str) -> list[str]:
    """Returns the baseline's value and the ratio to it, as the table shows them."""
    entry = case["measures"].get(measure, {})
    value, ratio = entry.get("baseline"), entry.get("ratio")
    _, unit, digits = COLUMNS[measure]
    shown = ["" if value is None else f"{value / unit:,.{digits}f}", "" if ratio is None else f"{ratio:.4f}"]
    if "quartiles" in entry:
        shown[1] = "{:.3f} ({:.3f} to {:.3f})".format(ratio, *entry["quartiles"])
    if measure == "peak_bytes":
        for name, refusal in case["out_of_memory"].items():
            size = re.search(r"\(([\d.]+[KMGT])\)|Used ([\d.]+[KMGT])", refusal)
            shown[VARIANTS.index(name)] = "out of memory" + (f" ({size[1] or size[2]}iB)" if size else "")
    return ["not run", ""] if measure == "step_seconds" and not entry else shown


def table(cases: Sequence[dict[str, Any]], target: str) -> str:
    """Returns the cases as a Markdown table: for every measure, the baseline's value and the ratio to it."""
    measures = [m for m in COLUMNS if target == "cpu" or m != "step_seconds"]
    heads = ["shape", "T", "rows", *(head for m in measures for head in (COLUMNS[m][0], "ratio"))]
    lines = [heads, ["---", *["--:"] * (len(heads) - 1)]]
    for case in cases:
        shown = [cell for measure in measures for cell in cells(case, measure)]
        lines.append([case["shape"], f"{case['length']:,}", f"{case['rows']:,}", *shown])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def judge(cases: Sequence[dict[str, Any]], target: str) -> list[dict[str, Any]]:
    """Holds the ratios of the cases against the bars of this target."""
    measured = {(case["shape"], case["length"]): case["measures"] for case in cases}
    bars = []
    for _, shape, length, measure, limit in (bar for bar in BARS if bar[0] == target):
        ratio = measured.get((shape, length), {}).get(measure, {}).get("ratio")
        verdict = "not measured" if ratio is None else "pass" if ratio <= limit else "FAIL"
        bar = {"shape": shape, "length": length, "measure": measure, "limit": limit}
        bars.append({**bar, "ratio": ratio, "verdict": verdict})
    return bars


def environment(mesh: Mesh) -> dict[str, Any]:
    """Returns what the figures depend on besides the program: devices, versions, processor."""
    names = ("cplm_jax", "jax", "jaxlib", "flax", "optax", "libtpu")
    versions = {d.metadata["Name"]: d.version for d in distributions() if d.metadata["Name"] in names}
    cpu = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return {
        "device": mesh.devices.flat[0].device_kind,
        "mesh": dict(mesh.shape),
        "processor": [*re.findall(r"model name\s*: (.*)", cpu), platform.machine()][0],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "versions": {"python": platform.python_version(), **versions},
    }


def positive(text: str) -> int:
    """Reads a whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def listed(read: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Returns a reader of comma-separated values."""
    return lambda text: [read(word) for word in text.split(",")]


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parses the options; what is left over are configuration fields."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog="Other flags are configuration fields: --model.copy_head.gate sentinel, --mesh.fsdp 4, ...",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--target", choices=("cpu", "tpu-v5e"), default="cpu")
    add("--topology", default="v5e:1x1", help="TPU topology to compile for (default: one chip)")
    add("--shapes", type=listed(str), help=f"default: {','.join(SHAPES)}, or --config's")
    add("--config", type=listed(Path), default=[], help="configurations of shapes of your own")
    add("--lengths", type=listed(positive), help="default: 512,1024,...,32768 and the configuration's own")
    add("--tokens", type=positive, default=32768, help="tokens of a compiled batch, at least one row")
    add("--step_tokens", type=positive, default=1024, help="tokens of a batch that is run, at least one row")
    add("--longest_step", type=positive, help="longest length to run (default: 1024 for 135m, else 8192)")
    add("--compiles", type=positive, default=3, help="compilations of each step")
    add("--pairs", type=positive, default=10, help="pairs of steps to time")
    add("--output", type=Path, help="JSON file for the results, written after every row")
    add("--table", type=Path, help="Markdown file for the table")
    options, flags = parser.parse_known_args(arguments)
    options.shapes = options.shapes or ([] if options.config else list(SHAPES))
    if unknown := set(options.shapes) - set(SHAPES):
        parser.error(f"--shapes: {', '.join(unknown)}: the shapes are {', '.join(SHAPES)}")
    return options, flags


def benchmark(options: argparse.Namespace, flags: Sequence[str]) -> dict[str, Any]:
    """Measures every row, writing the files as it goes, and returns what the JSON file holds."""
    for path in (options.output, options.table):
        if path is not None and not path.parent.is_dir():
            raise UserError(f"{path}: the folder {path.parent} does not exist; make it first")
    files = {name: SHAPES[name] for name in options.shapes} | {file.stem: file for file in options.config}
    rows: list[tuple[str, int, list[Config], list[Config], Mesh]] = []
    for shape, file in files.items():
        own = load_config([str(file)], flags)
        mesh = mesh_of(own, options.target, options.topology)
        longest = (
            0 if options.target != "cpu" else options.longest_step or (1024 if shape == "135m" else 8192)
        )
        for length in options.lengths or sorted({own.data.sequence_length, *(2**n for n in range(9, 16))}):
            configs = variants_of(file, length, options.tokens, flags, mesh)
            timed = variants_of(file, length, options.step_tokens, flags, mesh) if length <= longest else []
            rows.append((shape, length, configs, timed, mesh))
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "benchmarks/copy_head.py", *sys.argv[1:]]),
        "target": options.target,
        "topology": options.topology if options.target != "cpu" else None,
        **environment(rows[0][-1]),
        "cases": [],
    }
    compile_step(rows[0][2][0], rows[0][-1])  # warms up
    for shape, length, configs, timed, mesh in rows:
        case = measure_case(configs, timed, mesh, options)
        result["cases"].append({"shape": shape, "length": length, **case})
        result["bars"] = judge(result["cases"], options.target)
        print(table(result["cases"][-1:], options.target).splitlines()[-1], file=sys.stderr)
        texts = json.dumps(result, indent=1), table(result["cases"], options.target)
        for path, text in zip((options.output, options.table), texts, strict=True):
            if path is not None:
                path.write_text(text + "\n")
    return result


def main() -> int:
    """Runs the benchmark, prints the table and whether each bar is met; returns the exit status."""
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        result = benchmark(*parse(sys.argv[1:]))
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return USER_ERROR_STATUS
    print(table(result["cases"], result["target"]))
    for bar in result["bars"]:
        ratio = "" if bar["ratio"] is None else f"ratio {bar['ratio']:.4f}, "
        print("{verdict}: {shape} T={length} {measure}: {}at most {limit}".format(ratio, **bar))
    return 0


if __name__ == "__main__":
    sys.exit(main())
