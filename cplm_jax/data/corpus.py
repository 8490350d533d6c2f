"""Tokenised documents on disk, made once per corpus and tokenizer, and found again by content."""

import hashlib
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cplm_jax.config import DataConfig
from cplm_jax.data.sources import Document, SourceFile, is_held_out, list_files, read_documents
from cplm_jax.data.tokenizer import Tokenizer, train_tokenizer
from cplm_jax.errors import MachineError, UserError

_FORMAT = 2  # raise when the files below or the way text becomes tokens change
_CHECKSUMS = "checksums.json"


@dataclass(frozen=True)
class TokenStore:
    """Documents as token ids without BOS and EOS, memory-mapped.

    Attributes:
      tokens: ids of all documents, one after the other; uint16 or uint32.
      offsets: int64 of shape (documents + 1,); document i is tokens[offsets[i]:offsets[i + 1]].
      ids: identifier of each document.
      bytes: bytes of text.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    ids: list[str]
    bytes: int

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.offsets) - 1


@dataclass(frozen=True)
class Corpus:
    """A tokenizer and the documents it has split.

    Attributes:
      fingerprint: hash of every document's identifier and text and of the split; equal
        fingerprints mean equal training and held-out documents in equal order.
    """

    tokenizer: Tokenizer
    train: TokenStore
    validation: TokenStore
    fingerprint: str


def load_corpus(config: DataConfig, report: Callable[[str], None] = lambda _: None) -> Corpus:
    """Reads, splits and tokenises the documents of a configuration, or finds them in the cache.

    Args:
      config: paths, split, tokenizer and cache.
      report: called with a line of progress now and then.

    Raises:
      UserError: for anything wrong with the documents or the tokenizer (see
        :mod:`cplm_jax.data.sources`), and if either side of the split is empty.
    """
    files = list_files(config.paths, "data.paths")
    held_out_files = (
        list_files(config.validation_paths, "data.validation_paths") if config.validation_paths else None
    )
    both = {f.path.resolve() for f in files} & {f.path.resolve() for f in held_out_files or ()}
    if both:
        raise UserError(
            f"{min(both)} is in data.paths and in data.validation_paths; held-out text must not train, so "
            "take it out of one of them"
        )

    def side(validation: bool) -> Iterator[Document]:
        return _split(files, held_out_files, config, validation)

    fingerprint = _fingerprint(side)
    cache = Path(config.cache_dir).expanduser()
    if config.tokenizer is not None:
        tokenizer = Tokenizer.load(config.tokenizer, "data.tokenizer")
    else:
        tokenizer = _cached_tokenizer(
            cache, fingerprint, config, lambda: (d.text for d in side(False)), report
        )
    key = _digest([_FORMAT, fingerprint, tokenizer.sha256])
    folder = _made_once(cache / "tokens" / key, lambda target: _tokenise(target, side, tokenizer, report))
    return Corpus(tokenizer, _open(folder / "train"), _open(folder / "validation"), fingerprint)


def _split(
    files: list[SourceFile], held_out_files: list[SourceFile] | None, config: DataConfig, validation: bool
) -> Iterator[Document]:
    if held_out_files is not None:
        return read_documents(held_out_files if validation else files, config)
    documents = read_documents(files, config)
    return (d for d in documents if is_held_out(d.id, config.validation_fraction) == validation)


def _fingerprint(side: Callable[[bool], Iterator[Document]]) -> str:
    digest = hashlib.sha256()
    for validation in (False, True):
        count = 0
        for document in side(validation):
            for part in (document.id, document.text):
                encoded = part.encode("utf-8", "surrogatepass")
                digest.update(len(encoded).to_bytes(8, "big") + encoded)
            count += 1
        if count == 0:
            what = "held-out" if validation else "training"
            raise UserError(
                f"the corpus has no {what} document with text; add documents to data.paths"
                + (
                    ", or set data.validation_paths or a larger data.validation_fraction"
                    if validation
                    else " (data.validation_fraction may have taken them all)"
                )
            )
        digest.update(b"|")
    return digest.hexdigest()


def _digest(parts: Iterable[Any]) -> str:
    return hashlib.sha256(json.dumps(list(parts)).encode()).hexdigest()[:32]


def _cached_tokenizer(
    cache: Path,
    fingerprint: str,
    config: DataConfig,
    texts: Callable[[], Iterable[str]],
    report: Callable[[str], None],
) -> Tokenizer:
    key = _digest([_FORMAT, fingerprint, config.tokenizer_vocabulary_size, config.tokenizer_sample_bytes])

    def make(target: Path) -> None:
        report(f"training a tokenizer of {config.tokenizer_vocabulary_size} pieces")
        tokenizer = train_tokenizer(texts(), config.tokenizer_vocabulary_size, config.tokenizer_sample_bytes)
        (target / "tokenizer.model").write_bytes(tokenizer.proto)

    return Tokenizer.load(_made_once(cache / "tokenizers" / key, make) / "tokenizer.model")


def _made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Fills ``folder`` by ``make`` if it does not exist; whole or not at all, whoever else does the same.

    Raises:
      UserError: if it cannot be made, or is there but not as it was made.
      MachineError: if writing fails half-way.
    """
    if os.path.exists(folder):
        _check_unchanged(folder)
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        target = Path(tempfile.mkdtemp(prefix=folder.name + ".", dir=folder.parent))
    except OSError as e:
        raise UserError(
            f"data.cache_dir: cannot write to {folder.parent}: {e.strerror or e}; choose another folder"
        ) from e
    try:
        make(target)
        (target / _CHECKSUMS).write_text(json.dumps(_checksums(target)), encoding="utf-8")
        os.rename(target, folder)
    except OSError as e:
        if not os.path.exists(folder):  # else another process was first, with the same content
            raise MachineError(f"data.cache_dir: cannot write to {folder}: {e.strerror or e}") from e
    finally:
        shutil.rmtree(target, ignore_errors=True)
    return folder


