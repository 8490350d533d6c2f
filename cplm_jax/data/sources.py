"""Documents from text files and JSONL files."""

import fnmatch
import glob
import hashlib
import itertools
import json
import os
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from cplm_jax.config import DataConfig
from cplm_jax.errors import UserError


class Document(NamedTuple):
    """A document of the corpus."""

    id: str
    """Identifies the document within its corpus, on any machine."""
    text: str
    where: str
    """File, and line of a JSONL file, for messages."""


class SourceFile(NamedTuple):
    """A file and the name it has in document identifiers."""

    path: Path
    name: str


PYTHON_STDLIB = "python:stdlib"
_NOT_STDLIB = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def stdlib_files() -> list[SourceFile]:
    """Lists the source of the running Python's standard library, without its tests.

    Raises:
      UserError: if this Python comes without its source.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        SourceFile(path, path.relative_to(root).as_posix())
        for path in sorted(root.rglob("*.py"))
        if not _NOT_STDLIB.intersection(path.relative_to(root).parts)
    ]
    if len(files) < 100:
        raise UserError(
            f"data.paths: {PYTHON_STDLIB!r} needs the source of Python's standard library, and {root} has "
            f"{len(files)} files of it; use another Python, or text of your own"
        )
    return files


def list_files(paths: Sequence[str], field: str) -> list[SourceFile]:
    """Expands files, folders and globs to a sorted list of files.

    A file found in a folder or by a glob is named by its path from the folder, or from the
    glob's part without wildcards; a file given by itself, by its file name. Hidden files and
    folders are left out of folders. ``python:stdlib`` stands for :func:`stdlib_files`.

    Raises:
      UserError: if ``paths`` is empty or one of them matches nothing; ``field`` is named.
    """
    if not paths:
        raise UserError(
            f"{field} is empty: give text or .jsonl files, folders or globs, as in --{field} 'corpus/*.txt'"
        )
    found: dict[Path, SourceFile] = {}  # by what the path leads to: two spellings are one document
    for pattern in paths:
        if pattern == PYTHON_STDLIB:
            found.update({file.path.resolve(): file for file in stdlib_files()})
            continue
        root = Path(pattern).expanduser()
        matches: list[tuple[Path, str]]
        if os.path.isdir(root):
            matches = [(p, p.relative_to(root).as_posix()) for p in _files_below(root, field)]
        elif os.path.isfile(root):
            matches = [(root, root.name)]
        else:
            base = _literal_part(root)
            matches = [
                (Path(m), os.path.relpath(m, base).replace(os.sep, "/"))
                for m in glob.glob(str(root), recursive=True)
                if os.path.isfile(m)
            ]
        if not matches:
            raise UserError(f"{field}: {pattern!r} matches no file (from {os.getcwd()}); correct the path")
        for path, name in matches:
            found.setdefault(path.resolve(), SourceFile(path, name))
    return sorted(found.values(), key=lambda file: (file.name, str(file.path)))


def _literal_part(pattern: Path) -> Path:
    """Returns the folders of a glob before its first wildcard."""
    return Path(*itertools.takewhile(lambda part: not glob.has_magic(part), pattern.parts))


# What a run or the cache writes; a glob that matches one of these would read it as a document.
_WRITTEN = ("metrics.jsonl", "config.yaml", "run.json", "tokenizer.model", "tokens.bin", "meta.json")


def check_apart(paths: Sequence[str], field: str, written: Mapping[str, str]) -> None:
    """Checks that nothing a run writes can become a document of its corpus.

    Args:
      paths: files, folders and globs of documents.
      field: where ``paths`` was set, for messages.
      written: folder that is written to, by the field that names it.

    Raises:
      UserError: if a written folder lies in a folder of ``paths``, or where a glob would find it.
    """
    for pattern in paths:
        root = Path(pattern).expanduser()
        recursive = "**" in root.parts and any(fnmatch.fnmatch(name, root.name) for name in _WRITTEN)
        if not (root.is_dir() or recursive):
            continue
        for name, folder in written.items():
            if Path(folder).expanduser().resolve().is_relative_to(_literal_part(root).resolve()):
                raise UserError(
                    f"{name} = {folder} lies in {field} = {pattern}, so that what the run writes would be "
                    f"read as documents; choose another {name}, or a glob such as '*.txt'"
                )


def _files_below(root: Path, field: str) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise UserError(f"{field}: cannot read {error.filename}: {error.strerror}") from error

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = (Path(folder, name) for name in names if not name.startswith("."))
        yield from (path for path in paths if os.path.isfile(path))


def read_documents(files: Sequence[SourceFile], config: DataConfig) -> Iterator[Document]:
    """Yields the documents of ``files`` in order; empty ones are left out.

    Raises:
      UserError: naming file and line of text that is not UTF-8, a line that is not a JSON object,
        or a field that is missing or not text.
    """
    for file in files:
        if file.path.suffix == ".jsonl":
            documents = _read_jsonl(file, config)
        else:
            documents = iter([Document(file.name, _decode(_read(file.path), str(file.path)), str(file.path))])
        for document in documents:
            if document.text:
                yield document


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as e:
        raise UserError(f"{path}: cannot read it: {e.strerror or e}") from e


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise UserError(
            f"{where}: byte {e.start} is not valid UTF-8 ({e.reason}); convert the file to UTF-8 or leave "
            "it out"
        ) from e


def _read_jsonl(file: SourceFile, config: DataConfig) -> Iterator[Document]:
    try:
        with open(file.path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _parse_record(line, f"{file.path}:{number}", f"{file.name}:{number}", config)
    except OSError as e:
        raise UserError(f"{file.path}: cannot read it: {e.strerror or e}") from e


def _parse_record(line: bytes, where: str, default_id: str, config: DataConfig) -> Document:
    try:
        record = json.loads(_decode(line, where))
    except (ValueError, RecursionError) as e:  # a syntax error, or a number or nesting beyond Python's limits
        raise UserError(f"{where}: not valid JSON: {e}; a .jsonl file holds one JSON object a line") from e
    if not isinstance(record, dict):
        raise UserError(
            f"{where}: expected a JSON object with a field {config.text_field!r}, got {type(record).__name__}"
        )

    def text_of(field: str, setting: str) -> str:
        if field not in record:
            raise UserError(
                f"{where}: no field {field!r} ({setting}); the record has "
                f"{', '.join(map(repr, record)) or 'none'}; name one of them or mend the record"
            )
        if not isinstance(record[field], str):
            raise UserError(
                f"{where}: field {field!r} ({setting}) is {type(record[field]).__name__}, not text; mend "
                "the record, or name another field"
            )
        return record[field]

    text = text_of(config.text_field, "data.text_field")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        # JSON can spell half of a surrogate pair, which is no character
        raise UserError(
            f"{where}: field {config.text_field!r} has half a character (a lone surrogate) at "
            f"position {e.start}; mend or remove that record"
        ) from e
    document_id = default_id if config.id_field is None else text_of(config.id_field, "data.id_field")
    return Document(document_id, text, where)


def is_held_out(document_id: str, fraction: float) -> bool:
    """Returns whether a document is held out: a hash of its identifier falls below ``fraction``."""
    digest = hashlib.sha256(document_id.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64
