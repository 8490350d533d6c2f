"""The documents of a run: prepared folders, or raw files that are prepared once and found again."""

import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cplm_jax.config import DataConfig
from cplm_jax.data.files import SourceFile, list_files
from cplm_jax.data.formats import read_piece
from cplm_jax.data.mixing import PERIOD
from cplm_jax.data.preparation.plan import Settings
from cplm_jax.data.preparation.prepare import prepare
from cplm_jax.data.preparation.units import is_held_out, text_digest
from cplm_jax.data.records import Document, Piece, Reading
from cplm_jax.data.shards import Documents, Span, read_manifest
from cplm_jax.data.tokenizer import Tokenizer, train_tokenizer
from cplm_jax.errors import MachineError, UserError
from cplm_jax.folders import discard

_FORMAT = 3  # raise when what is cached, or the way text becomes tokens, changes
_CHECKSUMS = "checksums.json"
_SHARD_TOKENS = 64_000_000
_READING = Reading("text", 2**30, "data.text_field", "cplm prepare --max_document_bytes", skip_empty=True)


@dataclass(frozen=True)
class Source:
    """Training documents that are mixed with others in a ratio.

    Attributes:
      name: what to call them.
      documents: the documents.
      weight: share of rows, relative to the other sources'.
    """

    name: str
    documents: Documents
    weight: float


class HeldOut:
    """The held-out documents of all sources, one after the other.

    Attributes:
      lengths: tokens of each document, without BOS and EOS.
      tokens: their sum.
      bytes: bytes of text.
    """

    def __init__(self, parts: Sequence[Documents]):
        self._parts = list(parts)
        self._ends = np.cumsum([len(part) for part in parts])
        self.lengths: np.ndarray = np.concatenate([np.asarray(part.lengths) for part in parts])
        self.tokens = sum(part.tokens for part in parts)
        self.bytes = sum(part.bytes for part in parts)

    def __len__(self) -> int:
        return len(self.lengths)

    def _locate(self, document: int) -> tuple[int, int]:
        part = int(np.searchsorted(self._ends, document, side="right"))
        return part, document - int(self._ends[part]) + len(self._parts[part])

    def label(self, document: int) -> str:
        """Returns what to call a document in a report."""
        part, number = self._locate(document)
        return self._parts[part].label(number)

    def read(self, spans: Sequence[Span]) -> list[np.ndarray]:
        """Returns the token ids of parts of documents. Raises :class:`UserError` as Documents does."""
        if len(self._parts) == 1:
            return self._parts[0].read(spans)
        found = []
        for document, start, stop in spans:
            part, number = self._locate(document)
            found += self._parts[part].read([Span(number, start, stop)])
        return found


@dataclass(frozen=True)
class Corpus:
    """A tokenizer and the documents it has split.

    Attributes:
      tokenizer: the tokenizer.
      sources: documents to train on, to be mixed.
      validation: held-out documents.
      fingerprint: hash of all of these; equal fingerprints mean equal documents in equal order.
    """

    tokenizer: Tokenizer
    sources: tuple[Source, ...]
    validation: HeldOut
    fingerprint: str


def load_corpus(config: DataConfig, report: Callable[[str], None] = lambda _: None) -> Corpus:
    """Opens prepared folders; or reads raw documents and prepares them, or finds them in the cache.

    Args:
      config: sources and weights; or paths, split, tokenizer and cache.
      report: called with a line of progress now and then.

    Raises:
      UserError: for anything wrong with the documents or the tokenizer (see
        :mod:`cplm_jax.data.formats`), and if either side of the split is empty.
    """
    if config.prepared:
        return _join([(Path(p).expanduser(), p) for p in config.prepared], config.weights)
    files = list_files(config.paths, "data.paths")
    held_out_files = (
        list_files(config.validation_paths, "data.validation_paths") if config.validation_paths else []
    )
    both = {os.path.realpath(f.path) for f in files} & {os.path.realpath(f.path) for f in held_out_files}
    if both:
        raise UserError(
            f"{min(both)} is in data.paths and in data.validation_paths; held-out text must not train, so "
            "take it out of one of them"
        )
    fraction = 0.0 if held_out_files else config.validation_fraction
    reading = _READING._replace(text_field=config.text_field)
    cache = Path(config.cache_dir).expanduser()
    text = _text_fingerprint(files, reading, fraction)
    if config.tokenizer is not None:
        tokenizer = Tokenizer.load(config.tokenizer, "data.tokenizer")
    else:
        training = (d.text for d in _documents(files, reading) if not _held_out(d, fraction))
        tokenizer = _cached_tokenizer(cache, text, config, lambda: training, report)

    def prepared(files: list[SourceFile], text: str, fraction: float) -> Path:
        def make(target: Path) -> None:
            settings = Settings(reading, fraction, deduplicate=False, shard_tokens=_SHARD_TOKENS)
            manifest = prepare(files, tokenizer, target, settings, quiet=True)
            for side in ("train", "validation"):
                part = manifest[side]
                if part["documents"]:
                    report(
                        f"tokenised {part['documents']:,} {side} documents: {part['tokens']:,} tokens, "
                        f"{part['bytes']:,} bytes"
                    )

        return _made_once(cache / "tokens" / _digest([_FORMAT, text, tokenizer.sha256]), make)

    folder = prepared(files, text, fraction)
    if not held_out_files:
        return _join([(folder, "data.paths")], [])
    _check_held_out(files, held_out_files, reading)
    held_out = prepared(held_out_files, _text_fingerprint(held_out_files, reading, 0.0, "held-out"), 0.0)
    return _join([(folder, "data.paths")], [], held_out)


