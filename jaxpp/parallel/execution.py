"""What holds while a model is traced: the layout, the remat policy, how layers are run.

Models ask for it by dim words alone (`constrain`, `residual`, and `jaxpp.parallel.product` for weights); outside of a
plan these change nothing. It is read at trace time only, so nothing of it exists when the step runs.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass

import jax

from jaxpp.parallel.layout import Layout
from jaxpp.parallel.pipelining import PipelineConfig


@dataclass(frozen=True, eq=False)  # by identity: it stands among the static parts of compiled functions
class Execution:
    """How to trace a model.

    Args:
        layout: where arrays live; None for a single device.
        remat: name of a recomputation policy (`jaxpp.nn.stack.REMAT`).
        layers: ``"scan"`` one compiled block over the stack, or ``"unroll"`` each block.
        attention: name of an attention kernel (`jaxpp.nn.attention.KERNELS`), or ``"auto"``.
        pipeline: how blocks run where the layout has axis ``stage``.
    """

    layout: Layout | None = None
    remat: str = "none"
    layers: str = "scan"
    attention: str = "auto"
    pipeline: PipelineConfig = PipelineConfig()


_NONE = Execution()
_CURRENT: contextvars.ContextVar[Execution] = contextvars.ContextVar("execution", default=_NONE)


def current() -> Execution:
    """Return the execution that holds now."""
    return _CURRENT.get()


@contextlib.contextmanager
def executing(execution: Execution) -> Iterator[None]:
    """Make `execution` hold inside a ``with`` block."""
    token = _CURRENT.set(execution)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def active_layout() -> Layout | None:
    """Return the layout that holds now, None where one device makes it idle; inside a pipeline, that of a stage."""
    layout = current().layout
    if layout is None or layout.mesh.size == 1:
        return None
    inside = jax.sharding.get_abstract_mesh()
    return layout.within(inside) if inside.manual_axes else layout


def constrain(x: jax.Array, dims: str) -> jax.Array:
    """Lay out an activation inside a block, e.g. ``constrain(q, "batch seq heads head_dim")``.

    Raises:
        ValueError: a size that does not divide (JAX itself would replicate it in silence).
    """
    layout = active_layout()
    if layout is None:
        return x
    return jax.lax.with_sharding_constraint(x, layout.sharding(dims.split(), x.shape, "inside", f"activation {dims}"))


def residual(x: jax.Array) -> jax.Array:
    """Lay out the residual stream ``[batch, seq, embed]``, between blocks."""
    layout = active_layout()
    if layout is None:
        return x
    dims = ("batch", "seq", "embed")
    return jax.lax.with_sharding_constraint(x, layout.sharding(dims, x.shape, "residual", "residual stream"))


def batch_shards(batch_size: int) -> int:
    """Return over how many shards a batch of this size is split inside a block; 1 if it does not divide."""
    layout = active_layout()
    parts = layout.num_shards("batch", "inside") if layout is not None else 1
    return parts if batch_size % parts == 0 else 1
