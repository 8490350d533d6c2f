"""SIGINT and SIGTERM: a request to save and stop, agreed on by all processes."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class StopRequest:
    """While active, turns the first SIGINT or SIGTERM into a flag; a second SIGINT interrupts at once.

    Attributes:
      signal: the signal that arrived, or ``None``.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = self.signal or signal.Signals(number)

    def __enter__(self) -> "StopRequest":
        # Python delivers signals to the main thread alone; a loop run elsewhere cannot ask for them.
        if threading.current_thread() is threading.main_thread():
            self._previous = {s: signal.signal(s, self._handle) for s in self._SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


class StopAgreement:
    """Lets all processes stop after the same step.

    With several processes each contributes its flag to a small all-reduce, which is read one
    step later so that no step waits for it.
    """

    def __init__(self, request: StopRequest, mesh: Mesh):
        self._request = request
        self._several = jax.process_count() > 1
        self._pending: jax.Array | None = None
        self._sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._shape = (mesh.size,)
        self._any = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def stop(self) -> bool:
        """Returns whether to stop now; every process must call it once a step."""
        if not self._several:
            return self._request.signal is not None
        mine = np.full((1,), self._request.signal is not None, np.int32)
        flags = jax.make_array_from_callback(self._shape, self._sharding, lambda _: mine)
        previous, self._pending = self._pending, self._any(flags)
        return previous is not None and bool(previous)
