"""The two ways a command can fail, and the exit statuses that go with them."""

import difflib
import os
import re
from collections.abc import Iterable

USER_ERROR_STATUS = 2
MACHINE_ERROR_STATUS = 1


class UserError(Exception):
    """A mistake the user can mend: exit status 2, one message, no traceback.

    The message says what is wrong, where (file and line or record, or
    configuration field), what was expected, and what to do.
    """


class MachineError(Exception):
    """A failure the user's input did not cause (a full disk, a diverged loss): exit status 1.

    Whatever was saved before it stays loadable.
    """


def first_line(error: BaseException) -> str:
    """Returns the first line of what a library's error says about its innermost cause, shortened.

    TensorStore names the system's error by its number, anywhere in a line of a thousand characters or
    more; its text then comes first.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line for line in str(error).splitlines() if line.strip()]
    line = lines[0] if lines else type(error).__name__
    number = re.search(r"os_error_code='(\d+)'", str(error))
    if len(line) > 300:
        line = f"{line[:100]} ... {line[-195:]}"
    return f"{os.strerror(int(number[1]))}: {line}" if number else line


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Returns ``"; did you mean 'x'?"`` for the candidate closest to ``name``, or ``""``."""
    candidates = list(candidates)
    matches = difflib.get_close_matches(name, candidates, n=1, cutoff=0.5)
    if not matches:
        # "--steps" for "--train.steps": the last component alone may be what was meant.
        leaf = name.rsplit(".", 1)[-1]
        by_leaf = {c.rsplit(".", 1)[-1]: c for c in reversed(candidates)}
        matches = [by_leaf[m] for m in difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.6)]
    return f"; did you mean {matches[0]!r}?" if matches else ""
