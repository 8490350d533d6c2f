"""The ``cplm`` command."""

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from cplm_jax.command_line import CommandParser, path_word
from cplm_jax.config_loading import help_text, load_config, to_yaml
from cplm_jax.errors import MACHINE_ERROR_STATUS, USER_ERROR_STATUS, MachineError, UserError, nearest

if TYPE_CHECKING:
    from cplm_jax.training.loop import Result

_QUICKSTART = "configs/quickstart.yaml"


def train_command(arguments: Sequence[str]) -> int:
    """Runs ``cplm train``: trains, or goes on with, a run."""
    words = list(arguments)
    if "--help" in words or "-h" in words:
        print(
            "usage: train.py --config FILE [--config FILE ...] [--section.field value ...]\n\n"
            "Trains a language model, or goes on with the run in --run_dir.\n\n"
            "  --config FILE\n"
            "      YAML configuration; later files override earlier ones, flags override files.\n"
            "  --print_config\n      Prints the resolved configuration and exits.\n" + help_text()
        )
        return 0
    printing = "--print_config" in words
    config = load_config(arguments=[w for w in words if w != "--print_config"])
    if printing:
        print(to_yaml(config), end="")
        return 0
    from cplm_jax.training.loop import Outcome, train

    result = train(config)
    if result.outcome is Outcome.STOPPED:
        return _status_of_stopped(result)
    print(config.run_dir)
    return 0


def _status_of_stopped(result: "Result") -> int:
    return 128 + (result.signal or signal.SIGTERM)


def quickstart_command(arguments: Sequence[str]) -> int:
    """Runs ``cplm quickstart``: a baseline, a CPLM and their report."""
    words = list(arguments)
    if "--help" in words or "-h" in words:
        print(
            "usage: cplm quickstart [--config FILE ...] [--section.field value ...]\n\n"
            "Trains a baseline and a CPLM on the same batches and writes a report that compares them.\n"
            f"The configuration is {_QUICKSTART}, then what --config and flags change (cplm train --help\n"
            "lists every field). Running it again goes on, or just reports."
        )
        return 0
    if not os.path.exists(_QUICKSTART):
        raise UserError(f"{_QUICKSTART} is not here; run cplm quickstart in a checkout of cplm_jax")
    config = load_config([_QUICKSTART], words)
    from cplm_jax.quickstart import quickstart
    from cplm_jax.training.loop import Result

    outcome = quickstart(config)
    if isinstance(outcome, Result):
        return _status_of_stopped(outcome)
    print(outcome)
    return 0


def eval_command(arguments: Sequence[str]) -> int:
    """Runs ``cplm eval``: measures a trained model on its held-out text."""
    parser = CommandParser("eval", "Measures a trained model on the held-out text of its run.")
    parser.add_argument(
        "--checkpoint", type=path_word, required=True, metavar="RUN_OR_EXPORT", help="run directory or export"
    )
    parser.add_argument(
        "--suites", default="validation,copying", help="comma-separated (default: %(default)s)"
    )
    parser.add_argument(
        "--output", type=path_word, metavar="FILE.json", help="also write the figures as JSON"
    )
    options = parser.parse(arguments)
    from cplm_jax.evaluation.suites import check_suites, evaluate, table
    from cplm_jax.loading import load_model

    suites = check_suites([s.strip() for s in options.suites.split(",")])
    if options.output is not None:
        check_output_file(options.output)
    result = evaluate(load_model(options.checkpoint), suites)
    print(table(result))
    if options.output is not None:
        write_output_file(options.output, json.dumps(result, indent=2) + "\n")
    return 0


def compare_command(arguments: Sequence[str]) -> int:
    """Runs ``cplm compare``: reports on two runs side by side."""
    parser = CommandParser(
        "compare", "Compares two finished runs that saw the same batches, and writes a report on them."
    )
    parser.add_argument("run_a", type=path_word, metavar="RUN_A", help="run directory")
    parser.add_argument(
        "run_b", type=path_word, metavar="RUN_B", help="another; a baseline may come first or last"
    )
    parser.add_argument(
        "--output",
        type=path_word,
        metavar="DIR",
        help="folder for report.html, .md, .json and PNG files (default: the folder of both runs)",
    )
    options = parser.parse(arguments)
    from cplm_jax.evaluation.comparison import compare
    from cplm_jax.evaluation.report import check_output, default_output, write_report

    runs = Path(options.run_a), Path(options.run_b)
    output = default_output(*runs) if options.output is None else Path(options.output).expanduser()
    check_output(output)
    comparison = compare(*runs, report=lambda message: print(message, file=sys.stderr))
    print(write_report(comparison, output))
    return 0


