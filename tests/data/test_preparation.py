"""cplm prepare: the same shards whatever happens on the way, and nothing partial that passes for complete."""

import contextlib
import filecmp
import gzip
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import zstandard
from tokenizers import models, pre_tokenizers

from cplm_jax import cli
from cplm_jax.data.files import SourceFile, list_files
from cplm_jax.data.preparation import plan as plan_module
from cplm_jax.data.preparation import prepare as module
from cplm_jax.data.preparation import processes
from cplm_jax.data.preparation.duplicates import find_duplicates
from cplm_jax.data.preparation.plan import Settings, make_plan
from cplm_jax.data.preparation.prepare import prepare
from cplm_jax.data.preparation.statistics import summary
from cplm_jax.data.preparation.units import (
    Unit,
    digest_unit,
    hash_unit,
    is_held_out,
    prepare_unit,
    text_digest,
    write_digests,
)
from cplm_jax.data.records import Reading
from cplm_jax.data.shards import (
    RECORD_TOKENS,
    Documents,
    Span,
    names_file,
    read_manifest,
    records_of,
    sha256_of,
)
from cplm_jax.data.tokenizer import Tokenizer, train_tokenizer
from cplm_jax.errors import MachineError, UserError
from tests.tiny import write_corpus

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = Settings(
    Reading("text", 10**6), validation_fraction=0.2, deduplicate=False, shard_tokens=3000, unit_bytes=20_000
)


