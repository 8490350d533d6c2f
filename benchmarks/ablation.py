"""Trains every member of the copy-head family next to the baseline and tabulates what each one bought.

    python benchmarks/ablation.py --prose 'brown/*.txt' --results ablation.jsonl --table ablation.md

Members: the grid of gates, alignments and pointers with plain scores, the default, which normalizes
them, and named extras on top of the default. All runs of a seed start from the same initial values, as
far as they share parameters, and see the same batches; so a member is compared with the baseline seed by
seed. Every finished run is a line of the results file, and the same command goes on after them.
benchmarks/README.md tells more.
"""

import argparse
import contextlib
import datetime
import fcntl
import itertools
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from cplm_jax.cli import run as run_command
from cplm_jax.config import FREE_TO_CHANGE, Config
from cplm_jax.config_loading import FIELDS, flatten, load_config
from cplm_jax.errors import UserError, nearest

ROOT = Path(__file__).resolve().parents[1]

Flags = dict[str, str]
Row = dict[str, Any]

BASELINE: Flags = {"model.copy_head": "null"}
DEFAULT: Flags = {
    "model.copy_head.gate": "shared_softmax",
    "model.copy_head.alignment": "both",
    "model.copy_head.normalize": "true",
}

GATES = ("learned", "sentinel", "shared_softmax")
ALIGNMENTS = ("preceding", "containing", "both")
POINTERS = (1, 2)

EXTRA: dict[str, Flags] = {
    "confidence": DEFAULT | {"model.copy_head.gate": "confidence"},
    "context_logits": DEFAULT | {"model.copy_head.gate": "context_logits"},
    "context_logits_sum": DEFAULT | {"model.copy_head.gate": "context_logits_sum"},
    "recency_bias": DEFAULT | {"model.copy_head.recency_bias": "true"},
    "key_layer": DEFAULT | {"model.copy_head.key_layer": "2"},
    "preceding": DEFAULT | {"model.copy_head.alignment": "preceding"},
    "two_pointers": DEFAULT | {"model.copy_head.pointers": "2"},
    "z_loss": DEFAULT | {"train.z_loss": "1e-4"},
    "pointer_loss": DEFAULT | {"train.pointer_loss": "0.1"},
}


def _grid() -> dict[str, Flags]:
    members = {"baseline": BASELINE}
    for pointers, gate, alignment in itertools.product(POINTERS, GATES, ALIGNMENTS):
        flags = {
            "model.copy_head.gate": gate,
            "model.copy_head.alignment": alignment,
            "model.copy_head.normalize": "false",
        }
        if pointers != 1:
            flags["model.copy_head.pointers"] = str(pointers)
        members[f"{gate}-{alignment}-{pointers}"] = flags
    return members | {"default": DEFAULT}


GRID = _grid()
MEMBERS = GRID | EXTRA
GROUPS: dict[str, tuple[str, ...]] = {
    "grid": tuple(GRID),
    "extra": tuple(EXTRA),
    "longer": ("baseline@4", "default@4"),
}

# Column of the tables: suite and name of the figure in it.
COLUMNS = {
    "total": ("validation", "loss"),
    "in-context": ("validation", "loss_in_context"),
    "novel": ("validation", "loss_novel"),
    "novel detection": ("copying", "loss_novel_detection"),
    "novel identity": ("copying", "loss_novel_identity"),
    "detection": ("copying", "loss_detection"),
    "accuracy": ("copying", "accuracy"),
    "novel accuracy": ("copying", "accuracy_novel"),
}


class Member(NamedTuple):
    """A configuration of the ablation.

    Attributes:
      name: a key of :data:`MEMBERS`, with ``@N`` if its runs are N times as long.
      flags: configuration fields on top of the common ones.
      length: N.
    """

    name: str
    flags: Flags
    length: int

    @property
    def is_baseline(self) -> bool:
        """Whether this is what the other members of its length are compared with."""
        return self.flags == BASELINE


