"""An unfinished folder is removed, also when somebody still writes to it."""

import pytest

from cplm_jax import folders
from cplm_jax.folders import discard


@pytest.fixture
def unfinished(tmp_path):
    folder = tmp_path / "unfinished"
    (folder / "params").mkdir(parents=True)
    (folder / "params" / "0").write_text("early")
    return folder


class LateWriter:
    """Makes the folder anew, as TensorStore's threads do, in the first ``times`` pauses of ``discard``."""

    def __init__(self, folder, times):
        self.folder = folder
        self.times = times
        self.now = 0.0

    def sleep(self, seconds):
        self.now += seconds
        if self.times > 0:
            self.times -= 1
            (self.folder / "params" / "d").mkdir(parents=True)

    def monotonic(self):
        return self.now


@pytest.mark.parametrize("times", [0, 1, 3])
def test_a_folder_that_comes_back_is_removed_again(unfinished, tmp_path, monkeypatch, caplog, times):
    monkeypatch.setattr(folders, "time", LateWriter(unfinished, times))
    discard(unfinished)
    assert not list(tmp_path.iterdir())
    assert not caplog.records


def test_a_file_made_while_its_folder_is_removed(unfinished, tmp_path, monkeypatch, caplog):
    rmdir, late = folders.shutil.os.rmdir, iter(["late"])

    def interrupted(path, **kwargs):
        for text in late:
            (unfinished / "params" / "1").write_text(text)
        rmdir(path, **kwargs)

    monkeypatch.setattr(folders.shutil.os, "rmdir", interrupted)
    discard(unfinished)
    assert not list(tmp_path.iterdir())
    assert next(late, None) is None
    assert not caplog.records


def test_a_folder_that_cannot_be_removed_is_named(unfinished, monkeypatch, caplog):
    monkeypatch.setattr(folders, "time", LateWriter(unfinished, times=10**6))
    discard(unfinished)
    assert unfinished.exists()
    assert str(unfinished) in caplog.text
    assert "goes on writing" in caplog.text


def test_a_folder_that_is_gone(tmp_path, caplog):
    discard(tmp_path / "renamed")
    assert not caplog.records
