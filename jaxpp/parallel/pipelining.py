"""How the ranks of mesh axis ``stage`` work together, as plain config, and the table that follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxpp.names import unknown
from jaxpp.schedule import SCHEDULES, Schedule, build
from jaxpp.schedule.recompute import recomputing

SPMD = ("gpipe", "interleaved", "zb-h1", "zb-h2", "1f1b")
"""Schedules that one program for all ranks can run; the first two by plain differentiation, and by default."""

DIFFERENTIATED = SPMD[:2]


@dataclass(frozen=True)
class PipelineConfig:
    """How the ranks of mesh axis ``stage`` work together."""

    schedule: str = "gpipe"  # gpipe 1f1b eager-1f1b interleaved zb-h1 zb-h2 zb-v chimera dualpipe dualpipe-v hanayo ...
    chunks: int = 0  # stages that each rank runs for a microbatch; 0: as many as the schedule needs
    microbatches: int = 0  # parts of a batch that are under way at once; 0: as many as ranks
    executor: Literal["auto", "spmd", "mpmd"] = "auto"  # one program for all ranks (auto: gpipe, interleaved), or one
    # per stage and operation on its rank's own devices (any schedule)
    cuts: tuple[int, ...] = ()  # mpmd: layers of each stage, in order of the model; empty: as even as may be
    remat: Literal["none", "full", "all-but-last"] = "none"  # mpmd: stages whose forward pass is run again

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(unknown("plan.pipeline.schedule: unknown", self.schedule, SCHEDULES))
        if self.chunks < 0 or self.microbatches < 0 or min(self.cuts, default=1) < 1:
            raise ValueError(
                f"plan.pipeline: chunks = {self.chunks}, microbatches = {self.microbatches}, cuts = {list(self.cuts)}: "
                "chunks and microbatches of 0 or more, and cuts of 1 layer or more, are needed"
            )
        if self.executor == "spmd":
            self._check_spmd()
        if self.schedule == "merak" and self.remat != "none":
            raise ValueError(f"plan.pipeline.remat = {self.remat}: schedule merak has its own recomputation; drop it")

    def _check_spmd(self) -> None:
        if self.schedule not in SPMD:
            raise ValueError(
                f"plan.pipeline.executor = spmd does not run {self.schedule}, only {' '.join(SPMD)}; "
                "executor=mpmd runs every schedule"
            )
        if self.schedule != "interleaved" and self.chunks > 1:
            raise ValueError(
                f"plan.pipeline.chunks = {self.chunks}: {self.schedule} has 1; schedule interleaved takes more"
            )
        for name in ("cuts", "remat"):
            if getattr(self, name) not in ((), "none"):
                raise ValueError(
                    f"plan.pipeline.{name} is for executor=mpmd; in one program all stages are alike: "
                    + ("drop the cuts" if name == "cuts" else "use plan.remat")
                )

    @property
    def is_mpmd(self) -> bool:
        """Whether each stage and operation is a program of its own."""
        if self.executor == "auto":
            return self.schedule not in DIFFERENTIATED or bool(self.cuts) or self.remat != "none"
        return self.executor == "mpmd"

    @property
    def is_differentiated(self) -> bool:
        """Whether one program is differentiated as a whole, and no table is walked."""
        return not self.is_mpmd and self.schedule in DIFFERENTIATED

    def num_chunks(self) -> int:
        """Return the chunks of each rank in one program: 1, or of interleaved 2 where nothing is said."""
        return self.chunks or (2 if self.schedule == "interleaved" else 1)

    def table(self, num_ranks: int) -> Schedule:
        """Return the schedule's table.

        Raises:
            ValueError: the schedule does not exist for these numbers; what would do is named.
        """
        count = self.microbatches or num_ranks
        try:
            made = build(self.schedule, num_ranks, count, self.chunks or None)
        except ValueError as error:
            raise ValueError(f"plan.pipeline: {error}") from None
        last = made.num_stages - 1
        again = {"none": (), "full": range(last + 1), "all-but-last": range(last)}[self.remat]
        return recomputing(made, again)