def _join(
    folders: Sequence[tuple[Path, str]], weights: Sequence[float], held_out: Path | None = None
) -> Corpus:
    """Opens prepared folders as one corpus; ``held_out``, if given, brings the held-out documents."""
    manifests = [read_manifest(folder) for folder, _ in folders]
    tokenizers = [manifest["tokenizer"]["sha256"] for manifest in manifests]
    for (folder, _), sha256 in zip(folders, tokenizers, strict=True):
        if sha256 != tokenizers[0]:
            raise UserError(
                f"data.prepared: {folder} was prepared with another tokenizer (sha256 {sha256[:12]}) than "
                f"{folders[0][0]} ({tokenizers[0][:12]}); prepare one of them with the other's tokenizer"
            )
    real = [folder.resolve() for folder, _ in folders]
    fractions = [manifest["settings"]["validation_fraction"] for manifest in manifests]
    for number, (folder, _) in enumerate(folders):
        if real[number] in real[:number]:
            raise UserError(f"data.prepared: {folder} is there twice; data.weights sets its share")
        if fractions[number] != fractions[0]:
            raise UserError(
                f"data.prepared: {folder} was prepared with --validation_fraction {fractions[number]} and "
                f"{folders[0][0]} with {fractions[0]}, so that what one holds out the other may train on; "
                "prepare one of them again"
            )
    short = [Path(name).name for _, name in folders]
    names = [s if short.count(s) == 1 else name for s, (_, name) in zip(short, folders, strict=True)]
    first, described = folders[0][0], manifests[0]["tokenizer"]
    tokenizer = Tokenizer.load(first / described["file"], "data.prepared:")
    if tokenizer.sha256 != described["sha256"]:
        raise UserError(
            f"{first / described['file']}: not the tokenizer of the manifest; restore the file, or prepare "
            "the folder again"
        )
    train = [
        Documents(folder, "train", manifest) for (folder, _), manifest in zip(folders, manifests, strict=True)
    ]
    if held_out is None:
        validation = [
            Documents(folder, "validation", manifest)
            for (folder, _), manifest in zip(folders, manifests, strict=True)
        ]
        sides = [manifest[side] for manifest in manifests for side in ("train", "validation")]
    else:
        manifest = read_manifest(held_out)
        validation = [Documents(held_out, "train", manifest)]
        sides = [manifests[0]["train"], manifest["train"]]
    if not any(map(len, validation)):
        raise UserError(
            "the corpus has no held-out document; "
            + (
                "set data.validation_paths or a larger data.validation_fraction"
                if folders[0][1] == "data.paths"
                else "prepare one of data.prepared with a larger --validation_fraction"
            )
        )
    return Corpus(
        tokenizer,
        tuple(
            Source(name, documents, weight)
            for name, documents, weight in zip(names, train, weights or _natural_weights(train), strict=True)
        ),
        HeldOut([part for part in validation if len(part)]),
        _digest([tokenizers[0], *([s["lengths_sha256"], [x["sha256"] for x in s["shards"]]] for s in sides)]),
    )


def _natural_weights(sources: Sequence[Documents]) -> list[float]:
    """Returns the number of targets of each source, and at least what gives it a row now and then."""
    targets = [documents.tokens + len(documents) for documents in sources]
    return [max(count, 2 * sum(targets) / PERIOD) for count in targets]


def _documents(files: Sequence[SourceFile], reading: Reading) -> Iterator[Document]:
    for file in files:
        for record in read_piece(Piece(file, 0, None), reading):
            if not isinstance(record, Document):
                raise UserError(record.message)
            yield record


def _check_held_out(files: Sequence[SourceFile], held_out: Sequence[SourceFile], reading: Reading) -> None:
    """Raises :class:`UserError` if a held-out document has the text of one to train on."""
    digests = {text_digest(document.data) for document in _documents(held_out, reading)}
    for file in files:
        for document in _documents([file], reading):
            if text_digest(document.data) in digests:
                where = f"{file.path} {document.record}".rstrip()
                raise UserError(
                    f"{where} has the text of a document of data.validation_paths; held-out text must not "
                    "train, so take it out of one of them"
                )


def _held_out(document: Document, fraction: float) -> bool:
    return is_held_out(text_digest(document.data), fraction)


def _text_fingerprint(
    files: Sequence[SourceFile], reading: Reading, fraction: float, what: str = "training"
) -> str:
    """Returns a hash of the text of all documents, their order and their split.

    Raises:
      UserError: if a document is bad, or a side of the split is empty.
    """
    digest = hashlib.sha256(repr(fraction).encode())
    counts = [0, 0]
    for document in _documents(files, reading):
        digest.update(len(document.data).to_bytes(8, "big") + document.data)
        counts[_held_out(document, fraction)] += 1
    if counts[0] == 0 or (fraction and counts[1] == 0):
        what = what if counts[0] == 0 else "held-out"
        raise UserError(
            f"the corpus has no {what} document with text; add documents to data.paths"
            + (
                ", or set data.validation_paths or a larger data.validation_fraction"
                if what == "held-out"
                else " (data.validation_fraction may have taken them all)"
            )
        )
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
        discard(target)
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
