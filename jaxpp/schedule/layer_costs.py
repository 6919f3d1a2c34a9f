"""Costs of a model layer by layer, and their sum over the layers of each stage of a schedule.

A schedule may cut the model into four stages or into sixteen; what is measured once is a layer. Costs are of one
microbatch, in seconds and bytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from jaxpp.schedule.costs import Costs, StageCosts
from jaxpp.schedule.table import Schedule


@dataclass(frozen=True)
class LayerCosts:
    """One layer (or several equal ones in a row), the embedding, or the head.

    Args:
        forward_s: F.
        input_gradient_s: B.
        weight_gradient_s: W.
        recompute_s: R; as long as F where nothing is said.
        fused_s: D, both gradients in one operation; B + W where nothing is said.
        activation_bytes: held from the forward pass to the end of the backward pass.
        weight_bytes: of the weights alone.
        repeat: how many layers in a row cost this, each.
    """

    forward_s: float
    input_gradient_s: float
    weight_gradient_s: float
    recompute_s: float | None = None
    fused_s: float | None = None
    activation_bytes: int = 0
    weight_bytes: int = 0
    repeat: int = 1

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{entry.name} = {value}: 0 or more is needed")
        if self.repeat < 1:
            raise ValueError(f"repeat = {self.repeat}: 1 or more is needed")


@dataclass(frozen=True)
class Transfer:
    """A boundary tensor on its way to another rank: ``latency_s + bytes / bytes_per_s``.

    Args:
        bytes: of the tensor; 0: boundaries are free.
        bytes_per_s: of the link.
        latency_s: of a message of any size.
    """

    bytes: int = 0
    bytes_per_s: float = math.inf
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if self.bytes < 0 or not self.bytes_per_s > 0 or not (0 <= self.latency_s < math.inf):
            raise ValueError(
                f"bytes = {self.bytes}, bytes_per_s = {self.bytes_per_s}, latency_s = {self.latency_s}: "
                "bytes and latency of 0 or more and a rate above 0 are needed"
            )

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.latency_s + self.bytes / self.bytes_per_s


NOTHING = LayerCosts(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class ModelCosts:
    """A model's layers, its ends, and its boundaries.

    Args:
        layers: records, in the order of the model.
        embedding: what comes before the first layer, on the first stage.
        head: what comes after the last layer, the loss included, on the last stage.
        transfer: of the tensor between two stages, one way; its gradient is as large.
        overlap: duration of a forward and a backward operation that overlap, over their sum.
        state_per_weight: bytes held all the time per byte of weights: weights, gradients, optimizer state (AdamW in
            one precision: 4).
        measured: where these numbers come from: device, versions, shapes, command.
    """

    layers: tuple[LayerCosts, ...]
    embedding: LayerCosts = NOTHING
    head: LayerCosts = NOTHING
    transfer: Transfer = Transfer()
    overlap: float = 1.0
    state_per_weight: float = 4.0
    measured: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("layers is empty: one record or more is needed")
        if not 0.5 <= self.overlap <= 1:
            raise ValueError(f"overlap = {self.overlap}: from 0.5 (all of it) to 1 (nothing) is needed")
        if not 1 <= self.state_per_weight < math.inf:
            raise ValueError(f"state_per_weight = {self.state_per_weight}: 1 (weights alone) or more is needed")

    @property
    def num_layers(self) -> int:
        """Number of layers, repeated ones counted."""
        return sum(record.repeat for record in self.layers)


def even_cuts(num_layers: int, schedule: Schedule) -> tuple[int, ...]:
    """Return how many layers each stage of a schedule gets, as evenly as may be.

    What is left over goes to the ranks that have least of it, and to the middle of the model before its ends, which
    hold the embedding and the head as well.

    Raises:
        ValueError: a stage would be empty.

    Example:
        >>> from jaxpp.schedule import build
        >>> even_cuts(10, build("1f1b", 4, 8)), even_cuts(10, build("zb-v", 4, 8))
        ((2, 3, 3, 2), (1, 1, 2, 2, 1, 1, 1, 1))
    """
    num_stages = schedule.num_stages
    if num_layers < num_stages:
        raise ValueError(f"{num_layers} layers do not fill {num_stages} stages; at most {num_layers} stages do")
    each, left = divmod(num_layers, num_stages)
    more: Counter[int] = Counter()  # by rank
    open_stages = sorted(range(num_stages), key=lambda stage: abs(2 * stage - num_stages + 1))
    for _ in range(left):
        stage = min(open_stages, key=lambda stage: sum(more[ranks[stage]] for ranks in schedule.placement))
        open_stages.remove(stage)
        more.update(ranks[stage] for ranks in schedule.placement)
    return tuple(each + (stage not in open_stages) for stage in range(num_stages))


def costs_of(schedule: Schedule, model: ModelCosts, cuts: Sequence[int] | None = None) -> Costs:
    """Return what the stages of a schedule cost.

    Args:
        schedule: it says into how many stages the model is cut.
        model: what its layers cost.
        cuts: layers of each stage; as even as may be where nothing is said.

    Raises:
        ValueError: cuts that do not add up, or more stages than layers.
    """
    num_stages, num_layers = schedule.num_stages, model.num_layers
    cuts = even_cuts(num_layers, schedule) if cuts is None else tuple(cuts)
    if len(cuts) != num_stages or sum(cuts) != num_layers or min(cuts) < 1:
        even = "+".join(map(str, even_cuts(num_layers, schedule)))
        raise ValueError(
            f"cuts {'+'.join(map(str, cuts))} = {sum(cuts)} layers on {len(cuts)} stages; needed are {num_layers} "
            f"layers on {num_stages} stages, one each at least, e.g. {even}"
        )
    layers = [record for record in model.layers for _ in range(record.repeat)]
    starts = [sum(cuts[:stage]) for stage in range(num_stages)]
    parts = [layers[start : start + cut] for start, cut in zip(starts, cuts, strict=True)]
    parts[0].insert(0, model.embedding)
    parts[-1].append(model.head)
    stages = tuple(_sum(part) for part in parts)
    return Costs(stages, (model.transfer.seconds,), (model.transfer.bytes,), model.overlap)


def _sum(records: Sequence[LayerCosts]) -> StageCosts:
    def fused(record: LayerCosts) -> float:
        apart = record.input_gradient_s + record.weight_gradient_s
        return apart if record.fused_s is None else record.fused_s

    return StageCosts(
        forward_s=sum(record.forward_s for record in records),
        input_gradient_s=sum(record.input_gradient_s for record in records),
        weight_gradient_s=sum(record.weight_gradient_s for record in records),
        recompute_s=sum(record.forward_s if record.recompute_s is None else record.recompute_s for record in records),
        fused_s=sum(map(fused, records)),
        activation_bytes=sum(record.activation_bytes for record in records),
        weight_bytes=sum(record.weight_bytes for record in records),
    )
