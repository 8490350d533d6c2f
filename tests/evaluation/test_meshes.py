"""A model loaded onto a mesh evaluates and generates as on one device, or says why it cannot."""

import json
import subprocess
import sys

import numpy as np


def test_every_mesh_says_what_one_device_says(tmp_path):
    command = [sys.executable, "-m", "tests.evaluation.evaluated_on_meshes", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    message = results.pop("odd")
    assert "model.vocabulary_size = 333" in message
    assert "mesh.tensor = 2" in message
    one = results.pop("{'data': 1}")
    assert len(results) == 4
    for mesh, result in results.items():
        assert result["texts"] == one["texts"], mesh
        for suite in ("validation", "copying"):
            for name, value in one["figures"][suite].items():
                if name != "calibration":
                    np.testing.assert_allclose(
                        result["figures"][suite][name], value, rtol=1e-3, atol=1e-3, err_msg=f"{mesh} {name}"
                    )
