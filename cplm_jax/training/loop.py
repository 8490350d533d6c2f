"""The training loop."""

import contextlib
import math
import time
from enum import Enum
from typing import Any, NamedTuple

import jax
import numpy as np

from cplm_jax.config import Config
from cplm_jax.data.pipeline import TrainingBatches, validation_batches
from cplm_jax.errors import MachineError, UserError, first_line
from cplm_jax.evaluation.validation import Validator
from cplm_jax.sharding import devices
from cplm_jax.training.checkpointing import Checkpointer, Progress, all_finite
from cplm_jax.training.metrics import MetricsWriter, ProgressBar, say
from cplm_jax.training.run_directory import RunDirectory
from cplm_jax.training.setup import Setup, initialize_processes, set_up
from cplm_jax.training.signals import StopAgreement, StopRequest
from cplm_jax.training.step import StepMetrics, Trainer, TrainState


class Outcome(Enum):
    """How a call of :func:`train` ended."""

    FINISHED = "finished"
    ALREADY_FINISHED = "already finished"
    STOPPED = "stopped"


class Result(NamedTuple):
    """What :func:`train` returns."""

    outcome: Outcome
    step: int
    signal: int | None = None
    """Number of the signal that stopped the run, or that came when it had just finished."""


def train(config: Config) -> Result:
    """Trains, or goes on with, the run of ``config.run_dir``.

    SIGINT and SIGTERM save and stop.

    Args:
      config: the configuration.

    Returns:
      How it ended, and at which step; a stopped run was saved.

    Raises:
      UserError: for what the user can mend, before compilation.
      MachineError: if a checkpoint could not be written or the loss is not finite.
    """
    if config.run_dir is None:
        raise UserError("run_dir is not set; give the folder of the run, as in --run_dir runs/first")
    run = RunDirectory(config.run_dir)
    initialize_processes(config.mesh)
    devices()
    leader = jax.process_index() == 0
    with run.locked() if leader else contextlib.nullcontext():
        setup = set_up(config, say if leader else lambda _: None)
        run.check_continuation(setup.config, setup.corpus.fingerprint, setup.corpus.tokenizer.sha256)
        with StopRequest() as request:
            try:
                return _Run(setup, run, request, leader).go()
            except jax.errors.JaxRuntimeError as e:
                raise MachineError(
                    f"the device failed: {first_line(e)}; if it ran out of memory, raise train.accumulation "
                    f"or lower train.batch_size. What was saved in {run.checkpoints} is intact"
                ) from e


class _Run:
    """One process's share of a run, from the newest checkpoint to the end or to a signal."""

    def __init__(self, setup: Setup, run: RunDirectory, request: StopRequest, leader: bool):
        self.setup, self.config, self.run = setup, setup.config, run
        self.request, self.leader = request, leader
        self.details = setup.details()
        self.trainer = Trainer(self.config, setup.definition, setup.mesh)
        self.tokens = 0
        train = self.config.train
        self.batches = TrainingBatches(
            setup.train_rows,
            train.batch_size,
            train.accumulation,
            train.steps,
            setup.mesh,
            self.config.data,
        )
        self.vocabulary_size = self.config.model.vocabulary_size or 0
        self.validator = Validator(
            setup.definition, setup.mesh, setup.corpus.tokenizer.byte_lengths(self.vocabulary_size)
        )

    def go(self) -> Result:
        """Restores or starts, trains to the end, and closes what was opened."""
        with contextlib.closing(
            Checkpointer(self.run.checkpoints, self.config.checkpoint.keep)
        ) as checkpointer:
            self.checkpointer = checkpointer
            start = checkpointer.latest_step()
            if start is None:
                start, state = 0, self.trainer.init()
            else:
                state, progress = checkpointer.restore(self.trainer.abstract_state)
                self.tokens = progress.tokens
                self.batches.set_state(progress.data)
                self.details = {**self.run.details(), **self.details, "checkpointed": True}
            self._write_setup()
            writer = MetricsWriter(self.run, start, self.config.logging.tensorboard, self.leader)
            bar = ProgressBar(self.run.path.name, start, self.config.train.steps, self.leader)
            with contextlib.closing(writer), contextlib.closing(bar), contextlib.closing(self.batches):
                self.writer, self.bar = writer, bar
                return self._train(state, start)

    def _write_setup(self) -> None:
        if self.leader:
            self.run.write_setup(self.config, self.setup.corpus.tokenizer, self.details)

    def _train(self, state: TrainState, start: int) -> Result:
        steps = self.config.train.steps
        agreement = StopAgreement(self.request, self.setup.mesh)
        if 0 < start < steps:
            self.bar.say(f"going on from step {start} of {steps}")
        missing = self._validation_due(start) and start not in self.writer.validated
        if missing and not self._validate(state, start):  # it was stopped before it could validate
            return self._stop(state, start)
        if start >= steps:
            self.bar.say(f"complete at step {start}; nothing left to train")
            return Result(Outcome.FINISHED if missing else Outcome.ALREADY_FINISHED, start)
        train_step = self._compile()
        if agreement.stop():
            return self._stop(state, start)
        recorder = _StepRecorder(self)
        for step in range(start + 1, steps + 1):
            state, step_metrics = train_step(state, next(self.batches))
            recorder.push(step, step_metrics, self.batches.source_tokens)
            stopping = agreement.stop()
            validating = self._validation_due(step)
            saving = step % self.config.checkpoint.every == 0 or step == steps
            if not (stopping or validating or saving):
                continue
            recorder.flush()
            if not all_finite(state):
                raise self.diverged(f"the parameters or the optimizer state after step {step} are not finite")
            if validating and not stopping:
                stopping = not self._validate(state, step)
            if stopping:
                return self._stop(state, step)
            if saving:
                self._save(state, step)
            recorder.restart_clock()
        self._finish_saving()
        if self.request.signal is not None:
            self.bar.say(f"{self.request.signal.name} came when the run had just finished")
        return Result(Outcome.FINISHED, steps, self.request.signal)

    def _compile(self) -> Any:
        self.bar.say(
            f"compiling the training step ({self.details['parameters']:,} parameters, {self.setup.mesh.size} "
            f"{self.details['device']} device{'s' if self.setup.mesh.size > 1 else ''})"
        )
        began = time.perf_counter()
        compiled = self.trainer.compile_step()
        self.details["compile_seconds"] = time.perf_counter() - began
        memory = compiled.memory_analysis()
        if memory is not None:
            self.details["memory_per_device"] = {
                "temporary_bytes": memory.temp_size_in_bytes,
                "argument_bytes": memory.argument_size_in_bytes,
            }
        self._write_setup()
        return compiled

    def _validation_due(self, step: int) -> bool:
        return step > 0 and (step % self.config.evaluation.every == 0 or step == self.config.train.steps)

    def _validate(self, state: TrainState, step: int) -> bool:
        """Writes a validation row; returns False if a signal cut it short."""
        batches = validation_batches(
            self.setup.validation_rows,
            self.config.evaluation.batch_size,
            self.config.evaluation.batches,
            self.setup.mesh,
        )
        several = jax.process_count() > 1  # no process may leave the others alone in a batch
        found = self.validator(state.params, batches, lambda: self.request.signal is not None and not several)
        if found is None:
            return False
        if not math.isfinite(found["loss"]):
            raise self.diverged(f"the validation loss of step {step} is {found['loss']}")
        self._write({"split": "validation", "step": step, "tokens": self.tokens, **found})
        return True

    def _write(self, row: dict[str, Any]) -> None:
        self.writer.write(row)
        self.bar.row(row)

    def _save(self, state: TrainState, step: int) -> None:
        # The rows up to this step must survive whatever the checkpoint survives.
        self.writer.sync()
        self._note_checkpoint()
        self.checkpointer.save(step, state, Progress(self.tokens, self.batches.get_state()))

    def _finish_saving(self) -> None:
        self.checkpointer.wait()
        self._note_checkpoint()

    def _note_checkpoint(self) -> None:
        # A run without checkpoints was killed before its first one, or has lost them: run.json tells which.
        if not self.details.get("checkpointed") and self.run.has_checkpoints():
            self.details["checkpointed"] = True
            self._write_setup()

    def diverged(self, what: str) -> MachineError:
        """Returns the error of a state that is no use, neither to validate nor to save."""
        return MachineError(
            f"{what}; nothing was saved from there on. Lower optimizer.learning_rate, and go on from the "
            f"newest checkpoint in {self.run.checkpoints}, or start over in another run_dir"
        )

    def _stop(self, state: TrainState, step: int) -> Result:
        self._save(state, step)
        self._finish_saving()
        by = f" by {self.request.signal.name}" if self.request.signal is not None else ""
        self.bar.say(f"stopped{by} and saved at step {step}; run the same command again to go on")
        return Result(Outcome.STOPPED, step, self.request.signal)


