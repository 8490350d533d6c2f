"""The run directory: what lies where, and the rules for continuing what is there."""

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cplm_jax.config import FREE_TO_CHANGE, Config
from cplm_jax.config_loading import differences, load_config, to_yaml
from cplm_jax.data.tokenizer import Tokenizer
from cplm_jax.errors import UserError


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file so that a kill leaves the old content or the new, never a part.

    Raises:
      OSError: naming the file, if it cannot be written.
    """
    handle, name = tempfile.mkstemp(prefix=path.name + ".", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(path)) from e
    finally:
        Path(name).unlink(missing_ok=True)


class RunDirectory:
    """Paths of a run, and its small files.

    Attributes:
      path: the folder.
      config_file, metrics_file, checkpoints, tensorboard: as the names say.
      details_file: ``run.json``, facts of the run that are no configuration: fingerprint of the
        corpus, parameters, memory, versions.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path).expanduser()
        self.config_file = self.path / "config.yaml"
        self.metrics_file = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.tensorboard = self.path / "tensorboard"
        self.details_file = self.path / "run.json"

    @property
    def tokenizer_file(self) -> Path:
        """The tokenizer: ``tokenizer.model``, or ``tokenizer.json`` if there is one."""
        other = self.path / "tokenizer.json"
        return other if other.exists() else self.path / "tokenizer.model"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Creates the folder and holds it against other processes; a kill releases it.

        Raises:
          UserError: if it cannot be written or another process trains in it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = open(self.path / ".lock", "a")  # noqa: SIM115 - held until the run ends
        except OSError as e:
            raise UserError(
                f"run_dir: cannot write to {self.path}: {e.strerror or e}; choose another folder"
            ) from e
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as e:
                raise UserError(
                    f"run_dir: another process is training in {self.path}; wait for it or choose "
                    "another folder"
                ) from e
            yield

    def has_checkpoints(self) -> bool:
        """Whether a finished checkpoint exists (unfinished ones do not have a number as a name)."""
        return self.checkpoints.is_dir() and any(p.name.isdigit() for p in self.checkpoints.iterdir())

    def details(self) -> dict[str, Any]:
        """Returns the content of run.json.

        Raises:
          UserError: if the file is missing or damaged.
        """
        reason = "it is not what a run writes"
        try:
            details = json.loads(self.details_file.read_bytes())
            if isinstance(details, dict) and {"corpus_fingerprint", "tokenizer_sha256"} <= details.keys():
                return details
        except OSError as e:
            reason = e.strerror or str(e)
        except ValueError as e:
            reason = f"it is no JSON: {e}"
        raise UserError(
            f"{self.details_file}: cannot use it: {reason}; restore the file, or use another run directory"
        )

    def check_continuation(self, config: Config, corpus_fingerprint: str, tokenizer_sha256: str) -> None:
        """Checks that the run that is here may go on under ``config``.

        Raises:
          UserError: naming what differs, or if what is here cannot be continued.
        """
        for folder in (self.checkpoints, self.tensorboard):
            if os.path.lexists(folder) and not folder.is_dir():
                raise UserError(f"run_dir: {folder} is no folder, as a run needs; choose another run_dir")
        if not self.has_checkpoints():
            self._check_fresh_start()
            return
        if not os.path.exists(self.config_file):
            raise UserError(
                f"{self.path} has checkpoints but no config.yaml, so it cannot be told whether they belong "
                "to this run; choose another run_dir"
            )
        old, details = load_config([str(self.config_file)]), self.details()
        if not os.path.exists(self.metrics_file):
            raise UserError(
                f"{self.path} has checkpoints but no metrics.jsonl, and going on would lose the run's "
                "history; put it back, or choose another run_dir"
            )
        read_rows(self.metrics_file)
        changed = [f"{k}: {a!r} -> {b!r}" for k, (a, b) in differences(old, config, FREE_TO_CHANGE).items()]
        if details["tokenizer_sha256"] != tokenizer_sha256:
            changed.append("the tokenizer is another one (data.tokenizer)")
        if details["corpus_fingerprint"] != corpus_fingerprint:
            changed.append("the documents of data.paths or data.validation_paths changed")
        if changed and not config.checkpoint.allow_changed_config:
            listed = "\n  ".join(changed)
            raise UserError(
                f"{self.path} holds a run with another configuration, and going on would change its result:\n"
                f"  {listed}\n"
                "choose another run_dir, undo the change, or pass --checkpoint.allow_changed_config true"
            )

    def _check_fresh_start(self) -> None:
        """Refuses to start on top of another project, or of a run whose checkpoints were taken away.

        A run that was killed before its first checkpoint starts over.
        """
        if os.path.exists(self.details_file):
            if self.details().get("checkpointed"):
                raise UserError(
                    f"{self.path} holds a run without the checkpoints it had, and starting over would delete "
                    "its metrics; put them back, choose another run_dir or remove that folder"
                )
            return
        ours = (self.config_file, self.tokenizer_file, self.metrics_file)
        taken = [file.name for file in ours if os.path.lexists(file)]
        if taken:
            raise UserError(
                f"{self.path} has {', '.join(taken)} but no run.json, so it is not the folder of a run, and "
                "a run would overwrite that; choose another run_dir"
            )

    def write_setup(self, config: Config, tokenizer: Tokenizer, details: dict[str, Any]) -> None:
        """Writes run.json, which marks the folder as a run's, then config.yaml and the tokenizer."""
        write_atomically(self.details_file, (json.dumps(details, indent=2) + "\n").encode("utf-8"))
        write_atomically(self.config_file, to_yaml(config).encode("utf-8"))
        write_atomically(self.path / tokenizer.file_name, tokenizer.proto)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Reads metrics.jsonl; a last line that a kill cut short is left out.

    Raises:
      UserError: if another line is not a JSON object with a step and a split.
    """

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    rows = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, parse_constant=refuse)
        except ValueError:
            row = None
        if not (isinstance(row, dict) and isinstance(row.get("step"), int) and "split" in row):
            if number == len(lines):
                break
            raise UserError(
                f"{path}:{number}: not a row of metrics, which is a JSON object with a split and a step; "
                "mend or remove that line"
            )
        rows.append(row)
    return rows
