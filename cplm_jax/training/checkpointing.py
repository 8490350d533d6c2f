"""Orbax checkpoints of a run: parameters, optimizer, step, random state, data position."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from cplm_jax.errors import MachineError, UserError
from cplm_jax.training.step import Params, TrainState

# Orbax reports at INFO and WARNING what is routine here (single host, default options).
logging.getLogger("absl").setLevel(logging.ERROR)


@dataclass(frozen=True)
class Progress:
    """What a checkpoint holds beside arrays.

    Attributes:
      tokens: target tokens trained on.
      data: state of the Grain iterator.
    """

    tokens: int
    data: dict[str, Any]


@jax.jit
def _leaf_checksums(leaves: list[jax.Array]) -> jax.Array:
    """Returns a checksum of every array, uint32, independent of how it is sharded."""

    def checksum(x: jax.Array) -> jax.Array:
        unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        bits = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32).reshape(-1)
        weights = jax.lax.iota(jnp.uint32, bits.size) * jnp.uint32(2654435761) | jnp.uint32(1)
        return jnp.sum(bits * weights, dtype=jnp.uint32)

    return jnp.stack([checksum(x) for x in leaves])


def checksums(tree: Any) -> dict[str, int]:
    """Returns ``{path: checksum}``: storage formats detect a truncated file, but not every flipped bit."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    sums = jax.device_get(_leaf_checksums([leaf for _, leaf in leaves]))
    return {jax.tree_util.keystr(path): int(s) for (path, _), s in zip(leaves, sums, strict=True)}


class Checkpointer:
    """Saves and restores the state of a run under ``RUN/checkpoints/<step>/``.

    Args:
      folder: the checkpoints' folder.
      keep: number of latest checkpoints kept; ``None`` keeps all.
    """

    def __init__(self, folder: Path, keep: int | None):
        self.folder = folder.absolute()
        self._manager = ocp.CheckpointManager(
            self.folder, options=ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        )

    def latest_step(self) -> int | None:
        """Returns the step of the newest finished checkpoint."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, progress: Progress) -> None:
        """Saves in the background; a checkpoint of the same step is left as it is.

        Raises:
          MachineError: if this save, or the one before, could not be written.
        """
        if step in self._manager.all_steps():
            return
        rest = {"optimizer": state.optimizer, "step": state.step, "key": state.key}
        record = {
            "tokens": progress.tokens,
            "data": progress.data,
            "checksums": {"params": checksums(state.params), "optimizer": checksums(rest)},
        }
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardSave(state.params),
                    optimizer=ocp.args.StandardSave(rest),
                    progress=ocp.args.JsonSave(record),
                ),
            )
        except Exception as e:
            raise self._failure(step, e) from e

    def wait(self) -> None:
        """Waits for background saves. Raises :class:`MachineError` if one failed."""
        try:
            self._manager.wait_until_finished()
        except Exception as e:
            raise self._failure(None, e) from e

    def _failure(self, step: int | None, error: Exception) -> MachineError:
        finished = sorted(int(p.name) for p in self.folder.iterdir() if p.name.isdigit())
        which = "a checkpoint" if step is None else f"the checkpoint of step {step}"
        return MachineError(
            f"{which} could not be written to {self.folder}: {first_line(error)}; "
            + (f"the last good one is of step {finished[-1]}" if finished else "there is none yet")
        )

    def restore(self, abstract: TrainState) -> tuple[TrainState, Progress]:
        """Restores the newest checkpoint onto the shardings of ``abstract``.

        Raises:
          UserError: if it is damaged or does not fit ``abstract``.
        """
        step = self._newest()
        record = self._read(step, "progress", ocp.args.JsonRestore())
        params = self._read_params(step, abstract.params, record)
        rest = {"optimizer": abstract.optimizer, "step": abstract.step, "key": abstract.key}
        rest = self._read(step, "optimizer", ocp.args.StandardRestore(rest))
        self._verify(step, "optimizer", rest, record)
        state = TrainState(params, rest["optimizer"], rest["step"], rest["key"])
        if int(state.step) != step:
            raise self._damaged(step, f"it says it is of step {int(state.step)}")
        return state, Progress(record["tokens"], record["data"])

    def restore_params(self, abstract: Params) -> tuple[Params, int, int]:
        """Restores the newest parameters alone; returns them, their step and the tokens seen."""
        step = self._newest()
        record = self._read(step, "progress", ocp.args.JsonRestore())
        return self._read_params(step, abstract, record), step, record["tokens"]

    def _newest(self) -> int:
        step = self.latest_step()
        if step is None:
            raise UserError(f"{self.folder} has no checkpoint")
        return step

    def _read_params(self, step: int, abstract: Params, record: dict[str, Any]) -> Params:
        params = self._read(step, "params", ocp.args.StandardRestore(abstract))
        self._verify(step, "params", params, record)
        return params

    def _read(self, step: int, item: str, args: Any) -> Any:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**{item: args}))[item]
        except Exception as e:  # Orbax and TensorStore raise bare exceptions of many kinds
            raise self._damaged(step, f"{item}: {first_line(e)}") from e

    def _verify(self, step: int, item: str, tree: Any, record: dict[str, Any]) -> None:
        saved = record["checksums"][item]
        for path, value in checksums(tree).items():
            if saved.get(path) != value:
                raise self._damaged(step, f"{item}{path} is not what was saved")

    def _damaged(self, step: int, reason: str) -> UserError:
        others = sorted(s for s in self._manager.all_steps() if s != step)
        advice = (
            f"move it away to go on from step {others[-1]}"
            if others
            else "there is no other checkpoint; move it away to start over"
        )
        return UserError(
            f"{self.folder / str(step)}: the checkpoint is damaged or of another model ({reason}); {advice}"
        )

    def close(self) -> None:
        """Waits for background saves and releases the folder."""
        self._manager.close()


def first_line(error: BaseException) -> str:
    """Returns the first line of an error of a library, shortened."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]
