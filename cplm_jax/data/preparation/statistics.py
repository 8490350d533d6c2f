"""What was prepared, for people to read."""

from pathlib import Path
from typing import Any

import numpy as np

from cplm_jax.data.shards import SIDES, lengths_file


def summary(manifest: dict[str, Any], output: Path) -> str:
    """Returns what was prepared, in lines: sizes, lengths, and how much there is to copy."""
    lines = []
    for side in SIDES:
        part = manifest[side]
        if part["documents"] == 0:
            lines.append(f"{side}: no documents")
            continue
        lengths = np.load(output / lengths_file(side))
        points = np.quantile(lengths, [0.1, 0.5, 0.9, 0.99], method="nearest")
        targets = part["tokens"] + part["documents"]
        lines += [
            f"{side}: {part['documents']:,} documents, {part['tokens']:,} tokens, {part['bytes']:,} bytes "
            f"({part['tokens'] / part['bytes']:.3f} tokens per byte) in {len(part['shards']):,} shards",
            f"  tokens of a document: mean {lengths.mean():,.0f}, 10% {points[0]:,}, median {points[1]:,}, "
            f"90% {points[2]:,}, 99% {points[3]:,}, longest {lengths.max():,}",
            f"  to copy: {part['repeated_targets'] / targets:.1%} of the targets occur earlier in their "
            "document",
        ]
        inexact = part.get("inexact", 0)
        if inexact:
            lines.append(
                f"  not had back byte for byte: {inexact:,} documents, in which the tokenizer adds, drops or "
                "changes characters"
            )
    skipped = manifest["skipped"]
    lines.append(f"skipped: {skipped['bad_records']:,} bad records, {skipped['duplicates']:,} duplicates")
    return "\n".join(lines)
