"""One rank of torch's pipeline in a process of its own, in torch's own environment (`tests/bench/pipelines.py`)."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import torch.distributed as dist  # pyright: ignore[reportMissingImports]
from torch.distributed import pipelining  # pyright: ignore[reportMissingImports]

# What `PipelineStage` calls; there is no public door to the two halves of a backward pass.
from torch.distributed.pipelining._backward import (  # pyright: ignore[reportMissingImports]
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)

from tests.bench.pipeline_case import CHUNKS, EPSILON, RANKS, Case, serve

KINDS = {
    "gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B, "zb-h1": pipelining.ScheduleInterleavedZeroBubble,
}  # fmt: skip
"""torch's schedules by our names; its interleaved zero-bubble schedule with one stage per rank is ZB-H1."""


class Layer(torch.nn.Module):
    """A residual layer."""

    def __init__(self, case: Case, index: int):
        """Take the weights of a layer."""
        super().__init__()
        self.norm = torch.nn.RMSNorm(case.width, eps=EPSILON, elementwise_affine=False)
        self.up = torch.nn.Linear(case.width, case.hidden, bias=False)
        self.down = torch.nn.Linear(case.hidden, case.width, bias=False)
        self.act = torch.nn.GELU(approximate="tanh")
        for name, value in case.weights(index).items():
            getattr(self, name).weight.data.copy_(torch.from_numpy(value.T.copy()))

    def forward(self, h: Any) -> Any:
        """Return the output ``[rows, width]``."""
        return h + self.down(self.act(self.up(self.norm(h))))


class Part(torch.nn.Module):
    """A stage."""

    def __init__(self, case: Case, stage: int, num_stages: int):
        """Take the weights of a stage."""
        super().__init__()
        self.scale = None if stage else torch.nn.Parameter(torch.from_numpy(case.scale()))
        self.layers = torch.nn.Sequential(*(Layer(case, index) for index in case.layers(stage, num_stages)))

    def forward(self, x: Any) -> Any:
        """Return the output ``[rows, width]``."""
        return self.layers(x if self.scale is None else x * self.scale)


def loss_of(y: Any, target: Any) -> Any:
    """Return the sum of squares."""
    return torch.sum((y - target) ** 2)


class Rank:
    """This process's rank.

    Args:
        case: the work.
        rank: which.
    """

    def __init__(self, case: Case, rank: int):
        """Read the batch."""
        self.case, self.rank = case, rank
        self.batch = {name: torch.from_numpy(value) for name, value in case.batch().items()}
        self.boundary = torch.from_numpy(case.boundary())

    @cache  # noqa: B019
    def parts(self, schedule: str) -> dict[int, Part]:
        """Return this rank's stages."""
        count = RANKS * CHUNKS[schedule]
        return {stage: Part(self.case, stage, count) for stage in range(self.rank, count, RANKS)}

    @cache  # noqa: B019
    def pipeline(self, schedule: str) -> Any:
        """Return torch's schedule over this rank's stages."""
        count, device = RANKS * CHUNKS[schedule], torch.device("cpu")
        known = [pipelining.PipelineStage(p, s, count, device) for s, p in self.parts(schedule).items()]
        single = schedule in ("gpipe", "1f1b")
        return KINDS[schedule](
            known[0] if single else known, self.case.num_microbatches, loss_fn=loss_of, scale_grads=False
        )

    def _clear(self, schedule: str) -> list[Any]:
        weights = [weight for part in self.parts(schedule).values() for weight in part.parameters()]
        for weight in weights:
            weight.grad = None
        return weights

    def step(self, schedule: str, count: int) -> dict[str, Any]:
        """Run whole steps; tell when each started and ended, the loss, and the square of the gradient's norm."""
        pipeline, spans, losses, weights = self.pipeline(schedule), [], [], []
        is_last = self.rank == RANKS - 1
        for _ in range(count):
            weights, losses = self._clear(schedule), []
            dist.barrier()
            start = time.perf_counter()
            inputs = () if self.rank else (self.batch["x"],)
            pipeline.step(*inputs, **({"target": self.batch["target"], "losses": losses} if is_last else {}))
            spans.append((start, time.perf_counter()))
        squares = sum(float(weight.grad.double().square().sum()) for weight in weights)
        return {"spans": spans, "loss": sum(float(loss.detach()) for loss in losses), "squares": squares}

    def alone(self, schedule: str, seconds: float, orders: Sequence[Sequence[tuple[str, int, int]]]) -> dict[str, Any]:
        """Run this rank's operations back to back for some time; tell how long each pass took."""
        end, spans = time.perf_counter() + seconds, []
        while not spans or time.perf_counter() < end:
            self._clear(schedule)
            run = Alone(self, schedule)
            start = time.perf_counter()
            for kind, stage, microbatch in orders[self.rank]:
                getattr(run, kind)(stage, microbatch)
            spans.append((start, time.perf_counter()))
        return {"spans": spans}


class Alone:
    """One pass through a rank's operations: what others would send is there from the start."""

    def __init__(self, rank: Rank, schedule: str):
        """Cut the batch."""
        self.parts, self.boundary, self.last = rank.parts(schedule), rank.boundary, RANKS * CHUNKS[schedule] - 1
        self.x, self.target = (rank.batch[name].chunk(rank.case.num_microbatches) for name in ("x", "target"))
        self.kept: dict[tuple[int, int], Any] = {}

    def F(self, stage: int, microbatch: int) -> None:  # noqa: N802
        """Forward."""
        x = self.boundary.detach().requires_grad_() if stage else self.x[microbatch]
        y = self.parts[stage](x)
        self.kept[stage, microbatch] = x, loss_of(y, self.target[microbatch]) if stage == self.last else y

    def _taken(self, stage: int, microbatch: int) -> tuple[Any, Any, Any]:
        x, y = self.kept.pop((stage, microbatch))
        return (y,), None if stage == self.last else (self.boundary,), (x,)

    def D(self, stage: int, microbatch: int) -> None:  # noqa: N802
        """Backward."""
        y, gradient, x = self._taken(stage, microbatch)
        stage_backward(y if gradient else y[0], gradient, x)

    def B(self, stage: int, microbatch: int) -> None:  # noqa: N802
        """Input gradient: nothing on the first stage, where torch's W does it all."""
        if stage:
            y, gradient, x = self._taken(stage, microbatch)
            self.kept[stage, microbatch] = stage_backward_input(y, gradient, x, self.parts[stage].parameters())[1]

    def W(self, stage: int, microbatch: int) -> None:  # noqa: N802
        """Weight gradient."""
        if stage:
            stage_backward_weight(self.parts[stage].parameters(), self.kept.pop((stage, microbatch)))
        else:
            self.D(stage, microbatch)


def main() -> None:
    """Serve."""
    request = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    if request["connected"]:
        address = f"tcp://{os.environ['JAXPP_COORDINATOR_ADDRESS']}"
        dist.init_process_group("gloo", init_method=address, rank=request["rank"], world_size=RANKS)
    rank = Rank(Case(**request["case"]), request["rank"])
    serve({"step": rank.step, "alone": rank.alone})


if __name__ == "__main__":
    main()
