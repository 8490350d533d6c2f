"""The quickstart: trains a baseline and a CPLM on the same batches and reports what the head bought."""

import dataclasses
import sys
import time
from pathlib import Path

from cplm_jax.config import Config
from cplm_jax.errors import UserError
from cplm_jax.training.loop import Outcome, Result, train


def paired_configs(config: Config) -> tuple[Config, Config]:
    """Returns the configurations of the baseline and of the CPLM, side by side in one folder.

    Args:
      config: the CPLM's; its ``run_dir`` names the CPLM's run, and the baseline lies beside it.

    Raises:
      UserError: if there is no copy head or no run_dir.
    """
    if config.model.copy_head is None:
        raise UserError("model.copy_head is null; the quickstart needs a copy head to compare")
    if config.run_dir is None:
        raise UserError("run_dir is not set; give the CPLM's folder, as in --run_dir runs/first/cplm")
    baseline_dir = Path(config.run_dir).expanduser().parent / "baseline"
    if baseline_dir == Path(config.run_dir).expanduser():
        raise UserError("run_dir must not end in 'baseline', where the baseline goes")
    model = dataclasses.replace(config.model, copy_head=None)
    return dataclasses.replace(config, model=model, run_dir=str(baseline_dir)), config


def quickstart(config: Config) -> Result | Path:
    """Trains both runs, or goes on with them, and writes the report.

    Returns:
      The path of report.html, or the result of the run in which a signal came.

    Raises:
      UserError, MachineError: as :func:`~cplm_jax.training.loop.train` does.
    """
    began = time.monotonic()
    runs = paired_configs(config)
    trained = False
    for run_config in runs:
        result = train(run_config)
        if result.signal is not None:
            return result
        trained |= result.outcome is Outcome.FINISHED
    if trained:
        print(f"training took {time.monotonic() - began:.0f} s", file=sys.stderr)
    print("measuring both runs on held-out text", file=sys.stderr)
    from cplm_jax.evaluation.comparison import compare
    from cplm_jax.evaluation.report import write_report

    baseline, cplm = (Path(c.run_dir or "").expanduser() for c in runs)
    return write_report(compare(baseline, cplm), cplm.parent)
