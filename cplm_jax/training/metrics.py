"""metrics.jsonl, TensorBoard and the progress bar."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # type: ignore[attr-defined]
from tensorboardX.summary import scalar
from tqdm import tqdm

from cplm_jax.errors import MachineError
from cplm_jax.training.run_directory import RunDirectory, read_rows, write_atomically


class _Board:
    """A TensorBoard event file; of earlier files, TensorBoard then shows the steps before ``first_step``.

    Written where it is called: tensorboardX's own writer does it in a thread, and once that has
    failed (a full disk), its callers wait for ever.
    """

    def __init__(self, folder: Path, first_step: int):
        folder.mkdir(exist_ok=True)
        self._events = EventsWriter(str(folder / "events"))
        self._write(first_step, session_log=SessionLog(status=SessionLog.START))

    def _write(self, step: int, **content: Any) -> None:
        self._events.write_event(Event(step=step, wall_time=time.time(), **content))

    def write(self, row: dict[str, Any]) -> None:
        """Writes the values of a row, each under ``split/name``."""
        for name, value in row.items():
            if name not in ("split", "step"):
                self._write(row["step"], summary=scalar(f"{row['split']}/{name}", value))

    def flush(self) -> None:
        """Makes what was written durable."""
        self._events.flush()

    def close(self) -> None:
        """Closes the file."""
        self._events.close()


class MetricsWriter:
    """Appends rows to metrics.jsonl and, if asked for, to TensorBoard.

    Rows beyond ``resume_step``, which a killed run wrote past its last checkpoint, are cut off
    first, so that no step is ever repeated.

    Attributes:
      validated: steps that have a validation row.
    """

    def __init__(self, run: RunDirectory, resume_step: int, tensorboard: bool, leader: bool):
        kept: list[dict[str, Any]] = []
        if run.metrics_file.exists():
            kept = [row for row in read_rows(run.metrics_file) if row["step"] <= resume_step]
        self.validated = {row["step"] for row in kept if row["split"] == "validation"}
        self._file = self._board = None
        self._folder = run.path
        if not leader:
            return
        with self._writing():
            write_atomically(run.metrics_file, b"".join(_line(row) for row in kept))
            self._file = open(run.metrics_file, "ab")  # noqa: SIM115 - open until close()
            if tensorboard:
                self._board = _Board(run.tensorboard, resume_step + 1)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise MachineError(
                f"metrics could not be written to {self._folder}: {e.strerror or e}; what was saved before "
                "is intact, and the same command goes on from there"
            ) from e

    def write(self, row: dict[str, Any]) -> None:
        """Appends one row, which has ``split`` and ``step``. Raises :class:`MachineError` if it cannot."""
        with self._writing():
            if self._file is not None:
                self._file.write(_line(row))
                self._file.flush()
            if self._board is not None:
                self._board.write(row)
        if row["split"] == "validation":
            self.validated.add(row["step"])

    def sync(self) -> None:
        """Makes the rows durable; called before a checkpoint that counts on them."""
        with self._writing():
            if self._file is not None:
                os.fsync(self._file.fileno())
            if self._board is not None:
                self._board.flush()

    def close(self) -> None:
        """Closes the files."""
        with self._writing():
            if self._file is not None:
                self._file.close()
            if self._board is not None:
                self._board.close()


def _line(row: dict[str, Any]) -> bytes:
    return (json.dumps(row, allow_nan=False) + "\n").encode("utf-8")


def say(message: str) -> None:
    """Prints a line to standard error without breaking a progress bar."""
    tqdm.write(message, file=sys.stderr)
    sys.stderr.flush()


class ProgressBar:
    """Step, loss, tokens/s and time left: a bar on a terminal, a line per logged row elsewhere.

    Of several processes only the leader shows anything.
    """

    def __init__(self, name: str, start: int, steps: int, leader: bool):
        self._name, self._steps, self._shown = name, steps, leader
        self._bar = None
        if leader and sys.stderr.isatty():
            self._bar = tqdm(
                total=steps, initial=start, desc=name, unit="step", dynamic_ncols=True, smoothing=0.05
            )

    def advance(self, loss: float, tokens_per_second: float) -> None:
        """Marks a step as done."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss:.3f}, {tokens_per_second:,.0f} tokens/s", refresh=False)
            self._bar.update()

    def row(self, row: dict[str, Any]) -> None:
        """Reports a row of metrics."""
        if row["split"] == "validation":
            self.say(f"step {row['step']}: validation loss {row['loss']:.4f}")
        elif self._bar is None:
            minutes, seconds = divmod(round((self._steps - row["step"]) * row["step_seconds"]), 60)
            self.say(
                f"step {row['step']}/{self._steps}: loss {row['loss']:.4f}, "
                f"{row['tokens_per_second']:,.0f} tokens/s, {minutes}:{seconds:02d} left"
            )

    def say(self, message: str) -> None:
        """Prints a line about the run."""
        if self._shown:
            say(f"{self._name}: {message}")

    def close(self) -> None:
        """Ends the bar."""
        if self._bar is not None:
            self._bar.close()
