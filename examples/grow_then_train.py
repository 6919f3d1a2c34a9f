"""Train a small model, grow it, train on, and count what that saves: `python examples/grow_then_train.py --out study`.

A decoder learns Python from Python's own standard library. It is grown in several ways, each trained on, and beside
them the same large model is trained from scratch. Three questions are answered, in a table, `study.json` and a picture:

- what does the loss do in the first 64 steps after growth, by operator, with the optimizer's state and without it?
- at what share of its floating-point operations does a grown model reach the final loss of the one from scratch?
- and what is left of that when the small model's own training counts too?

Every loss is of the same held-out documents. "Not grown" is the small model trained on, at its own price: while it
still learns as fast as that, nobody needs a larger one, and growth only has to beat starting anew. `--quick` shows the
same in about a minute, on a model too small to mean much.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxpp import dims
from jaxpp.data import Data, DataConfig, open_data
from jaxpp.grow import Growth, Request, enlarge
from jaxpp.grow.ligo import learn
from jaxpp.grow.settings import settings_of
from jaxpp.models import DecoderConfig
from jaxpp.train import OptimizerConfig
from jaxpp.train.optimizer import make_optimizer

CHUNK = 32  # steps that are compiled as one
WARMUP = 32  # steps
WATCHED = (0, 1, 2, 4, 8, 16, 32, 64)  # steps after growth whose loss is told


@dataclass(frozen=True)
class Study:
    """Sizes of the study: one small model, and large ones of twice its width or twice its depth."""

    small: DecoderConfig = DecoderConfig(
        vocab_size=512, num_layers=4, embed_dim=48, num_heads=4, num_kv_heads=2, mlp_dim=128, max_positions=128,
        tied=True,
    )  # fmt: skip
    data: DataConfig = DataConfig(seq_len=128, batch_size=8, vocab_size=512)
    held_out_rows: int = 32
    source_steps: int = 512
    scratch_steps: int = 512
    grown_steps: int = 256  # of the arms that are trained on until they reach the loss of the one from scratch
    ligo_steps: int = 96  # in which LiGO learns its map
    ligo_rate: float = 2e-3
    rate: float = 8e-3  # of the small model
    # Last losses of the large model from scratch at 2e-3, 4e-3, 5.6e-3, 8e-3: 3.250, 3.213, 3.210, 3.275 (one seed).
    large_rate: float = 4e-3


QUICK = Study(
    small=DecoderConfig(
        vocab_size=257, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=64, max_positions=32, tied=True
    ),
    data=DataConfig(seq_len=32, batch_size=8, tokenizer="bytes", max_documents=60),
    held_out_rows=16, source_steps=128, scratch_steps=128, grown_steps=32, ligo_steps=16,
)  # fmt: skip


# Nearly all of the quick study is spent in the compiler, so it compiles badly; read when the first device is used.
HURRY = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


@dataclass(frozen=True)
class Arm:
    """One way to go on from the small model.

    Args:
        wishes: fields of `jaxpp.grow.Request`; none: the model is not grown.
        learned: by LiGO, which learns its map to the same target.
        carried: the optimizer's moments grow too, and each weight has the rate that follows from its growth; else the
            optimizer begins anew, at the rate that the large model has from scratch.
        to_the_end: trained for `Study.grown_steps`, not only for the steps that are watched.
    """

    wishes: Mapping[str, Any]
    learned: bool = False
    carried: bool = True
    to_the_end: bool = False


def arms(small: DecoderConfig) -> dict[str, Arm]:
    """Name the ways to go on from a small model; those of twice the width lead to one and the same large model."""
    heads, deep = 2 * small.num_heads, 2 * small.num_layers
    return {
        "not grown": Arm({}, to_the_end=True),
        "hypercloning": Arm(dict(width=2, noise_db=15.0), to_the_end=True),
        "hypercloning, new optimizer": Arm(dict(width=2, noise_db=15.0), carried=False, to_the_end=True),
        "hypercloning, diagonal": Arm(dict(width=2, noise_db=15.0, variant="diagonal"), to_the_end=True),
        "lemon": Arm(dict(width=2, operator="lemon")),
        "aki": Arm(dict(width=2, operator="aki", heads=heads)),
        "ligo, new optimizer": Arm(dict(width=2), learned=True, carried=False, to_the_end=True),
        "identity": Arm(dict(depth=deep, depth_op="identity")),
        "stack": Arm(dict(depth=deep, depth_op="stack")),
    }


@dataclass(frozen=True)
class Curve:
    """A run: its held-out loss after so many steps, in nats per token, and the operations of a step."""

    losses: Mapping[int, float]
    flops_per_step: float

    @property
    def last(self) -> float:
        """The loss at the end."""
        return self.losses[max(self.losses)]

    def steps_to(self, loss: float) -> float | None:
        """Return the step at which the loss is first as low as this, on straight lines between evaluations."""
        steps = sorted(self.losses)
        for before, after in zip(steps, steps[1:], strict=False):
            high, low = self.losses[before], self.losses[after]
            if low <= loss:
                return before + (after - before) * (high - loss) / (high - low) if high > loss else before
        return None


class Trainer:
    """Trains models on consecutive batches, many steps in one call, and evaluates them on rows that stay the same."""

    def __init__(self, study: Study, data: Data):
        """Open the held-out rows, drawn from all over the held-out documents."""
        self.study, self.data, self.compiled = study, data, {}
        rows = [batch for batch in data.held_out_batches(1)]
        chosen = np.linspace(0, len(rows) - 1, study.held_out_rows).astype(int)
        self.held_out = jax.tree.map(lambda *row: np.concatenate(row), *(dict(rows[i]) for i in chosen))

    def run(
        self, model: Any, optimizer: OptimizerConfig, num_steps: int, *, first: int = 0, moments: Any = None
    ) -> tuple[Any, Any, Curve]:
        """Train on the batches from `first` on; return the model, its optimizer state and its curve."""
        graph, params = nnx.split(model)
        key = repr((model.config, optimizer))
        chunk = self.compiled.setdefault(key, self.chunk(graph, optimizer))
        moments = make_optimizer(optimizer).init(params) if moments is None else moments
        losses = {}
        for start in range(0, num_steps, CHUNK):
            after = np.arange(start, start + CHUNK) + 1
            told = (after % 16 == 0) | np.isin(after, WATCHED)
            stacked = self.batches(first + start)
            params, moments, found = chunk(params, moments, stacked, told, self.held_out)
            losses |= {int(step): float(loss) for step, loss in zip([start, *after], found, strict=True) if loss > 0}
        trained = nnx.merge(graph, params)
        return trained, moments, Curve(losses, self.flops_per_step(trained))

    def flops_per_step(self, model: Any) -> float:
        """Count the operations of a training step, forward and backward."""
        data = self.study.data
        return dims.flops_per_token(nnx.state(model, nnx.Param), data.seq_len) * data.batch_size * data.seq_len

    def batches(self, first: int) -> Any:
        """Stack the batches of one chunk."""
        with self.data.train(start_step=first, steps=CHUNK) as loader:
            return jax.tree.map(lambda *batch: np.stack(batch), *map(dict, loader))

    def chunk(self, graph: Any, config: OptimizerConfig) -> Any:
        """Return a jitted function that trains for `CHUNK` steps; the loss is 0 where it is not asked for."""
        optimizer = make_optimizer(config)

        def mean_loss(params: Any, batch: Any) -> jax.Array:
            total, weight = nnx.merge(graph, params).loss(batch)
            return total / weight

        @jax.jit
        def train(params: Any, moments: Any, batches: Any, told: jax.Array, held_out: Any) -> Any:
            def step(carry: Any, given: Any) -> Any:
                params, moments = carry
                batch, is_told = given
                updates, moments = optimizer.update(jax.grad(mean_loss)(params, batch), moments, params)
                params = optax.apply_updates(params, updates)
                loss = jax.lax.cond(is_told, lambda: mean_loss(params, held_out), lambda: jnp.float32(0))
                return (params, moments), loss

            before = mean_loss(params, held_out)
            (params, moments), losses = jax.lax.scan(step, (params, moments), (batches, told))
            return params, moments, jnp.concatenate([before[None], losses])

        return train


def draw_model(config: DecoderConfig, seed: int) -> Any:
    """Draw a model in one compiled function."""
    return nnx.jit(lambda: config.build(nnx.Rngs(seed)))()


def schedule(peak: float, num_steps: int, *, before: int = 0, warmup: int = 0, rates: Any = None) -> OptimizerConfig:
    """Return AdamW at a constant rate that falls to a tenth in the second half of the steps after those before."""
    return OptimizerConfig(
        learning_rate=peak, schedule="wsd", warmup_steps=warmup, schedule_steps=before + num_steps,
        decay_steps=num_steps // 2, rates=dict(rates or {}),
    )  # fmt: skip


def carried(study: Study, rates: Mapping[str, float] | None = None) -> OptimizerConfig:
    """Return the optimizer of the small model and of what goes on from it: one schedule, its count carried over."""
    return schedule(study.rate, study.grown_steps, before=study.source_steps, warmup=WARMUP, rates=rates)


def grow(trainer: Trainer, arm: Arm, small: Any, seed: int) -> tuple[Growth, float]:
    """Return how an arm grows the small model, and the operations that it takes to know how."""
    study = trainer.study
    growth = Request(**arm.wishes, seed=seed).growth(study.small)
    if not arm.learned:
        return growth, 0.0
    how: dict[str, Any] = dict(num_steps=study.ligo_steps, learning_rate=study.ligo_rate, seed=seed)
    first = max(0, study.source_steps - study.ligo_steps)  # batches that the small model has seen: no new data
    with trainer.data.train(start_step=first, steps=study.ligo_steps) as loader:
        batches: Any = map(dict, loader)
        step = learn(small, growth.target, batches, **how)
    bigger = nnx.eval_shape(lambda: growth.target.build(nnx.Rngs(0)))
    # Each step is one of the large model; the products that make its weights, a few percent of it, are left out.
    return Growth((step,)), study.ligo_steps * trainer.flops_per_step(bigger)


def go_on(trainer: Trainer, arm: Arm, small: Any, moments: Any, seed: int) -> tuple[Curve, dict[str, Any]]:
    """Grow the small model as an arm says, and train on with the batches that follow; return what is known of it.

    The carried optimizer goes on at the small model's rate, times a factor for each weight: a weight that reads a dim
    of twice the size moves the function twice as far, so its factor is a half. Nothing is warmed up again.
    """
    study = trainer.study
    model, exact, rates, operator_flops = small, True, {}, 0.0
    if arm.wishes:
        growth, operator_flops = grow(trainer, arm, small, seed)
        model, moments = enlarge(small, growth, opt_state=moments)
        exact, rates = not growth.gap, settings_of(growth).rates
    optimizer = carried(study, rates) if arm.carried else schedule(study.large_rate, study.grown_steps)
    num_steps = study.grown_steps if arm.to_the_end else min(WATCHED[-1], study.grown_steps)
    given = moments if arm.carried else None
    _, _, curve = trainer.run(model, optimizer, num_steps, first=study.source_steps, moments=given)
    return curve, {"exact": exact, "operator_flops": operator_flops}


def study_once(study: Study, data: Data, seed: int) -> dict[str, Any]:
    """Run all of the study; return its curves and what they come to."""
    trainer = Trainer(study, data)
    constant = carried(study)  # it does not fall before growth
    small, moments, source = trainer.run(draw_model(study.small, seed), constant, study.source_steps)
    say("small, from scratch", source)
    large = draw_model(Request(width=2).growth(study.small).target, seed + 1)
    falling = schedule(study.large_rate, study.scratch_steps, warmup=WARMUP)
    _, _, scratch = trainer.run(large, falling, study.scratch_steps)
    say("large, from scratch", scratch)
    rows = {}
    for name, arm in arms(study.small).items():
        curve, facts = go_on(trainer, arm, small, moments, seed)
        say(name, curve)
        rows[name] = {
            **asdict(arm), **facts, **asdict(curve),
            "shares": shares(study, scratch, source, curve, facts["operator_flops"]) if arm.to_the_end else None,
        }  # fmt: skip
    return {"seed": seed, "source": asdict(source), "scratch": asdict(scratch), "arms": rows}


def shares(study: Study, scratch: Curve, source: Curve, curve: Curve, operator_flops: float) -> dict[str, Any] | None:
    """Return what it takes to reach the final loss of the model from scratch, over what that took, in three accounts.

    None where the loss is not reached. A share s is a saving of 1 - s, and a speed-up of 1 / s - 1.
    """
    if (steps := curve.steps_to(scratch.last)) is None:
        return None
    whole = study.scratch_steps * scratch.flops_per_step
    target = steps * curve.flops_per_step
    small = target + study.source_steps * source.flops_per_step
    found = {"target only": target, "with source": small, "with source and operator": small + operator_flops}
    return {name: flops / whole for name, flops in found.items()}


def say(name: str, curve: Curve) -> None:
    """Say how a run went."""
    print(f"{name}: loss {curve.losses[0]:.3f} -> {curve.last:.3f} in {max(curve.losses)} steps", flush=True)


def table(run: Mapping[str, Any]) -> str:
    """Write losses after growth and shares of operations as two tables for people."""
    arms, steps = run["arms"], [step for step in WATCHED if step in run["arms"]["hypercloning"]["losses"]]
    lines = ["", f"{'held-out loss (nats per token) after':38}{''.join(f'{step:>7}' for step in steps)}  steps"]
    for name, arm in arms.items():
        losses = "".join(f"{arm['losses'][step]:7.3f}" for step in steps)
        lines.append(f"{name:28}{'exact' if arm['exact'] else 'inexact':>10}{losses}")
    scratch = run["scratch"]
    last = scratch["losses"][max(scratch["losses"])]
    lines += ["", f"operations until the loss is {last:.3f}, the last one of the large model from scratch; its own: 1"]
    lines.append(f"{'':28}{'counted':>26}{'share':>8}{'saving':>9}{'speed-up':>10}")
    for name, arm in arms.items():
        if arm["to_the_end"] and arm["shares"] is None:
            lines.append(f"{name:28}{'loss not reached':>26}")
        for account, share in (arm["shares"] or {}).items():
            lines.append(f"{name:28}{account:>26}{share:8.2f}{1 - share:9.0%}{1 / share - 1 if share else 0:10.0%}")
    return "\n".join(lines)


def draw(study: Study, run: Mapping[str, Any], path: Path) -> None:
    """Draw loss against operations, and loss in the first steps after growth."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: it needs matplotlib, pip install 'jaxpp-toolkit[plot]'")
        return
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)

    def against_flops(curve: Mapping[str, Any], paid: float = 0.0, **style: Any) -> None:
        flops = [(paid + step * curve["flops_per_step"]) / 1e12 for step in curve["losses"]]
        left.plot(flops, list(curve["losses"].values()), **style)

    against_flops(run["scratch"], color="black", label="large, from scratch")
    for i, (name, arm) in enumerate(run["arms"].items()):
        losses = [arm["losses"][step] for step in WATCHED if step in arm["losses"]]
        wide = dict(linewidth=6, alpha=0.4) if name == "not grown" else {}  # others lie on top of it
        style = "-" if arm["exact"] else "--"
        right.plot(range(len(losses)), losses, color=f"C{i}", linestyle=style, marker=".", label=name, **wide)
        if arm["to_the_end"]:
            against_flops(arm, color=f"C{i}", label=name)
            paid = study.source_steps * run["source"]["flops_per_step"] + arm["operator_flops"]
            against_flops(arm, paid, color=f"C{i}", linestyle=":")
    first, last = run["arms"]["not grown"]["losses"][0], run["scratch"]["losses"][study.scratch_steps]
    left.plot([], [], "k:", label="the small model's training (and LiGO's) counted too")
    left.axhline(last, color="black", linewidth=0.6)
    left.set(xlabel="floating-point operations of training (10^12)", ylabel="held-out loss (nats per token)")
    left.set(ylim=(None, first + 1.3), title="to the last loss of the large model from scratch")
    right.set(xlabel="steps after growth", ylabel="held-out loss (nats per token)", ylim=(None, first + 0.5))
    right.set(title="the first steps (dashed: growth is not exact)")
    right.set_xticks(range(len(WATCHED)), [str(step) for step in WATCHED])
    for axes in (left, right):
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=100)