class _StepRecorder:
    """Reads the metrics of a step while the next one runs, and writes the rows that are due."""

    def __init__(self, run: _Run):
        self._run = run
        self._pending: tuple[int, StepMetrics, np.ndarray] | None = None
        self._start_window()
        self.restart_clock()

    def _start_window(self) -> None:
        self._seconds, self._steps, self._window_tokens = 0.0, 0, 0
        self._waited_before = self._run.batches.seconds_waited

    def restart_clock(self) -> None:
        """Leaves the time since the last step out of the step times (validation, saving)."""
        self._clock = time.perf_counter()

    def push(self, step: int, step_metrics: StepMetrics, source_tokens: np.ndarray) -> None:
        """Takes a step that was just dispatched and reads the one before.

        Args:
          step: its number.
          step_metrics: what it returns, on the device.
          source_tokens: target tokens drawn from each source so far.
        """
        self.flush()
        self._pending = step, step_metrics, source_tokens

    def flush(self) -> None:
        """Waits for the pending step, counts its tokens and writes its row if one is due."""
        if self._pending is None:
            return
        step, pending, source_tokens = self._pending
        self._pending = None
        values = {name: value.item() for name, value in jax.device_get(pending)._asdict().items()}
        loss, norm, tokens = values["loss"], values["gradient_norm"], values["tokens"]
        now = time.perf_counter()
        self._seconds += now - self._clock
        self._clock = now
        self._steps += 1
        self._window_tokens += tokens
        run = self._run
        run.tokens += tokens
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise run.diverged(f"the loss of step {step} is {loss} and its gradient norm {norm}")
        rate = self._window_tokens / self._seconds
        run.bar.advance(loss, rate)
        if step % run.config.logging.every and step != run.config.train.steps:
            return
        row = {
            "split": "train",
            "step": step,
            "tokens": run.tokens,
            "loss": loss,
            "learning_rate": values["learning_rate"],
            "gradient_norm": norm,
            "step_seconds": self._seconds / self._steps,
            "tokens_per_second": rate,
            "data_wait": (run.batches.seconds_waited - self._waited_before) / self._seconds,
        }
        for source, packed, drawn in zip(
            run.setup.corpus.sources, run.setup.train_rows.sources, source_tokens.tolist(), strict=True
        ):
            row[f"tokens/{source.name}"] = drawn
            row[f"epochs/{source.name}"] = drawn / packed.predictions
        if run.config.model.copy_head is not None:
            row["gate"] = values["gate"]
        run._write(row)
        self._start_window()
