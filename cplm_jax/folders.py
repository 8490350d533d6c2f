"""Removing a folder that somebody may still write to."""

import logging
import os
import shutil
import time
from pathlib import Path

_QUIET_S = 0.25
_PATIENCE_S = 10.0


def discard(folder: Path) -> None:
    """Removes an unfinished folder for good, or logs a warning that names what is left.

    After a write that failed, TensorStore's threads still end others that were begun with it, and make
    the folders above their files anew where they are gone. Nothing tells when the last of them has
    ended, so the folder is removed until it stays away.
    """
    deadline = time.monotonic() + _PATIENCE_S
    failure: OSError | None = None
    while os.path.lexists(folder) and time.monotonic() < deadline:
        try:
            shutil.rmtree(folder)
            failure = None
        except OSError as e:
            failure = e
        time.sleep(_QUIET_S)
    if os.path.lexists(folder):
        reason = f": {failure.strerror or failure}" if failure else ", as something goes on writing to it"
        logging.getLogger(__name__).warning("warning: %s is unfinished and was not removed%s", folder, reason)