def make_texts(count=150, seed=1):
    rng = random.Random(seed)
    words = ["alpha", "beta", "gamma", "delta", "self", "return", "value", "é", "日本"]
    return [
        f"document {i} " + " ".join(rng.choice(words) for _ in range(rng.randrange(1, 120)))
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def texts():
    return make_texts()


@pytest.fixture(scope="module")
def tokenizer(texts):
    return train_tokenizer(texts, 320, 10**6)


@pytest.fixture(scope="module")
def source(texts, tmp_path_factory):
    """A corpus of several formats; its documents in the order of the files' names."""
    folder = tmp_path_factory.mktemp("source")

    def jsonl(part):
        return "".join(json.dumps({"text": text}) + "\n" for text in part).encode()

    (folder / "a.jsonl").write_bytes(jsonl(texts[:80]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(jsonl(texts[80:110])))
    (folder / "c.jsonl.zst").write_bytes(zstandard.compress(jsonl(texts[110:140])))
    for i, text in enumerate(texts[140:]):
        (folder / f"d{i:02}.txt").write_text(text)
    return folder


@pytest.fixture(scope="module")
def prepared(source, tokenizer, tmp_path_factory):
    output = tmp_path_factory.mktemp("prepared") / "out"
    prepare(list_files([str(source)], "--paths"), tokenizer, output, SETTINGS)
    return output


def all_texts(folder, tokenizer, side):
    documents = Documents(folder, side, read_manifest(folder))
    found = documents.read([Span(i, 0, int(n)) for i, n in enumerate(documents.lengths)])
    return [tokenizer.decode(tokens.tolist()) for tokens in found]


def assert_same_folder(a, b):
    names = sorted(p.name for p in a.iterdir())
    assert names == sorted(p.name for p in b.iterdir())
    assert filecmp.cmpfiles(a, b, names, shallow=False) == (names, [], [])


def test_every_document_is_there_once_and_in_order(prepared, tokenizer, texts):
    held_out = [text for text in texts if is_held_out(text_digest(text.encode()), 0.2)]
    assert 10 < len(held_out) < 60
    assert all_texts(prepared, tokenizer, "validation") == held_out
    assert all_texts(prepared, tokenizer, "train") == [text for text in texts if text not in held_out]


def test_the_manifest_says_what_is_there(prepared, tokenizer, texts, source):
    manifest = read_manifest(prepared)
    assert manifest["tokenizer"]["sha256"] == tokenizer.sha256
    assert (prepared / "tokenizer.model").read_bytes() == tokenizer.proto
    assert {p.name for p in prepared.iterdir()} >= {s["file"] for s in manifest["train"]["shards"]}
    assert not (prepared / "work").exists()
    for side in ("train", "validation"):
        part, ours = manifest[side], all_texts(prepared, tokenizer, side)
        assert len(part["shards"]) > 2
        assert part["documents"] == len(ours) == sum(s["documents"] for s in part["shards"])
        assert part["bytes"] == sum(len(text.encode()) for text in ours)
        ids = [tokenizer.encode(text) for text in ours]
        assert part["tokens"] == sum(map(len, ids))
        repeated = sum(sum(t in x[:i] for i, t in enumerate(x)) for x in ids)
        assert part["repeated_targets"] == repeated
        for shard in part["shards"]:
            assert shard["size"] == (prepared / shard["file"]).stat().st_size
            assert shard["sha256"] == sha256_of(prepared / shard["file"])
            assert shard["names_sha256"] == sha256_of(prepared / names_file(shard["file"]))
    assert [s["name"] for s in manifest["sources"]] == sorted(p.name for p in source.iterdir())
    assert sum(s["documents"] for s in manifest["sources"]) == len(texts)
    for entry in manifest["sources"]:
        assert entry["size"] == (source / entry["name"]).stat().st_size
        assert len(entry["sha256"]) == 64
    text = summary(manifest, prepared)
    assert f"{part['documents']:,} documents" in text
    assert f"{repeated / (part['tokens'] + part['documents']):.1%} of the targets" in text


def test_labels_name_where_a_document_came_from(prepared, tokenizer, texts):
    documents = Documents(prepared, "validation", read_manifest(prepared))
    ours = all_texts(prepared, tokenizer, "validation")
    for i, text in enumerate(ours):
        number = texts.index(text)
        label = documents.label(i)
        if number >= 140:
            assert label == f"d{number - 140:02}.txt"
        elif number >= 110:
            assert label == f"c.jsonl.zst line {number - 109}"
        elif number >= 80:
            assert label == f"b.jsonl.gz line {number - 79}"
        else:
            assert label.startswith("a.jsonl line ")


@pytest.mark.parametrize("processes", [2, 3])
def test_the_shards_do_not_depend_on_the_number_of_processes(
    source, tokenizer, prepared, tmp_path, processes
):
    output = tmp_path / "out"
    prepare(list_files([str(source)], "--paths"), tokenizer, output, SETTINGS, processes=processes)
    assert_same_folder(output, prepared)


DRIVER = """
import sys
from pathlib import Path
from cplm_jax.data.files import list_files
from cplm_jax.data.preparation.prepare import prepare
from cplm_jax.data.tokenizer import Tokenizer
from tests.data.test_preparation import SETTINGS

if __name__ == "__main__":
    source, tokenizer, output, processes, deduplicate = sys.argv[1:]
    settings = SETTINGS._replace(deduplicate=deduplicate == "True")
    files = list_files([source], "--paths")
    prepare(files, Tokenizer.load(tokenizer), Path(output), settings, processes=int(processes))
"""


@pytest.mark.parametrize(("processes", "deduplicate"), [(1, False), (1, True), (2, False)])
def test_kills_change_nothing(source, tokenizer, tmp_path, processes, deduplicate):
    output, model, driver = tmp_path / "out", tmp_path / "t.model", tmp_path / "driver.py"
    model.write_bytes(tokenizer.proto)
    driver.write_text(DRIVER)
    files = list_files([str(source)], "--paths")
    reference = tmp_path / "reference"
    prepare(files, tokenizer, reference, SETTINGS._replace(deduplicate=deduplicate))
    command = [sys.executable, str(driver), str(source), str(model), str(output)]
    command += [str(processes), str(deduplicate)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    rng, seen = random.Random(processes), Counter()
    for _ in range(4):
        process = subprocess.Popen(command, env=env, start_new_session=True, stderr=subprocess.DEVNULL)
        # Killed once a few more files than before are there: a part, or half of one, further on.
        goal = seen["files"] + rng.randrange(2, 12)
        while process.poll() is None and len(list(output.glob("**/*"))) < goal:
            time.sleep(0.001)
        with contextlib.suppress(ProcessLookupError):  # it was faster
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        seen["files"] = len(list(output.glob("**/*")))
        if not (output / "manifest.json").exists():
            seen["kills"] += 1
            with pytest.raises(UserError, match=r"cplm prepare has not finished here|there is no manifest"):
                read_manifest(output)
    assert seen["kills"] >= 2
    done = subprocess.run(command, env=env, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert_same_folder(output, reference)


def test_what_is_finished_is_not_done_again(source, tokenizer, prepared, tmp_path, monkeypatch):
    output, files = tmp_path / "out", list_files([str(source)], "--paths")
    done = []
    work = module.prepare_unit

    def interrupted(unit, *rest):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(unit.number)
        work(unit, *rest)

    monkeypatch.setattr(module, "prepare_unit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(files, tokenizer, output, SETTINGS)
    first = list(done)
    done.clear()
    monkeypatch.setattr(module, "prepare_unit", lambda *all: (done.append(all[0].number), work(*all)))
    messages = []
    prepare(files, tokenizer, output, SETTINGS, report=messages.append)
    assert len(first) == 2
    assert not set(first) & set(done)
    assert "2 of them finished before" in messages[0]
    assert_same_folder(output, prepared)
    messages.clear()
    done.clear()
    prepare(files, tokenizer, output, SETTINGS, report=messages.append)
    assert not done
    assert messages == [f"{output} is finished already, from files of the same names and sizes"]
    assert_same_folder(output, prepared)


def test_duplicates_are_dropped_but_the_first(tokenizer, tmp_path):
    folder, texts = tmp_path / "in", make_texts(40)
    folder.mkdir()
    doubled = texts + texts[5:15] + [texts[0] + "!"] + texts[:3] * 2
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in doubled[:30]))
    (folder / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in doubled[30:]))
    settings = SETTINGS._replace(deduplicate=True, unit_bytes=3000)
    files = list_files([str(folder)], "--paths")
    manifest = prepare(files, tokenizer, tmp_path / "out", settings)
    kept = all_texts(tmp_path / "out", tokenizer, "train") + all_texts(
        tmp_path / "out", tokenizer, "validation"
    )
    assert Counter(kept) == Counter(dict.fromkeys(doubled, 1))
    assert manifest["skipped"]["duplicates"] == len(doubled) - len(set(doubled)) == 16


class FakeUnit:
    def __init__(self, folder, number, digests):
        self.digests_file, self.repeats_file = folder / f"{number}.npy", folder / f"{number}-repeats.npy"
        self.duplicates_file = folder / f"{number}-again.npy"
        write_digests(self, digests)


@pytest.mark.parametrize("at_a_time", [1, 7, 10**6])
def test_duplicates_in_bounded_memory(tmp_path, at_a_time):
    rng = np.random.default_rng(0)
    pool = rng.integers(0, 2**64, (30, 2), np.uint64)
    pool[:4, 0] = [0, 2**64 - 1, 2**63, 2**63 - 1]
    pool[10:14, 0] = pool[10, 0]  # equal in half of the digest
    parts = [pool[rng.integers(0, 30, n)] for n in (25, 0, 40, 1)]
    units = [FakeUnit(tmp_path, i, part.astype(">u8")) for i, part in enumerate(parts)]
    total = find_duplicates(units, at_a_time)
    seen, expected = set(), 0
    for unit, part in zip(units, parts, strict=True):
        again = []
        for i, digest in enumerate(map(tuple, part.tolist())):
            if digest in seen:
                again.append(i)
            seen.add(digest)
        assert np.load(unit.duplicates_file).tolist() == again
        expected += len(again)
    assert total == expected


def test_equal_texts_are_on_one_side(tokenizer, tmp_path):
    texts = make_texts(30)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts * 2))
    prepare(list_files([str(tmp_path / "a.jsonl")], "--paths"), tokenizer, tmp_path / "out", SETTINGS)
    sides = [set(all_texts(tmp_path / "out", tokenizer, side)) for side in ("train", "validation")]
    assert all(sides)
    assert not sides[0] & sides[1]


