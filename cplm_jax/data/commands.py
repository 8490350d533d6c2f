"""``cplm prepare`` and ``cplm tokenizer``."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cplm_jax.command_line import CommandParser, number_between, path_or_url_word, path_word
from cplm_jax.data.files import SourceFile, check_apart, list_files
from cplm_jax.data.formats import kind_of, read_piece
from cplm_jax.data.preparation.plan import Settings
from cplm_jax.data.preparation.prepare import prepare
from cplm_jax.data.preparation.statistics import summary
from cplm_jax.data.preparation.units import is_held_out, text_digest
from cplm_jax.data.records import BadRecord, Piece, Reading
from cplm_jax.data.shards import read_manifest, write_file
from cplm_jax.data.tokenizer import Tokenizer, train_tokenizer
from cplm_jax.errors import MachineError, UserError

# Bytes of text that a byte of a compressed file or of Parquet stands for, about.
_EXPANSION = 4
_MAX_DOCUMENT_BYTES = 100_000_000


def _say(message: str) -> None:
    print(message, file=sys.stderr)


def _add_input(parser: CommandParser) -> None:
    parser.add_argument(
        "--paths",
        nargs="+",
        type=path_or_url_word,
        required=True,
        metavar="PATH",
        help="files, folders, globs or URLs: .jsonl (a document a line), .parquet and .arrow (a row), any "
        "other file is one document of UTF-8 text; .gz and .zst are decompressed",
    )
    parser.add_argument(
        "--text_field",
        default="text",
        metavar="NAME",
        help="JSON field or column with the text (%(default)s)",
    )
    parser.add_argument(
        "--max_document_bytes",
        type=number_between(1, 2**31 - 1),
        default=_MAX_DOCUMENT_BYTES,
        metavar="N",
        help="a longer record is a bad one; memory grows with it (%(default)s)",
    )
    parser.add_argument(
        "--max_bad",
        type=number_between(0, 2**62),
        default=0,
        metavar="N",
        help="bad records (empty, damaged, too long, without text) to skip and count; one more is an error "
        "(%(default)s)",
    )


def _reading(options: argparse.Namespace) -> Reading:
    return Reading(options.text_field, options.max_document_bytes)


def prepare_command(arguments: Sequence[str]) -> int:
    """Runs ``cplm prepare``: tokenises documents into shards."""
    parser = CommandParser(
        "prepare",
        "Tokenises documents into shards to train on. The same command goes on after a kill, and the shards "
        "do not depend on the number of processes.",
    )
    _add_input(parser)
    parser.add_argument(
        "--tokenizer",
        type=path_word,
        required=True,
        metavar="FILE",
        help="sentencepiece .model (cplm tokenizer train makes one) or Hugging Face tokenizer.json",
    )
    parser.add_argument("--output", type=path_word, required=True, metavar="DIR", help="folder to make")
    _add_fraction(parser, "share of the documents to hold out, by a hash of their text")
    parser.add_argument(
        "--deduplicate",
        action="store_true",
        help="keep the first of equal documents; reads the input again",
    )
    parser.add_argument(
        "--processes",
        type=number_between(1, 4096),
        default=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        metavar="N",
        help="processes to work in (%(default)s here)",
    )
    parser.add_argument(
        "--shard_tokens",
        type=number_between(1, 2**40),
        default=64_000_000,
        metavar="N",
        help="training tokens from which a shard is full (%(default)s)",
    )
    options = parser.parse(arguments)
    output = Path(options.output).expanduser()
    settings = Settings(
        _reading(options), options.validation_fraction, options.deduplicate, options.shard_tokens
    )
    tokenizer = Tokenizer.load(options.tokenizer, "--tokenizer")
    check_apart(options.paths, "--paths", {"--output": options.output})
    files = list_files(options.paths, "--paths")
    manifest = prepare(files, tokenizer, output, settings, options.max_bad, options.processes, _say)
    _say(summary(manifest, output))
    print(options.output)
    return 0


def _add_fraction(parser: CommandParser, what: str) -> None:
    parser.add_argument(
        "--validation_fraction", type=_fraction, default=0.01, metavar="F", help=f"{what} (%(default)s)"
    )


def _fraction(word: str) -> float:
    value = float(word)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{word}: expected a number from 0 to below 1")
    return value


def tokenizer_command(arguments: Sequence[str]) -> int:
    """Runs ``cplm tokenizer train`` and ``cplm tokenizer inspect``."""
    commands: dict[str, Callable[[Sequence[str]], int]] = {"train": _train, "inspect": _inspect}
    if not arguments or arguments[0] in ("-h", "--help"):
        print(
            "usage: cplm tokenizer train ... | cplm tokenizer inspect ...\n\n"
            "  train      make a sentencepiece model that reproduces every text\n"
            "  inspect    tell what a tokenizer is, and how it splits a text\n\n"
            "cplm tokenizer train --help tells more."
        )
        return 0
    name, *rest = arguments
    if name not in commands:
        raise UserError(f"cplm tokenizer: unknown command {name!r}; there are train and inspect")
    return commands[name](rest)


def _train(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "tokenizer train",
        "Trains a sentencepiece model with byte fallback that reproduces every text byte for byte.",
    )
    _add_input(parser)
    parser.add_argument("--output", type=path_word, required=True, metavar="FILE", help=".model file to make")
    parser.add_argument(
        "--vocabulary_size",
        type=number_between(300, 2**22),
        default=32_768,
        metavar="N",
        help="pieces, including 256 bytes and 4 control tokens (%(default)s)",
    )
    parser.add_argument("--type", choices=("bpe", "unigram"), default="bpe", help="(%(default)s)")
    parser.add_argument(
        "--sample_bytes",
        type=number_between(1, 2**40),
        default=100_000_000,
        metavar="N",
        help="text to train on, about: whole documents, chosen by a hash of their text from all of the input "
        "(%(default)s)",
    )
    _add_fraction(parser, "the documents that cplm prepare holds out with this are left out")
    options = parser.parse(arguments)
    output = Path(options.output).expanduser()
    if output.exists():
        raise UserError(f"--output {output}: it exists already; choose another file")
    if not output.absolute().parent.is_dir():
        raise UserError(f"--output {output}: the folder {output.absolute().parent} does not exist; make it")
    files = list_files(options.paths, "--paths")
    texts = _sample(
        files, _reading(options), options.sample_bytes, options.max_bad, options.validation_fraction
    )
    _say(f"training a tokenizer of {options.vocabulary_size:,} pieces on {len(files):,} files")
    tokenizer = train_tokenizer(
        texts, options.vocabulary_size, options.sample_bytes, options.type, "--vocabulary_size"
    )
    try:
        write_file(output, tokenizer.proto)
    except OSError as e:
        raise MachineError(f"--output {output}: cannot write it: {e.strerror or e}") from e
    print(options.output)
    return 0


def _sample(
    files: Sequence[SourceFile], reading: Reading, size: int, max_bad: int, held_out: float
) -> Iterator[str]:
    """Yields about ``size`` bytes of the documents that are not held out, spread over all of the input."""
    expected = sum(
        file.size * (_EXPANSION if kind == "parquet" or compression else 1)
        for file in files
        for kind, compression in [kind_of(file.name)]
    )
    share, bad = min(1.0, 1.1 * size / max(expected * (1 - held_out), 1)), 0
    for file in files:
        for record in read_piece(Piece(file, 0, None), reading):
            if isinstance(record, BadRecord):
                bad += 1
                if bad > max_bad:
                    raise UserError(f"{record.message} (--max_bad N skips up to N such records)")
                continue
            digest = text_digest(record.data)
            # By the half of the digest that does not hold documents out, which would choose the same ones.
            if not is_held_out(digest, held_out) and is_held_out(digest[8:], share):
                yield record.text


def _inspect(arguments: Sequence[str]) -> int:
    parser = CommandParser("tokenizer inspect", "Tells what a tokenizer is, and how it splits a text.")
    parser.add_argument(
        "tokenizer", type=path_word, metavar="FILE", help=".model, tokenizer.json, or a folder that has one"
    )
    parser.add_argument("--text", metavar="TEXT", help="text to split")
    options = parser.parse(arguments)
    path = Path(options.tokenizer).expanduser()
    if path.is_dir():
        path = path / read_manifest(path)["tokenizer"]["file"]
    tokenizer = Tokenizer.load(path)
    byte_tokens = sum(len(tokenizer.decode_bytes([i])) == 1 for i in range(tokenizer.size))
    print(
        f"file: {path} ({tokenizer.file_name.replace('.', ' ')}), sha256 {tokenizer.sha256}\n"
        f"ids: {tokenizer.size:,}, of which {len(tokenizer.control_ids):,} are control tokens and "
        f"{byte_tokens:,} stand for a single byte\n"
        f"BOS {tokenizer.bos_id}, EOS {tokenizer.eos_id}, PAD {tokenizer.pad_id}"
    )
    if options.text is not None:
        try:
            size = len(options.text.encode())
        except UnicodeEncodeError as e:  # the shell passed bytes that are no UTF-8
            raise UserError("--text: not valid UTF-8; give text") from e
        ids = tokenizer.encode(options.text)
        print(f"{len(ids):,} tokens for {size:,} bytes:")
        for i in ids:
            print(f"{i:8}  {tokenizer.decode_bytes([i])!r}")
        print("had back byte for byte: " + ("yes" if tokenizer.is_lossless(options.text) else "no"))
    return 0
