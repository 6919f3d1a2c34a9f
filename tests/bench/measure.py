"""One measurement of the benchmark, in a process of its own: ``python -m tests.bench.measure '{"question": ...}'``.

Builds our step and the plain one from the same weights and prints one line of JSON. `tests/bench/run.py` starts it.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp import Plan, tree
from jaxpp.mesh import MeshSpec
from jaxpp.models import DecoderConfig
from jaxpp.train import OptimizerConfig, make_program
from jaxpp.train.optimizer import make_optimizer
from tests.bench import plain

LEARNING_RATE = 1e-3
NAMES = {
    "tokens": "tokens/table",
    "head": "head/kernel",
    "final_norm": "final_norm/scale",
    "blocks": {
        "attention_norm": "blocks/attention_norm/scale",
        **{name: f"blocks/attention/{name}/kernel" for name in ("query", "key", "value", "out")},
        "mlp_norm": "blocks/mlp_norm/scale",
        **{name: f"blocks/mlp/{name}/kernel" for name in ("gate", "up", "down")},
    },
}
Step = Callable[[Any], dict[str, Any]]
"""Trains on one host batch and returns ``loss`` and ``grad_norm``."""

TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}  # relative, of loss and gradient norm


@dataclass(frozen=True)
class Case:
    """What is run.

    Args:
        mesh: axes and sizes.
        dtype: to compute in.
        remat: policy of ours; the plain step recomputes all or nothing.
        layers: scan or unroll.
        model: fields of `DecoderConfig`.
        batch_size: rows.
        seq_len: tokens of a row.
    """

    mesh: str = "data:1"
    dtype: str = "float32"
    remat: str = "none"
    layers: str = "scan"
    model: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 8
    seq_len: int = 256

    def config(self) -> DecoderConfig:
        """The decoder, with grouped-query attention."""
        return DecoderConfig(**{"num_kv_heads": 2, **self.model})

    def batch(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Random tokens, one document a row."""
        tokens = np.random.default_rng(seed).integers(
            0, self.config().vocab_size, (self.batch_size, self.seq_len + 1), dtype=np.int32
        )
        positions = np.broadcast_to(np.arange(self.seq_len, dtype=np.int32), tokens[:, 1:].shape)
        weights = np.ones(positions.shape, np.float32)
        return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "positions": positions, "weights": weights}


@dataclass
class Runner:
    """A step with its state.

    Args:
        state: the training state.
        step: ``(state, batch on the devices) -> (state, metrics)``, jitted.
        place: puts a host batch on the devices.
    """

    state: Any
    step: Any
    place: Callable[[Any], Any]

    def __call__(self, batch: Any) -> dict[str, jax.Array]:
        """Train on one host batch."""
        self.state, metrics = self.step(self.state, self.place(batch))
        return metrics

    def compile(self, batch: Any) -> tuple[float, float, Any]:
        """Return seconds to trace and lower, seconds to compile, and the compiled step."""
        placed, start = self.place(batch), time.perf_counter()
        lowered = self.step.lower(self.state, placed)
        middle = time.perf_counter()
        compiled = lowered.compile()
        return middle - start, time.perf_counter() - middle, compiled


def ours(case: Case, loss: Any = None, drawn: bool = True) -> Runner:
    """Build our step; not `drawn`, its state is abstract, enough to compile."""
    optimizer = make_optimizer(OptimizerConfig(learning_rate=LEARNING_RATE, schedule="constant", warmup_steps=1))
    plan = Plan(mesh=case.mesh, remat=case.remat, layers=case.layers, compute_dtype=case.dtype)  # type: ignore[arg-type]
    devices = jax.devices()[: math.prod(MeshSpec.parse(case.mesh).ici.values())]
    program = make_program(case.config(), optimizer, plan, loss, devices)
    return Runner(program.init(0) if drawn else program.abstract_state, program.step, program.place)


def baseline(case: Case, weights: Any) -> Runner:
    """Build the plain step from the weights of our state."""
    named = tree.named_leaves(weights)
    host = jax.tree.map(lambda name: np.array(named[name]), NAMES)
    config = case.config()
    shape = plain.Shape(
        config.num_layers, config.head_dim, config.rope_base, config.norm_epsilon, case.dtype,
        case.remat != "none", case.layers == "scan",
    )  # fmt: skip
    mesh = plain.make_mesh(**MeshSpec.parse(case.mesh).ici)
    state, step = plain.make_step(host, shape, mesh, LEARNING_RATE)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(plain.BATCH))
    return Runner(state, step, lambda batch: jax.device_put(batch, rows))


def pair(case: Case) -> tuple[Runner, Runner]:
    """Build our step and the plain one, with the same weights."""
    first = ours(case)
    return first, baseline(case, first.state.params)


