"""The ``cplm`` command."""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from cplm_jax.config_loading import help_text, load_config, to_yaml
from cplm_jax.errors import MACHINE_ERROR_STATUS, USER_ERROR_STATUS, MachineError, UserError, nearest


def train_command(arguments: Sequence[str]) -> int:
    """Runs ``cplm train``: trains, or goes on with, a run."""
    words = list(arguments)
    if "--help" in words or "-h" in words:
        print(
            "usage: train.py --config FILE [--config FILE ...] [--section.field value ...]\n\n"
            "Trains a language model, or goes on with the run in --run_dir.\n\n"
            "  --config FILE\n      YAML configuration; later files override earlier ones, flags override files.\n"
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
        return 128 + (result.signal or signal.SIGTERM)
    if result.outcome is Outcome.ALREADY_FINISHED:
        print(f"{config.run_dir} is complete at step {result.step}; nothing left to train", file=sys.stderr)
    print(config.run_dir)
    return 0


_COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "train": (train_command, "train a model, or go on with a run"),
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
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs ``cplm COMMAND ...`` and exits."""
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
