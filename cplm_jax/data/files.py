"""The files a corpus is made of: paths, folders, globs and URLs, and what lies behind them."""

import contextlib
import fnmatch
import glob
import io
import itertools
import json
import os
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from cplm_jax.errors import UserError, first_line


class SourceFile(NamedTuple):
    """A file and the name it has wherever the corpus lies."""

    path: str
    """Path on this machine, or URL."""
    name: str
    """Path from the folder or glob that it was found by."""
    size: int
    """Bytes."""


PYTHON_STDLIB = "python:stdlib"
_NOT_STDLIB = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def stdlib_files() -> list[SourceFile]:
    """Lists the source of the running Python's standard library, without its tests.

    Raises:
      UserError: if this Python comes without its source.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        _local(path, path.relative_to(root).as_posix())
        for path in sorted(root.rglob("*.py"))
        if not _NOT_STDLIB.intersection(path.relative_to(root).parts)
    ]
    if len(files) < 100:
        raise UserError(
            f"data.paths: {PYTHON_STDLIB!r} needs the source of Python's standard library, and {root} has "
            f"{len(files)} files of it; use another Python, or text of your own"
        )
    return files


def _local(path: Path, name: str) -> SourceFile:
    return SourceFile(str(path), name, path.stat().st_size)


def is_url(path: str) -> bool:
    """Returns whether a path is a URL, as in ``gs://bucket/folder``."""
    return "://" in path


def open_file(file: SourceFile) -> BinaryIO:
    """Opens a file for reading, wherever it lies.

    Raises:
      OSError: if it cannot be opened.
    """
    if not is_url(file.path):
        return open(file.path, "rb")
    import fsspec

    return cast(BinaryIO, _Remote(lambda: fsspec.open(file.path, "rb").open()))


def version_of(file: SourceFile) -> int | str | None:
    """Returns what differs once a file was changed, as far as can be told; None for a file that is gone."""
    try:
        if not is_url(file.path):
            return os.stat(file.path).st_mtime_ns
        import fsspec

        with _as_os_error():
            system, path = fsspec.core.url_to_fs(file.path)
            info = system.info(path)
    except OSError:
        return None
    names = ("size", "ETag", "etag", "generation", "mtime", "LastModified")
    return repr([info.get(name) for name in names])


class _Remote(io.RawIOBase):
    """A file behind a URL, all of whose errors are OSError: each file system of fsspec has its own.

    Args:
      opening: opens it.
    """

    def __init__(self, opening: Callable[[], BinaryIO]):
        with _as_os_error():
            self._file = opening()

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Moves in the file."""
        with _as_os_error():
            return self._file.seek(offset, whence)

    def tell(self) -> int:
        """Returns the position in the file."""
        return self._file.tell()

    def readinto(self, buffer: Any) -> int:
        """Fills a buffer."""
        with _as_os_error():
            data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Closes the file."""
        if not self.closed:
            self._file.close()
        super().close()


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    try:
        yield
    except OSError:
        raise
    except Exception as e:
        raise OSError(first_line(e)) from e


