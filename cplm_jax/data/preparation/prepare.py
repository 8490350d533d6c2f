"""Runs a preparation: plans it or goes on with it, spreads its units over processes, writes the manifest."""

import concurrent.futures
import contextlib
import fcntl
import json
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

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
from cplm_jax.data.preparation.units import (
    KEPT_MESSAGES,
    Stopped,
    Unit,
    check_bad,
    digest_unit,
    finished_parts,
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
    plan = make_plan(files, settings, tokenizer)
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
    if settings.deduplicate:
        missing = [unit for unit in units if not unit.digests_file.exists()]
        _run("reading", digest_unit, missing, plan, tokenizer, processes, quiet)
        if not all(unit.duplicates_file.exists() for unit in units):
            report(f"{find_duplicates(units):,} documents occurred before")
    _run("preparing", prepare_unit, units, plan, tokenizer, processes, quiet)
    check_unchanged(plan, output)
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
    return {k: v for k, v in plan.record.items() if k not in ("sources", "tokenizer", "format_version")}


def _finish(plan: Plan, units: Sequence[Unit], tokenizer: Tokenizer) -> dict[str, Any]:
    """Joins the records of all parts to the manifest and writes it, last of all."""
    output = units[0].output
    parts = [(unit, number, part) for unit in units for number, part in enumerate(finished_parts(unit))]
    documents: Counter[str] = Counter()
    hashes: dict[str, str] = {}
    messages: list[str] = []
    for _, _, part in parts:
        documents.update(part["documents_of"])
        hashes |= part["source_sha256"]
        messages += part["messages"]
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
            for name in ("documents", "tokens", "bytes", "repeated_targets", "records")
        } | {"lengths_size": path.stat().st_size, "lengths_sha256": sha256_of(path), "shards": shards}
    if manifest["train"]["documents"] == 0:
        raise UserError("the input has no training document; give more, or a smaller --validation_fraction")
    write_file(output / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    return manifest


# Units over processes


class _Counters:
    """Progress of all processes, and the sign to stop.

    Args:
      context: makes what the processes share.
      shown: called now and then, in the process that counts.
    """

    def __init__(self, context: Any = multiprocessing, shown: Callable[["_Counters"], None] | None = None):
        self.values = context.Array("q", 3)
        self.parent, self._shown = os.getpid(), shown
        self._documents = self._size = 0
        self._last = 0.0

    def add(self, documents: int, size: int) -> None:
        """Counts documents, and bytes of input; others see it now and then."""
        self._documents += documents
        self._size += size
        now = time.monotonic()
        if now - self._last > 0.2:
            self.flush()
            self._last = now

    def flush(self) -> None:
        """Lets other processes see all that was counted."""
        with self.values.get_lock():
            self.values[0] += self._documents
            self.values[1] += self._size
        self._documents = self._size = 0
        if self._shown is not None:
            self._shown(self)

    def stop(self) -> None:
        """Ends the work of all processes."""
        self.values[2] = 1

    def check(self) -> None:
        """Raises :class:`Stopped` if the work is over, or the parent is gone."""
        if self.values.get_obj()[2] or (os.getpid() != self.parent and os.getppid() != self.parent):
            raise Stopped


_Work = Callable[..., None]
_process: tuple[_Counters, Tokenizer]  # of a worker, set when it starts


def _start(counters: _Counters, proto: bytes) -> None:
    global _process
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops the work
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _process = counters, Tokenizer(proto)


def _end_with_parent() -> None:
    # A worker that waits for work does not notice that its parent was killed.
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _work(work: _Work, unit: Unit) -> None:
    counters, tokenizer = _process
    try:
        _apply(work, unit, tokenizer, counters)
    finally:
        counters.flush()


def _apply(work: _Work, unit: Unit, tokenizer: Tokenizer, counters: _Counters) -> None:
    if work is digest_unit:
        work(unit, counters)
    else:
        work(unit, tokenizer, counters)


def _run(
    name: str,
    work: _Work,
    units: Sequence[Unit],
    plan: Plan,
    tokenizer: Tokenizer,
    processes: int,
    quiet: bool,
) -> None:
    """Does ``work`` on all units."""
    left = [unit for unit in units if work is digest_unit or not is_finished(unit)]
    undone = {unit.number for unit in left}
    finished = [unit for unit in units if unit.number not in undone]
    before = [part for unit in finished for part in finished_parts(unit)]
    bad = sum(part["bad"] for part in before)
    if units and work is not digest_unit:
        messages = [part["last_message"] for part in before if part["last_message"]]
        check_bad(bad, units[0].max_bad, messages[-1] if messages else "")
    finished_size = sum(plan.sizes[unit.number] for unit in finished)
    bar = tqdm(
        total=sum(plan.sizes[unit.number] for unit in units),
        initial=finished_size,
        desc=name,
        unit="B",
        unit_scale=True,
        file=sys.stderr,
        disable=quiet or not left,
        mininterval=1,
    )
    with bar:
        began = time.monotonic()

        def show(counters: _Counters) -> None:
            documents, size, _ = counters.values[:]
            rate = documents / max(time.monotonic() - began, 1e-3)
            bar.set_postfix_str(f"{documents:,} documents, {rate:,.0f}/s", refresh=False)
            bar.update(finished_size + size - bar.n)

        if processes == 1:
            counters = _Counters(shown=show)
            for unit in left:
                _apply(work, unit, tokenizer, counters)
                counters.flush()
                bad = _count_bad(unit, work, bad)
            return
        context = multiprocessing.get_context("spawn")
        counters = _Counters(context)
        pool = concurrent.futures.ProcessPoolExecutor(
            min(processes, max(len(left), 1)), context, _start, (counters, tokenizer.proto)
        )
        try:
            futures = {pool.submit(_work, work, unit): unit for unit in left}
            waiting = set(futures)
            while waiting:
                done, waiting = concurrent.futures.wait(waiting, 0.5, concurrent.futures.FIRST_COMPLETED)
                show(counters)
                for future in done:
                    future.result()
                    bad = _count_bad(futures[future], work, bad)
        except BrokenProcessPool as e:
            raise MachineError(
                "a process of the preparation was killed, perhaps for want of memory; the same command goes "
                "on from the last finished part; fewer --processes need less"
            ) from e
        finally:
            counters.stop()
            pool.shutdown(cancel_futures=True)


def _count_bad(unit: Unit, work: _Work, bad: int) -> int:
    if work is digest_unit:
        return 0
    parts = finished_parts(unit)
    found = bad + sum(part["bad"] for part in parts)
    message = next((part["last_message"] for part in reversed(parts) if part["last_message"]), "")
    check_bad(found, unit.max_bad, message)
    return found
