"""Sources, the held-out split, tokenizers and the cache."""

import contextlib
import json

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cplm_jax.config import DataConfig
from cplm_jax.data.corpus import load_corpus
from cplm_jax.data.files import PYTHON_STDLIB, list_files
from cplm_jax.data.formats import read_piece
from cplm_jax.data.preparation.units import is_held_out, text_digest
from cplm_jax.data.records import Document, Piece, Reading
from cplm_jax.data.shards import Span
from cplm_jax.data.tokenizer import Tokenizer, train_tokenizer
from cplm_jax.errors import UserError
from tests.tiny import write_corpus


@pytest.fixture(scope="module")
def corpus_folder(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture(scope="module")
def tokenizer(corpus_folder):
    return train_tokenizer((p.read_text() for p in sorted(corpus_folder.iterdir())), 320, 10**6)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_tokenizer_reproduces_any_text(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert tokenizer.byte_lengths(400)[ids].sum() == len(text.encode())
    assert not set(ids) & set(tokenizer.control_ids)


@pytest.mark.parametrize(
    "text", ["a\u2581b", "\u2581\u2581", "  x \t\r\n\n  y", "\0", "\u2028\ufeff", "日本語 🙂", " "]
)
def test_tokenizer_reproduces_awkward_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_training_a_tokenizer_twice_gives_the_same(corpus_folder, tokenizer):
    again = train_tokenizer((p.read_text() for p in sorted(corpus_folder.iterdir())), 320, 10**6)
    assert again.sha256 == tokenizer.sha256


def test_partial_characters_decode_to_the_replacement_character(tokenizer):
    ids = tokenizer.encode("é")
    assert tokenizer.decode(ids[:-1]) == "\ufffd" or len(ids) == 1


def settings_for(folder, tmp_path, **more):
    return DataConfig(
        paths=str(folder), tokenizer_vocabulary_size=320, cache_dir=str(tmp_path / "cache"), **more
    )


def labels(documents):
    return [documents.label(i) for i in range(len(documents))]


def training(corpus):
    (source,) = corpus.sources
    return source.documents


def test_split_is_by_text_alone(corpus_folder, tmp_path):
    corpus = load_corpus(settings_for(corpus_folder, tmp_path, validation_fraction=0.3))
    paths = sorted(corpus_folder.iterdir())
    held_out = [p.name for p in paths if is_held_out(text_digest(p.read_bytes()), 0.3)]
    assert labels(corpus.validation) == held_out
    assert labels(training(corpus)) == [p.name for p in paths if p.name not in held_out]
    assert held_out


def test_stored_tokens_are_the_documents(corpus_folder, tmp_path):
    corpus = load_corpus(settings_for(corpus_folder, tmp_path))
    for documents in (training(corpus), corpus.validation):
        names = labels(documents)
        found = documents.read([Span(i, 0, int(n)) for i, n in enumerate(documents.lengths)])
        for name, tokens in zip(names, found, strict=True):
            assert corpus.tokenizer.decode(tokens.tolist()) == (corpus_folder / name).read_text()
        assert documents.bytes == sum((corpus_folder / name).stat().st_size for name in names)
        assert documents.tokens == documents.lengths.sum()


def test_jsonl_and_text_files_give_the_same_corpus(corpus_folder, tmp_path):
    lines = tmp_path / "all.jsonl"
    records = [{"path": p.name, "body": p.read_text()} for p in sorted(corpus_folder.iterdir())]
    lines.write_text("\n\n".join(map(json.dumps, records)) + "\n")
    config = settings_for(lines, tmp_path, text_field="body")
    assert load_corpus(config).fingerprint == load_corpus(settings_for(corpus_folder, tmp_path)).fingerprint


def test_cache_is_found_again_and_by_content(corpus_folder, tmp_path):
    config = settings_for(corpus_folder, tmp_path)
    messages = []
    first = load_corpus(config, messages.append)
    assert messages
    messages.clear()
    second = load_corpus(config, messages.append)
    assert not messages
    spans = [Span(0, 0, int(training(first).lengths[0]))]
    np.testing.assert_array_equal(training(first).read(spans), training(second).read(spans))
    assert first.fingerprint == second.fingerprint
    copy = write_corpus(tmp_path / "copy")
    assert load_corpus(settings_for(copy, tmp_path), messages.append).fingerprint == first.fingerprint
    assert not messages
    (copy / "000.txt").write_text("something else")
    assert load_corpus(settings_for(copy, tmp_path), messages.append).fingerprint != first.fingerprint
    assert messages
    for folder in (tmp_path / "cache" / "tokens").iterdir():
        assert {
            p.name for p in folder.iterdir() if "arrayrecord" not in p.name and "names" not in p.name
        } == {
            "checksums.json",
            "manifest.json",
            "tokenizer.model",
            "train.lengths.npy",
            "validation.lengths.npy",
        }


def test_tokenizer_given_as_a_file_is_used(corpus_folder, tmp_path, tokenizer):
    (tmp_path / "t.model").write_bytes(tokenizer.proto)
    corpus = load_corpus(settings_for(corpus_folder, tmp_path, tokenizer=str(tmp_path / "t.model")))
    assert corpus.tokenizer.sha256 == Tokenizer.load(tmp_path / "t.model").sha256


def test_folders_globs_and_files_name_documents_alike_wherever_they_lie(tmp_path):
    for place in ("one", "two"):
        (tmp_path / place / "sub").mkdir(parents=True)
        (tmp_path / place / "a.txt").write_text("a")
        (tmp_path / place / "sub" / "b.txt").write_text("b")
        (tmp_path / place / ".hidden").write_text("h")
    found = [[f.name for f in list_files([str(tmp_path / p)], "data.paths")] for p in ("one", "two")]
    assert found == [["a.txt", "sub/b.txt"]] * 2
    assert [f.name for f in list_files([str(tmp_path / "one/**/*.txt")], "data.paths")] == [
        "a.txt",
        "sub/b.txt",
    ]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*", ["a.txt", "sub/b.txt", "sub/deep/c.txt"]),
        ("s*", ["sub/b.txt", "sub/deep/c.txt"]),
        ("*/d*", ["sub/deep/c.txt"]),
        ("*.txt", ["a.txt"]),
        ("**", ["a.txt", "sub/b.txt", "sub/deep/c.txt"]),
        ("**/d*", []),
    ],
)
def test_a_folder_that_a_glob_matches_stands_for_its_files(tmp_path, pattern, names):
    bucket = fsspec.filesystem("memory")
    for name in ("a.txt", "sub/b.txt", "sub/deep/c.txt", "sub/.hidden", ".hidden/d.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
        bucket.pipe(f"/matched/{name}", b"x")
    for place in (str(tmp_path), f"file://{tmp_path}", "memory://matched"):
        with contextlib.nullcontext() if names else pytest.raises(UserError, match="matches no file"):
            found = [f.name for f in list_files([f"{place}/{pattern}"], "data.paths")]
            assert found == names, place
    bucket.rm("/matched", recursive=True)


def test_names_behind_urls_whose_paths_keep_the_host():
    class Web(fsspec.AbstractFileSystem):
        protocol = "web"

        @classmethod
        def _strip_protocol(cls, path):
            return path

        def unstrip_protocol(self, path):
            return path

        def glob(self, path, **named):
            return {"web://host/in/a.txt": {"type": "file", "size": 1}}

    fsspec.register_implementation("web", Web, clobber=True)
    assert [f.name for f in list_files(["web://host/in/*.txt"], "data.paths")] == ["a.txt"]


def test_a_glob_tells_of_a_link_to_nothing(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").symlink_to(tmp_path / "lost")
    with pytest.raises(UserError, match=r"data\.paths: .*b\.txt is a link to nothing"):
        list_files([f"{tmp_path}/*.txt"], "data.paths")


def test_standard_library_is_a_corpus_without_tests():
    files = list_files([PYTHON_STDLIB], "data.paths")
    names = [f.name for f in files]
    assert "argparse.py" in names
    assert "asyncio/events.py" in names
    assert not {"test", "tests", "idle_test", "site-packages"} & {
        part for n in names for part in n.split("/")
    }
    found = [
        record for file in files[:50] for record in read_piece(Piece(file, 0, None), Reading("text", 10**6))
    ]
    assert sum(isinstance(record, Document) for record in found) > 30


def test_held_out_text_does_not_train_under_another_name(corpus_folder, tmp_path):
    (tmp_path / "held_out").mkdir()
    (tmp_path / "held_out" / "x.txt").write_text((corpus_folder / "003.txt").read_text())
    config = settings_for(corpus_folder, tmp_path, validation_paths=[str(tmp_path / "held_out")])
    with pytest.raises(UserError, match=r"003\.txt has the text of a document of data\.validation_paths"):
        load_corpus(config)