def list_files(paths: Sequence[str], field: str) -> list[SourceFile]:
    """Expands files, folders, globs and URLs of these to a sorted list of files.

    A file found in a folder or by a glob is named by its path from the folder, or from the
    glob's part without wildcards; a file given by itself, by its file name; where that makes two of one
    name, all names begin with the number of their path, from 0. A folder that a glob matches stands for its
    files, as it would if a shell had expanded the glob, unless ``**`` looks into all folders anyway. Hidden
    files and folders are left out of folders. A folder that Hugging Face ``datasets`` saved stands for its
    Arrow files. ``python:stdlib`` stands for :func:`stdlib_files`. URLs are those of ``fsspec``.

    Raises:
      UserError: if ``paths`` is empty or one of them matches nothing; ``field`` is named.
    """
    if not paths:
        raise UserError(
            f"{field} is empty: give text, .jsonl, .parquet or .arrow files, folders or globs, as in "
            f"{_flag(field)} 'corpus/*.txt'"
        )
    found: dict[str, tuple[int, SourceFile]] = {}  # by what a path leads to: two spellings are one document
    for number, pattern in enumerate(paths):
        if pattern == PYTHON_STDLIB:
            files = stdlib_files()
        elif is_url(pattern):
            files = _remote_files(pattern, field)
        else:
            files = _local_files(pattern, field)
        if not files:
            raise UserError(f"{field}: {pattern!r} matches no file (from {os.getcwd()}); correct the path")
        for file in files:
            where = file.path if is_url(file.path) else os.path.realpath(file.path)
            found.setdefault(where, (number, file))
    if len({file.name for _, file in found.values()}) < len(found):
        named = [file._replace(name=f"{number}/{file.name}") for number, file in found.values()]
    else:
        named = [file for _, file in found.values()]
    return sorted(named, key=lambda file: (file.name, file.path))


def _flag(field: str) -> str:
    return field if field.startswith("--") else f"--{field}"


def _local_files(pattern: str, field: str) -> list[SourceFile]:
    root = Path(pattern).expanduser()
    if os.path.isdir(root):
        return [_local(p, p.relative_to(root).as_posix()) for p in _files_below(root, field)]
    if os.path.isfile(root):
        return [_local(root, root.name)]
    base = _literal_part(root)
    files: list[Path] = []
    for match in map(Path, glob.glob(str(root), recursive=True)):
        _check_link(match, field)
        if match.is_file():
            files.append(match)
        elif match.is_dir() and "**" not in root.parts:
            files += _files_below(match, field)
    return [_local(file, os.path.relpath(file, base).replace(os.sep, "/")) for file in files]


def _check_link(path: Path, field: str) -> None:
    if not path.exists():
        raise UserError(f"{field}: {path} is a link to nothing; mend or remove it")


def _remote_files(pattern: str, field: str) -> list[SourceFile]:
    import fsspec

    try:
        system, root = fsspec.core.url_to_fs(pattern)
        if glob.has_magic(pattern):
            base = "/".join(itertools.takewhile(lambda part: not glob.has_magic(part), root.split("/")))
            listed = system.glob(root, detail=True)
            if "**" not in root.split("/"):
                for folder in [path for path, info in listed.items() if info["type"] == "directory"]:
                    listed |= system.find(folder, detail=True)
        elif system.isdir(root):
            base = root
            listed = system.find(root, detail=True)
        else:
            base = root.rpartition("/")[0]
            listed = {root: system.info(root)}
        for path, info in listed.items():
            if info["type"] == "file" and info.get("size") is None:  # as in lists of web servers
                listed[path] = system.info(path)
    except FileNotFoundError:
        return []
    except (ImportError, ValueError) as e:
        raise UserError(f"{field}: {pattern!r} cannot be read here: {first_line(e)}") from e
    except Exception as e:  # each file system has errors of its own
        what = e.strerror if isinstance(e, OSError) and e.strerror else first_line(e)
        raise UserError(
            f"{field}: cannot list {pattern}: {what}; check the address, and your access to it"
        ) from e
    _leave_out_states(listed, system, field)
    files = []
    for path, info in listed.items():
        name = path[len(base) :].lstrip("/") or path.rpartition("/")[2]
        hidden = any(part.startswith(".") for part in name.split("/"))
        if info["type"] == "file" and not hidden:
            if info.get("size") is None:
                raise UserError(f"{field}: {pattern}: the size of {path} is unknown; fetch it first")
            files.append(SourceFile(system.unstrip_protocol(path), name, info["size"]))
    return files


