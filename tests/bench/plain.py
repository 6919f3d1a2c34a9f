"""The baseline: one training step of the same decoder in plain JAX, one file, as a good engineer would write it.

Pre-norm RMSNorm, rotary positions (rotate-half), grouped-query attention, SwiGLU, a head of its own, full fp32
cross-entropy, AdamW with global-norm clipping. Weights are dicts of stacked arrays; the compiler places the
collectives. It knows nothing of the package under test.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


@dataclass(frozen=True)
class Shape:
    """Sizes and options of the decoder and of how it is run."""

    num_layers: int
    head_dim: int
    rope_base: float = 10_000.0
    norm_epsilon: float = 1e-5
    dtype: str = "float32"
    remat: bool = False
    scan: bool = True


AXES = ("data", "fsdp", "tensor")
BATCH = ("data", "fsdp")
SPECS = {
    "tokens": P("tensor", "fsdp"),
    "head": P("fsdp", "tensor"),
    "final_norm": P("fsdp"),
    "blocks": {
        "attention_norm": P(None, "fsdp"),
        "query": P(None, "fsdp", "tensor", None),
        "key": P(None, "fsdp", "tensor", None),
        "value": P(None, "fsdp", "tensor", None),
        "out": P(None, "tensor", None, "fsdp"),
        "mlp_norm": P(None, "fsdp"),
        "gate": P(None, "fsdp", "tensor"),
        "up": P(None, "fsdp", "tensor"),
        "down": P(None, "tensor", "fsdp"),
    },
}


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1) -> Mesh:
    """Lay the first devices out as ``data x fsdp x tensor``."""
    devices = jax.devices()[: data * fsdp * tensor]
    return jax.make_mesh((data, fsdp, tensor), AXES, (jax.sharding.AxisType.Auto,) * 3, devices=devices)


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """Normalise in fp32."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + epsilon)
    return wide.astype(x.dtype) * scale


def rotate(x: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    """Rotate ``[batch, seq, heads, head_dim]`` by the angles of its positions."""
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=-1)


def block(x: jax.Array, w: Any, cosine: jax.Array, sine: jax.Array, shape: Shape, place: Any) -> jax.Array:
    """Run one layer."""
    h = rms_norm(x, w["attention_norm"], shape.norm_epsilon)
    q = rotate(jnp.einsum("bte,ehd->bthd", h, w["query"]), cosine, sine)
    k = rotate(jnp.einsum("bte,ekd->btkd", h, w["key"]), cosine, sine)
    v = jnp.einsum("bte,ekd->btkd", h, w["value"])
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = place(x + jnp.einsum("bthd,hde->bte", attended, w["out"]))
    h = rms_norm(x, w["mlp_norm"], shape.norm_epsilon)
    return place(x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"])


def mean_loss(weights: Any, batch: Any, shape: Shape, mesh: Mesh) -> jax.Array:
    """Return the mean cross-entropy of the targets, in nats."""
    place = partial(jax.lax.with_sharding_constraint, shardings=NamedSharding(mesh, P(BATCH, None, None)))
    w = jax.tree.map(lambda x: x.astype(shape.dtype), weights)
    table = jax.lax.with_sharding_constraint(w["tokens"], NamedSharding(mesh, P("tensor", None)))
    x = place(table[batch["tokens"]])
    frequency = shape.rope_base ** (-jnp.arange(0, shape.head_dim, 2, dtype=jnp.float32) / shape.head_dim)
    angle = (jnp.arange(x.shape[1])[:, None] * frequency)[:, None, :]
    cosine, sine = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)

    def layer(x: jax.Array, one: Any) -> tuple[jax.Array, None]:
        return block(x, one, cosine, sine, shape, place), None

    if shape.remat:
        layer = jax.checkpoint(layer, prevent_cse=not shape.scan)
    if shape.scan:
        x = jax.lax.scan(layer, x, w["blocks"])[0]
    else:
        for index in range(shape.num_layers):
            x = layer(x, jax.tree.map(lambda stacked, i=index: stacked[i], w["blocks"]))[0]
    logits = (rms_norm(x, w["final_norm"], shape.norm_epsilon) @ w["head"]).astype(jnp.float32)
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], axis=-1)[..., 0]
    return jnp.sum(losses * batch["weights"]) / jnp.sum(batch["weights"])


def make_optimizer(learning_rate: float) -> optax.GradientTransformation:
    """Clip by global norm, then AdamW that decays all but the norms' scales."""

    def decays(weights: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: "norm" not in str(path[-1]), weights)

    adamw = optax.adamw(learning_rate, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, mask=decays)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def make_step(weights: Any, shape: Shape, mesh: Mesh, learning_rate: float) -> tuple[Any, Any]:
    """Place the weights and jit the step.

    Args:
        weights: host arrays, a tree like `SPECS`.
        shape: of the decoder.
        mesh: with axes ``data fsdp tensor``.
        learning_rate: constant.

    Returns:
        The state ``(weights, optimizer state)`` and ``step(state, batch) -> (state, metrics)``; the state is donated.
    """
    optimizer = make_optimizer(learning_rate)
    places = jax.tree.map(partial(NamedSharding, mesh), SPECS, is_leaf=lambda x: isinstance(x, P))
    weights = jax.tree.map(lambda x, place: jnp.copy(jax.device_put(x, place)), weights, places)
    whole = NamedSharding(mesh, P())
    moments = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, place: place,
        jax.eval_shape(optimizer.init, weights),
        places,
        transform_non_params=lambda _: whole,
    )
    state = (weights, jax.jit(optimizer.init, out_shardings=moments)(weights))

    def step(state: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        weights, moments = state
        loss, grads = jax.value_and_grad(mean_loss)(weights, batch, shape, mesh)
        updates, moments = optimizer.update(grads, moments, weights)
        return (optax.apply_updates(weights, updates), moments), {"loss": loss, "grad_norm": optax.tree.norm(grads)}

    places_of = ((places, moments), NamedSharding(mesh, P(BATCH)))
    return state, jax.jit(step, donate_argnums=0, in_shardings=places_of, out_shardings=((places, moments), whole))