def generate_command(arguments: Sequence[str]) -> int:
    """Runs ``cplm generate``: continues a prompt."""
    parser = CommandParser("generate", "Continues a prompt, and prints prompt and continuation.")
    parser.add_argument(
        "--checkpoint", type=path_word, required=True, metavar="RUN_OR_EXPORT", help="run directory or export"
    )
    parser.add_argument(
        "--prompt", required=True, metavar="TEXT", help="text to continue; - reads standard input"
    )
    parser.add_argument(
        "--max_tokens", type=int, default=100, help="tokens to generate at most (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 takes the likeliest token (default: %(default)s)"
    )
    parser.add_argument("--top_k", type=int, help="sample among this many likeliest tokens")
    parser.add_argument(
        "--top_p", type=float, help="sample among the likeliest tokens of this total probability"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: %(default)s)")
    options = parser.parse(arguments)
    from cplm_jax.generation import check_arguments, generate
    from cplm_jax.loading import load_model

    settings = (options.max_tokens, options.temperature, options.top_k, options.top_p, options.seed)
    check_arguments(*settings)
    prompt = _prompt(options.prompt)
    print(prompt + generate(load_model(options.checkpoint), prompt, *settings))
    return 0


def _prompt(option: str) -> str:
    where, data = "", os.fsencode(option)
    if option == "-":
        where, data = " -: standard input", sys.stdin.buffer.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise UserError(f"--prompt{where}: byte {e.start} is not valid UTF-8; give it text in UTF-8") from e


def export_command(arguments: Sequence[str]) -> int:
    """Runs ``cplm export``: writes a model without its training state."""
    parser = CommandParser("export", "Writes a trained model without its training state.")
    parser.add_argument("--checkpoint", type=path_word, required=True, metavar="RUN", help="run directory")
    parser.add_argument("--format", choices=("orbax",), default="orbax", help="(default: %(default)s)")
    parser.add_argument("--output", type=path_word, required=True, metavar="DIR", help="folder to make")
    options = parser.parse(arguments)
    from cplm_jax.interop.export import export_orbax
    from cplm_jax.loading import load_model

    if os.path.exists(options.output):
        raise UserError(f"--output {options.output}: it exists already; choose another folder")
    print(export_orbax(load_model(options.checkpoint), options.output))
    return 0


def prepare_command(arguments: Sequence[str]) -> int:
    """Runs ``cplm prepare``: tokenises documents into shards."""
    from cplm_jax.data.commands import prepare_command

    return prepare_command(arguments)


def tokenizer_command(arguments: Sequence[str]) -> int:
    """Runs ``cplm tokenizer``: trains or inspects a tokenizer."""
    from cplm_jax.data.commands import tokenizer_command

    return tokenizer_command(arguments)


def check_output_file(path: str) -> None:
    """Raises :class:`UserError` if a file could not be written at ``path``."""
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path):
        raise UserError(f"--output {path}: it is a folder; give a file")
    if not os.path.isdir(folder):
        raise UserError(f"--output {path}: the folder {folder} does not exist; make it first")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise UserError(f"--output {path}: cannot be written; choose another file")


def write_output_file(path: str, text: str) -> None:
    """Writes a text file whole or not at all. Raises :class:`MachineError` if it cannot."""
    from cplm_jax.training.run_directory import write_atomically

    try:
        write_atomically(Path(path), text.encode("utf-8"))
    except OSError as e:
        raise MachineError(f"--output {path}: cannot be written: {e.strerror or e}") from e


_COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "train": (train_command, "train a model, or go on with a run"),
    "prepare": (prepare_command, "tokenise documents into shards to train on"),
    "tokenizer": (tokenizer_command, "train or inspect a tokenizer"),
    "quickstart": (quickstart_command, "train a CPLM and its baseline, and compare them"),
    "eval": (eval_command, "measure a trained model on its held-out text"),
    "compare": (compare_command, "report on two runs side by side"),
    "generate": (generate_command, "continue a prompt"),
    "export": (export_command, "write a model without its training state"),
}


def run(command: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """Runs a command and turns its failures into an exit status and one message."""
    try:
        return command(arguments)
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return USER_ERROR_STATUS
    except MachineError as e:
        print(f"error: {e}", file=sys.stderr)
        return MACHINE_ERROR_STATUS
    except PermissionError as e:
        print(f"error: {e.filename}: no permission; grant it or choose another place", file=sys.stderr)
        return USER_ERROR_STATUS
    except OSError as e:  # what user input can cause is a UserError; a full disk or a lost one is left
        print(f"error: {e}; what was saved before is intact", file=sys.stderr)
        return MACHINE_ERROR_STATUS
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs ``cplm COMMAND ...`` and exits."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without UTF-8 gets escapes, not a traceback
            stream.reconfigure(errors="backslashreplace")
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        listed = "\n".join(f"  {name:10} {text}" for name, (_, text) in _COMMANDS.items())
        print(f"usage: cplm COMMAND ...\n\ncommands:\n{listed}\n\ncplm COMMAND --help tells more.")
        sys.exit(0 if words else USER_ERROR_STATUS)
    name, *rest = words
    if name not in _COMMANDS:
        print(f"error: unknown command {name!r}{nearest(name, _COMMANDS)}", file=sys.stderr)
        sys.exit(USER_ERROR_STATUS)
    sys.exit(run(_COMMANDS[name][0], rest))