def _leave_out_states(listed: dict[str, Any], system: Any, field: str) -> None:
    """Leaves of the folders that ``datasets`` saved only the Arrow files, as :func:`_dataset_files` does."""
    names: dict[str, list[str]] = {}
    for path in listed:
        folder, _, name = path.rpartition("/")
        names.setdefault(folder, []).append(name)
    for folder, inside in names.items():
        kept = _dataset_names(folder, inside, field, lambda path: system.cat_file(path))
        if kept is not None:
            for name in set(inside) - set(kept):
                del listed[f"{folder}/{name}"]


def _literal_part(pattern: Path) -> Path:
    """Returns the folders of a glob before its first wildcard."""
    return Path(*itertools.takewhile(lambda part: not glob.has_magic(part), pattern.parts))


# What a run, a preparation or the cache writes; a glob that matches one of these would read documents there.
_WRITTEN = (
    *("metrics.jsonl", "config.yaml", "run.json", "tokenizer.model", "tokenizer.json", "manifest.json"),
    *("train-0.arrayrecord", "train-0.names.jsonl", "train.lengths.npy"),
    *("checkpoints", "tensorboard", "work", "tokens", "tokenizers"),
)


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
        if is_url(pattern):
            continue
        for name, folder in written.items():
            if _finds(Path(pattern).expanduser(), Path(folder).expanduser().resolve()):
                raise UserError(
                    f"{name} = {folder} lies in {field} = {pattern}, so that what the run writes would be "
                    f"read as documents; choose another {name}, or a glob such as '*.txt'"
                )


def _finds(pattern: Path, folder: Path) -> bool:
    """Returns whether something written to a folder would be found by a folder or a glob."""
    base = pattern if pattern.is_dir() else _literal_part(pattern)
    wildcards = pattern.parts[len(base.parts) :]
    if not folder.is_relative_to(base.resolve()) or not (wildcards or pattern.is_dir()):
        return False
    if "**" in wildcards:
        return any(fnmatch.fnmatch(name, pattern.name) for name in _WRITTEN)
    names = folder.relative_to(base.resolve()).parts

    def all_match(names: Sequence[str]) -> bool:
        # A glob passes over hidden names, unless it names them.
        return all(
            fnmatch.fnmatch(name, wildcard) and (wildcard.startswith(".") or not name.startswith("."))
            for name, wildcard in zip(names, wildcards, strict=False)
        )

    if len(names) >= len(wildcards):
        return all_match(names)
    return any(all_match((*names, name)) for name in _WRITTEN)


def _files_below(root: Path, field: str) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise UserError(f"{field}: cannot read {error.filename}: {error.strerror}") from error

    seen: set[str] = set()
    for folder, folders, names in os.walk(root, onerror=refuse, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        real = os.path.realpath(folder)
        if real in seen:  # a link back up
            folders[:] = []
            continue
        seen.add(real)
        arrow = _dataset_files(Path(folder), names, field)
        if arrow is not None:
            folders[:] = []
            yield from arrow
            continue
        for path in (Path(folder, name) for name in names if not name.startswith(".")):
            _check_link(path, field)
            if path.is_file():
                yield path


def _dataset_files(folder: Path, names: Sequence[str], field: str) -> list[Path] | None:
    """Returns the Arrow files of a folder that Hugging Face ``datasets`` saved, or None for another one."""
    found = _dataset_names(str(folder), names, field, lambda path: Path(path).read_bytes())
    return None if found is None else [folder / name for name in found]


def _dataset_names(
    folder: str, names: Sequence[str], field: str, read: Callable[[str], bytes]
) -> list[str] | None:
    if "dataset_dict.json" in names:
        raise UserError(
            f"{field}: {folder} holds the splits of a dataset; name the one to read, as in {folder}/train"
        )
    if not {"state.json", "dataset_info.json"} <= set(names):
        return None
    try:
        return [entry["filename"] for entry in json.loads(read(f"{folder}/state.json"))["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(
            f"{field}: {folder}/state.json is not what datasets' save_to_disk writes ({first_line(e)}); "
            "save the dataset again"
        ) from e
