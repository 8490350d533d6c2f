"""On meshes of 8 fake devices both paths, their gradients and both scatters equal the reference."""

from tests.fake_devices import run_on_devices


def test_meshes_equal_the_reference():
    meshes = run_on_devices(8, "tests.kernels.sharded_mixture")
    for mesh, result in meshes.items():
        for gate, errors in result["errors"].items():
            assert len(errors) > 20
            for what, error in errors.items():
                assert error < 1e-5, (mesh, gate, what)
        # Against ``np.add.at``.
        assert len(result["scatter"]) == 8
        for what, error in result["scatter"].items():
            assert error < 1e-5, (mesh, what)
        # The distribution gathers nothing: a split vocabulary costs reductions to (batch, length).
        for gate, found in result["collectives"].items():
            assert set(found) <= {"all-reduce"}, (mesh, gate)
    assert meshes["data=8"]["collectives"]["confidence"] == []