@pytest.mark.parametrize("extra", [-1, 0, 1, 2 * RECORD_TOKENS])
def test_any_part_of_a_long_document_is_read(tokenizer, tmp_path, extra):
    text = "".join(random.Random(0).choices("abcdefghij ", k=20_000)) * 3
    while len(ids := tokenizer.encode(text)) < RECORD_TOKENS + extra:
        text += text
    ids_of = {0: [5], 1: ids[: RECORD_TOKENS + extra], 2: [6, 7]}

    class Fixed:
        size, proto, sha256, file_name = tokenizer.size, tokenizer.proto, tokenizer.sha256, "tokenizer.model"

        def encode_array(self, text):
            return np.asarray(ids_of[int(text)], np.int32)

        byte_lengths = tokenizer.byte_lengths

    for name in ids_of:
        (tmp_path / f"{name}.txt").write_text(str(name))
    files = list_files([str(tmp_path / "*.txt")], "--paths")
    manifest = prepare(files, Fixed(), tmp_path / "out", SETTINGS._replace(validation_fraction=0))
    documents = Documents(tmp_path / "out", "train", manifest)
    n = len(ids_of[1])
    assert manifest["train"]["records"] == 2 + -(-n // RECORD_TOKENS)
    spans = [Span(1, a, b) for a, b in [(0, n), (0, 1), (n - 1, n), (5, 5)]]
    edge = min(RECORD_TOKENS, n - 2)
    spans += [Span(1, edge - 3, edge + 2), Span(2, 0, 2), Span(0, 0, 1), Span(2, 2, 2)]
    for (document, start, stop), found in zip(spans, documents.read(spans), strict=True):
        assert found.tolist() == ids_of[document][start:stop]


def test_records_of_every_length():
    lengths = np.asarray([0, 1, RECORD_TOKENS, RECORD_TOKENS + 1, 2**32 - 1], np.uint32)
    assert records_of(lengths).tolist() == [1, 1, 1, 2, 2**18]


# Bad data


@pytest.fixture
def bad_source(tmp_path, texts):
    lines = [json.dumps({"text": text}) for text in texts[:60]]
    lines[20] = '{"txt": "no such field"}'
    lines[40] = '["no object"]'
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "in" / "b.txt").write_text("")
    return list_files([str(tmp_path / "in")], "--paths")


