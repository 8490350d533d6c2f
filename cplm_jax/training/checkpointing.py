"""Orbax checkpoints of a run: parameters, optimizer, step, random state, data position."""

import asyncio
import json
import logging
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from cplm_jax.errors import MachineError, UserError, first_line
from cplm_jax.training.step import Params, TrainState

# Orbax reports at INFO and WARNING what is routine here (single host, default options), and at ERROR,
# with tracebacks, what it then raises.
logging.getLogger("absl").setLevel(logging.CRITICAL)


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


def _shapes(tree: Any) -> dict[str, list[int]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): list(leaf.shape) for path, leaf in leaves}


@jax.jit
def all_finite(tree: Any) -> jax.Array:
    """Returns whether no element of a tree of arrays is NaN or infinite."""
    return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()


def _record_checksum(record: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode("utf-8"))


class Checkpointer:
    """Saves and restores the state of a run under ``RUN/checkpoints/<step>/``.

    Args:
      folder: the checkpoints' folder.
      keep: number of latest checkpoints kept; ``None`` keeps all.
    """

    def __init__(self, folder: Path, keep: int | None):
        silence_abandoned_transfers()
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
            "shapes": _shapes(state.params),
            "checksums": {"params": checksums(state.params), "optimizer": checksums(rest)},
        }
        record["checksum"] = _record_checksum(record)
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
        outlook = (
            f"the last good one is of step {finished[-1]}, and the same command goes on from there"
            if finished
            else "there is none yet, and the same command starts over"
        )
        return MachineError(f"{which} could not be written to {self.folder}: {first_line(error)}; {outlook}")

    def restore(self, abstract: TrainState) -> tuple[TrainState, Progress]:
        """Restores the newest checkpoint onto the shardings of ``abstract``.

        Raises:
          UserError: if it is damaged or does not fit ``abstract``.
        """
        step = self._newest()
        record = self._read_record(step)
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
        record = self._read_record(step)
        return self._read_params(step, abstract, record), step, record["tokens"]

    def _newest(self) -> int:
        step = self.latest_step()
        if step is None:
            raise UserError(f"{self.folder} has no checkpoint")
        return step

    def _read_record(self, step: int) -> dict[str, Any]:
        record = self._read(step, "progress", ocp.args.JsonRestore())
        if isinstance(record, dict) and {"tokens", "data", "shapes", "checksums"} <= record.keys():
            saved = record.pop("checksum", None)
            if saved == _record_checksum(record):
                return record
        raise self._damaged(step, "progress is not what was saved")

    def _read_params(self, step: int, abstract: Params, record: dict[str, Any]) -> Params:
        saved, wanted = record["shapes"], _shapes(abstract)
        for path in {**saved, **wanted}:
            if saved.get(path) != wanted.get(path):
                raise UserError(
                    f"{self.folder / str(step)}: the checkpoint is of another model: the shape of {path} is "
                    f"{saved.get(path, 'absent')} in it and {wanted.get(path, 'absent')} by the "
                    "configuration; undo the change of its model, or choose another run_dir"
                )
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
            else "there is no other checkpoint; start over in another run_dir"
        )
        return UserError(f"{self.folder / str(step)}: the checkpoint is damaged ({reason}); {advice}")

    def close(self) -> None:
        """Waits for background saves and releases the folder. Raises :class:`MachineError` if one failed."""
        try:
            self._manager.close()
        except Exception as e:
            raise self._failure(None, e) from e


_report_unraisable = sys.unraisablehook


def _report_all_but_abandoned(unraisable: Any) -> None:
    to_nobody = str(unraisable.exc_value) == "Event loop is closed"
    if not (to_nobody or asyncio.iscoroutine(unraisable.object)):
        _report_unraisable(unraisable)


def silence_abandoned_transfers() -> None:
    """Keeps a failure from being drowned in tracebacks; to be called before Orbax reads or writes.

    Orbax transfers arrays concurrently and gives up at the first failure. Python then prints a
    traceback for each of the other transfers, when it ends or is collected.
    """
    sys.unraisablehook = _report_all_but_abandoned
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
