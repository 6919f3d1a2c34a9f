"""Stages of a few numbers, and what plain JAX makes of them one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpp.pipeline import PipelineTrainer, Place, clip_by_norm, fetch_states, make_pipeline, make_places, stage_key
from jaxpp.schedule import build

WIDTH = 8
ROWS = 2  # of a microbatch
KEY = jax.random.key(7)


def first(params: Any, x: Any, batch: Any, key: Any) -> Any:
    """Read the microbatch; an integer goes along."""
    return {"h": jnp.tanh(batch["x"] @ params["w"]), "passed": batch["one"]}


def middle(params: Any, x: Any, batch: Any, key: Any) -> Any:
    """One layer with dropout, where there is a key."""
    h = x["h"]
    if key is not None:
        h = h * jax.random.bernoulli(key, 0.8, h.shape)
    return {"h": jnp.tanh(h @ params["w"] + params["b"]), "passed": x["passed"] + 1}


def last(params: Any, x: Any, batch: Any, key: Any) -> Any:
    """Weighted squares, times what went along."""
    y = x["h"] @ params["w"] + params["b"]
    return jnp.sum(y**2 * (batch["weight"] * x["passed"])[:, None]), jnp.sum(batch["weight"])


def stages(count: int, widths: Sequence[int] = (WIDTH,)) -> list[tuple[Callable[..., Any], Any]]:
    """Return that many stages; the widths between them are repeated."""
    draw = np.random.RandomState(count)
    sizes = [WIDTH, *(widths[i % len(widths)] for i in range(count))]

    def weights(stage: int) -> dict[str, jax.Array]:
        shape = sizes[stage : stage + 2]
        found = {"w": draw.normal(size=shape, scale=shape[0] ** -0.5)}
        if stage:
            found["b"] = draw.normal(size=shape[1], scale=0.1)
        return {name: jnp.asarray(value, jnp.float32) for name, value in found.items()}

    return [((first if s == 0 else last if s == count - 1 else middle), weights(s)) for s in range(count)]


def batch(rows: int) -> dict[str, np.ndarray]:
    """Return a batch of that many rows."""
    draw = np.random.RandomState(rows)
    x, weight = draw.normal(size=(rows, WIDTH)), draw.uniform(0.1, 1, size=rows)
    return {"x": x.astype(np.float32), "weight": weight.astype(np.float32), "one": np.ones(rows, np.int32)}


@partial(jax.jit, static_argnums=0)
def _one(functions: tuple[Callable[..., Any], ...], params: Any, part: Any, key: Any, microbatch: Any) -> Any:
    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        x: Any = None
        for stage, (function, own) in enumerate(zip(functions, params, strict=True)):
            x = function(own, x, part, None if key is None else stage_key(key, 0, microbatch, stage))
        return x

    return jax.value_and_grad(loss, has_aux=True)(params)


def plain(known: Sequence[Any], data: Any, num_microbatches: int, key: Any = None) -> tuple[float, list[Any]]:
    """Return mean loss and gradients, stage after stage on one device."""
    functions, params = tuple(f for f, _ in known), [p for _, p in known]
    rows, total, weight, sums = len(data["x"]) // num_microbatches, 0.0, 0.0, None
    for j in range(num_microbatches):
        part = {name: value[j * rows : (j + 1) * rows] for name, value in data.items()}
        (loss, own), grads = _one(functions, params, part, key, j)
        total, weight = total + float(loss), weight + float(own)
        sums = grads if sums is None else jax.tree.map(jnp.add, sums, grads)
    return total / weight, jax.tree.map(lambda g: np.asarray(g) / weight, sums)


def tied_stages() -> list[tuple[Callable[..., Any], Any]]:
    """Return four stages of which the first and the last share a table."""

    def embed(params: dict, x: None, batch: dict, key: None) -> jax.Array:
        return params["table"][batch["token"]] * params["scale"]

    def head(params: dict, x: jax.Array, batch: dict, key: None) -> tuple[jax.Array, jax.Array]:
        logits = jnp.tanh(x) @ params["table"].T
        return -jnp.sum(jax.nn.log_softmax(logits)[jnp.arange(len(x)), batch["target"]]), jnp.float32(len(x))

    def layer(params: jax.Array, x: jax.Array, batch: dict, key: None) -> jax.Array:
        return jnp.tanh(x @ params)

    draw = np.random.RandomState(0)
    table, *layers = (jnp.asarray(draw.normal(size=(n, WIDTH)), jnp.float32) for n in (5, WIDTH, WIDTH))
    return [(embed, {"scale": jnp.float32(2), "table": table}), *((layer, w) for w in layers), (head, {"table": table})]


def tokens(rows: int) -> dict[str, np.ndarray]:
    """Return a batch for the tied stages."""
    draw = np.random.RandomState(rows)
    return {"token": draw.randint(0, 5, rows), "target": draw.randint(0, 5, rows)}


TIED = [((0, "table"), (3, "table"))]


def train(name: str, ranks: int, mesh: str | None) -> list[dict[str, float]]:
    """Train the tied stages for three steps and return what each told."""
    known = tied_stages()
    made = make_pipeline(known, build(name, ranks, 4), mesh, TIED)
    trainer = PipelineTrainer(made, optax.chain(clip_by_norm(0.1), optax.adamw(1e-2)))
    state, told = trainer.init(made.lay_out([params for _, params in known])), []
    for _ in range(3):
        state, metrics = trainer.step(state, tokens(8))
        told.append({key: float(value) for key, value in metrics.items()})
    loss, weight = (one[made.here] for one in made.losses(state.params, tokens(8)))
    weights = jax.tree.leaves(fetch_states(made, state.params))
    size = sum(float(np.square(leaf).sum()) for leaf in weights)
    return [*told, {"loss": float(loss), "weight": float(weight), "weights": size}]


@cache
def places(ranks: int) -> tuple[Place, ...]:
    """Return one device for each rank, with all that was compiled for them."""
    return make_places(f"stage:{ranks}", ranks, jax.devices()[:ranks])


def alike(found: Any, wanted: Any, tolerance: float = 1e-6) -> None:
    """Compare trees leaf by leaf, to a part of each leaf's largest value where that is above 1."""

    def one(found: Any, wanted: Any) -> None:
        largest = max(1.0, float(np.max(np.abs(wanted), initial=0)))
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance * largest)

    jax.tree.map(one, found, wanted)