class Run(NamedTuple):
    """One training of the ablation.

    Attributes:
      corpus: name of the corpus.
      member: what is trained.
      config: with the member's flags and the seed.
      fields: the fields of ``config`` that change what is measured, by their path.
    """

    corpus: str
    member: Member
    config: Config
    fields: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.corpus} {self.member.name} seed {self.config.seed}"

    def matches(self, row: Row) -> bool:
        """Whether a line of the results file has this run's corpus (by name) and configuration.

        Fields that the package did not have yet count as what is their default now; those that it does
        not have any more do not count if they were not set.
        """
        theirs = {path: value for path, value in row["config"].items() if path in FIELDS or value is not None}
        return (
            row["corpus"] == self.corpus
            and theirs.keys() <= self.fields.keys()
            and all(theirs.get(path, FIELDS[path].default) == mine for path, mine in self.fields.items())
        )


def _result_fields(config: Config) -> dict[str, Any]:
    return {
        path: value
        for path, value in flatten(config).items()
        if not any(path == free or path.startswith(free + ".") for free in FREE_TO_CHANGE)
    }


# What to run


def parse_members(words: str) -> list[Member]:
    """Returns the members named, shortest first, and before those of each length its baseline.

    Args:
      words: names of members (``NAME`` or ``NAME@N``) and of groups of them, comma-separated.

    Raises:
      UserError: for a name that does not exist.
    """
    members = []
    for name in [name for word in _split(words, "--members") for name in GROUPS.get(word, (word,))]:
        base, at, times = name.partition("@")
        if base not in MEMBERS:
            raise UserError(f"--members: unknown member {base!r}{nearest(base, [*MEMBERS, *GROUPS])}")
        if at and not (times.isdecimal() and 2 <= int(times) < 1000):
            raise UserError(f"--members {name}: expected NAME@N, with N from 2 to 999 times the steps")
        members.append(Member(name, MEMBERS[base], int(times) if at else 1))
    lengths = {member.length for member in members}
    baselines = [Member(f"baseline@{n}" if n > 1 else "baseline", BASELINE, n) for n in lengths]
    by_name = {member.name: member for member in [*baselines, *members]}
    return sorted(by_name.values(), key=lambda member: member.length)


def _split(words: str, option: str) -> list[str]:
    parts = [part.strip() for part in words.split(",")]
    if not all(parts):
        raise UserError(f"{option} {words!r}: expected values with one comma between them")
    return list(dict.fromkeys(parts))


def plan_runs(
    corpora: dict[str, list[str]],
    members: Sequence[Member],
    seeds: Sequence[str],
    files: Sequence[str],
    flags: Sequence[str],
) -> list[Run]:
    """Returns all runs, in an order in which the table is useful early: seed by seed.

    Args:
      corpora: ``data.paths`` by the name of the corpus.
      members: the members.
      seeds: the seeds, as flags have them.
      files: the configuration that all runs share.
      flags: command-line words that override it.

    Raises:
      UserError: if a configuration is wrong.
    """
    common = load_config(files, flags)
    if common.data.validation_paths:
        raise UserError("data.validation_paths is set, but every corpus holds out documents of its own")
    runs = []
    for seed, (corpus, paths), member in itertools.product(seeds, corpora.items(), members):
        own = {"seed": seed, "train.steps": str(common.train.steps * member.length), **member.flags}
        words = [word for path, value in own.items() for word in (f"--{path}", value)]
        try:
            config = load_config(files, [*flags, "--run_dir", "null", "--data.paths", *paths, *words])
        except UserError as e:
            raise UserError(f"{corpus} {member.name} seed {seed}: {e}") from e
        runs.append(Run(corpus, member, config, _result_fields(config)))
    return runs


# The results file