@pytest.mark.parametrize("processes", [1, 2])
def test_a_bad_record_ends_it_unless_it_may_be_skipped(bad_source, tokenizer, tmp_path, texts, processes):
    settings = SETTINGS._replace(unit_bytes=2000)
    output = tmp_path / "out"
    for limit, fragment in (
        (0, "--max_bad N skips"),
        (1, "more than --max_bad 1"),
        (2, "more than --max_bad 2"),
    ):
        with pytest.raises(UserError) as caught:
            prepare(bad_source, tokenizer, output, settings, limit, processes)
        assert fragment in str(caught.value)
        assert str(tmp_path / "in") in str(caught.value)
        assert not (output / "manifest.json").exists()
        # Once more the same: what was finished before still counts.
        with pytest.raises(UserError) as again:
            prepare(bad_source, tokenizer, output, settings, limit, processes)
        assert str(tmp_path / "in") in str(again.value)
    manifest = prepare(bad_source, tokenizer, output, settings, 3, processes)
    assert manifest["skipped"]["bad_records"] == 3
    assert len(manifest["skipped"]["first_bad_records"]) == 3
    found = all_texts(output, tokenizer, "train") + all_texts(output, tokenizer, "validation")
    assert Counter(found) == Counter(t for i, t in enumerate(texts[:60]) if i not in (20, 40))


def command(*words):
    return cli.run(cli.prepare_command, [str(word) for word in words])


@pytest.fixture
def model(tokenizer, tmp_path):
    path = tmp_path / "t.model"
    path.write_bytes(tokenizer.proto)
    return path


def test_command(source, model, tmp_path, capsys, prepared, texts):
    output = tmp_path / "out"
    words = ["--paths", source, "--tokenizer", model, "--output", output, "--validation_fraction", "0.2"]
    assert command(*words, "--processes", "1") == 0
    captured = capsys.readouterr()
    assert captured.out == f"{output}\n"
    assert "of the targets occur earlier in their document" in captured.err
    assert all_texts(output, Tokenizer.load(model), "train") == all_texts(
        prepared, Tokenizer.load(model), "train"
    )
    # Another preparation does not go there.
    for other, fragment in (
        (["--deduplicate"], "prepared from other files or with other settings"),
        (["--validation_fraction", "0.3"], "prepared from other files or with other settings"),
        (["--paths", str(source / "a.jsonl")], "prepared from other files or with other settings"),
    ):
        assert command(*words, *other) == 2
        assert fragment in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (["--paths", "none"], ["--paths", "none", "matches no file"]),
        (["--tokenizer", "none.model"], ["--tokenizer none.model", "No such file"]),
        (["--tokenizer", "{source}/a.jsonl"], ["--tokenizer", "not a tokenizer.json"]),
        (["--validation_fraction", "1"], ["--validation_fraction", "below 1"]),
        (["--processes", "0"], ["--processes", "'0'", "from 1"]),
        (["--max_bad", "-1"], ["--max_bad", "whole number"]),
        (["--text_filed", "x"], ["--text_filed", "did you mean '--text_field'"]),
        (["--output", "{source}"], ["lies in --paths"]),
        (["--output", "{source}/a.jsonl/deeper"], ["lies in --paths"]),
        (["--output", "/dev/null/deeper"], ["Not a directory"]),
        (["--output", "{source}/inner"], ["lies in --paths"]),
        (["--text_field", "body"], ["a.jsonl:1", "no field 'body'", "--text_field"]),
        (["--max_document_bytes", "10"], ["a.jsonl:1", "more than 10 bytes", "--max_document_bytes"]),
        (["--validation_fraction", "0.99999999"], ["no training document"]),
    ],
)
def test_mistakes(source, model, tmp_path, capsys, words, fragments):
    defaults = {"--paths": str(source), "--tokenizer": str(model), "--output": str(tmp_path / "out")}
    option, value = (word.format(source=source) for word in words)
    if value.endswith("/inner"):
        defaults["--output"] = str(source / "inner")
        defaults["--paths"] = str(source)
        (source / "inner").mkdir()
        (source / "inner" / "x.txt").write_text("x")
    else:
        defaults[option] = value
    flags = [word for pair in defaults.items() for word in pair]
    try:
        assert command(*flags, "--processes", "1") == 2
    finally:
        for path in (source / "inner").glob("*"):
            path.unlink()
        if (source / "inner").exists():
            (source / "inner").rmdir()
    error = capsys.readouterr().err
    for fragment in fragments:
        assert fragment in error


