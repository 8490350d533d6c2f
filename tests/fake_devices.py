"""Runs a program of the tests on a CPU that looks like several devices."""

import json
import os
import subprocess
import sys


def run_on_devices(devices, module, *arguments):
    """Runs ``python -m module`` and returns the JSON that its last line holds.

    A process of its own, because the number of devices is fixed when JAX starts.
    """
    environment = {
        # Devices that share busy cores may take long to meet in a collective, which XLA takes for a deadlock.
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} "
        "--xla_cpu_collective_timeout_seconds=600 --xla_cpu_collective_call_terminate_timeout_seconds=600",
        # XLA's threads, else as many as devices: each device may wait in several collectives at a time, and
        # where all threads wait, nobody comes.
        "NPROC": "64",
        "JAX_PLATFORMS": "cpu",
        # A program of several CPU devices that comes from the compilation cache may start its collectives
        # in another order on each, and wait for ever.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    assert "rematerialization" not in done.stderr, done.stderr  # XLA gave up on splitting something
    return json.loads(done.stdout.splitlines()[-1])
