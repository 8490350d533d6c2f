"""Every format gives the same documents, and every kind of damage is told by file and record."""

import gzip
import io
import json
import tracemalloc
import zlib
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from cplm_jax.data.compression import decompressed
from cplm_jax.data.files import list_files, open_file, version_of
from cplm_jax.data.formats import kind_of, pieces_of, read_piece
from cplm_jax.data.records import BadRecord, Document, Piece, Reading
from cplm_jax.errors import UserError

TEXTS = ["one\n", "zwei é 日本 🙂", "three \x00 \u2028 \ufeff", '{"text": "nested"}', "x" * 5000]
READING = Reading("text", 10_000)


def lines(texts=TEXTS, **more):
    return "".join(json.dumps({"text": text, **more}) + "\n" for text in texts).encode()


def frames(data, size):
    """zstd in several frames, as parallel compressors write it."""
    return b"".join(zstandard.compress(data[i : i + size]) for i in range(0, len(data), size))


def parquet(texts=TEXTS, **options):
    out = io.BytesIO()
    pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), out, row_group_size=2, **options)
    return out.getvalue()


def arrow(texts=TEXTS, kind=None, new=pa.ipc.new_stream):
    out = io.BytesIO()
    table = pa.table({"text": pa.array(texts, kind)})
    with new(out, table.schema) as stream:
        stream.write_table(table, max_chunksize=2)
    return out.getvalue()


def wide_window(data):
    """zstd that needs more memory than the default allows, as ``zstd --long=31`` writes it."""
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=31, write_content_size=0)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return stream.compress(data) + stream.flush()


FORMATS = {
    "a.jsonl": lines(),
    "a.ndjson": lines(),
    "a.jsonl.gz": gzip.compress(lines()),
    "members.jsonl.gz": gzip.compress(lines(TEXTS[:2])) + gzip.compress(lines(TEXTS[2:])),
    "a.jsonl.zst": zstandard.compress(lines()),
    "frames.jsonl.zst": frames(lines(), 1000),
    "windows.jsonl": b"\r\n\r\n".join(lines().splitlines()),
    "a.parquet": parquet(),
    "zstd.parquet": parquet(compression="zstd"),
    "a.arrow": arrow(),
    "large.arrow": arrow(kind=pa.large_string()),
    "view.arrow": arrow(kind=pa.string_view()),
    "a.arrow.gz": gzip.compress(arrow()),
    "file.arrow": arrow(new=pa.ipc.new_file),
    "dictionary.arrow": arrow(kind=pa.dictionary(pa.int32(), pa.string())),
    "dictionary.file.arrow": arrow(kind=pa.dictionary(pa.int32(), pa.string()), new=pa.ipc.new_file),
    "long.jsonl.zst": wide_window(lines()),
}


def read(path, size=10**9, reading=READING):
    """Returns the records of a file; what is wrong with the whole file is raised, as by the preparation."""
    (file,) = list_files([str(path)], "--paths")
    pieces = pieces_of(file, size, reading)
    if isinstance(pieces, BadRecord):
        raise UserError(pieces.message)
    return [record for piece, _ in pieces for record in read_piece(piece, reading)]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [1, 700, 10**9])
def test_every_format_gives_the_documents_however_it_is_cut(tmp_path, name, size):
    (tmp_path / name).write_bytes(FORMATS[name])
    found = read(tmp_path / name, size)
    assert [record.text for record in found] == TEXTS
    assert [record.data for record in found] == [text.encode() for text in TEXTS]
    assert len({record.record for record in found}) == len(TEXTS)


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=200), size=st.integers(1, 40))
def test_cutting_lines_never_changes_them(tmp_path_factory, data, size):
    path = tmp_path_factory.mktemp("cut") / "a.jsonl"
    data = data.replace(b"{", b"\n")
    path.write_bytes(data)
    whole, cut = read(path), read(path, size)
    assert len(whole) == len(cut) == sum(bool(line.strip()) for line in data.split(b"\n"))
    if whole and len(data) <= size:
        assert whole == cut


@pytest.mark.parametrize(
    ("name", "compress"),
    [("a.txt", bytes), ("a.txt.gz", gzip.compress), ("a.zst", zstandard.compress)],
    ids=["txt", "gz", "zst"],
)
def test_another_file_is_one_document(tmp_path, name, compress):
    (tmp_path / name).write_bytes(compress(TEXTS[1].encode()))
    assert [record.text for record in read(tmp_path / name)] == [TEXTS[1]]