def test_a_preparation_goes_on_only_as_it_began(tokenizer, tmp_path, texts):
    folder, output = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts) + "[]\n")
    files = list_files([str(folder)], "--paths")
    with pytest.raises(UserError, match="expected a JSON object"):
        prepare(files, tokenizer, output, SETTINGS)
    with pytest.raises(UserError, match=r"was begun there from something else: validation_fraction \(then"):
        prepare(files, tokenizer, output, SETTINGS._replace(validation_fraction=0.5))
    (folder / "a.jsonl").write_text(json.dumps({"text": "changed"}) + "\n")
    with pytest.raises(UserError, match=r"1 source files are new, .* a\.jsonl among them; remove"):
        prepare(list_files([str(folder)], "--paths"), tokenizer, output, SETTINGS)
    with pytest.raises(UserError, match="has not finished here; run the same command again"):
        read_manifest(output)


def test_two_cannot_prepare_at_once(source, tokenizer, tmp_path):
    files = list_files([str(source)], "--paths")
    with module._claimed(tmp_path / "out"), pytest.raises(UserError, match="another process is preparing"):
        prepare(files, tokenizer, tmp_path / "out", SETTINGS)


def test_a_full_disk_is_a_failure_of_the_machine(source, tokenizer, tmp_path, monkeypatch, prepared):
    files, output = list_files([str(source)], "--paths"), tmp_path / "out"

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("cplm_jax.data.preparation.units.write_file", full)
        with pytest.raises(MachineError, match="No space left on device; the same command goes on"):
            prepare(files, tokenizer, output, SETTINGS)
    prepare(files, tokenizer, output, SETTINGS)
    assert_same_folder(output, prepared)


def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_is_told(source, tokenizer, tmp_path, monkeypatch, prepared):
    files = list_files([str(source)], "--paths")
    with monkeypatch.context() as patch:
        patch.setattr(module, "prepare_unit", killed)
        with pytest.raises(MachineError, match="was killed, perhaps for want of memory"):
            prepare(files, tokenizer, tmp_path / "out", SETTINGS, processes=2)
    prepare(files, tokenizer, tmp_path / "out", SETTINGS)
    assert_same_folder(tmp_path / "out", prepared)


# Damage afterwards


@pytest.fixture
def damaged(source, tokenizer, tmp_path):
    prepare(list_files([str(source)], "--paths"), tokenizer, tmp_path / "out", SETTINGS)
    return tmp_path / "out"


def open_train(folder):
    return Documents(folder, "train", read_manifest(folder))


def test_missing_and_cut_files_are_found_before_training(damaged):
    manifest = read_manifest(damaged)
    for name in ("train.lengths.npy", manifest["train"]["shards"][1]["file"]):
        path = damaged / name
        content = path.read_bytes()
        path.write_bytes(content[:-1])
        with pytest.raises(UserError, match=rf"{name}: damaged .*the manifest says {len(content):,}"):
            open_train(damaged)
        path.unlink()
        with pytest.raises(UserError, match=rf"{name}: cannot read it: No such file"):
            open_train(damaged)
        path.write_bytes(content)
    open_train(damaged)


def test_a_wrong_length_is_found(damaged):
    path = damaged / "train.lengths.npy"
    lengths = np.load(path)
    lengths[5] -= 3
    np.save(path, lengths)
    with pytest.raises(UserError, match=r"train\.lengths\.npy: damaged"):
        open_train(damaged)


def test_a_damaged_shard_is_told_when_it_is_read(damaged):
    shard = damaged / read_manifest(damaged)["train"]["shards"][0]["file"]
    content = bytearray(shard.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 20] = bytes(b ^ 255 for b in content[middle : middle + 20])
    shard.write_bytes(content)
    documents = open_train(damaged)
    with pytest.raises(UserError, match=rf"{shard.name}: record \d+ is damaged"):
        documents.read([Span(i, 0, int(n)) for i, n in enumerate(documents.lengths)])


