"""A trained model without its training state: configuration, tokenizer and Orbax parameters."""

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orbax.checkpoint as ocp

from cplm_jax.config_loading import to_yaml
from cplm_jax.errors import MachineError, UserError, first_line
from cplm_jax.folders import discard
from cplm_jax.training.checkpointing import checksums, silence_abandoned_transfers

if TYPE_CHECKING:
    from cplm_jax.loading import LoadedModel

_PARAMS = "params"


def export_orbax(model: "LoadedModel", output: str | Path) -> Path:
    """Writes ``config.yaml``, the tokenizer, ``run.json`` and ``params/`` (an Orbax pytree).

    The folder appears whole or not at all.

    Raises:
      UserError: if ``output`` exists or cannot be written.
      MachineError: if writing fails.
    """
    output = Path(output).expanduser()
    if output.exists():
        raise UserError(f"--output {output}: it exists already; choose another folder")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        target = Path(tempfile.mkdtemp(prefix=output.name + ".", dir=output.parent))
    except OSError as e:
        raise UserError(f"--output {output}: cannot write there: {e.strerror or e}") from e
    silence_abandoned_transfers()
    try:
        (target / "config.yaml").write_text(to_yaml(model.config), encoding="utf-8")
        (target / model.tokenizer.file_name).write_bytes(model.tokenizer.proto)
        details = {
            **model.details,
            "export": {"step": model.step, "tokens": model.tokens, "checksums": checksums(model.params)},
        }
        (target / "run.json").write_text(json.dumps(details, indent=2) + "\n", encoding="utf-8")
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(target.absolute() / _PARAMS, model.params)
        os.chmod(target, 0o755)
        os.rename(target, output)
    except (OSError, ValueError) as e:
        raise MachineError(f"--output {output}: could not be written: {first_line(e)}") from e
    finally:
        discard(target)
    return output


def is_export(path: Path) -> bool:
    """Returns whether a folder looks like what :func:`export_orbax` writes."""
    return (path / _PARAMS).is_dir()


def restore_export(
    path: Path, abstract: dict[str, Any], details: dict[str, Any]
) -> tuple[dict[str, Any], int, int]:
    """Restores parameters onto the shardings of ``abstract``; returns them, their step and the tokens seen.

    Raises:
      UserError: if the export is damaged or of another model.
    """
    silence_abandoned_transfers()
    try:
        record = details["export"]
        with ocp.StandardCheckpointer() as checkpointer:
            params = checkpointer.restore(path.absolute() / _PARAMS, abstract)
        if checksums(params) != record["checksums"]:
            raise ValueError("its parameters are not what was saved")
        return params, int(record["step"]), int(record["tokens"])
    except Exception as e:  # Orbax and TensorStore raise bare exceptions of many kinds
        raise UserError(
            f"{path}: the export is damaged or of another model ({first_line(e)}); export the run again"
        ) from e