def _checksums(folder: Path) -> dict[str, int]:
    def crc32(path: Path) -> int:
        value = 0
        with open(path, "rb") as file:
            while chunk := file.read(2**22):
                value = zlib.crc32(chunk, value)
        return value

    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != _CHECKSUMS)
    return {p.relative_to(folder).as_posix(): crc32(p) for p in files}


def _check_unchanged(folder: Path) -> None:
    # A token id beyond the vocabulary, or another one within it, would train without a sign of it.
    try:
        unchanged = json.loads((folder / _CHECKSUMS).read_bytes()) == _checksums(folder)
    except (OSError, ValueError):
        unchanged = False
    if not unchanged:
        raise UserError(
            f"data.cache_dir: {folder} is damaged, its files are not what was written; delete that folder, "
            "and it will be made anew"
        )


def _tokenise(
    target: Path,
    side: Callable[[bool], Iterator[Document]],
    tokenizer: Tokenizer,
    report: Callable[[str], None],
) -> None:
    dtype = np.uint16 if tokenizer.size <= 2**16 else np.uint32
    for name, validation in (("train", False), ("validation", True)):
        folder = target / name
        folder.mkdir()
        offsets, ids, text_bytes = [0], [], 0
        with open(folder / "tokens.bin", "wb") as out:
            for document in side(validation):
                tokens = np.asarray(tokenizer.encode(document.text), dtype)
                out.write(tokens.tobytes())
                offsets.append(offsets[-1] + len(tokens))
                ids.append(document.id)
                text_bytes += len(document.text.encode("utf-8"))
        np.save(folder / "offsets.npy", np.asarray(offsets, np.int64))
        meta = {"dtype": np.dtype(dtype).name, "bytes": text_bytes, "ids": ids}
        (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
        report(f"tokenised {len(ids):,} {name} documents: {offsets[-1]:,} tokens, {text_bytes:,} bytes")


def _open(folder: Path) -> TokenStore:
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    offsets = np.load(folder / "offsets.npy")
    tokens: np.ndarray = np.zeros(0, meta["dtype"])
    if offsets[-1]:  # an empty file cannot be mapped
        tokens = np.memmap(folder / "tokens.bin", dtype=meta["dtype"], mode="r")
    return TokenStore(tokens, offsets, meta["ids"], meta["bytes"])