def test_a_shard_that_vanishes_while_it_is_used_is_named(damaged):
    documents = open_train(damaged)
    shard = damaged / read_manifest(damaged)["train"]["shards"][2]["file"]
    shard.unlink()
    with pytest.raises(UserError, match=rf"{shard.name}: the shard is gone"):
        documents.read([Span(i, 0, int(n)) for i, n in enumerate(documents.lengths)])


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        ("{", "manifest.json: damaged"),
        ("[]", "not a manifest"),
        ('{"format": "cplm_jax documents", "format_version": 99}', "format version 99"),
    ],
)
def test_a_manifest_of_something_else_is_refused(damaged, content, fragment):
    (damaged / "manifest.json").write_text(content)
    with pytest.raises(UserError, match=fragment):
        read_manifest(damaged)


def test_a_folder_of_something_else_is_refused(tmp_path):
    write_corpus(tmp_path / "corpus")
    with pytest.raises(UserError, match=r"there is no manifest\.json; give a folder that cplm prepare made"):
        read_manifest(tmp_path / "corpus")


@pytest.mark.parametrize(
    ("name", "content"),
    [("work/thesis.tex", "x"), ("manifest.json", '{"name": "app"}'), ("manifest.json", "{")],
)
def test_a_folder_of_the_users_is_left_alone(source, tokenizer, tmp_path, name, content):
    path = tmp_path / "mine" / name
    path.parent.mkdir(parents=True)
    path.write_text(content)
    (tmp_path / "mine" / "download.partial").write_text("y")
    with pytest.raises(UserError):
        prepare(list_files([str(source)], "--paths"), tokenizer, tmp_path / "mine", SETTINGS)
    assert path.read_text() == content
    assert (tmp_path / "mine" / "download.partial").read_text() == "y"


def test_workers_end_with_a_parent_that_is_killed(source, tokenizer, tmp_path):
    model, driver = tmp_path / "t.model", tmp_path / "driver.py"
    model.write_bytes(tokenizer.proto)
    driver.write_text(DRIVER)
    command = [sys.executable, str(driver), str(source), str(model), str(tmp_path / "out"), "2", "False"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=env, start_new_session=True, stderr=subprocess.DEVNULL)
    while process.poll() is None and not list((tmp_path / "out" / "work").glob("*.partial")):
        time.sleep(0.001)
    process.kill()
    process.wait()

    def left():
        return subprocess.run(["pgrep", "-g", str(process.pid)], capture_output=True, check=False).stdout

    deadline = time.monotonic() + 60
    while left() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left()


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_input_that_changes_meanwhile_is_told(tokenizer, tmp_path, texts, monkeypatch, prefix):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    work = module.prepare_unit

    def changing(unit, *rest):
        work(unit, *rest)
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in reversed(texts)))

    monkeypatch.setattr(module, "prepare_unit", changing)
    with pytest.raises(UserError, match=r"a\.jsonl: changed while it was prepared"):
        prepare(list_files([f"{prefix}{path}"], "--paths"), tokenizer, tmp_path / "out", SETTINGS)
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize("damage", ["shard", "empty shard", "names", "lengths"])
def test_shards_that_vanish_on_the_way_are_made_again(source, tokenizer, prepared, tmp_path, damage):
    output = tmp_path / "out"
    bad = tmp_path / "bad"
    shutil.copytree(source, bad)
    (bad / "e.jsonl").write_text("[]\n")
    files = list_files([str(bad)], "--paths")
    with pytest.raises(UserError, match="expected a JSON object"):
        prepare(files, tokenizer, output, SETTINGS)
    shard = min(output.glob("train-*.arrayrecord"))
    if damage == "empty shard":
        shard.write_bytes(b"")
    else:
        name = shard.name.removesuffix(".arrayrecord")
        lengths = output / "work" / f"{name}.npy"
        {"shard": shard, "names": output / names_file(shard.name), "lengths": lengths}[damage].unlink()
    prepare(files, tokenizer, output, SETTINGS, max_bad=1)
    for made in prepared.glob("*-0*"):
        assert made.read_bytes() == (output / made.name).read_bytes(), made.name


