"""What of a library's error reaches the user."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cplm_jax.errors import first_line

ROOT = Path(__file__).resolve().parents[1]

# The metadata of an array does not fit on the disk: TensorStore's message of it is one long line.
FULL_DISK = """
import json, resource, signal, sys
import tensorstore as ts
from cplm_jax.errors import first_line

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
store = {"driver": "zarr", "kvstore": {"driver": "file", "path": sys.argv[1]}}
try:
    ts.open(store, create=True, dtype=ts.float32, shape=[10, 10]).result()
except Exception as e:
    print(json.dumps([str(e), first_line(e)]))
"""


def test_full_disk_is_named_whatever_the_path(tmp_path):
    store = str(tmp_path / ("x" * 150) / ("y" * 150))
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, store],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=True,
        timeout=120,
    )
    whole, line = json.loads(done.stdout)
    assert len(whole) > 300
    assert "os_error_code" in whole
    assert line.startswith("File too large: ")
    assert len(line) < 350


@pytest.mark.parametrize(
    ("message", "line"),
    [("\n \nfirst\nsecond", "first"), ("", "ValueError"), ("x" * 400, "x" * 100 + " ... " + "x" * 195)],
)
def test_first_line(message, line):
    outer = RuntimeError("outer")
    outer.__cause__ = ValueError(message)
    assert first_line(outer) == line