BIG = lines(["y" * 400 + str(i) for i in range(500)])
LONG = json.dumps({"text": "z" * 20_000}).encode()
BAD = {
    "not_utf8.txt": (b"fine \xff", "byte 5 is not valid UTF-8"),
    "empty.txt": (b"", "is empty"),
    "empty.jsonl": (lines(["a", ""]), "empty.jsonl:2", "is empty"),
    "utf8.jsonl": (lines(["a"]) + b'{"text": "\xff"}\n', "utf8.jsonl:2", "UTF-8"),
    "list.jsonl": (lines(["a"]) + b"[1]\n", "list.jsonl:2", "JSON object", "list"),
    "syntax.jsonl": (lines(["a"]) + b'{"text": "b"\n', "syntax.jsonl:2", "not valid JSON"),
    "field.jsonl": (lines(["a"]) + b'{"txt": "b"}\n', "field.jsonl:2", "no field 'text'", "'txt'"),
    "type.jsonl": (lines(["a"]) + b'{"text": 5}\n', "type.jsonl:2", "is int, not text"),
    "surrogate.jsonl": (b'{"text": "\\ud800"}\n', "surrogate.jsonl:1", "surrogate"),
    "long.jsonl": (lines(["a"]) + LONG + b"\n", "long.jsonl:2", "more than 10,000 bytes"),
    "endless.jsonl": (lines(["a"]) + b"x" * 10**6, "endless.jsonl:2", "more than 10,000 bytes"),
    "long.txt": (b"z" * 10_001, "long.txt", "more than 10,000 bytes"),
    "long.parquet": (parquet(["a", "z" * 10_001]), "row 2", "more than 10,000 bytes"),
    "long.jsonl.gz": (gzip.compress(LONG), "long.jsonl.gz:1", "more than 10,000 bytes"),
    "cut.jsonl.gz": (gzip.compress(BIG)[:-20], "cut.jsonl.gz", "cut short after line"),
    "cut.jsonl.zst": (zstandard.compress(BIG)[:-20], "cut.jsonl.zst", "cut short after line"),
    "cut.txt.zst": (zstandard.compress(b"abc" * 1000)[:-2], "cut.txt.zst", "cut short"),
    "flipped.jsonl.gz": (
        gzip.compress(BIG)[:600] + b"\0" * 50 + gzip.compress(BIG)[650:],
        "flipped.jsonl.gz",
        "damaged",
    ),
    "not.jsonl.gz": (lines(), "not.jsonl.gz", "damaged"),
    "not.jsonl.zst": (lines(), "not.jsonl.zst", "damaged"),
    "nothing.jsonl.zst": (b"", "nothing.jsonl.zst", "cut short"),
    "nothing.jsonl.gz": (b"", "nothing.jsonl.gz", "cut short"),
    "null.parquet": (parquet(["a", None]), "row 2", "is null"),
    "empty.parquet": (parquet(["a", ""]), "row 2", "is empty"),
    "cut.arrow": (arrow(["w" * 900] * 50)[:-2000], "cut.arrow", "after row"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_data_is_told_by_file_and_record(tmp_path, name):
    data, *fragments = BAD[name]
    (tmp_path / name).write_bytes(data)
    found = read(tmp_path / name)
    bad = [record for record in found if isinstance(record, BadRecord)]
    if name == "flipped.jsonl.gz":  # only its end tells that what came before was wrong
        bad = bad[-1:]
    assert len(bad) == 1, found
    for fragment in (str(tmp_path / name), *fragments):
        assert fragment in bad[0].message


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_all_before_the_damage_is_read(tmp_path, compress):
    whole = b"".join(lines([f"{i} " + "y" * (i % 300)]) for i in range(3000))
    data, path = compress(whole), tmp_path / f"a.jsonl.{'gz' if compress is gzip.compress else 'zst'}"
    for cut in (len(data) - 1, len(data) // 2):
        path.write_bytes(data[:cut])
        *good, bad = read(path)
        new = (
            zlib.decompressobj(wbits=31)
            if path.suffix == ".gz"
            else zstandard.ZstdDecompressor().decompressobj()
        )
        there = new.decompress(data[:cut])
        assert len(good) == there.count(b"\n")
        assert f"is cut short after line {len(good)};" in bad.message


@pytest.mark.parametrize("new", [pa.ipc.new_stream, pa.ipc.new_file])
def test_a_table_that_ends_early_does_not_pass_for_complete(tmp_path, new):
    data, counts = arrow(new=new), set()
    end = data.rindex(b"\xff\xff\xff\xff\x00\x00\x00\x00")
    for cut in range(1, end + 8):
        (tmp_path / "a.arrow").write_bytes(data[:cut])
        *good, bad = read(tmp_path / "a.arrow")
        assert [record.text for record in good] == TEXTS[: len(good)]
        assert isinstance(bad, BadRecord), cut
        counts.add(len(good))
    assert counts == {0, 2, 4, 5}


def test_records_after_a_bad_one_are_read(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(["a"]) + LONG + b"\n" + lines(["b"]) + b"{\n" + lines(["c"]))
    found = read(tmp_path / "a.jsonl")
    assert [r.text for r in found if isinstance(r, Document)] == ["a", "b", "c"]
    assert sum(isinstance(r, BadRecord) for r in found) == 2


@pytest.mark.parametrize(
    ("name", "data", "fragments"),
    [
        ("not.parquet", b"PAR1 nothing", ["not a Parquet file"]),
        ("column.parquet", parquet(), ["no column 'body'", "'id', 'text'"]),
        ("a.jsonl.xz", b"", [".xz files are not read; unpack it"]),
        ("a.tar", b"", [".tar files are not read; unpack it"]),
    ],
)
def test_a_table_without_the_column_is_refused(tmp_path, name, data, fragments):
    (tmp_path / name).write_bytes(data)
    reading = READING._replace(text_field="body")
    with pytest.raises(UserError) as caught:
        read(tmp_path / name, reading=reading)
    # Where such files may be skipped, they are a bad record each.
    (file,) = list_files([str(tmp_path / name)], "--paths")
    (bad,) = read_piece(Piece(file, 0, None), reading)
    for message in (str(caught.value), bad.message):
        for fragment in (str(tmp_path / name), *fragments):
            assert fragment in message


def test_columns_of_an_arrow_table(tmp_path):
    (tmp_path / "a.arrow").write_bytes(arrow())
    (bad,) = read(tmp_path / "a.arrow", reading=READING._replace(text_field="body"))
    assert "no column 'body'" in bad.message
    out = io.BytesIO()
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    with pa.ipc.new_stream(out, table.schema) as stream:
        stream.write_table(table)
    (tmp_path / "a.arrow").write_bytes(out.getvalue())
    (bad,) = read(tmp_path / "a.arrow")
    assert "has 2 columns 'text'; rename them" in bad.message


def test_a_byte_order_mark_is_no_text(tmp_path):
    mark = "\ufeff".encode()
    for name in ("a.txt", "a.jsonl"):
        (tmp_path / name).write_bytes(mark + (lines(["\ufeffa", "b"]) if name == "a.jsonl" else b"a"))
    assert [r.text for r in read(tmp_path / "a.jsonl")] == ["\ufeffa", "b"]
    assert [r.text for r in read(tmp_path / "a.txt")] == ["a"]


def test_a_column_of_numbers_is_refused(tmp_path):
    (tmp_path / "a.parquet").write_bytes(parquet())
    with pytest.raises(UserError, match=r"column 'id' .* holds int64, not text"):
        read(tmp_path / "a.parquet", reading=READING._replace(text_field="id"))


def test_damaged_parquet_is_refused(tmp_path):
    named = io.BytesIO()
    pq.write_table(pa.table({"text": ["a"], "identity": [1]}), named)
    for data in (parquet()[:-9] + b"\0" * 9, named.getvalue().replace(b"identity", b"\xffdentity")):
        (tmp_path / "a.parquet").write_bytes(data)
        with pytest.raises(UserError, match=r"a\.parquet: not a Parquet file, or a damaged one .*; fetch it"):
            read(tmp_path / "a.parquet")
        (file,) = list_files([str(tmp_path)], "--paths")
        (bad,) = read_piece(Piece(file, 0, None), READING)
        assert "a.parquet: not a Parquet file, or a damaged one" in bad.message


def test_want_of_memory_is_no_bad_file(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(parquet())

    def refuse(*_args, **_named):
        raise pa.ArrowMemoryError("malloc of size 1 failed")

    monkeypatch.setattr(pq, "ParquetFile", refuse)
    (file,) = list_files([str(tmp_path)], "--paths")
    for attempt in (
        lambda: pieces_of(file, 100, READING),
        lambda: list(read_piece(Piece(file, 0, None), READING)),
    ):
        with pytest.raises(MemoryError):
            attempt()


def test_compressed_parquet_is_refused(tmp_path):
    (tmp_path / "a.parquet.gz").write_bytes(gzip.compress(parquet()))
    with pytest.raises(UserError, match=r"a\.parquet\.gz: Parquet is read from its end.*; decompress"):
        read(tmp_path / "a.parquet.gz")


def test_little_is_decompressed_at_a_time(tmp_path):
    size = 2**28
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(b"x" * size))
    (file,) = list_files([str(tmp_path)], "--paths")
    tracemalloc.start()
    with open_file(file) as raw:
        stream = decompressed(raw, "zstd")
        assert sum(len(part) for part in iter(lambda: stream.read(2**16), b"")) == size
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**27


def test_row_groups_are_not_held(tmp_path):
    texts = [f"{i} " + "x" * 1000 for i in range(20_000)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=len(texts))
    before, peak, found = pa.total_allocated_bytes(), 0, 0
    (file,) = list_files([str(tmp_path)], "--paths")
    for record in read_piece(Piece(file, 0, None), READING):
        found += isinstance(record, Document)
        peak = max(peak, pa.total_allocated_bytes() - before)
    assert found == len(texts)
    assert peak < 2**23


@pytest.mark.parametrize("name", FORMATS)
def test_progress_adds_up_to_the_size(tmp_path, name):
    (tmp_path / name).write_bytes(FORMATS[name])
    (file,) = list_files([str(tmp_path / name)], "--paths")
    read_bytes = []
    pieces = pieces_of(file, 10**9, READING)
    for piece, _ in pieces:
        assert list(read_piece(piece, READING, read_bytes.append))
    assert sum(read_bytes) == pytest.approx(sum(size for _, size in pieces), abs=10)


def test_empty_documents_can_be_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(["", "a", ""]))
    assert [r.text for r in read(tmp_path / "a.jsonl", reading=READING._replace(skip_empty=True))] == ["a"]


def test_kinds():
    assert kind_of("A.JSONL.GZ") == ("jsonl", "gzip")
    assert kind_of("a.jsonl.zstd") == ("jsonl", "zstd")
    assert kind_of("folder/a.parquet") == ("parquet", None)
    assert kind_of("readme") == ("text", None)


def save_dataset(folder: Path, files=("data-00000-of-00002.arrow", "data-00001-of-00002.arrow")):
    """Writes what ``datasets.Dataset.save_to_disk`` does."""
    folder.mkdir(parents=True)
    for i, name in enumerate(files):
        (folder / name).write_bytes(arrow([f"text {i}"]))
    state = {"_data_files": [{"filename": name} for name in files], "_fingerprint": "0", "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


def test_a_saved_dataset_stands_for_its_arrow_files(tmp_path):
    save_dataset(tmp_path / "all" / "train")
    found = list_files([str(tmp_path / "all")], "--paths")
    assert [file.name for file in found] == [
        "train/data-00000-of-00002.arrow",
        "train/data-00001-of-00002.arrow",
    ]
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(UserError, match=r"holds the splits of a dataset; name the one to read"):
        list_files([str(tmp_path / "all")], "--paths")
    (tmp_path / "all" / "train" / "state.json").write_text("{}")
    with pytest.raises(UserError, match=r"state\.json is not what datasets"):
        list_files([str(tmp_path / "all" / "train")], "--paths")


def test_urls_are_read_as_local_files_are(tmp_path, monkeypatch):
    files = {"a.jsonl": lines(["a"]), "sub/b.jsonl.gz": gzip.compress(lines(["b"])), ".hidden": b"h"}
    memory = fsspec.filesystem("memory")
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
        memory.pipe(f"/bucket/{name}", data)
    local = list_files([str(tmp_path)], "--paths")
    for url in ("memory://bucket", f"file://{tmp_path}"):
        found = list_files([url], "--paths")
        assert [(f.name, f.size) for f in found] == [(f.name, f.size) for f in local]
        for file, mine in zip(found, local, strict=True):
            with open_file(file) as remote, open_file(mine) as here:
                assert remote.read() == here.read()
    assert [f.name for f in list_files(["memory://bucket/**/*.gz"], "--paths")] == ["sub/b.jsonl.gz"]
    assert [f.name for f in list_files(["memory://bucket/a.jsonl"], "--paths")] == ["a.jsonl"]
    assert [r.text for r in read("memory://bucket/sub/b.jsonl.gz")] == ["b"]
    find = type(memory).find
    monkeypatch.setattr(
        type(memory),
        "find",  # as of a web server, whose lists have no sizes
        lambda *a, **k: {p: {**info, "size": None} for p, info in find(*a, **k).items()},
    )
    found = list_files(["memory://bucket"], "--paths")
    assert [(f.name, f.size) for f in found] == [(f.name, f.size) for f in local]
    with pytest.raises(UserError, match="matches no file"):
        list_files(["memory://bucket/none"], "--paths")
    with pytest.raises(UserError, match=r"'nonsense://x' cannot be read here"):
        list_files(["nonsense://x"], "--paths")


class TokenExpiredError(Exception):
    """An error that only its file system knows."""


def test_errors_of_a_file_system_are_told(monkeypatch):
    memory = fsspec.filesystem("memory")
    memory.pipe("/errors/a.jsonl", lines(["a"]))
    (file,) = list_files(["memory://errors"], "--paths")

    def refuse(*_args, **_named):
        raise TokenExpiredError("log in again")

    for method in ("open", "_open"):
        monkeypatch.setattr(type(memory), method, refuse)
    with pytest.raises(UserError, match=r"a\.jsonl: cannot read it: log in again"):
        list(read_piece(Piece(file, 0, None), READING))
    for method in ("isdir", "info", "find"):
        monkeypatch.setattr(type(memory), method, refuse)
    with pytest.raises(UserError, match=r"cannot list memory://errors: log in again; check the address"):
        list_files(["memory://errors"], "--paths")
    assert version_of(file) is None


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "a.arrow", "a.txt"])
def test_a_connection_that_fails_is_no_bad_record(monkeypatch, name):
    memory = fsspec.filesystem("memory")
    memory.pipe(f"/fails/{name}", FORMATS.get(name, b"text"))
    (file,) = list_files([f"memory://fails/{name}"], "--paths")
    assert all(isinstance(record, Document) for record in read_piece(Piece(file, 0, None), READING))

    def lose(*_args):
        raise TimeoutError("connection timed out")

    for method in ("read", "seek") if name == "a.parquet" else ("read",):  # the one read from its end
        monkeypatch.setattr(type(memory.open(file.path)), method, lose)
    with pytest.raises(UserError, match=f"{name}: cannot read it: connection timed out"):
        list(read_piece(Piece(file, 0, None), READING))
    if name == "a.parquet":  # the one that is opened to be cut
        with pytest.raises(UserError, match=f"{name}: cannot read it: connection timed out"):
            pieces_of(file, 100, READING)


def test_a_saved_dataset_behind_a_url(tmp_path):
    save_dataset(tmp_path / "all" / "train")
    local = list_files([str(tmp_path / "all")], "--paths")
    for url in (f"file://{tmp_path}/all", f"file://{tmp_path}/all/**"):
        assert [f.name for f in list_files([url], "--paths")] == [f.name for f in local]
    (tmp_path / "all" / "dataset_dict.json").write_text("{}")
    with pytest.raises(UserError, match="holds the splits of a dataset"):
        list_files([f"file://{tmp_path}/all"], "--paths")


def test_files_of_one_name_are_told_apart(tmp_path):
    for folder in "ab":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text(folder)
    (tmp_path / "b" / "y.txt").write_text("y")
    paths = [str(tmp_path / folder) for folder in "ab"]
    assert [f.name for f in list_files(paths, "--paths")] == ["0/x.txt", "1/x.txt", "1/y.txt"]
    assert [f.name for f in list_files(paths[1:], "--paths")] == ["x.txt", "y.txt"]


def test_links_are_followed_and_those_to_nothing_told(tmp_path):
    (tmp_path / "disk2").mkdir()
    (tmp_path / "disk2" / "b.txt").write_text("b")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("a")
    (tmp_path / "in" / "more").symlink_to(tmp_path / "disk2")
    (tmp_path / "disk2" / "back").symlink_to(tmp_path / "in")
    assert [f.name for f in list_files([str(tmp_path / "in")], "--paths")] == ["a.txt", "more/b.txt"]
    (tmp_path / "in" / "c.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"c\.txt is a link to nothing"):
        list_files([str(tmp_path / "in")], "--paths")
