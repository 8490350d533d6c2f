import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def prepare(package, output):
    command = [sys.executable, ROOT / "benchmarks" / "prepare_brown.py", package, output]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_tagged_documents_become_plain_text(tmp_path):
    package, output = tmp_path / "package", tmp_path / "out"
    package.mkdir()
    (package / "ca01").write_text(
        "\n\nMerger/nn-hl proposed/vbn-hl \n"
        "``/`` Who/wps 's/bez '/' pro/jj '/' ?/. ?/. ''/'' ,/, asked/vbd Mr./np Allen/np Jr./np ./. \n"
        "He/pps held/vbd a/at 1/2''/nn ''/'' bar/nn (/( of/in brass/nn )/) --/-- and/or/cc so/rb on/rp ./.\n"
        "\n\n"
        "\tThe/at end/nn !/. !/. \n"
    )
    (package / "CONTENTS").write_text("no document")
    done = prepare(package, output)
    assert done.returncode == 0, done.stderr
    assert [file.name for file in output.iterdir()] == ["ca01.txt"]
    assert (output / "ca01.txt").read_text() == (
        "Merger proposed\n"
        "\"Who 's 'pro'?\", asked Mr. Allen Jr. He held a 1/2\" bar (of brass) -- and/or so on.\n\n"
        "The end!\n"
    )


def test_a_folder_without_documents_is_an_error(tmp_path):
    done = prepare(tmp_path, tmp_path / "out")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "no tagged document" in done.stderr
    assert not (tmp_path / "out").exists()


def test_untagged_text_is_an_error(tmp_path):
    (tmp_path / "ca01").write_text("Plain words\n")
    done = prepare(tmp_path, tmp_path / "out")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "word/tag" in done.stderr
