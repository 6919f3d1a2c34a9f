"""The same weights and the same batch on every legal mesh of the devices at hand: do loss and gradients agree?

The oracle is one device.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxpp import tree
from jaxpp.data import open_data
from jaxpp.mesh import Device, MeshSpec
from jaxpp.parallel import Plan
from jaxpp.train.config import Run, active_experts
from jaxpp.train.optimizer import make_optimizer
from jaxpp.train.program import TrainState
from jaxpp.train.programs import AnyProgram, make_program
from jaxpp.train.session import check_vocabulary

AXES = ("data", "fsdp", "tensor")
ADDED = {"data": "zero1", "tensor": "sequence"}  # a scheme that may be added to that of its axis

TOLERANCES = {"float32": (1e-5, 2e-5), "bfloat16": (1e-3, 1e-1)}
"""Largest relative difference of the loss, and of any weight's gradient, by compute dtype.

fp32: sums in another order. bf16 has steps of 2^-8 = 0.4%: a partial sum that is reduced over devices is rounded once
more, and a gradient passes several such roundings (4e-5 and 3e-2 are seen on the 1m decoder), while the loss averages
them out. A bug smaller than this is found in fp32 alone.
"""

ROW = "{:<26} {:<34} {:>10} {:>10} {:>10}  {}"
HEADER = ROW.format("mesh", "schemes", "loss", "loss diff", "grad diff", "verdict")


def candidates(num_devices: int, axes: Sequence[str] = AXES) -> Iterator[Plan]:
    """Yield every mesh over these axes of this many devices, with every combination of schemes."""
    sizes = [n for n in range(num_devices, 0, -1) if num_devices % n == 0]
    for shape in itertools.product(sizes, repeat=len(axes)):
        if np.prod(shape) != num_devices:
            continue
        used = {axis: n for axis, n in zip(axes, shape, strict=True) if n > 1} or {"data": 1}
        extras = [ADDED[axis] for axis in used if axis in ADDED and used[axis] > 1]
        for chosen in itertools.product((False, True), repeat=len(extras)):
            added = [extra for extra, wanted in zip(extras, chosen, strict=True) if wanted]
            yield Plan(" ".join(f"{axis}:{n}" for axis, n in used.items()), (*used, *added))


def _axes(run: Run) -> tuple[str, ...]:
    """Return the axes to try: those of every model, and what its experts or the run's own pipeline bring in."""
    experts = ("expert",) if active_experts(run.model) else ()
    return (*AXES, *experts, *(("stage",) if "stage" in MeshSpec.parse(run.plan.mesh).axes else ()))


def _like(run: Run, plan: Plan) -> Plan:
    """Return the run's plan with another mesh and schemes; own rules, which name axes of its mesh, are left out."""
    return dataclasses.replace(run.plan, mesh=plan.mesh, schemes=plan.schemes, rules={})


def _program(run: Run, plan: Plan, devices: Sequence[Device]) -> AnyProgram:
    """Build a plan's program.

    Raises:
        ValueError: the layout cannot hold a weight, or the batch does not split.
    """
    program = make_program(run.model, make_optimizer(run.optimizer), plan, devices=devices)
    program.check_batch(run.data.batch_size, run.data.seq_len)
    _ = program.abstract_state  # checks every arrow against the layout
    return program


def _sort(run: Run, devices: Sequence[Device]) -> tuple[list[Plan], dict[str, str]]:
    """Return the legal plans, and why each of the other meshes is none."""
    legal, refused = [], {}
    axes = _axes(run)
    for plan in (_like(run, candidate) for candidate in candidates(len(devices), axes)):
        try:
            _program(run, plan, devices)
            legal.append(plan)
        except ValueError as error:
            refused.setdefault(plan.mesh, _short(str(error)))
    held = {plan.mesh for plan in legal}
    return legal, {mesh: reason for mesh, reason in refused.items() if mesh not in held}


def _short(reason: str, most: int = 80) -> str:
    """Keep what is wrong and leave the advice out."""
    first = " ".join(reason.split()).partition("; ")[0]
    return first if len(first) <= most else first[: most - 3] + "..."