def main(words: Sequence[str] | None = None) -> None:
    """Run the study for each seed, print its tables, and write them and a picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("study"), help="directory of study.json and the picture")
    parser.add_argument("--quick", action="store_true", help="about a minute, on a model too small to mean much")
    parser.add_argument("--seeds", type=int, default=1, help="how often, each with weights and noise of its own")
    for name in ("source", "scratch", "grown"):
        parser.add_argument(f"--{name}-steps", type=int, help=f"in place of {getattr(Study, f'{name}_steps')}")
    given = parser.parse_args(words)
    sizes = {key: value for key, value in vars(given).items() if key.endswith("_steps") and value}
    if wrong := [f"--{key.replace('_', '-')} {value}" for key, value in sizes.items() if value < 1 or value % CHUNK]:
        parser.error(f"{', '.join(wrong)}: a multiple of {CHUNK} steps is needed, as so many are compiled as one")
    study = replace(QUICK if given.quick else Study(), **sizes)
    if given.quick:
        os.environ.setdefault("XLA_FLAGS", HURRY)
    given.out.mkdir(parents=True, exist_ok=True)
    data = open_data(study.data)
    runs = [study_once(study, data, 10 * seed) for seed in range(given.seeds)]
    for run in runs:
        print(table(run))
    (given.out / "study.json").write_text(json.dumps({"study": asdict(study), "runs": runs}, indent=1))
    draw(study, runs[0], given.out / "grow_then_train.png")


if __name__ == "__main__":
    main()
