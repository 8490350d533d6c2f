"""Work on units, in this process or spread over several."""

import concurrent.futures
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

from tqdm import tqdm

from cplm_jax.data.preparation.units import Progress, Stopped, Unit
from cplm_jax.data.tokenizer import Tokenizer
from cplm_jax.errors import MachineError

Work = Callable[[Unit, Tokenizer, Progress], None]


class Job(NamedTuple):
    """What is to be done to some units."""

    name: str
    """What the progress bar says."""
    work: Work
    """Done to each unit, in a process that may be another; a function of a module."""
    left: list[Unit]
    """Units that it is to be done to."""
    sizes: dict[int, int]
    """Bytes of all units, done before or not, by their number."""
    finished: Callable[[Unit], None] = lambda _: None
    """Called in this process after each unit; may raise to end the job."""


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


def _work(work: Work, unit: Unit) -> None:
    counters, tokenizer = _process
    try:
        work(unit, tokenizer, counters)
    finally:
        counters.flush()


def run(job: Job, tokenizer: Tokenizer, processes: int, quiet: bool) -> None:
    """Does a job.

    Args:
      job: what is to be done.
      tokenizer: for the work.
      processes: to work in.
      quiet: whether to show no progress bar.

    Raises:
      UserError: as the work or ``job.finished`` raises it.
      MachineError: if a process was killed.
    """
    done_before = sum(job.sizes.values()) - sum(job.sizes[unit.number] for unit in job.left)
    bar = tqdm(
        total=sum(job.sizes.values()),
        initial=done_before,
        desc=job.name,
        unit="B",
        unit_scale=True,
        file=sys.stderr,
        disable=quiet or not job.left,
        mininterval=1,
    )
    with bar:
        began = time.monotonic()

        def show(counters: _Counters) -> None:
            documents, size, _ = counters.values[:]
            rate = documents / max(time.monotonic() - began, 1e-3)
            if documents:
                bar.set_postfix_str(f"{documents:,} documents, {rate:,.0f}/s", refresh=False)
            bar.update(done_before + size - bar.n)

        if processes == 1:
            counters = _Counters(shown=show)
            for unit in job.left:
                job.work(unit, tokenizer, counters)
                counters.flush()
                job.finished(unit)
            return
        context = multiprocessing.get_context("spawn")
        counters = _Counters(context)
        pool = concurrent.futures.ProcessPoolExecutor(
            min(processes, max(len(job.left), 1)), context, _start, (counters, tokenizer.proto)
        )
        try:
            futures = {pool.submit(_work, job.work, unit): unit for unit in job.left}
            waiting = set(futures)
            while waiting:
                done, waiting = concurrent.futures.wait(waiting, 0.5, concurrent.futures.FIRST_COMPLETED)
                show(counters)
                for future in done:
                    future.result()
                    job.finished(futures[future])
        except BrokenProcessPool as e:
            raise MachineError(
                "a process of the preparation was killed, perhaps for want of memory; the same command goes "
                "on from the last finished part; fewer --processes need less"
            ) from e
        finally:
            counters.stop()
            pool.shutdown(cancel_futures=True)