def legal_plans(run: Run, num_devices: int) -> list[Plan]:
    """List the plans that lay this model and batch out on the first `num_devices` devices.

    Args:
        run: its model, batch and all of its plan but mesh, schemes and own rules.
        num_devices: devices to use, each of them.
    """
    return _sort(run, jax.devices()[:num_devices])[0]


def verify(run: Run, emit: Callable[[str], object], devices: Sequence[Device] | None = None) -> bool:
    """Compare loss and gradients of one batch on every legal plan with those on one device.

    Args:
        run: model, seed and data; the plan's mesh, schemes and rules are left aside.
        emit: takes each line of the table as soon as it is known.
        devices: the devices to use; all of them if None.

    Returns:
        Whether all plans agree, within `TOLERANCES`.

    Raises:
        ValueError: the run itself cannot work, or there are several processes.
    """
    devices = _local(devices)
    single = dataclasses.replace(_like(run, Plan("data:1")), microbatches=1)
    oracle, batch = _program(run, single, devices[:1]), _batch(run)
    legal, refused = _sort(run, devices)
    weights = jax.tree.map(np.asarray, dataclasses.replace(oracle.init(run.train.seed), optimizer=None))
    emit(HEADER)
    loss, gradients = _values(oracle, weights, batch)
    most = TOLERANCES[run.plan.compute_dtype]
    emit(ROW.format("data:1", "the oracle: one device", f"{loss:.6f}", *(f"<= {m:.0e}" for m in most), "allowed"))
    wrong = 0
    for plan in legal:
        found, others = _values(_program(run, plan, devices), weights, batch)
        differences = abs(found - loss) / abs(loss), largest_difference(others, gradients)
        agrees = all(d <= m for d, m in zip(differences, most, strict=True))  # false for a NaN
        wrong += not agrees
        emit(_row(plan, found, differences, agrees))
    for mesh, reason in refused.items():
        emit(f"{mesh:<26} skipped: {reason}")
    emit(_summary(len(legal), wrong, len(refused), run.plan.compute_dtype))
    return wrong == 0


def _local(devices: Sequence[Device] | None) -> list[Device]:
    if jax.process_count() > 1:
        raise ValueError(
            f"verify compares every mesh with one device, in one process; here are {jax.process_count()} processes; "
            "run it in one (cpu_devices=8 makes up eight devices)"
        )
    return list(devices) if devices is not None else jax.devices()


def _row(plan: Plan, loss: float, differences: tuple[float, float], agrees: bool) -> str:
    numbers = f"{loss:.6f}", *(f"{d:.1e}" for d in differences)
    return ROW.format(plan.mesh, " ".join(plan.scheme_names()), *numbers, "ok" if agrees else "DIFFERS")


def _summary(legal: int, wrong: int, refused: int, dtype: str) -> str:
    loss_most, gradient_most = TOLERANCES[dtype]
    result = f"{wrong} of {legal} plans DIFFER from one device" if wrong else f"all {legal} plans agree with one device"
    bounds = f"{dtype}: loss within {loss_most:.0e}, gradients within {gradient_most:.0e}, relative"
    return f"{result} ({bounds}); {refused} meshes skipped"


def _batch(run: Run) -> dict[str, np.ndarray]:
    """Return the first training batch of the run, whole, on the host."""
    data = open_data(run.data)
    check_vocabulary(run, data.vocab_size)
    with data.train(steps=1) as loader:
        return dict(next(loader))


def _values(program: AnyProgram, weights: TrainState, batch: Any) -> tuple[float, dict[str, np.ndarray]]:
    """Lay the weights out and return loss and gradients on the host, with one compile; nothing stays on the devices."""
    places = dataclasses.replace(program.shardings, optimizer=None)
    loss, gradients = program.loss_and_gradients(jax.device_put(weights, places), program.place(batch))
    values = float(loss), {path: np.asarray(x) for path, x in tree.named_leaves(gradients).items()}
    del loss, gradients
    gc.collect()
    return values


def largest_difference(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> float:
    """Return the largest difference of two gradients, ``max|a - b| / max|b|`` of the weight where it is largest."""
    each = [np.abs(found[p] - b).max() / max(np.abs(b).max(), np.finfo(np.float32).tiny) for p, b in wanted.items()]
    return float(np.max(each))