def test_the_manifest_is_not_written_without_all_shards(source, tokenizer, tmp_path, monkeypatch):
    def losing(plan, output, quiet):
        min(output.glob("train-*.arrayrecord")).unlink()

    monkeypatch.setattr(module, "check_unchanged", losing)
    files = list_files([str(source)], "--paths")
    with pytest.raises(MachineError, match="are gone or damaged; the same command makes them again"):
        prepare(files, tokenizer, tmp_path / "out", SETTINGS)
    assert not (tmp_path / "out" / "manifest.json").exists()
    monkeypatch.undo()
    prepare(files, tokenizer, tmp_path / "out", SETTINGS)


def test_two_readings_that_differ_are_told(source, tokenizer, tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text((source / "a.jsonl").read_text())
    files = list_files([str(tmp_path / "in")], "--paths")
    find = module.find_duplicates

    def meanwhile(units):
        total = find(units)
        (tmp_path / "in" / "a.jsonl").write_text("".join((source / "a.jsonl").open().readlines()[:-1]))
        return total

    monkeypatch.setattr(module, "find_duplicates", meanwhile)
    settings = SETTINGS._replace(deduplicate=True, unit_bytes=10**6)
    with pytest.raises(UserError, match="80 documents were read first, and then 79, so that the wrong ones"):
        prepare(files, tokenizer, tmp_path / "out", settings)


def test_more_units_than_open_files(tmp_path):
    units = [FakeUnit(tmp_path, i, np.asarray([[7, 7], [i, i]], ">u8")) for i in range(300)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
    try:
        assert find_duplicates(units) == 300  # 7 again in all but one, and twice in one
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_equal_documents_do_not_crowd_the_memory(tmp_path):
    units = [FakeUnit(tmp_path, i, np.ones((100_000, 2), ">u8")) for i in range(5)]
    tracemalloc.start()
    assert find_duplicates(units, at_a_time=1000) == 499_999
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 500_000 * 16


def test_a_full_disk_while_a_shard_is_written(source, model, tmp_path):
    big = tmp_path / "in.jsonl"
    big.write_text("".join(json.dumps({"text": " ".join(make_texts(100, i))}) + "\n" for i in range(60)))
    words = ["prepare", "--paths", str(big), "--tokenizer", str(model), "--output", str(tmp_path / "out")]
    limited = ["bash", "-c", 'ulimit -f 200; exec "$@"', "-"]
    for count in ("1", "2"):
        done = subprocess.run(
            [*limited, sys.executable, "-m", "cplm_jax", *words, "--processes", count],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1, done.stderr
        assert "Traceback" not in done.stderr
        assert "File too large" in done.stderr
        assert "the same command goes on from there" in done.stderr


def test_files_that_cannot_be_read_count_as_a_bad_record(source, tokenizer, tmp_path):
    folder = tmp_path / "in"
    shutil.copytree(source, folder)
    (folder / "cut.parquet").write_bytes(b"PAR1")
    (folder / "e.tar").write_bytes(b"")
    files = list_files([str(folder)], "--paths")
    with pytest.raises(UserError, match=r"cut\.parquet: not a Parquet file.*--max_bad N skips"):
        prepare(files, tokenizer, tmp_path / "out", SETTINGS)
    with pytest.raises(UserError, match=r"more than --max_bad 1 bad records"):
        prepare(files, tokenizer, tmp_path / "out", SETTINGS, max_bad=1)
    manifest = prepare(files, tokenizer, tmp_path / "out", SETTINGS, max_bad=2)
    assert manifest["skipped"]["bad_records"] == 2
    assert sum(manifest[side]["documents"] for side in ("train", "validation")) == 150


def test_a_lossy_tokenizer_is_told(tmp_path, texts):
    made = tokenizers.Tokenizer(
        models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "beta": 3, " ": 4}, "<unk>")
    )
    made.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    lossy = Tokenizer(made.to_str().encode())
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ["beta beta", *texts])
    )
    files = list_files([str(tmp_path / "a.jsonl")], "--paths")
    manifest = prepare(files, lossy, tmp_path / "out", SETTINGS._replace(validation_fraction=0))
    assert manifest["train"]["inexact"] == len(texts)
    assert f"not had back byte for byte: {len(texts)} documents" in summary(manifest, tmp_path / "out")


def test_a_finished_folder_is_left_as_it_was(damaged, source, tokenizer):
    before = sorted(damaged.rglob("*"))
    with pytest.raises(UserError, match="with other settings"):
        prepare(list_files([str(source)], "--paths"), tokenizer, damaged, SETTINGS._replace(shard_tokens=1))
    assert sorted(damaged.rglob("*")) == before


