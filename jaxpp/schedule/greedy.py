"""List scheduling: every rank runs what is ready, the backward pass first, within a limit of activations."""

from __future__ import annotations

from collections.abc import Sequence

from jaxpp.schedule.table import Op


def list_schedule(placement: Sequence[int], microbatches: int, limits: Sequence[int]) -> list[list[Op]]:
    """Return an order for each rank of F and D, all of them taken to last one tick and transfers none.

    Again and again the operation that can start first, over all ranks, is taken. Of those ready on a rank at once D
    goes before F, then the deeper stage, then the earlier microbatch. F is admitted only if the rank's limit leaves
    room for it *and* for the deeper stages of the microbatches that the rank has begun: without that reserve the early
    stages fill the memory, and the deeper stage of the same microbatch can never run.

    Args:
        placement: the rank of each stage.
        microbatches: parts of the batch.
        limits: most activations that each rank may hold; at least its number of stages.
    """
    ranks = _Ranks(placement, microbatches, limits)
    best = [ranks.candidate(rank) for rank in range(len(limits))]
    for _ in range(2 * len(placement) * microbatches):
        (start, _, _, op), rank = min((found, rank) for rank, found in enumerate(best) if found)
        for changed in ranks.run(rank, op, start):
            best[changed] = ranks.candidate(changed)
    return ranks.orders


class _Ranks:
    """What all ranks have done so far."""

    def __init__(self, placement: Sequence[int], microbatches: int, limits: Sequence[int]) -> None:
        self.placement, self.microbatches, self.limits = placement, microbatches, limits
        self.stages = [[s for s, at in enumerate(placement) if at == rank] for rank in range(len(limits))]
        self.free = [0] * len(limits)
        self.ends: dict[Op, int] = {}
        self.done = {kind: [0] * len(placement) for kind in ("F", "D")}
        self.orders: list[list[Op]] = [[] for _ in limits]

    def candidate(self, rank: int) -> tuple[int, int, int, Op] | None:
        """Return (start, D before F, deeper before not, operation) of what a rank would run next."""
        found = []
        for stage in self.stages[rank]:
            if (ready := self._ready(op := Op("D", stage, self.done["D"][stage]))) is not None:
                found.append((max(ready, self.free[rank]), 0, -stage, op))
            if (ready := self._ready(op := Op("F", stage, self.done["F"][stage]))) is not None:
                if self._admitted(rank, stage):
                    found.append((max(ready, self.free[rank]), 1, -stage, op))
        return min(found, default=None)

    def run(self, rank: int, op: Op, start: int) -> set[int]:
        """Append an operation; return the ranks for which something has changed."""
        self.orders[rank].append(op)
        self.done[op.kind][op.stage] += 1
        self.ends[op] = self.free[rank] = start + 1
        follower = op.stage + (1 if op.kind == "F" else -1)
        return {rank, self.placement[follower]} if 0 <= follower < len(self.placement) else {rank}

    def _ready(self, op: Op) -> int | None:
        if op.microbatch == self.microbatches:
            return None
        if op.kind == "F":
            return 0 if op.stage == 0 else self.ends.get(op._replace(stage=op.stage - 1))
        own = self.ends.get(op._replace(kind="F"))
        if own is None or op.stage == len(self.placement) - 1:
            return own
        after = self.ends.get(op._replace(stage=op.stage + 1))
        return None if after is None else max(own, after)

    def _admitted(self, rank: int, stage: int) -> bool:
        forward, backward = self.done["F"], self.done["D"]
        held = sum(forward[s] - backward[s] for s in self.stages[rank])
        reserve = sum(max(0, forward[stage] + 1 - forward[s]) for s in self.stages[rank] if s > stage)
        return held + 1 + reserve <= self.limits[rank]
