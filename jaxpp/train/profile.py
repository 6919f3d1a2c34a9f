"""What a run's model costs on the devices that it will train on, layer by layer, for `jaxpp schedule compare`.

A few layers stand for all: every rank runs, at the same time as the others, a first stage of k layers, two in the
middle of k and of 2 k, and a last one. Differences between them are what k layers, the embedding and the head cost.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpp.parallel import bytes_per_device
from jaxpp.pipeline import CutModel, Pipeline, balanced_cuts, cut_model, make_pipeline, make_places
from jaxpp.pipeline.batch import microbatch_shapes
from jaxpp.pipeline.timing import measure, time_transfer
from jaxpp.schedule import Costs, Op, Schedule, StageCosts
from jaxpp.schedule.layer_costs import LayerCosts, ModelCosts, Transfer
from jaxpp.schedule.table import singles
from jaxpp.train.config import Run
from jaxpp.train.optimizer import make_optimizer
from jaxpp.train.program import cast_weights
from jaxpp.train.session import check

NUM_STAGES = 4
LEAST_LAYERS = 5  # of the stages: one, one, two and one
# In the order of `LayerCosts`.
TIMES = ("forward_s", "input_gradient_s", "weight_gradient_s", "recompute_s", "fused_s")
BYTES = ("activation_bytes", "weight_bytes")


@dataclass(frozen=True)
class _Sample:
    """The layers that stand for the model's.

    Args:
        build: draws them, with embedding and head.
        num_layers: of the whole model.
        cuts: layers of the four stages.
    """

    build: Callable[[nnx.Rngs], nnx.Module]
    num_layers: int
    cuts: tuple[int, ...]


def profile(run: Run, repeats: int = 10) -> ModelCosts:
    """Measure what the layers, the embedding, the head and a transfer of a run cost, for one microbatch.

    The microbatch has the rows that the run's plan gives it, of random tokens; weights are drawn as the run draws
    them. All of the plan holds (mesh, compute dtype, remat, kernels). Layers count as alike: those that the model
    begins with are measured. Bytes are those on one device.

    Args:
        run: its mesh may have no axis ``stage``; it then is one rank, and a transfer is one between two of its devices.
        repeats: samples of the longest operation.

    Returns:
        The same on every process; all processes make the same call. No time is below 0, as noise could make it.

    Raises:
        ValueError: a run that cannot work, or a model that cannot be cut into stages.

    Cost: on each rank, weights and summed gradients of 5 layers (10 where it will hold 5 or more, with the optimizer's
        state), embedding and head, and what these keep of one microbatch; 20 programs are compiled for each rank.
    """
    check(run)
    ranks = run.plan.layout().mesh.shape.get("stage", 1)
    rows = _rows(run, ranks)
    sample, places = _sample(run, ranks), make_places(run.plan, ranks)
    prepare = partial(cast_weights, dtype=run.plan.dtype())
    cut = cut_model(nnx.eval_shape(lambda: sample.build(nnx.Rngs(0))), sample.cuts, prepare)
    pipeline = make_pipeline(cut.stages, _table(ranks), places)
    params = pipeline.lay_out(_draw(sample, cut, run.train.seed))
    batch = _batch(run, rows * 2 * ranks)
    costs = measure(pipeline, params, batch, repeats=repeats, recompute=True)
    transfer, how = _transfer(pipeline, batch, repeats)
    layer, embedding, head = _apart(costs, sample)
    device = places[0].mesh.devices.flat[0]
    measured = {
        "device": f"{ranks * places[0].mesh.size} x {device.device_kind}",
        "jax": jax.__version__,
        "mesh": run.plan.mesh,
        "microbatch": f"{rows} rows x {run.data.seq_len} tokens",
        "compute_dtype": run.plan.compute_dtype,
        "remat": run.plan.remat,
        "transfer": how,
    }
    return ModelCosts(
        (dataclasses.replace(layer, repeat=sample.num_layers),), embedding, head, transfer,
        state_per_weight=_state_per_weight(run), measured=measured,
    )  # fmt: skip


def _rows(run: Run, ranks: int) -> int:
    """Return the rows of a microbatch.

    Raises:
        ValueError: the batch does not split into so many.
    """
    own = run.plan.pipeline.microbatches or ranks
    parts, size = own * run.plan.microbatches, run.data.batch_size
    if size % parts:
        low, high = size // parts * parts, (size // parts + 1) * parts
        sizes = f"{low} or {high}" if low else str(high)
        raise ValueError(
            f"data.batch_size {size} does not split into {parts} microbatches (plan.pipeline.microbatches "
            f"{own} x plan.microbatches {run.plan.microbatches}); {sizes} rows would"
        )
    return size // parts


def _sample(run: Run, ranks: int) -> _Sample:
    """Choose the layers to measure; of a config that cannot be made shallower, all."""
    names = [field.name for field in dataclasses.fields(run.model)] if dataclasses.is_dataclass(run.model) else []
    model: Any = run.model
    if "num_layers" in names:
        few = 2 if model.num_layers // ranks >= LEAST_LAYERS else 1
        shallow = dataclasses.replace(model, num_layers=few * LEAST_LAYERS)
        return _Sample(shallow.build, model.num_layers, (few, few, 2 * few, few))
    blocks = nnx.state(nnx.eval_shape(lambda: model.build(nnx.Rngs(0))).blocks)
    count = jax.tree.leaves(blocks)[0].shape[0]
    if count < LEAST_LAYERS:
        raise ValueError(
            f"{type(model).__name__} has {count} layers and no field num_layers to change; to tell a layer from "
            f"embedding and head, {LEAST_LAYERS} or more are needed"
        )
    return _Sample(model.build, count, (1, 1, 2, count - 4))


def _table(ranks: int) -> Schedule:
    """Return a schedule in which each rank runs all stages by itself: a microbatch fused, and one split."""
    stages, orders = range(NUM_STAGES), []
    for rank in range(ranks):
        one, other = 2 * rank, 2 * rank + 1
        order = [Op("F", stage, j) for j in (one, other) for stage in stages]
        order += [Op("D", stage, one) for stage in reversed(stages)]
        order += [Op(kind, stage, other) for stage in reversed(stages) for kind in ("B", "W")]
        orders.append(order)
    placement = tuple((rank,) * NUM_STAGES for rank in range(ranks))
    return Schedule("profile", NUM_STAGES, 2 * ranks, singles(orders), placement, tuple(np.repeat(range(ranks), 2)))


def _draw(sample: _Sample, cut: CutModel, seed: int) -> list[Any]:
    """Draw the weights of each stage on one device of this process, and return them on the host."""

    def draw() -> Any:
        return nnx.split(sample.build(nnx.Rngs(seed)), nnx.Param, ...)[1]

    return [jax.tree.map(np.asarray, one) for one in cut.split(jax.jit(draw)())]


def _batch(run: Run, rows: int) -> dict[str, np.ndarray]:
    """Return rows of random tokens, each one document."""
    draw, shape = np.random.default_rng(0), (rows, run.data.seq_len)
    tokens = draw.integers(0, run.model.vocab_size, (rows, run.data.seq_len + 1), np.int32)
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segments": np.ones(shape, np.int32),
        "positions": np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
        "weights": np.ones(shape, np.float32),
    }


def _apart(costs: Costs, sample: _Sample) -> tuple[LayerCosts, LayerCosts, LayerCosts]:
    """Return what one layer, the embedding and the head cost.

    What a stage takes whatever its layers (to hand an operation over) is in none of the times; what it keeps whatever
    its layers (rotary tables, its result) is in the bytes of embedding and head, as if there were two stages.
    """
    first, middle, double, last = costs.stages
    few, rest = sample.cuts[1], sample.cuts[-1]

    def layer(name: str) -> float:
        return max(getattr(double, name) - getattr(middle, name), 0.0) / few

    def beside(stage: StageCosts, count: int) -> LayerCosts:
        # A difference of two times that are nearly the same may come out below 0: it is then too small to be measured.
        times = [getattr(stage, name) - getattr(middle, name) - (count - few) * layer(name) for name in TIMES]
        return _record(times, [int(getattr(stage, name) - count * layer(name)) for name in BYTES])

    one = _record([layer(name) for name in TIMES], [int(layer(name)) for name in BYTES])
    return one, beside(first, few), beside(last, rest)


def _record(times: Sequence[float], counts: Sequence[int]) -> LayerCosts:
    activation_bytes, weight_bytes = (max(count, 0) for count in counts)
    seconds = (max(time, 0.0) for time in times)
    return LayerCosts(*seconds, activation_bytes=activation_bytes, weight_bytes=weight_bytes)


def _transfer(pipeline: Pipeline, batch: Any, repeats: int) -> tuple[Transfer, str]:
    """Measure the tensor between two stages on its way to the next rank, and a single number; say between what."""
    executor, places = pipeline.executor, pipeline.places
    boundary = executor.operations(microbatch_shapes(executor, batch), None)[0, 0].y
    how = "from rank 0 to rank 1"
    if len(places) == 1 and places[0].mesh.size > 1:
        # No pipeline is chosen yet: what one device of the rank has of the tensor, on its way to another device.
        shares = [(leaf.sharding.shard_shape(leaf.shape), leaf.dtype) for leaf in boundary]  # type: ignore[union-attr]
        places = make_places("stage:2", 2, list(places[0].mesh.devices.flat[:2]))
        boundary = [jax.ShapeDtypeStruct(*share, sharding=places[0].layout.replicated()) for share in shares]
        how = "between two devices of the one rank"
    num_bytes = sum(map(bytes_per_device, boundary))
    if len(places) == 1:
        return Transfer(num_bytes), "not measured: there is one device"
    number = [jax.ShapeDtypeStruct((), jnp.float32, sharding=places[0].layout.replicated())]
    least, seconds = (time_transfer(leaves, places[0], places[1], repeats) for leaves in (number, boundary))
    latency = min(least, seconds)
    rate = num_bytes / (seconds - latency) if seconds > latency else math.inf
    return Transfer(num_bytes, rate, latency), how


def advised_cuts(costs: ModelCosts, ranks: int) -> tuple[int, ...]:
    """Return the cuts for one stage on each rank whose dearest stage is cheapest.

    Raises:
        ValueError: more ranks than layers.
    """

    def seconds(part: LayerCosts) -> float:
        return part.forward_s + part.input_gradient_s + part.weight_gradient_s

    layers = [seconds(part) for part in costs.layers for _ in range(part.repeat)]
    return balanced_cuts(layers, ranks, seconds(costs.embedding), seconds(costs.head))


def _state_per_weight(run: Run) -> float:
    """Return the bytes of weights, their summed gradients (fp32) and the optimizer's state over those of weights."""
    params = nnx.split(nnx.eval_shape(lambda: run.model.build(nnx.Rngs(0))), nnx.Param, ...)[1]
    state = jax.eval_shape(make_optimizer(run.optimizer).init, params)
    weights, moments = (sum(map(bytes_per_device, jax.tree.leaves(one))) for one in (params, state))
    gradients = sum(4 * math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    return (weights + gradients + moments) / weights
