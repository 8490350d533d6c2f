"""Runs a preparation: plans it or goes on with it, has its units worked on, writes the manifest."""

import contextlib
import fcntl
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cplm_jax.data.files import SourceFile
from cplm_jax.data.preparation.duplicates import find_duplicates
from cplm_jax.data.preparation.plan import (
    Plan,
    Settings,
    check_same,
    check_unchanged,
    make_plan,
    read_record,
)
from cplm_jax.data.preparation.processes import Job, run
from cplm_jax.data.preparation.units import (
    KEPT_MESSAGES,
    Unit,
    check_bad,
    digest_unit,
    files_of,
    finished_parts,
    hash_unit,
    is_finished,
    prepare_unit,
)
from cplm_jax.data.shards import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST,
    SIDES,
    Documents,
    lengths_file,
    read_manifest,
    sha256_of,
    token_dtype,
    write_file,
)
from cplm_jax.data.tokenizer import Tokenizer
from cplm_jax.errors import MachineError, UserError

Report = Callable[[str], None]


def prepare(
    files: Sequence[SourceFile],
    tokenizer: Tokenizer,
    output: Path,
    settings: Settings,
    max_bad: int = 0,
    processes: int = 1,
    report: Report = lambda _: None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Writes the documents of files as tokenised shards, or goes on where a kill interrupted that.

    Args:
      files: the input (:func:`~cplm_jax.data.files.list_files`).
      tokenizer: splits the documents.
      output: folder to make; or one in which the same preparation was begun, or finished.
      settings: what decides the content.
      max_bad: bad records that are skipped and counted; one more is an error.
      processes: to work in; the output does not depend on it.
      report: called with lines of progress.
      quiet: whether to show no progress bar.

    Returns:
      The manifest.

    Raises:
      UserError: for anything wrong with the input, or if ``output`` holds something else.
      MachineError: if something could not be written, or a process was killed.
    """
    place = output.resolve()
    inside = next((f for f in files if Path(f.path).resolve().is_relative_to(place)), None)
    if inside is not None:
        raise UserError(f"--output {output}: the input {inside.path} lies in it; choose another folder")
    plan = make_plan(files, settings, tokenizer, max_bad, quiet)
    try:
        with _claimed(output):
            return _prepare(plan, tokenizer, output, settings, max_bad, processes, report, quiet)
    except OSError as e:
        raise MachineError(
            f"--output {output}: cannot write to it: {e.strerror or e}; the same command goes on from there"
        ) from e


@contextlib.contextmanager
def _claimed(output: Path) -> Iterator[None]:
    """Makes the folder and keeps other preparations out of it."""
    try:
        existing = {p.name for p in output.iterdir()} if output.is_dir() else set()
        if (output.exists() and not output.is_dir()) or (existing and not _is_ours(output)):
            raise UserError(f"--output {output}: it exists already; choose another folder")
        (output / "work").mkdir(parents=True, exist_ok=True)
        lock = open(output / "work" / "lock", "ab")  # noqa: SIM115 - closed below
    except OSError as e:
        raise UserError(
            f"--output {output}: cannot write there: {e.strerror or e}; choose another folder"
        ) from e
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise UserError(f"--output {output}: another process is preparing there now") from e
        yield


def _is_ours(output: Path) -> bool:
    """Returns whether a folder holds a preparation, finished or begun; only then may files be removed."""
    work = output / "work"
    if (work / "plan.json").is_file():
        return "format_version" in read_record(work / "plan.json")
    if (output / MANIFEST).is_file():
        read_manifest(output)  # refuses another program's
        return True
    # A kill before the plan was written leaves the lock, and perhaps a part of the plan.
    begun = all(p.name == "lock" or p.name.startswith(".plan.json.") for p in work.glob("*"))
    return [p.name for p in output.iterdir()] == ["work"] and begun


def _prepare(
    plan: Plan,
    tokenizer: Tokenizer,
    output: Path,
    settings: Settings,
    max_bad: int,
    processes: int,
    report: Report,
    quiet: bool,
) -> dict[str, Any]:
    work = output / "work"
    if (output / MANIFEST).exists():
        shutil.rmtree(work)
        manifest = read_manifest(output)
        _check_finished(manifest, plan, output)
        for side in SIDES:
            Documents(output, side, manifest)  # raises for a file that is missing or damaged
        report(f"{output} is finished already, from files of the same names and sizes")
        return manifest
    if (work / "plan.json").exists():
        check_same(read_record(work / "plan.json"), plan, output)
    else:
        write_file(work / "plan.json", json.dumps(plan.record).encode())
    for partial in [*output.glob(".*.partial"), *work.glob("*.partial")]:
        partial.unlink(missing_ok=True)
    units = [Unit(i, pieces, settings, max_bad, output) for i, pieces in enumerate(plan.units)]
    report(
        f"{len(plan.files):,} files of {sum(f.size for f in plan.files):,} bytes, in {len(units):,} units, "
        f"{sum(map(is_finished, units)):,} of them finished before"
    )
    sizes = dict(enumerate(plan.sizes))
    if settings.deduplicate:
        left = [unit for unit in units if not unit.digests_file.exists()]
        run(Job("reading", digest_unit, left, sizes), tokenizer, processes, quiet)
        if not all(unit.duplicates_file.exists() for unit in units):
            report(f"{find_duplicates(units):,} documents occurred before")
    left = [unit for unit in units if not is_finished(unit)]
    bad = _BadRecords(max_bad)
    for unit in units:
        if is_finished(unit):
            bad.add(unit)
    run(Job("preparing", prepare_unit, left, sizes, bad.add), tokenizer, processes, quiet)
    left = [unit for unit in units if not unit.hashes_file.exists()]
    sizes = {unit.number: sum(file.size for file in files_of(unit)) for unit in units}
    run(Job("hashing", hash_unit, left, sizes), tokenizer, processes, quiet)
    check_unchanged(plan, output, quiet)
    manifest = _finish(plan, units, tokenizer)
    shutil.rmtree(work)
    return manifest


def _check_finished(manifest: dict[str, Any], plan: Plan, output: Path) -> None:
    sources = [[s["name"], s["size"]] for s in manifest["sources"]]
    same = manifest["settings"] == _settings_of(plan) and sources == [s[:2] for s in plan.record["sources"]]
    if not same or manifest["tokenizer"]["sha256"] != plan.record["tokenizer"]:
        raise UserError(
            f"--output {output}: it holds documents that were prepared from other files or with other "
            "settings; choose another folder"
        )


def _settings_of(plan: Plan) -> dict[str, Any]:
    return {
        k: v
        for k, v in plan.record.items()
        if k not in ("sources", "tokenizer", "format_version", "unit_pieces")
    }


def _finish(plan: Plan, units: Sequence[Unit], tokenizer: Tokenizer) -> dict[str, Any]:
    """Joins the records of all parts to the manifest and writes it, last of all."""
    output = units[0].output
    if not all(map(is_finished, units)):
        raise MachineError(
            f"{output}: shards that were written are gone or damaged; the same command makes them again"
        )
    parts = [(unit, number, part) for unit in units for number, part in enumerate(finished_parts(unit))]
    documents: Counter[str] = Counter()
    hashes: dict[str, str] = {}
    messages: list[str] = []
    for _, _, part in parts:
        documents.update(part["documents_of"])
        messages += part["messages"]
    for unit in units:
        hashes |= json.loads(unit.hashes_file.read_bytes())
    write_file(output / tokenizer.file_name, tokenizer.proto)
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "dtype": token_dtype(tokenizer.size).str,
        "tokenizer": {
            "file": tokenizer.file_name,
            "sha256": tokenizer.sha256,
            "size": tokenizer.size,
        },
        "settings": _settings_of(plan),
        "sources": [
            {"name": f.name, "size": f.size, "sha256": hashes[f.path], "documents": documents[f.path]}
            for f in plan.files
        ],
        "skipped": {
            "bad_records": sum(part["bad"] for _, _, part in parts),
            "first_bad_records": messages[:KEPT_MESSAGES],
            "duplicates": sum(part["duplicates"] for _, _, part in parts),
        },
    }
    for side in SIDES:
        shards = [part["sides"][side] for _, _, part in parts if side in part["sides"]]
        lengths = [np.load(u.lengths_file(side, n)) for u, n, part in parts if side in part["sides"]]
        path = output / lengths_file(side)
        write_file(path, np.concatenate([np.zeros(0, np.uint32), *lengths]))
        manifest[side] = {
            name: sum(shard[name] for shard in shards)
            for name in ("documents", "tokens", "bytes", "repeated_targets", "inexact", "records")
        } | {"lengths_size": path.stat().st_size, "lengths_sha256": sha256_of(path), "shards": shards}
    if manifest["train"]["documents"] == 0:
        raise UserError("the input has no training document; give more, or a smaller --validation_fraction")
    write_file(output / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    return manifest


class _BadRecords:
    """Counts bad records of all units up to the limit.

    Args:
      limit: bad records that are skipped and counted.
    """

    def __init__(self, limit: int):
        self._limit, self._count, self._message = limit, 0, ""

    def add(self, unit: Unit) -> None:
        """Counts those of a finished unit. Raises :class:`UserError` if it is one too many."""
        for part in finished_parts(unit):
            self._count += part["bad"]
            self._message = part["last_message"] or self._message
        check_bad(self._count, self._limit, self._message)
