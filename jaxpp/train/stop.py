"""Ctrl-C and SIGTERM: finish the step, save, leave. All processes stop at the same step."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class StopSignal:
    """Catches SIGINT and SIGTERM inside a ``with`` block; a second SIGINT interrupts at once."""

    def __init__(self, mesh: Mesh):
        """Prepare for a mesh; on several processes every step asks whether any of them was told to stop."""
        self._flag = False
        self._old: dict[int, Any] = {}
        self._pending: jax.Array | None = None
        everywhere = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._sharding, self._num_devices = everywhere, mesh.size
        self._any = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._old[number] = signal.signal(number, self._catch)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if self._flag and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._flag = True

    def agreed(self) -> bool:
        """Say whether to stop after this step; on several processes the answer is one call old, and the same on all."""
        if jax.process_count() == 1:
            return self._flag
        answer = self._pending is not None and bool(self._pending)
        mine = np.asarray([int(self._flag)], np.int32)
        flags = jax.make_array_from_callback((self._num_devices,), self._sharding, lambda _: mine)
        self._pending = self._any(flags)
        return answer
