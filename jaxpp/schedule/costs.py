"""What operations cost: seconds and bytes per stage, as typed records. Read by the simulator and the planner."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxpp.schedule.table import Cell, Kind, Schedule


@dataclass(frozen=True)
class StageCosts:
    """One stage, one microbatch."""

    forward_s: float
    input_gradient_s: float  # B
    weight_gradient_s: float  # W
    recompute_s: float = 0.0  # R
    fused_s: float = -1.0  # D; -1: B and W one after the other
    activation_bytes: int = 1  # held from the forward pass to the end of the backward pass
    weight_bytes: int = 1
    kept_bytes: int = 0  # of the activations also until R, where the table recomputes, beside the stage's input

    def seconds(self, kind: Kind) -> float:
        """Return the duration of one operation."""
        return {
            "F": self.forward_s,
            "B": self.input_gradient_s,
            "W": self.weight_gradient_s,
            "R": self.recompute_s,
            "D": self.fused_s if self.fused_s >= 0 else self.input_gradient_s + self.weight_gradient_s,
        }[kind]


@dataclass(frozen=True)
class Costs:
    """All stages, and the boundaries between them.

    Args:
        stages: one record per stage.
        transfer_s: seconds from the end of an operation to the start of the one that needs its result on another rank;
            one number per boundary, or one for all.
        transfer_bytes: of a boundary tensor, likewise.
        overlap: duration of a pair of a forward and a backward pass, over their sum.
    """

    stages: tuple[StageCosts, ...]
    transfer_s: tuple[float, ...] = (0.0,)
    transfer_bytes: tuple[int, ...] = field(default=(1,))
    overlap: float = 1.0

    def seconds(self, cell: Cell) -> float:
        """Return the duration of a cell."""
        total = sum(self.stages[op.stage].seconds(op.kind) for op in cell)
        return total * self.overlap if len(cell) > 1 and any(op.kind == "F" for op in cell) else total

    def transfer(self, boundary: int) -> float:
        """Return the seconds of a transfer between stages ``boundary`` and ``boundary + 1``."""
        return self.transfer_s[boundary if len(self.transfer_s) > 1 else 0]

    def kept_bytes(self, stage: int) -> int:
        """Return what is held from F to R where the table recomputes: the stage's input, and what it keeps besides.

        The first stage reads tokens, which count as nothing.
        """
        boundary = stage - 1 if len(self.transfer_bytes) > 1 else 0
        received = self.transfer_bytes[boundary] if stage else 0
        return min(self.stages[stage].kept_bytes + received, self.stages[stage].activation_bytes)


def unit_costs(
    schedule: Schedule, forward: float = 1.0, input_gradient: float = 1.0, weight_gradient: float = 1.0,
    recompute: float = 0.0, transfer_s: float = 0.0,
) -> Costs:  # fmt: skip
    """Return costs in units of a device's share: a stage costs ``1 / stages per rank`` of them.

    With the defaults F = B = W = 1, so D = 2, and nothing for transfers. A rank that holds the model twice (Chimera,
    DualPipe) runs each of its stages for a part of the microbatches: a stage then is a whole share.

    Args:
        schedule: whose stages are priced.
        forward: F.
        input_gradient: B.
        weight_gradient: W.
        recompute: R.
        transfer_s: of each boundary that lies between two ranks.
    """
    share = schedule.num_ranks / schedule.num_stages
    stage = StageCosts(forward * share, input_gradient * share, weight_gradient * share, recompute * share)
    return Costs((stage,) * schedule.num_stages, (transfer_s,))