def test_large_inputs_have_larger_units_not_more(tokenizer):
    def plan(count, size):
        files = [SourceFile(f"/none/{i}.txt", f"{i}.txt", size) for i in range(count)]
        return make_plan(files, SETTINGS._replace(unit_bytes=None), tokenizer)

    assert len(plan(100, 10**6).units) == 2  # of 64 MiB
    large = plan(20_000, 10**8)
    assert 1000 <= len(large.units) <= 1100
    assert large.record["unit_bytes"] == 2 * 10**9


def test_files_of_a_bucket_are_looked_at_several_at_a_time(tokenizer, tmp_path, monkeypatch, capfd):
    # Nobody passes the barrier alone: one file after the other would break it.
    together = threading.Barrier(8)
    version = plan_module.version_of

    def slow(file):
        together.wait(timeout=60)
        return version(file)

    for i in range(64):
        (tmp_path / f"{i:02}.txt").write_text("x" * i)
    files = list_files([str(tmp_path)], "--paths")
    alone = make_plan(files, SETTINGS, tokenizer)
    monkeypatch.setattr(plan_module, "version_of", slow)
    monkeypatch.setattr(plan_module, "tqdm", Unlimited)
    monkeypatch.setattr(plan_module, "_FILES_SUBMITTED", 24)
    assert make_plan(files, SETTINGS, tokenizer, quiet=False) == alone
    assert "64/64" in capfd.readouterr().err.replace(" files", "")


def test_of_files_that_cannot_be_read_the_first_is_named(tokenizer, tmp_path):
    for i in range(100):
        (tmp_path / f"{i:02}.parquet").write_text("no table")
    files = list_files([str(tmp_path)], "--paths")
    with pytest.raises(UserError, match=r"00\.parquet: not a Parquet file"):
        make_plan(files, SETTINGS, tokenizer)


MANY = """
import resource, sys
from pathlib import Path
from cplm_jax.data.shards import Documents, Span, read_manifest

folder = Path(sys.argv[1])
several = [Documents(folder, "train", read_manifest(folder)) for _ in range(20)]
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
for documents in several:
    found = documents.read([Span(i, 0, int(n)) for i, n in enumerate(documents.lengths)])
    print(sum(map(len, found)))
"""


def test_more_shards_than_open_files(prepared):
    # The limit that most systems begin with is lower than the shards of a large corpus.
    done = subprocess.run(
        [sys.executable, "-c", MANY, str(prepared)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    train = read_manifest(prepared)["train"]
    assert 20 * len(train["shards"]) > 64
    assert done.stdout.split() == [str(train["tokens"])] * 20, done.stderr


def test_work_tells_its_documents_and_bytes(source, tokenizer, tmp_path):
    class Recorded:
        def __init__(self):
            self.totals = [0, 0]

        def add(self, documents, size):
            self.totals = [self.totals[0] + documents, self.totals[1] + size]

        def check(self):
            pass

    plan = make_plan(list_files([str(source)], "--paths"), SETTINGS._replace(unit_bytes=10**6), tokenizer)
    (tmp_path / "work").mkdir()
    unit = Unit(0, plan.units[0], SETTINGS, 0, tmp_path)
    for work, documents in ((digest_unit, 150), (prepare_unit, 150), (hash_unit, 0)):
        told = Recorded()
        work(unit, tokenizer, told)
        assert told.totals == [documents, plan.sizes[0]]


def test_one_process_shows_its_progress(source, tokenizer, tmp_path, capfd, monkeypatch):
    class Eager(processes._Counters):
        def add(self, documents, size):
            super().add(documents, size)
            self.flush()

    monkeypatch.setattr(processes, "_Counters", Eager)
    monkeypatch.setattr(processes, "tqdm", Unlimited)
    files = list_files([str(source)], "--paths")
    prepare(files, tokenizer, tmp_path / "out", SETTINGS._replace(unit_bytes=10**6))
    shown = [int(n) for n in re.findall(r"(\d+) documents, ", capfd.readouterr().err)]
    assert len({n for n in shown if 0 < n < 150}) > 10  # within the only unit
    assert shown[-1] == 150


class Unlimited(processes.tqdm):
    """A bar that is drawn at every update."""

    def __init__(self, **named):
        super().__init__(**named | {"mininterval": 0, "miniters": 1, "delay": 0})


def test_a_finished_folder_without_a_shard_is_not_called_finished(damaged, source, tokenizer):
    next(damaged.glob("train-*.arrayrecord")).unlink()
    with pytest.raises(UserError, match=r"arrayrecord: cannot read it: No such file"):
        prepare(list_files([str(source)], "--paths"), tokenizer, damaged, SETTINGS)