def check_agreement(case: Case, first: Step, second: Step, num_steps: int = 2) -> float:
    """Run both for some steps and return the largest relative difference of loss and gradient norm.

    Raises:
        AssertionError: they compute different things, so their speeds cannot be compared.
    """
    worst = 0.0
    for seed in range(num_steps):
        batch = case.batch(seed)
        one, two = first(batch), second(batch)
        for name in ("loss", "grad_norm"):
            worst = max(worst, abs(float(one[name]) / float(two[name]) - 1))
    assert worst < TOLERANCE[case.dtype], f"{case}: the two steps differ by {worst:.1e}"
    return worst


def block_seconds(runner: Runner, batches: list[Any]) -> tuple[float, float]:
    """Return wall seconds and processor seconds of one step, from a block that ends when the device is done."""
    start, used = time.perf_counter(), time.process_time()
    for batch in batches:
        metrics = runner(batch)
    jax.block_until_ready((runner.state, metrics))
    return (time.perf_counter() - start) / len(batches), (time.process_time() - used) / len(batches)


def speed(case: Case, num_blocks: int, block_steps: int) -> dict[str, Any]:
    """Time both steps in turn; the ratio is the median over pairs of neighbouring blocks."""
    first, second = pair(case)
    difference = check_agreement(case, first, second)
    batches = [case.batch(seed) for seed in range(block_steps)]
    pairs = []
    for index in range(num_blocks):
        order = (first, second) if index % 2 == 0 else (second, first)
        seconds = {id(runner): block_seconds(runner, batches) for runner in order}
        pairs.append((seconds[id(first)], seconds[id(second)]))
    ratios = sorted(b[0] / a[0] for a, b in pairs)
    tokens, quarter = case.batch_size * case.seq_len, len(ratios) // 4
    return {
        "ours": tokens / statistics.median(a[0] for a, _ in pairs),
        "plain": tokens / statistics.median(b[0] for _, b in pairs),
        "ratio": statistics.median(ratios),
        "processor_ratio": statistics.median(b[1] / a[1] for a, b in pairs),
        "low": ratios[quarter],
        "high": ratios[-1 - quarter],
        "difference": difference,
    }


def compile_time(case: Case) -> dict[str, Any]:
    """Time tracing and compilation of both steps."""
    answer = {}
    for name, runner in zip(("ours", "plain"), pair(case), strict=True):
        trace, compiled, _ = runner.compile(case.batch())
        answer[name] = {"trace": trace, "compile": compiled}
    return answer


def full_logits_loss(model: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """Return the same loss as the model's own, through the logits of all tokens at once."""
    logits = model.logits(model.run(model.embed(batch), batch))
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], axis=-1)
    return -jnp.sum(picked[..., 0] * batch["weights"]), jnp.sum(batch["weights"])


def peak_bytes(compiled: Any) -> int:
    """Return what the compiled step needs on one device: temporaries, outputs and arguments, shared ones once."""
    sizes = compiled.memory_analysis()
    whole = sizes.temp_size_in_bytes + sizes.output_size_in_bytes + sizes.argument_size_in_bytes
    return whole - sizes.alias_size_in_bytes


def memory(case: Case) -> dict[str, Any]:
    """Return the peak bytes of our step with chunked and with full cross-entropy, and of the plain step."""
    chunked, full = ours(case), ours(case, full_logits_loss, drawn=False)
    runners = {"chunked": chunked, "full": full, "plain": baseline(case, chunked.state.params)}
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(chunked.state))
    return {"state": held, **{name: peak_bytes(runner.compile(case.batch())[2]) for name, runner in runners.items()}}


def dispatch(case: Case, num_steps: int) -> dict[str, Any]:
    """Time the Python side of a step: placing the batch, and the call until it returns, the device being idle.

    The model is so small that the device's own work hardly counts; `run.py` holds the seconds against a real step.
    """
    first, second = pair(case)
    batch, answer = case.batch(), {}
    for name, runner in (("ours", first), ("plain", second)):
        jax.block_until_ready(runner(batch))
        placing, calling = [], []
        for _ in range(num_steps):
            start = time.perf_counter()
            placed = runner.place(batch)
            middle = time.perf_counter()
            runner.state, _ = runner.step(runner.state, placed)
            end = time.perf_counter()
            jax.block_until_ready(runner.state)
            placing.append(middle - start)
            calling.append(end - middle)
        answer[name] = {"place": statistics.median(placing), "call": statistics.median(calling)}
    return answer


QUESTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "speed": speed, "compile": compile_time, "memory": memory, "dispatch": dispatch,
}  # fmt: skip


def main(text: str) -> None:
    """Answer one question, given as JSON, by one line of JSON."""
    request = json.loads(text)
    question = QUESTIONS[request.pop("question")]
    print(json.dumps(question(Case(**request.pop("case")), **request)))


if __name__ == "__main__":
    main(sys.argv[1])