class Results:
    """The results file, one JSON object a finished run; several processes may append to it.

    Args:
      path: the file; a missing one is empty.
    """

    def __init__(self, path: str):
        self.path = Path(path)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[Any]:
        with open(self.path, "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file

    def check_writable(self) -> None:
        """Raises :class:`UserError` if lines cannot be appended."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._locked():
                pass
        except OSError as e:
            raise UserError(f"--results {self.path}: cannot write to it: {e.strerror or e}") from e

    def rows(self) -> list[Row]:
        """Returns the lines; a last one that a kill cut short is left out.

        Raises:
          UserError: if another line is no result.
        """
        try:
            lines = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        except OSError as e:
            raise UserError(f"--results {self.path}: cannot read it: {e.strerror or e}") from e
        rows = []
        for number, line in enumerate(lines, start=1):
            row = _parse(line)
            if row is not None:
                rows.append(row)
            elif line.strip() and number < len(lines):
                raise UserError(f"{self.path}:{number}: not a result of an ablation; mend or remove the line")
        return rows

    def append(self, row: Row) -> None:
        """Makes a line durable, in place of one that a kill cut short."""
        with self._locked() as file:
            file.seek(0)
            content = file.read()
            end = content.rfind(b"\n") + 1
            if _parse(content[end:]) is not None:
                file.write(b"\n")
            else:
                file.truncate(end)
            file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _parse(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    needed = {"corpus", "config", "results", "versions"}
    return row if isinstance(row, dict) and needed <= row.keys() else None


def _identity(details: Row) -> tuple[str, str]:
    """Returns what two corpora of one name differ in."""
    return details["corpus_fingerprint"], details["tokenizer_sha256"]


# Training


def train_all(runs: Sequence[Run], results: Results, finished: Callable[[], None]) -> None:
    """Trains and measures what is not in the results file yet.

    Args:
      runs: the runs, in order.
      results: where their lines go.
      finished: called after each run.
    """
    import jax

    from cplm_jax.training.metrics import say
    from cplm_jax.training.setup import set_up

    first = {run.corpus: run.config for run in reversed(runs)}
    corpora = {name: _identity(set_up(config, say).details()) for name, config in first.items()}

    def unfinished(runs: Sequence[Run]) -> list[Run]:
        rows = results.rows()
        return [
            run
            for run in runs
            if not any(run.matches(row) and _identity(row) == corpora[run.corpus] for row in rows)
        ]

    left = unfinished(runs)
    say(f"{len(runs)} runs, {len(runs) - len(left)} of them finished before")
    seconds, steps = 0.0, 0
    while left:
        run, *left = left
        began = time.perf_counter()
        row = measure(run)
        if _identity(row) != corpora[run.corpus]:
            raise UserError(f"the documents of {run.corpus} changed during the ablation; start it again")
        seconds += time.perf_counter() - began
        steps += run.config.train.steps
        results.append(row)
        jax.clear_caches()
        left = unfinished(left)  # another process may have been here
        ahead = seconds / steps * sum(run.config.train.steps for run in left)
        loss = "diverged"
        if not row["diverged"]:
            loss = f"validation loss {row['results']['validation']['loss']:.4f}"
        say(
            f"{run}: {loss}, {row['seconds_per_step']:.3f} s a step; {len(left)} more to run, about "
            f"{datetime.timedelta(seconds=round(ahead))} left"
        )
        finished()


def measure(run: Run) -> Row:
    """Trains and evaluates one run and returns its line of the results file."""
    from cplm_jax.data.pipeline import TrainingBatches
    from cplm_jax.evaluation.suites import evaluate
    from cplm_jax.loading import LoadedModel
    from cplm_jax.training.checkpointing import all_finite
    from cplm_jax.training.metrics import ProgressBar
    from cplm_jax.training.setup import set_up
    from cplm_jax.training.step import Trainer

    setup = set_up(run.config)
    config, train, details = setup.config, setup.config.train, setup.details()
    trainer = Trainer(config, setup.definition, setup.mesh)
    batches = TrainingBatches(
        setup.train_rows, train.batch_size, train.accumulation, train.steps, setup.mesh, config.data
    )
    state, train_step = trainer.init(), trainer.compile_step()
    tokens, began = 0, time.perf_counter()
    bar = ProgressBar(str(run), 0, train.steps, leader=True)
    with contextlib.closing(bar), contextlib.closing(batches):
        for _ in range(train.steps):
            state, metrics = train_step(state, next(batches))
            tokens += int(metrics.tokens)
            bar.advance(float(metrics.loss), tokens / (time.perf_counter() - began))
    seconds = time.perf_counter() - began
    diverged = not all_finite(state)
    results = {}
    if not diverged:
        model = LoadedModel(
            path=Path(),
            config=config,
            tokenizer=setup.corpus.tokenizer,
            definition=setup.definition,
            params=state.params,
            mesh=setup.mesh,
            step=train.steps,
            tokens=tokens,
            details=details,
        )
        suites = evaluate(model, corpus=setup.corpus)
        results = {suite: suites[suite] for suite in ("validation", "copying")}
    return {
        "corpus": run.corpus,
        "member": run.member.name,
        "flags": run.member.flags,
        "seed": config.seed,
        "steps": train.steps,
        "tokens": tokens,
        "diverged": diverged,
        "results": results,
        "seconds_per_step": seconds / train.steps,
        "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        **details,
        "config": run.fields,
    }


def _commit() -> str | None:
    """Returns the commit of the package, if it lies in a Git checkout."""
    import cplm_jax

    words = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(
            words, cwd=Path(cplm_jax.__file__).parent, capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() or None


# The table


def table(runs: Sequence[Run], rows: Sequence[Row], command: str) -> str:
    """Returns the Markdown of all results of ``runs``, a section for each corpus and length.

    Args:
      runs: what the ablation consists of.
      rows: lines of the results file; those of other runs are counted but not used.
      command: the command that made the table.
    """
    found = [(run, row) for run in runs for row in rows if run.matches(row)]
    lines = ["# Ablation of the copy head", "", f"Made by `{command}`."]
    others = len(rows) - len({id(row) for _, row in found})
    if others:
        lines += [
            "",
            f"The results file has {others} more results, of other members, seeds or configurations.",
        ]
    sections = dict.fromkeys((run.corpus, run.config.train.steps) for run in runs)
    for corpus, steps in sections:
        here = [run for run in runs if (run.corpus, run.config.train.steps) == (corpus, steps)]
        mine = [(run, row) for run, row in found if run in here]
        title = f"## {corpus}, {steps:,} steps"
        if not mine:
            lines += ["", title, "", "No results yet."]
        for identity in dict.fromkeys(_identity(row) for _, row in mine):
            lines += ["", title, "", *_section(here, [(a, b) for a, b in mine if _identity(b) == identity])]
    return "\n".join(lines) + "\n"


def _section(runs: Sequence[Run], found: Sequence[tuple[Run, Row]]) -> list[str]:
    """Returns the facts and the two tables of one corpus and one number of steps."""
    members = list({run.member.name: run.member for run in runs}.values())
    seeds = list(dict.fromkeys(run.config.seed for run in runs))
    by_run: dict[tuple[str, int], Row] = {}
    for run, row in found:
        by_run.setdefault((run.member.name, run.config.seed), row)
    baseline = next(member for member in members if member.is_baseline)

    def converged(member: Member) -> dict[int, Row]:
        rows = {seed: by_run[member.name, seed] for seed in seeds if (member.name, seed) in by_run}
        return {seed: row for seed, row in rows.items() if not row["diverged"]}

    losses, differences = [], []
    reference = converged(baseline)
    for member in members:
        rows = converged(member)
        diverged = sum(by_run.get((member.name, seed), {}).get("diverged", False) for seed in seeds)
        heads = _distinct(f"{row['copy_head_parameters']:,}" for row in rows.values())
        losses.append(
            [
                member.name,
                _count(len(rows), len(seeds)) + (f", {diverged} diverged" if diverged else ""),
                *(_estimate([_figure(row, column) for row in rows.values()]) for column in COLUMNS),
                heads or "n/a",
            ]
        )
        pairs = [(rows[seed], reference[seed]) for seed in rows if seed in reference]
        if not member.is_baseline:
            differences.append(
                [
                    member.name,
                    _count(len(pairs), len(seeds)),
                    *(
                        _estimate([_difference(*pair, column) for pair in pairs], sign="+")
                        for column in COLUMNS
                    ),
                ]
            )
    lines = [
        *_facts([row for _, row in found], seeds),
        "",
        "Losses in nats per token and accuracies, mean ± standard error over seeds:",
        "",
        *_markdown(["member", "seeds", *COLUMNS, "copy-head parameters"], losses),
    ]
    if differences:
        lines += [
            "",
            f"Difference to {baseline.name} of the same seed, mean ± standard error over the pairs:",
            "",
            *_markdown(["member", "pairs", *COLUMNS], differences),
        ]
    return lines


def _facts(rows: Sequence[Row], seeds: Sequence[int]) -> list[str]:
    def all_of(value: Callable[[Row], Any]) -> str:
        return _distinct(map(value, rows))

    def documents(side: str) -> str:
        return all_of(
            lambda row: (
                f"{row[f'{side}_documents']:,} documents of {row[f'{side}_bytes']:,} bytes "
                f"({row[f'{side}_tokens']:,} tokens)"
            )
        )

    tokens = sorted({row["tokens"] for row in rows})
    days = sorted({row["finished"][:10] for row in rows})
    batch = all_of(lambda r: f"{r['config']['train.batch_size']} x {r['config']['data.sequence_length']}")
    size = all_of(lambda r: f"{r['parameters'] - r['copy_head_parameters']:,}")
    measured = _distinct(
        f"{v['target_tokens']:,} held-out targets, of which {v['fraction_in_context']:.1%} occur in context"
        for v in (row["results"]["validation"] for row in rows if not row["diverged"])
    )
    versions = all_of(lambda r: ", ".join(f"{name} {value}" for name, value in r["versions"].items()))
    return [
        f"- runs: {all_of(lambda r: r['steps'])} steps of {batch} tokens, {_span(tokens, ',')} target tokens "
        f"each; seeds {', '.join(map(str, seeds))}",
        f"- corpus {all_of(lambda r: r['corpus_fingerprint'][:12])}: trained on {documents('train')}, "
        f"held out {documents('validation')}",
        f"- measured on {measured or 'nothing'}",
        f"- {size} parameters without the copy head",
        f"- Python {all_of(lambda r: r['python'])}, {versions}",
        f"- commit {all_of(lambda r: r['commit'] or 'unknown')}; {all_of(lambda r: r['device'])}; finished "
        f"{_span(days)}",
    ]


def _figure(row: Row, column: str) -> float | None:
    suite, name = COLUMNS[column]
    return row["results"][suite].get(name)


def _difference(row: Row, reference: Row, column: str) -> float | None:
    ours, theirs = _figure(row, column), _figure(reference, column)
    return None if ours is None or theirs is None else ours - theirs


def _estimate(values: Sequence[float | None], sign: str = "") -> str:
    """Returns the mean and its standard error; of a single value there is none."""
    known = [value for value in values if value is not None]
    if not known:
        return "n/a"
    text = f"{statistics.fmean(known):{sign}.4f}"
    if len(known) > 1:
        text += f" ± {statistics.stdev(known) / math.sqrt(len(known)):.4f}"
    return text if len(known) == len(values) else f"{text} (n={len(known)})"


def _count(found: int, wanted: int) -> str:
    return str(found) if found == wanted else f"{found} of {wanted}"


def _distinct(values: Iterable[Any]) -> str:
    return " / ".join(dict.fromkeys(map(str, values)))


def _span(ordered: Sequence[Any], spec: str = "") -> str:
    return " to ".join(dict.fromkeys(f"{value:{spec}}" for value in (ordered[0], ordered[-1])))


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return ["| " + " | ".join(row) + " |" for row in cells]


# The command


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message} (--help lists every option)")


def _parser() -> _Parser:
    groups = "\n".join(f"  {name}: {', '.join(members)}" for name, members in GROUPS.items())
    parser = _Parser(
        prog="ablation.py",
        description="Trains members of the copy-head family and their baseline, and tabulates the results.",
        epilog=f"members:\n{groups}\n  NAME@N is a member, and its baseline, trained N times as long\n\n"
        "--section.field VALUE sets a field of the configuration in all runs, as in "
        "--evaluation.batches null.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--prose", nargs="+", default=[], metavar="PATH", help="documents of the corpus `prose`")
    add("--corpora", default="stdlib,prose", metavar="NAMES", help="stdlib, prose or both (default: both)")
    add("--members", default="grid", metavar="NAMES", help="members and groups (default: %(default)s)")
    add("--seeds", default="0,1,2", metavar="NUMBERS", help="(default: %(default)s)")
    add("--steps", metavar="N", help="steps of a run (default: as configured)")
    add("--config", nargs="+", metavar="FILE", help="in place of configs/quickstart.yaml")
    add("--results", default="runs/ablation.jsonl", metavar="FILE", help="(default: %(default)s)")
    add("--table", metavar="FILE", help="where the table goes, after every run (default: printed at the end)")
    add("--only-table", action="store_true", help="train nothing, tabulate what the results file has")
    add("--shard", default="1/1", metavar="I/N", help="train every N-th run only, from the I-th on")
    return parser


def _parse_arguments(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the command's options, and the flags of the configuration."""
    parser = _parser()
    mine: list[str] = []
    flags: list[str] = []
    part = mine
    for word in arguments:
        option = word.partition("=")[0]
        if option.startswith("--"):
            part = flags if "." in option else mine
            known = [name for action in parser._actions for name in action.option_strings]
            if part is mine and option not in known:
                raise UserError(
                    f"unknown option {option!r}{nearest(option, known)} (--help lists every option)"
                )
        part.append(word)
    return parser.parse_args(mine), flags


def _parse_shard(words: str) -> tuple[int, int]:
    index, _, count = words.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise UserError(f"--shard {words}: expected I/N with I from 1 to N, as in 1/2 and 2/2")
    return int(index), int(count)


def _parse_corpora(words: str, prose: list[str], only_table: bool) -> dict[str, list[str]]:
    """Returns the paths of the documents by the name of the corpus."""
    corpora = {"stdlib": ["python:stdlib"], "prose": prose}
    chosen = _split(words, "--corpora")
    for name in chosen:
        if name not in corpora:
            raise UserError(f"--corpora: unknown corpus {name!r}{nearest(name, corpora)} (stdlib or prose)")
    if "prose" in chosen and not prose and not only_table:
        raise UserError("the corpus prose has no documents: give --prose 'FOLDER/*.txt', or --corpora stdlib")
    return {name: corpora[name] or ["unknown"] for name in chosen}


def command(arguments: Sequence[str]) -> int:
    """Runs ``ablation.py``."""
    options, flags = _parse_arguments(arguments)
    index, count = _parse_shard(options.shard)
    if options.steps is not None:
        flags += ["--train.steps", options.steps]
    runs = plan_runs(
        _parse_corpora(options.corpora, options.prose, options.only_table),
        parse_members(options.members),
        _split(options.seeds, "--seeds"),
        options.config or [str(ROOT / "configs" / "quickstart.yaml")],
        flags,
    )
    results = Results(options.results)
    words = shlex.join(["python", "benchmarks/ablation.py", *arguments])

    def write_table() -> None:
        if options.table is not None:
            from cplm_jax.training.run_directory import write_atomically

            try:
                write_atomically(Path(options.table), table(runs, results.rows(), words).encode())
            except OSError as e:
                raise UserError(f"--table {options.table}: cannot write it: {e.strerror or e}") from e

    if options.only_table and not results.path.exists():
        raise UserError(f"--results {results.path}: no such file")
    if not options.only_table:
        results.check_writable()
    results.rows()  # a damaged file is told before anything is trained
    write_table()
    if not options.only_table:
        train_all(runs[index - 1 :: count], results, write_table)
    write_table()
    print(options.table if options.table is not None else table(runs, results.rows(), words))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(command, sys.argv[1:]))
