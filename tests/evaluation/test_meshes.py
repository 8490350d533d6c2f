"""A model loaded onto a mesh evaluates and generates as on one device, or says why it cannot."""

import numpy as np

from tests.fake_devices import run_on_devices


def test_every_mesh_says_what_one_device_says(tmp_path):
    results = run_on_devices(2, "tests.evaluation.evaluated_on_meshes", tmp_path)
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
